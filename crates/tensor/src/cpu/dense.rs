//! Dense stages: embedding, projections, SwiGLU, plain residuals with norms, the head.
//!
//! A projection packs its rows once ([`super::simd::pack`]) and splits the output columns over the threads. Within a task
//! the rows are taken in blocks whose sums stay in the second-level cache.

use super::{
    Cpu, CpuBuffer, CpuMatrix, Isa, Panel, Pool, Scratch,
    pool::{Chunks, Panels},
    simd::{
        pack::{Order, Pack},
        product::{self, PackedRows, Product},
    },
    types::{AlignedVec, CpuVector, require, require_equal},
};
use crate::{Columns, Linear, Norm, Result, Streams, Swiglu};

/// Multiplications that are worth waking another thread for.
const WORTH_SPLITTING: usize = 1 << 16;

/// Outputs of a task at most.
const TASK_OUTPUTS: usize = 64;

/// The same for a single row, which reads weights in sequence: the longer, the better memory serves it.
const TASK_OUTPUTS_SINGLE: usize = 256;

/// Rows that a task takes at a time.
const BLOCK_ROWS: usize = 64;

/// f32 of a thread's scratch that the dense stages use.
pub(super) const THREAD_SCRATCH: usize = BLOCK_ROWS * TASK_OUTPUTS + product::scratch(BLOCK_ROWS);

/// Packed rows, one array an order.
#[derive(Debug, Default)]
pub(super) struct Workspace {
    plain: AlignedVec,
    pairs: AlignedVec,
    nibbles: AlignedVec,
    /// Router scores and scores with bias, `[rows, experts]` each.
    pub(super) scores: AlignedVec,
}

impl Workspace {
    /// Room for `rows` rows of up to `width` columns in every order.
    pub(super) fn reserve(&mut self, rows: usize, width: usize) -> Result<()> {
        for order in [Order::Plain, Order::Pairs, Order::Nibbles] {
            self.of_mut(order).grow("packed activations", rows * order.padded(width))?;
        }
        Ok(())
    }

    fn of(&self, order: Order) -> &[f32] {
        match order {
            Order::Plain => self.plain.as_slice(),
            Order::Pairs => self.pairs.as_slice(),
            Order::Nibbles => self.nibbles.as_slice(),
        }
    }

    fn of_mut(&mut self, order: Order) -> &mut AlignedVec {
        match order {
            Order::Plain => &mut self.plain,
            Order::Pairs => &mut self.pairs,
            Order::Nibbles => &mut self.nibbles,
        }
    }
}

/// Rows of activations before packing.
#[derive(Debug, Clone, Copy)]
pub(super) struct Input<'a> {
    /// The buffer.
    pub(super) buffer: &'a CpuBuffer,
    /// First column.
    pub(super) start: usize,
    /// Number of columns.
    pub(super) width: usize,
    /// Which rows; the first ones without a list.
    pub(super) list: Option<&'a [u32]>,
}

impl<'a> Input<'a> {
    /// The first `width` columns.
    pub(super) fn of(buffer: &'a CpuBuffer, width: usize) -> Self {
        Self { buffer, start: 0, width, list: None }
    }
}

/// Packs `rows` rows in `order`.
pub(super) fn pack(
    pool: &Pool,
    isa: Isa,
    work: &mut Workspace,
    order: Order,
    rows: usize,
    input: Input<'_>,
) -> Result<()> {
    let stride = order.padded(input.width);
    if stride == 0 {
        return Ok(());
    }
    let packed = work.of_mut(order);
    // As much as the buffer can ever ask for, so that a later, larger step finds it there.
    packed.grow("packed activations", rows.max(input.buffer.rows()) * stride)?;
    let packed = &mut packed.as_mut_slice()[..rows * stride];
    let rows_a_task = (WORTH_SPLITTING / stride.max(1)).max(1);
    pool.split(Chunks::new(packed, rows_a_task * stride), |task, chunk, _| {
        for (i, packed) in chunk.chunks_exact_mut(stride).enumerate() {
            let row = task * rows_a_task + i;
            let row = input.list.map_or(row, |list| list[row] as usize);
            let row = &input.buffer.row(row)[input.start..input.start + input.width];
            isa.run(Pack { order, row, packed });
        }
    });
    Ok(())
}

