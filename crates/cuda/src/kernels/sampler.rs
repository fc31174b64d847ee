//! Tokens from rows of logits that stay on the device.
//!
//! The definition of the largest logit is [`glimmer_tensor::Samples::token`], that of a draw the engine's sampler. The kernels give
//! [`NONE`] for a row that the host has to look at.

use std::{collections::BTreeMap, ops::Range};

use bytemuck::{Pod, Zeroable};
use glimmer_tensor::{Result, SampleRow, Samples, TOKEN_PLACES};

use crate::{
    backend::Cuda,
    launch::{Arguments, File, Grid},
    memory::{Memory, Pinned},
    plan::Role,
    types::{CudaBuffer, require, require_equal},
};

pub(crate) static FILE: File = File { name: "sampler.cu", text: include_str!("sampler.cu"), constants: &[] };

/// Draws, by clusters of blocks (compute capability 9.0).
pub(crate) static DRAW: File = File { name: "draw.cu", text: include_str!("draw.cu"), constants: &["HEAD"] };

/// Draws, by a block a row, from any distribution.
pub(crate) static STREAM: File = File { name: "stream.cu", text: include_str!("stream.cu"), constants: &["HEAD"] };

/// What stands in place of a token where the host has to look.
pub(crate) const NONE: u32 = u32::MAX;

const THREADS: usize = 256;

/// Tokens of a block at most, and at least where there are so many.
const MOST: usize = 40_960;
const LEAST: usize = 2048;

/// Tokens of a block are a multiple of this.
const STEP: usize = 128;

/// Blocks of a row that is drawn, threads and warps of each, bytes of shared memory beside its part of the row.
const DRAW_BLOCKS: usize = 8;
const DRAW_THREADS: usize = 512;
const DRAW_WARPS: usize = DRAW_THREADS / 32;
pub(crate) const DRAW_HEAD: usize = 35_680;

/// Fewer rows than this are drawn by clusters first: they would not occupy the device by a block each.
const DRAW_ROWS: usize = 64;

/// Threads of a block that draws a row alone, tokens of a chunk, bytes of shared memory beside the chunks' and of a chunk.
const STREAM_THREADS: usize = 512;
const STREAM_CHUNK: usize = 512;
pub(crate) const STREAM_HEAD: usize = 16_776;
const STREAM_EACH: usize = 84;

/// Tokens of a row that is drawn at most: the fixed-point masses of more might overflow.
const STREAM_TOKENS: usize = 1 << 18;

/// Bytes of shared memory of a block at most.
const SHARED: usize = 227 << 10;

/// Words of a rule and of a change on the device.
const WORDS: usize = 4;

/// Words of a draw on the device.
const DRAW_WORDS: usize = size_of::<Drawn>() / 4;

/// Bytes of rules that are sent at a time; a step that has more is taken in parts.
const SENT: usize = 16 << 20;

/// What sampling keeps between steps.
#[derive(Debug, Default)]
pub(crate) struct Sampling {
    words: Vec<u32>,
    rules: Option<(Pinned, Memory)>,
    tokens: Option<Memory>,
    /// Tokens that stay between steps, `[places, rows]`, and the rows of a place.
    kept: Option<(Memory, usize)>,
}

/// How a row is drawn, as `draw.cu` reads it.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Drawn {
    steepness: f64,
    floor: f64,
    top_p: f64,
    uniform: f64,
    top_k: u32,
    spare: u32,
}

impl Drawn {
    fn new(draw: &glimmer_tensor::Draw) -> Self {
        let temperature = f64::from(draw.temperature);
        // A share of the best weight is a distance from the best logit.
        let floor = if draw.min_p > 0.0 { temperature * f64::from(draw.min_p).ln() } else { f64::NEG_INFINITY };
        Self {
            steepness: 1.0 / temperature,
            floor,
            top_p: f64::from(draw.top_p),
            uniform: draw.uniform,
            top_k: draw.top_k,
            spare: 0,
        }
    }
}

/// Where the device finds rules: the rows', their draws, their changes, their masks. All zero: every row as it is.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Rules {
    rows: u64,
    draws: u64,
    changes: u64,
    masks: u64,
}

/// The token of the largest logit of each of the first `rows` rows, as u32 at the device's address `tokens`; the lower of equals,
/// [`NONE`] where a logit is not a number, the largest is infinite or all are minus infinity. The first `vocabulary` columns
/// exist. Nothing but the numbers of rows and columns and the addresses reaches the launch, so it may be part of a graph.
///
/// # Errors
/// A capacity error for rows or columns that the buffer lacks; what the driver says.
pub(crate) fn largest(cuda: &mut Cuda, rows: usize, logits: &CudaBuffer, vocabulary: usize, tokens: u64) -> Result<()> {
    ruled(cuda, rows, logits, vocabulary, Rules::default(), tokens)
}

