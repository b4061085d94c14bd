//! Heads whose vocabulary is cut among ranks: their losses and gradients are those of the whole head.

#[path = "common/ranks.rs"]
mod ranks;

use std::sync::Arc;

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::ops::log_softmax;
use mos_head::{
    Collectives, Error, LossOptions, Mixture, OptionName, OutputLayer, Reduction, Result, SoftmaxHead, VocabParallel,
    VocabShard,
};
use ranks::on_ranks;

const POSITIONS: usize = 23;
const D: usize = 7;

fn tensor(shape: &[usize], seed: usize, dtype: DType) -> Result<Tensor> {
    let n = shape.iter().product();
    let values: Vec<f32> = (0..n).map(|i| ((i * 7919 + seed * 104_729 + i / 13) % 201) as f32 / 50.0 - 2.0).collect();
    Ok(Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)?)
}

fn numbers(tensor: &Tensor) -> Result<Vec<f64>> {
    Ok(tensor.flatten_all()?.to_dtype(DType::F64)?.to_vec1()?)
}

/// The operands of a mixture over the whole vocabulary.
struct Problem {
    contexts: Var,
    log_priors: Option<Var>,
    weight: Tensor,
    bias: Tensor,
    targets: Tensor,
}

impl Problem {
    fn new(vocab: usize, components: usize, dtype: DType, most_target: usize) -> Result<Self> {
        let accumulation = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let log_priors = || log_softmax(&tensor(&[POSITIONS, components], 2, accumulation)?, 1);
        let targets = (0..POSITIONS).map(|t| ((t * 37 + 5) % most_target) as u32);
        Ok(Problem {
            contexts: Var::from_tensor(&tensor(&[POSITIONS, components, D], 1, dtype)?)?,
            log_priors: (components > 1).then(|| Ok::<_, Error>(Var::from_tensor(&log_priors()?)?)).transpose()?,
            weight: tensor(&[vocab, D], 3, dtype)?,
            bias: tensor(&[vocab], 4, dtype)?,
            targets: Tensor::from_iter(targets, &Device::Cpu)?,
        })
    }

    /// The value, and the gradients of contexts, log-priors, weight and bias, whose rows are these ids'.
    fn results(
        &self,
        ids: std::ops::Range<usize>,
        upstream: &Tensor,
        loss: impl Fn(&Mixture) -> Result<mos_head::Loss>,
    ) -> Result<Vec<Vec<f64>>> {
        let rows = |whole: &Tensor| Ok::<_, Error>(Var::from_tensor(&whole.narrow(0, ids.start, ids.len())?)?);
        let (weight, bias) = (rows(&self.weight)?, rows(&self.bias)?);
        let contexts = Var::from_tensor(&self.contexts)?;
        let log_priors = self.log_priors.as_ref().map(|var| Var::from_tensor(var)).transpose()?;
        let mixture =
            Mixture::new(&contexts, log_priors.as_ref().map(Var::as_tensor), &weight, Some(bias.as_tensor()))?;
        let loss = loss(&mixture)?;
        let store = match loss.value.rank() {
            0 => loss.backward()?,
            _ => (&loss.value * upstream.to_dtype(loss.value.dtype())?)?.sum_all()?.backward()?,
        };
        let mut results = vec![numbers(&loss.value)?, numbers(&loss.nll)?, numbers(&loss.sum)?, numbers(&loss.count)?];
        for var in [Some(&contexts), log_priors.as_ref(), Some(&weight), Some(&bias)].into_iter().flatten() {
            results.push(store.get(var).map_or(Ok(vec![]), numbers)?);
        }
        Ok(results)
    }
}

fn options(vocab: usize) -> Result<Vec<LossOptions>> {
    let new = LossOptions::new;
    let of_positions = tensor(&[POSITIONS], 5, DType::F32)?.abs()?;
    let of_ids = tensor(&[vocab], 6, DType::F32)?.abs()?;
    Ok(vec![
        new(),
        new().with_reduction(Reduction::Sum).with_z_loss(0.01),
        new().with_reduction(Reduction::None).with_ignore_index(42),
        new().with_position_weights(of_positions).with_class_weights(of_ids).with_ignore_index(5),
        // Chunks of a few positions.
        new().with_z_loss(0.1).with_workspace_bytes(400_000),
    ])
}

