//! Beam search for many sentences, in batches of similar length; and sampling for one.

use crate::model::{Seq2Seq, State};
use crate::{batches::Sources, codes::LONGEST};
use candle_core::Tensor;
use lab::data::words::{END, START};
use lab::{data::sequences::by_length, show::progress, training::Model, Result};
use mos_head::decode::{BeamSearch, Hypothesis, Sampler, TopK};

#[derive(Clone, Copy, Debug)]
pub(crate) struct Beam {
    pub(crate) width: usize,
    pub(crate) n_best: usize,
    pub(crate) max_length: usize,
    pub(crate) length_penalty: f64,
    /// The share of the log-probabilities without a source that is subtracted from those of the first tokens.
    pub(crate) diversity: f64,
}

/// The number of sentences that are decoded together.
const BATCH: usize = 32;
/// The number of tokens at the start of a target that `diversity` applies to, and of candidates for each.
const FIRST: usize = 5;
const CANDIDATES: usize = 20;

/// Returns the best targets of each source, the best first.
pub(crate) fn search(model: &Seq2Seq, sources: &[&[u32]], beam: Beam) -> Result<Vec<Vec<Vec<u32>>>> {
    let search = BeamSearch::new(END)
        .with_width(beam.width)
        .with_n_best(beam.n_best)
        .with_max_length(longest(model, beam.max_length))
        .with_length_penalty(beam.length_penalty);
    let bar = progress::bar(sources.len(), "beam search".into());
    let mut found = vec![vec![]; sources.len()];
    for chosen in by_length((0..sources.len()).collect(), BATCH, |i| sources[i].len()) {
        let batch: Vec<&[u32]> = chosen.iter().map(|&i| sources[i]).collect();
        for (&i, hypotheses) in chosen.iter().zip(search_batch(model, &batch, &search, beam.diversity)?) {
            found[i] = hypotheses.into_iter().map(|hypothesis| whole(model, hypothesis.token_ids)).collect();
        }
        bar.inc(chosen.len() as u64);
    }
    bar.finish_and_clear();
    Ok(found)
}

fn search_batch(
    model: &Seq2Seq,
    sources: &[&[u32]],
    search: &BeamSearch,
    diversity: f64,
) -> Result<Vec<Vec<Hypothesis>>> {
    let device = model.device();
    let encode = |sources: &[&[u32]]| model.encode(&Sources::new(sources, 0, device)?, None);
    let step = |state: &mut State, tokens: &Tensor, parents: &Tensor| -> Result<Tensor> {
        *state = state.select(parents)?;
        Ok(model.decode(&tokens.unsqueeze(1)?, state, None)?.squeeze(1)?)
    };
    let mut state = encode(sources)?;
    let start = Tensor::full(START, sources.len(), device)?;
    if diversity == 0.0 && model.setting.target.codes().is_none() {
        return search.run(model.head(), &start, |tokens, parents| step(&mut state, tokens, parents));
    }
    // log P(target | source) - diversity log P(target) (Li et al., 2016, MMI-antiLM), the latter from an empty source.
    let mut without = if diversity > 0.0 { Some(encode(&vec![[].as_slice(); sources.len()])?) } else { None };
    let ids = 0..model.head().vocab_size() as u32;
    let never_end: Vec<f32> = ids.map(|id| if id == END { f32::NEG_INFINITY } else { 0.0 }).collect();
    let never_end = Tensor::new(never_end, device)?;
    let mut length = 0;
    search.search(model.head().vocab_size(), &start, |tokens, parents, k| -> Result<TopK> {
        let hidden = step(&mut state, tokens, parents)?;
        length += 1;
        let Some(without) = without.as_mut().filter(|_| length <= FIRST) else {
            return match model.setting.target.codes() {
                Some(_) => Ok(TopK::from_log_probs(&log_probs(model, &hidden, tokens)?, k)?),
                None => Ok(model.head().top_k(&hidden, k)?),
            };
        };
        let log_probs = log_probs(model, &hidden, tokens)?;
        let usual = model.head().log_probs(&step(without, tokens, parents)?)?;
        // The difference is largest for the rarest tokens: only the most probable ones are candidates.
        let candidates = CANDIDATES.min(model.head().vocab_size());
        let least = TopK::from_log_probs(&log_probs, candidates)?.log_probs.narrow(1, candidates - 1, 1)?;
        let other = Tensor::full(f32::NEG_INFINITY, log_probs.shape(), device)?;
        let mut changed = log_probs.broadcast_ge(&least)?.where_cond(&(&log_probs - (usual * diversity)?)?, &other)?;
        if length == 1 {
            // No target is empty, so its end is the least probable first token, and would gain the most.
            changed = changed.broadcast_add(&never_end)?;
        }
        Ok(TopK::from_log_probs(&changed, k)?)
    })
}

/// Computes the log-probabilities of the next tokens after the `last` ones; minus infinity where no word has them.
fn log_probs(model: &Seq2Seq, hidden: &Tensor, last: &Tensor) -> Result<Tensor> {
    let log_probs = model.head().log_probs(hidden)?;
    match model.setting.target.codes() {
        Some(codes) => Ok((log_probs + codes.mask(last)?)?),
        None => Ok(log_probs),
    }
}

