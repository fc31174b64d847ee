//! Rules and equalities of latent attention.

use super::mla;
use crate::{
    Backend, CacheShape, Columns, DsaWeights, PAGE_TOKENS, Segment,
    cpu::{
        Cpu, CpuBuffer, CpuCache, CpuSelection,
        testing::{Rng, bits, buffer, close, devices, matrix, norm, rows_of, segment, step},
    },
};

struct Layer {
    heads: usize,
    qk: usize,
    v: usize,
    latent: usize,
    kv_b: Vec<f32>,
}

impl Layer {
    fn new(heads: usize, qk: usize, v: usize, latent: usize) -> Self {
        let kv_b = Rng::new(&[latent as u64]).bf16(heads * (qk + v) * latent, 0.5);
        Self { heads, qk, v, latent, kv_b }
    }

    fn weights(&self) -> DsaWeights<Cpu> {
        DsaWeights {
            q_norm: norm(&[1.0], None, 1e-5),
            kv_norm: norm(&[1.0], None, 1e-5),
            kv_b: matrix(self.heads * (self.qk + self.v), &self.kv_b),
            indexer: None,
            heads: self.heads,
            qk_dim: self.qk,
            v_dim: self.v,
        }
    }

    fn latent_of(&self, sequence: u64, token: usize) -> Vec<f32> {
        Rng::new(&[sequence, token as u64, 5]).values(self.latent, 1.5)
    }

    fn query_of(&self, sequence: u64, position: usize) -> Vec<f32> {
        Rng::new(&[sequence, position as u64, 6]).values(self.heads * self.qk, 1.0)
    }

    /// Tokens that a row sees: every third one of its past, and itself.
    fn tokens_of(position: usize) -> Vec<u32> {
        (0..=position as u32).filter(|t| t % 3 == 1 || *t as usize == position).collect()
    }

    /// A cache in which slot `s` of `sequences` holds `tokens` tokens in interleaved pages.
    fn cache(&self, sequences: &[u64], tokens: usize) -> CpuCache {
        let slots = sequences.len();
        let shape = CacheShape {
            kda_layers: 0,
            kda_heads: 0,
            kda_head_dim: 0,
            conv_kernel: 0,
            dsa_layers: 1,
            latent: self.latent,
            index_dim: 4,
            kpool: 4,
            slots,
            pages: slots * 4,
            max_draft: 0,
        };
        let mut cache = CpuCache::new(&shape).unwrap();
        let dsa = cache.dsa_mut(0).unwrap();
        for (slot, &sequence) in sequences.iter().enumerate() {
            for token in 0..tokens {
                let page = token / PAGE_TOKENS * slots + slot;
                let at = (page * PAGE_TOKENS + token % PAGE_TOKENS) * self.latent;
                dsa.latents[at..at + self.latent].copy_from_slice(&self.latent_of(sequence, token));
            }
        }
        cache
    }

    fn run(&self, cpu: &mut Cpu, cache: &CpuCache, sequences: &[u64], segments: &[Segment]) -> Vec<Vec<f32>> {
        let places: Vec<_> = segments
            .iter()
            .flat_map(|s| (0..s.rows).map(|t| (sequences[s.slot as usize], (s.position + t) as usize)))
            .collect();
        let mut selection = CpuSelection::new(places.len(), 4 * PAGE_TOKENS);
        for (i, &(_, position)) in places.iter().enumerate() {
            let tokens = Self::tokens_of(position);
            let (room, len) = selection.row_mut(i);
            room[..tokens.len()].copy_from_slice(&tokens);
            *len = tokens.len() as u32;
        }
        let query: Vec<_> = places.iter().map(|&(s, p)| [vec![7.0; 3], self.query_of(s, p)].concat()).collect();
        let query = buffer(&query);
        let query = Columns { buffer: &query, start: 3, width: self.heads * self.qk };
        cpu.begin(&step(sequences.len(), segments)).unwrap();
        let mut out = CpuBuffer::new(places.len(), self.heads * self.v).unwrap();
        mla(cpu, &self.weights(), query, &selection, cache, 0, &mut out).unwrap();
        rows_of(&out, places.len())
    }

