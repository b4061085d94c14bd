//! Text sampled from a language model, token by token.

use super::{language_model::LanguageModel, model::Model};
use crate::show::values::{not_negative, positive, share};
use crate::Result;
use candle_core::Tensor;
use mos_codes::Codebook;
use mos_head::decode::{Sampler, Sampling};

/// The flags of sampling.
#[derive(Debug, clap::Args)]
pub struct SamplingFlags {
    /// Temperature of sampled text: below 1 favours likely tokens, 0 always takes the likeliest
    #[arg(long, default_value_t = 1.0, value_parser = not_negative)]
    pub temperature: f64,
    /// Sample from the K likeliest tokens
    #[arg(long, value_name = "K", value_parser = positive)]
    pub top_k: Option<usize>,
    /// Sample from the fewest tokens that together have probability P
    #[arg(long, value_name = "P", default_value_t = 1.0, value_parser = share)]
    pub top_p: f64,
}

impl SamplingFlags {
    /// Returns the sampler of these flags.
    pub fn sampler(&self, seed: u64) -> Result<Sampler> {
        let sampling = Sampling::new().with_temperature(self.temperature).with_top_p(self.top_p);
        let sampling = match self.top_k {
            Some(k) => sampling.with_top_k(k),
            None => sampling,
        };
        Ok(Sampler::new(sampling, seed)?)
    }
}

/// Samples `count` token ids after `start`. With a book, the ids are codes, and together they are words.
pub fn generate(
    model: &LanguageModel,
    start: u32,
    count: usize,
    sampler: &mut Sampler,
    book: Option<&Codebook>,
) -> Result<Vec<u32>> {
    let head = model.head().frozen()?;
    let mut states = model.state(1)?;
    let mut last = Tensor::new(&[[start]], model.device())?;
    let (mut text, mut first) = (Vec::with_capacity(count), None);
    for _ in 0..count {
        let hidden = model.hidden(&last, &mut states)?;
        last = match book {
            None => head.sample(&hidden, sampler)?,
            Some(book) => {
                let mask = book.mask(&[first], model.device())?;
                sampler.sample(&head.log_probs(&hidden)?.broadcast_add(&mask)?)?
            }
        };
        let id = last.flatten_all()?.to_vec1::<u32>()?[0];
        first = book.map(|book| book.advance(first, id)).transpose()?.flatten();
        text.push(id);
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layers::HeadKind;
    use crate::training::{InitialValues, Recipe};
    use candle_core::Device;

    #[test]
    fn a_seed_fixes_the_text() {
        let recipe = Recipe { hidden: 4, embedding: Some(3), context: Some(5), ..Recipe::BASE };
        let model = LanguageModel::new(HeadKind::Mos, 11, InitialValues::Even, &recipe, &Device::Cpu).expect("valid");
        let flags = SamplingFlags { temperature: 0.9, top_k: Some(7), top_p: 0.95 };
        let text = |seed| generate(&model, 1, 20, &mut flags.sampler(seed).expect("in range"), None).expect("samples");
        assert_eq!(text(1).len(), 20);
        assert!(text(1).iter().all(|&id| id < 11));
        assert_eq!(text(1), text(1));
        assert_ne!(text(1), text(2));
    }

    #[test]
    fn a_number_out_of_range_is_an_error() {
        let flags = SamplingFlags { temperature: 1.0, top_k: None, top_p: 1.5 };
        let error = flags.sampler(1).expect_err("must fail").to_string();
        assert!(error.contains("top_p"), "{error}");
    }
}
