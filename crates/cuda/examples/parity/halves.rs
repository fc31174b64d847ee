//! Attention over caches of halves against the CPU backend's f32 caches, that a row alone has the bits that it has beside
//! others, and the choice of pools in contexts that take several blocks a row.

use glimmer_cuda::Cuda;
use glimmer_tensor::{Backend, CacheShape, Columns, Cpu, DsaColumns, DsaWeights, IndexerWeights, PAGE_TOKENS, Step};

use crate::{
    material::{Kind, Part, Random, buffer, matrix, norm, poison, random_buffer, read, step, vector},
    stages::{Named, compare},
};

/// Bound of attention: latents, absorbed queries and softmax weights carry 11 bits.
const ATTENTION: f64 = 1e-3;
/// Bound of a selection as a vector of zeros and ones: a hundredth of it may be others, nearly tied.
const SELECTION: f64 = 0.15;

const LATENT: usize = 512;
const Q_LORA: usize = 32;
const INDEX: (usize, usize, usize) = (32, 128, 4);
/// Sequences of the cache, and the tokens of the long one.
const SLOTS: usize = 4;
const LONG: usize = 2304;
/// Rows of a prompt: all of them, which take products of halves and lists in one piece; some, which have the same bits; and few, which
/// have others among themselves.
const MANY: [usize; 5] = [520, 300, 100, 20, 3];
/// Contexts in which a row's choice of pools is spread over four blocks, and over eight.
const SPREAD: [usize; 2] = [32 << 10, 128 << 10];

/// `count` of the tokens below `end`, ascending.
fn some_tokens(random: &mut Random, end: usize, count: usize) -> Vec<u32> {
    let mut left = count.min(end);
    let mut chosen = Vec::with_capacity(left);
    for token in 0..end {
        if random.below(end - token) < left {
            chosen.push(token as u32);
            left -= 1;
        }
    }
    chosen
}

