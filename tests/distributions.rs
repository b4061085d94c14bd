//! Every result of every kind of distributions equals what is composed of its log-probabilities, with its gradients.

mod common;

use approx::assert_abs_diff_eq;
use candle_core::{DType, Device, Tensor, Var};
use common::given::{places, Given};
use common::strided;
use common::values::{numbers, tensor, Numbers};
use mos_head::decode::{Sampler, Sampling, TokenRequest};
use mos_head::distill::{DistillOptions, Divergence, MissingIds, Teacher};
use mos_head::policy::{PolicyBatch, PolicyOptions};
use mos_head::score::{ChunkTerms, ScoreOptions};
use mos_head::sets::AllowedIds;
use mos_head::two_level::{AdaptiveConfig, AdaptiveSoftmax, HierarchicalConfig, HierarchicalSoftmax};
use mos_head::{Distributions, Error, Loss, LossOptions, Mixture, OptionName, OutputLayer, Result};

const VOCAB: usize = 30;
const LEADING: [usize; 2] = [2, 3];

/// Ids that all sets of these tests allow.
fn ids(shape: &[usize]) -> Result<Tensor> {
    let n: usize = shape.iter().product();
    Ok(Tensor::from_vec((0..n).map(|i| (i % 3 * 9) as u32).collect(), shape, &Device::Cpu)?)
}

fn mixture(contexts: &Var) -> Result<Mixture> {
    let components = contexts.dim(2)?;
    let log_priors = candle_nn::ops::log_softmax(&tensor(&[&LEADING[..], &[components]].concat(), 1, DType::F64)?, 2)?;
    let log_priors = (components > 1).then_some(&log_priors);
    Mixture::new(contexts, log_priors, &tensor(&[VOCAB, 5], 2, DType::F64)?, Some(&tensor(&[VOCAB], 3, DType::F64)?))
}

/// A loss as its numbers and the gradient of the contexts.
fn loss(found: &mut Vec<Numbers>, name: &str, loss: &Loss, contexts: &Var) -> Result<()> {
    let gradient = loss.backward()?.remove(contexts).expect("a gradient");
    for (field, tensor) in [
        ("value", &loss.value),
        ("sum", &loss.sum),
        ("count", &loss.count),
        ("nll", &loss.nll),
        ("gradient", &gradient),
    ] {
        found.push(numbers(tensor).named(format!("{name}: {field}")));
    }
    Ok(())
}

/// All results that a trait object has.
fn results(distributions: &dyn Distributions, contexts: &Var) -> Result<Vec<Numbers>> {
    let mut found = Vec::new();
    let mut add = |name: &str, tensor: &Tensor| found.push(numbers(tensor).named(name));
    let (one, three) = (ids(&LEADING)?, ids(&[&LEADING[..], &[3]].concat())?);
    add("log_probs", &distributions.log_probs()?);
    add("log_prob", &distributions.log_prob(&three)?);
    add("entropy", &distributions.entropy()?);
    let options = ScoreOptions::new().with_entropy(true).with_outside(true).with_collision(true);
    let options = options.with_is_argmax(true).with_temperature(1.3);
    let scores = distributions.score(&three, &options)?;
    add("scores", &scores.log_prob);
    add("score of the entropy", &scores.entropy.expect("asked for"));
    add("score of the mass outside", &scores.log_outside.expect("asked for"));
    add("score of the collision probability", &scores.log_collision.expect("asked for"));
    add("score of the argmax", &scores.is_argmax.expect("asked for"));
    let top = distributions.top_k(3)?;
    add("top_k", &top.token_ids);
    add("top_k of log-probabilities", &top.log_probs);
    add("argmax", &distributions.argmax()?);
    add("sample", &distributions.sample(&mut Sampler::new(Sampling::new().with_top_p(0.8), 3)?)?);
    let request = TokenRequest::new(Sampling::new(), 4)?.with_best(2).with_entropy(true);
    for next in distributions.next_tokens(&[&request; 6])? {
        let best = next.best.iter().flat_map(|&(id, log_prob)| [f64::from(id), log_prob]);
        let numbers =
            [f64::from(next.token_id), next.log_prob, next.sampled_log_prob, next.entropy.expect("asked for")];
        found.push(Numbers::from_iter(numbers.into_iter().chain(best)).named("next_tokens"));
    }
    loss(&mut found, "loss", &distributions.loss(&one, &LossOptions::new())?, contexts)?;
    let mask = Tensor::new(&[[1u8, 0, 1], [1, 1, 0]], &Device::Cpu)?;
    let batch = PolicyBatch::new(one.clone(), tensor(&LEADING, 4, DType::F64)?).with_mask(mask);
    let options = PolicyOptions::new().with_entropy(0.1);
    loss(&mut found, "policy_loss", &distributions.policy_loss(&batch, &options)?, contexts)?;
    let teacher = candle_nn::ops::log_softmax(&tensor(&[&LEADING[..], &[VOCAB]].concat(), 5, DType::F64)?, 2)?;
    // The teacher has only ids that every set allows, or else a divergence would be infinite.
    let listed = Tensor::full(0.25f64.ln(), three.shape(), &Device::Cpu)?;
    let weights = Tensor::new(&[[0f64, 1.0, 2.0], [1.0, 0.5, 1.0]], &Device::Cpu)?;
    let list = Teacher::from_top_k(&three, &listed, MissingIds::Tail);
    let options = DistillOptions::new(Divergence::ForwardKl).with_position_weights(weights);
    loss(&mut found, "distill from a list", &distributions.distill(&list, &options)?, contexts)?;
    let options = DistillOptions::new(Divergence::JensenShannon(0.4));
    let all = Teacher::from_log_probs(&teacher);
    loss(&mut found, "distill from all", &distributions.distill(&all, &options)?, contexts)?;
    Ok(found)
}

