//! A mixture over a vocabulary that ranks share, and the comparison with the whole one.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use approx::{assert_abs_diff_eq, assert_relative_eq};
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::ops::log_softmax;
use mos_head::distributed::{Collectives, VocabParallel, VocabShard};
use mos_head::parts::{LogitFunction, LowRankAdapter};
use mos_head::{Distributions, Error, LossOptions, Mixture, OutputLayer, Reduction, Result, SoftmaxHead};

use crate::values::{gradient, numbers, tensor, Numbers};

pub const POSITIONS: usize = 23;
pub const D: usize = 7;

/// The operands of a mixture over the whole vocabulary.
pub struct Problem {
    pub contexts: Var,
    pub log_priors: Option<Var>,
    pub weight: Tensor,
    pub bias: Tensor,
    pub targets: Tensor,
}

impl Problem {
    pub fn new(vocab: usize, components: usize, dtype: DType, most_target: usize) -> Result<Self> {
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

    /// The same on a device.
    pub fn on(&self, device: &Device) -> Result<Self> {
        let var = |var: &Var| Ok::<_, Error>(Var::from_tensor(&var.to_device(device)?)?);
        Ok(Problem {
            contexts: var(&self.contexts)?,
            log_priors: self.log_priors.as_ref().map(var).transpose()?,
            weight: self.weight.to_device(device)?,
            bias: self.bias.to_device(device)?,
            targets: self.targets.to_device(device)?,
        })
    }

    /// What the loss tells, and the gradients of contexts, log-priors, weight and bias, whose rows are these ids'.
    pub fn results(
        &self,
        ids: std::ops::Range<usize>,
        upstream: &Tensor,
        loss: impl Fn(&Mixture) -> Result<mos_head::Loss>,
    ) -> Result<Vec<Numbers>> {
        let rows = |whole: &Tensor| Ok::<_, Error>(Var::from_tensor(&whole.narrow(0, ids.start, ids.len())?)?);
        let (weight, bias) = (rows(&self.weight)?, rows(&self.bias)?);
        let contexts = Var::from_tensor(&self.contexts)?;
        let log_priors = self.log_priors.as_ref().map(|var| Var::from_tensor(var)).transpose()?;
        let mixture =
            Mixture::new(&contexts, log_priors.as_ref().map(Var::as_tensor), &weight, Some(bias.as_tensor()))?;
        let loss = loss(&mixture)?;
        let store = match loss.value.rank() {
            0 if loss.value.track_op() => loss.backward()?,
            // An evaluation has no gradients.
            0 => loss.value.backward()?,
            _ => (&loss.value * upstream.to_dtype(loss.value.dtype())?)?.sum_all()?.backward()?,
        };
        let fields = [&loss.value, &loss.nll, &loss.sum, &loss.count];
        let fields = fields.into_iter().chain([&loss.is_correct, &loss.correct].into_iter().flatten()).map(numbers);
        let vars = [Some(&contexts), log_priors.as_ref(), Some(&weight), Some(&bias)].into_iter().flatten();
        Ok(fields.chain(vars.map(|var| gradient(&store, var).unwrap_or_default())).collect())
    }
}

/// The options with a budget for few positions.
pub fn in_chunks(mixture: &Mixture, options: &LossOptions) -> Result<LossOptions> {
    match mixture.plan(&options.clone().with_workspace_bytes(1)) {
        // The loss of a shard may need more than that of its rows alone.
        Err(Error::Workspace { least, .. }) => Ok(options.clone().with_workspace_bytes(least + least / 2)),
        other => panic!("{other:?}"),
    }
}

fn options(vocab: usize, device: &Device) -> Result<Vec<LossOptions>> {
    let new = LossOptions::new;
    let position_weights = tensor(&[POSITIONS], 5, DType::F32)?.abs()?.to_device(device)?;
    let class_weights = tensor(&[vocab], 6, DType::F32)?.abs()?.to_device(device)?;
    let everywhere = vec![
        new(),
        new().with_reduction(Reduction::Sum).with_z_loss(0.01),
        new().with_reduction(Reduction::None).with_ignore_index(42),
        new()
            .with_position_weights(position_weights.clone())
            .with_class_weights(class_weights.clone())
            .with_ignore_index(5),
    ];
    if !device.is_cpu() {
        let on_gpus = [
            LossOptions::evaluation().with_reduction(Reduction::None),
            // Chunks of a few positions.
            new().with_ignore_index(5).with_workspace_bytes(60_000),
            new().with_z_loss(0.1).with_workspace_bytes(60_000),
        ];
        return Ok([everywhere, on_gpus.into()].concat());
    }
    let on_the_cpu = [
        new().with_label_smoothing(0.1),
        new().with_correct(true).with_reduction(Reduction::None),
        new()
            .with_label_smoothing(0.3)
            .with_correct(true)
            .with_class_weights(class_weights)
            .with_position_weights(position_weights)
            .with_ignore_index(42),
        new().with_label_smoothing(0.1).with_z_loss(0.01),
        // The loss alone.
        LossOptions::evaluation().with_label_smoothing(0.1).with_correct(true),
    ];
    Ok([everywhere, on_the_cpu.into()].concat())
}

/// Losses and gradients on the ranks equal those of the whole vocabulary. Returns a number that stands for their bits.
pub fn equals_the_whole(ranks: &Arc<dyn Collectives>, device: &Device) -> Result<u64> {
    let mut bits = DefaultHasher::new();
    let dtypes = [(DType::F32, 2e-5), (DType::F64, 1e-12), (DType::F16, 2e-2), (DType::BF16, 1e-1)];
    for (dtype, tolerance) in dtypes.into_iter().filter(|(dtype, _)| device.is_cpu() || *dtype != DType::F64) {
        // Not a multiple of the ranks; all targets of one rank; several tiles.
        for (vocab, components, most_target) in [(31, 1, 31), (31, 3, 31), (101, 4, 6), (701, 2, 701)] {
            let problem = Problem::new(vocab, components, dtype, most_target)?;
            let upstream = tensor(&[POSITIONS], 7, DType::F32)?.to_device(device)?;
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
                }
                .on(device)?;
                let options = options(shard.vocab_size(), device)?;
                let chunks = if device.is_cpu() { vec![false, true] } else { vec![false] };
                let cases = options.iter().flat_map(|options| chunks.iter().map(move |chunks| (options, *chunks)));
                for (i, (options, chunks)) in cases.enumerate() {
                    let all = 0..shard.vocab_size();
                    let expected = whole.results(all, &upstream, |mixture| mixture.loss(&whole.targets, options))?;
                    let found = whole.results(shard.range(), &upstream, |mixture| {
                        let options = if chunks { in_chunks(mixture, options)? } else { options.clone() };
                        mixture.vocab_parallel(shard).loss(&whole.targets, &options)
                    })?;
                    let decoder = expected.len() - 2;
                    for (j, (found, expected)) in found.iter().zip(&expected).enumerate() {
                        let numbers_per_id = if j == decoder { D } else { 1 };
                        let expected = if j >= decoder && !expected.is_empty() {
                            &expected[shard.range().start * numbers_per_id..shard.range().end * numbers_per_id]
                        } else {
                            &expected[..]
                        };
                        found.iter().for_each(|found| found.to_bits().hash(&mut bits));
                        let name = format!("{device:?} {dtype:?} {vocab} {components} {i} {j} rank {}", ranks.rank());
                        let found = found.clone().named(name);
                        assert_relative_eq!(found, *expected, epsilon = 1e-3 * tolerance, max_relative = tolerance);
                    }
                }
            }
        }
    }
    Ok(bits.finish())
}

