//! Beam search: asks an output layer, or any model that ranks the next token, for the most probable sequences (Wu et
//! al., 2016, arXiv 1609.08144).

use candle_core::{DType, Device, Tensor};

use super::output_layer::OutputLayer;
use crate::decoding::{check_host_log_probs, TopK};
use crate::error::{Error, Result};
use crate::tensors::checks::{check_elements, check_ids, check_number, check_sizes, check_targets};
use crate::tensors::transfer;

/// Beam search for a batch of sentences, over any model that ranks the next token.
///
/// Each step extends the `width` most probable open sequences of a sentence by every token id and keeps the `width`
/// most probable of the results; sequences that reach an end token are finished. A sentence is done when no open
/// sequence can still score above its `n_best` finished ones, or at `max_length`. Sequences are ranked by
///
/// ```text
/// score = log P(sequence) / ((5 + length) / 6)^alpha        (Wu et al., 2016, equation 14)
/// ```
///
/// where the length counts the end token. With width 1 and `alpha` 0 this is greedy search.
///
/// # Examples
///
/// A "model" whose hidden state is the embedding of the last token:
///
/// ```
/// use candle_core::{Device, Tensor};
/// use mos_head::decode::BeamSearch;
/// use mos_head::SoftmaxHead;
///
/// # fn main() -> mos_head::Result<()> {
/// let cpu = &Device::Cpu;
/// // Token 0 ends a sequence; after token 1 comes 2, after 2 comes 0.
/// let embeddings = Tensor::new(&[[0f32, 0., 0.], [0., 0., 9.], [9., 0., 0.]], cpu)?;
/// let head = SoftmaxHead::from_tensors(Tensor::eye(3, candle_core::DType::F32, cpu)?, None)?;
/// let search = BeamSearch::new(0).with_width(2).with_max_length(10);
/// let start = Tensor::new(&[1u32, 2], cpu)?; // two sentences
/// let found = search.run(&head, &start, |tokens, _parents| embeddings.index_select(tokens, 0))?;
/// assert_eq!(found[0][0].token_ids, [2]);
/// assert!(found[1][0].token_ids.is_empty() && found[1][0].finished);
/// # Ok(())
/// # }
/// ```
///
/// # References
///
/// Yonghui Wu et al.: Google's Neural Machine Translation System: Bridging the Gap between Human and Machine
/// Translation. 2016, arXiv 1609.08144.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct BeamSearch {
    /// The token ids that end a sequence.
    pub ends: Vec<u32>,
    /// The number of open sequences of a sentence. The default is 4.
    pub width: usize,
    /// The minimum number of tokens of a sequence, including the end token. The default is 1.
    pub min_length: usize,
    /// The maximum number of tokens of a sequence, including the end token. The default is 100.
    pub max_length: usize,
    /// The number of results per sentence, at most `width`. The default is 1.
    pub n_best: usize,
    /// The exponent `alpha` of the length penalty. The default is 0: no penalty.
    pub length_penalty: f64,
}

/// A sequence found by [`BeamSearch`].
///
/// # Examples
///
/// The two most probable sequences after a start token:
///
/// ```
/// use candle_core::{Device, Tensor};
/// use mos_head::decode::BeamSearch;
/// use mos_head::SoftmaxHead;
///
/// # fn main() -> mos_head::Result<()> {
/// let cpu = &Device::Cpu;
/// // The logarithms of the next token's probabilities after the tokens 0 (the end), 1 and 2.
/// let rows = Tensor::new(&[[1f32, 0., 0.], [0.1, 0.3, 0.6], [0.8, 0.1, 0.1]], cpu)?.log()?;
/// let head = SoftmaxHead::from_tensors(Tensor::eye(3, candle_core::DType::F32, cpu)?, None)?;
/// let search = BeamSearch::new(0).with_n_best(2).with_max_length(3);
/// let found = search.run(&head, &Tensor::new(&[1u32], cpu)?, |tokens, _parents| rows.index_select(tokens, 0))?;
/// let (best, second) = (&found[0][0], &found[0][1]);
/// assert_eq!((best.token_ids.as_slice(), second.token_ids.as_slice()), (&[2][..], &[1, 2][..]));
/// assert!((best.log_prob.exp() - 0.6 * 0.8).abs() < 1e-6); // the end token included
/// assert!(best.finished && best.score == best.log_prob); // there is no length penalty
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Hypothesis {
    /// The token ids, without the start token and an end token.
    pub token_ids: Vec<u32>,
    /// The log-probability of the sequence in nats, including an end token if one was reached.
    pub log_prob: f64,
    /// The log-probability in nats, divided by the length penalty.
    pub score: f64,
    /// Whether the sequence reached an end token within the maximum length.
    pub finished: bool,
    /// The end token that it reached.
    pub end: Option<u32>,
}

