//! Heads whose vocabulary is cut among ranks: their losses and gradients are those of the whole head.

mod common;
#[path = "common/ranks.rs"]
mod ranks;
#[path = "common/vocabulary.rs"]
mod vocabulary;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

use approx::assert_abs_diff_eq;
use candle_core::{DType, Device, DeviceLocation, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use common::compare::{assert_close, Tolerance};
use common::devices;
use common::values::{self, fill, numbers, tensor, Numbers};
use mos_head::decode::{Sampler, Sampling};
use mos_head::distill::{DistillOptions, Teacher};
use mos_head::distributed::{self, Collectives, VocabParallel, VocabShard};
use mos_head::policy::{PolicyBatch, PolicyNormalization, PolicyOptions};
use mos_head::sampled::NoiseDistribution;
use mos_head::score::{ChunkScores, ChunkTerms, ScoreOptions};
use mos_head::{
    Distributions, Error, LossOptions, Mixture, MixtureConfig, MixtureOfSoftmaxes, OptionName, OutputLayer, Reduction,
    Result, SoftmaxHead,
};
use ranks::on_ranks;
use vocabulary::{
    adapted_decoders_equal_the_whole, correct_targets_are_those_of_the_whole, equals_the_whole, Problem, D, POSITIONS,
};

#[test]
fn a_loss_equals_the_loss_of_the_whole_vocabulary() -> Result<()> {
    for ranks in 1..=4 {
        for result in on_ranks(ranks, |ranks| equals_the_whole(&ranks, &Device::Cpu)) {
            result?;
        }
    }
    Ok(())
}

/// The GPU as a device of this thread alone: a process that is a rank has one of its own.
fn own(gpu: &Device) -> Result<Device> {
    Ok(match gpu.location() {
        DeviceLocation::Cpu => Device::Cpu,
        DeviceLocation::Cuda { gpu_id } => Device::new_cuda(gpu_id)?,
        DeviceLocation::Metal { gpu_id } => Device::new_metal(gpu_id)?,
    })
}

#[test]
fn a_loss_on_a_gpu_equals_the_loss_of_the_whole_vocabulary() -> Result<()> {
    for gpu in &devices()[1..] {
        for ranks in 1..=3 {
            for result in on_ranks(ranks, |ranks| equals_the_whole(&ranks, &own(gpu)?)) {
                result?;
            }
        }
    }
    Ok(())
}

#[test]
fn every_rank_has_the_same_bits_in_every_run() -> Result<()> {
    for device in devices() {
        let run = |ranks: Arc<dyn Collectives>| -> Result<Vec<Numbers>> {
            let device = own(&device)?;
            let shard = VocabShard::new(ranks, 701)?;
            let problem = Problem::new(701, 3, DType::F32, 701)?.on(&device)?;
            let upstream = tensor(&[POSITIONS], 7, DType::F32)?.to_device(&device)?;
            let mut all_results = Vec::new();
            let smoothing = if device.is_cpu() { 0.1 } else { 0.0 };
            for options in [LossOptions::new().with_z_loss(0.1), LossOptions::new().with_label_smoothing(smoothing)] {
                let results = problem.results(shard.range(), &upstream, |mixture| {
                    mixture.vocab_parallel(&shard).loss(&problem.targets, &options)
                })?;
                // The value and the gradients of contexts and log-priors.
                all_results.extend_from_slice(&results[..6]);
            }
            Ok(all_results)
        };
        let first: Vec<_> = on_ranks(3, run).into_iter().collect::<Result<_>>()?;
        let second: Vec<_> = on_ranks(3, run).into_iter().collect::<Result<_>>()?;
        assert!(first.iter().all(|results| *results == first[0]));
        assert_eq!(first, second);
    }
    Ok(())
}

#[test]
fn a_head_has_the_whole_vocabulary_and_log_probs_of_ids() -> Result<()> {
    let (weight, hidden) = (tensor(&[50, D], 1, DType::F32)?, tensor(&[2, 3, D], 2, DType::F32)?);
    let token_ids = Tensor::new(&[[0u32, 49, 17], [16, 33, 34]], &Device::Cpu)?;
    let whole = SoftmaxHead::from_tensors(weight.clone(), None)?;
    let expected = numbers(&whole.log_prob(&hidden, &token_ids)?);
    for found in on_ranks(3, |ranks| -> Result<Numbers> {
        let shard = VocabShard::new(ranks, 50)?;
        let rows = weight.narrow(0, shard.range().start, shard.range().len())?;
        let head = VocabParallel::new(SoftmaxHead::from_tensors(rows, None)?, shard)?;
        assert_eq!((head.hidden_size(), head.vocab_size()), (D, 50));
        assert!(matches!(head.log_probs(&hidden), Err(Error::Unsupported { option: OptionName::LogProbs, .. })));
        Ok(numbers(&head.log_prob(&hidden, &token_ids)?))
    }) {
        assert_abs_diff_eq!(found?, expected, epsilon = 1e-5);
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

    fn all_reduce_sum(&self, numbers: distributed::Numbers<'_>) -> Result<()> {
        self.count(numbers.bytes());
        self.0.all_reduce_sum(numbers)
    }

    fn all_gather(&self, numbers: &[f64]) -> Result<Vec<f64>> {
        self.count(size_of_val(numbers));
        self.0.all_gather(numbers)
    }

    fn broadcast(&self, numbers: distributed::Numbers<'_>, root: usize) -> Result<()> {
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
                let options = if in_chunks { vocabulary::in_chunks(&mixture, &options)? } else { options.clone() };
                counted.1.store(0, Ordering::Relaxed);
                let loss = mixture.vocab_parallel(&shard).loss(&problem.targets, &options)?;
                if options.train {
                    loss.backward()?;
                }
                Ok(counted.1.load(Ordering::Relaxed))
            };
            let position_bytes = 16 * components
                + if options.label_smoothing > 0.0 { 8 * components + 16 } else { 0 }
                + if options.train { accumulated * components * D } else { 0 };
            for bytes in on_ranks(3, sent) {
                assert_eq!(bytes?, 136 + POSITIONS * position_bytes, "{components} {dtype:?} {options:?}");
            }
        }
    }
    Ok(())
}

