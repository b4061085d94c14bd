//! A table says which words have a code of their own, and which ones share their row and their column with others.

use candle_core::{DType, Device, Tensor};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::SeedableRng;

use crate::checks::{check_at_most, check_product, check_sizes};
use crate::codebook::{Codebook, MOST_IDS};
use crate::error::{Error, Result};

/// This configuration has the sizes of a [`CodeTable`].
///
/// # Examples
///
/// ```
/// use mos_codes::TableConfig;
///
/// # fn main() -> mos_codes::Result<()> {
/// // With 100 rows and 100 columns, a head is over 200 codes in place of 10,000 words.
/// assert_eq!(TableConfig::light_rnn(10_000).code_count(), 200);
/// // With 2,000 codes, 1,818 words have one of their own, and the others share 91 rows and 91 columns.
/// let config = TableConfig::hybrid(10_000, 2000)?;
/// assert_eq!((config.own, config.rows, config.columns), (1818, 91, 91));
/// # Ok(())
/// # }
/// ```
///
/// # References
///
/// - Li, Qin, Yang, Hu, Liu: LightRNN: Memory and Computation-Efficient Recurrent Neural Networks. NIPS 2016, arXiv
///   1610.09893.
/// - Kong et al.: Fast and Simple Mixture of Softmaxes with BPE and Hybrid-LightRNN for Language Generation. AAAI 2019,
///   arXiv 1809.09296.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TableConfig {
    /// The number of words.
    pub words: usize,
    /// The number of words with a code of their own: the codes 0 to `own - 1`.
    pub own: usize,
    /// The number of rows, which are the first codes of the other words. They are numbered after the words' own codes.
    pub rows: usize,
    /// The number of columns, which are the second codes of the other words. They are numbered after the rows.
    pub columns: usize,
}

impl TableConfig {
    /// Returns the sizes of LightRNN (Li et al., 2016): the words share a square table, the smallest that holds them,
    /// and every word has two codes, its row and its column.
    pub fn light_rnn(words: usize) -> Self {
        let side = (words as f64).sqrt().ceil() as usize;
        TableConfig { words, own: 0, rows: side, columns: side }
    }

    /// Returns the sizes of Hybrid-LightRNN (Kong et al., 2019): as many of the `code_count` codes as possible are
    /// words by themselves, and the other words share a square table, the smallest that holds them.
    ///
    /// # Errors
    ///
    /// If the codes are too few for the words, or there are more than 2^24 words.
    pub fn hybrid(words: usize, code_count: usize) -> Result<Self> {
        check_at_most("words", words, MOST_IDS)?;
        if code_count >= words {
            return Ok(TableConfig { words, own: words, rows: 0, columns: 0 });
        }
        // A table of this side needs a code for each of its rows and columns, and for each word that has no cell.
        let codes_needed = |side: usize| 2 * side + words.saturating_sub(side * side);
        let sides = 1..=(words as f64).sqrt().ceil() as usize;
        match sides.clone().find(|side| codes_needed(*side) <= code_count) {
            Some(side) => Ok(TableConfig { words, own: code_count - 2 * side, rows: side, columns: side }),
            None => {
                let least = sides.map(codes_needed).min().unwrap_or(0);
                Err(Error::config("codes", format!("at least {least} for {words} words"), code_count))
            }
        }
    }

    /// Sets the shape of the table that words share. A [`CodeTable`] of more than 2^24 places is an error when it is
    /// made.
    pub fn with_table(self, rows: usize, columns: usize) -> Self {
        TableConfig { rows, columns, ..self }
    }

    /// Sets the number of words with a code of their own.
    pub fn with_own(self, own: usize) -> Self {
        TableConfig { own, ..self }
    }

    /// Returns the number of codes, which is the size of a head's vocabulary.
    pub fn code_count(&self) -> usize {
        self.own.saturating_add(self.rows).saturating_add(self.columns)
    }

