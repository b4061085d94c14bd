//! The noise of a token id: a function of a request's seed, its step and the id, which does not depend on what else is
//! drawn.

/// The noise of one draw, for every token id.
#[derive(Clone, Copy)]
pub(super) struct Noise {
    key: u64,
}

impl Noise {
    /// The noise of the draw at this step of a request with this seed.
    pub(super) fn new(seed: u64, step: u64) -> Self {
        Noise { key: mix_bits(mix_bits(seed.wrapping_add(GAMMA)).wrapping_add(step.wrapping_mul(GAMMA))) }
    }

    /// Returns a uniform number between 0 and 1, both excluded.
    fn uniform(self, id: u32) -> f64 {
        let bits = mix_bits(self.key.wrapping_add((u64::from(id) + 1).wrapping_mul(GAMMA)));
        // 52 bits and a half are exact.
        ((bits >> 12) as f64 + 0.5) * 2f64.powi(-52)
    }

    /// Returns a number from Gumbel's distribution: the id with the largest `log p(v) + noise(v)` is a draw from p
    /// (Maddison, Tarlow, Minka: A* Sampling. NeurIPS 2014, arXiv 1411.0030).
    pub(super) fn gumbel(self, id: u32) -> f64 {
        -(-self.uniform(id).ln()).ln()
    }

    /// Returns a number that is at least [`Noise::gumbel`], without logarithms: `-log(-log u) <= -log(1 - u)`, which is
    /// at most minus the binary exponent of `1 - u` times log 2.
    pub(super) fn bound(self, id: u32) -> f64 {
        const EXPONENT_BIAS: i64 = 1023;
        let exponent = ((1.0 - self.uniform(id)).to_bits() >> 52) as i64 - EXPONENT_BIAS;
        -exponent as f64 * std::f64::consts::LN_2
    }
}

/// The increment of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators. OOPSLA 2014).
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// The output function of SplitMix64: each bit of the result depends on every bit of `x`.
fn mix_bits(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_is_one() {
        for id in 0..200_000 {
            let noise = Noise::new(7, 3);
            let (gumbel, bound) = (noise.gumbel(id), noise.bound(id));
            assert!(gumbel <= bound && bound - gumbel.max(0.0) < 0.7 + 1.0, "{id}: {gumbel} {bound}");
        }
    }

    /// Means of 200,000 numbers, and of the products of neighbours: by id, by step and by seed.
    #[test]
    fn numbers_are_independent() {
        let sequences = [
            |i: u64| Noise::new(5, 9).uniform(i as u32),
            |i: u64| Noise::new(5, i).uniform(9),
            |i: u64| Noise::new(i, 5).uniform(9),
        ];
        for uniform in sequences {
            let n = 200_000;
            let numbers: Vec<f64> = (0..n).map(|i| uniform(i) - 0.5).collect();
            let mean = |values: &mut dyn Iterator<Item = f64>| values.sum::<f64>() / n as f64;
            // Three standard deviations and a half.
            let deviation = 3.5 / (n as f64).sqrt();
            assert!(mean(&mut numbers.iter().copied()).abs() < deviation / 12f64.sqrt());
            assert!(
                (mean(&mut numbers.iter().map(|x| x * x)) - 1.0 / 12.0).abs() < deviation * (1.0f64 / 180.0).sqrt()
            );
            for lag in [1, 2, 512] {
                let products = &mut numbers.iter().zip(&numbers[lag..]).map(|(a, b)| a * b);
                assert!(mean(products).abs() < deviation / 12.0, "{lag}");
            }
        }
    }
}
