//! The stages of the experts; see [`super::router`] for who goes where, [`super::slots`] for the work list, [`super::experts`] and
//! [`gemm`] for the products.
//!
//! The experts' matrices lie wherever they were loaded; a table of their addresses is made when a set of experts is first
//! used. Work items are in the order of experts, so that consecutive blocks read consecutive weights.

use std::hash::{DefaultHasher, Hash, Hasher};

use bytemuck::Zeroable;
use glimmer_tensor::{Error, Experts, Result};

use super::{
    dense, experts, experts_bf16,
    gemm::{self, Args, Input, Variant},
    slots::{self, List},
};
use crate::{
    backend::Cuda,
    launch::{Arguments, File, Grid},
    types::{CudaBuffer, CudaMatrix, CudaRouting, Format, GROUP, Kind, require, require_equal},
};

pub(crate) static FILE: File = File { name: "moe.cu", text: include_str!("moe.cu"), constants: &["TOP"] };

/// What both products of a list have in common.
fn slot_args(table: u64, list: List) -> experts::Args {
    experts::Args {
        table,
        items: list.items,
        item_count: list.count,
        slots: list.slots as i32,
        early: i32::from(!list.fresh),
        ..experts::Args::zeroed()
    }
}

/// The same for BF16 experts with matrices like `matrix` and few rows.
fn bf16_args(table: u64, list: List, matrix: &CudaMatrix) -> experts_bf16::Args {
    experts_bf16::Args {
        table,
        items: list.items,
        item_count: list.count,
        list: list.grouped,
        w_bytes: 2 * matrix.pitch as i32,
        ..experts_bf16::Args::zeroed()
    }
}

/// And with many rows.
fn many_args(maps: u64, list: List) -> experts_bf16::ManyArgs {
    experts_bf16::ManyArgs {
        maps,
        items: list.items,
        item_count: list.count,
        list: list.grouped,
        slots: list.slots as i32,
        ..experts_bf16::ManyArgs::zeroed()
    }
}

/// What a set of experts looks like.
#[derive(Debug, Clone, Copy)]
struct Shape {
    input: usize,
    width: usize,
    hidden: usize,
    int4: bool,
}

impl Shape {
    fn kind(self) -> Kind {
        if self.int4 { Kind::Int4 } else { Kind::Bf16 }
    }
}

/// Checks the experts once for each set and gives the address of their table.
fn table(cuda: &mut Cuda, set: &Experts<Cuda>, routing: &CudaRouting, rows: usize) -> Result<(Shape, u64)> {
    require_equal("experts of the routing", set.routed.len(), routing.num_experts)?;
    require("rows of the routing", rows, routing.rows)?;
    let Some(first) = set.routed.first() else {
        return Err(Error::Capacity { what: "routed experts", needed: 1, available: 0 });
    };
    let shape = Shape {
        input: first.gate.weight.columns,
        width: first.gate.weight.out,
        hidden: first.down.weight.out,
        int4: first.gate.weight.kind == Kind::Int4,
    };
    let key = digest(set, "addresses");
    if let Some(table) = cuda.tables.get(&key) {
        return Ok((shape, table.address()));
    }
    let mut addresses = Vec::with_capacity(3 * set.routed.len());
    for e in &set.routed {
        dense::check_swiglu(e, shape.input)?;
        require_equal("experts: rows of down", shape.hidden, e.down.weight.out)?;
        require_equal("experts: width of the routed experts", shape.width, e.gate.weight.out)?;
        for matrix in [&e.gate.weight, &e.up.weight, &e.down.weight] {
            gemm::same_kind(&first.gate.weight, matrix)?;
            addresses.push(matrix.address());
        }
    }
    let table = cuda.memory.upload("table of experts", &addresses)?;
    let address = table.address();
    cuda.tables.insert(key, table);
    Ok((shape, address))
}

/// A set's key among the tables, by what a table holds.
fn digest(set: &Experts<Cuda>, what: &str) -> u64 {
    let mut hash = DefaultHasher::new();
    what.hash(&mut hash);
    for e in &set.routed {
        [e.gate.weight.id, e.up.weight.id, e.down.weight.id].hash(&mut hash);
    }
    hash.finish()
}

