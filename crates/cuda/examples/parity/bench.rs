//! Kernels at this model's shapes against what the device does in the same run.

use glimmer_cuda::{
    Cuda,
    bench::{Chain, FAMILIES, Row, ceilings, expert_chain, random_experts, read_rate},
};

/// Rows and the time of the best public chain measured on the same kind of device, by slice width.
const ANCHORS: [(usize, &[(usize, f64)]); 2] = [
    (
        1024,
        &[
            (1, 40.4),
            (3, 68.1),
            (8, 143.5),
            (24, 315.9),
            (96, 594.7),
            (256, 829.2),
            (768, 1054.2),
            (2048, 1972.8),
            (8192, 6837.2),
        ],
    ),
    (
        512,
        &[
            (1, 32.6),
            (3, 45.4),
            (8, 87.0),
            (24, 179.7),
            (96, 322.9),
            (256, 432.0),
            (768, 585.1),
            (2048, 1111.1),
            (8192, 3828.0),
        ],
    ),
];

/// Families of kernels by name, every one when none is named.
pub(crate) fn families(cuda: &mut Cuda, names: &[String]) -> usize {
    let ceilings = ceilings(cuda).unwrap();
    println!("{ceilings:.0?}\n{}", Row::HEADER);
    for (name, family) in FAMILIES {
        if names.is_empty() || names.iter().any(|n| n == name) {
            family(cuda, &mut |row| println!("{}", row.line(&ceilings))).unwrap();
        }
    }
    0
}

pub(crate) fn run(cuda: &mut Cuda, tune: bool, only: Option<usize>) -> usize {
    let rate = read_rate(cuda).unwrap();
    println!("{}: {:.1} us, {:.0} GB/s", rate.kernel, rate.micros[0], rate.gigabytes());
    let limit = rate.gigabytes();
    for (width, anchors) in ANCHORS {
        let chain = |rows| Chain { experts: 288, top: 8, hidden: 4096, width, rows };
        let sets: Vec<_> = (0..2).map(|_| random_experts(cuda, chain(1)).unwrap()).collect();
        let mut tunings = vec![None];
        if tune {
            tunings.extend([8, 16, 32, 64, 128].map(Some));
        }
        for &tuning in &tunings {
            for &(rows, anchor) in anchors {
                if only.is_some_and(|only| only != rows) {
                    continue;
                }
                let (results, distinct) = expert_chain(cuda, chain(rows), &sets, tuning).unwrap();
                for (i, row) in results.iter().enumerate() {
                    let [median, low, high] = row.micros;
                    print!(
                        "{tuning:?} {:<40} M {rows} {median:>8.1} us ({low:.1} .. {high:.1}) {:>6.0} GB/s {:>5.1} % {:>6.1} TFLOP/s",
                        row.kernel,
                        row.gigabytes(),
                        100.0 * row.gigabytes() / limit,
                        row.teraflops()
                    );
                    if i == 0 {
                        print!("  {distinct} experts, anchor {anchor} us: {:.2}x", anchor / median);
                    }
                    println!();
                }
            }
        }
    }
    0
}
