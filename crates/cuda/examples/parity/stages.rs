//! Every stage on both backends: the same body, the same random numbers, named results.

use glimmer_cuda::Cuda;
use glimmer_tensor::{
    Backend, CacheShape, Columns, Cpu, DsaColumns, DsaWeights, Experts, FeatureRow, IndexerWeights, KdaForm,
    KdaWeights, MhcWeights, PAGE_TOKENS, PatchGrid, RouterRule, Streams,
};

use crate::{
    material::{Kind, Part, Random, buffer, linear, matrix, norm, poison, random_buffer, read, step, swiglu, vector},
    router, several,
};

/// A named result, with the largest relative error that it may have.
pub(crate) type Named = (String, Vec<f32>, f64);

/// Bound of a product: activations carry 16 to 17 bits.
pub(crate) const PRODUCT: f64 = 1e-5;
/// Bound of a product of INT4 experts: activations, and what is summed over a row's experts, carry 11 bits.
const HALVES: f64 = 5e-4;
/// Bound of f32 arithmetic in another order.
const FLOAT: f64 = 3e-6;

fn products<B: Backend>(b: &mut B, out: &mut Vec<Named>) {
    for (case, (kind, outs, columns)) in [
        (Kind::Bf16, 40, 256),
        (Kind::Bf16, 129, 136),
        (Kind::Bf16, 8, 64),
        (Kind::Bf16, 64, 1176),
        (Kind::Bf16, 96, 4096),
        (Kind::Bf16, 31, 2048),
        (Kind::Bf16, 24, 12),
        (Kind::Bf16, 700, 512),
        (Kind::Bf16, 150, 1536),
        (Kind::Bf16, 2060, 2048),
        (Kind::Bf16, 30, 8192),
        (Kind::F32, 33, 200),
        (Kind::Int4, 48, 128),
        (Kind::Int4, 136, 2048),
        (Kind::Int4, 96, 4096),
    ]
    .into_iter()
    .enumerate()
    {
        for rows in [1, 3, 8, 9, 17, 24, 25, 70] {
            if outs > 1000 && ![3, 24].contains(&rows) {
                continue;
            }
            let random = &mut Random(100 * case as u64 + rows as u64);
            let x = random_buffer(b, random, rows + 1, columns + 5);
            let first = linear(b, random, kind, outs, columns, rows % 2 == 1);
            let second = linear(b, random, Kind::F32, 5, columns, true);
            let mut y = poison(b, rows, outs + 8);
            let x = Columns { buffer: &x, start: 5, width: columns };
            b.linear(rows, x, &[&first, &second], &mut y, 2).unwrap();
            let all = read(b, &y, rows, outs + 8);
            let written: Vec<f32> = all.chunks_exact(outs + 8).flat_map(|r| r[2..outs + 7].to_vec()).collect();
            out.push((format!("linear {kind:?} [{outs}, {columns}] M {rows}"), written, PRODUCT));
            if kind == Kind::Bf16 && [8, 24].contains(&rows) {
                let mut alone = poison(b, 1, outs + 8);
                b.linear(1, x, &[&first], &mut alone, 2).unwrap();
                let same = read(b, &alone, 1, outs + 8)[2..outs + 2] == all[2..outs + 2];
                let name = format!("linear {kind:?} [{outs}, {columns}]: a row's bits, alone and among {rows}");
                out.push((name, vec![1.0, f32::from(u8::from(same))], 0.0));
            }
        }
    }
    for (case, (kind, shape, bias)) in [
        (Kind::Bf16, [64, 96, 40], true),
        (Kind::Bf16, [128, 40, 64], false),
        (Kind::Bf16, [256, 512, 256], false),
        (Kind::Bf16, [4096, 72, 40], true),
        (Kind::Bf16, [1536, 300, 512], false),
        (Kind::Int4, [256, 128, 64], false),
        (Kind::Int4, [4096, 256, 128], false),
    ]
    .into_iter()
    .enumerate()
    {
        for rows in [1, 5, 12, 40] {
            let random = &mut Random(7000 + 100 * case as u64 + rows as u64);
            let weights = swiglu(b, random, kind, shape, bias);
            let x = random_buffer(b, random, rows, shape[0]);
            let (mut act, mut y) = (poison(b, rows, shape[1]), poison(b, rows, shape[2]));
            b.swiglu(rows, &weights, 0.4, &x, &mut act, &mut y).unwrap();
            out.push((format!("swiglu act {kind:?} {shape:?} M {rows}"), read(b, &act, rows, shape[1]), 3.0 * PRODUCT));
            out.push((format!("swiglu {kind:?} {shape:?} M {rows}"), read(b, &y, rows, shape[2]), 3.0 * PRODUCT));
        }
    }
}