/// The packed rows of a matrix, all of them or those of a list.
pub(super) fn packed<'a>(work: &'a Workspace, matrix: &CpuMatrix) -> PackedRows<'a> {
    let order = Order::of(matrix);
    PackedRows { data: work.of(order), stride: order.padded(matrix.columns()), first: 0, list: None, divisor: 1 }
}

/// Outputs of a task: few enough to keep all threads busy, many enough to be worth a task.
pub(super) fn outputs_a_task(threads: usize, rows: usize, outputs: usize, columns: usize) -> usize {
    if rows * outputs * columns < WORTH_SPLITTING {
        return outputs.max(1);
    }
    let most = if rows == 1 { TASK_OUTPUTS_SINGLE } else { TASK_OUTPUTS };
    outputs.div_ceil(4 * threads).next_multiple_of(8).min(most)
}

/// Calls `sink(row, products)` for each row with its products with `outputs` of the matrix and the bias added.
pub(super) fn multiply(
    isa: Isa,
    linear: &Linear<Cpu>,
    outputs: std::ops::Range<usize>,
    x: PackedRows<'_>,
    rows: usize,
    scratch: &mut Scratch,
    mut sink: impl FnMut(usize, &mut [f32]),
) {
    let width = outputs.len();
    if width == 0 {
        return;
    }
    let bias = linear.bias.as_ref().map(|bias| &bias.as_slice()[outputs.clone()]);
    for first in (0..rows).step_by(BLOCK_ROWS) {
        let count = BLOCK_ROWS.min(rows - first);
        let [y, sums] = scratch.floats([count * width, product::scratch(count)]);
        let x = PackedRows { first: x.first + first, ..x };
        isa.run(Product { matrix: &linear.weight, outputs: outputs.clone(), x, rows: count, sums, y });
        for (i, y) in y.chunks_exact_mut(width).enumerate() {
            if let Some(bias) = bias {
                isa.add(bias, y);
            }
            sink(first + i, y);
        }
    }
}

/// Checks the parts of a linear layer against its input.
pub(super) fn check(what: &'static str, linear: &Linear<Cpu>, width: usize) -> Result<()> {
    require_equal(what, linear.weight.columns(), width)?;
    match &linear.bias {
        Some(bias) => require_equal(what, linear.weight.out(), bias.len()),
        None => Ok(()),
    }
}

/// [`crate::Backend::linear`].
pub(super) fn linear(
    cpu: &mut Cpu,
    rows: usize,
    x: Columns<'_, Cpu>,
    weights: &[&Linear<Cpu>],
    out: &mut CpuBuffer,
    start: usize,
) -> Result<()> {
    let input = Input { buffer: x.buffer, start: x.start, width: x.width, list: None };
    joint(cpu, rows, input, weights, out, start)
}

fn joint(
    cpu: &mut Cpu,
    rows: usize,
    input: Input<'_>,
    weights: &[&Linear<Cpu>],
    out: &mut CpuBuffer,
    start: usize,
) -> Result<()> {
    if input.list.is_none() {
        input.buffer.require("linear: the input", rows, input.start + input.width)?;
    }
    let mut width = 0;
    for linear in weights {
        check("linear: columns of the input", linear, input.width)?;
        width += linear.weight.out();
    }
    out.require("linear: the output", rows, start + width)?;
    let Some(first) = weights.first() else { return Ok(()) };
    for order in [Order::Plain, Order::Pairs, Order::Nibbles] {
        if weights.iter().any(|linear| Order::of(&linear.weight) == order) {
            pack(&cpu.pool, cpu.isa, &mut cpu.dense, order, rows, input)?;
        }
    }
    let (isa, work) = (cpu.isa, &cpu.dense);
    let stride = out.width();
    let columns = outputs_a_task(cpu.threads(), rows, width, first.weight.columns());
    let panels = Panels::new(out.as_mut_slice(), rows, stride, start, width, columns);
    cpu.pool.split(panels, |_, mut panel: Panel<'_>, scratch| {
        let (begin, end) = (panel.start(), panel.start() + panel.width());
        let mut offset = 0;
        for linear in weights {
            let out = linear.weight.out();
            let outputs = begin.clamp(offset, offset + out) - offset..end.clamp(offset, offset + out) - offset;
            let column = offset + outputs.start - begin.min(offset + outputs.start);
            let width = outputs.len();
            multiply(isa, linear, outputs, packed(work, &linear.weight), rows, scratch, |row, y| {
                panel.row_mut(row)[column..column + width].copy_from_slice(y);
            });
            offset += out;
        }
    });
    Ok(())
}

