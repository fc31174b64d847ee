//! The two generators that published load generators draw from, bit for bit.
//!
//! A benchmark is comparable when everybody sends the same prompts at the same times. The established tool draws lengths and
//! prompts from `numpy.random.default_rng` and arrival times from `numpy.random`'s legacy state, so both are here:
//! PCG64 XSL-RR (O'Neill 2014) behind NumPy's seed sequence, and MT19937 (Matsumoto and Nishimura 1998). Bounded integers
//! follow Lemire (2019) for the first and masked rejection for the second; gamma variates follow Marsaglia and Tsang
//! (2000) for shapes above 1 and Ahrens and Dieter (1974) below.

/// `numpy.random.default_rng(seed)`.
#[derive(Clone, Debug)]
pub struct Pcg64 {
    state: u128,
    increment: u128,
    /// Upper half of a 64-bit draw whose lower half was given out.
    half: Option<u32>,
}

const PCG_MULTIPLIER: u128 = 0x2360_ED05_1FC6_5DA4_4385_DF64_9FCC_F645;

impl Pcg64 {
    /// The generator that NumPy makes of this seed.
    #[must_use]
    pub fn new(seed: u32) -> Self {
        let words = seed_words(seed);
        let join = |at: usize| {
            let word = |at: usize| u128::from(words[at]) | (u128::from(words[at + 1]) << 32);
            (word(at) << 64) | word(at + 2)
        };
        let mut generator = Self { state: 0, increment: (join(4) << 1) | 1, half: None };
        generator.step();
        generator.state = generator.state.wrapping_add(join(0));
        generator.step();
        generator
    }

    fn step(&mut self) {
        self.state = self.state.wrapping_mul(PCG_MULTIPLIER).wrapping_add(self.increment);
    }

    /// 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.step();
        ((self.state >> 64) as u64 ^ self.state as u64).rotate_right((self.state >> 122) as u32)
    }

    /// 32 random bits: two of them are cut from one draw of 64, the lower ones first.
    fn next_u32(&mut self) -> u32 {
        self.half.take().unwrap_or_else(|| {
            let bits = self.next_u64();
            self.half = Some((bits >> 32) as u32);
            bits as u32
        })
    }

    /// `integers(low, high + 1, size=count)`: uniform in `low..=high`. Nothing is drawn where there is no choice.
    pub fn integers(&mut self, low: u32, high: u32, count: usize) -> Vec<u32> {
        debug_assert!(low <= high);
        let span = high - low;
        let mut draw = || match span {
            0 => low,
            u32::MAX => self.next_u32(),
            _ => {
                let ways = u64::from(span) + 1;
                let threshold = (u64::from(u32::MAX) + 1) % ways;
                loop {
                    let product = u64::from(self.next_u32()) * ways;
                    if product & u64::from(u32::MAX) >= threshold {
                        return low + (product >> 32) as u32;
                    }
                }
            }
        };
        (0..count).map(|_| draw()).collect()
    }
}

/// The eight words that NumPy's `SeedSequence` makes of one word of entropy.
fn seed_words(seed: u32) -> [u32; 8] {
    const FIRST: u32 = 0x43B0_D7E5;
    const FIRST_FACTOR: u32 = 0x931E_8875;
    const SECOND: u32 = 0x8B51_F9DD;
    const SECOND_FACTOR: u32 = 0x58F3_8DED;
    let mut constant = FIRST;
    let mut hash = |value: u32, factor: u32| {
        let mixed = value ^ constant;
        constant = constant.wrapping_mul(factor);
        let mixed = mixed.wrapping_mul(constant);
        mixed ^ (mixed >> 16)
    };
    let mut pool = [seed, 0, 0, 0].map(|word| hash(word, FIRST_FACTOR));
    for from in 0..pool.len() {
        for to in (0..pool.len()).filter(|&to| to != from) {
            let added = hash(pool[from], FIRST_FACTOR);
            let mixed = pool[to].wrapping_mul(0xCA01_F9DD).wrapping_sub(added.wrapping_mul(0x4973_F715));
            pool[to] = mixed ^ (mixed >> 16);
        }
    }
    let mut constant = SECOND;
    std::array::from_fn(|index| {
        let mixed = pool[index % pool.len()] ^ constant;
        constant = constant.wrapping_mul(SECOND_FACTOR);
        let mixed = mixed.wrapping_mul(constant);
        mixed ^ (mixed >> 16)
    })
}