/// Products of so many rows that a library takes them, on both sides of the number from which weights are halves.
fn many_rows<B: Backend>(b: &mut B, out: &mut Vec<Named>) {
    for (case, (outs, columns, biased)) in
        [(192, 512, false), (100, 1536, true), (64, 4096, false)].into_iter().enumerate()
    {
        for ([few, many], bound) in [([25, 300], PRODUCT), ([512, 900], HALVES)] {
            let random = &mut Random(4000 + 10 * case as u64 + few as u64);
            let weight = linear(b, random, Kind::Bf16, outs, columns, biased);
            let x = random_buffer(b, random, many, columns);
            let mut run = |rows: usize| {
                let mut y = poison(b, rows, outs + 4);
                b.linear(rows, Columns { buffer: &x, start: 0, width: columns }, &[&weight], &mut y, 4).unwrap();
                read(b, &y, rows, outs + 4).chunks_exact(outs + 4).flat_map(|r| r[4..].to_vec()).collect::<Vec<f32>>()
            };
            let (alone, all) = (run(few), run(many));
            let same = f32::from(u8::from(alone == all[..few * outs]));
            out.push((format!("many rows [{outs}, {columns}] M {many}"), all, bound));
            out.push((format!("many rows [{outs}, {columns}]: {few} among {many}"), vec![1.0, same], 0.0));
        }
    }
    // Several matrices of one input, small ones behind each other.
    for rows in [25, 300, 600] {
        let random = &mut Random(4800 + rows as u64);
        let weights = [520, 64, 128, 36, 600, 8].map(|outs| linear(b, random, Kind::Bf16, outs, 512, false));
        let all: Vec<_> = weights.iter().collect();
        let (x, width) = (random_buffer(b, random, rows, 512), 520 + 64 + 128 + 36 + 600 + 8);
        let mut y = poison(b, rows, width + 4);
        b.linear(rows, Columns { buffer: &x, start: 0, width: 512 }, &all, &mut y, 4).unwrap();
        let found = read(b, &y, rows, width + 4).chunks_exact(width + 4).flat_map(|r| r[4..].to_vec()).collect();
        let bound = if rows < 512 { PRODUCT } else { HALVES };
        out.push((format!("many rows, several matrices M {rows}"), found, bound));
    }
    for rows in [100, 600] {
        let random = &mut Random(4900 + rows as u64);
        let weights = swiglu(b, random, Kind::Bf16, [512, 256, 128], false);
        let x = random_buffer(b, random, rows, 512);
        let (mut act, mut y) = (poison(b, rows, 256), poison(b, rows, 128));
        b.swiglu(rows, &weights, 0.4, &x, &mut act, &mut y).unwrap();
        let bound = if rows < 512 { 3.0 * PRODUCT } else { 2.0 * HALVES };
        out.push((format!("many rows, swiglu act M {rows}"), read(b, &act, rows, 256), bound));
        out.push((format!("many rows, swiglu M {rows}"), read(b, &y, rows, 128), bound));
    }
}

fn rows_and_norms<B: Backend>(b: &mut B, out: &mut Vec<Named>) {
    for (width, rows) in [(64, 3), (256, 9), (4096, 2)] {
        let random = &mut Random(width as u64);
        let table = matrix(b, random, Kind::Bf16, 50, width);
        let features = random_buffer(b, random, 4, width);
        let mut s = step(2, &[[0, 0, rows, 0, rows]], random, 50);
        s.features = vec![FeatureRow { row: 1, feature: 3 }];
        s.logits = vec![0, rows as u32 - 1];
        b.begin(&s).unwrap();
        let mut streams = Streams {
            x: poison(b, rows, 4 * width),
            post: poison(b, rows, 4),
            comb: poison(b, rows, 16),
            collapsed: poison(b, rows, width),
        };
        b.embed(&table, &features, &mut streams, 4).unwrap();
        out.push((format!("embed {width}"), read(b, &streams.x, rows, 4 * width), 0.0));

        let mut x = poison(b, rows, width);
        for (i, y) in [None, Some(random_buffer(b, random, rows, width))].into_iter().enumerate() {
            let mixer = mixer(b, random, Kind::F32, width, 1.0);
            let n = norm(b, random, width, false, 1e-5);
            b.mhc(rows, &mixer, &n, y.as_ref(), &mut streams, &mut x).unwrap();
            site_results(b, &format!("{width} {i}"), [rows, width], &streams, &x, out);
        }
        let y = random_buffer(b, random, rows, width);
        let n = norm(b, random, width, false, 1e-5);
        let mut hidden = poison(b, rows, width);
        b.mhc_head(rows, &n, &y, &mut streams, &mut hidden).unwrap();
        out.push((format!("mhc_head {width}"), read(b, &hidden, rows, width), 1e-5));

        for biased in [false, true] {
            let n = norm(b, random, width, biased, 1e-6);
            let (mut x, y) = (random_buffer(b, random, rows, width), random_buffer(b, random, rows, width));
            let mut o = poison(b, rows, width);
            b.add_norm(rows, Some(&y), &n, &mut x, &mut o).unwrap();
            out.push((format!("add_norm x {width} {biased}"), read(b, &x, rows, width), 0.0));
            out.push((format!("add_norm {width} {biased}"), read(b, &o, rows, width), FLOAT));
            b.add_norm(rows, None, &n, &mut x, &mut o).unwrap();
            out.push((format!("norm {width} {biased}"), read(b, &o, rows, width), FLOAT));
            if biased {
                b.norm_gelu(rows, &n, &mut x).unwrap();
                out.push((format!("norm_gelu {width}"), read(b, &x, rows, width), FLOAT));
            }
        }
        let (enorm, hnorm) = (norm(b, random, width, false, 1e-5), norm(b, random, width, false, 1e-5));
        let source: Vec<u32> = (0..rows as u32).rev().collect();
        let mut o = poison(b, rows, 2 * width);
        b.mtp_input(&table, &enorm, &hnorm, &hidden, &source, &mut o).unwrap();
        out.push((format!("mtp_input {width}"), read(b, &o, rows, 2 * width), FLOAT));

        let head = matrix(b, random, Kind::Bf16, 77, width);
        let mut logits = poison(b, 2, 77);
        b.head(&head, &s.logits, &hidden, &mut logits).unwrap();
        out.push((format!("head {width}"), read(b, &logits, 2, 77), PRODUCT));

        let mut grouped = poison(b, 2, 2 * width);
        let four = random_buffer(b, random, 4, width);
        b.group_rows(2, 2, &four, &mut grouped).unwrap();
        b.copy_row(&hidden, rows - 1, &mut grouped, 1).unwrap();
        out.push((format!("group_rows, copy_row {width}"), read(b, &grouped, 2, 2 * width), 1e-5));
    }
}

