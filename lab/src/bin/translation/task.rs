//! The three tasks: their data, vocabularies and beam searches.

use crate::args::Args;
use crate::corpus::{Corpus, Pair};
use crate::dialogue::{self, MARKS};
use crate::search::Beam;
use crate::table::{self, Shape};
use crate::toy;
use crate::vocabulary::{Vocabulary, SPECIAL};
use candle_core::Device;
use clap::ValueEnum;
use lab::Result;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Task {
    Toy,
    Translation,
    Dialogue,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum VocabularyKind {
    /// Words
    Word,
    /// Pieces of words, by byte-pair encoding
    Bpe,
    /// Words; targets as the rows and columns of a table (LightRNN)
    Light,
    /// Words; frequent targets as they are, rare ones as rows and columns of a table (Hybrid-LightRNN)
    Hybrid,
}

impl VocabularyKind {
    /// Returns the shape of the table, if there is one.
    fn shape(self) -> Option<Shape> {
        match self {
            VocabularyKind::Word | VocabularyKind::Bpe => None,
            VocabularyKind::Light => Some(Shape::Light),
            VocabularyKind::Hybrid => Some(Shape::Hybrid),
        }
    }
}

/// Training and validation pairs of the built-in task.
const TOY_PAIRS: (usize, usize) = (8000, 500);

impl Task {
    pub(crate) fn new(args: &Args) -> Self {
        match (&args.data, &args.dialogue) {
            (Some(_), _) => Task::Translation,
            (None, Some(_)) => Task::Dialogue,
            (None, None) => Task::Toy,
        }
    }

    pub(crate) fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }

    pub(crate) fn from_name(name: &str) -> Result<Self> {
        Task::from_str(name, false).map_err(|_| format!("the checkpoint's task {name:?} is unknown").into())
    }

    pub(crate) fn beam(self, args: &Args, n_best: usize) -> Beam {
        let (width, max_length, diversity) = match self {
            Task::Toy | Task::Translation => (5, 60, 0.0),
            Task::Dialogue => (10, 30, 0.5), // width: Yang et al. (2018), section 3.3
        };
        Beam {
            width: args.beam.unwrap_or(width).max(n_best),
            n_best,
            max_length: args.max_length.unwrap_or(max_length),
            length_penalty: args.length_penalty,
            diversity: args.diversity.unwrap_or(diversity),
        }
    }

    /// Returns the dropout of the mixtures' contexts beside a `dropout` of all else. On the few dialogues that there
    /// are, mixtures overfit without it: a softmax has dropout right before its decoder, on the hidden states.
    pub(crate) fn context_dropout(self, dropout: f64) -> f64 {
        match self {
            Task::Toy | Task::Translation => 0.0,
            Task::Dialogue => dropout,
        }
    }

    /// Returns the number of results that are scored per pair.
    pub(crate) fn n_best(self) -> usize {
        if self == Task::Dialogue {
            5
        } else {
            1
        }
    }
}

pub(crate) fn corpus(args: &Args) -> Result<Corpus> {
    let mut corpus = whole_corpus(args)?;
    corpus.shorten(args.part);
    Ok(corpus)
}

fn whole_corpus(args: &Args) -> Result<Corpus> {
    match (&args.data, &args.dialogue) {
        (Some(folder), _) => Corpus::from_folder(folder, &args.source, &args.target),
        (None, Some(path)) => dialogue::corpus(path, args.turns),
        (None, None) => Ok(toy::corpus(TOY_PAIRS.0, TOY_PAIRS.1, args.common.seed)),
    }
}

/// Returns the vocabularies of sources and targets, from the training pairs. Dialogues share one for both: their
/// contexts are made of responses. Only targets have codes.
pub(crate) fn vocabularies(args: &Args, pairs: &[Pair], device: &Device) -> Result<[Vocabulary; 2]> {
    let shape = args.vocab.shape();
    args.tables.check(shape == Some(Shape::Hybrid), shape.is_some())?;
    let marks: &[&str] = if Task::new(args) == Task::Dialogue { &MARKS } else { &[] };
    let side = |text: fn(&Pair) -> &str| match args.vocab {
        VocabularyKind::Bpe => Vocabulary::bpe(pairs.iter().map(text), args.vocab_size, marks),
        _ => Ok(Vocabulary::words(pairs.iter().map(text), args.min_count, marks)),
    };
    let target = side(|pair| &pair.target)?;
    let source = if marks.is_empty() { side(|pair| &pair.source)? } else { target.clone() };
    let Some(shape) = shape else { return Ok([source, target]) };
    let texts = pairs.iter().map(|pair| target.encode(&pair.target)).collect::<Result<Vec<_>>>()?;
    let (words, special) = (target.as_words().ok_or("codes are of words")?, SPECIAL.len() + marks.len());
    let table = table::choose(&args.tables, shape, words, special, &texts, args.common.seed, device)?;
    Ok([source, target.with_table(table)?])
}