/// A sequence that has not ended.
struct OpenSequence {
    /// The index of its sentence in the batch.
    sentence: usize,
    /// The token ids after the start token.
    tokens: Vec<u32>,
    log_prob: f64,
}

/// The open sequences of all sentences, sentence by sentence in descending order of log-probability, and the arguments
/// of the next call of the model.
#[derive(Default)]
struct Beams {
    open: Vec<OpenSequence>,
    /// The last token of each open sequence.
    tokens: Vec<u32>,
    /// The row of the previous call that each open sequence continues.
    parents: Vec<u32>,
}

impl Beams {
    /// Opens a sequence for each start token.
    fn start(tokens: Vec<u32>) -> Self {
        let open_sequence = |sentence| OpenSequence { sentence, tokens: vec![], log_prob: 0.0 };
        let parents = (0..tokens.len() as u32).collect();
        Beams { open: (0..tokens.len()).map(open_sequence).collect(), tokens, parents }
    }

    /// Adds a sequence that ends in this token.
    fn push(&mut self, sequence: OpenSequence, token: u32, parent: usize) {
        self.open.push(sequence);
        self.tokens.push(token);
        self.parents.push(parent as u32);
    }

    /// Removes all sequences but the first `count`.
    fn truncate(&mut self, count: usize) {
        self.open.truncate(count);
        self.tokens.truncate(count);
        self.parents.truncate(count);
    }
}

/// The most probable token ids after each open sequence, and their log-probabilities.
struct NextIds {
    token_ids: Vec<Vec<u32>>,
    log_probs: Vec<Vec<f64>>,
}

impl NextIds {
    /// Reads and checks the answer of a model for `rows` sequences.
    fn read(top: &TopK, rows: usize) -> Result<Self> {
        if top.token_ids.rank() != 2 || top.token_ids.dim(0).ok() != Some(rows) {
            return Err(Error::shape("token_ids", format!("[{rows}, k]"), top.token_ids.dims()));
        }
        if top.log_probs.dims() != top.token_ids.dims() {
            let expected = format!("{:?}", top.token_ids.dims());
            return Err(Error::shape("log_probs", expected, top.log_probs.dims()));
        }
        let token_ids = top.token_ids.to_vec2::<u32>()?;
        let log_probs = transfer::read_matrix(&top.log_probs)?;
        check_host_log_probs("log_probs", &log_probs, top.log_probs.dtype())
            .map_err(|error| with_token_id(error, &token_ids))?;
        Ok(NextIds { token_ids, log_probs })
    }
}

impl BeamSearch {
    /// Makes a search that stops at the token id `end`, with width 4, at most 100 tokens, one result, and no length
    /// penalty.
    pub fn new(end: u32) -> Self {
        BeamSearch { ends: vec![end], width: 4, min_length: 1, max_length: 100, n_best: 1, length_penalty: 0.0 }
    }

    /// Sets the token ids that end a sequence, of which many models have several. [`Hypothesis::end`] is the one that
    /// did.
    pub fn with_ends(self, ends: &[u32]) -> Self {
        BeamSearch { ends: ends.to_vec(), ..self }
    }

    /// Sets the minimum number of tokens of a sequence, including the end token: a shorter one does not end. The
    /// default is 1.
    pub fn with_min_length(self, min_length: usize) -> Self {
        BeamSearch { min_length, ..self }
    }

    /// Sets the number of open sequences of a sentence. The default is 4.
    pub fn with_width(self, width: usize) -> Self {
        BeamSearch { width, ..self }
    }

    /// Sets the maximum number of tokens of a sequence, including the end token. The default is 100.
    pub fn with_max_length(self, max_length: usize) -> Self {
        BeamSearch { max_length, ..self }
    }

    /// Sets the number of results per sentence, at most `width`; fewer are returned if fewer are possible. The default
    /// is 1.
    pub fn with_n_best(self, n_best: usize) -> Self {
        BeamSearch { n_best, ..self }
    }

    /// Sets the exponent `alpha` of the length penalty. The default is 0, no penalty; larger values favour longer
    /// sequences.
    pub fn with_length_penalty(self, alpha: f64) -> Self {
        BeamSearch { length_penalty: alpha, ..self }
    }