fn ruled(
    cuda: &mut Cuda,
    rows: usize,
    logits: &CudaBuffer,
    vocabulary: usize,
    rules: Rules,
    tokens: u64,
) -> Result<()> {
    if rules.rows == 0 {
        require("largest: rows of logits", rows, logits.rows)?;
    }
    require("largest: columns of the logits", vocabulary.max(1), logits.width)?;
    // As many blocks as the device runs at a time, or more.
    let wanted = (8 * cuda.device().properties().multiprocessors / rows.max(1)).max(1);
    let part = vocabulary.div_ceil(wanted).clamp(LEAST, MOST).next_multiple_of(STEP);
    let blocks = vocabulary.div_ceil(part).max(1);
    let parts = cuda.scratch("the sampler's parts", 8 * rows * blocks)?;
    let ended = cuda.zeroed_scratch("the sampler's rows that ended", 4 * rows)?;
    let kernel = cuda.kernels.get(&FILE, &[], "largest")?;
    let arguments = Arguments::new()
        .with(logits.at(0))
        .int(logits.width)
        .int(vocabulary)
        .int(part)
        .with(rules.rows)
        .with(rules.changes)
        .with(rules.masks)
        .with(parts)
        .with(ended)
        .with(tokens);
    Ok(cuda.kernels.launch_early(kernel, Grid::new([blocks, rows, 1], THREADS), arguments)?)
}

/// [`glimmer_tensor::Backend::keep_largest`].
pub(crate) fn keep_largest(
    cuda: &mut Cuda,
    logits: &CudaBuffer,
    rows: usize,
    vocabulary: usize,
    place: usize,
) -> Result<()> {
    require("keep_largest: places", place + 1, TOKEN_PLACES)?;
    let held = cuda.sampling.kept.take().filter(|(_, held)| logits.rows <= *held);
    let (memory, held) = match held {
        Some(held) => held,
        None => {
            // Graphs know the address of what was there before.
            cuda.forget_steps();
            (cuda.memory.zeroed("tokens that are kept", 4 * TOKEN_PLACES * logits.rows)?, logits.rows)
        }
    };
    let address = memory.address() + (4 * place * held) as u64;
    cuda.sampling.kept = Some((memory, held));
    largest(cuda, rows, logits, vocabulary, address)
}

/// [`glimmer_tensor::Backend::take_tokens`].
pub(crate) fn take_tokens(cuda: &mut Cuda, place: usize, rows: &[u32]) -> Result<()> {
    let (address, held) = cuda.sampling.kept.as_ref().map_or((0, 0), |(memory, rows)| (memory.address(), *rows));
    require("take_tokens: places", place + 1, if held > 0 { TOKEN_PLACES } else { 0 })?;
    require("take_tokens: kept rows", rows.iter().max().map_or(0, |&row| row as usize + 1), held)?;
    require_equal("take_tokens: rows of the step", cuda.plan.rows(), rows.len())?;
    let list = cuda.list(Role::Taken, rows)?;
    let kernel = cuda.kernels.get(&FILE, &[], "take_tokens")?;
    let arguments =
        Arguments::new().with(address + (4 * place * held) as u64).with(list).int(rows.len()).with(cuda.plan.tokens());
    Ok(cuda.kernels.launch_early(kernel, Grid::new([rows.len().div_ceil(THREADS), 1, 1], THREADS), arguments)?)
}

/// [`glimmer_tensor::Backend::kept_tokens`].
pub(crate) fn kept_tokens(cuda: &mut Cuda, rows: &[usize], tokens: &mut Vec<Option<u32>>) -> Result<()> {
    require("kept_tokens: places", rows.len(), TOKEN_PLACES)?;
    tokens.clear();
    let Some((memory, held)) = &cuda.sampling.kept else { return require("kept_tokens: kept rows", rows.len(), 0) };
    require("kept_tokens: kept rows", rows.iter().copied().max().unwrap_or(0), *held)?;
    let mut found = vec![NONE; rows.len() * held];
    memory.read(0, &mut found)?;
    for (&rows, found) in rows.iter().zip(found.chunks_exact((*held).max(1))) {
        tokens.extend(found[..rows].iter().map(|&found| Some(found).filter(|&found| found != NONE)));
    }
    Ok(())
}

