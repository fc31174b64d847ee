//! The pack-quantized layout and its arithmetic.
//!
//! A code `q` of `bits` bits, `-2^(bits-1) ..= 2^(bits-1) - 1`, is stored as the unsigned `u = q + 2^(bits-1)`. A row is a
//! dense bit stream in little-endian 32-bit words: code `c` occupies the bits `c * bits ..` (for 4 bits: word `c / 8`, lowest
//! nibble first). Rows start at word borders; unused bits of a row's last word are zero. Rows are independent.
//!
//! Each row has one scale for every [`GROUP`] columns. `q = round_half_even(clamp(w / s, min, max))` and `w' = s * q`, where
//! the product is formed in f32 and rounded once to the scale's type.

use half::bf16;

use crate::error::Error;

/// Columns that share a scale.
pub const GROUP: usize = 128;
/// Bits of a code.
pub const BITS: u32 = 4;
/// The scale of a group of zeros: the epsilon of BF16, `2^-7`.
pub const ZERO_GROUP_SCALE: bf16 = bf16::EPSILON;

/// In which precision the quotient `w / s` is rounded to a code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Quotient {
    /// The f32 quotient: the exact choice.
    #[default]
    F32,
    /// The f32 quotient rounded to BF16 first: what compressed-tensors does with BF16 weights. About 0.6 % of the codes
    /// differ.
    Bf16,
}

/// 32-bit words of a packed row of `cols` codes.
pub const fn words(cols: usize, bits: u32) -> usize {
    (cols * bits as usize).div_ceil(32)
}

/// Packs rows of `cols` codes each; the result holds the little-endian words `[rows, words(cols, bits)]`.
///
/// # Errors
/// [`Error::Invalid`] when `bits` is not in 2..=8, `codes` is not whole rows, or a code does not fit `bits` bits.
pub fn pack(codes: &[i8], cols: usize, bits: u32) -> Result<Vec<u8>, Error> {
    check_bits(bits)?;
    check_rows("codes", codes.len(), cols)?;
    let half = 1i16 << (bits - 1);
    if let Some(code) = codes.iter().find(|&&q| !(-half..half).contains(&i16::from(q))) {
        return Err(Error::invalid(
            "codes",
            format!("{}..={}", -half, half - 1),
            code,
            "use codes of the stated width",
        ));
    }
    if bits == BITS && cols.is_multiple_of(8) {
        return Ok(codes.as_chunks::<2>().0.iter().map(|&pair| pack_pair(pair)).collect());
    }
    let row_bytes = 4 * words(cols, bits);
    let mut packed = Vec::with_capacity(codes.len() / cols.max(1) * row_bytes);
    for row in codes.chunks_exact(cols.max(1)) {
        let end = packed.len() + row_bytes;
        let (mut pending, mut pending_bits) = (0u32, 0);
        for &code in row {
            // The sum is in 0..2^bits by the check above.
            pending |= u32::from((i16::from(code) + half).unsigned_abs()) << pending_bits;
            pending_bits += bits;
            while pending_bits >= 8 {
                packed.push(pending.to_le_bytes()[0]);
                pending >>= 8;
                pending_bits -= 8;
            }
        }
        if pending_bits > 0 {
            packed.push(pending.to_le_bytes()[0]);
        }
        packed.resize(end, 0);
    }
    Ok(packed)
}

