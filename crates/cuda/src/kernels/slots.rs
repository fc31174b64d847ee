//! The work list of the experts, tokens in slots, and the weighted sum of the experts' outputs; see `slots.cu`.

use std::collections::HashMap;

use glimmer_tensor::{Error, Result};

use crate::{
    backend::Cuda,
    launch::{Arguments, File, Grid},
    memory::Memory,
    types::{CudaBuffer, CudaRouting, INT4_ROWS, require},
};

pub(crate) static FILE: File =
    File { name: "slots.cu", text: include_str!("slots.cu"), constants: &["TOP", "EXPERTS"] };

/// Words of a work item: expert, first slot, choices.
const ITEM_WORDS: usize = 3;

/// Rows up to which each of them has two blocks of its own; more are shared out to the multiprocessors.
const FEW_ROWS: usize = 128;

/// Rows that a list can have: a block counts an expert's choices in 16 bits.
const MOST_ROWS: usize = (1 << 16) - 1;

/// Slot of every choice.
const SLOTS_OF: &str = "slots of the choices";
/// Rows in slots.
pub(crate) const TOKENS: &str = "tokens of the experts";
/// Activations of the experts, in slots.
pub(crate) const ACTIVATIONS: &str = "activations of the experts";

/// The work list in scratch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct List {
    /// Choice of a slot.
    pub(crate) grouped: u64,
    /// Slot of a choice.
    pub(crate) slot_of: u64,
    /// Work items.
    pub(crate) items: u64,
    /// How many.
    pub(crate) count: u64,
    /// Items at most.
    pub(crate) most: usize,
    /// Slots of a piece of 64 columns.
    pub(crate) slots: usize,
    /// Rows in slots, or 0.
    pub(crate) packed: u64,
    /// The launch in front of the next one writes the list.
    pub(crate) fresh: bool,
}

/// Slots of a work list: every expert's begin at an eighth one.
pub(crate) fn slots(choices: usize, experts: usize) -> usize {
    (choices + 7 * experts.min(choices)).next_multiple_of(8)
}

/// Bytes of rows in slots.
pub(crate) fn slot_bytes(slots: usize, columns: usize) -> usize {
    slots * columns.next_multiple_of(INT4_ROWS) * 2
}

fn constants(routing: &CudaRouting) -> [i64; 2] {
    [routing.top, routing.num_experts].map(|c| c as i64)
}

/// The work list of the routing with items of up to `tokens` choices, made when the last one is another; `rows_in` puts that
/// many columns of a buffer's rows into the slots.
pub(crate) fn list(
    cuda: &mut Cuda,
    rows: usize,
    routing: &CudaRouting,
    tokens: usize,
    rows_in: Option<(&CudaBuffer, usize)>,
) -> Result<List> {
    let (choices, experts) = (rows * routing.top, routing.num_experts);
    let most = choices.min(experts + choices / tokens);
    let slots = slots(choices, experts);
    let grouped = cuda.scratch("choices by expert", 4 * slots)?;
    let slot_of = cuda.scratch(SLOTS_OF, 4 * choices)?;
    let items = cuda.scratch("work items", 4 * ITEM_WORDS * most)?;
    let count = cuda.scratch("number of work items", 4)?;
    let packed = match rows_in {
        Some((_, columns)) => cuda.scratch(TOKENS, slot_bytes(slots, columns))?,
        None => 0,
    };
    let wanted = (routing.id, rows, tokens);
    let (x, stride, columns) = rows_in.map_or((0, 0, 0), |(buffer, columns)| (buffer.at(0), buffer.width, columns));
    let planned = cuda.planned == Some(wanted);
    if !planned {
        require("rows of the work list", rows, MOST_ROWS)?;
        let mut arguments = Arguments::new().with(routing.experts.address()).int(choices);
        let (entry, grid) = if rows <= FEW_ROWS {
            ("arrange", Grid::new([if packed == 0 { 1 } else { 2 }, rows, 1], 256))
        } else {
            let per = rows.div_ceil(cuda.device().properties().multiprocessors);
            arguments = arguments.int(per);
            ("arrange_many", Grid::new([rows.div_ceil(per), 1, 1], 1024))
        };
        let arguments = arguments
            .int(tokens)
            .with(grouped)
            .with(slot_of)
            .with(items)
            .with(count)
            .with(x)
            .int(stride)
            .int(columns)
            .with(packed)
            .int(slots);
        let kernel = cuda.kernels.get(&FILE, &constants(routing), entry)?;
        cuda.kernels.launch_early(kernel, grid, arguments)?;
    }
    cuda.planned = Some(wanted);
    let list = List { grouped, slot_of, items, count, most, slots, packed, fresh: !planned };
    if packed != 0 && planned {
        return fill(cuda, rows, (x, stride, columns), routing, routing.top, list);
    }
    Ok(list)
}

