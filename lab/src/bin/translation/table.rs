//! The table of codes of the target's words.

use crate::kinds::TableShape;
use candle_core::Device;
use lab::data::words::{Words, END};
use lab::training::{Recipe, TableFlags, WORDS_PER_CODE};
use lab::{data::Data, Result};
use mos_codes::{CodeTable, TableConfig};

/// The language model that learns a table.
const LEARNER: Recipe = Recipe { hidden: 128, lr: 0.004, decay: 0.8, ..Recipe::BASE };

/// One in this many texts is for the validation of a learned table.
const VALIDATION: usize = 20;

/// Returns the table of the words of these texts; the first `special` ones have codes of their own, their ids.
pub(crate) fn choose(
    flags: &TableFlags,
    shape: TableShape,
    words: &Words,
    special: usize,
    texts: &[Vec<u32>],
    seed: u64,
    device: &Device,
) -> Result<CodeTable> {
    let config = config(flags, shape, words.len(), special)?;
    let mut counts = vec![1.0; words.len()];
    texts.iter().flatten().for_each(|&id| counts[id as usize] += 1.0);
    counts[..special].fill(f64::INFINITY);
    if texts.len() < 2 {
        return Err(format!("a table is learned from at least 2 targets, got {}", texts.len()).into());
    }
    let (valid, train) = texts.split_at((texts.len() / VALIDATION).max(1));
    let text = Data::new("the targets".into(), words.all(), one_text(train), one_text(valid));
    let table = flags.choose(config, words.all(), &counts, &text, &Recipe { seed, ..LEARNER }, device)?;
    flags.draw(&table, words.all(), &counts)?;
    Ok(table)
}

/// Returns texts one after the other, each after an end.
fn one_text(texts: &[Vec<u32>]) -> Vec<u32> {
    let texts = texts.iter().flat_map(|text| text.iter().copied().chain([END]));
    std::iter::once(END).chain(texts).collect()
}

fn config(flags: &TableFlags, shape: TableShape, words: usize, special: usize) -> Result<TableConfig> {
    if shape == TableShape::Light {
        return Ok(TableConfig::light_rnn(words).with_own(special));
    }
    let fewest = special + TableConfig::light_rnn(words - special).code_count();
    let codes = flags.codes.unwrap_or(fewest.max(words / WORDS_PER_CODE));
    if codes < fewest {
        let expected = format!("expected at least {fewest} for {words} words, {special} of them special tokens");
        return Err(format!("--codes is {codes}, {expected}").into());
    }
    Ok(TableConfig::hybrid(words, codes)?)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::toy;
    use crate::vocabulary::Vocabulary;
    use lab::data::words::SPECIAL;
    use lab::training::TableKind;

    /// Returns the targets of the built-in task as words, and as codes in a table.
    pub(crate) fn vocabularies(shape: TableShape, flags: &TableFlags) -> Result<[Vocabulary; 2]> {
        let pairs = toy::corpus(300, 1, 7).train;
        let vocabulary = Vocabulary::words(pairs.iter().map(|pair| pair.target.as_str()), 1, &[]);
        let texts = pairs.iter().map(|pair| vocabulary.encode(&pair.target)).collect::<Result<Vec<_>>>()?;
        let words = vocabulary.as_words().expect("words");
        let table = choose(flags, shape, words, SPECIAL.len(), &texts, 3, &Device::Cpu)?;
        Ok([vocabulary.clone(), vocabulary.with_table(table)?])
    }

    fn flags(kind: TableKind) -> TableFlags {
        TableFlags { table: Some(kind), ..TableFlags::default() }
    }

    pub(crate) fn random() -> TableFlags {
        flags(TableKind::Random)
    }

    pub(crate) fn by_frequency() -> TableFlags {
        flags(TableKind::Frequency)
    }

    #[test]
    fn sizes_are_those_of_the_flags_or_fit() {
        let sizes = |shape, flags: &TableFlags| vocabularies(shape, flags).expect("fits").map(|vocab| vocab.len());
        let [words, light] = sizes(TableShape::Light, &by_frequency());
        assert!(words > 100 && light < words / 3, "{words} {light}");
        let [_, fewest] = sizes(TableShape::Hybrid, &by_frequency());
        assert!(fewest <= light && fewest > words / 5, "{words} {fewest}");
        let codes = |codes| TableFlags { codes: Some(codes), ..random() };
        assert_eq!(sizes(TableShape::Hybrid, &codes(fewest + 20))[1], fewest + 20);
        assert_eq!(sizes(TableShape::Hybrid, &codes(10 * words))[1], words);
        let error = vocabularies(TableShape::Hybrid, &codes(fewest - 1)).err().expect("must fail").to_string();
        assert!(error.contains("--codes") && error.contains(&fewest.to_string()), "{error}");
        assert!(codes(9).check(false, true).is_err() && codes(9).check(true, true).is_ok());
        assert!(random().check(false, false).expect_err("words").to_string().contains("--table"));
    }

    #[test]
    fn a_table_is_learned_from_the_targets() {
        let [_, random] = vocabularies(TableShape::Light, &random()).expect("fits");
        let [words, learned] = vocabularies(TableShape::Light, &TableFlags::default()).expect("learns");
        assert_eq!(learned.len(), random.len());
        assert_ne!(learned.codes().expect("codes").table(), random.codes().expect("codes").table());
        let text = "hodi lo kano grando";
        assert_eq!(
            learned.decode(&learned.encode(text).unwrap()).unwrap(),
            words.decode(&words.encode(text).unwrap()).unwrap()
        );
    }
}
