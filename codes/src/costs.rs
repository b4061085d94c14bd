//! This file sums what each word would cost, in nats, in each row and each column of a table, from one pass of a model
//! over a text.

use candle_core::Tensor;

use crate::assignment::{assign, Assignment};
use crate::checks::{check_float, check_sizes};
use crate::error::{Error, Result};
use crate::table::{CodeTable, TableConfig};
use crate::transfer::matrix;

/// These are the costs of each word in each row and each column of a table, in nats: the negative log-likelihoods
/// `[words, rows]` of all rows at the first code of each word, and `[words, columns]` of all columns at its second
/// code, summed over a text. They are what the text would cost if the word were there and the rest of the table stayed
/// (Kong et al., 2019, equation 6).
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
/// use mos_codes::{Assignment, CodeCosts, CodeTable, TableConfig, TargetCode};
///
/// # fn main() -> mos_codes::Result<()> {
/// // Two words share a table of 2 x 1, and the model prefers each in the other's row.
/// let config = TableConfig::light_rnn(2).with_table(2, 1);
/// let table = CodeTable::by_frequency(config, &[2.0, 1.0])?;
/// let log_probs = Tensor::new(&[[-3f32, -0.1, -9.0], [-0.1, -3.0, -9.0]], &Device::Cpu)?;
/// let mut costs = CodeCosts::new(&table);
/// costs.add(&log_probs, &[(0, TargetCode::First), (1, TargetCode::First)])?;
/// let better = costs.reallocate(&table, Assignment::Exact)?;
/// assert_eq!(better.row(0), [Some(1)]);
/// assert!(costs.total(&better)? < costs.total(&table)?);
/// # Ok(())
/// # }
/// ```
///
/// # References
///
/// Kong et al.: Fast and Simple Mixture of Softmaxes with BPE and Hybrid-LightRNN for Language Generation. AAAI 2019,
/// arXiv 1809.09296.
#[derive(Clone, Debug)]
pub struct CodeCosts {
    config: TableConfig,
    /// The index of each word among the words that share the table, or `None` if the word has a code of its own.
    shared_index: Vec<Option<usize>>,
    /// The costs `[shared words, rows]`.
    row_costs: Vec<f64>,
    /// The costs `[shared words, columns]`.
    column_costs: Vec<f64>,
}

/// A position has the first or the second code of a word as its target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetCode {
    /// The target is the first of two codes, or the only one.
    First,
    /// The target is the second of two codes.
    Second,
}

impl CodeCosts {
    /// Begins at zero for the words that share this table.
    pub fn new(table: &CodeTable) -> Self {
        let config = table.config();
        let mut shared_index = vec![None; config.words];
        table.shared().zip(0..).for_each(|((word, _), index)| shared_index[word as usize] = Some(index));
        let shared = shared_index.iter().flatten().count();
        CodeCosts {
            config,
            shared_index,
            row_costs: vec![0.0; shared * config.rows],
            column_costs: vec![0.0; shared * config.columns],
        }
    }

