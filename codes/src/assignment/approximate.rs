//! This file assigns words in nearly linear time: rounds of heavy matchings pair words with their cheapest free cells,
//! at prices that spread the demand, and then words exchange cells.

use rayon::prelude::*;

use super::cells::{cheapest, Limits};
use super::costs::Costs;
use super::exact::exact;
use super::exchange::exchange;
use super::half_approximate::Graph;
use super::prices::prices;
use crate::error::Result;

/// The number of cells that are visited for each candidate after the first round, when most of a word's cheapest cells
/// are taken.
const VISITS_PER_CANDIDATE: usize = 4;

/// The rounds end with the first that places fewer than one in this many of the words that are left.
const LEAST_PROGRESS: usize = 8;

/// The largest `words^2 * cells` at which words are placed at the least cost, which then takes a fraction of a second.
const MOST_EXACT: usize = 1 << 27;

/// The number of times that all words may exchange cells. The second time still gains a little, a third hardly
/// anything.
const EXCHANGES: usize = 2;

/// Returns whether words and cells are few enough to place the words at the least cost.
pub(super) fn is_exact(words: usize, cells: usize) -> bool {
    is_exact_below(words, cells, MOST_EXACT)
}

fn is_exact_below(words: usize, cells: usize, most_exact: usize) -> bool {
    words.saturating_pow(2).saturating_mul(cells) <= most_exact
}

/// Returns the cell of each word, at a cost that is near the least.
pub(super) fn approximate(costs: &Costs, candidates: usize) -> Result<Vec<usize>> {
    let mut cell_of = match_in_rounds(costs, candidates, MOST_EXACT)?;
    for _ in 0..EXCHANGES {
        exchange(costs, &mut cell_of);
    }
    Ok(cell_of)
}

/// Places the words round by round, and the last ones at the least cost if there are few, else one by one.
fn match_in_rounds(costs: &Costs, candidates: usize, most_exact: usize) -> Result<Vec<usize>> {
    let is_exact = |words: usize, cells: usize| is_exact_below(words, cells, most_exact);
    let mut table = Table::new(costs);
    let mut limits = Limits { candidates, visits: candidates };
    if !is_exact(costs.words, costs.cells()) {
        let prices = Prices::new(costs);
        while !is_exact(table.left.len(), table.free_count()) {
            let matched = round(costs, &prices, &table, limits);
            let before = table.left.len();
            table.place(&matched);
            if (before - table.left.len()) * LEAST_PROGRESS < before {
                break;
            }
            limits.visits = candidates.saturating_mul(VISITS_PER_CANDIDATE);
        }
    }
    let matched = if is_exact(table.left.len(), table.free_count()) {
        at_least_cost(costs, &table)?
    } else {
        one_by_one(costs, &table)
    };
    table.place(&matched);
    Ok(table.cell_of)
}

/// This table says which words are in which cells.
struct Table {
    /// The cells of the words that are placed.
    cell_of: Vec<usize>,
    /// Whether each cell is free.
    is_free: Vec<bool>,
    /// The words that are not placed yet.
    left: Vec<usize>,
}

impl Table {
    fn new(costs: &Costs) -> Self {
        let (words, cells) = (costs.words, costs.cells());
        Table { cell_of: vec![0; words], is_free: vec![true; cells], left: (0..words).collect() }
    }

    /// Returns the number of free cells.
    fn free_count(&self) -> usize {
        self.is_free.len() - (self.cell_of.len() - self.left.len())
    }

    /// Places the words of `left` that have a cell.
    fn place(&mut self, matched: &[Option<usize>]) {
        let left = std::mem::take(&mut self.left);
        for (word, cell) in left.into_iter().zip(matched) {
            match cell {
                Some(cell) => {
                    self.cell_of[word] = *cell;
                    self.is_free[*cell] = false;
                }
                None => self.left.push(word),
            }
        }
    }
}

/// These are the prices of the rows and of the columns.
struct Prices {
    rows: Vec<f32>,
    columns: Vec<f32>,
}

impl Prices {
    fn new(costs: &Costs) -> Self {
        let rows = prices(costs.row_costs, costs.rows, costs.columns);
        Prices { rows, columns: prices(costs.column_costs, costs.columns, costs.rows) }
    }
}

/// Matches the words that are left with their cheapest free cells. An edge weighs how much cheaper its cell is than the
/// dearest of the word's candidates: if two words want a cell, the one that would lose more gets it.
fn round(costs: &Costs, prices: &Prices, table: &Table, limits: Limits) -> Vec<Option<usize>> {
    let edges = |word: &usize| {
        let rows: Vec<f32> = costs.in_rows(*word).iter().zip(&prices.rows).map(|(a, b)| a + b).collect();
        let columns: Vec<f32> = costs.in_columns(*word).iter().zip(&prices.columns).map(|(a, b)| a + b).collect();
        let mut cells = cheapest(&rows, &columns, limits, |cell| table.is_free[cell]);
        let dearest = cells.last().map_or(0.0, |cell| cell.1);
        cells.iter_mut().for_each(|(_, cost)| *cost = dearest - *cost);
        cells
    };
    let edges: Vec<Vec<(u32, f64)>> = table.left.par_iter().map(edges).collect();
    Graph::new(&edges).matching(costs.cells())
}