/// Rows into the slots of their choices, `top` a row.
pub(crate) fn fill(
    cuda: &Cuda,
    rows: usize,
    (x, stride, columns): (u64, usize, usize),
    routing: &CudaRouting,
    top: usize,
    list: List,
) -> Result<List> {
    let arguments =
        Arguments::new().with(x).int(stride).int(columns).int(top).with(list.slot_of).with(list.packed).int(list.slots);
    let kernel = cuda.kernels.get(&FILE, &constants(routing), "fill")?;
    cuda.kernels.launch_early(kernel, Grid::new([columns.div_ceil(1024), rows, 1], 128), arguments)?;
    Ok(List { fresh: false, ..list })
}

/// Rows as planes of bf16 in the slots of their choices, `top` a row; gives their address.
pub(crate) fn fill_planes(
    cuda: &mut Cuda,
    what: &'static str,
    rows: usize,
    (x, stride, columns): (u64, usize, usize),
    routing: &CudaRouting,
    top: usize,
    list: List,
) -> Result<u64> {
    let planes = cuda.planes;
    let packed = cuda.scratch(what, planes * slot_bytes(list.slots, columns))?;
    let arguments = Arguments::new()
        .with(x)
        .int(stride)
        .int(columns)
        .int(top)
        .with(list.slot_of)
        .with(packed)
        .int(list.slots)
        .int(planes);
    let kernel = cuda.kernels.get(&FILE, &constants(routing), "fill_planes")?;
    cuda.kernels.launch_early(kernel, Grid::new([columns.div_ceil(1024), rows, 1], 128), arguments)?;
    Ok(packed)
}

/// Weighted sums of the experts' outputs in slots at `down`, plus the shared expert's at `shared`, if that is not 0.
pub(crate) fn combine(
    cuda: &Cuda,
    rows: usize,
    hidden: usize,
    routing: &CudaRouting,
    list: List,
    (down, shared): (u64, u64),
    out: &mut CudaBuffer,
) -> Result<()> {
    let arguments = Arguments::new()
        .with(down)
        .int(list.slots)
        .with(list.slot_of)
        .with(routing.weights.address())
        .with(shared)
        .int(hidden)
        .int(hidden)
        .with(out.at(0))
        .int(out.width);
    let kernel = cuda.kernels.get(&FILE, &constants(routing), "combine")?;
    Ok(cuda.kernels.launch_early(kernel, Grid::new([hidden.div_ceil(1024), rows, 1], 128), arguments)?)
}

/// A row of activations in slots, for the host: so many planes of bf16, or halves when there are none.
pub(crate) fn read(
    scratch: &HashMap<&'static str, Memory>,
    slots: usize,
    planes: usize,
    row: usize,
    values: &mut [f32],
) -> Result<()> {
    let (Some(slot_of), Some(memory)) = (scratch.get(SLOTS_OF), scratch.get(ACTIVATIONS)) else {
        return Err(Error::Capacity { what: "read: activations in slots", needed: 1, available: 0 });
    };
    let mut slot = [0u32];
    slot_of.read(4 * row, &mut slot)?;
    let slot = slot[0] as usize;
    for (piece, values) in values.chunks_mut(INT4_ROWS).enumerate() {
        let mut held = [0u16; INT4_ROWS];
        let place = |i: usize| 8 * ((i / 8) ^ (slot % 8)) + i % 8;
        if planes > 0 {
            values.fill(0.0);
        }
        for plane in 0..planes {
            memory.read(128 * ((piece * planes + plane) * slots + slot), &mut held)?;
            values.iter_mut().enumerate().for_each(|(i, v)| *v += f32::from_bits(u32::from(held[place(i)]) << 16));
        }
        if planes == 0 {
            memory.read(128 * (piece * slots + slot), &mut held)?;
            for (i, v) in values.iter_mut().enumerate() {
                let held = half::f16::from_bits(held[place(i)]).to_f32();
                *v = if i / 8 % 2 == 1 { 4.0 * held } else { 0.25 * held };
            }
        }
    }
    Ok(())
}
