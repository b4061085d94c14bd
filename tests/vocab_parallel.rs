//! Heads whose vocabulary is cut among ranks: their losses and gradients are those of the whole head.

#[path = "common/ranks.rs"]
mod ranks;
#[path = "common/vocabulary.rs"]
mod vocabulary;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

use candle_core::{DType, Device, Tensor, Var};
use mos_head::{
    Collectives, Error, LossOptions, LowRankAdapter, Mixture, NoiseDistribution, Numbers, OptionName, OutputLayer,
    Result, SoftmaxHead, VocabParallel, VocabShard,
};
use ranks::on_ranks;
use vocabulary::{equals_the_whole, numbers, tensor, Problem, D, POSITIONS};

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
        assert!(matches!(head.log_probs(&hidden), Err(Error::Unsupported { option: OptionName::LogProbs, .. })));
        numbers(&head.log_prob(&hidden, &token_ids)?)
    }) {
        for (found, expected) in found?.iter().zip(&expected) {
            assert!((found - expected).abs() < 1e-5, "{found} {expected}");
        }
    }
    Ok(())
}

/// Ranks that count the bytes that they send.
#[derive(Debug)]
struct Counted(Arc<dyn Collectives>, AtomicUsize);

impl Counted {
    fn count(&self, bytes: usize) {
        self.1.fetch_add(bytes, Ordering::Relaxed);
    }
}

impl Collectives for Counted {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn ranks(&self) -> usize {
        self.0.ranks()
    }

    fn all_reduce_sum(&self, numbers: Numbers<'_>) -> Result<()> {
        self.count(numbers.bytes());
        self.0.all_reduce_sum(numbers)
    }

    fn all_gather(&self, numbers: &[f64]) -> Result<Vec<f64>> {
        self.count(size_of_val(numbers));
        self.0.all_gather(numbers)
    }

    fn broadcast(&self, numbers: Numbers<'_>, root: usize) -> Result<()> {
        self.count(numbers.bytes());
        self.0.broadcast(numbers, root)
    }
}

/// The formula of docs/distributed.md.
#[test]
fn a_rank_sends_as_many_bytes_as_the_documentation_says() -> Result<()> {
    const VOCAB: usize = 101;
    for (components, dtype, accumulated) in [(1, DType::F32, 4), (3, DType::BF16, 4), (3, DType::F64, 8)] {
        for (options, in_chunks) in [
            (LossOptions::new(), false),
            (LossOptions::new().with_label_smoothing(0.1), false),
            (LossOptions::new(), true),
            (LossOptions::evaluation().with_z_loss(0.1), false),
        ] {
            let sent = |ranks: Arc<dyn Collectives>| -> Result<usize> {
                let counted = Arc::new(Counted(ranks, AtomicUsize::new(0)));
                let shard = VocabShard::new(counted.clone(), VOCAB)?;
                let problem = Problem::new(VOCAB, components, dtype, VOCAB)?;
                let mixture = mixture(&shard, &problem)?;
                let mut options = options.clone();
                if let (true, Err(Error::Workspace { least, .. })) =
                    (in_chunks, mixture.plan(&options.clone().with_workspace_bytes(1)))
                {
                    options = options.with_workspace_bytes(least);
                    assert_eq!(mixture.plan(&options)?.positions_per_chunk, 1);
                }
                counted.1.store(0, Ordering::Relaxed);
                let loss = mixture.vocab_parallel_loss(&shard, &problem.targets, &options)?;
                if options.train {
                    loss.backward()?;
                }
                Ok(counted.1.load(Ordering::Relaxed))
            };
            let of_position = 16 * components
                + if options.label_smoothing > 0.0 { 16 * components + 16 } else { 0 }
                + if options.train { accumulated * components * D } else { 0 };
            for bytes in on_ranks(3, sent) {
                assert_eq!(bytes?, 136 + POSITIONS * of_position, "{components} {dtype:?} {options:?}");
            }
        }
    }
    Ok(())
}

/// Among ids of equal probability on several ranks, the lowest is the most probable.
#[test]
fn a_target_is_correct_if_no_rank_has_a_better_id() -> Result<()> {
    const VOCAB: usize = 40;
    for components in [1, 3] {
        let problem = Problem::new(VOCAB, components, DType::F32, VOCAB)?;
        // The second half repeats the first.
        let half = |whole: &Tensor| Tensor::cat(&[whole.narrow(0, 0, VOCAB / 2)?, whole.narrow(0, 0, VOCAB / 2)?], 0);
        let (weight, bias) = (half(&problem.weight)?, half(&problem.bias)?);
        let log_priors = problem.log_priors.as_ref().map(Var::as_tensor);
        let whole = Mixture::new(&problem.contexts, log_priors, &weight, Some(&bias))?;
        let best = whole.top_k(1)?.token_ids.flatten_all()?.to_vec1::<u32>()?;
        let targets = best.iter().zip([0, 20, 0, 7].into_iter().cycle()).map(|(best, shift)| (best + shift) % 40);
        let targets = Tensor::from_iter(targets, &Device::Cpu)?;
        let options = LossOptions::evaluation().with_correct(true);
        let expected = numbers(&whole.loss(&targets, &options)?.is_correct.expect("asked for"))?;
        assert!(expected.contains(&0.0) && expected.iter().filter(|&&is_correct| is_correct == 1.0).count() > 10);
        for ranks in 1..=4 {
            let of_rank = |ranks: Arc<dyn Collectives>| -> Result<Vec<f64>> {
                let shard = VocabShard::new(ranks, VOCAB)?;
                let rows = |whole: &Tensor| whole.narrow(0, shard.range().start, shard.range().len());
                let mixture = Mixture::new(&problem.contexts, log_priors, &rows(&weight)?, Some(&rows(&bias)?))?;
                numbers(&mixture.vocab_parallel_loss(&shard, &targets, &options)?.is_correct.expect("asked for"))
            };
            for found in on_ranks(ranks, of_rank) {
                assert_eq!(found?, expected, "{components} {ranks}");
            }
        }
    }
    Ok(())
}