/// Unpacks rows of `cols` codes from the bytes that [`pack`] makes.
///
/// # Errors
/// [`Error::Invalid`] when `bits` is not in 2..=8 or `packed` is not whole rows.
pub fn unpack(packed: &[u8], cols: usize, bits: u32) -> Result<Vec<i8>, Error> {
    check_bits(bits)?;
    let row_bytes = 4 * words(cols, bits);
    check_rows("packed bytes", packed.len(), row_bytes)?;
    if bits == BITS && cols.is_multiple_of(8) {
        return Ok(packed.iter().flat_map(|&byte| unpack_pair(byte)).collect());
    }
    let (half, mask) = (1i16 << (bits - 1), (1u32 << bits) - 1);
    let mut codes = Vec::with_capacity(packed.len() / row_bytes.max(1) * cols);
    for row in packed.chunks_exact(row_bytes.max(1)) {
        for c in 0..cols {
            let bit = c * bits as usize;
            let next = row.get(bit / 8 + 1).copied().unwrap_or(0);
            let window = u32::from(row[bit / 8]) | u32::from(next) << 8;
            let unsigned = (window >> (bit % 8)) & mask;
            #[allow(clippy::cast_possible_truncation, reason = "at most 8 bits, minus half their range: fits i8")]
            codes.push((unsigned as i16 - half) as i8);
        }
    }
    Ok(codes)
}

/// The byte of two 4-bit codes, the first in the low nibble.
#[inline]
pub const fn pack_pair([low, high]: [i8; 2]) -> u8 {
    ((low + 8) as u8 & 15) | ((high + 8) as u8) << 4
}

/// The two 4-bit codes of a byte, the low nibble first.
#[inline]
pub const fn unpack_pair(byte: u8) -> [i8; 2] {
    [(byte & 15) as i8 - 8, (byte >> 4) as i8 - 8]
}

/// Codes of weights that share a scale: `round_half_even(clamp(w / scale, min, max))`. A NaN gives some code in range.
///
/// # Panics
/// When `codes` is shorter than `weights`, or in builds with overflow checks when `bits` is not in 2..=8.
#[inline]
pub fn quantize(weights: &[f32], scale: f32, quotient: Quotient, bits: u32, codes: &mut [i8]) {
    let max = ((1i32 << (bits - 1)) - 1) as f32;
    let min = -max - 1.0;
    let codes = &mut codes[..weights.len()];
    match quotient {
        Quotient::F32 => {
            for (code, &w) in codes.iter_mut().zip(weights) {
                *code = round(clamp(w / scale, min, max));
            }
        }
        Quotient::Bf16 => {
            for (code, &w) in codes.iter_mut().zip(weights) {
                *code = round(clamp(bf16::from_f32(w / scale).to_f32(), min, max));
            }
        }
    }
}

/// Unlike [`f32::clamp`], a NaN becomes `min`, so that [`round`] stays in its range.
#[inline]
fn clamp(x: f32, min: f32, max: f32) -> f32 {
    x.max(min).min(max)
}

/// Rounds half to even by adding `1.5 * 2^23`, where the unit of f32 is 1. Exact for `|x| < 2^22`; here `|x| <= 128`.
#[inline]
#[allow(clippy::cast_possible_truncation, reason = "the clamped value fits i8")]
fn round(x: f32) -> i8 {
    const SHIFT: f32 = 12_582_912.0;
    (x + SHIFT).to_bits().wrapping_sub(SHIFT.to_bits()) as i8
}

/// The weight that a code stands for.
#[inline]
pub fn dequantize(code: i8, scale: bf16) -> bf16 {
    bf16::from_f32(f32::from(code) * scale.to_f32())
}

/// The min-max scale of a group: `max |w| / 7.5` (for 4 bits; half the number of steps), rounded to BF16; the epsilon of
/// BF16 when that is zero.
#[inline]
pub fn minmax_scale(group: &[f32], bits: u32) -> bf16 {
    let largest = group.iter().fold(0.0f32, |a, w| a.max(w.abs()));
    let scale = bf16::from_f32(largest / (((1u32 << bits) - 1) as f32 / 2.0));
    if scale == bf16::ZERO { ZERO_GROUP_SCALE } else { scale }
}

/// A matrix in the pack-quantized layout: the bytes of its three tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackedMatrix {
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// `weight_packed`: I32 `[rows, cols / 8]`.
    pub packed: Vec<u8>,
    /// `weight_scale`: BF16 `[rows, cols / GROUP]`.
    pub scale: Vec<u8>,
}

