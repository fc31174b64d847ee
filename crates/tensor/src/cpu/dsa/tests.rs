//! Rules and equalities of writing and selecting.

#![allow(clippy::float_cmp, reason = "exact results are meant")]

use proptest::prelude::*;

use super::{choose, dsa_select, dsa_write};
use crate::{
    Backend, CacheShape, Columns, DsaColumns, DsaWeights, IndexerWeights, PAGE_TOKENS, Segment,
    cpu::{
        Cpu, CpuBuffer, CpuCache, CpuSelection,
        testing::{Rng, buffer, close, devices, matrix, norm, segment, step, vector},
    },
};

mod traps;

const Q_LORA: usize = 24;
const LATENT: usize = 20;
const HEADS: usize = 3;
const DIM: usize = 16;
const MAX_DRAFT: usize = 3;

struct Layer {
    kpool: usize,
    topk: usize,
    norms: [Vec<f32>; 4],
    ape: Vec<f32>,
}

impl Layer {
    fn new(kpool: usize, topk: usize) -> Self {
        let mut rng = Rng::new(&[kpool as u64]);
        let norms = [Q_LORA, LATENT, DIM, DIM].map(|n| rng.values(n, 1.0));
        Self { kpool, topk, norms, ape: rng.values(kpool * DIM, 2.0) }
    }

    fn weights(&self) -> DsaWeights<Cpu> {
        DsaWeights {
            q_norm: norm(&self.norms[0], None, 1e-5),
            kv_norm: norm(&self.norms[1], None, 1e-5),
            kv_b: matrix(1, &[0.0; LATENT]),
            indexer: Some(IndexerWeights {
                k_norm: norm(&self.norms[2], Some(&self.norms[3]), 1e-6),
                ape: vector(&self.ape),
                heads: HEADS,
                dim: DIM,
                kpool: self.kpool,
                topk: self.topk,
            }),
            heads: 1,
            qk_dim: 1,
            v_dim: 1,
        }
    }

    fn cache(&self, slots: usize) -> CpuCache {
        CpuCache::new(&CacheShape {
            kda_layers: 0,
            kda_heads: 0,
            kda_head_dim: 0,
            conv_kernel: 0,
            dsa_layers: 2,
            latent: LATENT,
            index_dim: DIM,
            kpool: self.kpool,
            slots,
            pages: slots * 5,
            max_draft: MAX_DRAFT,
        })
        .unwrap()
    }

    /// Projection and index query of a row: `q_a | kv_a | key | head weights | gate`, with a few columns after them.
    fn row(&self, sequence: u64, position: usize) -> (Vec<f32>, Vec<f32>) {
        let mut rng = Rng::new(&[sequence, position as u64]);
        (rng.values(Q_LORA + LATENT + 2 * DIM + HEADS + 2, 2.0), rng.values(HEADS * DIM, 1.0))
    }

    fn columns() -> DsaColumns {
        DsaColumns { q_lora: Q_LORA, latent: LATENT }
    }

    /// Writes and selects; returns the query residuals and the selected tokens.
    fn run_rows(
        &self,
        cpu: &mut Cpu,
        cache: &mut CpuCache,
        slots: usize,
        segments: &[Segment],
        rows: &[(Vec<f32>, Vec<f32>)],
    ) -> (Vec<Vec<f32>>, Vec<Vec<u32>>) {
        let weights = self.weights();
        let (proj, query): (Vec<_>, Vec<_>) = rows.iter().cloned().unzip();
        // The queries stand behind two other columns.
        let query: Vec<_> = query.into_iter().map(|q| [&[9.0, 9.0], q.as_slice()].concat()).collect();
        let (proj, query) = (buffer(&proj), buffer(&query));
        let mut residual = CpuBuffer::new(rows.len(), Q_LORA + 1).unwrap();
        let mut selection = CpuSelection::new(rows.len(), 5 * PAGE_TOKENS);
        cpu.begin(&step(slots, segments)).unwrap();
        dsa_write(cpu, &weights, Self::columns(), &proj, true, cache, 1, &mut residual).unwrap();
        let indexer = weights.indexer.as_ref().unwrap();
        let query = Columns { buffer: &query, start: 2, width: HEADS * DIM };
        dsa_select(cpu, indexer, Self::columns(), query, &proj, cache, 1, &mut selection).unwrap();
        let residuals = (0..rows.len()).map(|i| residual.row(i)[..Q_LORA].to_vec()).collect();
        (residuals, (0..rows.len()).map(|i| selection.row(i).to_vec()).collect())
    }

