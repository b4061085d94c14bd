//! This file finds prices of rows or columns, so that not all words ask for the same ones: a line in too great demand
//! becomes dearer.
//!
//! In a full table, prices add the same sum to the cost of every assignment, so that the best one stays the best. They
//! approximate the Lagrange multipliers of the capacities, by subgradient steps.

use rayon::prelude::*;

/// The number of subgradient steps.
const STEPS: usize = 40;

/// Finds a price for each line, which is a row or a column, from costs `[words, lines]`. Each line has places for
/// `capacity` words.
pub(super) fn prices(costs: &[f32], lines: usize, capacity: usize) -> Vec<f32> {
    let mut prices = vec![0.0; lines];
    let mut gains: Vec<f32> = costs.par_chunks(lines).map(gain).filter(|gain| *gain > 0.0).collect();
    if gains.is_empty() {
        return prices;
    }
    let middle = gains.len() / 2;
    let scale = *gains.select_nth_unstable_by(middle, f32::total_cmp).1;
    for step in 0..STEPS {
        let demand = demand(costs, &prices);
        let step = scale / (2.0 + 0.6 * step as f32);
        for (price, demand) in prices.iter_mut().zip(demand) {
            let excess = (demand as f32 / capacity as f32 - 1.0).min(1.0);
            *price = (*price + step * excess).max(0.0);
        }
    }
    prices
}

/// Computes how much cheaper than the mean the cheapest line is.
fn gain(costs: &[f32]) -> f32 {
    costs.iter().sum::<f32>() / costs.len() as f32 - costs.iter().copied().fold(f32::INFINITY, f32::min)
}

/// Counts the words for which each line is the cheapest. Words without a preference are left out.
fn demand(costs: &[f32], prices: &[f32]) -> Vec<usize> {
    let lines = prices.len();
    let count = |mut demand: Vec<usize>, word_costs: &[f32]| {
        let mut cheapest = (f32::INFINITY, 0);
        for (line, (cost, price)) in word_costs.iter().zip(prices).enumerate() {
            if cost + price < cheapest.0 {
                cheapest = (cost + price, line);
            }
        }
        if word_costs.iter().any(|cost| *cost != word_costs[0]) {
            demand[cheapest.1] += 1;
        }
        demand
    };
    let add = |a: Vec<usize>, b: Vec<usize>| a.into_iter().zip(b).map(|(a, b)| a + b).collect();
    costs.par_chunks(lines).with_min_len(256).fold(|| vec![0; lines], count).reduce(|| vec![0; lines], add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_all_prefer_becomes_dear() {
        // All of the 40 words would take line 0. Each loses more in line 1 than the word before it.
        let costs: Vec<f32> = (0..40).flat_map(|word| [0.0, 1.0 + word as f32]).collect();
        assert_eq!(demand(&costs, &[0.0, 0.0]), [40, 0]);
        let demand = demand(&costs, &prices(&costs, 2, 20));
        assert!(demand[0].abs_diff(20) <= 2, "{demand:?}");
    }

    #[test]
    fn what_has_room_is_free() {
        let costs: Vec<f32> = (0..40).flat_map(|word| [word as f32, 19.5]).collect();
        assert_eq!(prices(&costs, 2, 30), [0.0, 0.0]);
    }

    #[test]
    fn words_without_a_preference_do_not_count() {
        assert_eq!(demand(&[1.0; 30], &[0.0, 0.5, 0.0]), [0, 0, 0]);
        assert_eq!(prices(&[1.0; 30], 3, 3), [0.0; 3]);
        assert!(prices(&[], 3, 1).iter().all(|price| *price == 0.0));
    }
}