/// The results that take a function.
fn results_of_functions(distributions: &impl Distributions, contexts: &Var) -> Result<Vec<Numbers>> {
    let mut found = Vec::new();
    for shape in [&LEADING[..], &[2, 3, 2], &[2, 3, 0]] {
        let options = ScoreOptions::new().with_entropy(true).with_outside(true).with_collision(true);
        let result = distributions.score_loss(&ids(shape)?, &options, |scores| {
            let by_log_prob = scores.log_prob.affine(0.0, -0.5)?;
            let listed = match by_log_prob.rank() {
                1 => (&scores.log_prob * -0.5)?,
                _ => (&scores.log_prob * -0.5)?.sum(1)?,
            };
            let values = ((listed - (&scores.entropy * 0.3)?)? + (&scores.log_outside * 0.2)?)?;
            let values = (values + (&scores.log_collision * 0.7)?)?;
            let constant = |number: f64| scores.entropy.affine(0.0, number);
            let terms = ChunkTerms::new(values, by_log_prob).with_by_entropy(constant(-0.3)?);
            Ok(terms.with_by_outside(constant(0.2)?).with_by_collision(constant(0.7)?))
        })?;
        loss(&mut found, &format!("score_loss of {shape:?}"), &result, contexts)?;
    }
    let result = distributions.log_prob_loss(None, |chunk| {
        let squares = (chunk.log_probs * 2.0)?.exp()?;
        Ok(ChunkTerms::new(squares.sum(1)?, (squares * 2.0)?))
    })?;
    loss(&mut found, "log_prob_loss", &result, contexts)?;
    Ok(found)
}

/// Compares the results with those that are composed of the log-probabilities.
fn equals_its_log_probs(distributions: &dyn Distributions, contexts: &Var) -> Result<()> {
    let given = Given(distributions.log_probs()?.reshape((6, VOCAB))?);
    let composed = given.distributions(&places(&[2, 3, 1])?, None)?;
    let (found, expected) = (results(distributions, contexts)?, results(&*composed, contexts)?);
    assert_abs_diff_eq!(found[..], expected[..], epsilon = 1e-9);
    Ok(())
}

#[test]
fn results_of_mixtures_and_of_allowed_ids_are_those_of_their_log_probabilities() -> Result<()> {
    // Each list has the ids of `ids`, and one more.
    let lists: Vec<u32> = (0..6).flat_map(|t| [0, 9, 18, 20 + t]).collect();
    let sets = [
        AllowedIds::new(&[0, 3, 9, 12, 18, 21]),
        AllowedIds::per_position(&lists, &(0..=6).map(|t| 4 * t).collect::<Vec<_>>())?,
    ];
    for components in [1, 3] {
        let contexts = Var::from_tensor(&tensor(&[&LEADING[..], &[components, 5]].concat(), 6, DType::F64)?)?;
        let mixture = mixture(&contexts)?;
        equals_its_log_probs(&mixture, &contexts)?;
        for allowed in &sets {
            let restricted = mixture.restricted(allowed)?;
            equals_its_log_probs(&restricted, &contexts)?;
        }
        // All ids are allowed: the composed functions of a restricted mixture are the fused ones of the mixture.
        let lists: Vec<u32> = (0..6).flat_map(|_| 0..VOCAB as u32).collect();
        let offsets: Vec<usize> = (0..=6).map(|t| VOCAB * t).collect();
        let all = mixture.restricted(&AllowedIds::per_position(&lists, &offsets)?)?;
        let (found, expected) = (results_of_functions(&all, &contexts)?, results_of_functions(&mixture, &contexts)?);
        assert_abs_diff_eq!(found[..], expected[..], epsilon = 1e-9);
    }
    Ok(())
}