/// Among ids of equal probability on several ranks, the lowest is the most probable.
#[test]
fn a_target_is_correct_if_no_rank_has_a_better_id() -> Result<()> {
    on_one_to_four(correct_targets_are_those_of_the_whole)
}

#[test]
fn a_decoder_with_a_softcap_a_scale_and_an_adapter_is_cut() -> Result<()> {
    on_one_to_four(adapted_decoders_equal_the_whole)
}

/// Calls a comparison on as many threads as ranks.
fn on_one_to_four(compare: fn(&Arc<dyn Collectives>) -> Result<()>) -> Result<()> {
    for ranks in 1..=4 {
        on_ranks(ranks, |ranks| compare(&ranks)).into_iter().collect::<Result<()>>()?;
    }
    Ok(())
}

/// NaN in the contexts of ignored positions reaches no gradient, the one of the log-priors included.
#[test]
fn an_ignored_position_may_be_nan() -> Result<()> {
    for device in devices() {
        for result in on_ranks(2, |ranks| -> Result<()> {
            let device = own(&device)?;
            let shard = VocabShard::new(ranks, 31)?;
            let problem = Problem::new(31, 3, DType::F32, 31)?;
            // The target of position 0 is ignored.
            let ignored = problem.targets.to_vec1::<u32>()?[0];
            let is_nan = (0..POSITIONS).map(|t| if t == 0 { f32::NAN } else { 0.0 });
            let is_nan = Tensor::from_iter(is_nan, &Device::Cpu)?.reshape((POSITIONS, 1, 1))?;
            let contexts = Var::from_tensor(&problem.contexts.broadcast_add(&is_nan)?)?;
            let problem = Problem { contexts, ..problem }.on(&device)?;
            let upstream = tensor(&[POSITIONS], 7, DType::F32)?.to_device(&device)?;
            for reduction in [Reduction::Mean, Reduction::None] {
                let options = LossOptions::new().with_ignore_index(ignored.into()).with_reduction(reduction);
                let results = problem.results(shard.range(), &upstream, |mixture| {
                    mixture.vocab_parallel(&shard).loss(&problem.targets, &options)
                })?;
                assert!(results.iter().flatten().all(|x| x.is_finite()), "{results:?}");
            }

            // Nor one of a head's projection.
            let variables = VarMap::new();
            let vb = VarBuilder::from_varmap(&variables, DType::F32, &device);
            let head = MixtureOfSoftmaxes::new(&MixtureConfig::new(D, shard.range().len(), 3), vb)?;
            // The same on every rank.
            fill(&variables, 2.0)?;
            let hidden = problem.contexts.narrow(1, 0, 1)?.squeeze(1)?;
            let options = LossOptions::new().with_ignore_index(ignored.into());
            let loss = VocabParallel::new(head, shard)?.loss(&hidden, &problem.targets, &options)?;
            let gradients = loss.backward()?;
            for variable in variables.all_vars() {
                let variable_gradient = numbers(gradients.get(&variable).expect("a gradient"));
                assert!(variable_gradient.iter().all(|x| x.is_finite()), "{variable_gradient:?}");
            }
            Ok(())
        }) {
            result?;
        }
    }
    Ok(())
}

