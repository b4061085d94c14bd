//! This module puts words into the cells of a table, each into a cell of its own, at a small sum of costs.

mod approximate;
mod cells;
mod costs;
mod exact;
mod exchange;
mod half_approximate;
mod prices;

use crate::checks::check_sizes;
use crate::error::{Error, Result};
use costs::{check, relative, Costs};

/// The largest number of costs that [`Assignment::Exact`] holds. They take 8 GiB.
const MOST_COSTS: usize = 1 << 30;

/// An assignment puts words into the cells of a table by one of these methods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Assignment {
    /// The least cost is found by the Kuhn-Munkres algorithm, in time that grows with the cube of the vocabulary.
    Exact,
    /// A cost is found that is a few per cent above the least, in time that grows with the vocabulary and with the rows
    /// and columns. Heavy matchings pair each word with one of its candidates, which are its cheapest free cells. If
    /// there are only hundreds of words, the least cost is found.
    Approximate {
        /// The number of candidates of each word.
        candidates: usize,
    },
}

/// Returns the cell `row * columns + column` of each word, no two alike. In a cell, a word costs
/// `row_costs[word][row] + column_costs[word][column]`; `row_costs` is `[words, rows]`, `column_costs`
/// `[words, columns]`. The same arguments give the same cells, with any number of threads.
///
/// # Errors
///
/// If the sizes do not match, there are more words than cells, a cost is not a number from -1e30 to 1e30, the number of
/// candidates is zero, or the product of words and cells is above 2^30 for [`Assignment::Exact`].
pub(crate) fn assign(
    row_costs: &[f64],
    column_costs: &[f64],
    rows: usize,
    columns: usize,
    method: Assignment,
) -> Result<Vec<usize>> {
    let words = check(row_costs, column_costs, rows, columns)?;
    let cells = rows * columns;
    let is_exact = match method {
        Assignment::Exact if words.saturating_mul(cells) > MOST_COSTS => {
            let expected = format!("at most {MOST_COSTS} for an exact assignment");
            return Err(Error::config("words * cells", expected, format!("{words} * {cells}")));
        }
        Assignment::Exact => true,
        Assignment::Approximate { candidates } => {
            check_sizes(&[("candidates", candidates)])?;
            approximate::is_exact(words, cells)
        }
    };
    match method {
        Assignment::Approximate { candidates } if !is_exact => {
            let single = |costs: &[f64], lines| relative(costs, lines, |cost| cost as f32);
            let (row_costs, column_costs) = (single(row_costs, rows), single(column_costs, columns));
            approximate::approximate(&Costs::new(&row_costs, &column_costs, rows, columns), candidates)
        }
        _ => {
            let double = |costs: &[f64], lines| relative(costs, lines, |cost| cost);
            let (row_costs, column_costs) = (double(row_costs, rows), double(column_costs, columns));
            let cell_costs = |(rows, columns): (&[f64], &[f64])| {
                rows.iter().flat_map(|row| columns.iter().map(move |column| row + column)).collect::<Vec<f64>>()
            };
            let costs = row_costs.chunks(rows).zip(column_costs.chunks(columns)).flat_map(cell_costs);
            exact::exact(costs.collect(), words, cells)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use proptest::prelude::*;
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};
    use rand_distr::StandardNormal;

    use super::*;

    const APPROXIMATE: Assignment = Assignment::Approximate { candidates: 64 };

    fn total(row_costs: &[f64], column_costs: &[f64], rows: usize, columns: usize, cell_of: &[usize]) -> f64 {
        let cost = |(word, cell): (usize, &usize)| {
            row_costs[word * rows + cell / columns] + column_costs[word * columns + cell % columns]
        };
        cell_of.iter().enumerate().map(cost).sum()
    }

    /// Makes negative log-likelihoods of words that are near some rows and columns, where all words prefer some rows
    /// and columns. With Zipf's counts, those of frequent words are up to a thousand times larger.
    fn costs(words: usize, side: usize, zipf: bool) -> [Vec<f64>; 2] {
        let mut rng = StdRng::seed_from_u64(1);
        [(); 2].map(|()| {
            let mut normal = |count: usize| (0..count).map(|_| rng.sample(StandardNormal)).collect::<Vec<f32>>();
            let (vectors, biases) = (normal(side * 8), normal(side));
            let nll = |word: usize| {
                let hidden = normal(8);
                let product = |vector: &[f32]| vector.iter().zip(&hidden).map(|(a, b)| a * b).sum::<f32>();
                let logits: Vec<f32> = vectors.chunks(8).zip(&biases).map(|(v, bias)| product(v) + bias).collect();
                let log_sum_exp = logits.iter().map(|z| z.exp()).sum::<f32>().ln();
                let count = if zipf { (1000.0 / (1.0 + word as f32 / 10.0)).max(1.0) } else { 1.0 };
                logits.into_iter().map(move |z| f64::from(count * (log_sum_exp - z))).collect::<Vec<f64>>()
            };
            (0..words).flat_map(nll).collect()
        })
    }

    proptest! {
        #[test]
        fn few_words_have_the_least_cost(
            (rows, columns, words) in (1usize..4, 1usize..4).prop_flat_map(|(r, c)| (Just(r), Just(c), 0..=r * c)),
            numbers in prop::collection::vec(-9i8..9, 2 * 9 * 3),
        ) {
            let numbers: Vec<f64> = numbers.into_iter().map(f64::from).collect();
            let (row_costs, column_costs) = (&numbers[..words * rows], &numbers[27..][..words * columns]);
            let total = |method| {
                let cell_of = assign(row_costs, column_costs, rows, columns, method).unwrap();
                total(row_costs, column_costs, rows, columns, &cell_of)
            };
            prop_assert_eq!(total(Assignment::Exact), total(APPROXIMATE));
        }
    }

    #[test]
    fn row_costs_belong_to_rows() {
        // The word wants the second of two rows, and the third of three columns.
        for method in [Assignment::Exact, APPROXIMATE] {
            assert_eq!(assign(&[1.0, 0.0], &[1.0, 1.0, 0.0], 2, 3, method).unwrap(), [5]);
        }
    }

    #[test]
    fn approximate_costs_are_a_few_per_cent_higher() {
        for (words, zipf) in [(900, false), (800, false), (900, true)] {
            let [row_costs, column_costs] = costs(words, 30, zipf);
            let total = |method| {
                let cell_of = assign(&row_costs, &column_costs, 30, 30, method).unwrap();
                total(&row_costs, &column_costs, 30, 30, &cell_of)
            };
            let (least, cost) = (total(Assignment::Exact), total(APPROXIMATE));
            assert!(least <= cost && cost < 1.05 * least, "{cost} for {least}");
        }
    }

    #[test]
    fn the_number_of_threads_does_not_matter() {
        let [row_costs, column_costs] = costs(900, 30, false);
        let cell_of = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| assign(&row_costs, &column_costs, 30, 30, APPROXIMATE).unwrap())
        };
        assert_eq!(cell_of(1), cell_of(3));
    }

    #[test]
    fn wrong_arguments_are_errors() {
        let message = |row_costs: &[f64], column_costs: &[f64], rows, columns| {
            let error = |method| assign(row_costs, column_costs, rows, columns, method).unwrap_err().to_string();
            assert_eq!(error(Assignment::Exact), error(APPROXIMATE));
            error(Assignment::Exact)
        };
        assert_eq!(message(&[0.0; 2], &[0.0; 2], 1, 1), "words: expected at most 1, the number of cells, got 2");
        assert_eq!(message(&[0.0; 3], &[0.0; 2], 2, 2), "row_costs: expected shape [words, 2], got [3]");
        assert_eq!(message(&[0.0; 2], &[0.0; 3], 2, 2), "column_costs: expected shape [1, 2], got [3]");
        assert_eq!(message(&[], &[], 0, 2), "rows: expected at least 1, got 0");
        assert_eq!(message(&[], &[], 2, 0), "columns: expected at least 1, got 0");
        assert_eq!(
            message(&[], &[], 1 << 16, 1 << 16),
            "rows * columns: expected at most 4294967294, got 65536 * 65536"
        );
        for (cost, name) in [(f64::NAN, "NaN"), (f64::INFINITY, "inf"), (f64::NEG_INFINITY, "-inf"), (2e30, "2e30")] {
            let got = if cost.is_finite() { cost.to_string() } else { name.into() };
            let expected = format!("expected from -1e30 to 1e30, got {got}");
            assert_eq!(message(&[0.0, cost], &[0.0; 2], 2, 2), format!("row_costs: {expected}"));
            assert_eq!(message(&[0.0; 2], &[0.0, cost], 2, 2), format!("column_costs: {expected}"));
        }
        let none = Assignment::Approximate { candidates: 0 };
        assert_eq!(
            assign(&[0.0], &[0.0], 1, 1, none).unwrap_err().to_string(),
            "candidates: expected at least 1, got 0"
        );
        assert_eq!(
            assign(&[0.0; 16 * 4096], &[0.0; 16 * 65_536], 4096, 65_536, Assignment::Exact).unwrap_err().to_string(),
            "words * cells: expected at most 1073741824 for an exact assignment, got 16 * 268435456"
        );
    }

    #[test]
    #[ignore = "prints how long assignments take, and what they cost"]
    fn report() {
        let report = |name: &str, words: usize, side: usize, [row_costs, column_costs]: &[Vec<f64>; 2], method| {
            let start = Instant::now();
            let cell_of = assign(row_costs, column_costs, side, side, method).unwrap();
            let seconds = start.elapsed().as_secs_f64();
            let cost = total(row_costs, column_costs, side, side, &cell_of);
            println!("{name}, {words} words in {side} x {side} cells, {method:?}: {seconds:.3} s, cost {cost:.0}");
            cost
        };
        for (words, zipf) in [(2500, false), (2250, false), (2500, true), (2250, true)] {
            let costs = costs(words, 50, zipf);
            let name = if zipf { "Zipf's counts" } else { "equal counts" };
            let least = report(name, words, 50, &costs, Assignment::Exact);
            for candidates in [16, 64] {
                let cost = report(name, words, 50, &costs, Assignment::Approximate { candidates });
                println!("    {:.2}% above the least", 100.0 * (cost / least - 1.0));
            }
        }
        let same = [(); 2].map(|()| costs(1, 50, false)[0].repeat(2500));
        report("the same costs", 2500, 50, &same, Assignment::Exact);
        report("zeros", 2500, 50, &[(); 2].map(|()| vec![0.0; 2500 * 50]), Assignment::Exact);

        let (words, side) = (100_000, 317);
        for candidates in [16, 64] {
            let method = Assignment::Approximate { candidates };
            report("equal counts", words, side, &costs(words, side, false), method);
            report("Zipf's counts", words, side, &costs(words, side, true), method);
            let same = [(); 2].map(|()| costs(1, side, false)[0].repeat(words));
            report("the same costs", words, side, &same, method);
            report("zeros", words, side, &[(); 2].map(|()| vec![0.0; words * side]), method);
        }
    }
}
