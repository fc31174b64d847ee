//! Damage to values: G6 to G9 and G16.

use glimmer_quantize::gates::GateId::{self, G6, G6b, G7, G8, G9, G16};
use half::bf16;

use crate::{
    artifact::Plan,
    harness::{made, made_alone, run},
};

const LAYER: &str = "model.language_model.layers.1";
const GATE: &str = "model.language_model.layers.1.mlp.experts.2.gate_proj";
const UP: &str = "model.language_model.layers.1.mlp.experts.2.up_proj";
const DOWN: &str = "model.language_model.layers.2.mlp.experts.0.down_proj";
/// Columns of `GATE` and `UP`; their rows number half as many.
const COLS: usize = 256;

const NONE: &[GateId] = &[];

fn expert(e: usize, projection: &str, suffix: &str) -> String {
    format!("{LAYER}.mlp.experts.{e}.{projection}.{suffix}")
}

/// Sets one scale.
fn set_scale(plan: &mut Plan, base: &str, index: usize, value: bf16) {
    let bytes = &mut plan.tensor(&format!("{base}.weight_scale")).bytes;
    bytes[2 * index..2 * index + 2].copy_from_slice(&value.to_le_bytes());
}

/// Changes all scales.
fn map_scales(plan: &mut Plan, base: &str, f: impl Fn(f32) -> f32) {
    for bytes in plan.tensor(&format!("{base}.weight_scale")).bytes.as_chunks_mut::<2>().0 {
        *bytes = bf16::from_f32(f(bf16::from_le_bytes(*bytes).to_f32())).to_le_bytes();
    }
}

/// Changes the words of a matrix.
fn words<'a>(plan: &'a mut Plan, base: &str) -> &'a mut Vec<u8> {
    &mut plan.tensor(&format!("{base}.weight_packed")).bytes
}

/// Changes the nibbles of a matrix, given as `[rows * cols]`.
fn nibbles(plan: &mut Plan, base: &str, f: impl FnOnce(&mut Vec<u8>)) {
    let bytes = words(plan, base);
    let mut nibbles: Vec<u8> = bytes.iter().flat_map(|b| [b & 15, b >> 4]).collect();
    f(&mut nibbles);
    *bytes = nibbles.as_chunks::<2>().0.iter().map(|[low, high]| low | high << 4).collect();
}

#[test]
fn scales_are_g6s() {
    run(&[
        made("scale 0", &[G6], |p| set_scale(p, UP, 5, bf16::ZERO)),
        made("scale -0", &[G6], |p| set_scale(p, UP, 5, bf16::NEG_ZERO)),
        made("scale NaN", &[G6], |p| set_scale(p, UP, 0, bf16::NAN)),
        made("scale infinite", &[G6], |p| set_scale(p, UP, 255, bf16::INFINITY)),
        made("scale negative", &[G6], |p| map_scales(p, DOWN, |s| -s)),
        made("all scales zero", &[G6], |p| map_scales(p, DOWN, |_| 0.0)),
        made("all scales equal", &[G6], |p| map_scales(p, GATE, |_| 0.03)),
        made("all scales the zero group's", &[G6], |p| map_scales(p, GATE, |_| 0.0078125)),
        made("the zero group's scale on a group that does not use its range", &[G6], |p| {
            set_scale(p, UP, 0, bf16::EPSILON);
            nibbles(p, UP, |n| n[..128].iter_mut().for_each(|u| *u = 8 + (*u > 8) as u8));
        }),
        made_alone("the zero group's scale on another group", &[G6], NONE, |p| set_scale(p, UP, 7, bf16::EPSILON)),
        made_alone("all scales doubled", &[G6], NONE, |p| map_scales(p, UP, |s| 2.0 * s)),
        made_alone("one scale halved", &[G6], NONE, |p| {
            map_scales(p, DOWN, |s| s);
            let scale = &p.tensor(&format!("{DOWN}.weight_scale")).bytes;
            let half = bf16::from_f32(bf16::from_le_bytes([scale[20], scale[21]]).to_f32() / 2.0);
            set_scale(p, DOWN, 10, half);
        }),
        made_alone("scales for a range of 15 instead of 7.5", &[G6], NONE, |p| map_scales(p, DOWN, |s| s / 2.0)),
    ]);
}

#[test]
fn collapsed_codes_are_g6bs() {
    run(&[
        made("codes all zero", &[G6b], |p| words(p, DOWN).fill(0x88)),
        made("codes of an expert all zero", &[G6b], |p| {
            for projection in ["gate_proj", "up_proj", "down_proj"] {
                p.tensor(&expert(3, projection, "weight_packed")).bytes.fill(0x88);
            }
        }),
        made("words all zero", &[G6b], |p| words(p, DOWN).fill(0)),
        made("words all ones", &[G6b], |p| words(p, DOWN).fill(0xff)),
        made("codes reduced to signs", &[G6b], |p| {
            nibbles(p, UP, |n| n.iter_mut().for_each(|u| *u = [6, 8, 10][(*u > 8) as usize + (*u >= 8) as usize]));
        }),
        made("codes pushed to the ends of the range", &[G6b], |p| {
            nibbles(p, UP, |n| {
                n.iter_mut().for_each(|u| *u = (2 * i16::from(*u) - 8).clamp(0, 15).unsigned_abs() as u8);
            });
        }),
        made_alone("one group zeroed", &[G6b], NONE, |p| nibbles(p, UP, |n| n[1280..1408].fill(8))),
        made_alone("one row zeroed", &[G6b], NONE, |p| nibbles(p, UP, |n| n[COLS..2 * COLS].fill(8))),
    ]);
}