#[test]
fn a_batch_may_be_empty() -> Result<()> {
    for device in devices() {
        for result in on_ranks(2, |ranks| -> Result<()> {
            let device = own(&device)?;
            let shard = VocabShard::new(ranks, 31)?;
            let weight = Var::zeros((shard.range().len(), D), DType::F32, &device)?;
            let contexts = Var::zeros((0, 1, D), DType::F32, &device)?;
            let targets = Tensor::zeros(0, DType::U32, &device)?;
            let mixture = Mixture::new(&contexts, None, &weight, None)?;
            let loss = mixture.vocab_parallel(&shard).loss(&targets, &LossOptions::new())?;
            assert_eq!(numbers(&loss.value), [0.0]);
            let gradients = loss.backward()?;
            assert!(numbers(gradients.get(&weight).expect("a gradient")).iter().all(|&x| x == 0.0));
            Ok(())
        }) {
            result?;
        }
    }
    Ok(())
}

/// As many ids as ranks, of which some are impossible; targets that are all ignored; a position that is NaN.
#[test]
fn extremes_are_those_of_the_whole_vocabulary() -> Result<()> {
    for components in [1, 3] {
        let problem = Problem::new(3, components, DType::F32, 2)?;
        let log_priors = problem.log_priors.as_ref().map(Var::as_tensor);
        let nan = (0..POSITIONS).map(|t| if t == 4 { f32::NAN } else { 0.0 });
        let nan = Tensor::from_iter(nan, &Device::Cpu)?.reshape((POSITIONS, 1, 1))?;
        let nan_contexts = problem.contexts.broadcast_add(&nan)?;
        let none = LossOptions::new().with_reduction(Reduction::None);
        for (contexts, bias, ignored) in [
            (problem.contexts.as_tensor(), [0.0, 0.0, f32::NEG_INFINITY], 7),
            (problem.contexts.as_tensor(), [f32::NEG_INFINITY; 3], 7),
            (problem.contexts.as_tensor(), [0.0; 3], 1),
            (&nan_contexts, [0.0; 3], 7),
        ] {
            let bias = Tensor::new(&bias, &Device::Cpu)?;
            let targets = if ignored == 1 { problem.targets.ones_like()? } else { problem.targets.clone() };
            for options in [none.clone(), none.clone().with_label_smoothing(0.1).with_correct(true)] {
                let options = options.with_ignore_index(ignored);
                let whole = Mixture::new(contexts, log_priors, &problem.weight, Some(&bias))?;
                let expected = numbers(&whole.loss(&targets, &options)?.value);
                for found in on_ranks(3, |ranks| -> Result<Numbers> {
                    let shard = VocabShard::new(ranks, 3)?;
                    let rows = |whole: &Tensor| whole.narrow(0, shard.range().start, 1);
                    let mixture = Mixture::new(contexts, log_priors, &rows(&problem.weight)?, Some(&rows(&bias)?))?;
                    Ok(numbers(&mixture.vocab_parallel(&shard).loss(&targets, &options)?.value))
                }) {
                    assert_abs_diff_eq!(found?, expected, epsilon = 1e-5);
                }
            }
        }
    }
    Ok(())
}