#[test]
fn a_position_without_leading_dimensions_has_a_loss_of_all_log_probabilities() -> Result<()> {
    let contexts = Var::from_tensor(&tensor(&[1, 5], 6, DType::F64)?)?;
    let mixture = Mixture::new(&contexts, None, &tensor(&[VOCAB, 5], 2, DType::F64)?, None)?;
    let all: Vec<u32> = (0..VOCAB as u32).collect();
    let restricted = mixture.restricted(&AllowedIds::per_position(&all, &[0, VOCAB])?)?;
    let terms = |chunk: mos_head::score::ChunkLogProbs| {
        let squares = (chunk.log_probs * 2.0)?.exp()?;
        Ok(ChunkTerms::new(squares.sum(1)?, (squares * 2.0)?))
    };
    let found = restricted.log_prob_loss(None, terms)?.value.to_scalar::<f64>()?;
    let expected = mixture.log_prob_loss(None, terms)?.value.to_scalar::<f64>()?;
    assert_abs_diff_eq!(found, expected, epsilon = 1e-12);
    let error = restricted.loss(&Tensor::new(VOCAB as u32, &Device::Cpu)?, &LossOptions::new()).expect_err("no id");
    assert!(matches!(error, Error::Target { position: 0, .. }), "{error}");
    let rows = Given(mixture.log_probs()?.unsqueeze(0)?);
    let given = rows.distributions(&places(&[1, 1])?, None)?;
    let error = given.loss(&Tensor::new(&[VOCAB as u32], &Device::Cpu)?, &LossOptions::new()).expect_err("no id");
    assert!(matches!(error, Error::Target { position: 0, .. }), "{error}");
    Ok(())
}

#[test]
fn results_of_two_levels_are_those_of_their_log_probabilities() -> Result<()> {
    let vars = candle_nn::VarMap::new();
    let vb = candle_nn::VarBuilder::from_varmap(&vars, DType::F64, &Device::Cpu);
    let config = AdaptiveConfig::new(8, VOCAB, vec![10, 20]).with_div_value(2.0);
    let head = AdaptiveSoftmax::new(&config, vb)?;
    let hidden = Var::from_tensor(&tensor(&[&LEADING[..], &[8]].concat(), 6, DType::F64)?)?;
    equals_its_log_probs(&*head.distributions(&hidden, None)?, &hidden)?;
    // The positions of a selection are the leading dimension.
    let some = head.distributions(&hidden, Some(&[1, 4]))?.log_probs()?;
    let all = head.log_probs(&hidden)?.reshape((6, VOCAB))?;
    assert_eq!(numbers(&some), numbers(&Tensor::stack(&[all.get(1)?, all.get(4)?], 0)?));
    Ok(())
}

#[test]
fn given_log_probabilities_have_no_components_and_no_smoothing() -> Result<()> {
    let rows = Given(candle_nn::ops::log_softmax(&tensor(&[6, VOCAB], 5, DType::F64)?, 1)?);
    let given = rows.distributions(&places(&[2, 3, 1])?, None)?;
    let error = given.sample(&mut Sampler::new(Sampling::new().with_ancestral(true), 1)?).expect_err("no components");
    assert!(matches!(error, Error::Unsupported { option: OptionName::Ancestral, .. }), "{error}");
    let error = given.loss(&ids(&LEADING)?, &LossOptions::new().with_label_smoothing(0.1)).expect_err("no smoothing");
    assert!(matches!(error, Error::Unsupported { option: OptionName::LabelSmoothing, .. }), "{error}");
    Ok(())
}