/// `act = silu(min(gate x, limit)) * clamp(up x, -limit, limit)` of the first `rows` packed rows.
pub(super) fn gated(cpu: &Cpu, rows: usize, weights: &Swiglu<Cpu>, limit: f32, act: &mut CpuBuffer) {
    let (width, stride) = (weights.gate.weight.out(), act.width());
    let columns = outputs_a_task(cpu.threads(), rows, width, 2 * weights.gate.weight.columns());
    let panels = Panels::new(act.as_mut_slice(), rows, stride, 0, width, columns);
    cpu.pool.split(panels, |_, mut panel, scratch| {
        let columns = panel.start()..panel.start() + panel.width();
        let (gate, up) = (&weights.gate, &weights.up);
        multiply(cpu.isa, gate, columns.clone(), packed(&cpu.dense, &gate.weight), rows, scratch, |row, y| {
            panel.row_mut(row).copy_from_slice(y);
        });
        multiply(cpu.isa, up, columns, packed(&cpu.dense, &up.weight), rows, scratch, |row, y| {
            cpu.isa.clamped_swiglu(panel.row_mut(row), y, limit);
        });
    });
}

/// Checks the parts of a SwiGLU against each other.
pub(super) fn check_swiglu(weights: &Swiglu<Cpu>, input: usize) -> Result<()> {
    check("SwiGLU: columns of the gate", &weights.gate, input)?;
    check("SwiGLU: columns of up", &weights.up, input)?;
    require_equal("SwiGLU: rows of up", weights.gate.weight.out(), weights.up.weight.out())?;
    check("SwiGLU: columns of down", &weights.down, weights.gate.weight.out())
}

/// [`crate::Backend::swiglu`].
pub(super) fn swiglu(
    cpu: &mut Cpu,
    rows: usize,
    weights: &Swiglu<Cpu>,
    limit: f32,
    x: &CpuBuffer,
    act: &mut CpuBuffer,
    out: &mut CpuBuffer,
) -> Result<()> {
    let (input, width) = (weights.gate.weight.columns(), weights.gate.weight.out());
    check_swiglu(weights, input)?;
    x.require("swiglu: the input", rows, input)?;
    act.require("swiglu: the activation", rows, width)?;
    for order in orders(weights) {
        pack(&cpu.pool, cpu.isa, &mut cpu.dense, order, rows, Input::of(x, input))?;
    }
    gated(cpu, rows, weights, limit, act);
    joint(cpu, rows, Input::of(act, width), &[&weights.down], out, 0)
}

/// Orders of the gate and, where it differs, of up.
pub(super) fn orders(weights: &Swiglu<Cpu>) -> impl Iterator<Item = Order> {
    let (gate, up) = (Order::of(&weights.gate.weight), Order::of(&weights.up.weight));
    [Some(gate), (up != gate).then_some(up)].into_iter().flatten()
}

/// [`crate::Backend::embed`].
pub(super) fn embed(
    cpu: &mut Cpu,
    table: &CpuMatrix,
    features: &CpuBuffer,
    streams: &mut Streams<Cpu>,
    n: usize,
) -> Result<()> {
    let (step, hidden) = (&cpu.step, table.columns());
    streams.x.require("embed: the streams", step.rows(), n * hidden)?;
    if n == 0 {
        return Ok(());
    }
    let mut images = step.features.iter().peekable();
    for (row, &token) in step.tokens.iter().enumerate() {
        let x = streams.x.row_mut(row);
        if let Some(image) = images.next_if(|image| image.row as usize == row) {
            features.require("embed: image features", image.feature as usize + 1, hidden)?;
            x[..hidden].copy_from_slice(&features.row(image.feature as usize)[..hidden]);
        } else {
            require("embed: rows of the table", token as usize + 1, table.out())?;
            table.widen_row(token as usize, &mut x[..hidden]);
        }
        for stream in 1..n {
            x.copy_within(..hidden, stream * hidden);
        }
    }
    Ok(())
}

/// `out = norm(x)`: RMSNorm, LayerNorm with a bias.
fn normalize(isa: Isa, norm: &Norm<Cpu>, x: &[f32], out: &mut [f32]) {
    match &norm.bias {
        Some(bias) => isa.layer_norm(x, norm.weight.as_slice(), bias.as_slice(), norm.eps, out),
        None => isa.rms_norm(x, norm.weight.as_slice(), norm.eps, out),
    }
}

