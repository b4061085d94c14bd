//! The perplexity of the best approximations of the log-probabilities by matrices of lower rank.

use crate::spectrum::Spectrum;
use faer::{Mat, MatRef};

/// This sums, for each rank r, the negative log-likelihood of the targets if the log-probabilities are replaced by the
/// matrix of rank r with the least squared error (their truncated singular value decomposition), normalised anew.
pub(crate) struct LowRank<'a> {
    spectrum: &'a Spectrum,
    ranks: Vec<usize>,
    sums: Vec<f64>,
    count: f64,
}

impl<'a> LowRank<'a> {
    /// Begins with no rows. The `ranks` must rise.
    pub(crate) fn new(spectrum: &'a Spectrum, ranks: Vec<usize>) -> Self {
        Self { spectrum, sums: vec![0.0; ranks.len()], ranks, count: 0.0 }
    }

    /// Adds rows of log-probabilities, one after the other, and the target of each.
    pub(crate) fn push(&mut self, log_probabilities: &[f64], targets: &[u32]) {
        let vectors = self.spectrum.vectors.as_ref();
        let columns = vectors.nrows();
        let rows = MatRef::from_row_major_slice(log_probabilities, targets.len(), columns);
        let mut approximation = Mat::<f64>::zeros(targets.len(), columns);
        let mut done = 0;
        for (&rank, sum) in self.ranks.iter().zip(&mut self.sums) {
            let more = vectors.subcols(done, rank - done);
            approximation += (rows * more) * more.transpose();
            done = rank;
            for (i, &target) in targets.iter().enumerate() {
                let logits = || (0..columns).map(|j| approximation[(i, j)]);
                let largest = logits().fold(f64::NEG_INFINITY, f64::max);
                let normaliser = largest + logits().map(|z| (z - largest).exp()).sum::<f64>().ln();
                *sum += normaliser - approximation[(i, target as usize)];
            }
        }
        self.count += targets.len() as f64;
    }

    /// Returns each rank with its perplexity.
    pub(crate) fn perplexities(&self) -> Vec<(usize, f64)> {
        self.ranks.iter().zip(&self.sums).map(|(&rank, sum)| (rank, (sum / self.count).exp())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spectrum::Rows;

    /// Makes log-probabilities of rank 2 in 6 contexts.
    fn rows() -> (Vec<f64>, Vec<u32>) {
        let distributions = [[0.5f64, 0.3, 0.1, 0.1], [0.1, 0.2, 0.3, 0.4]];
        let rows = (0..6).flat_map(|i| distributions[i % 2].map(f64::ln)).collect();
        (rows, vec![0, 3, 1, 2, 0, 3])
    }

    #[test]
    fn the_full_rank_keeps_the_perplexity_and_a_lower_one_loses() {
        let (log_probabilities, targets) = rows();
        let mut held = Rows::new(4);
        held.push(&log_probabilities);
        let spectrum = held.spectrum().expect("converges");
        assert_eq!(spectrum.rank(f64::EPSILON), 2);
        let mut low_rank = LowRank::new(&spectrum, vec![1, 2]);
        low_rank.push(&log_probabilities[..8], &targets[..2]);
        low_rank.push(&log_probabilities[8..], &targets[2..]);
        let found = low_rank.perplexities();
        let nll: f64 = targets.iter().enumerate().map(|(i, &t)| -log_probabilities[i * 4 + t as usize]).sum();
        assert!((found[1].1 - (nll / 6.0).exp()).abs() < 1e-10, "{found:?}");
        assert!(found[0].1 > 1.1 * found[1].1, "{found:?}");
    }
}