    fn validate(&self) -> Result<()> {
        check_sizes(&[("words", self.words)])?;
        let cells = self.rows.saturating_mul(self.columns);
        let places = self.own.saturating_add(cells);
        if places > MOST_IDS || self.rows.max(self.columns) > MOST_IDS {
            let Self { own, rows, columns, .. } = self;
            let got = format!("{own} codes and a table of {rows} x {columns}");
            return Err(Error::config("table", format!("at most {MOST_IDS} places"), got));
        }
        if places < self.words {
            let Self { own, rows, columns, .. } = self;
            let got = format!("{own} codes and a table of {rows} x {columns}");
            return Err(Error::config("table", format!("places for {} words", self.words), got));
        }
        // `CodeCosts` holds this many costs of the words that share the table.
        let shared = self.words.saturating_sub(self.own);
        check_product("words * (rows + columns)", shared, self.rows + self.columns)
    }
}

/// A table is a bijection of words and codes. Frequent words have a code of their own. Every other word has a cell of
/// the table and two codes, its row and its column, each of which it shares with the other words there.
///
/// # Examples
///
/// ```
/// use mos_codes::{CodeTable, TableConfig};
///
/// # fn main() -> mos_codes::Result<()> {
/// let counts = [5.0, 100.0, 7.0, 1.0, 1.0, 3.0];
/// let config = TableConfig::light_rnn(6).with_own(1).with_table(2, 3);
/// let table = CodeTable::by_frequency(config, &counts)?;
/// let book = table.codebook();
/// assert_eq!(book.codes_of(1)?, [0]); // the most frequent word
/// assert_eq!(book.codes_of(2)?, [1, 3]); // the first row and the first column
/// assert_eq!(table.row(0), [Some(2), Some(0), Some(5)]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CodeTable {
    config: TableConfig,
    /// The place of each word: its own code, or `own` plus the number of its cell. Cells are numbered row by row.
    places: Vec<usize>,
    book: Codebook,
}

impl CodeTable {
    /// Orders the words by falling counts, of which there is one for each word. The first words have codes of their
    /// own, and the others fill the table row by row. Among equal counts, the lowest id comes first.
    ///
    /// # Errors
    ///
    /// If the table has not enough places, or more than 2^24, there is not one count for each word, or a count is NaN.
    pub fn by_frequency(config: TableConfig, counts: &[f64]) -> Result<Self> {
        let words = words_by_count(config, counts)?;
        let mut places = vec![0; words.len()];
        words.iter().zip(0..).for_each(|(&word, place)| places[word] = place);
        Self::from_places(config, places)
    }

    /// Like [`CodeTable::by_frequency`], but puts the words that share the table into random cells.
    ///
    /// # Errors
    ///
    /// If [`CodeTable::by_frequency`] fails for these arguments.
    pub fn random(config: TableConfig, counts: &[f64], seed: u64) -> Result<Self> {
        let words = words_by_count(config, counts)?;
        let mut cells: Vec<usize> = (config.own..config.own + config.rows * config.columns).collect();
        cells.shuffle(&mut StdRng::seed_from_u64(seed));
        let mut places = vec![0; words.len()];
        words.iter().zip((0..config.own).chain(cells)).for_each(|(&word, place)| places[word] = place);
        Self::from_places(config, places)
    }

    /// Makes the table from codes `[words, 2]` in u32, as [`CodeTable::codes`] returns them.
    ///
    /// # Errors
    ///
    /// If shape or dtype is wrong, or the codes are no bijection of the words and places of such a table.
    pub fn from_codes(config: TableConfig, codes: &Tensor) -> Result<Self> {
        config.validate()?;
        if codes.dims() != [config.words, 2] {
            return Err(Error::shape("codes", format!("[{}, 2]", config.words), codes.dims()));
        }
        if codes.dtype() != DType::U32 {
            return Err(Error::DType { argument: "codes", expected: "u32".into(), got: codes.dtype() });
        }
        let TableConfig { own, rows, columns, .. } = config;
        let place = |(word, codes): (usize, &Vec<u32>)| {
            let (first, second) = (codes[0] as usize, codes[1] as usize);
            if first < own && first == second {
                return Ok(first);
            }
            match (first.checked_sub(own), second.checked_sub(own + rows)) {
                (Some(row), Some(column)) if row < rows && column < columns => Ok(own + row * columns + column),
                _ => Err(Error::config("codes", format!("the codes of a place for word {word}"), format!("{codes:?}"))),
            }
        };
        let codes = codes.to_device(&Device::Cpu)?.to_vec2::<u32>()?;
        let places = codes.iter().enumerate().map(place).collect::<Result<_>>()?;
        Self::from_places(config, places).map_err(|error| match error {
            Error::Config { expected, got, .. } => Error::Config { argument: "codes", expected, got },
            error => error,
        })
    }