    /// Adds the costs of positions, whose targets are these codes of these words. Words with a code of their own have
    /// no costs, because they stay.
    ///
    /// # Shapes
    ///
    /// - log_probs: `[positions, codes]`
    /// - targets: one word, and one of its codes, for each position
    ///
    /// # Errors
    ///
    /// If shapes do not match, a word is not in the table, or a log-probability that is a cost is NaN or infinite, minus
    /// infinity too ([`Error::Distribution`]).
    pub fn add(&mut self, log_probs: &Tensor, targets: &[(u32, TargetCode)]) -> Result<()> {
        let codes = self.config.code_count();
        if log_probs.dims() != [targets.len(), codes] {
            return Err(Error::shape("log_probs", format!("[{}, {codes}]", targets.len()), log_probs.dims()));
        }
        check_float("log_probs", log_probs)?;
        let words = self.config.words;
        if let Some(index) = targets.iter().position(|(word, _)| *word as usize >= words) {
            let got = format!("{} at index {index}", targets[index].0);
            return Err(Error::config("targets", format!("words below {words}"), got));
        }
        let own = self.config.own;
        let mut added = Vec::new();
        let mut infinite: Option<u32> = None;
        let parts =
            [(TargetCode::First, own..own + self.config.rows), (TargetCode::Second, own + self.config.rows..codes)];
        for (target_code, codes) in parts {
            let positions = targets.iter().enumerate().filter(|(_, (_, code))| *code == target_code);
            let positions = positions
                .filter_map(|(position, (word, _))| Some((position as u32, self.shared_index[*word as usize]?)));
            let (positions, words): (Vec<u32>, Vec<usize>) = positions.unzip();
            if positions.is_empty() {
                continue;
            }
            let rows = Tensor::new(&*positions, log_probs.device())?;
            let rows = matrix(&log_probs.index_select(&rows, 0)?.narrow(1, codes.start, codes.len())?)?;
            for ((word, position), row) in words.into_iter().zip(positions).zip(rows) {
                if row.iter().any(|log_prob| !log_prob.is_finite()) {
                    infinite = Some(infinite.map_or(position, |first| first.min(position)));
                }
                added.push((target_code, word, row));
            }
        }
        if let Some(position) = infinite {
            return Err(Error::Distribution { position: position as usize });
        }
        // Nothing is added before every log-probability is known to be a number.
        for (target_code, word, log_probs) in added {
            let costs = match target_code {
                TargetCode::First => &mut self.row_costs,
                TargetCode::Second => &mut self.column_costs,
            };
            let costs = &mut costs[word * log_probs.len()..][..log_probs.len()];
            costs.iter_mut().zip(log_probs).for_each(|(cost, log_prob)| *cost -= log_prob);
        }
        Ok(())
    }

    /// Sums the costs, in nats, of the words in the cells that they have in `table`. With the model's own table, the
    /// sum is what their codes cost in the texts that were added.
    ///
    /// # Errors
    ///
    /// If the table has other sizes.
    pub fn total(&self, table: &CodeTable) -> Result<f64> {
        self.check(table)?;
        let (rows, columns) = (self.config.rows, self.config.columns);
        let cost = |(word, (_, cell)): (usize, (u32, usize))| {
            self.row_costs[word * rows + cell / columns] + self.column_costs[word * columns + cell % columns]
        };
        Ok(table.shared().enumerate().map(cost).sum())
    }

    /// Returns the table in which the words cost the least, or nearly the least ([`Assignment`]), and never more than
    /// in `table`. Words with a code of their own keep it.
    ///
    /// # Errors
    ///
    /// If the table has other sizes, a sum of costs is not from -1e30 to 1e30, the number of candidates is zero, or the
    /// product of words and cells is above 2^30 for [`Assignment::Exact`].
    pub fn reallocate(&self, table: &CodeTable, assignment: Assignment) -> Result<CodeTable> {
        self.check(table)?;
        if let Assignment::Approximate { candidates } = assignment {
            check_sizes(&[("candidates", candidates)])?;
        }
        if self.row_costs.is_empty() {
            return Ok(table.clone());
        }
        let cells = assign(&self.row_costs, &self.column_costs, self.config.rows, self.config.columns, assignment)?;
        let better = table.with_cells(&cells)?;
        // An approximate assignment may be worse than a table that is good already.
        Ok(if self.total(&better)? <= self.total(table)? { better } else { table.clone() })
    }

    /// Checks that a table has the sizes and the shared words of these costs.
    fn check(&self, table: &CodeTable) -> Result<()> {
        if table.config() != self.config {
            let expected = format!("{:?}", self.config);
            return Err(Error::config("table", expected, format!("{:?}", table.config())));
        }
        let mut is_shared = vec![false; self.shared_index.len()];
        table.shared().for_each(|(word, _)| is_shared[word as usize] = true);
        let differs = |(is_shared, index): (&bool, &Option<usize>)| *is_shared != index.is_some();
        match is_shared.iter().zip(&self.shared_index).position(differs) {
            None => Ok(()),
            Some(word) => {
                let [expected, got] =
                    if is_shared[word] { ["a code of its own", "a cell"] } else { ["a cell", "a code of its own"] };
                Err(Error::config("table", format!("{expected} for word {word}"), got))
            }
        }
    }
}