fn mixer<B: Backend>(b: &B, random: &mut Random, kind: Kind, width: usize, scale: f32) -> MhcWeights<B> {
    MhcWeights {
        mix: matrix(b, random, kind, 24, 4 * width),
        base: vector(b, &random.values(24)),
        scale: vector(b, &[0.9, 1.1, 1.3].map(|s| s * scale)),
        streams: 4,
        rms_eps: 1e-5,
        eps: 1e-6,
        sinkhorn_iters: 20,
    }
}

/// What a site leaves.
fn site_results<B: Backend>(
    b: &B,
    case: &str,
    [rows, width]: [usize; 2],
    streams: &Streams<B>,
    x: &B::Buffer,
    out: &mut Vec<Named>,
) {
    for (name, buffer, w) in [
        ("x", x, width),
        ("streams", &streams.x, 4 * width),
        ("post", &streams.post, 4),
        ("comb", &streams.comb, 16),
        ("collapsed", &streams.collapsed, width),
    ] {
        out.push((format!("mhc {name} {case}"), read(b, buffer, rows, w), 1e-5));
    }
}

/// Sites with a BF16 mixing matrix: three in a row over many numbers of rows, large and tiny values, rows of zeros, streams
/// that cancel; and a row alone gives the bits it gives beside others.
fn sites<B: Backend>(b: &mut B, out: &mut Vec<Named>) {
    for (width, all) in
        [(60, &[1, 9][..]), (128, &[3, 17]), (260, &[8]), (1024, &[5, 40, 530]), (4096, &[1, 2, 7, 8, 9, 33, 300, 600])]
    {
        for &rows in all {
            let random = &mut Random(31 * width as u64 + rows as u64);
            let mut values = random.values(rows * 4 * width);
            for (row, values) in values.chunks_exact_mut(4 * width).enumerate() {
                let by = [1.0, 1e-4, 300.0, 0.0][row % 4];
                values.iter_mut().for_each(|v| *v *= by);
                if row % 5 == 3 {
                    let (first, rest) = values.split_at_mut(width);
                    rest[..width].iter_mut().zip(first).for_each(|(r, f)| *r = -*f);
                }
            }
            let sites: Vec<_> = (0..3)
                .map(|i| (mixer(b, random, Kind::Bf16, width, [1.0, 8.0, 0.1][i]), norm(b, random, width, false, 1e-5)))
                .collect();
            let y = random.values(rows * width);
            let run = |b: &mut B, rows: usize, streams: &[f32], y: &[f32]| {
                let mut s = Streams {
                    x: buffer(b, rows, 4 * width, streams),
                    post: poison(b, rows, 4),
                    comb: poison(b, rows, 16),
                    collapsed: poison(b, rows, width),
                };
                let (y, mut x) = (buffer(b, rows, width, y), poison(b, rows, width));
                let mut results = Vec::new();
                for (i, (mixer, norm)) in sites.iter().enumerate() {
                    b.mhc(rows, mixer, norm, (i > 0).then_some(&y), &mut s, &mut x).unwrap();
                    site_results(b, &format!("{width} M {rows} site {i}"), [rows, width], &s, &x, &mut results);
                }
                results
            };
            let together = run(b, rows, &values, &y);
            let row = rows / 2;
            let alone = run(b, 1, &values[row * 4 * width..][..4 * width], &y[row * width..][..width]);
            let same = alone.iter().zip(&together).all(|(a, t)| {
                let w = a.1.len();
                a.1.iter().zip(&t.1[row * w..]).all(|(a, t)| a.to_bits() == t.to_bits())
            });
            out.push((format!("mhc_alone {width} M {rows}"), vec![f32::from(u8::from(same))], 0.0));
            out.extend(together);
        }
    }
}

