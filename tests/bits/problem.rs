//! Seeded problems: a head with its variables, hidden states and targets, and what is computed of them.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Embedding, VarBuilder, VarMap};
use mos_head::decode::{BeamSearch, Sampler, Sampling};
use mos_head::parts::{CharCnn, CharCnnConfig, LowRankAdapter, LowRankConfig};
use mos_head::sampled::NoiseDistribution;
use mos_head::two_level::{AdaptiveConfig, AdaptiveSoftmax, Classes, HierarchicalConfig, HierarchicalSoftmax};
use mos_head::{
    ContextActivation, Distributions, DropoutMasks, Error, Loss, LossOptions, Mixture, MixtureConfig, MixtureLayer,
    MixtureOfContexts, MixtureOfSoftmaxes, OutputLayer, Reduction, Result, SoftmaxConfig, SoftmaxHead,
};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::digest::Digest;
use super::options::{mos, Draw, Draw::*, Head, Kind, LossOption, LossOption::*, Part::*};

const CPU: Device = Device::Cpu;

/// The sizes of a problem.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) leading: &'static [usize],
    pub(crate) hidden: usize,
    pub(crate) context: usize,
    pub(crate) vocab: usize,
}

pub(crate) const BASE: Sizes = Sizes { leading: &[3, 7], hidden: 20, context: 19, vocab: 101 };

/// A head with seeded parameters, hidden states and targets. `vars` has every variable, the hidden states too.
pub(crate) struct Problem {
    pub(crate) vars: VarMap,
    layer: Layer,
    pub(crate) hidden: Tensor,
    pub(crate) targets: Tensor,
    pub(crate) sizes: Sizes,
}

enum Layer {
    Mixture(Box<dyn MixtureLayer>),
    Factorised(Box<dyn OutputLayer>),
}