/// A rank whose backward pass computes, and one that makes another call.
#[test]
fn a_backward_pass_is_a_call_of_all_ranks() {
    let on_rank = |ranks: Arc<dyn Collectives>| -> Result<()> {
        let (rank, shard) = (ranks.rank(), VocabShard::new(ranks, 31)?);
        let problem = Problem::new(31, 2, DType::F32, 31)?;
        let options = LossOptions::new().with_reduction(Reduction::None);
        let loss = mixture(&shard, &problem)?.vocab_parallel(&shard).loss(&problem.targets, &options)?;
        match rank {
            0 => mixture(&shard, &problem)?.vocab_parallel(&shard).loss(&problem.targets, &options).map(|_| ()),
            _ => Ok(loss.value.sum_all()?.backward().map(|_| ())?),
        }
    };
    let found = on_ranks(3, on_rank);
    assert!(matches!(found[0], Err(Error::Ranks { argument: "the call", .. })), "{found:?}");
    assert!(found.iter().all(|result| result.as_ref().is_err_and(|error| error.to_string().contains("the call"))));
}

#[test]
fn a_policy_loss_without_an_entropy_is_that_of_the_whole_vocabulary() -> Result<()> {
    let (weight, hidden) = (tensor(&[50, D], 1, DType::F64)?, tensor(&[2, 3, D], 2, DType::F64)?);
    let token_ids = Tensor::new(&[[0u32, 49, 17], [16, 99, 34]], &Device::Cpu)?;
    // One token does not count.
    let mask = Tensor::new(&[[1u8, 1, 1], [1, 0, 1]], &Device::Cpu)?;
    let numbers_of = |seed| tensor(&[2, 3], seed, DType::F64);
    let batch = PolicyBatch::new(token_ids, numbers_of(3)?)
        .with_mask(mask)
        .with_old_log_probs((numbers_of(4)? - 4.0)?)
        .with_reference_log_probs((numbers_of(5)? - 4.0)?);
    let options = PolicyOptions::new().with_kl(0.1).with_normalization(PolicyNormalization::Sequences);
    let outputs = |head: &dyn OutputLayer, hidden: &Var, weight: &Var| -> Result<[Numbers; 3]> {
        let loss = head.policy_loss(hidden, &batch, &options)?;
        let gradients = loss.backward()?;
        let gradient = |var: &Var| numbers(gradients.get(var).expect("a gradient"));
        Ok([numbers(&loss.value), gradient(hidden), gradient(weight)])
    };
    let (whole_hidden, whole_weight) = (Var::from_tensor(&hidden)?, Var::from_tensor(&weight)?);
    let whole = SoftmaxHead::from_tensors(whole_weight.as_tensor().clone(), None)?;
    let [value, hidden_gradient, weight_gradient] = outputs(&whole, &whole_hidden, &whole_weight)?;
    for count in 1..=3 {
        let on_rank = |ranks: Arc<dyn Collectives>| -> Result<_> {
            let shard = VocabShard::new(ranks, 50)?;
            let rows = shard.range();
            let (own, hidden) = (weight.narrow(0, rows.start, rows.len())?, Var::from_tensor(&hidden)?);
            let own = Var::from_tensor(&own)?;
            let head = VocabParallel::new(SoftmaxHead::from_tensors(own.as_tensor().clone(), None)?, shard)?;
            Ok((rows, outputs(&head, &hidden, &own)?))
        };
        for found in on_ranks(count, on_rank) {
            let (rows, found) = found?;
            let expected = [&value[..], &hidden_gradient, &weight_gradient[rows.start * D..rows.end * D]];
            for (found, expected) in found.iter().zip(expected) {
                assert_abs_diff_eq!(*found, *expected, epsilon = 1e-11);
            }
        }
    }
    Ok(())
}