/// Which targets are the most probable ids; among ids of equal probability on several ranks it is the lowest.
pub fn correct_targets_are_those_of_the_whole(ranks: &Arc<dyn Collectives>) -> Result<()> {
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
        let expected = numbers(&whole.loss(&targets, &options)?.is_correct.expect("asked for"));
        assert!(expected.contains(&0.0) && expected.iter().filter(|&&is_correct| is_correct == 1.0).count() > 10);
        let shard = VocabShard::new(ranks.clone(), VOCAB)?;
        let rows = |whole: &Tensor| whole.narrow(0, shard.range().start, shard.range().len());
        let mixture = Mixture::new(&problem.contexts, log_priors, &rows(&weight)?, Some(&rows(&bias)?))?;
        let found = mixture.vocab_parallel(&shard).loss(&targets, &options)?.is_correct.expect("asked for");
        assert_eq!(numbers(&found), expected, "{components}");
    }
    Ok(())
}

/// Decoders with a function of the logits, a scale and a low-rank adapter, all of whose rows are cut.
pub fn adapted_decoders_equal_the_whole(ranks: &Arc<dyn Collectives>) -> Result<()> {
    const VOCAB: usize = 31;
    // Two positions without gradients take another path than many with them.
    let (softcap, sigsoftmax) = (LogitFunction::Softcap(3.0), LogitFunction::Sigsoftmax);
    for (positions, train, function) in [(POSITIONS, true, softcap), (POSITIONS, true, sigsoftmax), (2, false, softcap)]
    {
        let hidden = Var::from_tensor(&tensor(&[positions, D], 2, DType::F32)?)?;
        let targets = Tensor::from_iter((0..positions).map(|t| (t * 11 % VOCAB) as u32), &Device::Cpu)?;
        // The loss, and the gradients of the hidden states and of both factors of the adapter.
        let results = |shard: Option<&VocabShard>| -> Result<Vec<Numbers>> {
            let range = shard.map_or(0..VOCAB, VocabShard::range);
            let rows = |whole: Tensor| whole.narrow(0, range.start, range.len());
            let weight = rows(tensor(&[VOCAB, D], 1, DType::F32)?)?;
            let (down, up) = (tensor(&[2, D], 3, DType::F32)?, rows(tensor(&[VOCAB, 2], 4, DType::F32)?)?);
            let (down, up) = (Var::from_tensor(&down)?, Var::from_tensor(&up)?);
            let adapter = LowRankAdapter::from_tensors(down.as_tensor().clone(), up.as_tensor().clone(), 0.5)?;
            let head = SoftmaxHead::from_tensors(weight, None)?;
            let head = head.with_logit_function(function)?.with_logit_scale(0.7)?.with_adapter(adapter)?;
            let options = if train { LossOptions::new() } else { LossOptions::evaluation() };
            let loss = match shard {
                None => head.loss(&hidden, &targets, &options)?,
                Some(shard) => VocabParallel::new(head, shard.clone())?.loss(&hidden, &targets, &options)?,
            };
            let mut results = vec![numbers(&loss.value), numbers(&loss.nll)];
            if train {
                let gradients = loss.backward()?;
                results.extend([&hidden, &down, &up].map(|var| gradient(&gradients, var).expect("a gradient")));
            }
            Ok(results)
        };
        let expected = results(None)?;
        let shard = VocabShard::new(ranks.clone(), VOCAB)?;
        let (range, found) = (shard.range(), results(Some(&shard))?);
        for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let expected = if i == 4 { &expected[range.start * 2..range.end * 2] } else { expected };
            assert_abs_diff_eq!(*found, *expected, epsilon = 1e-5);
        }
    }
    Ok(())
}