fn run<B: Backend>(b: &mut B, out: &mut Vec<Named>, heads: usize, qk: usize, v: usize) {
    let random = &mut Random(heads as u64);
    let (index_heads, dim, kpool) = INDEX;
    let topk = 2048;
    let shape = CacheShape {
        kda_layers: 0,
        kda_heads: 1,
        kda_head_dim: 32,
        conv_kernel: 4,
        dsa_layers: 1,
        latent: LATENT,
        index_dim: dim,
        kpool,
        slots: SLOTS,
        pages: SLOTS * (LONG / PAGE_TOKENS + 1),
        max_draft: 2,
    };
    let mut cache = b.cache(&shape).unwrap();
    let weights = DsaWeights {
        q_norm: norm(b, random, Q_LORA, false, 1e-5),
        kv_norm: norm(b, random, LATENT, false, 1e-5),
        kv_b: matrix(b, random, Kind::Bf16, heads * (qk + v), LATENT),
        indexer: Some(IndexerWeights {
            k_norm: norm(b, random, dim, true, 1e-6),
            ape: vector(b, &random.values(kpool * dim)),
            heads: index_heads,
            dim,
            kpool,
            topk,
        }),
        heads,
        qk_dim: qk,
        v_dim: v,
    };
    let indexer = weights.indexer.as_ref().unwrap();
    let columns = DsaColumns { q_lora: Q_LORA, latent: LATENT };
    let width = Q_LORA + LATENT + 2 * dim + index_heads;
    let most = topk + kpool - 1;
    let mut selection = b.selection(MANY[0], most).unwrap();
    let chunks = (0..LONG / 256).map(|i| vec![[0, 256 * i, 256, 0, 256]]);
    let short: Vec<Part> = vec![[1, 0, 70, 0, 70]];
    let last: Vec<Part> = vec![[0, LONG, 3, 0, 1], [1, 70, 2, 0, 2], [2, 0, 1, 0, 1]];
    let fill = |b: &mut B, s: &Step, cache: &mut B::Cache, random: &mut Random| {
        let proj = random_buffer(b, random, s.rows(), width);
        let mut residual = poison(b, s.rows(), Q_LORA);
        b.begin(s).unwrap();
        b.dsa_write(&weights, columns, &proj, true, cache, 0, &mut residual).unwrap();
        proj
    };
    for parts in chunks.chain([short]) {
        let s = step(SLOTS, &parts, random, 10);
        fill(b, &s, &mut cache, random);
    }
    let s = step(SLOTS, &last, random, 10);
    let rows = s.rows();
    let proj = fill(b, &s, &mut cache, random);
    let query_width = heads * qk + index_heads * dim + heads % 2;
    let queries = random.values(rows * query_width);
    let query = buffer(b, rows, query_width, &queries);
    let index = Columns { buffer: &query, start: heads * qk, width: index_heads * dim };
    b.dsa_select(indexer, columns, index, &proj, &cache, 0, &mut selection).unwrap();
    for row in 0..rows {
        let mut chosen = vec![0.0; LONG + 3];
        let tokens = b.read_selection(&selection, row);
        tokens.iter().for_each(|&t| chosen[t as usize] = 1.0);
        chosen.push(tokens.len() as f32);
        // Ascending, each once.
        chosen.push(f32::from(u8::from(tokens.is_sorted_by(|a, b| a < b))));
        out.push((format!("selection {heads} row {row}"), chosen, SELECTION));
    }
    let positions: Vec<usize> = last.iter().flat_map(|p| p[1]..p[1] + p[2]).collect();
    let counts = [most, 300, 65, 64, 1, 1];
    let lists: Vec<Vec<u32>> =
        positions.iter().zip(counts).map(|(&p, count)| some_tokens(random, p + 1, count)).collect();
    for (row, list) in lists.iter().enumerate() {
        b.write_selection(&mut selection, row, list).unwrap();
    }
    let mut core = poison(b, rows, heads * v);
    let q = Columns { buffer: &query, start: 0, width: heads * qk };
    b.mla(&weights, q, &selection, &cache, 0, &mut core).unwrap();
    let all = read(b, &core, rows, heads * v);
    for (row, values) in all.chunks_exact(heads * v).enumerate() {
        out.push((format!("mla {heads} row {row}, {} tokens", lists[row].len()), values.to_vec(), ATTENTION));
    }
    // The first row alone.
    let s = step(SLOTS, &[[0, LONG, 1, 0, 1]], random, 10);
    b.begin(&s).unwrap();
    let query = buffer(b, 1, query_width, &queries[..query_width]);
    let mut alone = poison(b, 1, heads * v);
    let q = Columns { buffer: &query, start: 0, width: heads * qk };
    b.mla(&weights, q, &selection, &cache, 0, &mut alone).unwrap();
    let alone = read(b, &alone, 1, heads * v);
    let same = alone.iter().zip(&all).all(|(a, b)| a.to_bits() == b.to_bits());
    out.push((format!("alone {heads}"), vec![f32::from(u8::from(same))], 0.0));
    many(b, out, &weights, &mut cache, &mut selection, random);
}

/// Attention of a prompt's rows, and of so few and so many of the first ones.
fn many<B: Backend>(
    b: &mut B,
    out: &mut Vec<Named>,
    weights: &DsaWeights<B>,
    cache: &mut B::Cache,
    selection: &mut B::Selection,
    random: &mut Random,
) {
    let (heads, qk, v) = (weights.heads, weights.qk_dim, weights.v_dim);
    let columns = DsaColumns { q_lora: Q_LORA, latent: LATENT };
    let (index_heads, dim, _) = INDEX;
    let s = step(SLOTS, &[[3, 0, MANY[0], 0, MANY[0]]], random, 10);
    let proj = random_buffer(b, random, MANY[0], Q_LORA + LATENT + 2 * dim + index_heads);
    let mut residual = poison(b, MANY[0], Q_LORA);
    b.begin(&s).unwrap();
    b.dsa_write(weights, columns, &proj, true, cache, 0, &mut residual).unwrap();
    let width = heads * qk + heads % 2;
    let queries = random.values(MANY[0] * width);
    let lists: Vec<Vec<u32>> = (0..MANY[0]).map(|p| some_tokens(random, p + 1, 40)).collect();
    let mut first: Vec<Vec<f32>> = Vec::new();
    for rows in MANY {
        let s = step(SLOTS, &[[3, 0, rows, 0, rows]], random, 10);
        b.begin(&s).unwrap();
        for (row, list) in lists[..rows].iter().enumerate() {
            b.write_selection(selection, row, list).unwrap();
        }
        let query = buffer(b, rows, width, &queries[..rows * width]);
        let mut core = poison(b, rows, heads * v);
        let q = Columns { buffer: &query, start: 0, width: heads * qk };
        b.mla(weights, q, selection, cache, 0, &mut core).unwrap();
        let all = read(b, &core, rows, heads * v);
        first.push(all[..heads * v].to_vec());
        out.push((format!("mla {heads} of {rows} rows"), all, ATTENTION));
    }
    // Products of queries with 25 to 511 rows may be the library's where the own ones do not take a head's widths.
    let own = [64, 256].contains(&qk) && width % 2 == 0;
    let equal = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
    let same = !own || equal(&first[1], &first[2]) && equal(&first[3], &first[4]);
    out.push((format!("few and some of {heads}"), vec![f32::from(u8::from(same))], 0.0));
}

