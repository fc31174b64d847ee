//! Random draws that are functions, not streams.
//!
//! A draw is keyed by the request's seed, the position of the token that it decides about, and its purpose. Nothing else
//! enters: not the batch, not the order of steps, not how many drafts were tried before. The function is Philox 4x32 with
//! ten rounds (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011).

/// What a draw decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// The token itself.
    Token,
    /// Whether a draft stands.
    Accept,
    /// The token in place of a rejected draft.
    Recover,
    /// A drafter's proposal.
    Draft,
    /// Whether a draft stands by decree.
    Synthetic,
}

/// A number in `[0, 1)` with 53 random bits.
pub fn uniform(seed: u64, position: usize, purpose: Purpose) -> f64 {
    let purpose = match purpose {
        Purpose::Token => 0,
        Purpose::Accept => 1,
        Purpose::Recover => 2,
        Purpose::Draft => 3,
        Purpose::Synthetic => 5,
    };
    let position = position as u64;
    let block = philox([position as u32, (position >> 32) as u32, purpose, 0], [seed as u32, (seed >> 32) as u32]);
    let bits = (u64::from(block[0]) << 32 | u64::from(block[1])) >> 11;
    bits as f64 / (1u64 << 53) as f64
}

/// A key for the `ordinal`-th request of an engine with this seed.
pub fn key(seed: u64, ordinal: u64) -> u64 {
    let block = philox([ordinal as u32, (ordinal >> 32) as u32, 4, 0], [seed as u32, (seed >> 32) as u32]);
    u64::from(block[0]) << 32 | u64::from(block[1])
}

/// One block of Philox 4x32-10.
fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
    const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
    for round in 0..10 {
        if round > 0 {
            key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        }
        let even = u64::from(MULTIPLIERS[0]) * u64::from(counter[0]);
        let odd = u64::from(MULTIPLIERS[1]) * u64::from(counter[2]);
        counter = [
            (odd >> 32) as u32 ^ counter[1] ^ key[0],
            odd as u32,
            (even >> 32) as u32 ^ counter[3] ^ key[1],
            even as u32,
        ];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_known_answers() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox([u32::MAX; 4], [u32::MAX; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        let key = [0xa409_3822, 0x299f_31d0];
        assert_eq!(philox(pi, key), [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
    }

    #[test]
    fn requests_without_a_seed_get_different_ones_that_come_back() {
        let keys: std::collections::BTreeSet<u64> =
            [0, 1, 1 << 32].iter().flat_map(|&seed| (0..100).map(move |ordinal| key(seed, ordinal))).collect();
        assert_eq!(keys.len(), 300);
        assert_eq!(key(7, 3), key(7, 3));
    }

    #[test]
    fn draws_are_uniform_and_depend_on_every_key() {
        let n = 20_000;
        let mut bins = [0u32; 10];
        for position in 0..n {
            let u = uniform(7, position, Purpose::Token);
            assert!((0.0..1.0).contains(&u));
            bins[(u * 10.0) as usize] += 1;
        }
        let expected = f64::from(n as u32) / 10.0;
        let chi: f64 = bins.iter().map(|&b| (f64::from(b) - expected).powi(2) / expected).sum();
        assert!(chi < 33.7, "chi-square {chi} on 9 degrees of freedom (p = 1e-4)");
        let base = uniform(1, 2, Purpose::Token).to_bits();
        for other in [uniform(2, 2, Purpose::Token), uniform(1, 3, Purpose::Token), uniform(1, 2, Purpose::Accept)] {
            assert_ne!(base, other.to_bits());
        }
        assert_eq!(base, uniform(1, 2, Purpose::Token).to_bits());
    }
}
