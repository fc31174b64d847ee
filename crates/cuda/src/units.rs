//! All kernels of a model: what a start compiles ahead and what the checks without a device compile.

use std::collections::BTreeSet;

use glimmer_checkpoint::{Config, VisionConfig};
use glimmer_tensor::PAGE_TOKENS;

use crate::{
    bench,
    compile::Unit,
    kernels::{
        dense, dsa, experts, experts_bf16, few,
        gemm::{self, Variant},
        heads, index, kda, kda_chunk, mhc, mla, moe, narrow, router, sampler, several, slots, sparse, vision,
    },
    types::GROUP,
};

/// The units of a model. `reduced` leaves out variants of the products that differ in sizes only.
pub fn units(config: &Config, reduced: bool) -> Vec<Unit> {
    let text = &config.text;
    let values = |numbers: &[usize]| numbers.iter().map(|&n| n as i64).collect::<Vec<i64>>();
    let (indexer, moe_config) = (&text.indexer, &text.moe);
    let (top, experts) = (moe_config.experts_per_token, moe_config.num_experts);
    let mut units = vec![
        dense::FILE.unit(&[]),
        narrow::FILE.unit(&[]),
        bench::FILE.unit(&[]),
        sampler::FILE.unit(&[]),
        sampler::DRAW.unit(&values(&[sampler::DRAW_HEAD])),
        sampler::STREAM.unit(&values(&[sampler::STREAM_HEAD])),
        mhc::FILE.unit(&values(&[text.mhc.streams])),
        kda::FILE.unit(&kda::constants(text.kda.head_dim, text.kda.conv_kernel)),
        dsa::FILE.unit(&values(&[PAGE_TOKENS, indexer.kpool, indexer.head_dim, indexer.num_heads])),
        dsa::FILE.unit(&values(&dsa::WITHOUT_INDEXER)),
        mla::FILE.unit(&values(&[text.mla.kv_lora_rank, PAGE_TOKENS])),
        moe::FILE.unit(&values(&[top])),
        slots::FILE.unit(&values(&[top, experts])),
    ];
    if text.mhc.streams == mhc::STREAMS {
        units.push(mhc::SITE.unit(&[]));
    }
    if text.kda.head_dim == kda_chunk::DIM {
        units.push(kda_chunk::FILE.unit(&kda::constants(text.kda.head_dim, text.kda.conv_kernel)));
    }
    if text.mla.kv_lora_rank == sparse::LATENT {
        // What caches of halves take: all heads, and the slices of two and four ranks.
        for heads in [1, 2, 4].map(|ranks| sparse::item_heads(text.mla.num_heads.div_ceil(ranks))) {
            let unit = sparse::FILE.unit(&values(&[heads, PAGE_TOKENS]));
            if !units.contains(&unit) {
                units.push(unit);
            }
        }
        units.push(index::FILE.unit(&values(&[PAGE_TOKENS, indexer.kpool])));
        units.extend(index::choice_units(indexer.kpool));
        if heads::fits(text.mla.qk_nope_head_dim, text.mla.v_head_dim) {
            let constants = [8, 16, 24].map(|rows| heads::constants(text.mla.qk_nope_head_dim, rows));
            units.extend(constants.map(|constants| heads::FILE.unit(&constants)));
        }
    }
    // The sums by the kernel, in slices; the choice from those, from the library's or from plain products.
    let slices = router::slices(text.hidden_size);
    units.push(router::FILE.unit(&values(&[1, experts, 1, 1, slices])));
    for slices in BTreeSet::from([1, slices]) {
        units.push(router::FILE.unit(&values(&[top, experts, moe_config.num_groups, moe_config.topk_groups, slices])));
    }
    if let Some(v) = &config.vision {
        units.push(vision::FILE.unit(&values(&[v.hidden_size / v.num_heads])));
    }
    let mut seen = BTreeSet::new();
    for variant in variants(config) {
        let mut constants = variant.constants(2);
        if reduced {
            // One number of tokens and one split of the columns stand for all.
            constants[4] = 1;
            constants[5] = 1;
        }
        if seen.insert(constants) {
            units.push(gemm::FILE.unit(&constants));
        }
    }
    for (swiglu, columns) in few_columns(config) {
        for (rows, tiles) in [8, 16, few::MOST_ROWS].into_iter().flat_map(|rows| [(rows, 1), (rows, 1 << 20)]) {
            let unit = few::constants(rows, columns, tiles, swiglu, 2).map(|constants| few::FILE.unit(&constants));
            if let Some(unit) = unit.filter(|unit| !units.contains(unit)) {
                units.push(unit);
            }
        }
    }
    units.extend(several::units(reduced));
    // The draft layer's experts, whole and as slices of two and four ranks.
    let slices = [1, 2, 4].map(|ranks| (false, moe_config.intermediate_size / ranks));
    for (swiglu, columns) in [(true, text.hidden_size)].into_iter().chain(slices) {
        units.extend(experts_bf16::constants(swiglu, columns, 2).map(|constants| experts_bf16::FEW.unit(&constants)));
    }
    for swiglu in [true, false] {
        units.extend(experts_bf16::many_constants(swiglu, 2).map(|constants| experts_bf16::MANY.unit(&constants)));
    }
    for (swiglu, columns) in [(true, text.hidden_size), (false, moe_config.intermediate_size)] {
        let groups = columns / GROUP;
        for variant in experts::variants(swiglu, groups) {
            let unit = variant.file.unit(&variant.constants);
            if !units.contains(&unit) {
                units.push(unit);
            }
        }
    }
    units
}