#[test]
fn what_scores_of_several_ranks_lack_is_named_on_every_rank() -> Result<()> {
    let (weight, hidden) = (tensor(&[50, D], 1, DType::F32)?, tensor(&[3, D], 2, DType::F32)?);
    let ids = |ids: [u32; 3]| Tensor::new(&ids, &Device::Cpu);
    let messages = |call: &(dyn Fn(&dyn OutputLayer, usize) -> Result<()> + Sync)| {
        on_ranks(2, |ranks| {
            let rank = ranks.rank();
            let shard = VocabShard::new(ranks, 50).expect("a shard");
            let rows = weight.narrow(0, shard.range().start, shard.range().len()).expect("rows");
            let head = SoftmaxHead::from_tensors(rows, None).expect("a head");
            let head = VocabParallel::new(head, shard).expect("a head");
            call(&head, rank).expect_err("an error").to_string()
        })
    };
    let policy = |options: PolicyOptions| {
        messages(&|head, _| {
            let batch = PolicyBatch::new(ids([0, 49, 17])?, tensor(&[3], 3, DType::F32)?);
            head.policy_loss(&hidden, &batch, &options).map(|_| ())
        })
    };
    let score =
        |options: ScoreOptions| messages(&|head, _| head.score(&hidden, &ids([0, 49, 17])?, &options).map(|_| ()));
    let head = "not supported by a vocabulary-parallel head";
    for (found, option) in [
        (policy(PolicyOptions::new().with_entropy(0.1)), "entropy"),
        (policy(PolicyOptions::new().with_temperature(0.7)), "temperature"),
        (score(ScoreOptions::new().with_entropy(true)), "entropy"),
        (score(ScoreOptions::new().with_outside(true)), "outside"),
        (score(ScoreOptions::new().with_collision(true)), "collision"),
        (score(ScoreOptions::new().with_mean_logit(true)), "mean_logit"),
    ] {
        assert_eq!(found, [format!("{option}: {head}"), format!("{option}: {head}")]);
    }
    // Results that need the log-probabilities of all ids.
    let teacher = Teacher::from_log_probs(&Tensor::full(-50f32.ln(), (3, 50), &Device::Cpu)?);
    type Call<'a> = &'a (dyn Fn(&dyn OutputLayer, &Tensor) -> Result<()> + Sync);
    let calls: [(&str, Call); 3] = [
        ("log_probs", &|head, hidden| head.log_probs(hidden).map(|_| ())),
        ("sample", &|head, hidden| head.sample(hidden, &mut Sampler::new(Sampling::new(), 1)?).map(|_| ())),
        ("distill", &|head, hidden| head.distill(hidden, &teacher, &DistillOptions::default()).map(|_| ())),
    ];
    for (option, call) in calls {
        let found = messages(&|head, _| call(head, &hidden));
        assert_eq!(found, [format!("{option}: {head}"), format!("{option}: {head}")]);
    }
    // No rank waits for one whose hidden states are of another size.
    let narrow = |rank: usize| hidden.narrow(1, 0, hidden.dim(1)? - rank);
    let calls: [Call; 4] = [
        &|head, hidden| head.top_k(hidden, 2).map(|_| ()),
        &|head, hidden| head.score(hidden, &ids([0, 49, 17])?, &ScoreOptions::new()).map(|_| ()),
        &|head, hidden| head.loss(hidden, &ids([0, 49, 17])?, &LossOptions::new()).map(|_| ()),
        &|head, hidden| {
            let batch = PolicyBatch::new(ids([0, 49, 17])?, tensor(&[3], 3, DType::F32)?);
            head.policy_loss(hidden, &batch, &PolicyOptions::new()).map(|_| ())
        },
    ];
    for call in calls {
        let found = messages(&|head, rank| call(head, &narrow(rank)?));
        assert!(found[0].contains("expected the same on every rank"), "{found:?}");
        assert!(found[1].starts_with("hidden: expected"), "{found:?}");
    }
    // Nor for one whose ids a function of scores refuses.
    let found = on_ranks(2, |ranks| -> Result<()> {
        let (rank, shard) = (ranks.rank(), VocabShard::new(ranks, 50)?);
        let rows = weight.narrow(0, shard.range().start, shard.range().len())?;
        let mixture = Mixture::new(&hidden.unsqueeze(1)?, None, &rows, None)?.vocab_parallel(&shard);
        let ids = ids([0, 49, 17])?.narrow(0, 0, 3 - rank)?;
        let terms = |scores: ChunkScores| Ok(ChunkTerms::new(scores.log_prob.clone(), scores.log_prob.ones_like()?));
        mixture.score_loss(&ids, &ScoreOptions::new(), terms).map(|_| ())
    });
    let found: Vec<String> = found.into_iter().map(|found| found.expect_err("an error").to_string()).collect();
    assert!(found[0].contains("expected the same on every rank"), "{found:?}");
    assert!(found[1].starts_with("token_ids: expected"), "{found:?}");
    let found = messages(&|head, rank| {
        let ids = ids([0, 49, 17])?.narrow(0, 0, 3 - rank)?;
        head.score(&hidden, &ids, &ScoreOptions::new()).map(|_| ())
    });
    assert!(found[0].contains("expected the same on every rank"), "{found:?}");
    assert!(found[1].starts_with("token_ids: expected"), "{found:?}");
    // An id outside on one rank alone.
    let found = messages(&|head, rank| head.log_prob(&hidden, &ids([0, 49, 17 + 50 * rank as u32])?).map(|_| ()));
    assert!(found[0].contains("expected the same on every rank"), "{found:?}");
    assert_eq!(found[1], "token_ids: 67 at position 2 is not in 0..50, the vocabulary");
    Ok(())
}