/// Steps that a stage with a cache goes through: chunks of odd sizes, decoding, drafts with every number of accepted rows.
const TRAFFIC: [&[Part]; 8] = [
    &[[1, 0, 5, 0, 5], [0, 0, 70, 0, 70], [2, 0, 1, 0, 1]],
    &[[0, 70, 1, 0, 1], [1, 5, 64, 0, 64], [2, 1, 3, 0, 1]],
    &[[2, 2, 3, 0, 1], [0, 71, 3, 0, 1], [1, 69, 2, 0, 2]],
    &[[0, 73, 3, 1, 1], [2, 5, 3, 2, 1], [1, 71, 130, 0, 130]],
    &[[1, 201, 3, 0, 1], [2, 7, 1, 1, 0], [0, 76, 2, 2, 2]],
    &[[1, 203, 3, 1, 1], [2, 7, 2, 0, 2], [0, 78, 1, 0, 1]],
    &[[1, 206, 1, 2, 1], [2, 9, 140, 0, 140], [0, 79, 3, 0, 1]],
    &[[0, 80, 1, 0, 1], [1, 0, 9, 0, 9]],
];

fn shape(heads: usize, dim: usize, latent: usize, index_dim: usize, kpool: usize) -> CacheShape {
    CacheShape {
        kda_layers: 2,
        kda_heads: heads,
        kda_head_dim: dim,
        conv_kernel: 4,
        dsa_layers: 2,
        latent,
        index_dim,
        kpool,
        slots: 4,
        pages: 32,
        max_draft: 2,
    }
}

fn kda<B: Backend>(b: &mut B, out: &mut Vec<Named>) {
    for (heads, dim) in [(2, 32), (3, 64), (2, 128)] {
        let random = &mut Random(dim as u64);
        let inner = heads * dim;
        let mut cache = b.cache(&shape(heads, dim, 32, 32, 4)).unwrap();
        let weights = KdaWeights {
            conv: matrix(b, random, Kind::Bf16, 3 * inner, 4),
            a_log: vector(b, &random.values(heads)),
            dt_bias: vector(b, &random.values(inner)),
            o_norm: norm(b, random, dim, false, 1e-5),
            heads,
            dim,
            gate_lower_bound: -5.0,
        };
        for (i, parts) in TRAFFIC.iter().enumerate() {
            let s = step(4, parts, random, 10);
            let rows = s.rows();
            let proj = random_buffer(b, random, rows, 3 * inner + heads + 3);
            let gates = random_buffer(b, random, rows, 2 * inner);
            let mut o = poison(b, rows, inner);
            b.begin(&s).unwrap();
            b.kda(&weights, KdaForm::Recurrent, &proj, &gates, &mut cache, 1, &mut o).unwrap();
            out.push((format!("kda {heads} x {dim} step {i}"), read(b, &o, rows, inner), 1e-5));
            for slot in 0..3 {
                let state = b.read_state(&cache, 1, slot).unwrap();
                out.push((format!("kda state {heads} x {dim} step {i} slot {slot}"), state, 1e-5));
            }
            if i == 4 {
                b.copy_slot(&mut cache, 0, 3).unwrap();
                let state = b.read_state(&cache, 1, 3).unwrap();
                out.push((format!("kda copied state {heads} x {dim}"), state, 1e-5));
            }
        }
    }
}

