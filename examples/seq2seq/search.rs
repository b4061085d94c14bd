//! Beam search for many sentences, in batches of similar length; and sampling for one.

use crate::batches::{by_length, Sources};
use crate::common::{model::Model, progress, Result};
use crate::model::Seq2Seq;
use crate::vocabulary::{END, START};
use candle_core::Tensor;
use mos_head::{BeamSearch, Hypothesis, Sampler};

#[derive(Clone, Copy, Debug)]
pub(crate) struct Beam {
    pub(crate) width: usize,
    pub(crate) n_best: usize,
    pub(crate) max_length: usize,
    pub(crate) length_penalty: f64,
}

/// Number of sentences decoded together.
const BATCH: usize = 32;

/// The best targets of each source, the best first.
pub(crate) fn search(model: &Seq2Seq, sources: &[&[u32]], beam: Beam) -> Result<Vec<Vec<Vec<u32>>>> {
    let search = BeamSearch::new(END)
        .with_width(beam.width)
        .with_n_best(beam.n_best)
        .with_max_length(beam.max_length)
        .with_length_penalty(beam.length_penalty);
    let bar = progress::bar(sources.len(), "beam search".into());
    let mut found = vec![vec![]; sources.len()];
    for chosen in by_length((0..sources.len()).collect(), BATCH, |i| sources[i].len()) {
        let batch: Vec<&[u32]> = chosen.iter().map(|&i| sources[i]).collect();
        for (&i, hypotheses) in chosen.iter().zip(search_batch(model, &batch, &search)?) {
            found[i] = hypotheses.into_iter().map(|hypothesis| hypothesis.tokens).collect();
        }
        bar.inc(chosen.len() as u64);
    }
    bar.finish_and_clear();
    Ok(found)
}

fn search_batch(model: &Seq2Seq, sources: &[&[u32]], search: &BeamSearch) -> Result<Vec<Vec<Hypothesis>>> {
    let device = model.device();
    let mut state = model.encode(&Sources::new(sources, 0, device)?, None)?;
    let start = Tensor::full(START, sources.len(), device)?;
    search.run(model.head(), &start, |tokens, parents| {
        state = state.select(parents)?;
        Ok(model.decode(&tokens.unsqueeze(1)?, &mut state, None)?.squeeze(1)?)
    })
}

/// `count` sampled targets of one source.
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
    for _ in 0..max_length {
        let hidden = model.decode(&last.unsqueeze(1)?, &mut state, None)?.squeeze(1)?;
        last = model.head().sample(&hidden, sampler)?;
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
    Ok(drawn)
}
