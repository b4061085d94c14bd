//! Texts as token ids, in windows.

use candle_core::{Device, Tensor};
use lab::language::{Teacher, NAME};
use lab::{bpe, Result};
use rand::{rngs::StdRng, Rng, SeedableRng};
use std::path::Path;
use tokenizers::Model;

pub(crate) struct Text {
    pub(crate) name: String,
    ids: Vec<u32>,
    /// The number of token ids that the text is made of.
    pub(crate) pieces: usize,
}

impl Text {
    /// The built-in language.
    pub(crate) fn built_in(vocab: usize, seed: u64) -> Result<Self> {
        let corpus = Teacher::default().built_in(seed);
        let pieces = corpus.words.len();
        if pieces > vocab {
            return Err(format!("--vocab-size is {vocab}, but {NAME} has {pieces} token ids").into());
        }
        Ok(Self { name: NAME.into(), ids: corpus.data.train, pieces })
    }

    /// The words of a file as pieces of a byte-pair encoding that is learned from them.
    pub(crate) fn from_file(path: &Path, vocab: usize) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
        let model = bpe::train(text.split_whitespace(), &[], (vocab, 2))?;
        let pieces = model.get_vocab_size();
        if pieces > vocab {
            let path = path.display();
            return Err(format!("--vocab-size is {vocab}, but {path} has {pieces} different characters").into());
        }
        let mut ids = vec![];
        for word in text.split_whitespace() {
            let tokens = model.tokenize(word).map_err(|error| format!("the byte-pair encoding failed: {error}"))?;
            ids.extend(tokens.into_iter().map(|token| token.id));
        }
        Ok(Self { name: path.display().to_string(), ids, pieces })
    }

    /// Inputs and targets `[batch, positions]` of windows at random places: a target is the next input.
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