/// [`glimmer_tensor::Backend::sample`].
pub(crate) fn sample(
    cuda: &mut Cuda,
    logits: &CudaBuffer,
    vocabulary: usize,
    asked: &Samples,
    tokens: &mut Vec<Option<u32>>,
) -> Result<()> {
    asked.check(logits.rows, logits.width, vocabulary)?;
    tokens.clear();
    tokens.resize(asked.rows.len(), None);
    // The largest logits first, then the draws.
    let can_draw = vocabulary <= STREAM_TOKENS;
    let of = |drawn: bool| (0..asked.rows.len()).filter(move |&i| asked.rows[i].draw.is_some() == drawn);
    let mut order: Vec<usize> = of(false).collect();
    let greedy = order.len();
    order.extend(of(true).filter(|_| can_draw));
    let rows = order.len();
    let words = WORDS * (rows + asked.changes.len()) + DRAW_WORDS * (rows - greedy) + 2 * asked.masks.len();
    if rows == 0 {
        return Ok(());
    }
    if 4 * words > SENT && asked.rows.len() > 1 {
        let (middle, mut found) = (asked.rows.len() / 2, Vec::new());
        for part in [0..middle, middle..asked.rows.len()] {
            sample(cuda, logits, vocabulary, &part_of(asked, part.clone(), vocabulary), &mut found)?;
            tokens[part].copy_from_slice(&found);
        }
        return Ok(());
    }
    let plain = asked.changes.is_empty() && asked.masks.is_empty() && greedy == rows;
    let rules = if plain && order.iter().zip(0..).all(|(&i, row)| asked.rows[i].row == row) {
        Rules::default()
    } else {
        send(cuda, asked, &order, greedy)?
    };
    let memory = match cuda.sampling.tokens.take().filter(|memory| memory.bytes() >= 4 * rows) {
        Some(memory) => memory,
        None => cuda.memory.uninitialized("sampled tokens", 4 * rows.next_power_of_two())?,
    };
    let address = memory.address();
    if greedy > 0 {
        ruled(cuda, greedy, logits, vocabulary, rules, address)?;
    }
    draw(cuda, greedy..rows, logits, vocabulary, rules, address)?;
    let mut found = vec![NONE; rows];
    memory.read(0, &mut found)?;
    cuda.sampling.tokens = Some(memory);
    for (i, found) in order.into_iter().zip(found) {
        tokens[i] = Some(found).filter(|&found| found != NONE);
    }
    Ok(())
}

/// Some rows with the changes and masks that they refer to alone.
fn part_of(asked: &Samples, rows: Range<usize>, vocabulary: usize) -> Samples {
    let mut part = Samples::default();
    let mut places = BTreeMap::new();
    for row in &asked.rows[rows] {
        let start = part.changes.len();
        part.changes.extend_from_slice(&asked.changes[row.changes.clone()]);
        let mask = row.mask.map(|first| {
            *places.entry(first).or_insert_with(|| {
                let place = part.masks.len();
                part.masks.extend_from_slice(&asked.masks[first..first + vocabulary.div_ceil(64)]);
                place
            })
        });
        part.rows.push(SampleRow { changes: start..part.changes.len(), mask, ..row.clone() });
    }
    part
}

/// Tokens of a block's part of a row, and of a warp's segment of that.
fn draw_parts(vocabulary: usize) -> (usize, usize) {
    let part = vocabulary.div_ceil(DRAW_BLOCKS).next_multiple_of(32);
    (part, part.div_ceil(DRAW_WARPS).next_multiple_of(32))
}

/// Whether clusters draw from so many tokens: the device has them, and their shared memory holds a row.
fn has_clusters(cuda: &Cuda, vocabulary: usize) -> bool {
    let (part, _) = draw_parts(vocabulary);
    cuda.device().properties().capability.0 == 9 && vocabulary > 0 && draw_shared(part) <= SHARED
}

fn draw_shared(part: usize) -> usize {
    DRAW_HEAD + 4 * (part + 4)
}

/// Draws the tokens of some of the rules' rows, of up to [`STREAM_TOKENS`] tokens.
pub(crate) fn draw(
    cuda: &Cuda,
    rows: Range<usize>,
    logits: &CudaBuffer,
    vocabulary: usize,
    rules: Rules,
    tokens: u64,
) -> Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    let few = rows.len() < DRAW_ROWS && has_clusters(cuda, vocabulary);
    if few {
        draw_few(cuda, rows.clone(), logits, vocabulary, rules, tokens)?;
    }
    let chunks = vocabulary.div_ceil(STREAM_CHUNK);
    let kernel = cuda.kernels.get(&STREAM, &[STREAM_HEAD as i64], "stream")?;
    let arguments = Arguments::new()
        .with(logits.at(0))
        .int(logits.width)
        .int(vocabulary)
        .int(chunks)
        .int(usize::from(few))
        .with(rules.rows + (4 * WORDS * rows.start) as u64)
        .with(rules.draws)
        .with(rules.changes)
        .with(rules.masks)
        .with(tokens + 4 * rows.start as u64);
    let shared = STREAM_HEAD + STREAM_EACH * chunks;
    let grid = Grid { blocks: [rows.len(), 1, 1], threads: STREAM_THREADS, shared };
    Ok(cuda.kernels.launch_early(kernel, grid, arguments)?)
}

