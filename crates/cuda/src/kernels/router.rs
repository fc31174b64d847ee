//! The router: scores of all experts in true f32 and the choice of a row's experts; see `router.cu`.
//!
//! # Bits
//! Below [`LIBRARY_ROWS`] rows a row's scores have the same bits whatever the other rows are; from there on the library
//! sums them, in another order.

use glimmer_tensor::{Error, Result, RouterRule};

use super::{dense, gemm::Input};
use crate::{
    backend::Cuda,
    launch::{Arguments, File, Grid},
    library::{self, Operand, Product},
    types::{CudaBuffer, CudaMatrix, CudaRouting, CudaVector, Format, Kind, require, require_equal},
};

pub(crate) static FILE: File = File {
    name: "router.cu",
    text: include_str!("router.cu"),
    constants: &["TOP", "EXPERTS", "GROUPS", "KEPT", "SLICES"],
};

/// Fewest rows whose scores are the library's.
const LIBRARY_ROWS: usize = 4096;

/// Columns of a slice and experts of a block, as the kernel has them.
const SLICE: usize = 512;
const BLOCK_EXPERTS: usize = 16;

/// Threads of a block, and lanes of a warp.
const MOST_EXPERTS: usize = 1024;
const MOST_TOP: usize = 32;

/// Constants of the kernels for scores in so many columns, in slices when the kernel sums them.
pub(crate) fn constants(rule: RouterRule, experts: usize, slices: usize) -> [i64; 5] {
    [rule.top, experts, rule.groups, rule.top_groups, slices].map(|c| c as i64)
}

/// Slices of so many columns.
pub(crate) fn slices(columns: usize) -> usize {
    columns.div_ceil(SLICE)
}

/// [`glimmer_tensor::Backend::route`].
pub(crate) fn route(
    cuda: &mut Cuda,
    rows: usize,
    gate: &CudaMatrix,
    bias: &CudaVector,
    rule: RouterRule,
    x: &CudaBuffer,
    routing: &mut CudaRouting,
) -> Result<()> {
    let experts = gate.out;
    require_equal("route: values of the bias", experts, bias.len)?;
    require_equal("route: experts of the routing", experts, routing.num_experts)?;
    require_equal("route: choices a row", rule.top, routing.top)?;
    require("route: rows of the routing", rows, routing.rows)?;
    require("route: experts, a thread each", experts, MOST_EXPERTS)?;
    require("route: choices of a row, a lane each", rule.top, MOST_TOP)?;
    x.require("route: the input", rows, gate.columns)?;
    check_rule(rule, experts)?;
    cuda.planned = None;
    let (sums, slices) = scores(cuda, rows, gate, x)?;
    let constants = constants(rule, experts, slices);
    let arguments = Arguments::new()
        .with(sums)
        .with(bias.address())
        .int(rows)
        .int(usize::from(rule.normalize))
        .with(rule.scale)
        .with(routing.experts.address())
        .with(routing.weights.address());
    let grid = Grid::new([rows, 1, 1], experts.next_multiple_of(32));
    let kernel = cuda.kernels.get(&FILE, &constants, "choose")?;
    Ok(cuda.kernels.launch_early(kernel, grid, arguments)?)
}

/// Scores before the sigmoid, `[slices, rows, experts]`, whose sums over the slices in turn they are: where, and the slices.
fn scores(cuda: &mut Cuda, rows: usize, gate: &CudaMatrix, x: &CudaBuffer) -> Result<(u64, usize)> {
    let own = gate.kind != Kind::Int4
        && x.format == Format::Float
        && [gate.columns, gate.pitch, x.width].iter().all(|n| n.is_multiple_of(4));
    let slices = if own && (rows < LIBRARY_ROWS || !cuda.has_library()) { slices(gate.columns) } else { 1 };
    let sums = cuda.scratch("router scores", 4 * slices * rows * gate.out)?;
    if logits_by_library(cuda, rows, gate, x, sums)? {
        return Ok((sums, 1));
    }
    if !own {
        let input = Input { buffer: x, start: 0, width: gate.columns, list: 0 };
        dense::dot(cuda, rows, input, gate, 0, (sums, gate.out))?;
        return Ok((sums, 1));
    }
    // What the library has no kernel for.
    let slices = self::slices(gate.columns);
    let sums = cuda.scratch("router scores", 4 * slices * rows * gate.out)?;
    let (entry, size) = if gate.kind == Kind::Bf16 { ("score_bf16", 2) } else { ("score", 4) };
    let tile = tile(rows);
    let arguments = Arguments::new()
        .with(gate.address())
        .int(gate.pitch * size)
        .with(x.at(0))
        .int(x.width)
        .int(rows)
        .int(gate.columns)
        .int(tile)
        .with(sums);
    // The choice's file, with any rule: the scores do not depend on it.
    let constants = [1, gate.out, 1, 1, slices].map(|c| c as i64);
    let kernel = cuda.kernels.get(&FILE, &constants, entry)?;
    let grid = Grid::new([gate.out.div_ceil(BLOCK_EXPERTS), slices, rows.div_ceil(tile)], 128);
    cuda.kernels.launch_early(kernel, grid, arguments)?;
    Ok((sums, slices))
}

/// Rows that a block of scores goes through, four at a time: half of few, so that all blocks run at once.
fn tile(rows: usize) -> usize {
    match rows {
        0..=24 => rows.div_ceil(2).max(1).next_multiple_of(4),
        25..=192 => 24,
        _ => 48,
    }
}

/// Scores of many rows in f32 by the library: whether they were.
fn logits_by_library(cuda: &mut Cuda, rows: usize, gate: &CudaMatrix, x: &CudaBuffer, logits: u64) -> Result<bool> {
    if gate.kind == Kind::Int4 || rows < LIBRARY_ROWS || !cuda.has_library() {
        return Ok(false);
    }
    let mut weights = gate.address();
    if gate.kind == Kind::Bf16 {
        let count = gate.out * gate.pitch;
        weights = cuda.scratch("router in f32", 4 * count)?;
        let arguments = Arguments::new().with(gate.address()).with(count as u64).with(weights);
        let kernel = cuda.kernels.get(&dense::FILE, &[], "turn_to_floats")?;
        cuda.kernels.launch(kernel, Grid::new([count.div_ceil(2 * 256), 1, 1], 256), arguments)?;
    }
    let product = Product {
        operand: Operand::Float,
        outputs: gate.out,
        columns: gate.columns,
        across: false,
        pitches: [gate.pitch, x.width, gate.out],
        batch: 1,
        strides: [0; 3],
    };
    library::product(cuda, rows, product, [weights, x.at(0), logits], [1.0, 0.0])
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