#[test]
fn values_that_are_not_finite_are_g7s() {
    run(&[
        made("NaN in a norm", &[G7], |p| {
            let norm = p.tensor("model.language_model.norm.weight");
            norm.bytes[..2].copy_from_slice(&bf16::NAN.to_le_bytes());
        }),
        made("infinity in dt_bias", &[G7], |p| {
            let bias = p.tensor("model.language_model.layers.0.self_attn.dt_bias");
            bias.bytes[8..12].copy_from_slice(&f32::NEG_INFINITY.to_le_bytes());
        }),
        made("NaN in the vision tower", &[G7], |p| {
            let proj = p.tensor("model.visual.merger.proj.weight");
            proj.bytes[100..102].copy_from_slice(&bf16::NAN.to_le_bytes());
        }),
        made("a scale that overflows", &[G7], |p| set_scale(p, UP, 3, bf16::MAX)),
    ]);
}

#[test]
fn matrices_that_are_not_the_sources_are_g8s() {
    run(&[
        made_alone("nibbles exchanged", &[G8], NONE, |p| {
            words(p, UP).iter_mut().for_each(|b| *b = b.rotate_left(4));
        }),
        made_alone("words big-endian", &[G8], NONE, |p| {
            words(p, UP).as_chunks_mut::<4>().0.iter_mut().for_each(|w| w.reverse());
        }),
        made_alone("highest nibble first", &[G8], NONE, |p| {
            nibbles(p, UP, |n| n.as_chunks_mut::<8>().0.iter_mut().for_each(|w| w.reverse()));
        }),
        made_alone("offset 7 instead of 8", &[G8], &[G6b], |p| {
            nibbles(p, UP, |n| n.iter_mut().for_each(|u| *u = u.saturating_sub(1)));
        }),
        made_alone("offset 9 instead of 8", &[G8], &[G6b], |p| {
            nibbles(p, UP, |n| n.iter_mut().for_each(|u| *u = (*u + 1).min(15)));
        }),
        made_alone("two's complement instead of an offset", &[G6b], &[G6b], |p| {
            nibbles(p, UP, |n| n.iter_mut().for_each(|u| *u ^= 8));
        }),
        made_alone("transposed", &[G8], NONE, |p| {
            nibbles(p, UP, |n| {
                let rows = n.len() / COLS;
                *n = (0..n.len()).map(|i| n[(i % rows) * COLS + i / rows]).collect();
            });
        }),
        made_alone("columns shifted by one", &[G8], NONE, |p| nibbles(p, UP, |n| n.rotate_left(1))),
        made_alone("rows in reverse", &[G8], NONE, |p| {
            nibbles(p, UP, |n| *n = n.chunks(COLS).rev().flatten().copied().collect());
        }),
        made_alone("two rows exchanged", &[G8], NONE, |p| {
            nibbles(p, UP, |n| (0..COLS).for_each(|c| n.swap(c, 9 * COLS + c)));
        }),
        made_alone("signs inverted", &[G8], NONE, |p| {
            nibbles(p, UP, |n| n.iter_mut().for_each(|u| *u = (16 - *u).min(15)));
        }),
        made_alone("gate and up exchanged, words only", &[G8], NONE, |p| {
            p.swap(&format!("{GATE}.weight_packed"), &format!("{UP}.weight_packed"));
        }),
        made_alone("gate and up exchanged", &[G8], NONE, |p| {
            for suffix in ["weight_packed", "weight_scale"] {
                p.swap(&format!("{GATE}.{suffix}"), &format!("{UP}.{suffix}"));
            }
        }),
    ]);
}

#[test]
fn experts_that_are_not_themselves_are_g9s() {
    run(&[
        made("words of an expert twice", &[G9], |p| {
            p.copy(&expert(0, "down_proj", "weight_packed"), &expert(3, "down_proj", "weight_packed"));
        }),
        made("an expert twice", &[G9], |p| {
            for projection in ["gate_proj", "up_proj", "down_proj"] {
                for suffix in ["weight_packed", "weight_scale"] {
                    p.copy(&expert(1, projection, suffix), &expert(2, projection, suffix));
                }
            }
        }),
        made_alone("gate in the place of up", &[G8], &[G9], |p| {
            for suffix in ["weight_packed", "weight_scale"] {
                p.copy(&format!("{GATE}.{suffix}"), &format!("{UP}.{suffix}"));
            }
        }),
        made_alone("two experts exchanged", &[G9], NONE, |p| {
            for projection in ["gate_proj", "up_proj", "down_proj"] {
                for suffix in ["weight_packed", "weight_scale"] {
                    p.swap(&expert(1, projection, suffix), &expert(2, projection, suffix));
                }
            }
        }),
        made_alone("experts numbered from one", &[G9], NONE, |p| {
            for e in 0..3 {
                for projection in ["gate_proj", "up_proj", "down_proj"] {
                    for suffix in ["weight_packed", "weight_scale"] {
                        p.swap(&expert(e, projection, suffix), &expert(e + 1, projection, suffix));
                    }
                }
            }
        }),
    ]);
}

#[test]
fn codes_that_do_not_come_back_are_g16s() {
    run(&[made_alone("a subnormal scale", &[G6], &[G16], |p| set_scale(p, UP, 3, bf16::from_bits(1)))]);
}