    fn run(
        &self,
        cpu: &mut Cpu,
        cache: &mut CpuCache,
        sequences: &[u64],
        segments: &[Segment],
    ) -> (Vec<Vec<f32>>, Vec<Vec<u32>>) {
        let rows: Vec<_> = segments
            .iter()
            .flat_map(|s| (0..s.rows).map(|t| self.row(sequences[s.slot as usize], (s.position + t) as usize)))
            .collect();
        self.run_rows(cpu, cache, sequences.len(), segments, &rows)
    }

    /// Pool key in f64, from the formulas.
    fn pool64(&self, rows: &[(Vec<f32>, Vec<f32>)], pool: usize) -> Vec<f64> {
        let part = |j: usize, start: usize| -> Vec<f64> {
            rows[pool * self.kpool + j].0[Q_LORA + LATENT + start..][..DIM].iter().map(|&v| f64::from(v)).collect()
        };
        let keys: Vec<Vec<f64>> = (0..self.kpool)
            .map(|j| {
                let x = part(j, 0);
                let mean = x.iter().sum::<f64>() / DIM as f64;
                let variance = x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / DIM as f64;
                (0..DIM)
                    .map(|d| {
                        (x[d] - mean) / (variance + 1e-6).sqrt() * f64::from(self.norms[2][d])
                            + f64::from(self.norms[3][d])
                    })
                    .collect()
            })
            .collect();
        (0..DIM)
            .map(|d| {
                let e: Vec<f64> = (0..self.kpool)
                    .map(|j| (part(j, DIM + HEADS)[d] + f64::from(self.ape[j * DIM + d])).exp())
                    .collect();
                (0..self.kpool).map(|j| e[j] * keys[j][d]).sum::<f64>() / e.iter().sum::<f64>()
            })
            .collect()
    }

    /// Selected tokens of the last of `rows`, in f64, and the gap between the worst kept and the best dropped score.
    fn selected64(&self, rows: &[(Vec<f32>, Vec<f32>)]) -> (Vec<u32>, f64) {
        let t = rows.len() - 1;
        let (proj, query) = &rows[t];
        let pools = (t + 1) / self.kpool;
        let mut ranked: Vec<(f64, usize)> = (0..pools)
            .map(|p| {
                let key = self.pool64(rows, p);
                let score = (0..HEADS)
                    .map(|h| {
                        let dot: f64 = (0..DIM).map(|d| f64::from(query[h * DIM + d]) * key[d]).sum();
                        let w = f64::from(proj[Q_LORA + LATENT + DIM + h]);
                        w * (HEADS as f64).powf(-0.5) * (dot * (DIM as f64).powf(-0.5)).max(0.0)
                    })
                    .sum();
                (score, p)
            })
            .collect();
        ranked.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let keep = self.topk / self.kpool;
        let gap = if pools > keep { ranked[keep - 1].0 - ranked[keep].0 } else { f64::INFINITY };
        let mut tokens: Vec<u32> = ranked
            .iter()
            .take(keep)
            .flat_map(|&(_, p)| p * self.kpool..(p + 1) * self.kpool)
            .chain(pools * self.kpool..t + 1)
            .map(|t| t as u32)
            .collect();
        tokens.sort_unstable();
        (tokens, gap)
    }

    /// Stored latent and pool key of a sequence's token and pool.
    fn stored<'a>(&self, cache: &'a CpuCache, slots: usize, slot: usize, token: usize) -> (&'a [f32], &'a [f32]) {
        let dsa = cache.dsa(1).unwrap();
        let page = token / PAGE_TOKENS * slots + slot;
        let (latent, pools) = (page * PAGE_TOKENS + token % PAGE_TOKENS, PAGE_TOKENS / self.kpool);
        let pool = page * pools + token % PAGE_TOKENS / self.kpool;
        (&dsa.latents[latent * LATENT..][..LATENT], &dsa.pool_keys[pool * DIM..][..DIM])
    }
}

