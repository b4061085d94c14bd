//! Texts of codes: each word is one or two codes of a table (LightRNN, Hybrid-LightRNN), or pieces of a byte-pair
//! encoding.

use super::{bpe, dataset::Data};
use crate::{layers::Checkpoint, Result};
use candle_core::{Device, Tensor};
use mos_codes::{CodeTable, TableConfig};
use serde_json::{json, Value};

/// A coding has the codes of each word.
pub struct Coding {
    sequences: Vec<Vec<u32>>,
    /// A readable name of each code.
    names: Vec<String>,
    table: Option<CodeTable>,
}

impl Coding {
    /// Returns the codes of a table.
    pub fn from_table(table: &CodeTable, words: &[String]) -> Result<Self> {
        let book = table.codebook();
        let config = table.config();
        let rows = (0..config.rows).map(|row| format!("row {row}"));
        let columns = (0..config.columns).map(|column| format!("column {column}"));
        let mut names = vec![String::new(); config.own].into_iter().chain(rows).chain(columns).collect::<Vec<_>>();
        let mut sequences = Vec::with_capacity(words.len());
        for (id, word) in (0u32..).zip(words) {
            let codes = book.codes_of(id)?;
            if let [code] = codes {
                names[*code as usize] = word.clone();
            }
            sequences.push(codes.to_vec());
        }
        Ok(Coding { sequences, names, table: Some(table.clone()) })
    }

    /// Makes pieces of words that occur `counts` times: `size` pieces, if the characters are not more.
    pub fn from_pieces(words: &[String], counts: &[f64], size: usize) -> Result<Self> {
        let (sequences, names) = bpe::pieces(words, counts, size)?;
        Ok(Coding { sequences, names, table: None })
    }

    /// Returns a readable name of each code.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Returns the table, unless words are pieces of a byte-pair encoding.
    pub fn table(&self) -> Option<&CodeTable> {
        self.table.as_ref()
    }

    /// Returns the codes of a text. Its first token is an input only, so the first word keeps only its last code.
    pub fn encode(&self, text: &[u32]) -> Vec<u32> {
        self.encode_with(text, |_, code, _| code)
    }

    /// Encodes a text as `encode` does, with `f(word, code, place)` instead of each code. `place` is the code's index
    /// in its word.
    pub(crate) fn encode_with(&self, text: &[u32], f: impl Fn(u32, u32, usize) -> u32) -> Vec<u32> {
        let codes = text.iter().flat_map(|&word| {
            let codes = self.sequences[word as usize].iter().enumerate();
            codes.map(move |(place, &code)| (word, code, place))
        });
        let skipped = text.first().map_or(0, |&word| self.sequences[word as usize].len() - 1);
        codes.skip(skipped).map(|(word, code, place)| f(word, code, place)).collect()
    }

    /// Returns the mean number of codes per word among the targets of a text.
    pub fn per_word(&self, text: &[u32]) -> f64 {
        let codes: usize = text.iter().skip(1).map(|&word| self.sequences[word as usize].len()).sum();
        codes as f64 / (text.len() - 1) as f64
    }

    /// Returns the data with its texts as codes.
    pub fn data(&self, words: &Data<u32>) -> Data<u32> {
        let data = Data::new(words.name.clone(), &self.names, self.encode(&words.train), self.encode(&words.valid));
        Data { per_word: [self.per_word(&words.train), self.per_word(&words.valid)], ..data }
    }

    /// Returns the words that codes spell. A word of a table that lacks its second code at the end is left out.
    pub fn decode(&self, codes: &[u32], words: &[String]) -> Result<Vec<String>> {
        match &self.table {
            None => Ok(bpe::join(codes.iter().map(|&code| self.names[code as usize].as_str()))),
            Some(table) => {
                let book = table.codebook();
                let whole = book.decode(codes).or_else(|_| book.decode(&codes[..codes.len() - 1]))?;
                Ok(whole.into_iter().map(|word| words[word as usize].clone()).collect())
            }
        }
    }
}

/// Returns a table as JSON: its sizes, and the codes of each word.
pub fn table_json(table: &CodeTable) -> Result<Value> {
    let TableConfig { own, rows, columns, .. } = table.config();
    Ok(json!({ "own": own, "rows": rows, "columns": columns, "codes": table.codes()?.to_vec2::<u32>()? }))
}

/// Returns the table of [`table_json`].
pub fn table_from_json(value: &Value) -> Result<CodeTable> {
    let size = |name: &str| -> Result<usize> { Ok(serde_json::from_value(value[name].clone())?) };
    let codes: Vec<[u32; 2]> = serde_json::from_value(value["codes"].clone())?;
    let words = codes.len();
    let config = TableConfig::light_rnn(words).with_own(size("own")?).with_table(size("rows")?, size("columns")?);
    Ok(CodeTable::from_codes(config, &Tensor::from_vec(codes.concat(), (words, 2), &Device::Cpu)?)?)
}

/// Returns the table of this name in a checkpoint, which must have these sizes.
pub fn load_table(file: &Checkpoint, name: &str, config: TableConfig) -> Result<CodeTable> {
    let table = table_from_json(&serde_json::from_str(&file.get::<String>(name)?)?)?;
    let sizes = |config: TableConfig| {
        [("words", config.words), ("own", config.own), ("rows", config.rows), ("columns", config.columns)]
    };
    for ((key, stored), (_, size)) in sizes(table.config()).into_iter().zip(sizes(config)) {
        if stored != size {
            return Err(format!("the table has {key} {stored}, but this run has {key} {size}: see --codes").into());
        }
    }
    Ok(table)
}

/// Writes a table to a checkpoint under this name.
pub fn insert_table(file: &mut Checkpoint, name: &str, table: &CodeTable) -> Result<()> {
    file.metadata.insert(name.into(), table_json(table)?.to_string());
    Ok(())
}
