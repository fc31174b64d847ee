//! Products with BF16 matrices of one rank of one, two and four: every projection of a step, gates with their activation, the
//! head. Each is measured with the splitting of its activations, in a chain over weights that the second-level cache cannot hold.

use glimmer_checkpoint::TextConfig;
use glimmer_tensor::{Backend, Columns, Linear, Result, Swiglu};

use super::{
    Contents, Row, Unit, fill, random_matrix,
    slice::{RANKS, ROWS, kda_width, of_ranks, slice},
    timed,
};
use crate::{
    backend::Cuda,
    kernels::{
        dense::{self, gated},
        gemm::Input,
    },
};

/// Weights in turn are larger than the second-level cache by this much.
const ROTATION: usize = 240 << 20;

/// Rows whose logits a step wants at most: a prompt wants one.
const MOST_LOGITS: usize = 768;

/// Name, outputs, columns.
type Shape = (&'static str, usize, usize);

/// Projections that ranks share.
fn shared(text: &TextConfig) -> [Shape; 6] {
    let (hidden, kda, mla) = (text.hidden_size, &text.kda, &text.mla);
    [
        ("KDA in_proj", 3 * kda_width(text) + kda.num_heads + 2 * kda.head_dim, hidden),
        ("KDA o_proj", hidden, kda_width(text)),
        ("DSA q_b", mla.num_heads * mla.qk_nope_head_dim, mla.q_lora_rank),
        ("DSA o_proj", hidden, mla.num_heads * mla.v_head_dim),
        ("dense down", hidden, text.intermediate_size),
        ("shared down", hidden, text.moe.num_shared * text.moe.intermediate_size),
    ]
}

/// Projections that every rank has whole.
fn whole(text: &TextConfig) -> [Shape; 3] {
    let (hidden, mla, indexer) = (text.hidden_size, &text.mla, &text.indexer);
    let joint = mla.q_lora_rank + mla.kv_lora_rank + 2 * indexer.head_dim + indexer.num_heads;
    [
        ("DSA q_a, kv_a, index key, gate, weights", joint, hidden),
        ("DSA index queries", indexer.num_heads * indexer.head_dim, mla.q_lora_rank),
        ("MTP eh_proj", hidden, 2 * hidden),
    ]
}

pub(super) fn rows(cuda: &mut Cuda, each: &mut dyn FnMut(Row)) -> Result<()> {
    for ranks in RANKS {
        let text = slice(ranks)?.text;
        let of = of_ranks(ranks);
        for (name, out, columns) in shared(&text) {
            product(cuda, &format!("{name} [{out}, {columns}], {of}"), [out, columns], each)?;
        }
        low_ranks(cuda, &text, &of, each)?;
        let shared = text.moe.num_shared * text.moe.intermediate_size;
        for (name, width) in [("dense gate, up, SwiGLU", text.intermediate_size), ("shared gate, up, SwiGLU", shared)] {
            let name = format!("{name} 2 x [{width}, {}], {of}", text.hidden_size);
            gate(cuda, &name, [width, text.hidden_size], each)?;
        }
        head(cuda, &text, &of, each)?;
    }
    let text = slice(1)?.text;
    for (name, out, columns) in whole(&text) {
        product(cuda, &format!("{name} [{out}, {columns}]"), [out, columns], each)?;
    }
    Ok(())
}

/// Matrices in turn.
fn sets(size: usize) -> usize {
    (ROTATION / size.max(1) + 2).min(24)
}

fn matrix(cuda: &Cuda, [out, columns]: [usize; 2]) -> Result<Linear<Cuda>> {
    Ok(Linear { weight: random_matrix(cuda, out, columns)?, bias: None })
}

fn floats(cuda: &Cuda, rows: usize, width: usize) -> Result<crate::types::CudaBuffer> {
    let buffer = cuda.buffer(rows, width)?;
    fill(cuda, &buffer.memory, Contents::Floats)?;
    Ok(buffer)
}

/// A row of results of matrices `[out, columns]`, `count` of them side by side.
fn result(kernel: &str, rows: usize, [count, out, columns]: [usize; 3], written: usize, micros: [f64; 3]) -> Row {
    Row {
        kernel: kernel.to_owned(),
        rows,
        micros,
        bytes: (2 * count * out * columns + 4 * rows * (columns + written)) as f64,
        flops: 2.0 * (rows * count * out * columns) as f64,
        unit: Unit::Tensor,
    }
}

fn product(cuda: &mut Cuda, name: &str, shape: [usize; 2], each: &mut dyn FnMut(Row)) -> Result<()> {
    let [out, columns] = shape;
    let sets = (0..sets(2 * out * columns)).map(|_| matrix(cuda, shape)).collect::<Result<Vec<_>>>()?;
    for rows in ROWS {
        let x = floats(cuda, rows, columns)?;
        let mut y = cuda.buffer(rows, out)?;
        let micros = timed(cuda, sets.len().max(8), |cuda, i| {
            let x = Columns { buffer: &x, start: 0, width: columns };
            dense::linear(cuda, rows, x, &[&sets[i % sets.len()]], &mut y, 0)
        })?;
        each(result(name, rows, [1, out, columns], out, micros));
    }
    Ok(())
}

/// The gates of delta attention behind their low ranks: two products of other columns, as a step has them.
fn low_ranks(cuda: &mut Cuda, text: &TextConfig, of: &str, each: &mut dyn FnMut(Row)) -> Result<()> {
    let (width, dim) = (kda_width(text), text.kda.head_dim);
    let start = 3 * width + text.kda.num_heads;
    let sets = (0..sets(4 * width * dim))
        .map(|_| Ok([matrix(cuda, [width, dim])?, matrix(cuda, [width, dim])?]))
        .collect::<Result<Vec<_>>>()?;
    for rows in ROWS {
        let x = floats(cuda, rows, start + 2 * dim)?;
        let mut y = cuda.buffer(rows, 2 * width)?;
        let micros = timed(cuda, sets.len().max(8), |cuda, i| {
            for (j, linear) in sets[i % sets.len()].iter().enumerate() {
                let x = Columns { buffer: &x, start: start + j * dim, width: dim };
                dense::linear(cuda, rows, x, &[linear], &mut y, j * width)?;
            }
            Ok(())
        })?;
        let row = result(&format!("KDA f_b, g_b 2 x [{width}, {dim}], {of}"), rows, [2, width, dim], 2 * width, micros);
        each(Row { bytes: row.bytes + (4 * rows * dim) as f64, ..row });
    }
    Ok(())
}

/// Gate and up with the activation.
fn gate(cuda: &mut Cuda, name: &str, shape: [usize; 2], each: &mut dyn FnMut(Row)) -> Result<()> {
    let [width, columns] = shape;
    // Only the kind of down counts here: one serves all.
    let sets = (0..sets(4 * width * columns))
        .map(|_| {
            let down = matrix(cuda, [columns, width])?;
            Ok(Swiglu { gate: matrix(cuda, shape)?, up: matrix(cuda, shape)?, down })
        })
        .collect::<Result<Vec<_>>>()?;
    for rows in ROWS {
        let x = floats(cuda, rows, columns)?;
        let mut act = cuda.buffer(rows, width)?;
        let micros = timed(cuda, sets.len().max(8), |cuda, i| {
            let input = Input { buffer: &x, start: 0, width: columns, list: 0 };
            gated(cuda, rows, input, &sets[i % sets.len()], 10.0, &mut act)
        })?;
        each(result(name, rows, [2, width, columns], width, micros));
    }
    Ok(())
}

/// The head for all rows of steps that verify drafts.
fn head(cuda: &mut Cuda, text: &TextConfig, of: &str, each: &mut dyn FnMut(Row)) -> Result<()> {
    let (out, columns) = (text.vocab_size, text.hidden_size);
    let sets = (0..sets(2 * out * columns)).map(|_| random_matrix(cuda, out, columns)).collect::<Result<Vec<_>>>()?;
    for rows in ROWS.into_iter().filter(|&rows| rows <= MOST_LOGITS) {
        let x = floats(cuda, rows, columns)?;
        let mut logits = cuda.buffer(rows, out)?;
        let wanted: Vec<u32> = (0..rows as u32).collect();
        let step = glimmer_tensor::Step { logits: wanted.clone(), ..super::small::step(rows) };
        cuda.begin(&step)?;
        let micros = timed(cuda, sets.len().max(4), |cuda, i| {
            dense::head(cuda, &sets[i % sets.len()], &wanted, &x, &mut logits)
        })?;
        each(result(&format!("lm_head [{out}, {columns}], {of}"), rows, [1, out, columns], out, micros));
    }
    Ok(())
}
