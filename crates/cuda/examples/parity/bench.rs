//! The expert chain at this model's slices against the read rate of the same run.

use glimmer_cuda::{
    Cuda,
    bench::{Chain, expert_chain, random_experts, read_rate},
};

/// Rows and the time of the best public chain measured on the same kind of device, by slice width.
const ANCHORS: [(usize, &[(usize, f64)]); 2] = [
    (1024, &[(3, 68.1), (24, 315.9), (96, 594.7), (256, 829.2), (768, 1054.2)]),
    (512, &[(3, 45.4), (24, 179.7), (96, 322.9), (256, 432.0), (768, 585.1)]),
];

pub(crate) fn run(cuda: &mut Cuda, tune: bool, only: Option<usize>) -> usize {
    let rate = read_rate(cuda).unwrap();
    println!("{}: {:.1} us, {:.0} GB/s", rate.name, rate.micros[0], rate.gigabytes());
    let limit = rate.gigabytes();
    for (width, anchors) in ANCHORS {
        let chain = |rows| Chain { experts: 288, top: 8, hidden: 4096, width, rows };
        let sets: Vec<_> = (0..2).map(|_| random_experts(cuda, chain(1)).unwrap()).collect();
        let mut tunings = vec![None];
        if tune {
            let sizes = [[2, 12, 2, 1], [2, 12, 3, 1], [4, 8, 2, 1]];
            tunings.extend(sizes.map(Some));
        }
        for &tuning in &tunings {
            for (&(rows, anchor), planes) in anchors.iter().flat_map(|a| [(a, 2), (a, 1)]) {
                if only.is_some_and(|only| only != rows) {
                    continue;
                }
                // Other sizes do not suit wider tiles of tokens.
                if tuning.is_some() && rows > 96 {
                    continue;
                }
                let (results, distinct) = expert_chain(cuda, chain(rows), &sets, tuning, planes).unwrap();
                for (i, row) in results.iter().enumerate() {
                    let [median, low, high] = row.micros;
                    print!(
                        "{tuning:?} {planes} {:<40} {median:>8.1} us ({low:.1} .. {high:.1}) {:>6.0} GB/s {:>5.1} % {:>6.1} TFLOP/s",
                        row.name,
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