impl Problem {
    pub(crate) fn new(head: Head, sizes: Sizes, dtype: DType) -> Result<Self> {
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, dtype, &CPU);
        // The first layer creates the variables, the second is made of their values.
        layer(head, &sizes, &vb)?;
        let hidden = vb.get([sizes.leading, &[sizes.hidden]].concat(), "hidden")?;
        fill(&vars)?;
        let mut rng = StdRng::seed_from_u64(11);
        let count = sizes.leading.iter().product();
        let targets = (0..count).map(|_| rng.random_range(0..sizes.vocab as u32)).collect();
        let targets = Tensor::from_vec::<_, u32>(targets, sizes.leading, &CPU)?;
        Ok(Problem { layer: layer(head, &sizes, &vb)?, vars, hidden, targets, sizes })
    }

    /// Another variable, with seeded values.
    pub(crate) fn variable(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        let values = uniform(shape, 1.0, 13)?.to_dtype(self.hidden.dtype())?;
        let var = Var::from_tensor(&values)?;
        self.vars.data().lock().expect("a lock").insert(name.into(), var.clone());
        Ok(var.as_tensor().clone())
    }

    pub(crate) fn variables(&self) -> BTreeMap<String, Var> {
        variables(&self.vars)
    }

    pub(crate) fn layer(&self) -> &dyn OutputLayer {
        match &self.layer {
            Layer::Mixture(head) => head,
            Layer::Factorised(head) => head,
        }
    }

    pub(crate) fn mixture_layer(&self) -> &dyn MixtureLayer {
        match &self.layer {
            Layer::Mixture(head) => head,
            Layer::Factorised(_) => panic!("the head is no mixture"),
        }
    }

    pub(crate) fn options(&self, chosen: &[LossOption]) -> Result<LossOptions> {
        let Sizes { leading, vocab, .. } = self.sizes;
        let target = self.targets_for(chosen)?.flatten_all()?.to_dtype(DType::I64)?.to_vec1::<i64>()?;
        let (training, has) =
            (LossOptions::new().with_dropout(DropoutMasks::Seeded(7)), |option| chosen.contains(&option));
        let noise = if has(Unigram) {
            NoiseDistribution::unigram(&(0..vocab).map(|id| 1.0 + (id % 7) as f64).collect::<Vec<_>>())?
        } else {
            NoiseDistribution::log_uniform(vocab)?
        };
        let negatives = || if has(Replaced) { noise.draw_with_replacement(40, 17) } else { noise.draw(23, 17) };
        let add = |options: LossOptions, option: &LossOption| {
            Ok::<_, Error>(match option {
                Sum => options.with_reduction(Reduction::Sum),
                Unreduced => options.with_reduction(Reduction::None),
                IgnoreSome | IgnoreAll => options.with_ignore_index(target.first().copied().unwrap_or(0)),
                IgnoreAbsent => options.with_ignore_index(-100),
                PositionWeights => options.with_position_weights((uniform(leading, 0.7, 19)? + 0.5)?),
                ClassWeights => options.with_class_weights((uniform(&[vocab], 0.7, 23)? + 0.8)?),
                Smoothing => options.with_label_smoothing(0.1),
                ZLoss => options.with_z_loss(0.01),
                Hits => options.with_correct(true),
                Sampled => options.with_sampled_softmax(negatives()?),
                Nce => options.with_nce(negatives()?),
                Rows => options.with_decoder_rows(true),
                Mean | Evaluation | Penalty | Budget | Replaced | Unigram => options,
            })
        };
        let start = if has(Evaluation) { LossOptions::evaluation() } else { training };
        let options = chosen.iter().try_fold(start, add)?;
        if !has(Budget) {
            return Ok(options);
        }
        // The power of two whose chunks are closest to a quarter of the positions.
        let limited = (8..30).map(|n| options.clone().with_workspace_bytes(1 << n));
        let plans =
            limited.filter_map(|options| Some((self.mixture_layer().plan(&self.hidden, &options).ok()?, options)));
        let best = plans.min_by_key(|(plan, _)| (4 * plan.positions_per_chunk).abs_diff(plan.positions));
        Ok(best.expect("a budget").1)
    }

    pub(crate) fn targets_for(&self, options: &[LossOption]) -> Result<Tensor> {
        Ok(if options.contains(&IgnoreAll) { self.targets.zeros_like()? } else { self.targets.clone() })
    }

    /// The loss with each of these sets of options.
    pub(crate) fn losses(&self, sets: &[&[LossOption]], digest: &mut Digest) -> Result<()> {
        sets.iter().try_for_each(|options| {
            let loss = self.layer().loss(&self.hidden, &self.targets_for(options)?, &self.options(options)?)?;
            self.digest_loss(&loss, options, digest)
        })
    }

    pub(crate) fn digest_loss(&self, loss: &Loss, options: &[LossOption], digest: &mut Digest) -> Result<()> {
        let rows = loss.decoder_rows.as_ref();
        for tensor in [&loss.value, &loss.sum, &loss.count, &loss.nll] {
            digest.tensor(tensor)?;
        }
        // The hash of a result that earlier commits had, so that lines can be compared with theirs.
        let none = None;
        for tensor in [loss.correct.as_ref(), none, rows.map(|rows| &rows.token_ids)] {
            digest.optional(tensor)?;
        }
        if options.contains(&Evaluation) {
            return Ok(());
        }
        let gradients = if options.contains(&Unreduced) {
            let upstream = uniform(loss.value.dims(), 1.0, 29)?.to_dtype(loss.value.dtype())?;
            (&loss.value * upstream)?.sum_all()?.backward()?
        } else if options.contains(&Penalty) {
            loss.backward_with(&(self.hidden.to_dtype(loss.value.dtype())?.sqr()?.mean_all()? * 0.5)?)?
        } else {
            loss.backward()?
        };
        if let Some(rows) = rows {
            digest.optional(gradients.get(&rows.weight))?;
            digest.optional(rows.bias.as_ref().and_then(|bias| gradients.get(bias)))?;
        }
        digest.gradients(&gradients, &self.vars)
    }

    pub(crate) fn decode(&mut self, digest: &mut Digest) -> Result<()> {
        let (layer, hidden) = (self.layer(), &self.hidden);
        digest.tensor(&layer.log_probs(hidden)?)?;
        digest.tensor(&layer.log_probs_as(hidden, DType::F32)?)?;
        digest.tensor(&layer.log_prob(hidden, &self.targets)?)?;
        digest.top_k(&layer.top_k(hidden, self.sizes.vocab.min(5))?)?;
        digest.tensor(&layer.argmax(hidden)?)?;
        digest.tensor(&layer.sample(hidden, &mut sampler(&[Full])?)?)
    }

    pub(crate) fn digest_mixture(&self, mixture: &Mixture, digest: &mut Digest) -> Result<()> {
        digest.tensor(&mixture.contexts()?)?;
        digest.tensor(&mixture.log_priors()?)?;
        digest.differentiable(&mixture.log_probs()?, &self.vars)?;
        digest.tensor(&mixture.log_prob(&self.targets)?)?;
        digest.top_k(&mixture.top_k(5)?)?;
        digest.tensor(&mixture.sample(&mut sampler(&[TopP])?)?)?;
        self.digest_loss(&mixture.loss(&self.targets, &LossOptions::new())?, &[Mean], digest)
    }

    pub(crate) fn beam_search(&mut self, digest: &mut Digest) -> Result<()> {
        let embeddings = uniform(&[self.sizes.vocab, self.sizes.hidden], 1.5, 31)?.to_dtype(self.hidden.dtype())?;
        let start = Tensor::new(&[1u32, 50, 99], &CPU)?;
        let mut state = embeddings.index_select(&start, 0)?;
        let search = BeamSearch::new(0).with_width(5).with_max_length(9).with_n_best(3).with_length_penalty(0.6);
        let found = search.run(self.layer(), &start, |tokens, parents| {
            state = ((state.index_select(parents, 0)? * 0.5)? + embeddings.index_select(tokens, 0)?)?;
            Ok::<_, Error>(state.clone())
        })?;
        for hypothesis in found.iter().flatten() {
            hypothesis.token_ids.iter().for_each(|&token| digest.word(token.into()));
            for word in [hypothesis.log_prob.to_bits(), hypothesis.score.to_bits(), hypothesis.finished.into()] {
                digest.word(word);
            }
        }
        Ok(())
    }
}

