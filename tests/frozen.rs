//! A frozen head gives hidden states their gradient, and no parameter; a frozen decoder leaves the others theirs.

mod common;

use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{embedding, linear, Linear, Module, VarBuilder, VarMap};
use common::compare::{assert_close, Tolerance};
use common::values::{fill, numbers, tensor};
use common::{exact, on_each_device};
use mos_head::distill::{DistillOptions, Divergence, Teacher};
use mos_head::parts::{CharCnn, CharCnnConfig, Decoder, DecoderConfig, LowRankAdapter, LowRankConfig, Projection};
use mos_head::policy::{PolicyBatch, PolicyOptions};
use mos_head::score::ScoreOptions;
use mos_head::sets::{AllowedIds, Restricted};
use mos_head::two_level::{AdaptiveConfig, AdaptiveSoftmax, Classes, HierarchicalConfig, HierarchicalSoftmax};
use mos_head::{
    DropoutMasks, Head, LossOptions, MixtureConfig, MixtureLayer, MixtureOfContexts, MixtureOfSoftmaxes, OutputLayer,
    Result, SoftmaxConfig, SoftmaxHead,
};

const HIDDEN: usize = 6;
const VOCAB: usize = 19;

/// Three contexts from a linear layer, with uniform priors.
#[derive(Debug)]
struct Own {
    layer: Linear,
    /// Whether it says how it is frozen.
    freezes: bool,
}

impl Projection for Own {
    fn hidden_size(&self) -> usize {
        HIDDEN
    }

    fn context_dim(&self) -> usize {
        4
    }

    fn components(&self) -> usize {
        3
    }

    fn forward(&self, hidden: &Tensor, _: DropoutMasks) -> Result<(Tensor, Option<Tensor>)> {
        let leading = &hidden.dims()[..hidden.rank() - 1];
        let contexts = self.layer.forward(hidden)?.reshape([leading, &[3, 4]].concat())?;
        let priors =
            Tensor::ones([leading, &[3]].concat(), hidden.dtype(), hidden.device())?.affine(0.0, -3f64.ln())?;
        Ok((contexts, Some(priors)))
    }

    fn frozen(&self) -> Result<Box<dyn Projection + '_>> {
        if !self.freezes {
            return Ok(Box::new(self));
        }
        let layer = Linear::new(self.layer.weight().detach(), self.layer.bias().map(Tensor::detach));
        Ok(Box::new(Own { layer, freezes: true }))
    }
}

fn adapter(d: usize, vb: VarBuilder) -> Result<LowRankAdapter> {
    LowRankAdapter::new(&LowRankConfig::new(VOCAB, d, 2), vb.pp("adapter"))
}

fn cnn(d: usize, vb: VarBuilder) -> Result<CharCnn> {
    let spellings: Vec<String> = (0..VOCAB).map(|id| format!("w{}", id * 7)).collect();
    CharCnn::new(&CharCnnConfig::new(d).with_filters(&[(2, 5)]).with_correction(3), &spellings, vb.pp("cnn"))
}

/// Every head that is one mixture.
fn mixtures(vb: &VarBuilder) -> Result<Vec<(&'static str, Box<dyn MixtureLayer>)>> {
    let config = MixtureConfig::new(HIDDEN, VOCAB, 3).with_context_dim(4).with_prior_bias(true);
    let softmax = SoftmaxConfig::new(HIDDEN, VOCAB);
    let tied = embedding(VOCAB, HIDDEN, vb.pp("embedding"))?;
    let own = Own { layer: linear(HIDDEN, 12, vb.pp("own"))?, freezes: true };
    Ok(vec![
        ("softmax", Box::new(SoftmaxHead::new(&softmax, vb.pp("softmax"))?)),
        ("tied", Box::new(SoftmaxHead::tied(&softmax, &tied, vb.pp("tied"))?)),
        ("contexts", Box::new(MixtureOfContexts::new(&config, vb.pp("contexts"))?)),
        ("softmaxes", Box::new(MixtureOfSoftmaxes::new(&config, vb.pp("softmaxes"))?)),
        (
            "adapter",
            Box::new(SoftmaxHead::new(&softmax, vb.pp("adapted"))?.with_adapter(adapter(HIDDEN, vb.pp("a"))?)?),
        ),
        (
            "adapter of softmaxes",
            Box::new(MixtureOfSoftmaxes::new(&config, vb.pp("b"))?.with_adapter(adapter(4, vb.pp("b"))?)?),
        ),
        ("char-CNN", Box::new(SoftmaxHead::with_char_cnn(&softmax, cnn(HIDDEN, vb.pp("c"))?, vb.pp("c"))?)),
        (
            "char-CNN with an adapter",
            Box::new(
                MixtureOfContexts::with_char_cnn(&config, cnn(4, vb.pp("d"))?, vb.pp("d"))?
                    .with_adapter(adapter(4, vb.pp("d"))?)?,
            ),
        ),
        ("own", Box::new(Head::from_parts(own, Decoder::new(&DecoderConfig::new(VOCAB, 4), vb.pp("own"))?)?)),
    ])
}