/// Losses and gradients on the ranks equal those of the whole vocabulary.
fn equals_the_whole(ranks: &Arc<dyn Collectives>) -> Result<()> {
    let dtypes = [(DType::F32, 2e-5), (DType::F64, 1e-12), (DType::F16, 2e-2), (DType::BF16, 1e-1)];
    for (dtype, tolerance) in dtypes {
        // Not a multiple of the ranks; all targets of one rank; several tiles.
        for (vocab, components, most_target) in [(31, 1, 31), (31, 3, 31), (101, 4, 6), (701, 2, 701)] {
            let problem = Problem::new(vocab, components, dtype, most_target)?;
            let upstream = tensor(&[POSITIONS], 7, DType::F32)?;
            let rows = if ranks.rank() == 0 { 2 } else { (vocab - 2) / (ranks.ranks() - 1).max(1) };
            let shards = [
                VocabShard::new(ranks.clone(), vocab)?,
                // Uneven: the vocabulary may be smaller.
                VocabShard::with_rows(ranks.clone(), if ranks.ranks() == 1 { vocab } else { rows })?,
            ];
            for shard in &shards {
                let whole = Problem {
                    weight: problem.weight.narrow(0, 0, shard.vocab_size())?,
                    bias: problem.bias.narrow(0, 0, shard.vocab_size())?,
                    targets: problem.targets.minimum(&Tensor::full(
                        shard.vocab_size() as u32 - 1,
                        POSITIONS,
                        &Device::Cpu,
                    )?)?,
                    contexts: Var::from_tensor(&problem.contexts)?,
                    log_priors: problem.log_priors.clone(),
                };
                for (i, options) in options(shard.vocab_size())?.iter().enumerate() {
                    let all = 0..shard.vocab_size();
                    let expected = whole.results(all, &upstream, |mixture| mixture.loss(&whole.targets, options))?;
                    let found = whole.results(shard.range(), &upstream, |mixture| {
                        mixture.vocab_parallel_loss(shard, &whole.targets, options)
                    })?;
                    let decoder = expected.len() - 2;
                    for (j, (found, expected)) in found.iter().zip(&expected).enumerate() {
                        let of_id = if j == decoder { D } else { 1 };
                        let expected = match j >= decoder {
                            true => &expected[shard.range().start * of_id..shard.range().end * of_id],
                            false => &expected[..],
                        };
                        assert_eq!(found.len(), expected.len());
                        let largest = expected.iter().fold(0f64, |largest, x| largest.max(x.abs()));
                        for (found, expected) in found.iter().zip(expected) {
                            let what = format!("{dtype:?} {vocab} {components} {i} {j} rank {}", ranks.rank());
                            let difference = (found - expected).abs();
                            assert!(difference <= tolerance * (largest + 1e-3), "{what}: {found} {expected}");
                        }
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn a_loss_equals_the_loss_of_the_whole_vocabulary() -> Result<()> {
    for ranks in 1..=4 {
        for result in on_ranks(ranks, |ranks| equals_the_whole(&ranks)) {
            result?;
        }
    }
    Ok(())
}

#[test]
fn every_rank_has_the_same_bits_in_every_run() -> Result<()> {
    let run = |ranks: Arc<dyn Collectives>| -> Result<Vec<Vec<f64>>> {
        let shard = VocabShard::new(ranks, 701)?;
        let problem = Problem::new(701, 3, DType::F32, 701)?;
        let upstream = tensor(&[POSITIONS], 7, DType::F32)?;
        let options = LossOptions::new().with_z_loss(0.1);
        let results = problem.results(shard.range(), &upstream, |mixture| {
            mixture.vocab_parallel_loss(&shard, &problem.targets, &options)
        })?;
        // The value and the gradients of contexts and log-priors.
        Ok(results[..6].to_vec())
    };
    let first: Vec<_> = on_ranks(3, run).into_iter().collect::<Result<_>>()?;
    let second: Vec<_> = on_ranks(3, run).into_iter().collect::<Result<_>>()?;
    assert!(first.iter().all(|of_rank| *of_rank == first[0]));
    assert_eq!(first, second);
    Ok(())
}

#[test]
fn a_head_has_the_whole_vocabulary_and_log_probs_of_ids() -> Result<()> {
    let (weight, hidden) = (tensor(&[50, D], 1, DType::F32)?, tensor(&[2, 3, D], 2, DType::F32)?);
    let token_ids = Tensor::new(&[[0u32, 49, 17], [16, 33, 34]], &Device::Cpu)?;
    let whole = SoftmaxHead::from_tensors(weight.clone(), None)?;
    let expected = numbers(&whole.log_prob(&hidden, &token_ids)?)?;
    for found in on_ranks(3, |ranks| -> Result<Vec<f64>> {
        let shard = VocabShard::new(ranks, 50)?;
        let rows = weight.narrow(0, shard.range().start, shard.range().len())?;
        let head = VocabParallel::new(SoftmaxHead::from_tensors(rows, None)?, shard)?;
        assert_eq!((head.hidden_size(), head.vocab_size()), (D, 50));
        assert!(matches!(head.top_k(&hidden, 3), Err(Error::Unsupported { option: OptionName::LogProbs, .. })));
        numbers(&head.log_prob(&hidden, &token_ids)?)
    }) {
        for (found, expected) in found?.iter().zip(&expected) {
            assert!((found - expected).abs() < 1e-5, "{found} {expected}");
        }
    }
    Ok(())
}

/// An error on every rank, and none that waits.
fn errors(ranks: usize, call: impl Fn(&VocabShard, &Problem) -> Result<mos_head::Loss> + Sync) -> Vec<Error> {
    let run = |ranks: Arc<dyn Collectives>| {
        let shard = VocabShard::new(ranks, 31)?;
        let problem = Problem::new(31, 2, DType::F32, 31)?;
        call(&shard, &problem)
    };
    on_ranks(ranks, run).into_iter().map(|result| result.expect_err("an error")).collect()
}

fn mixture(shard: &VocabShard, problem: &Problem) -> Result<Mixture> {
    let weight = problem.weight.narrow(0, shard.range().start, shard.range().len())?;
    Mixture::new(&problem.contexts, problem.log_priors.as_ref().map(Var::as_tensor), &weight, None)
}

#[test]
fn ranks_that_disagree_get_an_error_on_every_rank() {
    let is_first = |shard: &VocabShard| shard.range().start == 0;
    let found = errors(3, |shard, problem| {
        let z_loss = if is_first(shard) { 0.0 } else { 0.1 };
        let options = LossOptions::new().with_z_loss(z_loss);
        mixture(shard, problem)?.vocab_parallel_loss(shard, &problem.targets, &options)
    });
    assert!(found.iter().all(|error| matches!(error, Error::Ranks { argument: "options", .. })), "{found:?}");
    let found = errors(3, |shard, problem| {
        let targets = if is_first(shard) { problem.targets.zeros_like()? } else { problem.targets.clone() };
        mixture(shard, problem)?.vocab_parallel_loss(shard, &targets, &LossOptions::new())
    });
    assert!(found.iter().all(|error| matches!(error, Error::Ranks { argument: "targets", .. })), "{found:?}");
    // One rank has an error of its own: a budget, a target, or an option.
    let found = errors(3, |shard, problem| {
        let options = LossOptions::new().with_workspace_bytes(if is_first(shard) { 10 } else { 1 << 30 });
        mixture(shard, problem)?.vocab_parallel_loss(shard, &problem.targets, &options)
    });
    assert!(matches!(found[0], Error::Workspace { .. }), "{found:?}");
    assert!(found[1..].iter().all(|error| matches!(error, Error::Ranks { .. })), "{found:?}");
    let found = errors(2, |shard, problem| {
        let targets = (&problem.targets + if is_first(shard) { 31.0 } else { 0.0 })?;
        mixture(shard, problem)?.vocab_parallel_loss(shard, &targets, &LossOptions::new())
    });
    assert!(matches!(found[0], Error::Target { vocab_size: 31, .. }), "{found:?}");
    assert!(matches!(found[1], Error::Ranks { .. }), "{found:?}");
    let found = errors(2, |shard, problem| {
        let options = LossOptions::new().with_label_smoothing(0.1);
        mixture(shard, problem)?.vocab_parallel_loss(shard, &problem.targets, &options)
    });
    let is_unsupported = |error: &Error| matches!(error, Error::Unsupported { option: OptionName::LabelSmoothing, .. });
    assert!(found.iter().all(is_unsupported), "{found:?}");
}

#[test]
fn each_rank_needs_a_token_id() {
    for result in on_ranks(3, |ranks| VocabShard::new(ranks, 2)) {
        assert!(matches!(result, Err(Error::Config { argument: "vocab_size", .. })));
    }
    for result in on_ranks(3, |ranks| VocabShard::new(ranks.clone(), 10 + ranks.rank())) {
        assert!(matches!(result, Err(Error::Ranks { argument: "vocab_size", .. })));
    }
}