/// An error on every rank, and none that waits.
fn errors(ranks: usize, call: impl Fn(&VocabShard, &Problem) -> Result<mos_head::Loss> + Sync) -> Vec<Error> {
    errors_of(ranks, |_| Ok(Device::Cpu), call)
}

/// The same of ranks on these devices.
fn errors_of(
    ranks: usize,
    device: impl Fn(usize) -> Result<Device> + Sync,
    call: impl Fn(&VocabShard, &Problem) -> Result<mos_head::Loss> + Sync,
) -> Vec<Error> {
    let run = |ranks: Arc<dyn Collectives>| {
        let device = device(ranks.rank())?;
        let shard = VocabShard::new(ranks, 31)?;
        let problem = Problem::new(31, 2, DType::F32, 31)?.on(&device)?;
        call(&shard, &problem).map(|_| ())
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
        mixture(shard, problem)?.vocab_parallel(shard).loss(&problem.targets, &options)
    });
    assert!(found.iter().all(|error| matches!(error, Error::Ranks { argument: "options", .. })), "{found:?}");
    let found = errors(3, |shard, problem| {
        let targets = if is_first(shard) { problem.targets.zeros_like()? } else { problem.targets.clone() };
        mixture(shard, problem)?.vocab_parallel(shard).loss(&targets, &LossOptions::new())
    });
    assert!(found.iter().all(|error| matches!(error, Error::Ranks { argument: "targets", .. })), "{found:?}");
    // As with other dropout masks.
    let found = errors(3, |shard, problem| {
        let contexts =
            if is_first(shard) { tensor(&[POSITIONS, 2, D], 8, DType::F32)? } else { problem.contexts.copy()? };
        let weight = problem.weight.narrow(0, shard.range().start, shard.range().len())?;
        let mixture = Mixture::new(&contexts, problem.log_priors.as_ref().map(Var::as_tensor), &weight, None)?;
        mixture.vocab_parallel(shard).loss(&problem.targets, &LossOptions::evaluation())
    });
    assert!(found.iter().all(|error| matches!(error, Error::Ranks { argument: "contexts", .. })), "{found:?}");
    // One rank has an error of its own: a budget, a target, or an option.
    let found = errors(3, |shard, problem| {
        let options = LossOptions::new().with_workspace_bytes(if is_first(shard) { 10 } else { 1 << 30 });
        mixture(shard, problem)?.vocab_parallel(shard).loss(&problem.targets, &options)
    });
    assert!(matches!(found[0], Error::Workspace { .. }), "{found:?}");
    assert!(found[1..].iter().all(|error| matches!(error, Error::Ranks { .. })), "{found:?}");
    let found = errors(2, |shard, problem| {
        let targets = (&problem.targets + if is_first(shard) { 31.0 } else { 0.0 })?;
        mixture(shard, problem)?.vocab_parallel(shard).loss(&targets, &LossOptions::new())
    });
    assert!(matches!(found[0], Error::Target { vocab_size: 31, .. }), "{found:?}");
    assert!(matches!(found[1], Error::Ranks { .. }), "{found:?}");
    let found = errors(2, |shard, problem| {
        let negatives = NoiseDistribution::log_uniform(31)?.draw(5, 1)?;
        let options = LossOptions::new().with_sampled_softmax(negatives);
        mixture(shard, problem)?.vocab_parallel(shard).loss(&problem.targets, &options)
    });
    let is_unsupported = |error: &Error| matches!(error, Error::Unsupported { option: OptionName::SampledSoftmax, .. });
    assert!(found.iter().all(is_unsupported), "{found:?}");
}

