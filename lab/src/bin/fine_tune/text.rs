//! Texts as token ids, in windows.

use candle_core::{Device, Tensor};
use lab::data::language::{Teacher, NAME};
use lab::data::{bpe, read};
use lab::Result;
use rand::{rngs::StdRng, Rng, SeedableRng};
use std::path::Path;
use tokenizers::pre_tokenizers::whitespace::WhitespaceSplit;
use tokenizers::Tokenizer;

pub(crate) struct Text {
    pub(crate) name: String,
    ids: Vec<u32>,
    /// The number of token ids that the text is made of.
    pub(crate) pieces: usize,
    /// The tokenizer that was learned from the text.
    learned: Option<Tokenizer>,
}

fn failed(error: tokenizers::Error) -> Box<dyn std::error::Error> {
    format!("the tokenizer failed: {error}").into()
}

impl Text {
    /// Returns the built-in language.
    pub(crate) fn built_in(vocab: usize, seed: u64) -> Result<Self> {
        let corpus = Teacher::default().built_in(seed);
        let pieces = corpus.words.len();
        if pieces > vocab {
            return Err(format!("--vocab-size is {vocab}, but {NAME} has {pieces} token ids").into());
        }
        Ok(Self { name: NAME.into(), ids: corpus.data.train, pieces, learned: None })
    }

    /// Returns a file as token ids of a tokenizer, or else of a byte-pair encoding that is learned from its words.
    pub(crate) fn from_file(path: &Path, tokenizer: Option<&Path>, vocab: usize) -> Result<Self> {
        let text = read(path)?;
        let name = path.display().to_string();
        let (tokenizer, is_learned) = match tokenizer {
            Some(path) => {
                let tokenizer = Tokenizer::from_file(path);
                (tokenizer.map_err(|error| format!("cannot read {}: {error}", path.display()))?, false)
            }
            None => {
                let mut tokenizer = Tokenizer::new(bpe::train(text.split_whitespace(), &[], vocab, 2)?);
                tokenizer.with_pre_tokenizer(Some(WhitespaceSplit));
                (tokenizer, true)
            }
        };
        let pieces = tokenizer.get_vocab_size(true);
        if pieces > vocab {
            let what = if is_learned {
                format!("{name} has {pieces} different characters")
            } else {
                format!("the tokenizer has {pieces} ids")
            };
            return Err(format!("--vocab-size is {vocab}, but {what}").into());
        }
        let ids = tokenizer.encode_fast(text, false).map_err(failed)?.get_ids().to_vec();
        Ok(Self { name, ids, pieces, learned: is_learned.then_some(tokenizer) })
    }

    /// Writes the tokenizer if it was learned.
    pub(crate) fn save_tokenizer(&self, path: &Path) -> Result<()> {
        self.learned.as_ref().map_or(Ok(()), |tokenizer| tokenizer.save(path, false)).map_err(failed)
    }

    /// Draws inputs and targets `[batch, positions]` of windows at random places: a target is the next input.
    pub(crate) fn batch(&self, batch: usize, positions: usize, seed: u64) -> Result<[Tensor; 2]> {
        let last = self.ids.len().checked_sub(positions + 1).ok_or_else(|| {
            format!("{} has {} tokens, fewer than the {} of a window", self.name, self.ids.len(), positions + 1)
        })?;
        let mut rng = StdRng::seed_from_u64(seed);
        let starts: Vec<usize> = (0..batch).map(|_| rng.random_range(0..=last)).collect();
        let windows = |shift: usize| {
            let ids = starts.iter().flat_map(|start| &self.ids[start + shift..][..positions]).copied();
            Tensor::from_iter(ids, &Device::Cpu)?.reshape((batch, positions))
        };
        Ok([windows(0)?, windows(1)?])
    }
}