fn layer(head: Head, sizes: &Sizes, vb: &VarBuilder) -> Result<Layer> {
    let &Sizes { hidden, vocab, .. } = sizes;
    let root = if head.has(Dropout) { mos(3, &[Dropout]) } else { mos(3, &[]) };
    let root = |entries| mixture_layer(root, &Sizes { vocab: entries, ..*sizes }, &vb.pp("root")).map(Arc::from);
    Ok(Layer::Factorised(if head.kind == Kind::Adaptive {
        let config = AdaptiveConfig::new(hidden, vocab, vec![vocab / 3, vocab / 2]).with_head_bias(head.has(RootBias));
        let config = if head.has(HalfWidths) { config.with_div_value(2.0) } else { config };
        if head.has(MixtureRoot) {
            Box::new(AdaptiveSoftmax::with_head(&config, root(config.head_size())?, vb.clone())?)
        } else {
            Box::new(AdaptiveSoftmax::new(&config, vb.clone())?)
        }
    } else if head.kind == Kind::Hierarchical {
        let frequencies: Vec<f64> = (0..vocab).map(|id| 1.0 / (1 + id % 17) as f64).collect();
        let config = HierarchicalConfig::new(hidden, vocab).with_bias(!head.has(NoBias));
        let config = if head.has(GivenClasses) {
            config.with_classes(Classes::from_frequencies(&frequencies, 9)?)
        } else {
            config
        };
        if head.has(MixtureRoot) {
            Box::new(HierarchicalSoftmax::with_class_layer(&config, root(config.class_count()?)?, vb.clone())?)
        } else {
            Box::new(HierarchicalSoftmax::new(&config, vb.clone())?)
        }
    } else {
        return Ok(Layer::Mixture(mixture_layer(head, sizes, vb)?));
    }))
}

