//! The router at the released model's width, and products of narrow matrices.

use glimmer_tensor::{Backend, Columns, RouterRule};

use crate::{
    material::{Kind, Random, buffer, linear, matrix, poison, random_buffer, read, vector},
    stages::Named,
};

/// Chosen experts and weights; a weight that is no number shows as a mark.
fn routed<B: Backend>(b: &B, routing: &B::Routing, rows: usize) -> [Vec<f32>; 2] {
    let all = (0..rows).flat_map(|row| b.read_routing(routing, row));
    let (experts, weights) = all.map(|(e, w)| (e as f32, if w.is_nan() { 1e3 } else { w })).unzip();
    [experts, weights]
}

/// Scores of 4096 columns: the same choices as in f32 on the CPU, and the same weights bit for bit whatever the other rows are.
pub(crate) fn router<B: Backend>(b: &mut B, out: &mut Vec<Named>) {
    for (case, (kind, experts, hidden)) in
        [(Kind::Bf16, 288, 4096), (Kind::F32, 288, 4096), (Kind::Bf16, 37, 1160)].into_iter().enumerate()
    {
        let random = &mut Random(5100 + case as u64);
        let rule = RouterRule { top: 8, groups: 1, top_groups: 1, normalize: true, scale: 2.5 };
        let gate = matrix(b, random, kind, experts, hidden);
        let bias = vector(b, &random.values(experts).iter().map(|v| 0.2 * v).collect::<Vec<_>>());
        let most = if case == 0 { 4200 } else { 100 };
        let mut values = random.values(most * hidden);
        // All scores equal; no number; the same as the row in front.
        values[2 * hidden..3 * hidden].fill(0.0);
        values[4 * hidden + 7] = f32::NAN;
        values.copy_within(5 * hidden..6 * hidden, 6 * hidden);
        let mut alone = Vec::new();
        for rows in [1, 3, 4, 5, 8, 9, 17, 24, 25, 96, 200, 600, 4200] {
            if rows > most {
                continue;
            }
            let x = buffer(b, rows, hidden, &values[..rows * hidden]);
            let mut routing = b.routing(rows, rule.top, experts).unwrap();
            b.route(rows, &gate, &bias, rule, &x, &mut routing).unwrap();
            let [chosen, weights] = routed(b, &routing, rows);
            if rows == 1 {
                alone.clone_from(&weights);
            }
            // From 4096 rows on a library may sum.
            let same = rows >= 4096 || weights[..alone.len()] == alone;
            out.push((format!("router {case}: experts M {rows}"), chosen, 0.0));
            out.push((format!("router {case}: weights M {rows}"), weights, 1e-5));
            out.push((format!("router {case}: a row's bits M {rows}"), vec![f32::from(u8::from(same))], 0.0));
        }
    }
}

/// Two matrices of few columns, each with its own columns of one input.
pub(crate) fn narrow<B: Backend>(b: &mut B, out: &mut Vec<Named>) {
    for (case, ([first, second], columns)) in [([96, 64], 128), ([50, 8], 64), ([8, 24], 16)].into_iter().enumerate() {
        let random = &mut Random(5200 + case as u64);
        let weights = [
            linear(b, random, Kind::Bf16, first, columns, true),
            linear(b, random, Kind::Bf16, second, columns, false),
        ];
        let mut alone = Vec::new();
        for rows in [1, 2, 3, 24, 25, 70, 300] {
            let random = &mut Random(5300 + case as u64);
            let x = random_buffer(b, random, rows, 2 * columns + 12);
            let mut y = poison(b, rows, first + second + 8);
            let part = |start| Columns { buffer: &x, start, width: columns };
            let parts = [(part(4), &weights[0], 4), (part(columns + 4), &weights[1], first + 4)];
            b.linear_each(rows, &parts, &mut y).unwrap();
            let all: Vec<f32> = read(b, &y, rows, first + second + 8)
                .chunks_exact(first + second + 8)
                .flat_map(|row| row[4..first + second + 4].to_vec())
                .collect();
            if rows == 1 {
                alone.clone_from(&all);
            }
            let same = rows > 64 || all[..alone.len()] == alone;
            out.push((format!("narrow {case} M {rows}"), all, 1e-5));
            out.push((format!("narrow {case}: a row's bits M {rows}"), vec![f32::from(u8::from(same))], 0.0));
        }
    }
}
