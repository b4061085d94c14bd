//! Growing the mixture of softmaxes of a language model from a trained softmax.

use super::language_model::{special_output, LanguageModel};
use super::model::Model;
use crate::layers::{Checkpoint, HeadKind};
use crate::Result;
use mos_head::{MixtureOfSoftmaxes, MixtureTensors, SoftmaxHead};

impl LanguageModel {
    /// Sets the variables so that the first distributions are those of the softmax of a checkpoint: embedding, LSTM and
    /// decoder are its own, and the K contexts start as the hidden state (`MixtureOfSoftmaxes::from_softmax`). The
    /// checkpoint must have the same sizes; the seed is that of the priors.
    pub fn grow(&self, checkpoint: &Checkpoint, seed: u64) -> Result<()> {
        let sizes = self.sizes();
        if let Some(output) = special_output(checkpoint)? {
            return Err(format!("--grow needs a softmax over the whole vocabulary, not --output {output}").into());
        }
        let settings = sizes.settings(HeadKind::Softmax);
        checkpoint.require_flags(&settings).map_err(|error| format!("--grow: {error}"))?;
        let names = ["head.decoder.weight", "embedding.weight"];
        let (decoder, embedding) = (checkpoint.tensors.get(names[0]), checkpoint.tensors.get(names[1]));
        let weight = if sizes.tied { embedding } else { decoder };
        let missing = || format!("--grow needs a checkpoint with {}", names[usize::from(sizes.tied)]);
        let weight = weight.ok_or_else(missing)?.clone();
        if weight.dims() != [sizes.head.vocab, sizes.head.context] || sizes.head.context != sizes.head.hidden {
            let (hidden, context) = (sizes.head.hidden, sizes.head.context);
            return Err(format!(
                "--grow needs contexts as wide as the hidden states and a decoder of their width, but they are {context} \
                 and {hidden} wide, and the decoder is {:?}",
                weight.dims()
            )
            .into());
        }
        let softmax = SoftmaxHead::from_tensors(weight, checkpoint.tensors.get("head.decoder.bias").cloned())?;
        let mixture = MixtureOfSoftmaxes::from_softmax(&softmax, sizes.head.components, seed)?;
        let MixtureTensors { prior_weight, latent_weight, latent_bias, .. } = mixture.tensors()?;
        let mut grown = Checkpoint { tensors: checkpoint.tensors.clone(), ..Checkpoint::default() };
        let projection = [
            ("head.prior.weight", prior_weight),
            ("head.latent.weight", latent_weight),
            ("head.latent.bias", latent_bias),
        ];
        grown.tensors.extend(projection.map(|(name, tensor)| (name.to_owned(), tensor.detach())));
        grown.restore_variables(self.varmap())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Data;
    use crate::layers::init::sorted;
    use crate::training::{Awd, InitialValues, OptimizerKind, Recipe, Session};
    use candle_core::Device;
    use mos_head::parts::LogitFunction;
    use mos_head::ContextActivation;

    const VOCAB: usize = 11;

    fn recipe(tied: bool) -> Recipe {
        let awd = Awd { tied: Some(tied), inner: Some(7), ..Awd::NONE };
        let activation = ContextActivation::Identity;
        let optimizer = OptimizerKind::Adam;
        Recipe { hidden: 6, context: Some(6), layers: 2, activation, optimizer, awd, epochs: 2, ..Recipe::BASE }
    }

    fn model(kind: HeadKind, recipe: &Recipe) -> LanguageModel {
        LanguageModel::new(kind, VOCAB, InitialValues::Even, recipe, &Device::Cpu).expect("valid sizes")
    }

    fn session(kind: HeadKind, recipe: &Recipe) -> Session<LanguageModel> {
        let text: Vec<u32> = (0..900).map(|i| (i * i + i / 7) % VOCAB as u32).collect();
        let data = Data::new("squares".into(), ["a"], text.clone(), text);
        Session::new(kind, model(kind, recipe), data, recipe).expect("a session")
    }

    #[test]
    fn a_grown_mixture_starts_at_the_loss_of_the_softmax_and_learns() {
        let function = LogitFunction::Sigsoftmax;
        let others = [recipe(false), recipe(true), Recipe { logit_function: function, ..recipe(true) }];
        for recipe in others {
            let mut softmax = session(HeadKind::Softmax, &recipe);
            softmax.run(None, None, None).expect("trains");
            let before = softmax.valid_nll().expect("evaluates");
            let mut grown = session(HeadKind::Mos, &recipe);
            assert!((grown.valid_nll().expect("evaluates") - before).abs() > 1e-2);
            grown.model.grow(&softmax.checkpoint().expect("copies"), 5).expect("equal sizes");
            let start = grown.valid_nll().expect("evaluates");
            assert!((start - before).abs() < 1e-5, "{start} {before}");
            grown.run(None, None, None).expect("trains");
            let end = grown.valid_nll().expect("evaluates");
            assert!(end < start - 1e-3, "{start} {end}");
            // The components are no longer alike.
            let variables = sorted(grown.model.varmap());
            let latent = &variables.iter().find(|(name, _)| name == "head.latent.weight").expect("a mixture").1;
            let component = |k: usize| latent.narrow(0, 6 * k, 6).unwrap();
            let difference = (component(0) - component(1)).unwrap().abs().unwrap().max_all().unwrap();
            assert!(difference.to_scalar::<f32>().unwrap() > 1e-3);
        }
    }

    #[test]
    fn other_sizes_and_heads_are_errors_that_name_what_differs() {
        let checkpoint = |kind, recipe: &Recipe| session(kind, recipe).checkpoint().expect("copies");
        let error = |recipe: &Recipe, checkpoint: &Checkpoint| {
            model(HeadKind::Mos, recipe).grow(checkpoint, 1).expect_err("must fail").to_string()
        };
        let plain = recipe(false);
        let softmax = checkpoint(HeadKind::Softmax, &plain);
        let contains = |error: String, part: &str| assert!(error.contains("--grow") && error.contains(part), "{error}");
        contains(error(&plain, &checkpoint(HeadKind::Mos, &plain)), "--head mos");
        contains(error(&Recipe { layers: 3, ..plain }, &softmax), "--layers 2");
        contains(error(&Recipe { context: Some(4), ..plain }, &softmax), "4 and 6 wide");
        contains(error(&Recipe { logit_function: LogitFunction::Sigsoftmax, ..plain }, &softmax), "logit-function");
        let mut capped = checkpoint(HeadKind::Softmax, &Recipe { logit_function: LogitFunction::Sigsoftmax, ..plain });
        contains(error(&plain, &capped), "sigsoftmax");
        capped.metadata.insert("output".into(), "char-cnn".into());
        contains(error(&plain, &capped), "--output char-cnn");
        // A tied decoder is the embedding.
        contains(error(&plain, &checkpoint(HeadKind::Softmax, &recipe(true))), "head.decoder.weight");
    }
}
