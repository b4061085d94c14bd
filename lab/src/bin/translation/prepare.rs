//! The data and the vocabularies that the flags ask for.

use crate::corpus::{Corpus, Pair};
use crate::dialogue::{self, MARKS};
use crate::kinds::{TableShape, Task, VocabularyKind};
use crate::{args::Args, table, toy, vocabulary::Vocabulary};
use candle_core::Device;
use lab::data::words::SPECIAL;
use lab::Result;

/// Training and validation pairs of the built-in task.
const TOY_PAIRS: (usize, usize) = (8000, 500);

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
    let kind = args.vocab.unwrap_or(VocabularyKind::Word);
    let shape = kind.shape();
    args.tables.check(shape == Some(TableShape::Hybrid), shape.is_some())?;
    let marks: &[&str] = if args.task() == Task::Dialogue { &MARKS } else { &[] };
    let side = |text: fn(&Pair) -> &str| match kind {
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
