//! Router and experts.
//!
//! The rows of a step are grouped by expert, so that an expert's weights are read once a step. A row's sum over its experts
//! runs ascending by expert, whatever the other rows chose.

use super::{
    Cpu, CpuBuffer, CpuMatrix, CpuRouting, CpuVector,
    dense::{self, Input},
    pool::{Chunks, Panels},
    simd::{
        pack::Order,
        product::{self, PackedRows, Product},
    },
    types::{require, require_equal},
};
use crate::{Error, Experts, Result, RouterRule, Swiglu};

/// Keeps the sum of chosen scores from being zero.
const TINY: f32 = 1e-20;

/// [`crate::Backend::route`].
pub(super) fn route(
    cpu: &mut Cpu,
    rows: usize,
    gate: &CpuMatrix,
    bias: &CpuVector,
    rule: RouterRule,
    x: &CpuBuffer,
    routing: &mut CpuRouting,
) -> Result<()> {
    let experts = gate.out();
    require_equal("route: values of the bias", experts, bias.len())?;
    require_equal("route: experts of the routing", experts, routing.num_experts())?;
    require_equal("route: choices a row", rule.top, routing.top())?;
    require("route: rows of the routing", rows, routing.rows())?;
    x.require("route: the input", rows, gate.columns())?;
    check_rule(rule, experts)?;
    let order = Order::of(gate);
    dense::pack(&cpu.pool, cpu.isa, &mut cpu.dense, order, rows, Input::of(x, gate.columns()))?;
    let mut scores = std::mem::take(&mut cpu.dense.scores);
    scores.grow("router scores", 2 * routing.rows() * experts)?;
    let packed = dense::packed(&cpu.dense, gate);
    let rows_a_task = ((1 << 16) / (experts * gate.columns()).max(1)).clamp(1, 64);
    let choices = rows * rule.top;
    let parts = (
        Chunks::new(&mut scores.as_mut_slice()[..2 * rows * experts], 2 * rows_a_task * experts),
        Chunks::new(&mut routing.experts[..choices], rows_a_task * rule.top),
        Chunks::new(&mut routing.weights[..choices], rows_a_task * rule.top),
    );
    let isa = cpu.isa;
    cpu.pool.split(parts, |task, (scores, chosen, weights), scratch| {
        let count = chosen.len() / rule.top;
        let (scores, biased) = scores.split_at_mut(count * experts);
        let x = PackedRows { first: task * rows_a_task, ..packed };
        let [sums] = scratch.floats([product::scratch(count)]);
        isa.run(Product { matrix: gate, outputs: 0..experts, x, rows: count, sums, y: scores });
        isa.sigmoid(scores);
        for row in 0..count {
            let scores = &scores[row * experts..(row + 1) * experts];
            let biased = &mut biased[row * experts..(row + 1) * experts];
            biased.copy_from_slice(scores);
            isa.add(bias.as_slice(), biased);
            let chosen = &mut chosen[row * rule.top..(row + 1) * rule.top];
            choose(rule, biased, chosen);
            let weights = &mut weights[row * rule.top..(row + 1) * rule.top];
            weigh(rule, scores, chosen, weights);
            // The choice among the others would look healthy: a score that is no number must be seen in the result.
            if biased.iter().any(|score| score.is_nan()) {
                weights.fill(f32::NAN);
            }
        }
    });
    cpu.dense.scores = scores;
    group(routing, choices);
    Ok(())
}

fn check_rule(rule: RouterRule, experts: usize) -> Result<()> {
    let fail = |what, needed, available| Err(Error::Capacity { what, needed, available });
    if rule.top == 0 || rule.groups == 0 || rule.top_groups == 0 || rule.top_groups > rule.groups {
        return fail("route: the rule has at least one choice and one group", 1, 0);
    }
    if !experts.is_multiple_of(rule.groups) {
        return fail("route: experts fall into equal groups", rule.groups, experts);
    }
    require("route: experts in the kept groups", rule.top, experts / rule.groups * rule.top_groups)
}

/// Whether a score comes before another one that has a lower index: only when it is greater; NaN comes last.
fn beats(score: f32, other: f32) -> bool {
    score > other || (other.is_nan() && !score.is_nan())
}

/// Index of the best of `scores` among those that `open` admits; the lowest of equal ones.
fn best(scores: &[f32], open: impl Fn(usize) -> bool) -> Option<usize> {
    let mut found: Option<usize> = None;
    for (i, &score) in scores.iter().enumerate() {
        if open(i) && found.is_none_or(|f| beats(score, scores[f])) {
            found = Some(i);
        }
    }
    found
}

