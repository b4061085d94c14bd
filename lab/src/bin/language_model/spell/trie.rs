//! The probabilities of all words of a vocabulary as they are spelled, with one step for every prefix.

use super::model::Speller;
use super::spellings::{Spellings, BOUNDARY};
use super::word::Sample;
use candle_core::Tensor;
use candle_nn::rnn::LSTMState;
use lab::{show::progress, Result};
use std::collections::HashMap;

/// The prefixes of a vocabulary by length; the first is the empty one.
pub(crate) struct Trie {
    levels: Vec<Level>,
    /// The place of each word of the vocabulary among the words in the order of the level of their end.
    order: Vec<u32>,
    characters: usize,
}

/// Prefixes of equal length.
#[derive(Default)]
struct Level {
    /// The index in the level before of each prefix without its last character.
    parents: Vec<u32>,
    /// The last character of each.
    characters: Vec<u32>,
    /// The nodes that are words.
    ends: Vec<u32>,
}

/// The words at a sample of positions are spelled with these probabilities.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mass {
    /// Their mean NLL as strings.
    pub(crate) nll: f64,
    /// The mean logarithm of the probability that the string is a word of the vocabulary.
    pub(crate) log_mass: f64,
}

impl Mass {
    /// Returns the mean NLL of the words, given that they are words of the vocabulary.
    pub(crate) fn renormalised(self) -> f64 {
        self.nll + self.log_mass
    }
}

/// Prefixes of a level times positions: what is held at once, unless a level alone has more.
const AT_ONCE: usize = 1 << 14;

impl Trie {
    pub(crate) fn new(spellings: &Spellings) -> Self {
        let words = spellings.words();
        let mut order = vec![0; words.len()];
        let (mut levels, mut ended) = (vec![], 0);
        let mut level = Level { parents: vec![0], characters: vec![BOUNDARY], ends: vec![] };
        // This holds the words that have not ended, and their prefixes in the level.
        let mut open: Vec<(usize, u32)> = (0..words.len()).map(|word| (word, 0)).collect();
        while !open.is_empty() {
            let (mut next, mut longer) = (Level::default(), vec![]);
            let mut known = HashMap::new();
            for (word, prefix) in open {
                let Some(&character) = words[word].get(levels.len()) else {
                    order[word] = ended;
                    ended += 1;
                    level.ends.push(prefix);
                    continue;
                };
                let extended = *known.entry((prefix, character)).or_insert_with(|| {
                    next.parents.push(prefix);
                    next.characters.push(character);
                    next.parents.len() as u32 - 1
                });
                longer.push((word, extended));
            }
            levels.push(std::mem::replace(&mut level, next));
            open = longer;
        }
        Self { levels, order, characters: spellings.characters() }
    }

    /// Returns the number of different prefixes: steps for a position.
    pub(crate) fn prefixes(&self) -> usize {
        self.levels.iter().map(|level| level.characters.len()).sum()
    }

    /// Computes the log-probabilities `[vocab, positions]` of all words from hidden states `[positions, hidden]` of the
    /// word model.
    pub(crate) fn log_probs(&self, speller: &Speller, hidden: &Tensor) -> Result<Tensor> {
        let (device, positions) = (hidden.device(), hidden.dim(0)?);
        let conditions = speller.conditions(hidden)?.detach();
        let mut states = speller.start(positions)?;
        let mut prefix_log_probs = Tensor::zeros((1, positions), hidden.dtype(), device)?;
        let mut word_log_probs = vec![];
        for (i, level) in self.levels.iter().enumerate() {
            let prefixes = level.characters.len();
            // One row for each prefix and position, prefix by prefix.
            let last = level.characters.iter().flat_map(|&last| std::iter::repeat_n(last, positions));
            let last = Tensor::from_iter(last, device)?;
            let conditions = conditions.broadcast_left(prefixes)?.flatten_to(1)?;
            let next = speller.step(&last, &conditions, &mut states)?;
            // [prefixes * characters, positions]
            let next = next.reshape((prefixes, positions, self.characters))?.transpose(1, 2)?;
            let next = next.broadcast_add(&prefix_log_probs.unsqueeze(1)?)?.flatten_to(1)?;
            let select = |prefixes: &[u32], characters: &mut dyn Iterator<Item = u32>| -> Result<Tensor> {
                let first_row = |prefix: u32| prefix * self.characters as u32;
                let rows = prefixes.iter().zip(characters).map(|(&prefix, character)| first_row(prefix) + character);
                Ok(next.index_select(&Tensor::from_iter(rows, device)?, 0)?)
            };
            if !level.ends.is_empty() {
                word_log_probs.push(select(&level.ends, &mut std::iter::repeat(BOUNDARY))?);
            }
            let Some(longer) = self.levels.get(i + 1) else { break };
            prefix_log_probs = select(&longer.parents, &mut longer.characters.iter().copied())?;
            let parents = Tensor::new(longer.parents.as_slice(), device)?;
            let select_parents = |state: &Tensor| -> Result<Tensor> {
                let units = state.dim(1)?;
                let selected = state.reshape((prefixes, positions * units))?.index_select(&parents, 0)?;
                Ok(selected.reshape(((), units))?)
            };
            for state in &mut states {
                *state = LSTMState::new(select_parents(&state.h)?, select_parents(&state.c)?);
            }
        }
        let order = Tensor::new(self.order.as_slice(), device)?;
        Ok(Tensor::cat(&word_log_probs, 0)?.index_select(&order, 0)?)
    }

    /// Returns the words of a sample as strings, and the probability of the vocabulary.
    pub(crate) fn mass(&self, speller: &Speller, sample: &Sample) -> Result<Mass> {
        let widest = self.levels.iter().map(|level| level.characters.len()).max().unwrap_or(1);
        let positions = (AT_ONCE / widest).max(1);
        let (mut nll, mut log_mass, mut first) = (0.0, 0.0, 0);
        let bar = progress::bar(sample.words.len(), "spelling the vocabulary".into());
        for words in sample.words.chunks(positions) {
            let log_probs = self.log_probs(speller, &sample.hidden.narrow(0, first, words.len())?)?;
            let targets = Tensor::new(words, log_probs.device())?.unsqueeze(0)?;
            nll -= f64::from(log_probs.gather(&targets, 0)?.sum_all()?.to_scalar::<f32>()?);
            log_mass += f64::from(log_probs.log_sum_exp(0)?.sum_all()?.to_scalar::<f32>()?);
            first += words.len();
            bar.inc(words.len() as u64);
        }
        bar.finish_and_clear();
        let count = sample.words.len() as f64;
        Ok(Mass { nll: nll / count, log_mass: log_mass / count })
    }
}