fn mixture_layer(head: Head, sizes: &Sizes, vb: &VarBuilder) -> Result<Box<dyn MixtureLayer>> {
    let &Sizes { hidden, context, vocab, .. } = sizes;
    let (has, scale) = (|part| head.has(part), if head.has(Scaled) { 0.7 } else { 1.0 });
    macro_rules! head {
        ($head:ident, $config:expr, $context:expr) => {{
            let config = $config.with_decoder_bias(!has(NoBias)).with_logit_scale(scale);
            let config = if has(Capped) { config.with_softcap(2.5) } else { config };
            let head = if has(Tied) {
                let embedding = Embedding::new(vb.get((vocab, $context), "embedding")?, $context);
                $head::tied(&config, &embedding, vb.clone())?
            } else if has(Spelled) {
                $head::with_char_cnn(&config, char_cnn(sizes, $context, vb.pp("rows"))?, vb.clone())?
            } else {
                $head::new(&config, vb.clone())?
            };
            if has(Adapter) {
                let config = LowRankConfig::new(vocab, $context, 3).with_alpha(6.0);
                Box::new(head.with_adapter(LowRankAdapter::new(&config, vb.pp("adapter"))?)?)
            } else {
                Box::new(head)
            }
        }};
    }
    if has(Transposed) {
        let (weight, bias) = (vb.get((hidden, vocab), "weight")?.t()?, vb.get(vocab, "bias")?);
        return Ok(Box::new(SoftmaxHead::from_tensors(weight, Some(bias))?));
    }
    let components = match head.kind {
        Kind::Contexts(components) | Kind::Softmaxes(components) => components,
        _ => return Ok(head!(SoftmaxHead, SoftmaxConfig::new(hidden, vocab), hidden)),
    };
    let config = MixtureConfig::new(hidden, vocab, components).with_context_dim(context);
    let config =
        config.with_activation(if has(Identity) { ContextActivation::Identity } else { ContextActivation::Tanh });
    let config = config.with_dropout(if has(Dropout) { 0.3 } else { 0.0 }).with_prior_bias(has(PriorBias));
    Ok(match head.kind {
        Kind::Contexts(_) => head!(MixtureOfContexts, config, context),
        _ => head!(MixtureOfSoftmaxes, config, context),
    })
}

pub(crate) fn char_cnn(sizes: &Sizes, context: usize, vb: VarBuilder) -> Result<CharCnn> {
    let spelling = |mut id: usize| {
        let mut letters = String::from("a");
        while id > 0 {
            letters.push((b'a' + (id % 5) as u8).into());
            id /= 5;
        }
        letters
    };
    let spellings: Vec<String> = (0..sizes.vocab).map(spelling).collect();
    let config = CharCnnConfig::new(context).with_embedding(3).with_filters(&[(1, 2), (2, 4), (3, 5)]);
    CharCnn::new(&config.with_correction(2), &spellings, vb)
}

pub(crate) fn sampler(draws: &[Draw]) -> Result<Sampler> {
    let add = |sampling: Sampling, draw: &Draw| match draw {
        Full => sampling,
        Greedy => Sampling::greedy(),
        Temperature => sampling.with_temperature(0.7),
        ComponentTemperature => sampling.with_component_temperature(1.4),
        FromTopK => sampling.with_top_k(20),
        TopP => sampling.with_top_p(0.8),
        MinP => sampling.with_min_p(0.1),
        Ancestral => sampling.with_ancestral(true),
    };
    Sampler::new(draws.iter().fold(Sampling::new(), add), 37)
}

/// Seeded numbers within `bound` of zero, in f64.
pub(crate) fn uniform(shape: &[usize], bound: f64, seed: u64) -> Result<Tensor> {
    let mut rng = StdRng::seed_from_u64(seed);
    let values = (0..shape.iter().product()).map(|_| rng.random_range(-bound..bound)).collect();
    Ok(Tensor::from_vec::<_, f64>(values, shape, &CPU)?)
}

/// Gives every variable seeded values, of which logits of about 1 result.
fn fill(vars: &VarMap) -> Result<()> {
    for (seed, (name, var)) in (100..).zip(variables(vars)) {
        let bound = match var.dims() {
            _ if name == "hidden" => 1.0,
            [.., inputs] if var.rank() > 1 => 3.0 / (*inputs as f64).sqrt(),
            _ => 0.5,
        };
        var.set(&uniform(var.dims(), bound, seed)?.to_dtype(var.dtype())?)?;
    }
    Ok(())
}

pub(crate) fn variables(vars: &VarMap) -> BTreeMap<String, Var> {
    vars.data().lock().expect("a lock").iter().map(|(name, var)| (name.clone(), var.clone())).collect()
}