const WORDS: usize = 624;

/// MT19937, as NumPy's legacy functions and Python's `random` use it.
#[derive(Clone)]
pub struct Mersenne {
    words: [u32; WORDS],
    next: usize,
    /// The second of a pair of normal variates.
    normal: Option<f64>,
}

impl std::fmt::Debug for Mersenne {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mersenne").field("next", &self.next).finish_non_exhaustive()
    }
}

impl Mersenne {
    /// `numpy.random.seed(seed)`.
    #[must_use]
    pub fn numpy(seed: u32) -> Self {
        let mut words = [0; WORDS];
        words[0] = seed;
        for index in 1..WORDS {
            let last = words[index - 1];
            words[index] = (last ^ (last >> 30)).wrapping_mul(1_812_433_253).wrapping_add(word(index));
        }
        Self { words, next: WORDS, normal: None }
    }

    /// `random.seed(seed)` of Python.
    #[must_use]
    pub fn python(seed: u32) -> Self {
        let mut generator = Self::numpy(19_650_218);
        let words = &mut generator.words;
        let mut at = 1;
        let mut stir = |words: &mut [u32; WORDS], factor: u32, added: &dyn Fn(usize) -> u32| {
            let last = words[at - 1];
            let mixed = (last ^ (last >> 30)).wrapping_mul(factor);
            words[at] = (words[at] ^ mixed).wrapping_add(added(at));
            at += 1;
            if at == WORDS {
                words[0] = words[WORDS - 1];
                at = 1;
            }
        };
        for _ in 0..WORDS {
            stir(words, 1_664_525, &|_| seed);
        }
        for _ in 1..WORDS {
            stir(words, 1_566_083_941, &|at| word(at).wrapping_neg());
        }
        words[0] = 1 << 31;
        generator
    }

    /// 32 random bits.
    pub fn next_u32(&mut self) -> u32 {
        if self.next == WORDS {
            self.refill();
        }
        let mut bits = self.words[self.next];
        self.next += 1;
        bits ^= bits >> 11;
        bits ^= (bits << 7) & 0x9D2C_5680;
        bits ^= (bits << 15) & 0xEFC6_0000;
        bits ^ (bits >> 18)
    }

    fn refill(&mut self) {
        for index in 0..WORDS {
            let joined = (self.words[index] & 0x8000_0000) | (self.words[(index + 1) % WORDS] & 0x7FFF_FFFF);
            let twist = if joined & 1 == 1 { 0x9908_B0DF } else { 0 };
            self.words[index] = self.words[(index + 397) % WORDS] ^ (joined >> 1) ^ twist;
        }
        self.next = 0;
    }

    /// Uniform in [0, 1) with 53 bits.
    pub fn uniform(&mut self) -> f64 {
        let (high, low) = (self.next_u32() >> 5, self.next_u32() >> 6);
        (f64::from(high) * 67_108_864.0 + f64::from(low)) / 9_007_199_254_740_992.0
    }

    /// `numpy.random.randint(0, bound, size=count)`.
    pub fn below(&mut self, bound: u32, count: usize) -> Vec<u32> {
        let span = bound.saturating_sub(1);
        let mask = u32::MAX >> span.leading_zeros().min(31);
        let mut draw = || {
            if span == 0 {
                return 0;
            }
            loop {
                let bits = self.next_u32() & mask;
                if bits <= span {
                    return bits;
                }
            }
        };
        (0..count).map(|_| draw()).collect()
    }