/// The `top` experts by biased score from the best groups, ascending. A group's score is the sum of its two best.
fn choose(rule: RouterRule, biased: &[f32], chosen: &mut [u32]) {
    let size = biased.len() / rule.groups;
    // How many groups come before group `g`; kept are those with fewer than `top_groups`.
    let group_score = |g: usize| {
        let group = &biased[g * size..(g + 1) * size];
        let Some(first) = best(group, |_| true) else { return f32::NAN };
        group[first] + best(group, |i| i != first).map_or(0.0, |second| group[second])
    };
    let kept = |g: usize| {
        let own = group_score(g);
        let before = (0..rule.groups)
            .filter(|&o| o != g && if o < g { !beats(own, group_score(o)) } else { beats(group_score(o), own) });
        rule.groups == rule.top_groups || before.count() < rule.top_groups
    };
    let mut len = 0;
    for g in (0..rule.groups).filter(|&g| kept(g)) {
        for e in g * size..(g + 1) * size {
            // Insertion into the list of the best so far, best first; later experts have higher indices.
            let place = chosen[..len].partition_point(|&c| !beats(biased[e], biased[c as usize]));
            if place < chosen.len() {
                len = (len + 1).min(chosen.len());
                chosen.copy_within(place..len - 1, place + 1);
                chosen[place] = e as u32;
            }
        }
    }
    chosen.sort_unstable();
}

/// Weights of the chosen experts: their scores without bias, normalised if the rule says so, times the factor.
fn weigh(rule: RouterRule, scores: &[f32], chosen: &[u32], weights: &mut [f32]) {
    let mut sum = 0.0;
    for (w, &e) in weights.iter_mut().zip(chosen) {
        *w = scores[e as usize];
        sum += *w;
    }
    for w in weights {
        if rule.normalize {
            *w /= sum + TINY;
        }
        *w *= rule.scale;
    }
}

/// Groups the first `choices` choices by expert (counting sort).
fn group(routing: &mut CpuRouting, choices: usize) {
    let CpuRouting { experts, grouped, starts, .. } = routing;
    starts.fill(0);
    for &e in &experts[..choices] {
        starts[e as usize] += 1;
    }
    let mut end = 0;
    for start in starts.iter_mut() {
        end += *start;
        *start = end;
    }
    // Filling each group from its end makes its start come out right and keeps it ascending.
    for choice in (0..choices).rev() {
        let start = &mut starts[experts[choice] as usize];
        *start -= 1;
        grouped[*start as usize] = choice as u32;
    }
}

/// Checks the experts and gives (input, width, output) of the routed ones.
fn check_experts(experts: &Experts<Cpu>, routing: &CpuRouting, rows: usize) -> Result<(usize, usize, usize)> {
    require_equal("experts of the routing", experts.routed.len(), routing.num_experts())?;
    require("rows of the routing", rows, routing.rows())?;
    let Some(first) = experts.routed.first() else {
        return Err(Error::Capacity { what: "routed experts", needed: 1, available: 0 });
    };
    let (input, width, out) = (first.gate.weight.columns(), first.gate.weight.out(), first.down.weight.out());
    for expert in experts.routed.iter().chain(&experts.shared) {
        dense::check_swiglu(expert, input)?;
        require_equal("experts: rows of down", out, expert.down.weight.out())?;
    }
    for expert in &experts.routed {
        require_equal("experts: width of the routed experts", width, expert.gate.weight.out())?;
    }
    Ok((input, width, out))
}

/// Packs the rows in every order that `matrices` need.
fn pack_for<'a>(
    cpu: &mut Cpu,
    rows: usize,
    input: Input<'_>,
    matrices: impl Iterator<Item = &'a CpuMatrix>,
) -> Result<()> {
    let mut done = [false; 3];
    for matrix in matrices {
        let order = Order::of(matrix);
        if !std::mem::replace(&mut done[order as usize], true) {
            dense::pack(&cpu.pool, cpu.isa, &mut cpu.dense, order, rows, input)?;
        }
    }
    Ok(())
}

