//! This file finds a minimum-cost assignment by the Kuhn-Munkres algorithm, in cubic time.

use ordered_float::OrderedFloat;
use pathfinding::kuhn_munkres::kuhn_munkres;
use pathfinding::matrix::Matrix;

use crate::error::{Error, Result};

/// The largest cost. The algorithm adds and subtracts costs, and does not end if a sum is infinite.
const LARGEST_COST: f64 = 1e100;

/// Returns the place of each item, no two alike, at the least sum of costs `[items, places]`.
pub(super) fn exact(costs: Vec<f64>, items: usize, places: usize) -> Result<Vec<usize>> {
    if items > places {
        return Err(Error::config("items", format!("at most {places}, the number of places"), items));
    }
    let numbers = costs.len();
    let shape_error = || Error::shape("costs", format!("[{items}, {places}]"), &[numbers]);
    if items.checked_mul(places) != Some(numbers) {
        return Err(shape_error());
    }
    // NaN is outside every range.
    if let Some(cost) = costs.iter().find(|cost| !(-LARGEST_COST..=LARGEST_COST).contains(*cost)) {
        return Err(Error::config("costs", format!("from {:e} to {LARGEST_COST:e}", -LARGEST_COST), cost));
    }
    if items == 0 {
        return Ok(Vec::new());
    }
    let gains = costs.into_iter().map(|cost| OrderedFloat(-cost)).collect();
    let gains = Matrix::from_vec(items, places, gains).map_err(|_| shape_error())?;
    Ok(kuhn_munkres(&gains).1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn total(costs: &[f64], places: usize, place_of: &[usize]) -> f64 {
        place_of.iter().enumerate().map(|(item, place)| costs[item * places + place]).sum()
    }

    /// Finds the least total over all injections of the items from `item` on.
    fn least(costs: &[f64], items: usize, places: usize, item: usize, taken: &mut Vec<bool>) -> f64 {
        if item == items {
            return 0.0;
        }
        let mut best = f64::INFINITY;
        for place in 0..places {
            if !taken[place] {
                taken[place] = true;
                best = best.min(costs[item * places + place] + least(costs, items, places, item + 1, taken));
                taken[place] = false;
            }
        }
        best
    }

    proptest! {
        #[test]
        fn no_injection_is_cheaper(
            (items, places) in (1usize..6).prop_flat_map(|items| (Just(items), items..7)),
            levels in prop::sample::select(vec![2i32, 5, 1000]),
            seeds in prop::collection::vec(-1000i32..1000, 42),
        ) {
            let costs: Vec<f64> = seeds[..items * places].iter().map(|x| f64::from(x % levels) * 0.25).collect();
            let place_of = exact(costs.clone(), items, places).unwrap();
            let mut distinct = place_of.clone();
            distinct.sort_unstable();
            distinct.dedup();
            prop_assert_eq!(distinct.len(), items);
            prop_assert_eq!(total(&costs, places, &place_of), least(&costs, items, places, 0, &mut vec![false; places]));
        }
    }

    #[test]
    fn smallest_problems() {
        assert_eq!(exact(vec![], 0, 0).unwrap(), Vec::<usize>::new());
        assert_eq!(exact(vec![], 0, 3).unwrap(), Vec::<usize>::new());
        assert_eq!(exact(vec![-2.5], 1, 1).unwrap(), [0]);
        assert_eq!(exact(vec![3.0, -1.0, 2.0], 1, 3).unwrap(), [1]);
    }

    #[test]
    fn equal_costs_end() {
        let mut places = exact(vec![7.0; 60 * 60], 60, 60).unwrap();
        places.sort_unstable();
        assert!(places.into_iter().eq(0..60));
    }

    #[test]
    fn what_has_no_assignment_is_an_error() {
        let message = |costs: &[f64], items, places| exact(costs.to_vec(), items, places).unwrap_err().to_string();
        assert_eq!(message(&[0.0; 2], 2, 1), "items: expected at most 1, the number of places, got 2");
        assert_eq!(message(&[0.0; 3], 2, 2), "costs: expected shape [2, 2], got [3]");
        assert_eq!(message(&[0.0, f64::NAN], 1, 2), "costs: expected from -1e100 to 1e100, got NaN");
        assert_eq!(message(&[f64::INFINITY], 1, 1), "costs: expected from -1e100 to 1e100, got inf");
        assert_eq!(message(&[f64::NEG_INFINITY], 1, 1), "costs: expected from -1e100 to 1e100, got -inf");
        assert!(exact(vec![f64::MAX; 9], 3, 3).is_err());
        // These are the largest costs that are allowed.
        assert_eq!(exact(vec![1e100, -1e100, 1e100, 1e100], 2, 2).unwrap(), [1, 0]);
    }
}
