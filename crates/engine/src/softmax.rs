//! Weights of logits: `exp` of their distance from the best one, many at a time.
//!
//! It is plain arithmetic, lane by lane, and does not depend on the platform's mathematics library: the same logits have the
//! same weights to the bit everywhere, so that an answer replays on another machine. It agrees with `exp` to 4e-15 of the
//! value, and is no slower.

/// Lanes of a block.
const LANES: usize = 8;

/// How logits become weights.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Weighing {
    /// The best logit: its weight is 1.
    best: f64,
    /// One over the temperature.
    steepness: f64,
    /// Logits below it have no weight; at least `f64::MIN`, so that minus infinity has none.
    floor: f64,
}

impl Weighing {
    /// The softmax of a row at a temperature, not normalised, for logits of at least `min_p` of the best one's weight.
    pub(crate) fn new(best: f32, temperature: f32, min_p: f32) -> Self {
        let (best, temperature) = (f64::from(best), f64::from(temperature));
        // A share of the best weight is a distance from the best logit.
        let floor = if min_p > 0.0 { best + temperature * f64::from(min_p).ln() } else { f64::MIN };
        Self { best, steepness: 1.0 / temperature, floor }
    }

    /// The softmax of a row as it is, not normalised.
    pub(crate) fn plain(best: f32) -> Self {
        Self::new(best, 1.0, 0.0)
    }

    /// Whether a logit has a weight.
    pub(crate) fn keeps(&self, logit: f32) -> bool {
        f64::from(logit) >= self.floor
    }

    /// The weight of a logit, from 0 to 1.
    pub(crate) fn weight(&self, logit: f32) -> f64 {
        self.weights([logit])[0]
    }

    /// The sum of all weights, in one order.
    pub(crate) fn mass(&self, logits: &[f32]) -> f64 {
        let mut sums = [0.0; LANES];
        let (blocks, rest) = logits.as_chunks::<LANES>();
        for block in blocks {
            let weights = self.weights(*block);
            for lane in 0..LANES {
                sums[lane] += weights[lane];
            }
        }
        sums.iter().sum::<f64>() + rest.iter().map(|&logit| self.weight(logit)).sum::<f64>()
    }

    /// Calls `each` with token and weight of every logit that has one, ascending.
    pub(crate) fn each(&self, logits: &[f32], mut each: impl FnMut(u32, f64)) {
        let (blocks, rest) = logits.as_chunks::<LANES>();
        let mut token = 0;
        for block in blocks {
            if block.iter().any(|&logit| self.keeps(logit)) {
                let weights = self.weights(*block);
                for lane in (0..LANES).filter(|&lane| self.keeps(block[lane])) {
                    each(token + lane as u32, weights[lane]);
                }
            }
            token += LANES as u32;
        }
        for (token, &logit) in (token..).zip(rest).filter(|(_, logit)| self.keeps(**logit)) {
            each(token, self.weight(logit));
        }
    }

    #[inline(always)]
    fn weights<const N: usize>(&self, logits: [f32; N]) -> [f64; N] {
        let logits = logits.map(f64::from);
        let weights = exp(logits.map(|logit| (logit - self.best) * self.steepness));
        std::array::from_fn(|lane| if logits[lane] >= self.floor { weights[lane] } else { 0.0 })
    }
}

/// The exponentials of numbers up to 0; from -708 down that of -708, which is next to nothing. Each operation is a loop over
/// the lanes, the form that becomes vector instructions.
#[inline(always)]
fn exp<const N: usize>(x: [f64; N]) -> [f64; N] {
    /// 1.5 * 2^52: adding it rounds to an integer, which then stands in the low bits.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    /// ln 2 in two parts; products of the first with small integers are exact.
    const LN_2_HIGH: f64 = 0.693_147_180_369_123_8;
    const LN_2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    /// Taylor's series from the twelfth term down: with an argument of at most ln 2 / 2 the first term left out is 2e-16.
    const TERMS: [f64; 12] = [
        1.0 / 39_916_800.0,
        1.0 / 3_628_800.0,
        1.0 / 362_880.0,
        1.0 / 40_320.0,
        1.0 / 5_040.0,
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
        1.0,
        1.0,
    ];
    let x = x.map(|x| if x > -708.0 { x } else { -708.0 });
    let shifted = x.map(|x| x * std::f64::consts::LOG2_E + ROUND);
    let r: [f64; N] = std::array::from_fn(|lane| {
        let n = shifted[lane] - ROUND;
        (x[lane] - n * LN_2_HIGH) - n * LN_2_LOW
    });
    let mut p = [1.0 / 479_001_600.0; N];
    for term in TERMS {
        for lane in 0..N {
            p[lane] = p[lane] * r[lane] + term;
        }
    }
    // 2^n by its exponent bits; n lies in [-1022, 0].
    std::array::from_fn(|lane| p[lane] * f64::from_bits((shifted[lane].to_bits().wrapping_add(1023)) << 52))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_agrees_with_the_library_and_ends_at_nothing() {
        let mut worst = 0.0f64;
        for i in 0..200_000 {
            let x = -708.0 * f64::from(i) / 200_000.0;
            for x in [x, x / 100.0, x / 100_000.0] {
                worst = worst.max((exp([x])[0] / x.exp() - 1.0).abs());
            }
        }
        assert!(worst < 4e-15, "{worst}");
        let [one, least, less, none] = exp([0.0, -709.0, -1e300, f64::NEG_INFINITY]);
        assert_eq!(one.to_bits(), 1.0f64.to_bits());
        assert!(least > 0.0 && less < 1e-300 && none < 1e-300);
    }

    #[test]
    fn masses_and_single_weights_agree() {
        for n in [1, 7, 8, 9, 64, 133] {
            let mut row: Vec<f32> = (0..n).map(|i| ((i * 37) % 23) as f32 / 3.0 - 7.5).collect();
            row[n / 2] = f32::NEG_INFINITY;
            let weighing = Weighing { best: 0.0, steepness: 1.4, floor: -6.0 };
            let mut seen = Vec::new();
            weighing.each(&row, |token, weight| seen.push((token, weight)));
            let expected: Vec<(u32, f64)> =
                (0u32..).zip(&row).filter(|(_, l)| **l >= -6.0).map(|(t, &l)| (t, weighing.weight(l))).collect();
            assert_eq!(seen, expected);
            let sum: f64 = expected.iter().map(|e| e.1).sum();
            assert!((weighing.mass(&row) - sum).abs() <= 1e-14 * sum.max(1.0));
        }
        assert!(Weighing::plain(0.0).weight(f32::NEG_INFINITY).abs() < f64::MIN_POSITIVE);
    }
}