/// Drafts verified in any pattern of acceptance, in any company, give the bits of one row after the other; values are ordinary,
/// large, tiny and zero, decays from none to the strongest.
fn kda_exactness<B: Backend>(b: &mut B, out: &mut Vec<Named>) {
    const POSITIONS: usize = 24;
    for (case, (heads, dim)) in [(2, 32), (1, 64), (3, 96), (3, 128)].into_iter().enumerate() {
        let random = &mut Random(4000 + case as u64);
        let inner = heads * dim;
        let weights = KdaWeights {
            conv: matrix(b, random, if case == 1 { Kind::F32 } else { Kind::Bf16 }, 3 * inner, 4),
            a_log: vector(b, &random.values(heads).iter().map(|v| 2.0 * v).collect::<Vec<_>>()),
            dt_bias: vector(b, &random.values(inner).iter().map(|v| 6.0 * v).collect::<Vec<_>>()),
            o_norm: norm(b, random, dim, false, 1e-5),
            heads,
            dim,
            gate_lower_bound: -5.0,
        };
        let (wide, gates_wide) = (3 * inner + heads, 2 * inner);
        let mut proj: Vec<Vec<f32>> = (0..POSITIONS).map(|_| random.values(wide)).collect();
        for (p, values) in proj.iter_mut().enumerate() {
            let by = [1.0, 30.0, 1e-3, 0.0, 1.0, 1.0][p % 6];
            values.iter_mut().for_each(|v| *v *= by);
        }
        let gates: Vec<Vec<f32>> = (0..POSITIONS).map(|_| random.values(gates_wide)).collect();
        // Slot 0 of a fresh cache with three others beside it or not; steps of (position, rows, fold, commit).
        let run = |b: &mut B, steps: &[[usize; 4]], company: bool| {
            let mut cache = b.cache(&shape(heads, dim, 32, 32, 4)).unwrap();
            let mut results = vec![Vec::new(); POSITIONS];
            let random = &mut Random(1);
            for &[position, rows, fold, commit] in steps {
                let mut parts: Vec<Part> = vec![[2, position, rows, fold, commit]];
                if company {
                    parts.insert(0, [1, 0, 5, 0, 5]);
                    parts.push([0, 0, 1, 0, 1]);
                }
                let at = if company { 5 } else { 0 };
                let s = step(4, &parts, random, 10);
                let total = s.rows();
                let (mut p, mut g) = (random.values(total * wide), random.values(total * gates_wide));
                for r in 0..rows {
                    p[(at + r) * wide..][..wide].copy_from_slice(&proj[position + r]);
                    g[(at + r) * gates_wide..][..gates_wide].copy_from_slice(&gates[position + r]);
                }
                let (p, g) = (buffer(b, total, wide, &p), buffer(b, total, gates_wide, &g));
                let mut o = poison(b, total, inner);
                b.begin(&s).unwrap();
                b.kda(&weights, KdaForm::Recurrent, &p, &g, &mut cache, 1, &mut o).unwrap();
                for (r, row) in read(b, &o, total, inner).chunks_exact(inner).skip(at).take(rows).enumerate() {
                    results[position + r] = row.to_vec();
                }
            }
            let state = b.read_state(&cache, 1, 2).unwrap();
            (results.concat(), state)
        };
        let singles: Vec<[usize; 4]> = (0..POSITIONS).map(|p| [p, 1, 0, 1]).collect();
        let (expected, state) = run(b, &singles, false);
        // A prompt of 7 rows, then drafts of which 2, 1, 0 are accepted in turn; the last step commits everything.
        let mut drafts = vec![[0, 7, 0, 7]];
        let (mut position, mut fold) = (7, 0);
        for accepted in [2, 0, 1, 2, 2].into_iter().cycle() {
            if position + 3 > POSITIONS - 3 {
                break;
            }
            drafts.push([position, 3, fold, 1]);
            position += 1 + accepted;
            fold = accepted;
        }
        drafts.push([position, POSITIONS - position, fold, POSITIONS - position]);
        for company in [false, true] {
            for (name, steps) in
                [("singles", &singles), ("drafts", &drafts), ("prompt", &vec![[0, POSITIONS, 0, POSITIONS]])]
            {
                let (found, found_state) = run(b, steps, company);
                let same = found
                    .iter()
                    .zip(&expected)
                    .chain(found_state.iter().zip(&state))
                    .all(|(f, e)| f.to_bits() == e.to_bits());
                out.push((format!("kda_exact {heads} x {dim} {name} {company}"), vec![f32::from(u8::from(same))], 0.0));
            }
        }
        out.push((format!("kda {heads} x {dim} singles"), expected, 1e-5));
        out.push((format!("kda state {heads} x {dim} singles"), state, 1e-5));
    }
}

/// Steps with whole chunks beside rows outside them, prompts cut at odd places, drafts between them.
const CHUNKED_TRAFFIC: [&[Part]; 6] = [
    &[[1, 0, 64, 0, 64], [0, 0, 150, 0, 150], [2, 0, 5, 0, 5]],
    &[[0, 150, 3, 0, 1], [1, 64, 128, 0, 128], [2, 5, 100, 0, 100]],
    &[[0, 152, 200, 1, 200], [2, 105, 2, 0, 1]],
    &[[2, 107, 85, 1, 83], [1, 192, 70, 0, 70]],
    &[[2, 191, 66, 1, 65], [1, 262, 122, 0, 122]],
    &[[2, 256, 1, 0, 1], [1, 384, 1, 0, 1], [0, 352, 200, 0, 200]],
];

fn kda_chunks<B: Backend>(b: &mut B, out: &mut Vec<Named>) {
    // Decays as they come, strong ones, next to none.
    for (case, (heads, dim, shift)) in
        [(2, 128, 1.0), (9, 128, 8.0), (1, 128, -12.0), (2, 64, 1.0)].into_iter().enumerate()
    {
        let random = &mut Random(5000 + case as u64);
        let inner = heads * dim;
        let mut cache = b.cache(&shape(heads, dim, 32, 32, 4)).unwrap();
        let weights = KdaWeights {
            conv: matrix(b, random, Kind::Bf16, 3 * inner, 4),
            a_log: vector(b, &random.values(heads)),
            dt_bias: vector(b, &random.values(inner).iter().map(|v| v + shift).collect::<Vec<_>>()),
            o_norm: norm(b, random, dim, false, 1e-5),
            heads,
            dim,
            gate_lower_bound: -5.0,
        };
        for (i, parts) in CHUNKED_TRAFFIC.iter().enumerate() {
            let s = step(4, parts, random, 10);
            let rows = s.rows();
            // Rows of whole pieces of four: others go one after the other.
            let proj = random_buffer(b, random, rows, (3 * inner + heads).next_multiple_of(4) + 4);
            let gates = random_buffer(b, random, rows, 2 * inner);
            let mut o = poison(b, rows, inner);
            b.begin(&s).unwrap();
            b.kda(&weights, KdaForm::Chunked, &proj, &gates, &mut cache, 1, &mut o).unwrap();
            out.push((format!("kda_chunked {heads} x {dim} decay {shift} step {i}"), read(b, &o, rows, inner), 3e-3));
            for slot in 0..3 {
                let state = b.read_state(&cache, 1, slot).unwrap();
                let name = format!("kda_chunked state {heads} x {dim} decay {shift} step {i} slot {slot}");
                out.push((name, state, 3e-3));
            }
        }
    }
}

