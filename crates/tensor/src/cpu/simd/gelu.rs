//! The exact (error-function) GELU.

/// `x Phi(x)` with `Phi` the normal distribution function, in f64 and rounded once.
pub(crate) fn gelu(x: f32) -> f32 {
    let x = f64::from(x);
    (x * normal(x)) as f32
}

/// `(1 + erf(x / sqrt 2)) / 2` to about 1e-15 of itself.
///
/// Near zero the series `1/2 + phi(x) (x + x^3/3 + x^5/15 + ...)`, whose terms have one sign; in the lower tail the
/// continued fraction `Phi(-z) = phi(z) / (z + 1/(z + 2/(z + 3/(z + ...))))`, which keeps relative precision there.
fn normal(x: f64) -> f64 {
    if x.is_nan() {
        return x;
    }
    let z = x.abs();
    let density = (-0.5 * z * z).exp() / (2.0 * std::f64::consts::PI).sqrt();
    let upper = if z < 3.0 {
        let mut term = z;
        let mut sum = z;
        let mut k = 1.0;
        while term > 1e-17 * sum {
            k += 2.0;
            term *= z * z / k;
            sum += term;
        }
        0.5 - density * sum
    } else if z < 40.0 {
        let tail = (1..=40).rev().fold(z, |fraction, k| z + f64::from(k) / fraction);
        density / tail
    } else {
        0.0
    };
    if x < 0.0 { upper } else { 1.0 - upper }
}

#[cfg(test)]
mod tests {
    use super::{gelu, normal};

    #[test]
    fn normal_has_known_values() {
        // Values of the distribution function to 12 digits.
        for (x, expected) in [
            (0.0, 0.5),
            (1.0, 0.841_344_746_069),
            (-1.0, 0.158_655_253_931),
            (2.0, 0.977_249_868_052),
            (-2.999_999, 1.349_902_462e-3),
            (-3.000_001, 1.349_893_599e-3),
            (-5.0, 2.866_515_719e-7),
            (-8.0, 6.220_960_574e-16),
        ] {
            let error = (normal(x) / expected - 1.0).abs();
            assert!(error < 2e-9, "{x}: {} against {expected}", normal(x));
        }
    }

    #[test]
    fn series_and_fraction_meet() {
        let (below, above) = (normal(-3.0 + 1e-12), normal(-3.0 - 1e-12));
        assert!((below / above - 1.0).abs() < 1e-10, "{below:e} {above:e}");
    }

    #[test]
    #[allow(clippy::float_cmp, reason = "the limits are exact")]
    fn gelu_passes_its_limits() {
        assert_eq!(gelu(0.0), 0.0);
        assert_eq!(gelu(100.0), 100.0);
        assert_eq!(gelu(-100.0), 0.0);
        assert!(gelu(f32::NAN).is_nan());
    }
}
