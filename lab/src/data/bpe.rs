//! Byte-pair encoding of words.

use crate::Result;
use std::collections::BTreeSet;
use tokenizers::models::bpe::{BpeTrainer, BPE};
use tokenizers::{AddedToken, Model, Trainer};

/// Ends the last piece of a word.
pub const END_OF_WORD: &str = "</w>";

/// Learns `size` pieces from words: the `special` ones, then merges of pairs that occur at least `least` times.
pub fn train<'a>(
    words: impl Iterator<Item = &'a str> + Clone + Send,
    special: &[&str],
    size: usize,
    least: u64,
) -> Result<BPE> {
    // The trainer numbers the last characters of words in the random order of a hash map; of pairs that are equally
    // frequent, numbers decide.
    let ends: BTreeSet<char> = words.clone().filter_map(|word| word.chars().next_back()).collect();
    let ends: Vec<String> = ends.into_iter().map(|end| format!("{end}{END_OF_WORD}")).collect();
    let first = special.iter().copied().chain(ends.iter().map(String::as_str));
    let mut trainer = BpeTrainer::builder()
        .show_progress(false)
        .vocab_size(size)
        .min_frequency(least)
        .special_tokens(first.map(|piece| AddedToken::from(piece, true)).collect())
        .end_of_word_suffix(END_OF_WORD.into())
        .build();
    trainer.feed(words, |word| Ok(vec![word.to_owned()])).map_err(failed)?;
    let mut model = BPE::default();
    trainer.train(&mut model).map_err(failed)?;
    Ok(model)
}

fn failed(error: tokenizers::Error) -> Box<dyn std::error::Error> {
    format!("the byte-pair encoding failed: {error}").into()
}

/// Learns `size` pieces, or one for each character if there are more, from words that occur `counts` times. Returns the
/// ids of the pieces of each word, and the pieces.
pub(crate) fn pieces(words: &[String], counts: &[f64], size: usize) -> Result<(Vec<Vec<u32>>, Vec<String>)> {
    let text = words.iter().zip(counts).flat_map(|(word, count)| {
        let word: &str = word;
        std::iter::repeat_n(word, count.max(1.0) as usize)
    });
    let model = train(text, &[], size, 0)?;
    let encode = |word: &String| -> Result<Vec<u32>> {
        Ok(model.tokenize(word).map_err(failed)?.into_iter().map(|token| token.id).collect())
    };
    let sequences = words.iter().map(encode).collect::<Result<_>>()?;
    let mut names = vec![String::new(); model.get_vocab_size()];
    model.get_vocab().into_iter().for_each(|(piece, id)| names[id as usize] = piece);
    Ok((sequences, names))
}

/// Returns the words that pieces spell.
pub(crate) fn join<'a>(pieces: impl Iterator<Item = &'a str>) -> Vec<String> {
    let text: String = pieces.collect();
    text.split(END_OF_WORD).filter(|word| !word.is_empty()).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_join_to_their_words() {
        let words = ["the", "then", "lathe", "<eos>", "zoo"].map(String::from);
        let counts = [50.0, 3.0, 2.0, 20.0, 1.0];
        let (sequences, names) = pieces(&words, &counts, 26).expect("trains");
        assert_eq!(pieces(&words, &counts, 26).expect("trains"), (sequences.clone(), names.clone()));
        assert_eq!((sequences[0].len(), names.len()), (1, 26));
        let all = sequences.concat();
        assert!(all.len() > words.len());
        assert_eq!(join(all.iter().map(|&id| names[id as usize].as_str())), words);
    }
}
