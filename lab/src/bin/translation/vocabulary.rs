//! A vocabulary maps text to token ids and back, by words, by byte-pair encoding or by codes of words; all are stored
//! as a string in a checkpoint.

use crate::codes::Codes;
use lab::data::words::{Words, SPECIAL, UNKNOWN};
use lab::data::{bpe, table_from_json, table_json};
use lab::Result;
use mos_codes::CodeTable;
use serde_json::{json, Value};
use tokenizers::decoders::bpe::BPEDecoder;
use tokenizers::pre_tokenizers::whitespace::WhitespaceSplit;
use tokenizers::{AddedToken, Tokenizer};

#[derive(Clone)]
pub(crate) enum Vocabulary {
    Words(Words),
    Bpe(Box<Tokenizer>),
    Codes(Box<Codes>),
}

impl Vocabulary {
    /// Returns the `marks`, and the whitespace-separated words that occur at least `min_count` times, the most frequent
    /// first.
    pub(crate) fn words<'a>(texts: impl Iterator<Item = &'a str>, min_count: usize, marks: &[&str]) -> Self {
        Self::Words(Words::from_texts(texts, min_count, marks))
    }

    /// Learns at most `size` pieces of whitespace-separated words. The `marks` stay whole.
    pub(crate) fn bpe<'a>(texts: impl Iterator<Item = &'a str>, size: usize, marks: &[&str]) -> Result<Self> {
        let special: Vec<&str> = SPECIAL.iter().chain(marks).copied().collect();
        let words: Vec<&str> = texts.flat_map(str::split_whitespace).filter(|word| !special.contains(word)).collect();
        let mut model = bpe::train(words.iter().copied(), &special, size, 2)?;
        model.unk_token = Some(SPECIAL[UNKNOWN as usize].into());
        let mut tokenizer = Tokenizer::new(model);
        tokenizer.with_pre_tokenizer(Some(WhitespaceSplit));
        tokenizer.with_decoder(Some(BPEDecoder::new(bpe::END_OF_WORD.into())));
        let special: Vec<AddedToken> = special.into_iter().map(|token| AddedToken::from(token, true)).collect();
        tokenizer.add_special_tokens(special).map_err(failed)?;
        Ok(Self::Bpe(Box::new(tokenizer)))
    }

    /// Returns the codes of the words in `table`, in the place of their ids.
    pub(crate) fn with_table(self, table: CodeTable) -> Result<Self> {
        match self {
            Self::Words(words) => Ok(Self::Codes(Box::new(Codes::new(words, table)?))),
            _ => Err("expected a vocabulary of words for a table of codes".into()),
        }
    }

    /// Returns the name of what a token is.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Words(_) => "word",
            Self::Bpe(_) => "bpe",
            Self::Codes(_) => "code",
        }
    }

    /// Returns the number of token ids.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Words(words) => words.len(),
            Self::Bpe(tokenizer) => tokenizer.get_vocab_size(true),
            Self::Codes(codes) => codes.len(),
        }
    }

    pub(crate) fn as_words(&self) -> Option<&Words> {
        match self {
            Self::Words(words) => Some(words),
            _ => None,
        }
    }

    /// Returns the codes, if token ids are codes: then not every id may follow every other.
    pub(crate) fn codes(&self) -> Option<&Codes> {
        match self {
            Self::Codes(codes) => Some(codes),
            _ => None,
        }
    }

    pub(crate) fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match self {
            Self::Words(words) => Ok(words.encode(text)),
            Self::Bpe(tokenizer) => Ok(tokenizer.encode_fast(text, false).map_err(failed)?.get_ids().to_vec()),
            Self::Codes(codes) => codes.encode(text),
        }
    }

    pub(crate) fn decode(&self, ids: &[u32]) -> Result<String> {
        match self {
            Self::Words(words) => words.decode(ids),
            Self::Bpe(tokenizer) => tokenizer.decode(ids, false).map_err(failed),
            Self::Codes(codes) => codes.decode(ids),
        }
    }

    pub(crate) fn to_json(&self) -> Result<String> {
        Ok(match self {
            Self::Words(words) => json!({ "words": words.all() }),
            Self::Bpe(tokenizer) => {
                json!({ "bpe": serde_json::from_str::<Value>(&tokenizer.to_string(false).map_err(failed)?)? })
            }
            Self::Codes(codes) => json!({ "words": codes.words().all(), "table": table_json(codes.table())? }),
        }
        .to_string())
    }

    pub(crate) fn from_json(text: &str) -> Result<Self> {
        let value: Value = serde_json::from_str(text)?;
        if let Some(words) = value.get("words") {
            let words = Self::Words(Words::new(serde_json::from_value(words.clone())?));
            return match value.get("table") {
                Some(table) => words.with_table(table_from_json(table)?),
                None => Ok(words),
            };
        }
        match value.get("bpe") {
            Some(tokenizer) => Ok(Self::Bpe(Box::new(tokenizer.to_string().parse::<Tokenizer>().map_err(failed)?))),
            None => Err("expected a vocabulary with \"words\" or \"bpe\", found neither".into()),
        }
    }
}

fn failed(error: tokenizers::Error) -> Box<dyn std::error::Error> {
    format!("the tokenizer failed: {error}").into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXTS: [&str; 3] = ["a man sees a dog", "a dog <me> sees the man", "the man runs"];

    #[test]
    fn rare_words_are_unknown() {
        let vocabulary = Vocabulary::words(TEXTS.into_iter(), 2, &[]);
        assert_eq!(vocabulary.len(), 4 + 5); // a man dog sees the
        let ids = vocabulary.encode("a man runs").unwrap();
        assert_eq!(ids, [4, 5, UNKNOWN]);
        assert_eq!(vocabulary.decode(&ids).unwrap(), "a man <unk>");
    }

    #[test]
    fn both_kinds_restore_their_text_also_after_json() {
        let bpe = Vocabulary::bpe(TEXTS.into_iter(), 40, &["<me>"]).unwrap();
        for vocabulary in [Vocabulary::words(TEXTS.into_iter(), 1, &["<me>"]), bpe] {
            let again = Vocabulary::from_json(&vocabulary.to_json().unwrap()).unwrap();
            assert_eq!(vocabulary.len(), again.len());
            for text in TEXTS {
                let ids = vocabulary.encode(text).unwrap();
                assert_eq!(again.encode(text).unwrap(), ids);
                if !text.contains('<') {
                    assert_eq!(again.decode(&ids).unwrap(), text); // marks are never decoded
                }
            }
        }
    }
}
