//! Words as sequences of one or two codes, and which code may follow which.

use candle_core::Tensor;
use lab::data::words::Words;
use lab::Result;
use mos_codes::CodeTable;

/// The largest number of codes of a word.
pub(crate) const LONGEST: usize = 2;

#[derive(Clone)]
pub(crate) struct Codes {
    words: Words,
    table: CodeTable,
}

impl Codes {
    pub(crate) fn new(words: Words, table: CodeTable) -> Result<Self> {
        let (known, placed) = (words.len(), table.config().words);
        if known != placed {
            return Err(format!("the table of codes has {placed} words, but the vocabulary has {known}").into());
        }
        Ok(Self { words, table })
    }

    pub(crate) fn words(&self) -> &Words {
        &self.words
    }

    pub(crate) fn table(&self) -> &CodeTable {
        &self.table
    }

    /// Returns the number of codes.
    pub(crate) fn len(&self) -> usize {
        self.table.config().code_count()
    }

    pub(crate) fn encode(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.table.codebook().encode(&self.words.encode(text))?)
    }

    pub(crate) fn decode(&self, codes: &[u32]) -> Result<String> {
        self.words.decode(&self.table.codebook().decode(codes)?)
    }

    /// Returns what is added to the log-probabilities of the next codes, `[rows, codes]`: minus infinity for those that
    /// no word has after the `last` ones `[rows]`.
    pub(crate) fn mask(&self, last: &Tensor) -> Result<Tensor> {
        let firsts: Vec<_> = last.to_vec1::<u32>()?.into_iter().map(|code| self.opens(code).then_some(code)).collect();
        Ok(self.table.codebook().mask(&firsts, last.device())?)
    }

    /// Returns `codes` without a word at the end that lacks its second code, as after a search that its maximum length
    /// ends.
    pub(crate) fn whole(&self, mut codes: Vec<u32>) -> Vec<u32> {
        codes.pop_if(|last| self.opens(*last));
        codes
    }

    /// Returns whether a second code follows: rows are first codes only.
    fn opens(&self, code: u32) -> bool {
        self.table.codebook().advance(None, code).is_ok_and(|first| first.is_some())
    }
}

#[cfg(test)]
mod tests {
    use crate::table::tests::{by_frequency, random, vocabularies};
    use crate::{kinds::TableShape, vocabulary::Vocabulary};
    use candle_core::{Device, Tensor};
    use lab::data::words::{END, PAD, SPECIAL, START};

    const TEXT: &str = "hodi lo kano grando dos gatas viejas vidat";

    #[test]
    fn texts_are_restored_also_after_json() {
        for (shape, flags) in
            [(TableShape::Light, random()), (TableShape::Hybrid, random()), (TableShape::Light, by_frequency())]
        {
            let [words, coded] = vocabularies(shape, &flags).unwrap();
            let again = Vocabulary::from_json(&coded.to_json().unwrap()).unwrap();
            assert_eq!((again.len(), again.kind()), (coded.len(), "code"));
            let codes = coded.encode(TEXT).unwrap();
            assert_eq!(again.encode(TEXT).unwrap(), codes);
            assert_eq!(again.decode(&codes).unwrap(), words.decode(&words.encode(TEXT).unwrap()).unwrap());
            assert!(codes.len() > 8, "{codes:?}");
            // Special tokens keep their ids.
            let special: Vec<u32> = (0..SPECIAL.len() as u32).collect();
            assert_eq!(coded.decode(&special).unwrap(), SPECIAL.join(" "));
            assert_eq!(coded.encode("zzz").unwrap(), words.encode("zzz").unwrap());
        }
    }

    #[test]
    fn words_are_neither_cut_nor_ended_within() {
        let [_, coded] = vocabularies(TableShape::Light, &random()).unwrap();
        let codes = coded.codes().unwrap();
        let text = coded.encode("hodi lo").unwrap();
        assert_eq!(text.len(), 4);
        assert_eq!(codes.whole(text.clone()), text);
        assert_eq!(codes.whole(text[..3].to_vec()), text[..2]);
        assert_eq!((codes.whole(vec![]), codes.whole(vec![START])), (vec![], vec![START]));

        let last = Tensor::new(&[START, text[0], text[1]], &Device::Cpu).unwrap();
        let mask = codes.mask(&last).unwrap().to_vec2::<f32>().unwrap();
        let allowed = |row: usize, code: u32| mask[row][code as usize] == 0.0;
        for (row, is_between) in [(0, true), (1, false), (2, true)] {
            for code in [END, PAD, text[0], text[2]] {
                assert_eq!(allowed(row, code), is_between, "{code} after row {row}");
            }
            assert_eq!(allowed(row, text[1]), !is_between);
        }
    }
}