/// The address of what the copy engine must know of a set's matrices, three of each expert, which [`table`] has checked.
fn maps(cuda: &mut Cuda, set: &Experts<Cuda>) -> Result<u64> {
    let key = digest(set, "boxes");
    if let Some(maps) = cuda.tables.get(&key) {
        return Ok(maps.address());
    }
    let mut all = Vec::with_capacity(3 * set.routed.len());
    for e in &set.routed {
        for matrix in [&e.gate.weight, &e.up.weight, &e.down.weight] {
            all.push(experts_bf16::map(matrix)?);
        }
    }
    let maps = cuda.memory.upload("boxes of experts", &all)?;
    let address = maps.address();
    cuda.tables.insert(key, maps);
    Ok(address)
}

/// Outputs of the experts, in slots or in the order of choices.
const DOWN: &str = "outputs of the experts";

/// Tiles of 8 tokens of a work item: the mean number of choices of an expert.
fn tiles(int4: bool, choices: usize, experts: usize) -> usize {
    gemm::tiles(int4, (choices / experts.max(1)).max(1) * 4 / 3)
}

/// Makes the work list and fills its slots only (for measurements).
pub(crate) fn list_for(cuda: &mut Cuda, rows: usize, routing: &CudaRouting, x: &CudaBuffer) -> Result<()> {
    let tokens = experts::tokens(cuda, rows);
    slots::list(cuda, rows, routing, tokens, Some((x, x.width))).map(|_| ())
}

/// [`glimmer_tensor::Backend::moe_up`].
pub(crate) fn moe_up(
    cuda: &mut Cuda,
    rows: usize,
    set: &Experts<Cuda>,
    routing: &CudaRouting,
    x: &CudaBuffer,
    act: &mut CudaBuffer,
    shared_act: &mut CudaBuffer,
) -> Result<()> {
    let (shape, table) = table(cuda, set, routing, rows)?;
    let choices = rows * routing.top;
    x.require("moe_up: the input", rows, shape.input)?;
    act.require("moe_up: the activation", choices, shape.width)?;
    let input = Input { buffer: x, start: 0, width: shape.input, list: 0 };
    if shape.int4 && experts::available(cuda) {
        experts::check_columns("moe_up: columns of the input in fours", x.width)?;
        let tokens = experts::tokens(cuda, rows);
        let list = slots::list(cuda, rows, routing, tokens, Some((x, shape.input)))?;
        let y = cuda.scratch(slots::ACTIVATIONS, slots::slot_bytes(list.slots, shape.width))?;
        let args = experts::Args {
            x: list.packed,
            y,
            outputs: shape.width as i32,
            groups: (shape.input / GROUP) as i32,
            limit: set.limit,
            ..slot_args(table, list)
        };
        experts::run(cuda, true, tokens, args)?;
        act.format = Format::Slots { half: true, slots: list.slots };
    } else if !shape.int4 && experts_bf16::takes_many(cuda, rows, shape.input, shape.width) {
        experts::check_columns("moe_up: columns of the input in fours", x.width)?;
        let (tokens, maps) = (experts_bf16::many_tokens(rows), maps(cuda, set)?);
        let list = slots::list(cuda, rows, routing, tokens, None)?;
        let from = (x.at(0), x.width, shape.input);
        let args = experts_bf16::ManyArgs {
            x: slots::fill_planes(cuda, slots::TOKENS, rows, from, routing, routing.top, list)?,
            y: cuda.scratch(slots::ACTIVATIONS, cuda.planes * slots::slot_bytes(list.slots, shape.width))?,
            outputs: shape.width as i32,
            limit: set.limit,
            ..many_args(maps, list)
        };
        experts_bf16::run_many(cuda, true, tokens, shape.input, args)?;
        act.format = Format::Slots { half: false, slots: list.slots };
    } else if !shape.int4 && experts_bf16::takes_few(cuda, rows, shape.input, x) {
        let list = slots::list(cuda, rows, routing, experts_bf16::FEW_TOKENS, None)?;
        let args = experts_bf16::Args {
            x: x.at(0),
            y: act.at(0),
            outputs: shape.width as i32,
            x_stride: x.width as i32,
            y_stride: act.width as i32,
            divisor: routing.top as i32,
            limit: set.limit,
            ..bf16_args(table, list, &set.routed[0].gate.weight)
        };
        experts_bf16::run_few(cuda, true, shape.input, args)?;
        act.format = Format::Float;
    } else {
        let planes = gemm::planes(cuda, rows, input, shape.kind())?;
        let tiles = tiles(shape.int4, choices, routing.num_experts);
        let list = slots::list(cuda, rows, routing, 8 * tiles, None)?;
        let mut args = Args {
            table,
            items: list.items,
            item_count: list.count,
            list: list.grouped,
            x: planes.address,
            plane: planes.plane as u64,
            rows: rows as i32,
            outputs: shape.width as i32,
            columns: shape.input as i32,
            pitch: planes.pitch as i32,
            w_pitch: set.routed[0].gate.weight.pitch as i32,
            divisor: routing.top as i32,
            limit: set.limit,
            ..Args::zeroed()
        };
        gemm::into_planes(act, choices, shape.width, [shape.kind(); 2], &mut args);
        let variant = Variant { int4: shape.int4, swiglu: true, grouped: true, tiles, columns: shape.input };
        gemm::run(cuda, variant, [shape.width.div_ceil(variant.outputs()), list.most, 1], args)?;
    }
    if let Some(shared) = &set.shared {
        dense::check_swiglu(shared, shape.input)?;
        require_equal("experts: rows of down", shape.hidden, shared.down.weight.out)?;
        shared_act.require("moe_up: the shared activation", rows, shared.gate.weight.out)?;
        dense::gated(cuda, rows, input, shared, set.limit, shared_act)?;
    }
    Ok(())
}