/// [`crate::Backend::moe_up`].
pub(super) fn moe_up(
    cpu: &mut Cpu,
    rows: usize,
    experts: &Experts<Cpu>,
    routing: &CpuRouting,
    x: &CpuBuffer,
    act: &mut CpuBuffer,
    shared_act: &mut CpuBuffer,
) -> Result<()> {
    let (input, width, _) = check_experts(experts, routing, rows)?;
    let (top, limit) = (routing.top(), experts.limit);
    let choices = rows * top;
    x.require("moe_up: the input", rows, input)?;
    act.require("moe_up: the activation", choices, width)?;
    let all = experts.routed.iter().chain(&experts.shared).flat_map(|e| [&e.gate.weight, &e.up.weight]);
    pack_for(cpu, rows, Input::of(x, input), all)?;
    let cpu = &*cpu;
    let stride = act.width();
    let columns = dense::outputs_a_task(cpu.threads(), choices, width, 2 * input);
    let panels = Panels::new(act.as_mut_slice(), choices, stride, 0, width, columns);
    cpu.pool.split(panels, |_, mut panel, scratch| {
        let columns = panel.start()..panel.start() + panel.width();
        for (e, Swiglu { gate, up, .. }) in experts.routed.iter().enumerate() {
            let list = routing.choices(e);
            let rows = |matrix| PackedRows { list: Some(list), divisor: top, ..dense::packed(&cpu.dense, matrix) };
            dense::multiply(cpu.isa, gate, columns.clone(), rows(&gate.weight), list.len(), scratch, |i, y| {
                panel.row_mut(list[i] as usize).copy_from_slice(y);
            });
            dense::multiply(cpu.isa, up, columns.clone(), rows(&up.weight), list.len(), scratch, |i, y| {
                cpu.isa.clamped_swiglu(panel.row_mut(list[i] as usize), y, limit);
            });
        }
    });
    if let Some(shared) = &experts.shared {
        shared_act.require("moe_up: the shared activation", rows, shared.gate.weight.out())?;
        dense::gated(cpu, rows, shared, limit, shared_act);
    }
    Ok(())
}

/// [`crate::Backend::moe_down`].
pub(super) fn moe_down(
    cpu: &mut Cpu,
    rows: usize,
    experts: &Experts<Cpu>,
    routing: &CpuRouting,
    act: &CpuBuffer,
    shared_act: &CpuBuffer,
    out: &mut CpuBuffer,
) -> Result<()> {
    let (_, width, hidden) = check_experts(experts, routing, rows)?;
    let top = routing.top();
    let choices = rows * top;
    act.require("moe_down: the activation", choices, width)?;
    out.require("moe_down: the output", rows, hidden)?;
    pack_for(cpu, choices, Input::of(act, width), experts.routed.iter().map(|e| &e.down.weight))?;
    let isa = cpu.isa;
    let stride = out.width();
    let columns = dense::outputs_a_task(cpu.threads(), choices, hidden, width);
    let panels = Panels::new(out.as_mut_slice(), rows, stride, 0, hidden, columns);
    let work = &cpu.dense;
    cpu.pool.split(panels, |_, mut panel, scratch| {
        let columns = panel.start()..panel.start() + panel.width();
        for row in 0..rows {
            panel.row_mut(row).fill(0.0);
        }
        for (e, Swiglu { down, .. }) in experts.routed.iter().enumerate() {
            let list = routing.choices(e);
            let x = PackedRows { list: Some(list), ..dense::packed(work, &down.weight) };
            dense::multiply(isa, down, columns.clone(), x, list.len(), scratch, |i, y| {
                let choice = list[i] as usize;
                isa.axpy(routing.weights[choice], y, panel.row_mut(choice / top));
            });
        }
    });
    let Some(shared) = &experts.shared else { return Ok(()) };
    let width = shared.gate.weight.out();
    shared_act.require("moe_down: the shared activation", rows, width)?;
    pack_for(cpu, rows, Input::of(shared_act, width), std::iter::once(&shared.down.weight))?;
    let work = &cpu.dense;
    let columns = dense::outputs_a_task(cpu.threads(), rows, hidden, width);
    let panels = Panels::new(out.as_mut_slice(), rows, stride, 0, hidden, columns);
    cpu.pool.split(panels, |_, mut panel, scratch| {
        let columns = panel.start()..panel.start() + panel.width();
        let x = dense::packed(work, &shared.down.weight);
        dense::multiply(isa, &shared.down, columns, x, rows, scratch, |row, y| {
            isa.add(y, panel.row_mut(row));
        });
    });
    Ok(())
}
