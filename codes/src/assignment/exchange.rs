//! This file improves an assignment: words of a row exchange their columns, and words of a column their rows, where two
//! words together gain by it.

use rayon::prelude::*;

use super::costs::Costs;

/// The number of passes. Few words gain in later ones.
const PASSES: usize = 4;

/// A word has a place in a row or a column: the pair is the word and the place.
type Placed = (usize, usize);

/// Exchanges places in each row, then in each column, while two words together, or a word and a free cell, gain by it.
pub(super) fn exchange(costs: &Costs, cell_of: &mut [usize]) {
    let columns = costs.columns;
    let mut lines = vec![vec![]; costs.rows];
    cell_of.iter().enumerate().for_each(|(word, cell)| lines[cell / columns].push((word, cell % columns)));
    lines.par_iter_mut().for_each(|row| exchange_places(row, columns, |word| costs.in_columns(word)));
    for (row, words) in lines.iter().enumerate() {
        words.iter().for_each(|(word, column)| cell_of[*word] = row * columns + column);
    }

    let mut lines = vec![vec![]; columns];
    cell_of.iter().enumerate().for_each(|(word, cell)| lines[cell % columns].push((word, cell / columns)));
    lines.par_iter_mut().for_each(|column| exchange_places(column, costs.rows, |word| costs.in_rows(word)));
    for (column, words) in lines.iter().enumerate() {
        words.iter().for_each(|(word, row)| cell_of[*word] = row * columns + column);
    }
}

/// Exchanges the places of the words of one row or column. `costs_of` gives a word's cost at each place.
fn exchange_places<'a>(words: &mut [Placed], places: usize, costs_of: impl Fn(usize) -> &'a [f32]) {
    let mut is_free = vec![true; places];
    words.iter().for_each(|(_, place)| is_free[*place] = false);
    let mut free: Vec<usize> = (0..places).filter(|place| is_free[*place]).collect();
    for _ in 0..PASSES {
        let mut gained = false;
        for i in 0..words.len() {
            let (earlier, later) = words.split_at_mut(i);
            let (word, place) = &mut later[0];
            let costs = costs_of(*word);
            for free in &mut free {
                if costs[*free] < costs[*place] {
                    std::mem::swap(place, free);
                    gained = true;
                }
            }
            for (other, other_place) in earlier {
                let other_costs = costs_of(*other);
                let now = f64::from(costs[*place]) + f64::from(other_costs[*other_place]);
                if f64::from(costs[*other_place]) + f64::from(other_costs[*place]) < now {
                    std::mem::swap(place, other_place);
                    gained = true;
                }
            }
        }
        if !gained {
            break;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Exchanges in a table of two rows and three columns.
    fn exchanged(row_costs: &[f32], column_costs: &[f32], mut cell_of: Vec<usize>) -> Vec<usize> {
        exchange(&Costs::new(row_costs, column_costs, 2, 3), &mut cell_of);
        cell_of
    }

    #[test]
    fn words_of_a_row_exchange_columns() {
        // Word 0 loses 1 by it, word 1 gains 2.
        let column_costs = [0.0, 1.0, 9.0, 0.0, 2.0, 9.0];
        assert_eq!(exchanged(&[0.0; 4], &column_costs, vec![0, 1]), [1, 0]);
        assert_eq!(exchanged(&[0.0; 4], &column_costs, vec![1, 0]), [1, 0]);
        // Words of different rows do not exchange columns with each other.
        assert_eq!(exchanged(&[0.0; 4], &[0.0, 1.0, 9.0, 1.0, 0.0, 9.0], vec![1, 3]), [0, 4]);
    }

    #[test]
    fn words_of_a_column_exchange_rows() {
        assert_eq!(exchanged(&[0.0, 1.0, 0.0, 2.0], &[0.0; 6], vec![1, 4]), [4, 1]);
        assert_eq!(exchanged(&[0.0, 1.0, 0.0, 2.0], &[0.0; 6], vec![4, 1]), [4, 1]);
    }

    #[test]
    fn words_take_free_cells() {
        assert_eq!(exchanged(&[1.0, 0.0], &[3.0, 2.0, 1.0], vec![0]), [5]);
    }
}