/// Every head of the crate but those whose decoder is cut among ranks.
fn heads(vb: &VarBuilder) -> Result<Vec<(String, Box<dyn OutputLayer>)>> {
    let mut heads: Vec<(String, Box<dyn OutputLayer>)> = Vec::new();
    for (name, head) in mixtures(&vb.pp("restricted"))? {
        let allowed = AllowedIds::new(&[0, 3, 4, 5, 11, 18]);
        heads.push((format!("restricted {name}"), Box::new(Restricted::new(head, allowed)?)));
    }
    let adaptive = AdaptiveConfig::new(HIDDEN, VOCAB, vec![4, 9]).with_div_value(1.5);
    for (i, (name, head)) in mixtures(&vb.pp("mixtures"))?.into_iter().enumerate() {
        match i % 3 {
            0 => heads.push((format!("boxed {name}"), Box::new(head))),
            1 => heads.push((format!("shared {name}"), Box::new(Arc::new(head)))),
            _ => heads.push((name.to_owned(), head)),
        }
    }
    let config = MixtureConfig::new(HIDDEN, adaptive.head_size(), 3);
    let root = Arc::new(MixtureOfSoftmaxes::new(&config, vb.pp("root"))?);
    heads.push(("adaptive of softmaxes".into(), Box::new(AdaptiveSoftmax::with_head(&adaptive, root, vb.pp("e"))?)));
    let adaptive = adaptive.with_head_bias(true);
    heads.push(("adaptive".into(), Box::new(AdaptiveSoftmax::new(&adaptive, vb.pp("f"))?)));
    let classes = Classes::Given((0..VOCAB as u32).map(|id| id * 5 % 4).collect());
    let config = HierarchicalConfig::new(HIDDEN, VOCAB).with_classes(classes);
    heads.push(("hierarchical".into(), Box::new(HierarchicalSoftmax::new(&config, vb.pp("g"))?)));
    Ok(heads)
}

/// The names of the variables that have a gradient.
fn trained(vars: &VarMap, gradients: &GradStore) -> Vec<String> {
    let vars = vars.data().lock().expect("no panic");
    let mut names: Vec<String> =
        vars.iter().filter(|(_, var)| gradients.get(var).is_some()).map(|(name, _)| name.clone()).collect();
    names.sort();
    names
}

/// Every result with a gradient, and its gradients.
fn all_gradients(head: &dyn OutputLayer, hidden: &Tensor) -> Result<Vec<(&'static str, GradStore)>> {
    let device = hidden.device();
    let targets = Tensor::new(&[[0u32, 5, 18], [3, 11, 4]], device)?;
    let advantages = Tensor::new(&[[1f32, -1.0, 0.5], [2.0, 0.25, -0.5]], device)?.to_dtype(hidden.dtype())?;
    let teacher = head.log_probs(&(hidden.detach() * 0.7)?)?.detach();
    let mut results = vec![("loss", head.loss(hidden, &targets, &LossOptions::new())?.backward()?)];
    let scores = head.score(hidden, &targets, &ScoreOptions::new().with_entropy(true))?;
    let value = (scores.log_prob.sum_all()? + scores.entropy.as_ref().expect("asked for").sqr()?.sum_all()?)?;
    results.push(("score", scores.backward(&value)?));
    let batch = PolicyBatch::new(targets.clone(), advantages);
    results.push(("policy", head.policy_loss(hidden, &batch, &PolicyOptions::new().with_entropy(0.1))?.backward()?));
    // Some ids of a restricted head are impossible.
    if !teacher.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>()?.contains(&f32::NEG_INFINITY) {
        let options = DistillOptions::new(Divergence::ForwardKl);
        results.push(("distill", head.distill(hidden, &Teacher::from_log_probs(&teacher), &options)?.backward()?));
        results.push(("log_probs", head.log_probs(hidden)?.sqr()?.mean_all()?.backward()?));
    }
    Ok(results)
}