fn dsa<B: Backend>(b: &mut B, out: &mut Vec<Named>) {
    for (heads, qk, v, latent, q_lora, index_heads, index_dim, kpool, topk) in
        [(4, 32, 32, 32, 48, 4, 32, 4, 16), (3, 64, 40, 128, 128, 4, 32, 8, 64), (9, 64, 64, 512, 96, 32, 128, 4, 32)]
    {
        let random = &mut Random(latent as u64);
        let mut cache = b.cache(&shape(1, 32, latent, index_dim, kpool)).unwrap();
        let weights = DsaWeights {
            q_norm: norm(b, random, q_lora, false, 1e-5),
            kv_norm: norm(b, random, latent, false, 1e-5),
            kv_b: matrix(b, random, Kind::Bf16, heads * (qk + v), latent),
            indexer: Some(IndexerWeights {
                k_norm: norm(b, random, index_dim, true, 1e-6),
                ape: vector(b, &random.values(kpool * index_dim)),
                heads: index_heads,
                dim: index_dim,
                kpool,
                topk,
            }),
            heads,
            qk_dim: qk,
            v_dim: v,
        };
        let indexer = weights.indexer.as_ref().unwrap();
        let columns = DsaColumns { q_lora, latent };
        let most = topk + kpool - 1;
        let mut selection = b.selection(256, most).unwrap();
        let mut copied = b.selection(4, most).unwrap();
        for (i, parts) in TRAFFIC.iter().enumerate() {
            let s = step(4, parts, random, 10);
            let rows = s.rows();
            let proj = random_buffer(b, random, rows, q_lora + latent + 2 * index_dim + index_heads);
            let query = random_buffer(b, random, rows, heads * qk + index_heads * index_dim + 1);
            let mut residual = poison(b, rows, q_lora);
            let mut core = poison(b, rows, heads * v);
            b.begin(&s).unwrap();
            b.dsa_write(&weights, columns, &proj, true, &mut cache, 1, &mut residual).unwrap();
            out.push((format!("q residual {latent} step {i}"), read(b, &residual, rows, q_lora), FLOAT));
            let index = Columns { buffer: &query, start: heads * qk, width: index_heads * index_dim };
            b.dsa_select(indexer, columns, index, &proj, &cache, 1, &mut selection).unwrap();
            let mut chosen = Vec::new();
            for row in 0..rows {
                let tokens = b.read_selection(&selection, row);
                chosen.push(tokens.len() as f32);
                chosen.extend(tokens.iter().map(|&t| t as f32));
            }
            out.push((format!("selection {latent} step {i}"), chosen, 0.0));
            let q = Columns { buffer: &query, start: 0, width: heads * qk };
            b.mla(&weights, q, &selection, &cache, 1, &mut core).unwrap();
            out.push((format!("mla {latent} step {i}"), read(b, &core, rows, heads * v), 1e-5));
            b.copy_selection(&selection, &[rows as u32 - 1, 0], &mut copied).unwrap();
            b.write_selection(&mut copied, 2, &[1, 5, 9]).unwrap();
            let copies = (0..3).flat_map(|r| b.read_selection(&copied, r)).map(|t| t as f32).collect();
            out.push((format!("copied selection {latent} step {i}"), copies, 0.0));
        }
    }
}

fn moe<B: Backend>(b: &mut B, out: &mut Vec<Named>) {
    let rules = [(8, 2, 1, 1), (16, 3, 4, 2), (288, 8, 1, 1), (5, 1, 1, 1)];
    for (case, (experts, top, groups, top_groups)) in rules.into_iter().enumerate() {
        for kind in [Kind::Bf16, Kind::Int4] {
            for rows in [1, 3, 24, 100] {
                if experts > 100 && (kind == Kind::Bf16 || rows == 100) {
                    continue;
                }
                let random = &mut Random(900 + case as u64);
                // Columns of one group, and of two and four.
                let (hidden, width) = if case == 1 { (256, 512) } else { (128, 128) };
                let rule = RouterRule { top, groups, top_groups, normalize: case != 1, scale: 2.5 };
                let gate = matrix(b, random, Kind::F32, experts, hidden);
                // Ties everywhere in one case: equal rows of the gate cannot be made here, equal inputs can.
                let bias: Vec<f32> = random.values(experts).iter().map(|v| 0.2 * v).collect();
                let bias = vector(b, &bias);
                let zero = case == 3 && rows == 3;
                let mut values = if zero { vec![0.0; rows * hidden] } else { random.values(rows * hidden) };
                let broken = kind == Kind::Bf16 && rows == 24;
                if broken {
                    values[5 * hidden + 3] = f32::NAN;
                }
                let x = buffer(b, rows, hidden, &values);
                let mut routing = b.routing(rows, top, experts).unwrap();
                b.route(rows, &gate, &bias, rule, &x, &mut routing).unwrap();
                let (mut ids, mut weights) = (Vec::new(), Vec::new());
                for row in 0..rows {
                    for (e, w) in b.read_routing(&routing, row) {
                        ids.push(e as f32);
                        // A row that is no number has weights that are none; they are compared as a mark.
                        weights.push(if w.is_nan() { 1e3 } else { w });
                    }
                }
                let together = b.read_choices(&routing, rows).unwrap().into_iter().map(|e| e as f32).collect();
                out.push((format!("experts of {experts} M {rows}, all rows read at once"), together, 0.0));
                out.push((format!("experts of {experts} M {rows}"), ids, 0.0));
                out.push((format!("weights of {experts} M {rows}"), weights, 1e-5));
                if broken {
                    continue;
                }
                let routed = (0..experts).map(|_| swiglu(b, random, kind, [hidden, width, hidden], false)).collect();
                let shared = (case != 3).then(|| swiglu(b, random, Kind::Bf16, [hidden, 2 * width, hidden], false));
                let set = Experts { routed, shared, limit: 0.5 };
                let (mut act, mut sact) = (poison(b, rows * top, width), poison(b, rows, 2 * width));
                let mut y = poison(b, rows, hidden);
                b.moe_up(rows, &set, &routing, &x, &mut act, &mut sact).unwrap();
                b.moe_down(rows, &set, &routing, &act, &sact, &mut y).unwrap();
                let act = read(b, &act, rows * top, width);
                let bound = if kind == Kind::Int4 { HALVES } else { 3.0 * PRODUCT };
                out.push((format!("moe_up {kind:?} of {experts} M {rows}"), act, bound));
                out.push((format!("moe_down {kind:?} of {experts} M {rows}"), read(b, &y, rows, hidden), bound));
            }
        }
    }
}

