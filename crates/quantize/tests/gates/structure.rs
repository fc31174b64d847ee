//! Damage to names, dtypes and shapes: G1 to G5 and G12.

use glimmer_checkpoint::DType;
use glimmer_quantize::gates::GateId::{G1, G2, G3, G4, G5, G12};
use half::{bf16, f16};

use crate::{
    artifact::{Plan, Tensor, source},
    harness::{made, made_alone, run},
};

const TRUNK: &str = "model.language_model";
const P: &str = "model.language_model.layers.1.mlp.experts.2.up_proj";
const MTP: &str = "model.language_model.layers.3";

fn name(suffix: &str) -> String {
    format!("{P}.{suffix}")
}

/// Rewrites a tensor's elements in another dtype.
fn cast(plan: &mut Plan, name: &str, dtype: DType) {
    let tensor = plan.tensor(name);
    let values: Vec<f32> = match tensor.dtype {
        DType::F32 => tensor.bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        DType::Bf16 => tensor.bytes.as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
        other => panic!("{other} is not cast"),
    };
    tensor.bytes = match dtype {
        DType::F32 => values.into_iter().flat_map(f32::to_le_bytes).collect(),
        DType::F16 => values.into_iter().flat_map(|v| f16::from_f32(v).to_le_bytes()).collect(),
        DType::Bf16 => values.into_iter().flat_map(|v| bf16::from_f32(v).to_le_bytes()).collect(),
        other => panic!("{other} is not cast to"),
    };
    tensor.dtype = dtype;
}

fn weight_of_source(name: &str) -> Tensor {
    source().remove(name)
}

#[test]
fn a_matrix_that_is_not_properly_packed_is_g1s() {
    run(&[
        made("one expert dropped", &[G1], |p| {
            for projection in ["gate_proj", "up_proj", "down_proj"] {
                for suffix in ["weight_packed", "weight_scale", "weight_shape"] {
                    drop(p.remove(&format!("{TRUNK}.layers.2.mlp.experts.3.{projection}.{suffix}")));
                }
            }
        }),
        made("one matrix dropped", &[G1], |p| {
            for suffix in ["weight_packed", "weight_scale", "weight_shape"] {
                drop(p.remove(&name(suffix)));
            }
        }),
        made("words dropped", &[G1], |p| drop(p.remove(&name("weight_packed")))),
        made("scales dropped", &[G1], |p| drop(p.remove(&name("weight_scale")))),
        made("shape dropped", &[G1], |p| drop(p.remove(&name("weight_shape")))),
        made("matrix left in BF16", &[G1], |p| {
            for suffix in ["weight_packed", "weight_scale", "weight_shape"] {
                drop(p.remove(&name(suffix)));
            }
            p.shards[1].1.push(weight_of_source(&name("weight")));
        }),
        made("plain weight beside the triple", &[G1], |p| p.shards[1].1.push(weight_of_source(&name("weight")))),
        made("scales in F32", &[G1], |p| cast(p, &name("weight_scale"), DType::F32)),
        made("scales in F16", &[G1], |p| cast(p, &name("weight_scale"), DType::F16)),
        made("words in U32", &[G1], |p| p.tensor(&name("weight_packed")).dtype = DType::U32),
        made("shape in I32", &[G1], |p| {
            let shape = p.tensor(&name("weight_shape"));
            shape.dtype = DType::I32;
            shape.bytes = [128_i32, 256].into_iter().flat_map(i32::to_le_bytes).collect();
        }),
        made("shape values exchanged", &[G1], |p| {
            p.tensor(&name("weight_shape")).bytes = [256_i64, 128].into_iter().flat_map(i64::to_le_bytes).collect();
        }),
        made("shape value negative", &[G1], |p| {
            p.tensor(&name("weight_shape")).bytes = [128_i64, -256].into_iter().flat_map(i64::to_le_bytes).collect();
        }),
        made("words with exchanged dimensions", &[G1], |p| p.tensor(&name("weight_packed")).shape = vec![32, 128]),
        made("scales for groups of 64", &[G1], |p| {
            let scale = p.tensor(&name("weight_scale"));
            scale.shape = vec![128, 4];
            scale.bytes = scale.bytes.as_chunks::<2>().0.iter().flat_map(|s| [*s, *s].concat()).collect();
        }),
    ]);
}

#[test]
fn compression_elsewhere_and_other_trunk_names_are_g2s() {
    run(&[
        made("group index added", &[G2], |p| {
            p.add(1, &name("weight_g_idx"), DType::I32, &[256], vec![0; 1024]);
        }),
        made("zero point added", &[G2], |p| {
            p.add(1, &name("weight_zero_point"), DType::I32, &[16, 2], vec![0; 128]);
        }),
        made("global scale added", &[G2], |p| {
            p.add(1, &name("input_global_scale"), DType::F32, &[1], vec![0; 4]);
        }),
        made("scale of an FP8 source left", &[G2], |p| {
            let name = format!("{TRUNK}.layers.1.self_attn.o_proj.weight_scale_inv");
            p.add(0, &name, DType::F32, &[2, 1], vec![0; 8]);
        }),
        made("shared expert quantized", &[G2], |p| p.quantize(&format!("{TRUNK}.layers.1.mlp.shared_experts.up_proj"))),
        made("head quantized", &[G2], |p| p.quantize("lm_head")),
        made("MTP expert quantized", &[G2], |p| p.quantize(&format!("{MTP}.mlp.experts.0.gate_proj"))),
        made("vision matrix quantized", &[G2], |p| p.quantize("model.visual.merger.gate_proj")),
        made("dense matrix dropped", &[G2], |p| drop(p.remove(&format!("{TRUNK}.layers.0.mlp.down_proj.weight")))),
        made("head dropped", &[G2], |p| drop(p.remove("lm_head.weight"))),
        made("norm renamed", &[G2], |p| {
            p.tensor(&format!("{TRUNK}.norm.weight")).name = format!("{TRUNK}.final_norm.weight");
        }),
        made("tensor added", &[G2], |p| {
            let name = format!("{TRUNK}.layers.1.self_attn.rotary_emb.inv_freq");
            p.add(0, &name, DType::F32, &[2], vec![0; 8]);
        }),
    ]);
}

