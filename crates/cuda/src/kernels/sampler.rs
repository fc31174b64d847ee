//! Tokens from rows of logits that stay on the device.
//!
//! Its definition is [`glimmer_tensor::Samples::token`]. The kernel gives [`NONE`] for a row that the host has to look at.

use glimmer_tensor::{Result, Samples};

use crate::{
    backend::Cuda,
    launch::{Arguments, File, Grid},
    memory::{Memory, Pinned},
    types::{CudaBuffer, require},
};

pub(crate) static FILE: File = File { name: "sampler.cu", text: include_str!("sampler.cu"), constants: &[] };

/// What stands in place of a token where the host has to look.
pub(crate) const NONE: u32 = u32::MAX;

const THREADS: usize = 256;

/// Tokens of a block at most, and at least where there are so many.
const MOST: usize = 40_960;
const LEAST: usize = 2048;

/// Tokens of a block are a multiple of this.
const STEP: usize = 128;

/// Words of a rule and of a change on the device.
const WORDS: usize = 4;

/// Bytes of rules that are sent at most; rows beyond are left to the host.
const SENT: usize = 16 << 20;

/// What sampling keeps between steps.
#[derive(Debug, Default)]
pub(crate) struct Sampling {
    words: Vec<u32>,
    rules: Option<(Pinned, Memory)>,
    tokens: Option<Memory>,
}

/// Where the device finds rules: the rows', their changes, their masks. All zero: every row as it is.
#[derive(Debug, Clone, Copy, Default)]
struct Rules {
    rows: u64,
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

/// [`glimmer_tensor::Backend::sample`].
pub(crate) fn sample(
    cuda: &mut Cuda,
    logits: &CudaBuffer,
    vocabulary: usize,
    asked: &Samples,
    tokens: &mut Vec<Option<u32>>,
) -> Result<()> {
    asked.check(logits.rows, logits.width, vocabulary)?;
    let rows = asked.rows.len();
    tokens.clear();
    tokens.resize(rows, None);
    let bytes = 4 * WORDS * (rows + asked.changes.len()) + 8 * asked.masks.len();
    if rows == 0 || bytes > SENT {
        return Ok(());
    }
    let plain = asked.changes.is_empty() && asked.masks.is_empty();
    let rules = if plain && asked.rows.iter().zip(0..).all(|(row, i)| row.row == i) {
        Rules::default()
    } else {
        send(cuda, asked)?
    };
    let memory = match cuda.sampling.tokens.take().filter(|memory| memory.bytes() >= 4 * rows) {
        Some(memory) => memory,
        None => cuda.memory.uninitialized("sampled tokens", 4 * rows.next_power_of_two())?,
    };
    ruled(cuda, rows, logits, vocabulary, rules, memory.address())?;
    let mut found = vec![NONE; rows];
    memory.read(0, &mut found)?;
    cuda.sampling.tokens = Some(memory);
    for (token, found) in tokens.iter_mut().zip(found) {
        *token = Some(found).filter(|&found| found != NONE);
    }
    Ok(())
}

/// Sends the rules by one copy.
fn send(cuda: &mut Cuda, asked: &Samples) -> Result<Rules> {
    let words = &mut cuda.sampling.words;
    words.clear();
    for row in &asked.rows {
        let mask = row.mask.map_or(NONE, |first| 2 * first as u32);
        words.extend([row.row, row.changes.start as u32, row.changes.len() as u32, mask]);
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
    Ok(Rules { rows: address, changes: address + 4 * changes as u64, masks: address + 4 * masks as u64 })
}