/// Selections of rows at the ends of [`SPREAD`]: some, and so many that each has one block.
fn spread<B: Backend>(b: &mut B, out: &mut Vec<Named>) {
    let random = &mut Random(77);
    let (index_heads, dim, kpool) = INDEX;
    let (topk, chunk, rows) = (2048, 2048, 40);
    let end = SPREAD[1] + 2 * chunk;
    let shape = CacheShape {
        kda_layers: 0,
        kda_heads: 1,
        kda_head_dim: 32,
        conv_kernel: 4,
        dsa_layers: 1,
        latent: LATENT,
        index_dim: dim,
        kpool,
        slots: 1,
        pages: end / PAGE_TOKENS,
        max_draft: 2,
    };
    b.reserve(chunk, 8192, end).unwrap();
    let mut cache = b.cache(&shape).unwrap();
    let weights = DsaWeights {
        q_norm: norm(b, random, Q_LORA, false, 1e-5),
        kv_norm: norm(b, random, LATENT, false, 1e-5),
        kv_b: matrix(b, random, Kind::Bf16, 64, LATENT),
        indexer: Some(IndexerWeights {
            k_norm: norm(b, random, dim, true, 1e-6),
            ape: vector(b, &random.values(kpool * dim)),
            heads: index_heads,
            dim,
            kpool,
            topk,
        }),
        heads: 1,
        qk_dim: 32,
        v_dim: 32,
    };
    let indexer = weights.indexer.as_ref().unwrap();
    let columns = DsaColumns { q_lora: Q_LORA, latent: LATENT };
    let width = Q_LORA + LATENT + 2 * dim + index_heads;
    let mut selection = b.selection(rows, topk + kpool - 1).unwrap();
    for first in (0..end).step_by(chunk) {
        let s = step(1, &[[0, first, chunk, 0, chunk]], random, 10);
        let proj = random_buffer(b, random, chunk, width);
        let mut residual = poison(b, chunk, Q_LORA);
        b.begin(&s).unwrap();
        b.dsa_write(&weights, columns, &proj, true, &mut cache, 0, &mut residual).unwrap();
        if !SPREAD.contains(&first) {
            continue;
        }
        for count in [3, rows] {
            let s = step(1, &[[0, first + chunk - count, count, 0, 1]], random, 10);
            let query = random_buffer(b, random, count, index_heads * dim);
            let index = Columns { buffer: &query, start: 0, width: index_heads * dim };
            b.begin(&s).unwrap();
            b.dsa_select(indexer, columns, index, &proj, &cache, 0, &mut selection).unwrap();
            for row in [0, 1, count - 1] {
                let mut chosen = vec![0.0; end];
                let tokens = b.read_selection(&selection, row);
                tokens.iter().for_each(|&t| chosen[t as usize] = 1.0);
                chosen.push(tokens.len() as f32);
                chosen.push(f32::from(u8::from(tokens.is_sorted_by(|a, b| a < b))));
                out.push((format!("selection of {count} rows at {first}, row {row}"), chosen, SELECTION));
            }
        }
    }
}

fn all<B: Backend>(b: &mut B) -> Vec<Named> {
    let mut out = Vec::new();
    b.reserve(MANY[0], 8192, 2 * LONG).unwrap();
    for (heads, qk, v) in [(9, 64, 64), (8, 32, 40), (32, 256, 256), (40, 64, 64)] {
        run(b, &mut out, heads, qk, v);
    }
    spread(b, &mut out);
    out
}

/// Compares; the number of failures.
pub(crate) fn check(mut cuda: Cuda) -> usize {
    let expected = all(&mut Cpu::new(8));
    compare(&expected, &all(&mut cuda), &all(&mut cuda))
}
