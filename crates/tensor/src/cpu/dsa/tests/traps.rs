//! What is known to go wrong in other implementations of the indexer, one test a trap.

use super::*;

/// A cache of one slot and `tokens` tokens whose pool keys are given, with the step's page table in order.
fn with_pool_keys(layer: &Layer, tokens: usize, keys: impl Fn(usize, &mut [f32])) -> CpuCache {
    let mut cache = CpuCache::new(&CacheShape {
        pages: tokens.div_ceil(PAGE_TOKENS),
        dsa_layers: 2,
        ..layer.cache(1).shape().clone()
    })
    .unwrap();
    for (pool, key) in cache.dsa_mut(1).unwrap().pool_keys.chunks_exact_mut(DIM).enumerate() {
        keys(pool, key);
    }
    cache
}

/// Selections of the last `rows` of `tokens` positions; all rows look in the same direction.
fn select(cpu: &mut Cpu, layer: &Layer, cache: &CpuCache, tokens: usize, rows: usize) -> Vec<Vec<u32>> {
    let weights = layer.weights();
    let indexer = weights.indexer.as_ref().unwrap();
    let mut proj = vec![0.0; Q_LORA + LATENT + 2 * DIM + HEADS];
    proj[Q_LORA + LATENT + DIM..][..HEADS].copy_from_slice(&[0.5, 0.75, 1.0]);
    let (proj, query) = (buffer(&vec![proj; rows]), buffer(&vec![vec![0.7; HEADS * DIM]; rows]));
    let mut selection = CpuSelection::new(rows, layer.topk + layer.kpool - 1);
    cpu.begin(&step(1, &[segment(0, tokens - rows, rows)])).unwrap();
    let query = Columns { buffer: &query, start: 0, width: HEADS * DIM };
    dsa_select(cpu, indexer, Layer::columns(), query, &proj, cache, 1, &mut selection).unwrap();
    (0..rows).map(|row| selection.row(row).to_vec()).collect()
}

#[test]
fn near_tied_pools_are_told_apart() {
    // Neighbouring scores differ by 2^-19 of their size: bf16 and TF32 see ties there, and so does a product of two bf16
    // parts an operand.
    let layer = Layer::new(4, 64);
    let tokens = 4 * 32;
    let rank = |pool: usize| pool * 13 % 32;
    let cache = with_pool_keys(&layer, tokens, |pool, key| {
        for (d, k) in key.iter_mut().enumerate() {
            *k = (1.0 + rank(pool) as f32 / (1u32 << 19) as f32) * if d % 3 == 0 { 0.25 } else { 0.5 };
        }
    });
    let expected: Vec<u32> = (0..32).filter(|&p| rank(p) >= 16).flat_map(|p| 4 * p as u32..4 * p as u32 + 4).collect();
    for mut cpu in devices() {
        assert_eq!(select(&mut cpu, &layer, &cache, tokens, 1)[0], expected, "{cpu:?}");
    }
}

#[test]
fn the_best_pools_of_a_long_context_are_found_wherever_they_are() {
    // 131,072 tokens and a few more: the scores of a row must not be those of the newest tokens alone.
    let layer = Layer::new(4, 24);
    let tokens = (1 << 17) + 2;
    let needles = [0, 1, 9_999, 16_384, 32_766, 32_767];
    let cache = with_pool_keys(&layer, tokens, |pool, key| {
        key.fill(if needles.contains(&pool) { 1.0 } else { 0.001 * (pool % 977) as f32 / 977.0 });
    });
    let pooled = needles.iter().flat_map(|&p| 4 * p as u32..4 * p as u32 + 4);
    let expected: Vec<u32> = pooled.chain([1 << 17, (1 << 17) + 1]).collect();
    // A lone row is shared by the threads; several rows are taken whole.
    assert_eq!(select(&mut Cpu::new(3), &layer, &cache, tokens, 1)[0], expected);
    let rows = select(&mut Cpu::new(1), &layer, &cache, tokens, 3);
    assert_eq!(rows[2], expected);
    assert_eq!(rows[1], expected[..expected.len() - 1]);
    assert_eq!(rows[0], expected[..expected.len() - 2], "the row completes the last pool");
}

#[test]
fn the_tail_is_the_rows_own_and_not_that_of_its_place_in_the_batch() {
    let layer = Layer::new(4, 8);
    let sequences = [21, 22, 23];
    let lens = [6, 41, 75];
    let mut cpu = Cpu::new(1);
    let mut cache = layer.cache(3);
    for (slot, &len) in lens.iter().enumerate() {
        layer.run(&mut cpu, &mut cache, &sequences, &[segment(slot, 0, len)]);
    }
    // Chunks of unequal length that start at different places of a pool, not in the order of the slots.
    let segments = [segment(2, 75, 9), segment(0, 6, 2), segment(1, 41, 5)];
    let (_, found) = layer.run(&mut cpu, &mut cache, &sequences, &segments);
    let mut found = found.iter();
    for s in &segments {
        let (start, rows) = (s.position as usize, s.rows as usize);
        let history: Vec<_> = (0..start + rows).map(|p| layer.row(sequences[s.slot as usize], p)).collect();
        for t in start..start + rows {
            let (expected, gap) = layer.selected64(&history[..=t]);
            assert!(gap > 1e-5 || gap == 0.0, "the choice at {t} is clear");
            assert_eq!(found.next(), Some(&expected), "slot {}, position {t}", s.slot);
        }
    }
}

#[test]
fn every_decoded_token_goes_to_the_ring_not_only_one_that_completes_a_pool() {
    let layer = Layer::new(4, 8);
    let rows: Vec<_> = (0..20).map(|p| layer.row(31, p)).collect();
    for prompt in 1..=8 {
        let (mut cpu, mut cache) = (Cpu::new(1), layer.cache(1));
        layer.run(&mut cpu, &mut cache, &[31], &[segment(0, 0, prompt)]);
        for position in prompt..20 {
            layer.run(&mut cpu, &mut cache, &[31], &[segment(0, position, 1)]);
        }
        for pool in 0..5 {
            let key = layer.stored(&cache, 1, 0, 4 * pool).1;
            close(key, &layer.pool64(&rows, pool), 1e-5, &format!("pool {pool} after a prompt of {prompt}"));
        }
    }
}

#[test]
fn a_page_holds_the_pools_of_its_own_tokens_and_no_others() {
    for kpool in [4, 8] {
        let layer = Layer::new(kpool, 2 * kpool);
        let mut cache = layer.cache(3);
        layer.run(&mut Cpu::new(1), &mut cache, &[5, 6, 7], &[segment(1, 0, 3 * PAGE_TOKENS + 3)]);
        let dsa = cache.dsa(1).unwrap();
        let pools = PAGE_TOKENS / kpool;
        for (page, keys) in dsa.pool_keys.chunks_exact(pools * DIM).enumerate() {
            // Pages of the sequence are 1, 4, 7 and 10; the last one has no complete pool yet.
            let full = [1, 4, 7].contains(&page);
            assert!(keys.chunks_exact(DIM).all(|key| key.iter().any(|&v| v != 0.0) == full), "page {page}");
        }
        for (page, latents) in dsa.latents.chunks_exact(PAGE_TOKENS * LATENT).enumerate() {
            let tokens = latents.chunks_exact(LATENT).filter(|l| l.iter().any(|&v| v != 0.0)).count();
            let expected = if [1, 4, 7].contains(&page) { PAGE_TOKENS } else { 3 * usize::from(page == 10) };
            assert_eq!(tokens, expected, "page {page}");
        }
    }
}