fn check_norm(what: &'static str, norm: &Norm<Cpu>, width: usize) -> Result<()> {
    require_equal(what, width, norm.weight.len())?;
    require_equal(what, width, norm.bias.as_ref().map_or(width, CpuVector::len))
}

/// [`crate::Backend::mtp_input`].
pub(super) fn mtp_input(
    cpu: &mut Cpu,
    table: &CpuMatrix,
    enorm: &Norm<Cpu>,
    hnorm: &Norm<Cpu>,
    hidden: &CpuBuffer,
    source: &[u32],
    out: &mut CpuBuffer,
) -> Result<()> {
    let width = table.columns();
    check_norm("mtp_input: width of enorm", enorm, width)?;
    check_norm("mtp_input: width of hnorm", hnorm, width)?;
    require_equal("mtp_input: source rows", cpu.step.rows(), source.len())?;
    out.require("mtp_input: the output", source.len(), 2 * width)?;
    for (row, (&token, &from)) in cpu.step.tokens.iter().zip(source).enumerate() {
        require("mtp_input: rows of the table", token as usize + 1, table.out())?;
        hidden.require("mtp_input: hidden states", from as usize + 1, width)?;
        let (first, second) = out.row_mut(row).split_at_mut(width);
        // The second half serves as room for the embedding before it gets the hidden state.
        table.widen_row(token as usize, &mut second[..width]);
        normalize(cpu.isa, enorm, &second[..width], first);
        normalize(cpu.isa, hnorm, &hidden.row(from as usize)[..width], &mut second[..width]);
    }
    Ok(())
}

/// [`crate::Backend::add_norm`].
pub(super) fn add_norm(
    cpu: &mut Cpu,
    rows: usize,
    y: Option<&CpuBuffer>,
    norm: &Norm<Cpu>,
    x: &mut CpuBuffer,
    out: &mut CpuBuffer,
) -> Result<()> {
    let width = norm.weight.len();
    check_norm("add_norm: width of the norm", norm, width)?;
    x.require("add_norm: the residual", rows, width)?;
    out.require("add_norm: the output", rows, width)?;
    if let Some(y) = y {
        y.require("add_norm: the addend", rows, width)?;
    }
    if width == 0 {
        return Ok(());
    }
    let (isa, x_width, out_width) = (cpu.isa, x.width(), out.width());
    let rows_a_task = (WORTH_SPLITTING / (4 * width)).max(1);
    let parts = (
        Chunks::new(&mut x.as_mut_slice()[..rows * x_width], rows_a_task * x_width),
        Chunks::new(&mut out.as_mut_slice()[..rows * out_width], rows_a_task * out_width),
    );
    cpu.pool.split(parts, |task, (x, out), _| {
        for (i, (x, out)) in x.chunks_exact_mut(x_width).zip(out.chunks_exact_mut(out_width)).enumerate() {
            if let Some(y) = y {
                isa.add(&y.row(task * rows_a_task + i)[..width], &mut x[..width]);
            }
            normalize(isa, norm, &x[..width], &mut out[..width]);
        }
    });
    Ok(())
}

/// [`crate::Backend::head`].
pub(super) fn head(
    cpu: &mut Cpu,
    matrix: &CpuMatrix,
    rows: &[u32],
    hidden: &CpuBuffer,
    logits: &mut CpuBuffer,
) -> Result<()> {
    let last = rows.iter().max().map_or(0, |&row| row as usize + 1);
    hidden.require("head: hidden states", last, matrix.columns())?;
    // Cloning shares the bytes.
    let linear = Linear { weight: matrix.clone(), bias: None };
    let input = Input { buffer: hidden, start: 0, width: matrix.columns(), list: Some(rows) };
    joint(cpu, rows.len(), input, &[&linear], logits, 0)
}

/// [`crate::Backend::copy_row`].
pub(super) fn copy_row(_: &mut Cpu, from: &CpuBuffer, row: usize, to: &mut CpuBuffer, target: usize) -> Result<()> {
    from.require("copy_row: the source", row + 1, 0)?;
    to.require("copy_row: the target", target + 1, 0)?;
    let width = from.width().min(to.width());
    to.row_mut(target)[..width].copy_from_slice(&from.row(row)[..width]);
    Ok(())
}