    /// The expanded form in f64: keys and values of every token, then attention.
    fn expanded64(&self, sequence: u64, position: usize) -> Vec<f64> {
        let q = self.query_of(sequence, position);
        let tokens = Self::tokens_of(position);
        let mut out = Vec::new();
        for h in 0..self.heads {
            // Per head: qk key rows, then v value rows.
            let rows = &self.kv_b[h * (self.qk + self.v) * self.latent..][..(self.qk + self.v) * self.latent];
            let times = |row: usize, c: &[f32]| -> f64 {
                rows[row * self.latent..][..self.latent].iter().zip(c).map(|(w, c)| f64::from(*w) * f64::from(*c)).sum()
            };
            let latents: Vec<_> = tokens.iter().map(|&t| self.latent_of(sequence, t as usize)).collect();
            let scores: Vec<f64> = latents
                .iter()
                .map(|c| {
                    let dot: f64 = (0..self.qk).map(|d| f64::from(q[h * self.qk + d]) * times(d, c)).sum();
                    (dot / (self.qk as f64).sqrt()).exp()
                })
                .collect();
            let total: f64 = scores.iter().sum();
            for e in 0..self.v {
                out.push(latents.iter().zip(&scores).map(|(c, p)| p / total * times(self.qk + e, c)).sum());
            }
        }
        out
    }
}

#[test]
fn absorbed_attention_equals_expanded_attention() {
    for (heads, qk, v, latent) in [(5, 12, 10, 20), (4, 32, 32, 32), (3, 64, 48, 128)] {
        let layer = Layer::new(heads, qk, v, latent);
        let cache = layer.cache(&[1, 2], 200);
        let segments = [segment(1, 150, 40), segment(0, 0, 3)];
        let found = layer.run(&mut Cpu::new(2), &cache, &[1, 2], &segments);
        for (i, found) in found.iter().enumerate() {
            let (sequence, position) = if i < 40 { (2, 150 + i) } else { (1, i - 40) };
            close(found, &layer.expanded64(sequence, position), 1e-5, &format!("row {i} of {heads} heads"));
        }
    }
}

#[test]
fn kv_b_is_interleaved_by_head() {
    // Values of head 1 are the latent, everything else is zero: with all keys first they would be elsewhere.
    let mut layer = Layer::new(2, 4, 4, 4);
    layer.kv_b.fill(0.0);
    for d in 0..4 {
        layer.kv_b[((4 + 4) + 4 + d) * 4 + d] = 1.0;
    }
    let cache = layer.cache(&[1], 1);
    let found = layer.run(&mut Cpu::new(1), &cache, &[1], &[segment(0, 0, 1)]);
    let expected = [vec![0.0; 4], layer.latent_of(1, 0)].concat();
    assert_eq!(found[0], expected);
}

#[test]
fn devices_agree_and_rows_do_not_depend_on_the_batch() {
    let layer = Layer::new(6, 12, 20, 40);
    let sequences = [1, 2, 3];
    let cache = layer.cache(&sequences, 190);
    let segments = [segment(2, 180, 1), segment(0, 60, 33), segment(1, 3, 4)];
    let mut reference = None;
    for mut cpu in devices() {
        let result = bits(&layer.run(&mut cpu, &cache, &sequences, &segments));
        assert!(reference.get_or_insert_with(|| result.clone()) == &result, "{cpu:?}");
    }
    let together = reference.unwrap();
    for (row, alone) in [(0, segment(2, 180, 1)), (20, segment(0, 79, 1)), (37, segment(1, 6, 1))] {
        assert_eq!(bits(&layer.run(&mut Cpu::new(1), &cache, &sequences, &[alone]))[0], together[row]);
    }
}