/// Wide experts, whose columns the warps of a block share: results, that a row alone gives the bits it gives beside others, and
/// that activations of BF16 experts have the same bits beside any many others. Experts, experts a row, width of the model, width
/// of an expert.
fn wide_experts<B: Backend>(b: &mut B, kind: Kind, shape: [usize; 4], out: &mut Vec<Named>) {
    let [experts, top, hidden, width] = shape;
    let random = &mut Random(77);
    // The numbers of rows; beyond the most, a row's bits are not those that it has alone.
    let sizes = [1, 3, 24, 60, 128, 130, 300, 400, 1100, 2600];
    let (most, bound) = if kind == Kind::Int4 { (320, HALVES) } else { (128, 3.0 * PRODUCT) };
    let rule = RouterRule { top, groups: 1, top_groups: 1, normalize: true, scale: 2.5 };
    let gate = matrix(b, random, Kind::F32, experts, hidden);
    let bias = vector(b, &random.values(experts));
    let routed = (0..experts).map(|_| swiglu(b, random, kind, [hidden, width, hidden], false)).collect();
    let set = Experts { routed, shared: None, limit: 0.7 };
    let run = |b: &mut B, rows: usize, values: &[f32]| {
        let x = buffer(b, rows, hidden, values);
        let mut routing = b.routing(rows, top, experts).unwrap();
        let (mut act, mut none) = (poison(b, rows * top, width), poison(b, 1, 1));
        let mut y = poison(b, rows, hidden);
        b.route(rows, &gate, &bias, rule, &x, &mut routing).unwrap();
        b.moe_up(rows, &set, &routing, &x, &mut act, &mut none).unwrap();
        let held = read(b, &act, top, width);
        b.moe_down(rows, &set, &routing, &act, &none, &mut y).unwrap();
        (read(b, &y, rows, hidden), held)
    };
    let mut first: Option<Vec<f32>> = None;
    let row = random.values(hidden);
    for rows in sizes {
        let mut values = random.values(rows * hidden);
        values[..hidden].copy_from_slice(&row);
        let (y, held) = run(b, rows, &values);
        if kind == Kind::Bf16 && rows > most {
            let first = first.get_or_insert_with(|| held.clone());
            let same = first.iter().zip(&held).all(|(a, b)| a.to_bits() == b.to_bits());
            out.push((format!("moe_beside_{kind:?} {shape:?} M {rows}"), vec![f32::from(u8::from(same))], 0.0));
        }
        let compared = if rows > most { vec![] } else { vec![0, rows / 2, rows - 1] };
        for row in compared {
            let (alone, _) = run(b, 1, &values[row * hidden..(row + 1) * hidden]);
            let same = alone.iter().zip(&y[row * hidden..]).all(|(a, b)| a.to_bits() == b.to_bits());
            out.push((
                format!("moe_alone_{kind:?} {shape:?} row {row} of {rows}"),
                vec![f32::from(u8::from(same))],
                0.0,
            ));
        }
        out.push((format!("moe_wide_{kind:?} {shape:?} M {rows}"), y, bound));
    }
}

/// Wide experts in both kinds, and BF16 ones of which a tile holds a part only, with all rows at one of them and not.
fn wide_experts_of_shapes<B: Backend>(b: &mut B, out: &mut Vec<Named>) {
    for kind in [Kind::Int4, Kind::Bf16] {
        wide_experts(b, kind, [6, 2, 2048, 1024], out);
    }
    for shape in [[5, 2, 512, 192], [1, 1, 512, 64], [40, 3, 1024, 320]] {
        wide_experts(b, Kind::Bf16, shape, out);
    }
}