    /// `random.shuffle` of Python.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            let ways = word(last + 1);
            let chosen = loop {
                let bits = self.next_u32() >> ways.leading_zeros();
                if bits < ways {
                    break bits;
                }
            };
            items.swap(last, chosen as usize);
        }
    }

    /// `random.choices(range(length), k=count)` of Python.
    pub fn choices(&mut self, length: usize, count: usize) -> Vec<usize> {
        (0..count).map(|_| (self.uniform() * length as f64).floor() as usize).collect()
    }

    /// `numpy.random.gamma(shape, scale)`.
    pub fn gamma(&mut self, shape: f64, scale: f64) -> f64 {
        scale * self.standard_gamma(shape)
    }

    fn exponential(&mut self) -> f64 {
        -(1.0 - self.uniform()).ln()
    }

    #[allow(clippy::float_cmp, reason = "the reference treats exactly 1 as its own case")]
    fn standard_gamma(&mut self, shape: f64) -> f64 {
        if shape == 1.0 {
            self.exponential()
        } else if shape < 1.0 {
            self.gamma_below_one(shape)
        } else {
            self.gamma_above_one(shape)
        }
    }

    fn gamma_below_one(&mut self, shape: f64) -> f64 {
        loop {
            let (uniform, waiting) = (self.uniform(), self.exponential());
            if uniform <= 1.0 - shape {
                let value = uniform.powf(1.0 / shape);
                if value <= waiting {
                    return value;
                }
            } else {
                let tail = -((1.0 - uniform) / shape).ln();
                let value = (1.0 - shape + shape * tail).powf(1.0 / shape);
                if value <= waiting + tail {
                    return value;
                }
            }
        }
    }

    fn gamma_above_one(&mut self, shape: f64) -> f64 {
        let d = shape - 1.0 / 3.0;
        let c = 1.0 / (9.0 * d).sqrt();
        loop {
            let (normal, cube) = loop {
                let normal = self.standard_normal();
                let root = 1.0 + c * normal;
                if root > 0.0 {
                    break (normal, root * root * root);
                }
            };
            let uniform = self.uniform();
            let square = normal * normal;
            if uniform < 1.0 - 0.0331 * square * square || uniform.ln() < 0.5 * square + d * (1.0 - cube + cube.ln()) {
                return d * cube;
            }
        }
    }

    /// Marsaglia's polar method, the second variate of a pair first.
    fn standard_normal(&mut self) -> f64 {
        if let Some(kept) = self.normal.take() {
            return kept;
        }
        loop {
            let (x, y) = (2.0 * self.uniform() - 1.0, 2.0 * self.uniform() - 1.0);
            let radius = x * x + y * y;
            if radius > 0.0 && radius < 1.0 {
                let factor = (-2.0 * radius.ln() / radius).sqrt();
                self.normal = Some(factor * x);
                return factor * y;
            }
        }
    }
}

/// An index as a word of the generator.
fn word(index: usize) -> u32 {
    index as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pcg64_gives_numpys_bits() {
        let mut generator = Pcg64::new(0);
        let bits: Vec<u64> = (0..3).map(|_| generator.next_u64()).collect();
        assert_eq!(bits, [11_749_869_230_777_074_271, 4_976_686_463_289_251_617, 755_828_109_848_996_024]);
        let mut generator = Pcg64::new(0);
        assert_eq!(generator.integers(16, 16, 4), [16; 4]);
        assert_eq!(generator.integers(0, 3205, 4), [2727, 2042, 1638, 864]);
    }

    #[test]
    fn the_twister_gives_numpys_and_pythons_draws() {
        let mut items: Vec<usize> = (0..12).collect();
        Mersenne::python(0).shuffle(&mut items);
        assert_eq!(items, [1, 9, 8, 5, 10, 2, 3, 7, 4, 0, 11, 6]);
        assert_eq!(Mersenne::python(0).choices(10, 6), [8, 7, 4, 2, 5, 4]);
        let gammas = |shape: f64| {
            let mut generator = Mersenne::numpy(0);
            (0..5).map(|_| generator.gamma(shape, 1.0 / (4.0 * shape))).collect::<Vec<f64>>()
        };
        let close = |found: Vec<f64>, wanted: [f64; 5]| {
            assert!(found.iter().zip(wanted).all(|(a, b)| (a - b).abs() <= 2e-16), "{found:?}");
        };
        let exponential =
            [0.1989686270407775, 0.31398269074145946, 0.2308057864510172, 0.19680028807931768, 0.1377621227738748];
        close(gammas(1.0), exponential);
        let bursts =
            [0.1520009448803522, 0.18913586003390778, 0.0897416945014438, 0.09574128373033014, 0.43980426984059784];
        close(gammas(0.5), bursts);
        let even =
            [0.5590958746574369, 0.2812457647515099, 0.5855582416812197, 0.11399722030219606, 0.20846978523076076];
        close(gammas(3.0), even);
    }
}