#[test]
fn latents_residuals_and_pool_keys_follow_the_definition() {
    for kpool in [4, 8] {
        let layer = Layer::new(kpool, 2 * kpool);
        let rows: Vec<_> = (0..150).map(|p| layer.row(3, p)).collect();
        let mut cache = layer.cache(3);
        let segments = [segment(1, 0, 150)];
        let (residuals, _) = layer.run(&mut Cpu::new(1), &mut cache, &[1, 3, 2], &segments);
        let rms = |x: &[f32], w: &[f32]| -> Vec<f64> {
            let mean = x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / x.len() as f64;
            x.iter().zip(w).map(|(&x, &w)| f64::from(x) / (mean + 1e-5).sqrt() * f64::from(w)).collect()
        };
        for (t, (proj, _)) in rows.iter().enumerate() {
            close(&residuals[t], &rms(&proj[..Q_LORA], &layer.norms[0]), 1e-5, "query residual");
            let (latent, key) = layer.stored(&cache, 3, 1, t);
            close(latent, &rms(&proj[Q_LORA..][..LATENT], &layer.norms[1]), 1e-5, "latent");
            if (t + 1) % kpool == 0 {
                // LayerNorm with bias and eps 1e-6; ape by place in the pool, before the softmax.
                close(key, &layer.pool64(&rows, t / kpool), 1e-5, "pool key");
            }
        }
    }
}

#[test]
fn index_key_norm_is_a_layer_norm_with_bias_and_the_given_eps() {
    let mut layer = Layer::new(4, 8);
    layer.norms[2] = vec![1.0; DIM];
    layer.norms[3] = vec![0.25; DIM];
    // A constant key has no variance: what is left is the bias (an RMSNorm would leave ones).
    let constant = |value: f32, step: f32| {
        let rows: Vec<_> = (0..4)
            .map(|t| {
                let (mut proj, query) = layer.row(1, t);
                for d in 0..DIM {
                    proj[Q_LORA + LATENT + d] = value + if d % 2 == 0 { step } else { -step };
                }
                (proj, query)
            })
            .collect();
        let mut cache = layer.cache(1);
        layer.run_rows(&mut Cpu::new(1), &mut cache, 1, &[segment(0, 0, 4)], &rows);
        layer.stored(&cache, 1, 0, 0).1.to_vec()
    };
    assert!(constant(3.0, 0.0).iter().all(|v| (v - 0.25).abs() < 1e-6));
    // A variance of 1e-6 is halved by eps 1e-6: +-1 / sqrt 2.
    for (d, v) in constant(0.0, 1e-3).into_iter().enumerate() {
        let expected = 0.25 + if d % 2 == 0 { 0.5f32.sqrt() } else { -(0.5f32.sqrt()) };
        assert!((v - expected).abs() < 1e-4, "{v} against {expected}");
    }
}

#[test]
fn ape_is_added_before_the_softmax_by_place_in_the_pool() {
    let mut layer = Layer::new(4, 8);
    layer.ape = (0..4 * DIM).map(|i| if i / DIM == i % 4 { 100.0 } else { 0.0 }).collect();
    let rows: Vec<_> = (0..4).map(|p| layer.row(5, p)).collect();
    let mut cache = layer.cache(1);
    layer.run_rows(&mut Cpu::new(1), &mut cache, 1, &[segment(0, 0, 4)], &rows);
    // Channel d takes token d % 4 of the pool alone.
    let (_, found) = layer.stored(&cache, 1, 0, 0);
    let expected = layer.pool64(&rows, 0);
    close(found, &expected, 1e-5, "pool key");
    let ring = &cache.dsa(1).unwrap().tails;
    for d in 0..DIM {
        assert!((found[d] - ring[d % 4 * 2 * DIM + d]).abs() < 1e-5);
    }
}

#[test]
fn selections_follow_the_definition_across_pages() {
    for (kpool, topk) in [(4, 16), (8, 64), (4, 4)] {
        let layer = Layer::new(kpool, topk);
        let rows: Vec<_> = (0..210).map(|p| layer.row(8, p)).collect();
        let mut cache = layer.cache(2);
        let segments = [segment(1, 0, 210)];
        let (_, found) = layer.run(&mut Cpu::new(2), &mut cache, &[7, 8], &segments);
        let mut close_calls = 0;
        for t in 0..210 {
            let (expected, gap) = layer.selected64(&rows[..=t]);
            // A gap of exactly zero is a tie of pools that no head sees; f32 has the same tie.
            if gap > 1e-5 || gap == 0.0 {
                assert_eq!(found[t], expected, "row {t}");
            } else {
                close_calls += 1;
            }
            assert!(found[t].is_sorted_by(|a, b| a < b));
        }
        assert!(close_calls < 20, "most rows are decided clearly");
    }
}

