//! Random numbers that depend on a seed, a tensor's name and an element's index, and on nothing else.
//!
//! Element `i` of a tensor is made of the 64-bit word `mix(key + (i + 1) * ODD)`, the counter form of SplitMix64 (Steele, Lea,
//! Flood 2014); the key is the SHA-256 of seed and name. Normal numbers are the sum of four 16-bit parts of the word
//! (Irwin-Hall, range 3.46 standard deviations): integer arithmetic and one multiplication, so the bytes are the same on every
//! machine.

use sha2::{Digest as _, Sha256};

const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
/// Mean of the sum of four uniform 16-bit integers.
const SUM_MEAN: f32 = 131_070.0;
/// Its standard deviation, `sqrt(4 * (2^32 - 1) / 12)`.
const SUM_DEVIATION: f32 = 37_837.23;

/// The numbers of one tensor.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stream {
    key: u64,
}

impl Stream {
    pub(super) fn new(seed: u64, name: &str) -> Self {
        let digest = Sha256::new().chain_update(seed.to_le_bytes()).chain_update(name).finalize();
        let key = digest.iter().take(8).fold(0, |key, &byte| key << 8 | u64::from(byte));
        Self { key }
    }

    #[inline]
    fn word(self, index: u64) -> u64 {
        let z = self.key.wrapping_add(index.wrapping_add(1).wrapping_mul(ODD));
        let z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Elements `first ..` of mean `mean` and standard deviation `deviation`.
    pub(super) fn normal(self, first: u64, mean: f32, deviation: f32, out: &mut [f32]) {
        let factor = deviation / SUM_DEVIATION;
        for (index, x) in (first..).zip(out) {
            let word = self.word(index);
            // Pairs of 16-bit parts, added side by side.
            let pairs = (word & 0x0000_ffff_0000_ffff) + (word >> 16 & 0x0000_ffff_0000_ffff);
            let sum = (pairs & 0xffff_ffff) + (pairs >> 32);
            *x = mean + (sum as f32 - SUM_MEAN) * factor;
        }
    }

    /// Elements `first ..` uniform in `low .. high`.
    pub(super) fn uniform(self, first: u64, low: f32, high: f32, out: &mut [f32]) {
        let factor = (high - low) / (1u32 << 24) as f32;
        for (index, x) in (first..).zip(out) {
            *x = low + (self.word(index) >> 40) as f32 * factor;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments() {
        let mut x = vec![0.0; 1 << 20];
        Stream::new(1, "a").normal(0, 0.5, 2.0, &mut x);
        let count = x.len() as f64;
        let mean = x.iter().map(|&v| f64::from(v)).sum::<f64>() / count;
        let moment = |power| x.iter().map(|&v| ((f64::from(v) - mean) / 2.0).powi(power)).sum::<f64>() / count;
        assert!((mean - 0.5).abs() < 0.01, "{mean}");
        assert!((moment(2) - 1.0).abs() < 0.01 && moment(3).abs() < 0.01, "{} {}", moment(2), moment(3));
        // Four uniform terms have kurtosis 3 - 6 / (5 * 4).
        assert!((moment(4) - 2.7).abs() < 0.03, "{}", moment(4));

        Stream::new(1, "a").uniform(0, -3.0, 1.0, &mut x);
        let mean = x.iter().map(|&v| f64::from(v)).sum::<f64>() / count;
        assert!((mean + 1.0).abs() < 0.01 && x.iter().all(|v| (-3.0..1.0).contains(v)), "{mean}");
    }

    #[test]
    fn pieces_and_names() {
        let (mut whole, mut part) = ([0.0; 100], [0.0; 40]);
        Stream::new(7, "w").normal(0, 0.0, 1.0, &mut whole);
        Stream::new(7, "w").normal(60, 0.0, 1.0, &mut part);
        assert_eq!(whole[60..], part);
        for other in [Stream::new(8, "w"), Stream::new(7, "v")] {
            let mut different = [0.0; 100];
            other.normal(0, 0.0, 1.0, &mut different);
            assert!(whole.iter().zip(&different).filter(|(a, b)| a.to_bits() == b.to_bits()).count() < 5);
        }
    }
}
