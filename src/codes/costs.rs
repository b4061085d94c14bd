//! What each word would cost in each row and each column of a table, from one pass of a model over a text.

use candle_core::{DType, Device, Tensor};

use super::assignment::{assign, Assignment};
use super::table::{CodeTable, TableConfig};
use crate::error::{Error, Result};

/// Summed negative log-likelihoods `[words, rows]` and `[words, columns]` of all rows at the first code of each word,
/// and of all columns at its second: what the text would cost, in nats, if the word were there and the rest of the table
/// stayed (Kong et al., AAAI 2019, equation 6).
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
/// use mos_head::{Assignment, CodeCosts, CodePlace, CodeTable, TableConfig};
///
/// # fn main() -> mos_head::Result<()> {
/// // Two words in a table of 2 x 1; the model prefers each in the other's row.
/// let config = TableConfig::light_rnn(2).with_table(2, 1);
/// let table = CodeTable::by_frequency(config, &[2.0, 1.0])?;
/// let log_probs = Tensor::new(&[[-3f32, -0.1, -9.0], [-0.1, -3.0, -9.0]], &Device::Cpu)?;
/// let mut costs = CodeCosts::new(&table);
/// costs.add(&log_probs, &[(0, CodePlace::First), (1, CodePlace::First)])?;
/// let better = costs.reallocate(&table, Assignment::Exact)?;
/// assert_eq!(better.row(0), [Some(1)]);
/// assert!(costs.total(&better)? < costs.total(&table)?);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct CodeCosts {
    config: TableConfig,
    /// Of each word: its place among those that share the table.
    shared: Vec<Option<usize>>,
    rows: Vec<f32>,
    columns: Vec<f32>,
}

/// Which code of a word a position has as its target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodePlace {
    /// The first of two, or the only one.
    First,
    /// The second.
    Second,
}

impl CodeCosts {
    /// No costs yet, for the words that share this table.
    pub fn new(table: &CodeTable) -> Self {
        let config = table.config();
        let mut shared = vec![None; config.words()];
        table.shared().zip(0..).for_each(|((word, _), place)| shared[word as usize] = Some(place));
        let count = shared.iter().flatten().count();
        CodeCosts {
            config,
            shared,
            rows: vec![0.0; count * config.rows()],
            columns: vec![0.0; count * config.columns()],
        }
    }

    /// Adds the costs of positions, whose targets are these codes of these words. Words with a code of their own have
    /// no costs: they stay.
    ///
    /// # Shapes
    ///
    /// - log_probs: `[positions, codes]`
    /// - targets: one for each position
    ///
    /// # Errors
    ///
    /// If shapes do not match, or a word is not in the table.
    pub fn add(&mut self, log_probs: &Tensor, targets: &[(u32, CodePlace)]) -> Result<()> {
        let codes = self.config.codes();
        if log_probs.dims() != [targets.len(), codes] {
            return Err(Error::shape("log_probs", format!("[{}, {codes}]", targets.len()), log_probs.dims()));
        }
        let words = self.config.words();
        if let Some((word, _)) = targets.iter().find(|(word, _)| *word as usize >= words) {
            return Err(Error::config("targets", format!("words below {words}"), word));
        }
        let own = self.config.own();
        let parts = [
            (CodePlace::First, &mut self.rows, own..own + self.config.rows()),
            (CodePlace::Second, &mut self.columns, own + self.config.rows()..codes),
        ];
        for (place, costs, part) in parts {
            let positions = targets.iter().enumerate().filter(|(_, target)| target.1 == place);
            let positions = positions.filter_map(|(at, (word, _))| Some((at as u32, self.shared[*word as usize]?)));
            let (positions, words): (Vec<u32>, Vec<usize>) = positions.unzip();
            if positions.is_empty() {
                continue;
            }
            let positions = Tensor::new(positions, log_probs.device())?;
            let found = log_probs.index_select(&positions, 0)?.narrow(1, part.start, part.len())?;
            let found = found.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.to_vec2::<f32>()?;
            for (word, found) in words.into_iter().zip(found) {
                let costs = &mut costs[word * part.len()..][..part.len()];
                costs.iter_mut().zip(found).for_each(|(cost, log_prob)| *cost -= log_prob);
            }
        }
        Ok(())
    }

    /// The costs of the words that share this table, in nats: the sum of [`CodeCosts::add`] if it is the table of the
    /// model.
    ///
    /// # Errors
    ///
    /// If the table has other sizes.
    pub fn total(&self, table: &CodeTable) -> Result<f64> {
        self.check(table)?;
        let (rows, columns) = (self.config.rows(), self.config.columns());
        let cost = |(word, (_, cell)): (usize, (u32, usize))| {
            f64::from(self.rows[word * rows + cell / columns])
                + f64::from(self.columns[word * columns + cell % columns])
        };
        Ok(table.shared().enumerate().map(cost).sum())
    }

    /// The table in which these words cost the least; the same words keep codes of their own.
    ///
    /// # Errors
    ///
    /// If the table has other sizes, or a cost is not finite.
    pub fn reallocate(&self, table: &CodeTable, assignment: Assignment) -> Result<CodeTable> {
        self.check(table)?;
        let (rows, columns) = (self.config.rows(), self.config.columns());
        if self.rows.is_empty() {
            return Ok(table.clone());
        }
        table.with_cells(&assign(&self.rows, &self.columns, rows, columns, assignment)?)
    }

    fn check(&self, table: &CodeTable) -> Result<()> {
        let is_shared = |word: usize| self.shared[word].is_some();
        let matches = table.config() == self.config && table.shared().all(|(word, _)| is_shared(word as usize));
        match matches {
            true => Ok(()),
            false => Err(Error::config(
                "table",
                format!("{:?} of the same words", self.config),
                format!("{:?}", table.config()),
            )),
        }
    }
}