/// Activations are what [`moe_up`] left in the list's slots.
fn require_slots(act: &CudaBuffer, half: bool, list: List) -> Result<()> {
    if act.format == (Format::Slots { half, slots: list.slots }) {
        return Ok(());
    }
    Err(Error::Weight {
        name: "activation of moe_down".to_owned(),
        expected: "what moe_up left for this routing".to_owned(),
        found: format!("{:?}", act.format),
    })
}

/// [`glimmer_tensor::Backend::moe_down`].
pub(crate) fn moe_down(
    cuda: &mut Cuda,
    rows: usize,
    set: &Experts<Cuda>,
    routing: &CudaRouting,
    act: &CudaBuffer,
    shared_act: &CudaBuffer,
    out: &mut CudaBuffer,
) -> Result<()> {
    let (shape, table) = table(cuda, set, routing, rows)?;
    let choices = rows * routing.top;
    act.require("moe_down: the activation", choices, shape.width)?;
    out.require("moe_down: the output", rows, shape.hidden)?;
    if !shape.hidden.is_multiple_of(4) || !out.width.is_multiple_of(4) {
        return Err(Error::Capacity { what: "moe_down: columns in fours", needed: 4, available: shape.hidden % 4 });
    }
    let in_slots = shape.int4 && experts::available(cuda);
    let (mut list, down);
    if in_slots {
        let tokens = experts::tokens(cuda, rows);
        list = slots::list(cuda, rows, routing, tokens, None)?;
        let x = cuda.scratch(slots::ACTIVATIONS, slots::slot_bytes(list.slots, shape.width))?;
        down = cuda.scratch(DOWN, slots::slot_bytes(list.slots, shape.hidden))?;
        if act.format == Format::Float {
            experts::check_columns("moe_down: columns of the activation in fours", act.width)?;
            let into = List { packed: x, ..list };
            list = slots::fill(cuda, choices, (act.at(0), act.width, shape.width), routing, 1, into)?;
        } else {
            require_slots(act, true, list)?;
        }
        let args = experts::Args {
            x,
            y: down,
            outputs: shape.hidden as i32,
            groups: (shape.width / GROUP) as i32,
            ..slot_args(table, list)
        };
        experts::run(cuda, false, tokens, args)?;
    } else if !shape.int4 && experts_bf16::takes_many(cuda, rows, shape.input, shape.width) {
        let (tokens, maps) = (experts_bf16::many_tokens(rows), maps(cuda, set)?);
        list = slots::list(cuda, rows, routing, tokens, None)?;
        down = cuda.scratch(DOWN, 4 * choices * shape.hidden)?;
        let x = if act.format == Format::Float {
            experts::check_columns("moe_down: columns of the activation in fours", act.width)?;
            let from = (act.at(0), act.width, shape.width);
            slots::fill_planes(cuda, slots::ACTIVATIONS, choices, from, routing, 1, list)?
        } else {
            require_slots(act, false, list)?;
            cuda.scratch(slots::ACTIVATIONS, cuda.planes * slots::slot_bytes(list.slots, shape.width))?
        };
        let args = experts_bf16::ManyArgs {
            x,
            y: down,
            outputs: shape.hidden as i32,
            y_stride: shape.hidden as i32,
            ..many_args(maps, list)
        };
        experts_bf16::run_many(cuda, false, tokens, shape.width, args)?;
    } else if !shape.int4 && experts_bf16::takes_few(cuda, rows, shape.width, act) {
        list = slots::list(cuda, rows, routing, experts_bf16::FEW_TOKENS, None)?;
        down = cuda.scratch(DOWN, 4 * choices * shape.hidden)?;
        let args = experts_bf16::Args {
            x: act.at(0),
            y: down,
            outputs: shape.hidden as i32,
            x_stride: act.width as i32,
            y_stride: shape.hidden as i32,
            divisor: 1,
            ..bf16_args(table, list, &set.routed[0].down.weight)
        };
        experts_bf16::run_few(cuda, false, shape.width, args)?;
    } else {
        let input = Input { buffer: act, start: 0, width: shape.width, list: 0 };
        let planes = gemm::planes(cuda, choices, input, shape.kind())?;
        let tiles = tiles(shape.int4, choices, routing.num_experts);
        list = slots::list(cuda, rows, routing, 8 * tiles, None)?;
        down = cuda.scratch(DOWN, 4 * choices * shape.hidden)?;
        let args = Args {
            table,
            items: list.items,
            item_count: list.count,
            list: list.grouped,
            x: planes.address,
            plane: planes.plane as u64,
            rows: choices as i32,
            outputs: shape.hidden as i32,
            columns: shape.width as i32,
            pitch: planes.pitch as i32,
            w_pitch: set.routed[0].down.weight.pitch as i32,
            divisor: 1,
            down: 1,
            y: down,
            y_stride: shape.hidden as i32,
            ..Args::zeroed()
        };
        let variant = Variant { int4: shape.int4, swiglu: false, grouped: true, tiles, columns: shape.width };
        gemm::run(cuda, variant, [shape.hidden.div_ceil(variant.outputs()), list.most, 1], args)?;
    }
    let mut shared_out = 0;
    if let Some(shared) = &set.shared {
        let width = shared.gate.weight.out;
        shared_act.require("moe_down: the shared activation", rows, width)?;
        let bytes = 4 * rows * shape.hidden;
        let room = cuda.scratch_memory("output of the shared expert", bytes)?;
        shared_out = room.address();
        let mut room = CudaBuffer { memory: room, rows, width: shape.hidden, format: Format::Float };
        let input = Input { buffer: shared_act, start: 0, width, list: 0 };
        dense::joint(cuda, rows, input, &[&shared.down], &mut room, 0)?;
    }
    out.format = Format::Float;
    if in_slots {
        return slots::combine(cuda, rows, shape.hidden, routing, list, (down, shared_out), out);
    }
    let arguments = Arguments::new()
        .with(down)
        .int(shape.hidden)
        .with(routing.weights.address())
        .with(shared_out)
        .int(shape.hidden)
        .int(shape.hidden)
        .with(out.at(0))
        .int(out.width);
    let kernel = cuda.kernels.get(&FILE, &[routing.top as i64], "combine")?;
    Ok(cuda.kernels.launch_early(kernel, Grid::new([shape.hidden.div_ceil(4 * 128), rows, 1], 128), arguments)?)
}