#[test]
fn a_gpu_refuses_what_it_cannot_compute_on_every_rank() {
    use OptionName::{Correct, LabelSmoothing};
    for gpu in &devices()[1..] {
        for (options, refused) in [
            (LossOptions::new().with_label_smoothing(0.1), LabelSmoothing),
            (LossOptions::new().with_correct(true), Correct),
        ] {
            let found = errors_of(
                2,
                |_| own(gpu),
                |shard, problem| mixture(shard, problem)?.vocab_parallel(shard).loss(&problem.targets, &options),
            );
            let head = "a vocabulary-parallel loss on a GPU";
            let is_refused = |error: &Error| matches!(error, Error::Unsupported { option, head: of } if *option == refused && *of == head);
            assert!(found.iter().all(is_refused), "{found:?}");
        }
        let plain = |shard: &VocabShard, problem: &Problem| {
            mixture(shard, problem)?.vocab_parallel(shard).loss(&problem.targets, &LossOptions::new())
        };
        let found = errors_of(3, |rank| if rank == 0 { Ok(Device::Cpu) } else { own(gpu) }, plain);
        let are_apart =
            |error: &Error| matches!(error, Error::Ranks { argument: "whether tensors are on the CPU", .. });
        assert!(found.iter().all(are_apart), "{found:?}");
        // A target that is not in the vocabulary is an error, not NaN.
        let found = errors_of(
            2,
            |_| own(gpu),
            |shard, problem| {
                let targets = problem.targets.to_device(&Device::Cpu)?;
                let targets = (targets + 31.0)?.to_device(problem.targets.device())?;
                mixture(shard, problem)?.vocab_parallel(shard).loss(&targets, &LossOptions::new())
            },
        );
        assert!(found.iter().all(|error| matches!(error, Error::Target { vocab_size: 31, .. })), "{found:?}");
    }
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
    // Sizes whose sums and products would overflow.
    for result in on_ranks(2, |ranks| VocabShard::new(ranks, (1 << 63) + 5)) {
        assert!(matches!(result, Err(Error::Config { argument: "vocab_size", .. })), "{result:?}");
    }
    for result in on_ranks(3, |ranks| VocabShard::with_rows(ranks.clone(), [1 << 63, 1 << 63, 5][ranks.rank()])) {
        assert!(matches!(result, Err(Error::Config { argument: "rows", .. } | Error::Ranks { .. })), "{result:?}");
    }
    for result in on_ranks(3, |ranks| VocabShard::new(ranks.clone(), 10 + ranks.rank())) {
        assert!(matches!(result, Err(Error::Ranks { argument: "vocab_size", .. })));
    }
}

#[test]
fn a_frozen_head_gives_hidden_states_alone_a_gradient() -> Result<()> {
    let on_rank = |ranks| -> Result<()> {
        let shard = VocabShard::new(ranks, 19)?;
        let rows = shard.range();
        let (weight, hidden) = (tensor(&[19, 6], 1, DType::F64)?, Var::from_tensor(&tensor(&[3, 6], 2, DType::F64)?)?);
        let weight = Var::from_tensor(&weight.narrow(0, rows.start, rows.len())?)?;
        let head = VocabParallel::new(SoftmaxHead::from_tensors(weight.as_tensor().clone(), None)?, shard)?;
        let targets = Tensor::new(&[0u32, 5, 18], &Device::Cpu)?;
        let gradients = |head: &dyn OutputLayer| head.loss(&hidden, &targets, &LossOptions::new())?.backward();
        let (whole, found) = (gradients(&head)?, gradients(&*head.frozen()?)?);
        assert!(whole.get(&weight).is_some() && found.get(&weight).is_none());
        let [found, whole] = [found, whole].map(|store| numbers(store.get(&hidden).expect("a gradient")));
        assert_close("hidden", &found, &whole, None, Tolerance::gradient(DType::F64));
        Ok(())
    };
    on_ranks(2, on_rank).into_iter().collect()
}