fn vision<B: Backend>(b: &mut B, out: &mut Vec<Named>) {
    for (heads, dim, grid) in [
        (4, 32, PatchGrid { frames: 1, height: 4, width: 6 }),
        (2, 64, PatchGrid { frames: 2, height: 10, width: 8 }),
        (1, 128, PatchGrid { frames: 1, height: 2, width: 2 }),
        (3, 96, PatchGrid { frames: 2, height: 14, width: 12 }),
        (9, 64, PatchGrid { frames: 1, height: 26, width: 20 }),
    ] {
        let random = &mut Random(dim as u64);
        let rows = grid.frames * grid.height * grid.width;
        let (q, k) = (norm(b, random, dim, false, 1e-6), norm(b, random, dim, false, 1e-6));
        let qkv = random_buffer(b, random, rows, 3 * heads * dim);
        let mut o = poison(b, rows, heads * dim);
        b.vision_attention(grid, heads, &q, &k, &qkv, &mut o).unwrap();
        out.push((format!("vision attention {dim}"), read(b, &o, rows, heads * dim), 1e-5));
    }
}

/// Which stages are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Which {
    All,
    /// Products with BF16 and INT4 matrices, norms, the head.
    Dense,
    /// The experts.
    Experts,
    /// The router, and products of narrow matrices and of many rows.
    Router,
    /// Delta attention and hyper-connections.
    Kda,
}

fn all<B: Backend>(b: &mut B, which: Which) -> Vec<Named> {
    let mut out = Vec::new();
    b.reserve(256, 8192, 4 * 32 * PAGE_TOKENS).unwrap();
    if which == Which::Dense {
        products(b, &mut out);
        many_rows(b, &mut out);
        several::several(b, &mut out);
        rows_and_norms(b, &mut out);
        return out;
    }
    if which == Which::Router {
        router::router(b, &mut out);
        router::narrow(b, &mut out);
        many_rows(b, &mut out);
        return out;
    }
    if which == Which::Experts {
        router::router(b, &mut out);
        moe(b, &mut out);
        wide_experts_of_shapes(b, &mut out);
        return out;
    }
    if which == Which::Kda {
        sites(b, &mut out);
        kda(b, &mut out);
        kda_exactness(b, &mut out);
        kda_chunks(b, &mut out);
        router::narrow(b, &mut out);
        return out;
    }
    router::router(b, &mut out);
    router::narrow(b, &mut out);
    products(b, &mut out);
    several::several(b, &mut out);
    rows_and_norms(b, &mut out);
    sites(b, &mut out);
    kda(b, &mut out);
    kda_exactness(b, &mut out);
    kda_chunks(b, &mut out);
    dsa(b, &mut out);
    moe(b, &mut out);
    wide_experts_of_shapes(b, &mut out);
    vision(b, &mut out);
    out
}

/// `|found - expected| / |expected|`; NaN and a wrong length never pass.
pub(crate) fn relative(found: &[f32], expected: &[f32]) -> f64 {
    if found.len() != expected.len() {
        return f64::INFINITY;
    }
    let (mut difference, mut size) = (0.0, 0.0);
    for (f, e) in found.iter().zip(expected) {
        difference += (f64::from(*f) - f64::from(*e)).powi(2);
        size += f64::from(*e).powi(2);
    }
    if difference == 0.0 { 0.0 } else { (difference / size).sqrt() }
}

/// Compares stages; the number of failures.
pub(crate) fn run(mut cuda: Cuda, which: Which) -> usize {
    let expected = all(&mut Cpu::new(8), which);
    compare(&expected, &all(&mut cuda, which), &all(&mut cuda, which))
}

/// How much of its bound an error takes; what must be equal takes none or fails.
fn share(error: f64, bound: f64) -> f64 {
    if bound > 0.0 { error / bound } else { 0.0 }
}

/// Compares two runs of a backend with what is expected and with each other; the number of failures.
pub(crate) fn compare(expected: &[Named], found: &[Named], again: &[Named]) -> usize {
    let mut failures = 0;
    // Of each group the case that comes nearest to its bound.
    let mut groups: Vec<(String, usize, f64, f64)> = Vec::new();
    for (((name, found, bound), (_, again, _)), (_, expected, _)) in found.iter().zip(again).zip(expected) {
        let error = relative(found, expected);
        let same = found.iter().zip(again).all(|(a, b)| a.to_bits() == b.to_bits());
        if error.is_nan() || error > *bound || !same {
            failures += 1;
            let first = found.iter().zip(expected).position(|(f, e)| f.to_bits() != e.to_bits()).unwrap_or(0);
            println!(
                "FAILED {name}: error {error:.2e}, bound {bound:.1e}, repeatable {same}; element {first} of {}: {:?} \
                 against {:?}",
                expected.len(),
                found.get(first),
                expected.get(first)
            );
        }
        let group = name.split(' ').next().unwrap_or("").to_owned();
        match groups.iter_mut().find(|g| g.0 == group) {
            Some(g) => {
                g.1 += 1;
                if share(error, *bound) > share(g.2, g.3) {
                    (g.2, g.3) = (error, *bound);
                }
            }
            None => groups.push((group, 1, error, *bound)),
        }
    }
    for (group, cases, error, bound) in groups {
        println!(
            "{group:<12} {cases:>4} results, nearest to its bound: relative error {error:.2e} (bound {bound:.0e})"
        );
    }
    failures
}