#[test]
fn the_tail_is_always_selected_and_the_own_pool_is_not() {
    let layer = Layer::new(4, 4);
    let mut cache = layer.cache(1);
    let (_, found) = layer.run(&mut Cpu::new(1), &mut cache, &[8], &[segment(0, 0, 200)]);
    let mut without_self = 0;
    for (t, tokens) in found.iter().enumerate() {
        let tail = (t + 1) / 4 * 4..t + 1;
        assert!(tail.clone().all(|s| tokens.contains(&(s as u32))), "row {t}");
        assert_eq!(tokens.len(), (t + 1).min(4 + tail.len()));
        without_self += usize::from(!tokens.contains(&(t as u32)));
    }
    assert!(without_self > 20, "rows that complete a pool compete with all others");
}

#[test]
fn everything_is_selected_while_it_fits() {
    let layer = Layer::new(8, 64);
    let mut cache = layer.cache(1);
    let (_, found) = layer.run(&mut Cpu::new(1), &mut cache, &[8], &[segment(0, 0, 80)]);
    for (t, tokens) in found.iter().enumerate().take(71) {
        assert_eq!(tokens, &(0..=t as u32).collect::<Vec<_>>());
    }
    // Row 71 completes the ninth pool, one more than fits.
    assert_eq!(found[71].len(), 64);
}

#[test]
fn ties_go_to_the_lower_pool() {
    let take = |scores: &[f32], keep: usize| {
        let mut taken = Vec::new();
        choose(scores, &mut scores.to_vec(), keep, |p| taken.push(p));
        taken
    };
    assert_eq!(take(&[0.0, 1.0, 0.0, 1.0, 0.0], 3), [0, 1, 3]);
    assert_eq!(take(&[0.0; 5], 2), [0, 1]);
    assert_eq!(take(&[-1.0, -2.0, -1.0], 1), [0]);
    assert_eq!(take(&[1.0, f32::NAN, 0.5, f32::NAN], 2), [0, 2]);
    assert_eq!(take(&[f32::NAN, f32::NAN, 0.5], 2), [0, 2]);
    assert_eq!(take(&[f32::INFINITY, f32::NEG_INFINITY, 0.0], 2), [0, 2]);
    assert_eq!(take(&[1.0, 2.0], 0), [0usize; 0]);
    // Zero queries and negative products: all scores are zero, whatever the sign of a head's weight.
    let layer = Layer::new(4, 8);
    let rows: Vec<_> = (0..30).map(|p| (layer.row(8, p).0, vec![0.0; HEADS * DIM])).collect();
    let mut cache = layer.cache(1);
    let (_, found) = layer.run_rows(&mut Cpu::new(1), &mut cache, 1, &[segment(0, 0, 30)], &rows);
    assert_eq!(found[29], [0, 1, 2, 3, 4, 5, 6, 7, 28, 29]);
}

#[test]
fn relu_acts_on_each_head_before_its_weight() {
    let layer = Layer::new(4, 4);
    // Head weights: negative on head 0, which sees every pool; head 1 positive. The rest is zero.
    let mut rows: Vec<_> = (0..41).map(|p| layer.row(8, p)).collect();
    let query = rows[0].1.clone();
    let last = rows.last_mut().unwrap();
    last.1 = query.iter().enumerate().map(|(i, q)| if i < 2 * DIM { *q } else { 0.0 }).collect();
    last.0[Q_LORA + LATENT + DIM..][..HEADS].copy_from_slice(&[-1.0, 0.5, 3.0]);
    let mut cache = layer.cache(1);
    let (_, found) = layer.run_rows(&mut Cpu::new(1), &mut cache, 1, &[segment(0, 0, 41)], &rows);
    let (expected, gap) = layer.selected64(&rows);
    assert!(gap > 1e-5);
    assert_eq!(found[40], expected);
}

#[test]
fn nan_scores_do_not_panic() {
    let layer = Layer::new(4, 8);
    let rows: Vec<_> = (0..60).map(|p| (layer.row(8, p).0, vec![f32::NAN; HEADS * DIM])).collect();
    let mut cache = layer.cache(1);
    let (_, found) = layer.run_rows(&mut Cpu::new(1), &mut cache, 1, &[segment(0, 0, 60)], &rows);
    assert_eq!(found[59].len(), 8);
}

