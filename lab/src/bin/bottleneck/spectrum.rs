//! Singular values of a tall matrix that arrives in blocks of rows.

use faer::{Mat, MatRef};
use lab::Result;

/// The rows so far; where there are more rows than columns, a triangular matrix with the same singular values and the
/// same right singular vectors in their place: the factor R of a QR decomposition. (The Gram matrix, which has them
/// too, would lose all singular values below the square root of the roundoff.)
pub(crate) struct Rows {
    columns: usize,
    /// The values in row-major order.
    values: Vec<f64>,
    count: usize,
}

impl Rows {
    pub(crate) fn new(columns: usize) -> Self {
        Self { columns, values: vec![], count: 0 }
    }

    /// Returns the most values held at once for a matrix of this size, with what the decompositions need.
    pub(crate) fn memory(rows: usize, columns: usize) -> usize {
        let held = rows.min(columns + slack(columns));
        3 * held * columns * size_of::<f64>()
    }

    /// Adds rows, one after the other.
    pub(crate) fn push(&mut self, rows: &[f64]) {
        for row in rows.chunks_exact(self.columns) {
            if self.values.len() >= (self.columns + slack(self.columns)) * self.columns {
                self.reduce();
            }
            self.values.extend_from_slice(row);
            self.count += 1;
        }
    }

    fn matrix(&self) -> MatRef<'_, f64> {
        MatRef::from_row_major_slice(&self.values, self.values.len() / self.columns, self.columns)
    }

    fn reduce(&mut self) {
        let qr = self.matrix().qr();
        let r = qr.thin_R();
        // Below the diagonal it may have anything.
        self.values = (0..r.nrows() * self.columns)
            .map(|i| (i / self.columns, i % self.columns))
            .map(|(i, j)| if i <= j { r[(i, j)] } else { 0.0 })
            .collect();
    }

    pub(crate) fn spectrum(mut self) -> Result<Spectrum> {
        if self.values.len() > self.columns * self.columns {
            self.reduce();
        }
        let svd = self.matrix().thin_svd().map_err(|error| format!("no singular values: {error:?}"))?;
        let values = svd.S().column_vector().iter().copied().collect();
        Ok(Spectrum { values, vectors: svd.V().to_owned(), rows: self.count, columns: self.columns })
    }
}

/// Returns the number of rows between two reductions, beyond those of the triangle.
fn slack(columns: usize) -> usize {
    (columns / 2).max(64)
}

/// The number of decades below the largest singular value that are shown.
pub(crate) const DECADES: i32 = 16;

pub(crate) struct Spectrum {
    /// The singular values, the largest first.
    pub(crate) values: Vec<f64>,
    /// The right singular vectors, [columns, values].
    pub(crate) vectors: Mat<f64>,
    rows: usize,
    columns: usize,
}

impl Spectrum {
    /// Returns a bound of the roundoff in a singular value: the largest one, times the longer side, times epsilon, as
    /// in numpy's `matrix_rank`. The paper takes the expected roundoff, with `sqrt(rows + columns + 1) / 2` in the
    /// place of the longer side; the test below exceeds it.
    pub(crate) fn tolerance(&self, epsilon: f64) -> f64 {
        let largest = self.values.first().copied().unwrap_or(0.0);
        self.rows.max(self.columns) as f64 * largest * epsilon
    }

    /// Returns the percentage of singular values below 10^-16, 10^-15.5, .., 1 times the largest one.
    pub(crate) fn distribution(&self) -> Vec<f64> {
        let largest = self.values.first().copied().unwrap_or(0.0);
        let below = |threshold: f64| self.values.iter().filter(|&&value| value < threshold * largest).count();
        let percent = |threshold| 100.0 * below(threshold) as f64 / self.values.len() as f64;
        (0..=2 * DECADES).map(|i| percent(10f64.powf(f64::from(i) / 2.0 - f64::from(DECADES)))).collect()
    }

    /// Returns the number of singular values above the roundoff.
    pub(crate) fn rank(&self, epsilon: f64) -> usize {
        let tolerance = self.tolerance(epsilon);
        self.values.iter().filter(|&&value| value > tolerance).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{rngs::StdRng, Rng, SeedableRng};

    /// Returns a matrix of this rank, as the product of two random ones.
    fn product(rows: usize, columns: usize, rank: usize, rng: &mut StdRng) -> Vec<f64> {
        let mut random = |count| -> Vec<f64> { (0..count).map(|_| rng.random_range(-1.0..1.0)).collect() };
        let (left, right) = (random(rows * rank), random(rank * columns));
        let element = |i: usize, j: usize| (0..rank).map(|k| left[i * rank + k] * right[k * columns + j]).sum();
        (0..rows * columns).map(|at| element(at / columns, at % columns)).collect()
    }

    fn spectrum(values: &[f64], columns: usize) -> Spectrum {
        let mut rows = Rows::new(columns);
        for block in values.chunks(7 * columns) {
            rows.push(block);
        }
        rows.spectrum().expect("converges")
    }

    #[test]
    fn a_known_rank_is_found_in_wide_and_in_tall_matrices() {
        let mut rng = StdRng::seed_from_u64(1);
        for (rows, columns) in [(40, 90), (60, 60), (1000, 50), (333, 70)] {
            for rank in [1, 7, 33] {
                let found = spectrum(&product(rows, columns, rank, &mut rng), columns);
                assert_eq!(found.rank(f64::EPSILON), rank, "{rows} x {columns}");
            }
        }
    }

    #[test]
    fn blocks_change_no_singular_value() {
        let mut rng = StdRng::seed_from_u64(2);
        let (rows, columns) = (500, 40);
        let values: Vec<f64> = (0..rows * columns).map(|_| rng.random_range(-1.0..1.0)).collect();
        let whole = MatRef::from_row_major_slice(&values, rows, columns).singular_values().expect("converges");
        for (found, expected) in spectrum(&values, columns).values.iter().zip(whole) {
            assert!((found - expected).abs() < 1e-12 * expected, "{found} {expected}");
        }
    }

    /// A Gram matrix would lose the second one.
    #[test]
    fn a_singular_value_below_the_square_root_of_the_roundoff_is_found() {
        let mut values = vec![0.0; 200 * 3];
        for (i, row) in values.chunks_exact_mut(3).enumerate() {
            row[0] = 1.0;
            row[1] = if i == 0 { 1e-10 } else { 0.0 };
        }
        let found = spectrum(&values, 3);
        assert_eq!(found.rank(f64::EPSILON), 2);
        assert!((found.values[1] / 1e-10 - 1.0).abs() < 0.01, "{:?}", found.values);
    }
}