#[test]
fn a_decoder_with_a_softcap_a_scale_and_an_adapter_is_cut() -> Result<()> {
    const VOCAB: usize = 31;
    // Two positions without gradients take another path than many with them.
    for (positions, train) in [(POSITIONS, true), (2, false)] {
        let hidden = Var::from_tensor(&tensor(&[positions, D], 2, DType::F32)?)?;
        let targets = Tensor::from_iter((0..positions).map(|t| (t * 11 % VOCAB) as u32), &Device::Cpu)?;
        // The loss, and the gradients of the hidden states and of both factors of the adapter.
        let results = |shard: Option<&VocabShard>| -> Result<Vec<Vec<f64>>> {
            let range = shard.map_or(0..VOCAB, VocabShard::range);
            let rows = |whole: Tensor| whole.narrow(0, range.start, range.len());
            let weight = rows(tensor(&[VOCAB, D], 1, DType::F32)?)?;
            let (down, up) = (tensor(&[2, D], 3, DType::F32)?, rows(tensor(&[VOCAB, 2], 4, DType::F32)?)?);
            let (down, up) = (Var::from_tensor(&down)?, Var::from_tensor(&up)?);
            let adapter = LowRankAdapter::from_tensors(down.as_tensor().clone(), up.as_tensor().clone(), 0.5)?;
            let head = SoftmaxHead::from_tensors(weight, None)?;
            let head = head.with_softcap(3.0)?.with_logit_scale(0.7)?.with_adapter(adapter)?;
            let options = if train { LossOptions::new() } else { LossOptions::evaluation() };
            let loss = match shard {
                None => head.loss(&hidden, &targets, &options)?,
                Some(shard) => VocabParallel::new(head, shard.clone())?.loss(&hidden, &targets, &options)?,
            };
            let mut results = vec![numbers(&loss.value)?, numbers(&loss.nll)?];
            if train {
                let gradients = loss.backward()?;
                let of = |var: &Var| numbers(gradients.get(var).expect("a gradient"));
                results.extend([of(&hidden)?, of(&down)?, of(&up)?]);
            }
            Ok(results)
        };
        let expected = results(None)?;
        for found in on_ranks(3, |ranks| -> Result<_> {
            let shard = VocabShard::new(ranks, VOCAB)?;
            Ok((shard.range(), results(Some(&shard))?))
        }) {
            let (range, found) = found?;
            for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let expected = if i == 4 { &expected[range.start * 2..range.end * 2] } else { expected };
                assert_eq!(found.len(), expected.len());
                for (found, expected) in found.iter().zip(expected) {
                    assert!((found - expected).abs() < 1e-5, "{i}: {found} {expected}");
                }
            }
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
    // As with other dropout masks.
    let found = errors(3, |shard, problem| {
        let contexts =
            if is_first(shard) { tensor(&[POSITIONS, 2, D], 8, DType::F32)? } else { problem.contexts.copy()? };
        let weight = problem.weight.narrow(0, shard.range().start, shard.range().len())?;
        let mixture = Mixture::new(&contexts, problem.log_priors.as_ref().map(Var::as_tensor), &weight, None)?;
        mixture.vocab_parallel_loss(shard, &problem.targets, &LossOptions::evaluation())
    });
    assert!(found.iter().all(|error| matches!(error, Error::Ranks { argument: "contexts", .. })), "{found:?}");
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
        let negatives = NoiseDistribution::log_uniform(31)?.draw(5, 1)?;
        let options = LossOptions::new().with_sampled_softmax(negatives);
        mixture(shard, problem)?.vocab_parallel_loss(shard, &problem.targets, &options)
    });
    let is_unsupported = |error: &Error| matches!(error, Error::Unsupported { option: OptionName::SampledSoftmax, .. });
    assert!(found.iter().all(is_unsupported), "{found:?}");
}

#[test]
fn each_rank_needs_a_token_id() {
    for result in on_ranks(3, |ranks| VocabShard::new(ranks, 2)) {
        assert!(matches!(result, Err(Error::Config { argument: "vocab_size", .. })));
    }
    let differs = |ranks: Arc<dyn Collectives>| match ranks.rank() {
        0 => VocabShard::with_rows(ranks, 10),
        _ => VocabShard::new(ranks, 10),
    };
    for result in on_ranks(3, differs) {
        assert!(matches!(result, Err(Error::Ranks { argument: "vocab_size", .. })));
    }
    for result in on_ranks(3, |ranks| VocabShard::new(ranks.clone(), 10 + ranks.rank())) {
        assert!(matches!(result, Err(Error::Ranks { argument: "vocab_size", .. })));
    }
}