/// Whether a unit uses what compute capability 9.0 alone has.
pub fn needs_warpgroups(unit: &Unit) -> bool {
    let only = [
        experts::FEW.name,
        experts::MANY.name,
        experts_bf16::FEW.name,
        experts_bf16::MANY.name,
        few::FILE.name,
        heads::FILE.name,
        several::FILE.name,
        sparse::FILE.name,
        index::FILE.name,
        index::CHOOSE.name,
        kda_chunk::FILE.name,
        sampler::DRAW.name,
    ];
    only.contains(&unit.file)
}

fn variants(config: &Config) -> impl Iterator<Item = Variant> {
    let text = &config.text;
    let shared = text.moe.num_shared * text.moe.intermediate_size;
    let routed_in = [text.hidden_size, text.moe.intermediate_size];
    let mut plain = vec![
        text.hidden_size,
        2 * text.hidden_size,
        text.intermediate_size,
        shared,
        text.kda.head_dim,
        text.kda.num_heads * text.kda.head_dim,
        text.mla.q_lora_rank,
        text.mla.num_heads * text.mla.v_head_dim,
    ];
    let mut gated = vec![text.hidden_size];
    if let Some(v) = &config.vision {
        plain.extend(vision_columns(v));
        gated.extend([v.hidden_size, v.out_hidden_size]);
    }
    let tokens = |int4| if int4 { &[1, 2, 4][..] } else { &[1, 2, 4, 8] };
    let of = move |int4: bool, swiglu: bool, grouped: bool, columns: usize| {
        tokens(int4).iter().map(move |&tiles| Variant { int4, swiglu, grouped, tiles, columns })
    };
    let [up, down] = routed_in;
    let routed =
        [false, true].into_iter().flat_map(move |int4| of(int4, true, true, up).chain(of(int4, false, true, down)));
    let plain = plain.into_iter().flat_map(move |columns| of(false, false, false, columns));
    let gated = gated.into_iter().flat_map(move |columns| of(false, true, false, columns));
    routed.chain(plain).chain(gated)
}

/// Columns of products with few rows, and whether they are a gate's.
fn few_columns(config: &Config) -> Vec<(bool, usize)> {
    let text = &config.text;
    let down = [
        text.hidden_size,
        2 * text.hidden_size,
        text.intermediate_size,
        text.moe.num_shared * text.moe.intermediate_size,
        text.kda.num_heads * text.kda.head_dim,
        text.mla.q_lora_rank,
        text.mla.num_heads * text.mla.v_head_dim,
    ];
    down.into_iter().map(|columns| (false, columns)).chain([(true, text.hidden_size)]).collect()
}

fn vision_columns(v: &VisionConfig) -> [usize; 6] {
    let patch = v.in_channels * v.temporal_patch_size * v.patch_size * v.patch_size;
    let merge = v.spatial_merge_size * v.spatial_merge_size;
    [
        patch,
        v.hidden_size,
        v.intermediate_size,
        merge * v.hidden_size,
        v.out_hidden_size,
        v.projection_intermediate_size,
    ]
}