/// The responsibilities are the posterior of the components: those of plain numbers, for adapters and softcaps too.
#[test]
fn responsibilities_are_the_posterior_of_the_components() -> Result<()> {
    for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 1e-5), (DType::BF16, 3e-2)] {
        for components in [1, 4] {
            let contexts = tensor(&[2, 3, components, 5], 4, dtype)?;
            let log_priors = candle_nn::ops::log_softmax(&tensor(&[2, 3, components], 1, DType::F64)?, 2)?;
            let (weight, bias) = (tensor(&[VOCAB, 5], 2, dtype)?, tensor(&[VOCAB], 3, dtype)?);
            let mixture = Mixture::new(&contexts, Some(&log_priors), &weight, Some(&bias))?.with_softcap(2.0)?;
            let targets = ids(&LEADING)?;
            let found = mixture.responsibilities(&targets)?;
            assert_eq!(found.dims(), [2, 3, components]);
            let single = |k: usize| -> Result<Numbers> {
                let softmax =
                    Mixture::new(&contexts.narrow(2, k, 1)?, None, &weight, Some(&bias))?.with_softcap(2.0)?;
                Ok(numbers(&softmax.log_prob(&targets)?))
            };
            let by_component = (0..components).map(single).collect::<Result<Vec<_>>>()?;
            let priors = log_priors.flatten_to(1)?.to_vec2::<f64>()?;
            let mut expected = Vec::new();
            for (t, priors) in priors.iter().enumerate() {
                let joint: Vec<f64> = (0..components).map(|k| (priors[k] + by_component[k][t]).exp()).collect();
                expected.extend(joint.iter().map(|p| p / joint.iter().sum::<f64>()));
            }
            assert_abs_diff_eq!(numbers(&found), Numbers::from(expected), epsilon = tolerance);
        }
    }
    let contexts = Var::from_tensor(&tensor(&[2, 3, 4, 5], 4, DType::F64)?)?;
    let responsibilities = mixture(&contexts)?.responsibilities(&ids(&LEADING)?)?;
    assert!(!responsibilities.track_op());
    let outside = Tensor::full(VOCAB as u32, &LEADING, &Device::Cpu)?;
    let error = mixture(&contexts)?.responsibilities(&outside).unwrap_err().to_string();
    assert!(error.contains("position 0") && error.contains("30"), "{error}");
    let error = mixture(&contexts)?.responsibilities(&ids(&[6])?).unwrap_err();
    assert!(matches!(error, Error::Shape { argument: "targets", .. }), "{error}");
    let empty = Mixture::new(
        &contexts.narrow(0, 0, 0)?,
        Some(&tensor(&[0, 3, 4], 1, DType::F64)?),
        &tensor(&[9, 5], 2, DType::F64)?,
        None,
    )?;
    assert_eq!(empty.responsibilities(&ids(&[0, 3])?)?.dims(), [0, 3, 4]);
    Ok(())
}

/// The results that read vectors of the caller's, of six positions.
fn results_of_vectors(
    distributions: &dyn Distributions,
    view: impl Fn(&Tensor) -> Result<Tensor>,
) -> Result<Vec<Numbers>> {
    let targets = view(&Tensor::new(&[0i64, -1, 9, 18, 9, 0], &Device::Cpu)?)?;
    let weights = view(&tensor(&[6], 7, DType::F64)?.sqr()?)?;
    let class_weights = view(&tensor(&[VOCAB], 8, DType::F64)?.sqr()?)?;
    let options = LossOptions::new().with_ignore_index(-1).with_class_weights(class_weights);
    let mut losses = vec![
        distributions.loss(&targets, &options)?,
        distributions.loss(&targets, &options.with_position_weights(weights.clone()))?,
        distributions.loss(&view(&ids(&[6])?.to_dtype(DType::I64)?)?, &LossOptions::new())?,
    ];
    let log_probs = || view(&tensor(&[6], 9, DType::F64)?.abs()?.neg()?);
    let batch = PolicyBatch::new(view(&ids(&[6])?)?, weights)
        .with_mask(view(&Tensor::new(&[1u8, 0, 1, 1, 1, 0], &Device::Cpu)?)?)
        .with_old_log_probs(log_probs()?)
        .with_reference_log_probs(log_probs()?)
        .with_sampler_log_probs(log_probs()?);
    losses.push(distributions.policy_loss(&batch, &PolicyOptions::new().with_kl(0.1))?);
    let teacher = candle_nn::ops::log_softmax(&tensor(&[6, VOCAB], 5, DType::F64)?, 1)?;
    let options = DistillOptions::new(Divergence::JensenShannon(0.4)).with_hard_weight(0.2).with_targets(targets);
    losses.push(distributions.distill(&Teacher::from_log_probs(&view(&teacher)?), &options.with_ignore_index(-1))?);
    let mut found: Vec<Numbers> = losses.iter().map(|loss| numbers(&loss.value)).collect();
    found.push(numbers(&distributions.log_prob(&view(&ids(&[6])?)?)?));
    Ok(found)
}