    /// Searches for continuations of the `start` tokens, `[batch]` (u8, u32 or i64); returns one list per sentence, the
    /// best first.
    ///
    /// `step(tokens, parents)` feeds one token to each row and returns the hidden states after it, `[rows, hidden]`.
    /// `tokens` and `parents` are `[rows]` (u32); `parents` is the row of the previous call that each row continues: a
    /// state with the rows in its first dimension is reordered by `index_select(parents, 0)`. At the first call row i
    /// is sentence i. The number of rows shrinks as sentences finish.
    ///
    /// # Shapes
    ///
    /// - start: `[batch]`; u8, u32 or i64
    /// - tokens, parents: `[rows]`, u32
    /// - hidden states from `step`: `[rows, hidden]`
    ///
    /// # Errors
    ///
    /// If a number is out of range, `start` is not a vector of token ids, the hidden states do not match the head, a
    /// distribution is NaN, infinite or impossible, or `step` fails.
    pub fn run<E: From<Error>>(
        &self,
        head: &dyn OutputLayer,
        start: &Tensor,
        mut step: impl FnMut(&Tensor, &Tensor) -> std::result::Result<Tensor, E>,
    ) -> std::result::Result<Vec<Vec<Hypothesis>>, E> {
        self.search(head.vocab_size(), start, |tokens, parents, k| {
            let hidden = step(tokens, parents)?;
            if hidden.rank() != 2 || hidden.dim(0).ok() != tokens.dim(0).ok() {
                return Err(Error::shape("hidden", format!("[{}, hidden]", tokens.elem_count()), hidden.dims()).into());
            }
            Ok(head.top_k(&hidden, k)?)
        })
    }

    /// Searches for continuations of the `start` tokens, `[batch]` (u8, u32 or i64); returns one list per sentence, the
    /// best first. It searches like [`BeamSearch::run`], but for a model without an output layer of this crate, or with
    /// constraints on the next token.
    ///
    /// `next(tokens, parents, k)` returns the `k` most probable token ids after each row, or fewer if fewer are
    /// allowed; no sequence continues with an id of log-probability minus infinity.
    ///
    /// # Shapes
    ///
    /// - start: `[batch]`; u8, u32 or i64
    /// - tokens, parents: `[rows]`, u32
    /// - the result of `next`: ids, u32, and log-probabilities, a float type, `[rows, n]` each; n need not be `k`
    ///
    /// # Errors
    ///
    /// If a number is out of range, `start` is not a vector of token ids, `next` returns another number of rows,
    /// log-probabilities that are NaN or infinite ([`Error::Distribution`]) or above zero by more than rounding
    /// ([`Error::Value`]), or it fails. The position of an error is a row.
    pub fn search<E: From<Error>>(
        &self,
        vocab_size: usize,
        start: &Tensor,
        mut next: impl FnMut(&Tensor, &Tensor, usize) -> std::result::Result<TopK, E>,
    ) -> std::result::Result<Vec<Vec<Hypothesis>>, E> {
        self.validate(vocab_size)?;
        let vector = |values: &[u32]| Tensor::new(values, start.device()).map_err(Error::from);
        if start.rank() != 1 {
            return Err(Error::shape("start", "[batch]", start.dims()).into());
        }
        check_targets("start", start, start.dims())?;
        check_elements("start", start.dims())?;
        let mut beams = Beams::start(read_start(start)?);
        let mut finished = vec![Vec::new(); beams.open.len()];
        // At most as many continuations of each sequence end as there are ends, which leaves `width` others.
        let k = self.width.saturating_add(self.ends.len()).min(vocab_size);
        for length in 1..=self.max_length {
            if beams.open.is_empty() {
                break;
            }
            let top = next(&vector(&beams.tokens)?, &vector(&beams.parents)?, k)?;
            beams = self.extend(&beams.open, &NextIds::read(&top, beams.open.len())?, length, &mut finished);
        }
        for OpenSequence { sentence, tokens, log_prob } in beams.open {
            finished[sentence].push(self.hypothesis(tokens, log_prob, self.max_length, None));
        }
        for hypotheses in &mut finished {
            self.rank(hypotheses);
        }
        Ok(finished)
    }