impl PackedMatrix {
    /// Packs 4-bit codes `[rows, cols]` with scales `[rows, cols / GROUP]`.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the columns are not whole groups, the lengths do not agree or a code is out of range.
    pub fn from_codes(codes: &[i8], scales: &[bf16], cols: usize) -> Result<Self, Error> {
        check_groups(cols)?;
        let packed = pack(codes, cols, BITS)?;
        let rows = codes.len() / cols;
        check_scales(scales.len(), rows, cols)?;
        Ok(Self { rows, cols, packed, scale: scales.iter().flat_map(|s| s.to_le_bytes()).collect() })
    }

    /// Round-to-nearest with min-max scales: the simplest valid quantization of `weights` `[rows, cols]`.
    ///
    /// # Errors
    /// As [`PackedMatrix::from_codes`].
    pub fn round_to_nearest(weights: &[f32], cols: usize, quotient: Quotient) -> Result<Self, Error> {
        check_groups(cols)?;
        check_rows("weights", weights.len(), cols)?;
        let mut codes = vec![0; weights.len()];
        let scales: Vec<bf16> = weights
            .chunks_exact(GROUP)
            .zip(codes.chunks_exact_mut(GROUP))
            .map(|(group, codes)| {
                let scale = minmax_scale(group, BITS);
                quantize(group, scale.to_f32(), quotient, BITS, codes);
                scale
            })
            .collect();
        Self::from_codes(&codes, &scales, cols)
    }

    /// `weight_shape`: I64 `[rows, cols]`.
    pub fn shape(&self) -> [u8; 16] {
        shape_bytes(self.rows, self.cols)
    }
}

/// The content of `weight_shape`: two little-endian I64, rows and columns.
pub fn shape_bytes(rows: usize, cols: usize) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&(rows as u64).to_le_bytes());
    bytes[8..].copy_from_slice(&(cols as u64).to_le_bytes());
    bytes
}

/// The BF16 weights `[rows, cols]` of a packed 4-bit matrix: `packed` and `scale` are the bytes of `weight_packed` and
/// `weight_scale`.
///
/// # Errors
/// [`Error::Invalid`] when the columns are not whole groups or the lengths do not agree.
pub fn dequantize_matrix(packed: &[u8], scale: &[u8], cols: usize) -> Result<Vec<bf16>, Error> {
    check_groups(cols)?;
    check_rows("packed bytes", packed.len(), cols / 2)?;
    let (scales, _) = scale.as_chunks::<2>();
    check_scales(scales.len(), packed.len() / (cols / 2), cols)?;
    let groups = packed.chunks_exact(GROUP / 2).zip(scales);
    Ok(groups
        .flat_map(|(group, &scale)| {
            let scale = bf16::from_le_bytes(scale);
            group.iter().flat_map(move |&byte| unpack_pair(byte).map(|code| dequantize(code, scale)))
        })
        .collect())
}

fn check_bits(bits: u32) -> Result<(), Error> {
    if (2..=8).contains(&bits) {
        return Ok(());
    }
    Err(Error::invalid("width of a code", "2 to 8 bits", bits, "use a supported width"))
}

fn check_rows(what: &str, length: usize, row: usize) -> Result<(), Error> {
    if length.checked_rem(row).map_or(length == 0, |rest| rest == 0) {
        return Ok(());
    }
    Err(Error::invalid(what, format!("whole rows of {row}"), length, "shape and data must agree"))
}

fn check_groups(cols: usize) -> Result<(), Error> {
    if cols > 0 && cols.is_multiple_of(GROUP) {
        return Ok(());
    }
    Err(Error::invalid("columns", format!("a multiple of {GROUP}"), cols, "group quantization needs whole groups"))
}

fn check_scales(found: usize, rows: usize, cols: usize) -> Result<(), Error> {
    let expected = rows * (cols / GROUP);
    if found == expected {
        return Ok(());
    }
    Err(Error::invalid("scales", expected.to_string(), found, "one scale for each row and group"))
}