#[test]
fn the_vision_towers_form_is_g3s() {
    run(&[
        made("vision bias dropped", &[G3], |p| drop(p.remove("model.visual.blocks.0.attn.qkv.bias"))),
        made("whole tower dropped", &[G3], |p| p.shards[3].1.retain(|t| !t.name.contains(".visual."))),
        made("vision norm cast to F32", &[G3], |p| cast(p, "model.visual.post_layernorm.weight", DType::F32)),
        made("patch embedding flattened", &[G3], |p| {
            let patch = p.tensor("model.visual.patch_embed.proj.weight");
            patch.shape = vec![patch.shape[0], patch.shape[1..].iter().product()];
        }),
        made("vision tensor added", &[G3], |p| {
            p.add(3, "model.visual.blocks.0.attn.rope.inv_freq", DType::Bf16, &[2], vec![0; 4]);
        }),
    ]);
}

#[test]
fn the_mtp_layers_names_are_g4s() {
    run(&[
        made("MTP norm dropped", &[G4], |p| drop(p.remove(&format!("{MTP}.enorm.weight")))),
        made("MTP expert matrix dropped", &[G4], |p| {
            drop(p.remove(&format!("{MTP}.mlp.experts.1.down_proj.weight")));
        }),
        made("MTP layer dropped", &[G4], |p| p.shards[3].1.retain(|t| !t.name.starts_with(MTP))),
        made("MTP embedding added", &[G4], |p| {
            p.add(3, &format!("{MTP}.embed_tokens.weight"), DType::Bf16, &[2], vec![0; 4]);
        }),
    ]);
}

#[test]
fn drift_of_what_is_passed_through_is_g5s() {
    run(&[
        made("dt_bias cast to BF16", &[G5], |p| {
            cast(p, &format!("{TRUNK}.layers.0.self_attn.dt_bias"), DType::Bf16);
        }),
        made("hc base cast to BF16", &[G5], |p| cast(p, &format!("{TRUNK}.layers.1.hc_attn_base"), DType::Bf16)),
        made("hc scale cast to F16", &[G5], |p| cast(p, &format!("{TRUNK}.layers.1.hc_ffn_scale"), DType::F16)),
        made("router bias cast to BF16", &[G5], |p| {
            cast(p, &format!("{TRUNK}.layers.2.mlp.gate.e_score_correction_bias"), DType::Bf16);
        }),
        made("conv cast to F32", &[G5], |p| {
            cast(p, &format!("{TRUNK}.layers.2.self_attn.q_conv1d.weight"), DType::F32);
        }),
        made("conv squeezed", &[G5], |p| {
            let conv = p.tensor(&format!("{TRUNK}.layers.2.self_attn.q_conv1d.weight"));
            conv.shape.remove(1);
        }),
        made("MTP norm cast to F32", &[G5], |p| cast(p, &format!("{MTP}.hnorm.weight"), DType::F32)),
        made_alone("one bit of the router altered", &[G5], &[], |p| {
            p.tensor(&format!("{TRUNK}.layers.1.mlp.gate.weight")).bytes[6] ^= 1;
        }),
        made_alone("last byte of the embedding altered", &[G5], &[], |p| {
            *p.tensor(&format!("{TRUNK}.embed_tokens.weight")).bytes.last_mut().expect("bytes") ^= 0x80;
        }),
        made_alone("one bit of an MTP expert altered", &[G5], &[], |p| {
            p.tensor(&format!("{MTP}.mlp.experts.1.down_proj.weight")).bytes[0] ^= 1;
        }),
        made_alone("one bit of the vision tower altered", &[G5], &[], |p| {
            p.tensor("model.visual.downsample.weight").bytes[0] ^= 1;
        }),
        made_alone("two norms exchanged", &[G5], &[], |p| {
            let norm = |layer| format!("{TRUNK}.layers.{layer}.input_layernorm.weight");
            p.swap(&norm(0), &norm(1));
        }),
        made_alone("streams of a mixer exchanged", &[G5], &[], |p| {
            p.swap(&format!("{TRUNK}.layers.1.hc_attn_fn"), &format!("{TRUNK}.layers.1.hc_ffn_fn"));
        }),
    ]);
}

#[test]
fn sizes_and_layout_of_shards_are_g12s() {
    run(&[
        made("a shard too large", &[G12], |p| {
            let trunk = std::mem::take(&mut p.shards[0].1);
            let kept = trunk.iter().position(|t| t.name.contains("lm_head")).expect("a head");
            let (moved, kept): (Vec<_>, Vec<_>) = trunk.into_iter().enumerate().partition(|(i, _)| *i != kept);
            p.shards[0].1.extend(kept.into_iter().map(|(_, t)| t));
            p.shards[3].1.extend(moved.into_iter().map(|(_, t)| t));
        }),
        made("a layer split over two shards", &[G12], |p| {
            let moved = p.shards[2].1.pop().expect("a tensor");
            p.shards[1].1.push(moved);
        }),
    ]);
}
