//! Block-scaled FP8: the form of the released FP8 checkpoint.
//!
//! A matrix `X.weight` of `F8_E4M3` codes `[out, in]` comes with `X.weight_scale_inv`, F32 `[ceil(out/128), ceil(in/128)]`,
//! one factor for each block of 128 x 128 (blocks at the right and lower edge may be smaller):
//! `w[r][c] = bf16(e4m3(code[r][c]) * scale[r / 128][c / 128])`, the product formed in f32 and rounded once.

use half::bf16;

use crate::{
    data::{Bytes, DType, TensorData},
    error::{Damage, Error, Fault},
    shards::Shards,
};

/// Side of a block.
pub const BLOCK: usize = 128;

const SCALE_SUFFIX: &str = "_scale_inv";

/// Values of the 256 codes of `F8_E4M3` (1 sign, 4 exponent bits with bias 7, 3 mantissa bits, no infinities, NaN at 0x7f
/// and 0xff).
pub const E4M3: [f32; 256] = e4m3_table();

const fn e4m3_table() -> [f32; 256] {
    let mut table = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        let (exponent, mantissa) = ((code >> 3) & 15, (code & 7) as f32);
        let magnitude = if exponent == 15 && code & 7 == 7 {
            f32::NAN
        } else if exponent == 0 {
            mantissa * pow2(-9)
        } else {
            (8.0 + mantissa) * pow2(exponent as i32 - 10)
        };
        table[code] = if code & 0x80 == 0 { magnitude } else { -magnitude };
        code += 1;
    }
    table
}

/// `2^exponent` for an exponent of the normal f32 range.
const fn pow2(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

/// Whether a tensor is the scale of an FP8 weight.
pub fn is_scale(name: &str) -> bool {
    name.ends_with(".weight_scale_inv")
}

/// Name of the scale of the FP8 weight `name`.
pub fn scale_name(name: &str) -> String {
    format!("{name}{SCALE_SUFFIX}")
}

/// Reports FP8 weights without a proper scale and scales without an FP8 weight.
pub(crate) fn check(shards: &Shards, damages: &mut Vec<Damage>) {
    for (name, stored) in shards.tensors() {
        let file = &shards.files()[stored.shard].file;
        if stored.dtype == DType::F8E4M3 {
            if let Err(damage) = scale_of(shards, name, &stored.shape, file) {
                damages.push(damage);
            }
        } else if is_scale(name) {
            let weight = name.strip_suffix(SCALE_SUFFIX).unwrap_or(name);
            if shards.stored(weight).is_none_or(|w| w.dtype != DType::F8E4M3) {
                let expected = format!("an F8_E4M3 tensor `{weight}`");
                damages.push(Damage::new(Fault::Fp8Scale, file, expected, "none").of(name));
            }
        }
    }
}

/// The scale tensor that belongs to an FP8 weight.
fn scale_of(shards: &Shards, name: &str, shape: &[usize], file: &str) -> Result<TensorData, Damage> {
    let damage = |expected: String, found: String| Damage::new(Fault::Fp8Scale, file, expected, found).of(name);
    let &[rows, cols] = shape else {
        return Err(damage("a matrix".to_owned(), format!("shape {shape:?}")));
    };
    let blocks = [rows.div_ceil(BLOCK), cols.div_ceil(BLOCK)];
    let expected = || format!("`{}` F32 {blocks:?}", scale_name(name));
    let scale = shards.tensor(&scale_name(name)).ok_or_else(|| damage(expected(), "none".to_owned()))?;
    if scale.dtype != DType::F32 || scale.shape != blocks {
        return Err(damage(expected(), format!("{} {:?}", scale.dtype, scale.shape)));
    }
    Ok(scale)
}

/// The BF16 tensor that an FP8 weight stands for.
pub(crate) fn widen(shards: &Shards, weight: &TensorData) -> Result<TensorData, Error> {
    let file = shards.file_of(&weight.name).unwrap_or_default();
    let scale = scale_of(shards, &weight.name, &weight.shape, file)?;
    let factors: Vec<f32> = scale.bytes.as_slice().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    let cols = weight.shape[1];
    let mut out = vec![0; 2 * weight.elements()];
    if cols > 0 {
        let rows = weight.bytes.as_slice().chunks_exact(cols).zip(out.chunks_exact_mut(2 * cols));
        for (r, (row, out)) in rows.enumerate() {
            let factors = &factors[r / BLOCK * cols.div_ceil(BLOCK)..];
            for ((codes, out), factor) in row.chunks(BLOCK).zip(out.chunks_mut(2 * BLOCK)).zip(factors) {
                for (&code, out) in codes.iter().zip(out.as_chunks_mut().0) {
                    *out = bf16::from_f32(E4M3[code as usize] * factor).to_le_bytes();
                }
            }
        }
    }
    Ok(TensorData { dtype: DType::Bf16, bytes: Bytes::new(out), ..weight.clone() })
}
