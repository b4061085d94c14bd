//! The contexts and log-priors that each head passes to the mixture, and their gradients: softmax `(h, 0)`, mixture of
//! contexts `(sum_k pi_k c_k, 0)`, mixture of softmaxes `(c, log pi)`, with `c = act(W_latent h + b)` and
//! `pi = softmax(W_prior h + b)`.

use std::collections::BTreeMap;

use mos_head::ContextActivation;

use super::{add_scaled, dot, log_softmax};
use crate::common::case::{Case, Head};

/// The operands of the mixture.
pub struct Projected {
    /// The mixture's components: 1 for a mixture of contexts.
    pub components: usize,
    /// `[positions, components, d]`.
    pub contexts: Vec<f64>,
    /// `[positions, components]`.
    pub log_priors: Vec<f64>,
    /// The activation's output, `[positions, K, d]`; empty for a softmax.
    activated: Vec<f64>,
    /// `[positions, K]`; empty for a softmax.
    priors: Vec<f64>,
}

impl Projected {
    pub fn new(case: &Case) -> Self {
        let (positions, k, d) = (case.positions(), case.sizes.components, case.sizes.context);
        let ready = |contexts: &str, components: usize| Self {
            components,
            contexts: case.values[contexts].clone(),
            log_priors: vec![0.0; positions * components],
            activated: vec![],
            priors: vec![],
        };
        match case.head {
            Head::Softmax => ready("hidden", 1),
            Head::Mixture => {
                let mut projected = ready("contexts", k);
                if let Some(log_priors) = case.values.get("log_priors") {
                    projected.log_priors.clone_from(log_priors);
                }
                projected
            }
            Head::MixtureOfSoftmaxes => {
                let (log_priors, activated) = project(case);
                Self {
                    components: k,
                    contexts: activated.clone(),
                    priors: log_priors.iter().map(|x| x.exp()).collect(),
                    log_priors,
                    activated,
                }
            }
            Head::MixtureOfContexts => {
                let (log_priors, activated) = project(case);
                let priors: Vec<f64> = log_priors.iter().map(|x| x.exp()).collect();
                let mut contexts = vec![0.0; positions * d];
                for (i, context) in activated.chunks(d).enumerate() {
                    add_scaled(&mut contexts[i / k * d..][..d], priors[i], context);
                }
                Self { components: 1, contexts, log_priors: vec![0.0; positions], activated, priors }
            }
        }
    }

    /// The gradients of the head's operands from those of the contexts and log-priors.
    pub fn backward(&self, case: &Case, contexts: Vec<f64>, log_priors: &[f64]) -> BTreeMap<&'static str, Vec<f64>> {
        let (k, d) = (case.sizes.components, case.sizes.context);
        match case.head {
            Head::Softmax => BTreeMap::from([("hidden", contexts)]),
            Head::Mixture => BTreeMap::from([("contexts", contexts), ("log_priors", log_priors.to_vec())]),
            Head::MixtureOfSoftmaxes => self.unproject(case, &contexts, log_priors),
            Head::MixtureOfContexts => {
                let (mut each, mut log_priors) = (vec![], vec![]);
                for (i, context) in self.activated.chunks(d).enumerate() {
                    let mixed = &contexts[i / k * d..][..d];
                    each.extend(mixed.iter().map(|x| x * self.priors[i]));
                    log_priors.push(dot(mixed, context) * self.priors[i]);
                }
                self.unproject(case, &each, &log_priors)
            }
        }
    }

    fn unproject(&self, case: &Case, contexts: &[f64], log_priors: &[f64]) -> BTreeMap<&'static str, Vec<f64>> {
        let (k, h) = (case.sizes.components, case.sizes.hidden);
        let mut prior_logits = log_priors.to_vec();
        let positions = prior_logits.chunks_mut(k).zip(self.priors.chunks(k));
        for (slopes, priors) in positions {
            let total: f64 = slopes.iter().sum();
            add_scaled(slopes, -total, priors);
        }
        let slope = |(dc, c): (&f64, &f64)| match case.activation {
            ContextActivation::Tanh => dc * (1.0 - c * c),
            _ => *dc,
        };
        let latent: Vec<f64> = contexts.iter().zip(&self.activated).map(slope).collect();

        let mut gradients = BTreeMap::from([("hidden", vec![0.0; case.positions() * h])]);
        let layers = [("prior.weight", "prior.bias", prior_logits), ("latent.weight", "latent.bias", latent)];
        for (weight, bias, outputs) in layers {
            let width = case.values[weight].len() / h;
            let (mut d_weight, mut d_bias) = (vec![0.0; width * h], vec![0.0; width]);
            let d_hidden = gradients.get_mut("hidden").expect("just inserted");
            for (i, &slope) in outputs.iter().enumerate() {
                let (t, o) = (i / width, i % width);
                let hidden = &case.values["hidden"][t * h..][..h];
                let row = &case.values[weight][o * h..][..h];
                add_scaled(&mut d_hidden[t * h..][..h], slope, row);
                add_scaled(&mut d_weight[o * h..][..h], slope, hidden);
                d_bias[o] += slope;
            }
            gradients.insert(weight, d_weight);
            gradients.insert(bias, d_bias);
        }
        gradients
    }
}

/// Log-priors `[positions, K]` and activated contexts `[positions, K, d]`.
fn project(case: &Case) -> (Vec<f64>, Vec<f64>) {
    let h = case.sizes.hidden;
    let (mut log_priors, mut activated) = (vec![], vec![]);
    for hidden in case.values["hidden"].chunks(h) {
        let mut logits = linear(case, hidden, "prior.weight", "prior.bias");
        log_softmax(&mut logits);
        log_priors.extend(logits);
        let latent = linear(case, hidden, "latent.weight", "latent.bias");
        activated.extend(latent.into_iter().map(|x| match case.activation {
            ContextActivation::Tanh => x.tanh(),
            _ => x,
        }));
    }
    (log_priors, activated)
}

fn linear(case: &Case, hidden: &[f64], weight: &str, bias: &str) -> Vec<f64> {
    let bias = case.values.get(bias);
    let rows = case.values[weight].chunks(hidden.len()).enumerate();
    rows.map(|(o, w)| dot(w, hidden) + bias.map_or(0.0, |b| b[o])).collect()
}