on_each_device! {
    fn a_frozen_head_gives_hidden_states_alone_a_gradient(device: &Device) -> Result<()> {
        let dtype = exact(device);
        let vars = VarMap::new();
        let heads = heads(&VarBuilder::from_varmap(&vars, dtype, device))?;
        // B of an adapter is not zero.
    fill(&vars, 0.7)?;
        let hidden = Var::from_tensor(&tensor(&[2, 3, HIDDEN], 1, dtype)?.to_device(device)?)?;
        for (name, head) in &heads {
            let expected = all_gradients(head, &hidden)?;
            let frozen = head.frozen()?;
            // A frozen head may be frozen again.
            for frozen in [&frozen, &frozen.frozen()?] {
                for ((result, expected), (_, found)) in expected.iter().zip(all_gradients(&**frozen, &hidden)?) {
                    assert!(!trained(&vars, expected).is_empty(), "{name}: {result} trains nothing");
                    let trained = trained(&vars, &found);
                    assert!(trained.is_empty(), "{name}: {result} trains {trained:?}");
                    let hidden_gradient = |store: &GradStore| numbers(store.get(&hidden).expect("a gradient of the hidden states"));
                    assert_close(name, &hidden_gradient(&found), &hidden_gradient(expected), None, Tolerance::gradient(dtype).condition(8.0));
                }
            }
        }
        Ok(())
    }

    fn a_frozen_decoder_leaves_projection_and_adapter_their_gradients(device: &Device) -> Result<()> {
        let dtype = exact(device);
        let hidden = tensor(&[3, HIDDEN], 1, dtype)?.to_device(device)?;
        let targets = Tensor::new(&[0u32, 5, 18], device)?;
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, dtype, device);
        let config = MixtureConfig::new(HIDDEN, VOCAB, 3).with_context_dim(4);
        let plain = MixtureOfSoftmaxes::new(&config, vb.clone())?;
        let before = plain.clone().with_adapter(adapter(4, vb.clone())?)?;
        let rows = MixtureOfSoftmaxes::with_char_cnn(&config, cnn(4, vb.clone())?, vb.clone())?;
        // B of an adapter is not zero.
    fill(&vars, 0.7)?;
        let [projection, factors] =
            [&["latent.bias", "latent.weight", "prior.weight"], &["adapter.lora_A.weight", "adapter.lora_B.weight"][..]];
        let both = [factors, projection].concat();
        for (name, head, frozen, expected) in [
            ("no adapter", plain.clone(), plain.clone().with_frozen_decoder()?, projection),
            ("an adapter", before.clone(), before.clone().with_frozen_decoder()?, &both),
            ("an adapter added later", before.clone(), plain.with_frozen_decoder()?.with_adapter(adapter(4, vb.clone())?)?, &both),
            ("computed rows", rows.clone(), rows.with_frozen_decoder()?, projection),
        ] {
            let [whole, found] = [&head, &frozen].map(|head| head.loss(&hidden, &targets, &LossOptions::new())?.backward());
            let (whole, found) = (whole?, found?);
            assert_eq!(trained(&vars, &found), expected, "{name}");
            for (name, var) in vars.data().lock().expect("no panic").iter().filter(|(name, _)| expected.contains(&&***name)) {
                let [found, whole] = [&found, &whole].map(|store| numbers(store.get(var).expect(name)));
                assert_close(name, &found, &whole, None, Tolerance::gradient(dtype).condition(8.0));
            }
        }
        Ok(())
    }
}

#[test]
fn a_projection_of_ones_own_is_not_frozen_by_default() -> Result<()> {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let own = Own { layer: linear(HIDDEN, 12, vb.pp("own"))?, freezes: false };
    let head = Head::from_parts(own, Decoder::new(&DecoderConfig::new(VOCAB, 4), vb)?)?;
    let hidden = tensor(&[3, HIDDEN], 1, DType::F32)?;
    let targets = Tensor::new(&[0u32, 5, 18], &Device::Cpu)?;
    let gradients = head.frozen()?.loss(&hidden, &targets, &LossOptions::new())?.backward()?;
    assert_eq!(trained(&vars, &gradients), ["own.bias", "own.weight"]);
    Ok(())
}