/// As [`draw`] by clusters that hold a row each; rows that they cannot decide have no token.
fn draw_few(
    cuda: &Cuda,
    rows: Range<usize>,
    logits: &CudaBuffer,
    vocabulary: usize,
    rules: Rules,
    tokens: u64,
) -> Result<()> {
    let (part, segment) = draw_parts(vocabulary);
    let kernel = cuda.kernels.get(&DRAW, &[DRAW_HEAD as i64], "draw")?;
    let arguments = Arguments::new()
        .with(logits.at(0))
        .int(logits.width)
        .int(vocabulary)
        .int(part)
        .int(segment)
        .with(rules.rows + (4 * WORDS * rows.start) as u64)
        .with(rules.draws)
        .with(rules.changes)
        .with(rules.masks)
        .with(tokens + 4 * rows.start as u64);
    let grid = Grid { blocks: [DRAW_BLOCKS * rows.len(), 1, 1], threads: DRAW_THREADS, shared: draw_shared(part) };
    Ok(cuda.kernels.launch_clusters(kernel, grid, DRAW_BLOCKS, arguments)?)
}

/// Sends the rules of the rows in `order` by one copy; those from `greedy` on are drawn.
pub(crate) fn send(cuda: &mut Cuda, asked: &Samples, order: &[usize], greedy: usize) -> Result<Rules> {
    let words = &mut cuda.sampling.words;
    words.clear();
    let rows = || order.iter().map(|&i| &asked.rows[i]);
    for row in rows() {
        let mask = row.mask.map_or(NONE, |first| 2 * first as u32);
        words.extend([row.row, row.changes.start as u32, row.changes.len() as u32, mask]);
    }
    let draws = words.len();
    for draw in rows().skip(greedy).filter_map(|row: &SampleRow| row.draw.as_ref()) {
        words.extend(bytemuck::cast::<Drawn, [u32; DRAW_WORDS]>(Drawn::new(draw)));
    }
    let changes = words.len();
    for change in &asked.changes {
        let numbers = [change.bias, change.repetition, change.minus];
        words.push(change.token);
        words.extend(numbers.map(f32::to_bits));
    }
    let masks = words.len();
    words.extend(asked.masks.iter().flat_map(|word| [*word as u32, (*word >> 32) as u32]));
    let bytes = 4 * words.len();
    let held = cuda.sampling.rules.take().filter(|(pinned, memory)| bytes <= pinned.bytes().min(memory.bytes()));
    let (pinned, memory) = match held {
        Some(held) => held,
        None => {
            let size = bytes.next_power_of_two();
            (Pinned::new(&cuda.device, size)?, cuda.memory.uninitialized("rules of the sampler", size)?)
        }
    };
    pinned.send(&cuda.sampling.words, &memory, 0)?;
    let address = memory.address();
    cuda.sampling.rules = Some((pinned, memory));
    let at = |word: usize| address + 4 * word as u64;
    Ok(Rules { rows: address, draws: at(draws), changes: at(changes), masks: at(masks) })
}

#[cfg(test)]
mod tests {
    use glimmer_tensor::LogitChange;

    use super::*;

    #[test]
    fn a_part_of_the_rows_has_their_changes_and_masks_alone() {
        let mut asked = Samples::default();
        for row in 0..6u32 {
            let start = asked.changes.len();
            asked.changes.extend((0..row).map(|token| LogitChange { bias: row as f32, ..LogitChange::none(token) }));
            let changes = start..asked.changes.len();
            // Two rows share a mask of two words.
            let mask = (row > 1).then_some(2 * (row as usize / 2));
            asked.rows.push(SampleRow { row, changes, mask, draw: None });
        }
        asked.masks = (0..8).collect();
        let part = part_of(&asked, 3..6, 100);
        assert_eq!(part.masks, [2, 3, 4, 5]);
        assert_eq!(part.changes.len(), 3 + 4 + 5);
        let masks: Vec<_> = part.rows.iter().map(|row| row.mask).collect();
        assert_eq!(masks, [Some(0), Some(2), Some(2)]);
        for (row, number) in part.rows.iter().zip(3..6) {
            assert_eq!((row.row, row.changes.len()), (number, number as usize));
            let own = part.changes[row.changes.clone()].iter();
            assert!(own.map(|change| change.bias.to_bits()).all(|bias| bias == (number as f32).to_bits()));
        }
    }
}