/// Targets, weights and log-probabilities are columns of matrices.
#[test]
fn strided_vectors_equal_their_copies() -> Result<()> {
    let vars = candle_nn::VarMap::new();
    let vb = candle_nn::VarBuilder::from_varmap(&vars, DType::F64, &Device::Cpu);
    let adaptive =
        AdaptiveSoftmax::new(&AdaptiveConfig::new(8, VOCAB, vec![10, 20]).with_div_value(2.0), vb.pp("adaptive"))?;
    let hierarchical = HierarchicalSoftmax::new(&HierarchicalConfig::new(8, VOCAB), vb.pp("hierarchical"))?;
    let hidden = tensor(&[6, 8], 6, DType::F64)?;
    let given = Given(adaptive.log_probs(&hidden)?);
    let mut all = vec![
        adaptive.distributions(&hidden, None)?,
        hierarchical.distributions(&hidden, None)?,
        given.distributions(&places(&[6, 1])?, None)?,
    ];
    let lists: Vec<u32> = (0..6).flat_map(|t| [0, 9, 18, 20 + t]).collect();
    let lists = AllowedIds::per_position(&lists, &(0..=6).map(|t| 4 * t).collect::<Vec<_>>())?;
    for components in [1, 3] {
        let contexts = tensor(&[6, components, 5], 6, DType::F64)?;
        let log_priors = candle_nn::ops::log_softmax(&tensor(&[6, components], 1, DType::F64)?, 1)?;
        let log_priors = (components > 1).then_some(&log_priors);
        let mixture = Mixture::new(&contexts, log_priors, &tensor(&[VOCAB, 5], 2, DType::F64)?, None)?;
        all.push(Box::new(mixture.restricted(&AllowedIds::new(&[0, 3, 9, 12, 18, 21]))?));
        all.push(Box::new(mixture.restricted(&lists)?));
        all.push(Box::new(mixture));
    }
    for distributions in &all {
        let expected = results_of_vectors(&**distributions, |tensor| Ok(tensor.clone()))?;
        assert_eq!(results_of_vectors(&**distributions, strided)?, expected);
    }
    Ok(())
}

/// A head whose log-probabilities are a view, as a transposed product makes them.
#[derive(Debug)]
struct View(Given);

impl OutputLayer for View {
    fn hidden_size(&self) -> usize {
        self.0.hidden_size()
    }
    fn vocab_size(&self) -> usize {
        self.0.vocab_size()
    }
    fn loss(&self, hidden: &Tensor, targets: &Tensor, options: &LossOptions) -> Result<Loss> {
        // As the documentation of `OutputLayer` shows it.
        let (hidden, ids) = options.mask_ignored(hidden, targets)?;
        let log_probs = self.0.log_probs(&hidden)?.gather(&ids.unsqueeze(1)?, 1)?;
        Loss::from_nll(&log_probs.squeeze(1)?.neg()?, targets, options)
    }
    fn log_probs(&self, hidden: &Tensor) -> Result<Tensor> {
        strided(&self.0.log_probs(hidden)?)
    }
}

#[test]
fn a_head_of_strided_log_probabilities_has_the_same_results() -> Result<()> {
    let head = View(Given(candle_nn::ops::log_softmax(&tensor(&[6, VOCAB], 5, DType::F64)?, 1)?));
    let hidden = places(&[6, 1])?;
    let (view, given) = (head.distributions(&hidden, None)?, head.0.distributions(&hidden, None)?);
    let expected = results_of_vectors(&*given, |tensor| Ok(tensor.clone()))?;
    assert_eq!(results_of_vectors(&*view, strided)?, expected);
    let targets = strided(&Tensor::new(&[0i64, 3, 9, 18, 9, 0], &Device::Cpu)?)?;
    let (found, expected) =
        (head.loss(&hidden, &targets, &LossOptions::new())?, given.loss(&targets, &LossOptions::new())?);
    assert_eq!(numbers(&found.value), numbers(&expected.value));
    Ok(())
}
