//! Products of matrices that are large enough for the kernel of several rows, on both sides of the number of rows from which another
//! launch makes their planes, and bits that must not depend on the other rows.

use glimmer_tensor::{Backend, Columns};

use crate::{
    material::{Kind, Random, linear, matrix, poison, random_buffer, read, swiglu},
    stages::{Named, PRODUCT},
};

/// Rows among which the first are taken alone as well.
const PAIRS: [[usize; 2]; 3] = [[9, 24], [25, 96], [33, 64]];

pub(crate) fn several<B: Backend>(b: &mut B, out: &mut Vec<Named>) {
    for (case, (outs, columns, biased)) in
        [(3000, 2304, true), (4100, 3072, false), (17_000, 1024, false), (25_500, 2048, false)].into_iter().enumerate()
    {
        let random = &mut Random(5000 + case as u64);
        let weight = linear(b, random, Kind::Bf16, outs, columns, biased);
        for [few, many] in PAIRS {
            if outs > 20_000 && few != 25 {
                continue;
            }
            let x = random_buffer(b, random, many, columns + 4);
            let mut run = |rows: usize| {
                let mut y = poison(b, rows, outs + 4);
                b.linear(rows, Columns { buffer: &x, start: 4, width: columns }, &[&weight], &mut y, 4).unwrap();
                read(b, &y, rows, outs + 4).chunks_exact(outs + 4).flat_map(|r| r[4..].to_vec()).collect::<Vec<f32>>()
            };
            let (alone, all) = (run(few), run(many));
            let same = f32::from(u8::from(alone == all[..few * outs]));
            out.push((format!("several rows [{outs}, {columns}] M {many}"), all, PRODUCT));
            out.push((format!("several rows [{outs}, {columns}]: {few} among {many}"), vec![1.0, same], 0.0));
        }
    }
    // Several matrices of one input, one of them in f32.
    for rows in [10, 24, 96] {
        let random = &mut Random(5100 + rows as u64);
        let shapes = [(Kind::Bf16, 4050), (Kind::Bf16, 64), (Kind::F32, 8), (Kind::Bf16, 1700), (Kind::Bf16, 132)];
        let weights = shapes.map(|(kind, outs)| linear(b, random, kind, outs, 2304, false));
        let all: Vec<_> = weights.iter().collect();
        let (x, width) = (random_buffer(b, random, rows, 2304), 4050 + 64 + 8 + 1700 + 132);
        let mut y = poison(b, rows, width + 2);
        b.linear(rows, Columns { buffer: &x, start: 0, width: 2304 }, &all, &mut y, 2).unwrap();
        let found = read(b, &y, rows, width + 2).chunks_exact(width + 2).flat_map(|r| r[2..].to_vec()).collect();
        out.push((format!("several rows, several matrices M {rows}"), found, PRODUCT));
    }
    for (rows, bias) in [(12, true), (24, false), (40, true), (96, false)] {
        let random = &mut Random(5200 + rows as u64);
        let weights = swiglu(b, random, Kind::Bf16, [2048, 1600, 64], bias);
        let x = random_buffer(b, random, rows, 2048);
        let (mut act, mut y) = (poison(b, rows, 1600), poison(b, rows, 64));
        b.swiglu(rows, &weights, 0.4, &x, &mut act, &mut y).unwrap();
        out.push((format!("several rows, swiglu act M {rows}"), read(b, &act, rows, 1600), 3.0 * PRODUCT));
        out.push((format!("several rows, swiglu M {rows}"), read(b, &y, rows, 64), 3.0 * PRODUCT));
    }
    for rows in [10, 50] {
        let random = &mut Random(5300 + rows as u64);
        let (head, hidden) = (matrix(b, random, Kind::Bf16, 6200, 2048), random_buffer(b, random, 60, 2048));
        let wanted: Vec<u32> = (0..rows as u32).map(|i| (7 * i + 3) % 60).collect();
        let mut logits = poison(b, rows, 6200);
        b.head(&head, &wanted, &hidden, &mut logits).unwrap();
        out.push((format!("several rows, head M {rows}"), read(b, &logits, rows, 6200), PRODUCT));
    }
}
