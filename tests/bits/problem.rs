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
    head: Head,
    pub(crate) hidden: Tensor,
    pub(crate) targets: Tensor,
    pub(crate) sizes: Sizes,
}

enum Head {
    Mixture(Box<dyn MixtureLayer>),
    Factorised(Box<dyn OutputLayer>),
}

impl Problem {
    pub(crate) fn new(name: &str, sizes: Sizes, dtype: DType) -> Result<Self> {
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, dtype, &CPU);
        // The first head creates the variables, the second is made of their values.
        head(name, &sizes, &vb)?;
        let hidden = vb.get([sizes.leading, &[sizes.hidden]].concat(), "hidden")?;
        fill(&vars)?;
        let mut rng = StdRng::seed_from_u64(11);
        let count = sizes.leading.iter().product();
        let targets = (0..count).map(|_| rng.random_range(0..sizes.vocab as u32)).collect();
        let targets = Tensor::from_vec::<_, u32>(targets, sizes.leading, &CPU)?;
        Ok(Problem { head: head(name, &sizes, &vb)?, vars, hidden, targets, sizes })
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
        match &self.head {
            Head::Mixture(head) => head,
            Head::Factorised(head) => head,
        }
    }

    pub(crate) fn mixture_layer(&self) -> &dyn MixtureLayer {
        match &self.head {
            Head::Mixture(head) => head,
            Head::Factorised(_) => panic!("the head is no mixture"),
        }
    }

    pub(crate) fn options(&self, names: &str) -> Result<LossOptions> {
        let Sizes { leading, vocab, .. } = self.sizes;
        let target = self.targets_for(names)?.flatten_all()?.to_dtype(DType::I64)?.to_vec1::<i64>()?;
        let (training, has) = (LossOptions::new().with_dropout(DropoutMasks::Seeded(7)), |name| has(names, name));
        let noise = if has("unigram") {
            NoiseDistribution::unigram(&(0..vocab).map(|id| 1.0 + (id % 7) as f64).collect::<Vec<_>>())?
        } else {
            NoiseDistribution::log_uniform(vocab)?
        };
        let negatives = || if has("replaced") { noise.draw_with_replacement(40, 17) } else { noise.draw(23, 17) };
        let add = |options: LossOptions, name: &str| {
            Ok::<_, Error>(match name {
                "sum" => options.with_reduction(Reduction::Sum),
                "none" => options.with_reduction(Reduction::None),
                "ignore_some" | "ignore_all" => options.with_ignore_index(target.first().copied().unwrap_or(0)),
                "ignore_absent" => options.with_ignore_index(-100),
                "position_weights" => options.with_position_weights((uniform(leading, 0.7, 19)? + 0.5)?),
                "class_weights" => options.with_class_weights((uniform(&[vocab], 0.7, 23)? + 0.8)?),
                "smoothing" => options.with_label_smoothing(0.1),
                "z_loss" => options.with_z_loss(0.01),
                "hits" => options.with_correct(true),
                "sampled" => options.with_sampled_softmax(negatives()?),
                "nce" => options.with_nce(negatives()?),
                "rows" => options.with_decoder_rows(true),
                "mean" | "evaluation" | "penalty" | "budget" | "replaced" | "unigram" => options,
                _ => panic!("no option {name}"),
            })
        };
        let start = if has("evaluation") { LossOptions::evaluation() } else { training };
        let options = names.split('+').try_fold(start, add)?;
        if !has("budget") {
            return Ok(options);
        }
        // The power of two whose chunks are closest to a quarter of the positions.
        let limited = (8..30).map(|n| options.clone().with_workspace_bytes(1 << n));
        let plans =
            limited.filter_map(|options| Some((self.mixture_layer().plan(&self.hidden, &options).ok()?, options)));
        let best = plans.min_by_key(|(plan, _)| (4 * plan.positions_per_chunk).abs_diff(plan.positions));
        Ok(best.expect("a budget").1)
    }

    pub(crate) fn targets_for(&self, options: &str) -> Result<Tensor> {
        Ok(if has(options, "ignore_all") { self.targets.zeros_like()? } else { self.targets.clone() })
    }

    /// The loss with each of these sets of options.
    pub(crate) fn losses(&self, options: &str, digest: &mut Digest) -> Result<()> {
        options.split(' ').try_for_each(|options| {
            let loss = self.layer().loss(&self.hidden, &self.targets_for(options)?, &self.options(options)?)?;
            self.digest_loss(&loss, options, digest)
        })
    }

    pub(crate) fn digest_loss(&self, loss: &Loss, options: &str, digest: &mut Digest) -> Result<()> {
        let rows = loss.decoder_rows.as_ref();
        for tensor in [&loss.value, &loss.sum, &loss.count, &loss.nll] {
            digest.tensor(tensor)?;
        }
        // The hash of a result that earlier commits had, so that lines can be compared with theirs.
        let none = None;
        for tensor in [loss.correct.as_ref(), none, rows.map(|rows| &rows.token_ids)] {
            digest.optional(tensor)?;
        }
        if has(options, "evaluation") {
            return Ok(());
        }
        let gradients = if has(options, "none") {
            let upstream = uniform(loss.value.dims(), 1.0, 29)?.to_dtype(loss.value.dtype())?;
            (&loss.value * upstream)?.sum_all()?.backward()?
        } else if has(options, "penalty") {
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
        digest.tensor(&layer.sample(hidden, &mut sampler("full")?)?)
    }

    pub(crate) fn digest_mixture(&self, mixture: &Mixture, digest: &mut Digest) -> Result<()> {
        digest.tensor(&mixture.contexts()?)?;
        digest.tensor(&mixture.log_priors()?)?;
        digest.differentiable(&mixture.log_probs()?, &self.vars)?;
        digest.tensor(&mixture.log_prob(&self.targets)?)?;
        digest.top_k(&mixture.top_k(5)?)?;
        digest.tensor(&mixture.sample(&mut sampler("top_p")?)?)?;
        self.digest_loss(&mixture.loss(&self.targets, &LossOptions::new())?, "mean", digest)
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

/// The head of this name, such as `mos3+identity`.
fn head(name: &str, sizes: &Sizes, vb: &VarBuilder) -> Result<Head> {
    let &Sizes { hidden, vocab, .. } = sizes;
    let root = if has(name, "dropout") { "mos3+dropout" } else { "mos3" };
    let root = |entries| mixture_layer(root, &Sizes { vocab: entries, ..*sizes }, &vb.pp("root")).map(Arc::from);
    Ok(Head::Factorised(if has(name, "adaptive") {
        let config = AdaptiveConfig::new(hidden, vocab, vec![vocab / 3, vocab / 2]).with_head_bias(has(name, "bias"));
        let config = if has(name, "div2") { config.with_div_value(2.0) } else { config };
        if has(name, "mos3") {
            Box::new(AdaptiveSoftmax::with_head(&config, root(config.head_size())?, vb.clone())?)
        } else {
            Box::new(AdaptiveSoftmax::new(&config, vb.clone())?)
        }
    } else if has(name, "hierarchical") {
        let frequencies: Vec<f64> = (0..vocab).map(|id| 1.0 / (1 + id % 17) as f64).collect();
        let config = HierarchicalConfig::new(hidden, vocab).with_bias(!has(name, "no_bias"));
        let config =
            if has(name, "given") { config.with_classes(Classes::from_frequencies(&frequencies, 9)?) } else { config };
        if has(name, "mos3") {
            Box::new(HierarchicalSoftmax::with_class_layer(&config, root(config.class_count()?)?, vb.clone())?)
        } else {
            Box::new(HierarchicalSoftmax::new(&config, vb.clone())?)
        }
    } else {
        return Ok(Head::Mixture(mixture_layer(name, sizes, vb)?));
    }))
}

fn mixture_layer(name: &str, sizes: &Sizes, vb: &VarBuilder) -> Result<Box<dyn MixtureLayer>> {
    let &Sizes { hidden, context, vocab, .. } = sizes;
    let (has, scale) = (|flag| has(name, flag), if has(name, "scaled") { 0.7 } else { 1.0 });
    macro_rules! head {
        ($head:ident, $config:expr, $context:expr) => {{
            let config = $config.with_decoder_bias(!has("no_bias")).with_logit_scale(scale);
            let config = if has("capped") { config.with_softcap(2.5) } else { config };
            let head = if has("tied") {
                let embedding = Embedding::new(vb.get((vocab, $context), "embedding")?, $context);
                $head::tied(&config, &embedding, vb.clone())?
            } else if has("char_cnn") {
                $head::with_char_cnn(&config, char_cnn(sizes, $context, vb.pp("rows"))?, vb.clone())?
            } else {
                $head::new(&config, vb.clone())?
            };
            if has("adapter") {
                let config = LowRankConfig::new(vocab, $context, 3).with_alpha(6.0);
                Box::new(head.with_adapter(LowRankAdapter::new(&config, vb.pp("adapter"))?)?)
            } else {
                Box::new(head)
            }
        }};
    }
    if has("transposed") {
        let (weight, bias) = (vb.get((hidden, vocab), "weight")?.t()?, vb.get(vocab, "bias")?);
        return Ok(Box::new(SoftmaxHead::from_tensors(weight, Some(bias))?));
    }
    if has("softmax") {
        return Ok(head!(SoftmaxHead, SoftmaxConfig::new(hidden, vocab), hidden));
    }
    let (kind, components) = name.split('+').next().unwrap_or(name).split_at(3);
    let config = MixtureConfig::new(hidden, vocab, components.parse().expect("a number")).with_context_dim(context);
    let config =
        config.with_activation(if has("identity") { ContextActivation::Identity } else { ContextActivation::Tanh });
    let config = config.with_dropout(if has("dropout") { 0.3 } else { 0.0 }).with_prior_bias(has("prior_bias"));
    Ok(match kind {
        "moc" => head!(MixtureOfContexts, config, context),
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

pub(crate) fn sampler(names: &str) -> Result<Sampler> {
    let add = |sampling: Sampling, name: &str| match name {
        "full" => sampling,
        "greedy" => Sampling::greedy(),
        "temperature" => sampling.with_temperature(0.7),
        "component_temperature" => sampling.with_component_temperature(1.4),
        "top_k" => sampling.with_top_k(20),
        "top_p" => sampling.with_top_p(0.8),
        "min_p" => sampling.with_min_p(0.1),
        "ancestral" => sampling.with_ancestral(true),
        _ => panic!("no sampling {name}"),
    };
    Sampler::new(names.split('+').fold(Sampling::new(), add), 37)
}

/// Whether `flag` is among names that are joined by `+`.
pub(crate) fn has(names: &str, flag: &str) -> bool {
    names.split('+').any(|name| name == flag)
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
