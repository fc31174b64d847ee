//! `exp` over whole rows.
//!
//! A panel takes hundreds of millions of exponentials of non-positive numbers. This one has no branches and no table, so a
//! loop over it becomes vector code; it is within two units in the last place of the true value.

/// `2^52 * 1.5`: adding it rounds an f64 to an integer, which then sits in the low bits.
const ROUND: f64 = 6_755_399_441_055_744.0;
/// Leading bits of `ln 2`, so that multiples up to 2^11 are exact, and the rest of it.
const LN2_HIGH: f64 = 6.931_471_803_691_238e-1;
const LN2_LOW: f64 = 1.908_214_929_270_587_7e-10;
/// Below this the result would not be a normal number; it is taken as the result at this point, about 1e-304.
const LOWEST: f64 = -700.0;

/// `e^x` for `x <= 0`.
#[inline]
pub(crate) fn exp(x: f64) -> f64 {
    // e^x = 2^k e^r with |r| <= ln(2) / 2, and e^r by its series.
    let x = x.max(LOWEST);
    let shifted = x * std::f64::consts::LOG2_E + ROUND;
    let k = shifted - ROUND;
    let r = x - k * LN2_HIGH - k * LN2_LOW;
    let mut series = 1.0 / 6_227_020_800.0;
    for factorial in
        [479_001_600.0, 39_916_800.0, 3_628_800.0, 362_880.0, 40_320.0, 5_040.0, 720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0]
    {
        series = series * r + 1.0 / factorial;
    }
    // The low bits of `shifted` are k in two's complement; adding them to the exponent multiplies by 2^k.
    f64::from_bits(series.to_bits().wrapping_add(shifted.to_bits() << 52))
}

/// Sum of `e^(x - max)` over a row, in eight interleaved sums that are joined in a fixed order.
pub(crate) fn sum_of_exponentials(row: &[f32], max: f64) -> f64 {
    const LANES: usize = 8;
    let mut sums = [0.0; LANES];
    let (chunks, rest) = row.as_chunks::<LANES>();
    for chunk in chunks {
        for (sum, &x) in sums.iter_mut().zip(chunk) {
            *sum += exp(f64::from(x) - max);
        }
    }
    let rest: f64 = rest.iter().map(|&x| exp(f64::from(x) - max)).sum();
    sums.iter().sum::<f64>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponentials_agree_with_the_standard_library() {
        for step in 0..200_000 {
            let x = -f64::from(step) * 0.003_456_789;
            let (ours, theirs) = (exp(x), x.exp());
            assert!((ours - theirs).abs() <= 2.0 * f64::EPSILON * theirs, "{x}: {ours} {theirs}");
        }
        assert!((exp(-0.0) - 1.0).abs() < f64::EPSILON && exp(f64::MIN) < 1e-303);
    }

    #[test]
    fn sums_take_every_element() {
        let row: Vec<f32> = (0..21_u8).map(|v| -f32::from(v)).collect();
        let expected: f64 = row.iter().map(|&x| f64::from(x).exp()).sum();
        assert!((sum_of_exponentials(&row, 0.0) - expected).abs() < 1e-15);
    }
}