/// Places the words that are left at the least sum of costs.
fn at_least_cost(costs: &Costs, table: &Table) -> Result<Vec<Option<usize>>> {
    let free: Vec<usize> = (0..costs.cells()).filter(|cell| table.is_free[*cell]).collect();
    let pairs = table.left.iter().flat_map(|word| free.iter().map(|cell| costs.in_cell(*word, *cell)));
    let places = exact(pairs.collect(), table.left.len(), free.len())?;
    Ok(places.into_iter().map(|place| Some(free[place])).collect())
}

/// Places one word after the other into the cheapest row that has a free cell, and there into the cheapest free column.
/// The words that gain the most by their cheapest cell ([`Costs::gain`]) come first.
fn one_by_one(costs: &Costs, table: &Table) -> Vec<Option<usize>> {
    let mut is_free = table.is_free.clone();
    let free_cells = |row: &[bool]| row.iter().filter(|is_free| **is_free).count();
    let mut room: Vec<usize> = is_free.chunks(costs.columns).map(free_cells).collect();
    let mut order: Vec<(f64, usize)> = table.left.iter().map(|word| costs.gain(*word)).zip(0..).collect();
    order.sort_by(|a, b| b.0.total_cmp(&a.0));
    let mut matched = vec![None; table.left.len()];
    for (_, i) in order {
        let (row_costs, column_costs) = (costs.in_rows(table.left[i]), costs.in_columns(table.left[i]));
        let rows = (0..costs.rows).filter(|row| room[*row] > 0);
        matched[i] = rows.min_by(|a, b| row_costs[*a].total_cmp(&row_costs[*b])).and_then(|row| {
            let columns = (0..costs.columns).filter(|column| is_free[row * costs.columns + column]);
            let column = columns.min_by(|a, b| column_costs[*a].total_cmp(&column_costs[*b]))?;
            room[row] -= 1;
            is_free[row * costs.columns + column] = false;
            Some(row * costs.columns + column)
        });
    }
    matched
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn is_injection(cell_of: &[usize], costs: &Costs) -> bool {
        let mut distinct = cell_of.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        let in_table = distinct.last().is_none_or(|last| *last < costs.cells());
        distinct.len() == costs.words && cell_of.len() == costs.words && in_table
    }

    proptest! {
        #[test]
        fn every_word_has_a_cell_of_its_own(
            (rows, columns, words) in (1usize..7, 1usize..7).prop_flat_map(|(r, c)| (Just(r), Just(c), 0..=r * c)),
            seeds in prop::collection::vec(-100i8..100, 2 * 36 * 6),
            levels in prop::sample::select(vec![1i8, 2, 100]),
            candidates in 1usize..8,
            most_exact in prop::sample::select(vec![0, 30, MOST_EXACT]),
        ) {
            let numbers: Vec<f32> = seeds.into_iter().map(|x| f32::from(x % levels)).collect();
            let (row_costs, column_costs) = (&numbers[..words * rows], &numbers[36 * 6..][..words * columns]);
            let costs = Costs::new(row_costs, column_costs, rows, columns);
            let mut cell_of = match_in_rounds(&costs, candidates, most_exact).unwrap();
            prop_assert!(is_injection(&cell_of, &costs), "{cell_of:?}");
            let total = |cell_of: &[usize]| cell_of.iter().enumerate().map(|(w, c)| costs.in_cell(w, *c)).sum::<f64>();
            let before = total(&cell_of);
            exchange(&costs, &mut cell_of);
            prop_assert!(is_injection(&cell_of, &costs), "{cell_of:?}");
            prop_assert!(total(&cell_of) <= before);
        }
    }

    #[test]
    fn words_that_want_the_same_cells() {
        let line: Vec<f32> = (0..30).map(|x| x as f32).collect();
        let all = line.repeat(900);
        let costs = Costs::new(&all, &all, 30, 30);
        // The first round places four of the words.
        let cell_of = match_in_rounds(&costs, 4, 0).unwrap();
        assert!(is_injection(&cell_of, &costs));
    }

    #[test]
    fn those_that_would_lose_more_come_first() {
        // All words prefer the first cells, and the last word does so the most.
        let line = |word: usize| (0..3).map(move |x| (x * word) as f32);
        let all: Vec<f32> = (0..9).flat_map(line).collect();
        let costs = Costs::new(&all, &all, 3, 3);
        assert_eq!(one_by_one(&costs, &Table::new(&costs))[8], Some(0));
        let limits = Limits { candidates: 9, visits: 9 };
        assert_eq!(
            round(&costs, &Prices { rows: vec![0.0; 3], columns: vec![0.0; 3] }, &Table::new(&costs), limits)[8],
            Some(0)
        );
        let table = Table::new(&costs);
        let least = at_least_cost(&costs, &table).unwrap();
        assert_eq!(least[8], Some(0));
        assert_eq!(least[0], Some(8));
    }
}