    fn from_places(config: TableConfig, places: Vec<usize>) -> Result<Self> {
        config.validate()?;
        let TableConfig { own, rows, columns, .. } = config;
        let sequences = places.iter().map(|&place| match place.checked_sub(own) {
            None => vec![place as u32],
            Some(cell) => vec![(own + cell / columns) as u32, (own + rows + cell % columns) as u32],
        });
        let book = Codebook::new(config.code_count(), &sequences.collect::<Vec<_>>())?;
        Ok(CodeTable { config, places, book })
    }

    /// Returns the sizes.
    pub fn config(&self) -> TableConfig {
        self.config
    }

    /// Returns the bijection.
    pub fn codebook(&self) -> &Codebook {
        &self.book
    }

    /// Returns the codes of each word, to be saved with a model. A word with one code has it twice.
    ///
    /// # Shapes
    ///
    /// - returns `[words, 2]`, u32
    ///
    /// # Errors
    ///
    /// None is known: candle's constructor of tensors returns a `Result`, but does not fail on the CPU for a matching
    /// shape.
    pub fn codes(&self) -> Result<Tensor> {
        let mut all = Vec::with_capacity(2 * self.places.len());
        for word in 0..self.places.len() as u32 {
            let codes = self.book.codes_of(word)?;
            all.extend([codes[0], codes[codes.len() - 1]]);
        }
        Ok(Tensor::from_vec(all, (self.places.len(), 2), &Device::Cpu)?)
    }

    /// Returns the words of a row, by column. A row beyond the last has none.
    pub fn row(&self, row: usize) -> Vec<Option<u32>> {
        let TableConfig { own, columns, .. } = self.config;
        let mut words = vec![None; if row < self.config.rows { columns } else { 0 }];
        for (word, place) in (0u32..).zip(&self.places) {
            if let Some(cell) = place.checked_sub(own).filter(|cell| cell / columns == row) {
                words[cell % columns] = Some(word);
            }
        }
        words
    }

    /// Returns the words that share the table, and their cells.
    pub(crate) fn shared(&self) -> impl Iterator<Item = (u32, usize)> + '_ {
        let own = self.config.own;
        (0u32..).zip(&self.places).filter_map(move |(word, place)| Some((word, place.checked_sub(own)?)))
    }

    /// Moves the words that share the table to these cells, in the order of [`CodeTable::shared`].
    pub(crate) fn with_cells(&self, cells: &[usize]) -> Result<Self> {
        let (own, mut places) = (self.config.own, self.places.clone());
        for ((word, _), cell) in self.shared().zip(cells) {
            places[word as usize] = own + cell;
        }
        Self::from_places(self.config, places)
    }
}

/// Checks the sizes and the counts, and orders the words by falling counts.
fn words_by_count(config: TableConfig, counts: &[f64]) -> Result<Vec<usize>> {
    config.validate()?;
    if counts.len() != config.words {
        return Err(Error::config("counts", format!("one for each of {} words", config.words), counts.len()));
    }
    if let Some(index) = counts.iter().position(|count| count.is_nan()) {
        return Err(Error::config("counts", "numbers", format!("NaN at index {index}")));
    }
    let mut words: Vec<usize> = (0..counts.len()).collect();
    words.sort_by(|&a, &b| counts[b].total_cmp(&counts[a]));
    Ok(words)
}