/// Returns the maximum number of tokens of a target, which are words, pieces of words, or codes.
fn longest(model: &Seq2Seq, max_length: usize) -> usize {
    max_length * if model.setting.target.codes().is_some() { LONGEST } else { 1 }
}

/// Returns the tokens without a word that the maximum length cuts.
fn whole(model: &Seq2Seq, tokens: Vec<u32>) -> Vec<u32> {
    match model.setting.target.codes() {
        Some(codes) => codes.whole(tokens),
        None => tokens,
    }
}

/// Returns `count` sampled targets of one source.
pub(crate) fn draw(
    model: &Seq2Seq,
    source: &[u32],
    count: usize,
    max_length: usize,
    sampler: &mut Sampler,
) -> Result<Vec<Vec<u32>>> {
    let mut state = model.encode(&Sources::new(&vec![source; count], 0, model.device())?, None)?;
    let mut last = Tensor::full(START, count, model.device())?;
    let mut drawn = vec![vec![]; count];
    let mut ended = vec![false; count];
    for _ in 0..longest(model, max_length) {
        let hidden = model.decode(&last.unsqueeze(1)?, &mut state, None)?.squeeze(1)?;
        last = match model.setting.target.codes() {
            Some(_) => sampler.sample(&log_probs(model, &hidden, &last)?)?,
            None => model.head().sample(&hidden, sampler)?,
        };
        for ((ids, ended), id) in drawn.iter_mut().zip(&mut ended).zip(last.to_vec1::<u32>()?) {
            *ended |= id == END;
            if !*ended {
                ids.push(id);
            }
        }
        if ended.iter().all(|&ended| ended) {
            break;
        }
    }
    Ok(drawn.into_iter().map(|tokens| whole(model, tokens)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::{Architecture, TableShape, Task};
    use crate::table::tests::{by_frequency, random, vocabularies};
    use crate::{setting::Setting, vocabulary::Vocabulary};
    use candle_core::Device;
    use lab::{layers::HeadKind, training::Recipe};
    use mos_head::decode::Sampling;

    #[test]
    fn diversity_finds_no_empty_targets() {
        let recipe = Recipe { hidden: 8, context: Some(8), ..Recipe::BASE };
        let words = Vocabulary::words(["a b c d e f"].into_iter(), 1, &[]);
        let (task, architecture) = (Task::Dialogue, Architecture::Lstm);
        let setting = Setting { task, architecture, source: words.clone(), target: words, turns: 1 };
        let model = Seq2Seq::new(HeadKind::Mos, setting, &recipe, &Device::Cpu).unwrap();
        let found = |diversity| {
            // The search is as wide as the vocabulary, so that all first tokens are kept.
            let beam = Beam { width: 10, n_best: 10, max_length: 3, length_penalty: 0.0, diversity };
            search(&model, &[&[5, 6], &[7]], beam).unwrap().concat()
        };
        assert!(found(0.0).contains(&vec![]), "an untrained model may end at once");
        let found = found(0.5);
        assert!(found.len() == 20 && !found.contains(&vec![]), "{found:?}");
    }

    /// Nearly all sequences of codes that an untrained model finds are no words, unless they are constrained.
    #[test]
    fn all_that_is_found_or_drawn_is_words() {
        let recipe = Recipe { hidden: 8, context: Some(8), ..Recipe::BASE };
        for (shape, flags) in
            [(TableShape::Light, by_frequency()), (TableShape::Light, random()), (TableShape::Hybrid, random())]
        {
            let [source, target] = vocabularies(shape, &flags).unwrap();
            for kind in [HeadKind::Softmax, HeadKind::Mos] {
                let (task, architecture) = (Task::Toy, Architecture::Lstm);
                let setting = Setting { task, architecture, source: source.clone(), target: target.clone(), turns: 1 };
                let model = Seq2Seq::new(kind, setting, &recipe, &Device::Cpu).unwrap();
                let sources: [&[u32]; 3] = [&[5, 6, 7], &[8], &[]];
                let mut found = vec![];
                for (max_length, diversity) in [(1, 0.0), (9, 0.0), (9, 0.5)] {
                    let beam = Beam { width: 4, n_best: 4, max_length, length_penalty: 0.0, diversity };
                    found.extend(search(&model, &sources, beam).unwrap().concat());
                    for temperature in [0.0, 1.0, 5.0] {
                        let mut sampler = Sampler::new(Sampling::new().with_temperature(temperature), 4).unwrap();
                        found.extend(draw(&model, sources[0], 8, max_length, &mut sampler).unwrap());
                    }
                }
                assert!(found.len() > 70 && found.iter().any(|codes| codes.len() > 9), "{}", found.len());
                for codes in found {
                    assert!(target.decode(&codes).is_ok(), "{shape:?} {codes:?}");
                }
            }
        }
    }
}
