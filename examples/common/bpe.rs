//! Byte-pair encoding of the words of a vocabulary.

use super::Result;
use tokenizers::models::bpe::{BpeTrainer, BPE};
use tokenizers::{Model, Trainer};

/// Ends the last piece of a word.
const END_OF_WORD: &str = "</w>";

/// The pieces of each word, as ids, and the pieces: `size` of them, if the characters are not more, learned from words
/// that occur so often.
pub(crate) fn pieces(words: &[String], counts: &[f64], size: usize) -> Result<(Vec<Vec<u32>>, Vec<String>)> {
    let failed = |error: tokenizers::Error| format!("the byte-pair encoding failed: {error}");
    let mut trainer =
        BpeTrainer::builder().show_progress(false).vocab_size(size).end_of_word_suffix(END_OF_WORD.into()).build();
    let text = words.iter().zip(counts).flat_map(|(word, count)| std::iter::repeat_n(word, count.max(1.0) as usize));
    trainer.feed(text, |word| Ok(vec![word.to_owned()])).map_err(failed)?;
    let mut model = BPE::default();
    trainer.train(&mut model).map_err(failed)?;
    let encode = |word: &String| -> Result<Vec<u32>> {
        Ok(model.tokenize(word).map_err(failed)?.into_iter().map(|token| token.id).collect())
    };
    let sequences = words.iter().map(encode).collect::<Result<_>>()?;
    let mut names = vec![String::new(); model.get_vocab_size()];
    model.get_vocab().into_iter().for_each(|(piece, id)| names[id as usize] = piece);
    Ok((sequences, names))
}

/// The words of pieces.
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
        assert_eq!((sequences[0].len(), names.len()), (1, 26));
        let all = sequences.concat();
        assert!(all.len() > words.len());
        assert_eq!(join(all.iter().map(|&id| names[id as usize].as_str())), words);
    }
}