#[test]
fn devices_agree_and_rows_do_not_depend_on_the_batch() {
    let layer = Layer::new(4, 16);
    let sequences = [1, 2, 3];
    let mut reference = None;
    for mut cpu in devices() {
        let mut cache = layer.cache(3);
        layer.run(&mut cpu, &mut cache, &sequences, &[segment(2, 0, 63), segment(0, 0, 7)]);
        let segments = [segment(0, 7, 5), segment(1, 0, 66), segment(2, 63, 2)];
        let mut result = layer.run(&mut cpu, &mut cache, &sequences, &segments).1;
        // One row alone: threads share its pools.
        result.extend(layer.run(&mut cpu, &mut cache, &sequences, &[segment(1, 66, 1)]).1);
        assert!(reference.get_or_insert_with(|| result.clone()) == &result, "{cpu:?}");
    }
    let together = reference.unwrap();
    let mut cpu = Cpu::new(1);
    let mut cache = layer.cache(3);
    layer.run(&mut cpu, &mut cache, &sequences, &[segment(2, 0, 63)]);
    let alone = layer.run(&mut cpu, &mut cache, &sequences, &[segment(2, 63, 2)]).1;
    assert_eq!(alone, together[71..73]);
}

#[test]
fn a_row_without_the_indexer_leaves_pools_and_ring_alone() {
    let layer = Layer::new(4, 8);
    let mut cpu = Cpu::new(1);
    let mut cache = layer.cache(1);
    layer.run(&mut cpu, &mut cache, &[1], &[segment(0, 0, 7)]);
    let before = (cache.dsa(1).unwrap().pool_keys.clone(), cache.dsa(1).unwrap().tails.clone());
    let proj = buffer(&[layer.row(1, 7).0[..Q_LORA + LATENT].to_vec()]);
    let mut residual = CpuBuffer::new(1, Q_LORA).unwrap();
    cpu.begin(&step(1, &[segment(0, 7, 1)])).unwrap();
    dsa_write(&mut cpu, &layer.weights(), Layer::columns(), &proj, false, &mut cache, 1, &mut residual).unwrap();
    assert_eq!((&cache.dsa(1).unwrap().pool_keys, &cache.dsa(1).unwrap().tails), (&before.0, &before.1));
    assert!(layer.stored(&cache, 1, 0, 7).0.iter().any(|&v| v != 0.0));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Chunks may start and end anywhere in a pool.
    #[test]
    fn any_chunking_equals_one_shot(cuts in proptest::collection::vec(1usize..30, 1..9), wide in any::<bool>()) {
        let layer = Layer::new(if wide { 8 } else { 4 }, 16);
        let total = cuts.iter().sum();
        let mut cpu = Cpu::new(1);
        let mut whole = layer.cache(1);
        let expected = layer.run(&mut cpu, &mut whole, &[4], &[segment(0, 0, total)]).1;
        let mut cache = layer.cache(1);
        let mut found = Vec::new();
        for cut in cuts {
            let next = segment(0, found.len(), cut);
            found.extend(layer.run(&mut cpu, &mut cache, &[4], &[next]).1);
        }
        prop_assert_eq!(found, expected);
        let (a, b) = (cache.dsa(1).unwrap(), whole.dsa(1).unwrap());
        prop_assert_eq!(&a.latents, &b.latents);
        prop_assert_eq!(&a.pool_keys, &b.pool_keys);
    }

    /// Rejected drafts, some of which complete pools, leave no trace: the ring is longer than a pool.
    #[test]
    fn redone_pools_equal_plain_decoding(
        prompt in 1usize..20,
        steps in proptest::collection::vec((0usize..=MAX_DRAFT, 0usize..=MAX_DRAFT), 1..14),
    ) {
        let layer = Layer::new(4, 8);
        let mut cpu = Cpu::new(1);
        let (mut plain, mut cache) = (layer.cache(1), layer.cache(1));
        for cache in [&mut plain, &mut cache] {
            layer.run(&mut cpu, cache, &[6], &[segment(0, 0, prompt)]);
        }
        let mut position = prompt;
        for (i, (drafts, accepted)) in steps.into_iter().enumerate() {
            let accepted = accepted.min(drafts);
            let rows: Vec<_> = (0..1 + drafts)
                .map(|t| layer.row(if t <= accepted { 6 } else { 100 + i as u64 }, position + t))
                .collect();
            let next = segment(0, position, 1 + drafts);
            let found = layer.run_rows(&mut cpu, &mut cache, 1, &[next], &rows).1;
            for (t, found) in found.iter().take(1 + accepted).enumerate() {
                let expected = layer.run(&mut cpu, &mut plain, &[6], &[segment(0, position + t, 1)]).1;
                prop_assert_eq!(found, &expected[0]);
            }
            position += 1 + accepted;
        }
        for token in 0..position / 4 * 4 {
            prop_assert_eq!(layer.stored(&cache, 1, 0, token), layer.stored(&plain, 1, 0, token));
        }
    }
}