    /// Extends each open sequence by its most probable next ids, which makes sequences of this length. Those that reach
    /// an end token go to `finished`; it returns the others, up to `width` for each sentence that is not done.
    fn extend(&self, open: &[OpenSequence], next: &NextIds, length: usize, finished: &mut [Vec<Hypothesis>]) -> Beams {
        let mut extended = Beams::default();
        let is_early = length < self.min_length;
        let mut first = 0;
        while first < open.len() {
            let sentence = open[first].sentence;
            let rows = first..first + open[first..].iter().take_while(|o| o.sentence == sentence).count();
            first = rows.end;
            let mut continuations: Vec<(f64, usize, u32)> = rows
                .flat_map(|row| {
                    let log_prob = open[row].log_prob;
                    next.token_ids[row].iter().zip(&next.log_probs[row]).map(move |(&id, &x)| (log_prob + x, row, id))
                })
                .filter(|&(log_prob, _, id)| log_prob > f64::NEG_INFINITY && !(is_early && self.ends.contains(&id)))
                .collect();
            // If log-probabilities are equal, the sequence that ranked higher before comes first, then the lower id.
            continuations.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
            let before = extended.open.len();
            for (rank, &(log_prob, row, id)) in continuations.iter().enumerate() {
                if extended.open.len() - before == self.width {
                    break;
                }
                if !self.ends.contains(&id) {
                    let tokens = [&open[row].tokens[..], &[id]].concat();
                    extended.push(OpenSequence { sentence, tokens, log_prob }, id, row);
                } else if rank < self.width {
                    finished[sentence].push(self.hypothesis(open[row].tokens.clone(), log_prob, length, Some(id)));
                }
            }
            let best_open = extended.open.get(before).map(|open| open.log_prob);
            if best_open.is_none_or(|log_prob| self.is_done(&mut finished[sentence], log_prob)) {
                extended.truncate(before);
            }
        }
        extended
    }

    /// Checks the options of the search.
    fn validate(&self, vocab_size: usize) -> Result<()> {
        check_sizes(&[("width", self.width), ("max_length", self.max_length), ("n_best", self.n_best)])?;
        if self.n_best > self.width {
            return Err(Error::config("n_best", format!("at most width {}", self.width), self.n_best));
        }
        let alpha = self.length_penalty;
        check_number(alpha >= 0.0 && alpha.is_finite(), "length_penalty", "a finite number, at least 0", alpha)?;
        if self.min_length > self.max_length {
            return Err(Error::config(
                "min_length",
                format!("at most max_length {}", self.max_length),
                self.min_length,
            ));
        }
        check_ids("ends", &self.ends, vocab_size)
    }

    /// Makes the result of a sequence of this length, the end token included.
    fn hypothesis(&self, token_ids: Vec<u32>, log_prob: f64, length: usize, end: Option<u32>) -> Hypothesis {
        Hypothesis { token_ids, log_prob, score: self.score(log_prob, length), finished: end.is_some(), end }
    }

    /// Divides a log-probability by the length penalty.
    fn score(&self, log_prob: f64, length: usize) -> f64 {
        log_prob / ((5.0 + length as f64) / 6.0).powf(self.length_penalty)
    }

    /// Sorts hypotheses in descending order of score, and keeps the `n_best`.
    fn rank(&self, hypotheses: &mut Vec<Hypothesis>) {
        hypotheses.sort_by(|a, b| b.score.total_cmp(&a.score).then_with(|| a.token_ids.cmp(&b.token_ids)));
        hypotheses.truncate(self.n_best);
    }

    /// Returns whether no open sequence can still rank among the `n_best`: its log-probability only decreases, and its
    /// penalty is at most the penalty at the maximum length.
    fn is_done(&self, finished: &mut Vec<Hypothesis>, best_open: f64) -> bool {
        self.rank(finished);
        finished.len() == self.n_best
            && finished.last().is_some_and(|worst| worst.score >= self.score(best_open, self.max_length))
    }
}

/// Replaces the column in the error of a log-probability by the token id of the column.
fn with_token_id(error: Error, ids: &[Vec<u32>]) -> Error {
    match error {
        Error::Value { argument, expected, position, index, got } => {
            Error::Value { argument, expected, position, index: ids[position][index] as usize, got }
        }
        error => error,
    }
}

/// Reads the start tokens as u32.
fn read_start(start: &Tensor) -> Result<Vec<u32>> {
    // The host converts them, because candle's GPU backends do not convert empty tensors.
    let tokens = start.to_device(&Device::Cpu)?.to_dtype(DType::I64)?.to_vec1::<i64>()?;
    let read = |(sentence, got): (usize, i64)| {
        let got_at = || format!("{got} at index {sentence}");
        u32::try_from(got).map_err(|_| Error::config("start", "token ids, which fit u32", got_at()))
    };
    tokens.into_iter().enumerate().map(read).collect()
}
