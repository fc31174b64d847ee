//! The chain of routed INT4 experts: work list with the rows in their slots, gate and up with SwiGLU, down, combination.

use glimmer_tensor::{Backend, Experts, Linear, Result, Swiglu};

use super::{
    Contents, Row, Unit, fill, random_matrix,
    slice::{RANKS, ROWS, of_ranks, slice},
    timed,
};
use crate::{
    backend::Cuda,
    kernels::moe,
    types::{CudaMatrix, GROUP, INT4_BLOCK_BYTES, INT4_ROWS, Kind, unique},
};

/// A slice of the experts and the work to be measured.
#[derive(Debug, Clone, Copy)]
pub struct Chain {
    /// Experts.
    pub experts: usize,
    /// Experts a row.
    pub top: usize,
    /// Width of the model.
    pub hidden: usize,
    /// Width of an expert's slice.
    pub width: usize,
    /// Rows.
    pub rows: usize,
}

fn int4(cuda: &Cuda, out: usize, columns: usize) -> Result<Linear<Cuda>> {
    let data = cuda
        .memory
        .uninitialized("random weights", out.next_multiple_of(INT4_ROWS) / 8 * (columns / GROUP) * INT4_BLOCK_BYTES)?;
    fill(cuda, &data, Contents::Int4)?;
    let weight = CudaMatrix { kind: Kind::Int4, out, columns, pitch: columns, data, id: unique() };
    Ok(Linear { weight, bias: None })
}

fn bf16(cuda: &Cuda, out: usize, columns: usize) -> Result<Linear<Cuda>> {
    Ok(Linear { weight: random_matrix(cuda, out, columns)?, bias: None })
}

/// Full-size random experts in INT4.
///
/// # Errors
/// Errors of the device.
pub fn random_experts(cuda: &Cuda, chain: Chain) -> Result<Experts<Cuda>> {
    experts_of(cuda, chain, int4)
}

fn experts_of(
    cuda: &Cuda,
    Chain { hidden, width, experts, .. }: Chain,
    matrix: fn(&Cuda, usize, usize) -> Result<Linear<Cuda>>,
) -> Result<Experts<Cuda>> {
    let expert = |_| {
        Ok(Swiglu {
            gate: matrix(cuda, width, hidden)?,
            up: matrix(cuda, width, hidden)?,
            down: matrix(cuda, hidden, width)?,
        })
    };
    Ok(Experts { routed: (0..experts).map(expert).collect::<Result<_>>()?, shared: None, limit: 10.0 })
}

/// The chain work list with the rows in their slots, gate and up with SwiGLU, down, combination, over the sets in turn; then
/// parts of it. `tuning` are the tokens of a work item, when not those of the backend's choice.
///
/// # Errors
/// Errors of the device.
pub fn expert_chain(
    cuda: &mut Cuda,
    chain: Chain,
    sets: &[Experts<Cuda>],
    tuning: Option<usize>,
) -> Result<(Vec<Row>, usize)> {
    let Chain { experts, top, hidden, width, rows } = chain;
    let choices = rows * top;
    cuda.tuning = tuning;
    let x = cuda.buffer(rows, hidden)?;
    fill(cuda, &x.memory, Contents::Floats)?;
    let (mut act, mut shared) = (cuda.buffer(choices, width)?, cuda.buffer(1, 1)?);
    let mut out = cuda.buffer(rows, hidden)?;
    let mut routings = Vec::new();
    let mut distinct = 0;
    const ROUTINGS: usize = 8;
    for set in 0..ROUTINGS {
        let routing = cuda.routing(rows, top, experts)?;
        let chosen = random_choices(set as u64 * 7919 + rows as u64, rows, top, experts);
        let mut seen = vec![false; experts];
        chosen.iter().for_each(|&e| seen[e as usize] = true);
        distinct += seen.iter().filter(|s| **s).count();
        routing.experts.write(0, &chosen)?;
        routing.weights.write(0, &vec![0.3f32; choices])?;
        routings.push(routing);
    }
    let distinct_mean = distinct as f64 / ROUTINGS as f64;
    let weights = 3.0 * (width * hidden) as f64;
    let coded = sets.iter().flat_map(|set| &set.routed).all(|expert| expert.gate.weight.kind == Kind::Int4);
    let (kind, weight_bytes) = if coded { ("INT4", 0.5 + 2.0 / 128.0) } else { ("BF16", 2.0) };
    let bytes = distinct_mean * weights * weight_bytes;
    let flops = 2.0 * choices as f64 * weights;
    let of = of_ranks(slice(1)?.text.moe.intermediate_size / width.max(1));
    let row = |what: &str, micros, share: f64| Row {
        kernel: format!("experts in {kind}, {width} features: {what}, {of}"),
        rows,
        micros,
        bytes: share * bytes,
        flops: share * flops,
        unit: Unit::Tensor,
    };
    let calls = 2 * ROUTINGS;
    let full = timed(cuda, calls, |cuda, i| {
        let (set, routing) = (&sets[i % sets.len()], &routings[i % ROUTINGS]);
        cuda.planned = None;
        moe::moe_up(cuda, rows, set, routing, &x, &mut act, &mut shared)?;
        moe::moe_down(cuda, rows, set, routing, &act, &shared, &mut out)
    })?;
    if !coded {
        return Ok((vec![row("chain", full, 1.0)], distinct_mean as usize));
    }
    let up = timed(cuda, calls, |cuda, i| {
        let (set, routing) = (&sets[i % sets.len()], &routings[i % ROUTINGS]);
        cuda.planned = None;
        moe::moe_up(cuda, rows, set, routing, &x, &mut act, &mut shared)
    })?;
    let lists = timed(cuda, calls, |cuda, i| {
        cuda.planned = None;
        moe::list_for(cuda, rows, &routings[i % ROUTINGS], &x)
    })?;
    cuda.tuning = None;
    let parts = vec![row("chain", full, 1.0), row("list", lists, 0.0), row("list, gate and up", up, 2.0 / 3.0)];
    Ok((parts, distinct_mean as usize))
}

/// Slices of one, two and four ranks over all numbers of rows: the layers' experts, and the draft layer's, which stay as they are
/// stored.
pub(super) fn rows(cuda: &mut Cuda, report: &mut dyn FnMut(Row)) -> Result<()> {
    for ranks in RANKS {
        let text = slice(ranks)?.text;
        let moe = &text.moe;
        let chain = |rows| Chain {
            experts: moe.num_experts,
            top: moe.experts_per_token,
            hidden: text.hidden_size,
            width: moe.intermediate_size,
            rows,
        };
        for matrix in [int4, bf16] {
            let sets = [experts_of(cuda, chain(1), matrix)?, experts_of(cuda, chain(1), matrix)?];
            for rows in ROWS {
                expert_chain(cuda, chain(rows), &sets, None)?.0.into_iter().for_each(&mut *report);
            }
        }
    }
    Ok(())
}

/// `top` different experts for each row, ascending.
fn random_choices(seed: u64, rows: usize, top: usize, experts: usize) -> Vec<u32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut all = Vec::with_capacity(rows * top);
    for _ in 0..rows {
        let mut row: Vec<u32> = Vec::with_capacity(top);
        while row.len() < top {
            let e = (next() >> 20) as u32 % experts as u32;
            if !row.contains(&e) {
                row.push(e);
            }
        }
        row.sort_unstable();
        all.extend(row);
    }
    all
}
