//! An output lies between a head and its vocabulary: it computes all of the vocabulary at each step, a sample of it,
//! rows computed from spellings, or a vocabulary of two levels.

use super::head::{HeadKind, HeadSizes};
use super::mixtape::{by_frequency, Mixtape, MixtapeConfig};
use super::spelled::{CnnSize, Inputs};
use crate::{show::values::name, Result};
use candle_nn::{Embedding, VarBuilder};
use clap::ValueEnum;
use mos_head::parts::{CharCnn, LogitFunction};
use mos_head::sampled::NoiseDistribution;
use mos_head::two_level::{AdaptiveConfig, AdaptiveSoftmax, Classes, HierarchicalConfig, HierarchicalSoftmax};
use mos_head::{LossOptions, MixtureLayer, MixtureOfContexts, MixtureOfSoftmaxes, OutputLayer, SoftmaxHead};
use std::sync::Arc;

/// One of these outputs lies between a head and its vocabulary.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum OutputKind {
    /// The whole vocabulary at each step
    #[default]
    Full,
    /// A sampled softmax
    Sampled,
    /// Noise-contrastive estimation; for --head softmax and moc: all leaves out mos
    Nce,
    /// Rows of the decoder computed from spellings, trained with a sampled softmax
    CharCnn,
    /// An adaptive softmax, whose frequent ids are the head's
    Adaptive,
    /// Classes, which are the head's, and a softmax in each
    Hierarchical,
    /// Each word is a row and a column of a table, and the head's vocabulary is these
    LightRnn,
    /// As light-rnn, but frequent words have a code of their own
    HybridLightRnn,
    /// Each word is one or more pieces
    Bpe,
}

impl OutputKind {
    /// Returns whether a training step looks at a sample of the vocabulary.
    pub fn is_sampled(self) -> bool {
        matches!(self, OutputKind::Sampled | OutputKind::Nce | OutputKind::CharCnn)
    }

    /// Returns whether words are sequences of codes, and the codes are the head's vocabulary.
    pub fn is_coded(self) -> bool {
        matches!(self, OutputKind::LightRnn | OutputKind::HybridLightRnn | OutputKind::Bpe)
    }

    /// Returns why a head cannot have this output, if it cannot.
    pub fn reason_against(self, kind: HeadKind) -> Option<&'static str> {
        match (self, kind) {
            (OutputKind::Nce, HeadKind::Mos) => Some("--output nce is for one softmax, as --head softmax and moc are"),
            (OutputKind::Full, _) => None,
            (_, HeadKind::Mixtape) => Some("--head mixtape has the whole vocabulary of words: it is for --output full"),
            _ => None,
        }
    }
}

/// The distribution that negatives are drawn from, without replacement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Noise {
    /// The words' frequencies in the training text
    #[default]
    Unigram,
    /// log((r + 2) / (r + 1)) for the word of rank r by frequency, in proportion
    LogUniform,
}

/// `--output` and its sizes, and what the inputs are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Output {
    /// The kind of the output between the head and its vocabulary.
    pub kind: OutputKind,
    /// The number of negatives. `None` stands for a tenth of the vocabulary, and at least 16.
    pub samples: Option<usize>,
    /// The distribution of the negatives.
    pub noise: Noise,
    /// Whether the inputs are computed from spellings.
    pub spelled_inputs: bool,
    /// The sizes of the networks from spellings.
    pub cnn: CnnSize,
    /// The dimensions of the correction of each row of `--output char-cnn`.
    pub correction: usize,
}

/// The entries of a vocabulary have a spelling each, and a count in the training text.
#[derive(Clone, Debug, Default)]
pub struct Entries {
    /// The words, by token id.
    pub words: Vec<String>,
    /// The number of times that each word occurs in the training text, plus one.
    pub counts: Vec<f64>,
}

impl Entries {
    /// Counts these words in a text. Each counts one occurrence more than the text has, so that none is impossible.
    pub fn count(words: &[String], text: &[u32]) -> Self {
        let mut counts = vec![1.0; words.len()];
        text.iter().for_each(|&id| counts[id as usize] += 1.0);
        Entries { words: words.to_vec(), counts }
    }
}

impl Output {
    /// The whole vocabulary.
    pub const FULL: Output = Output {
        kind: OutputKind::Full,
        samples: None,
        noise: Noise::Unigram,
        spelled_inputs: false,
        cnn: CnnSize::Small,
        correction: 32,
    };

    /// Returns the output's name in results.
    pub(crate) fn name(self) -> String {
        name(&self.kind)
    }

    /// Returns the settings that a checkpoint must match, by the names of their flags.
    pub(crate) fn settings(self) -> Vec<(&'static str, String)> {
        let has_rows = self.kind == OutputKind::CharCnn;
        let settings = [
            (self.kind != OutputKind::Full, "output", self.name()),
            (self.spelled_inputs, "spelled-inputs", "true".into()),
            (self.cnn != CnnSize::Small, "cnn", name(&self.cnn)),
            (has_rows && self.correction != Output::FULL.correction, "correction", self.correction.to_string()),
        ];
        settings.into_iter().filter(|(is_set, ..)| *is_set).map(|(_, name, value)| (name, value)).collect()
    }

    /// Returns the inputs of a model of these entries: a table that the decoder may share, or a network.
    pub(crate) fn inputs(self, vocab: usize, width: usize, entries: &Entries, vb: &VarBuilder) -> Result<Inputs> {
        if !self.spelled_inputs {
            return Ok(Inputs::Table(candle_nn::embedding(vocab, width, vb.pp("embedding"))?));
        }
        if entries.words.len() != vocab {
            return Err("--spelled-inputs needs the words of the vocabulary".into());
        }
        Ok(Inputs::Spelled(CharCnn::new(&self.cnn.config(width, 0), &entries.words, vb.pp("inputs"))?))
    }

    /// Returns a head of `sizes` on this output. If an embedding is given, the decoder shares its weight.
    pub(crate) fn build(
        self,
        kind: HeadKind,
        sizes: HeadSizes,
        dropout: f64,
        tied: Option<&Embedding>,
        entries: &Entries,
        vb: VarBuilder,
    ) -> Result<Box<dyn OutputLayer>> {
        let HeadSizes { vocab, hidden, logit_function, .. } = sizes;
        let is_whole =
            matches!(self.kind, OutputKind::Full | OutputKind::Sampled | OutputKind::Nce) || self.kind.is_coded();
        if tied.is_some() && !is_whole {
            return Err(
                format!("--tied needs a decoder with a row for each entry: not --output {}", self.name()).into()
            );
        }
        if let Some(reason) = self.kind.reason_against(kind) {
            return Err(reason.into());
        }
        let has_two_levels = matches!(self.kind, OutputKind::Adaptive | OutputKind::Hierarchical);
        if logit_function != LogitFunction::Identity && (has_two_levels || kind == HeadKind::Mixtape) {
            let other =
                if has_two_levels { format!("--output {}", self.name()) } else { format!("--head {}", kind.name()) };
            return Err(format!("--logit-function is for a softmax or mixture of all ids, not {other}").into());
        }
        if kind == HeadKind::Mixtape {
            let config = MixtapeConfig { dropout, ..sizes.mixtape() };
            return Ok(match tied {
                // Without counts there are no frequent ids.
                _ if entries.counts.is_empty() => sizes.build(kind, dropout, tied, vb)?,
                None => Box::new(Mixtape::new(config, &entries.counts, vb)?),
                Some(embedding) => Box::new(Mixtape::tied(config, &entries.counts, embedding, vb)?),
            });
        }
        let softmax = |vocab: usize| HeadSizes { vocab, ..sizes }.softmax();
        let mixture = |vocab: usize| HeadSizes { vocab, ..sizes }.mixture().with_dropout(dropout);
        // This makes the softmax or the mixture of the ids or classes of the first level.
        let first_level = |vocab: usize, vb: VarBuilder| -> Result<Arc<dyn MixtureLayer>> {
            Ok(match kind {
                HeadKind::Softmax => Arc::new(SoftmaxHead::new(&softmax(vocab), vb)?),
                HeadKind::Moc => Arc::new(MixtureOfContexts::new(&mixture(vocab), vb)?),
                HeadKind::Mos | HeadKind::Mixtape => Arc::new(MixtureOfSoftmaxes::new(&mixture(vocab), vb)?),
            })
        };
        match self.kind {
            _ if is_whole => sizes.build(kind, dropout, tied, vb),
            OutputKind::CharCnn => {
                let width = if kind == HeadKind::Softmax { hidden } else { sizes.context };
                let cnn = CharCnn::new(&self.cnn.config(width, self.correction), &entries.words, vb.pp("rows"))?;
                Ok(match kind {
                    HeadKind::Softmax => Box::new(SoftmaxHead::with_char_cnn(&softmax(vocab), cnn, vb)?),
                    HeadKind::Moc => Box::new(MixtureOfContexts::with_char_cnn(&mixture(vocab), cnn, vb)?),
                    HeadKind::Mos | HeadKind::Mixtape => {
                        Box::new(MixtureOfSoftmaxes::with_char_cnn(&mixture(vocab), cnn, vb)?)
                    }
                })
            }
            OutputKind::Adaptive => {
                // Twice the default size of the projections, as the hidden states are small here.
                let config = AdaptiveConfig::new(hidden, vocab, cutoffs(vocab)).with_div_value(2.0);
                let head = first_level(config.head_size(), vb.pp("head"))?;
                Ok(Box::new(AdaptiveSoftmax::with_head(&config, head, vb)?))
            }
            _ => {
                let classes = Classes::from_frequencies(&entries.counts, (vocab as f64).sqrt().ceil() as usize)?;
                let config = HierarchicalConfig::new(hidden, vocab).with_classes(classes);
                let classes = first_level(config.class_count()?, vb.pp("class"))?;
                Ok(Box::new(HierarchicalSoftmax::with_class_layer(&config, classes, vb)?))
            }
        }
    }

    /// Returns the distribution from which negatives are drawn, if any are.
    pub(crate) fn noise(self, entries: &Entries) -> Result<Option<NoiseDistribution>> {
        let noise = || Ok(NoiseDistribution::unigram(&self.noise.counts(entries))?);
        self.kind.is_sampled().then(noise).transpose()
    }

    /// Returns the options of a training step, with negatives of this seed.
    pub(crate) fn options(self, options: LossOptions, noise: &NoiseDistribution, seed: u64) -> Result<LossOptions> {
        let samples = self.samples.unwrap_or((noise.vocab_size() / 10).max(16)).min(noise.vocab_size());
        let negatives = noise.draw(samples, seed)?;
        Ok(match self.kind {
            OutputKind::Nce => options.with_nce(negatives),
            _ => options.with_sampled_softmax(negatives),
        })
    }
}

impl Noise {
    /// Returns numbers in proportion to the probabilities of the entries.
    fn counts(self, entries: &Entries) -> Vec<f64> {
        if self == Noise::Unigram {
            return entries.counts.clone();
        }
        let ids = by_frequency(&entries.counts);
        let mut counts = vec![0.0; ids.len()];
        ids.iter().enumerate().for_each(|(rank, &id)| counts[id as usize] = (1.0 / (rank as f64 + 1.0)).ln_1p());
        counts
    }
}

/// Returns the cutoffs of the adaptive softmax: a tenth and four tenths of the vocabulary.
fn cutoffs(vocab: usize) -> Vec<usize> {
    vec![(vocab / 10).max(1), (4 * vocab / 10).max(2)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device, Tensor, D};
    use candle_nn::VarMap;
    use mos_head::ContextActivation;

    const KINDS: [OutputKind; 6] = [
        OutputKind::Full,
        OutputKind::Sampled,
        OutputKind::Nce,
        OutputKind::CharCnn,
        OutputKind::Adaptive,
        OutputKind::Hierarchical,
    ];

    fn entries() -> Entries {
        let words: Vec<String> = (0..30).map(|id| format!("w{id}")).collect();
        Entries::count(&words, &[0, 0, 0, 1, 1, 2, 5, 9])
    }

    fn output(kind: OutputKind) -> Output {
        Output { kind, samples: Some(7), ..Output::FULL }
    }

    /// Returns a head on an output, with its variables.
    fn build(head: HeadKind, kind: OutputKind, tied: bool) -> Result<(Box<dyn OutputLayer>, VarMap)> {
        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
        let embedding = candle_nn::embedding(30, 6, vb.pp("embedding"))?;
        let activation = ContextActivation::Tanh;
        let logit_function = LogitFunction::Identity;
        let sizes = HeadSizes { vocab: 30, hidden: 6, context: 6, components: 3, activation, logit_function };
        let tied = tied.then_some(&embedding);
        Ok((output(kind).build(head, sizes, 0.0, tied, &entries(), vb.pp("head"))?, varmap))
    }

    fn hidden() -> Tensor {
        Tensor::rand(-1f32, 1f32, (5, 6), &Device::Cpu).expect("a tensor")
    }

    #[test]
    fn every_output_is_a_distribution_that_trains() {
        let (hidden, targets) = (hidden(), Tensor::new(&[0u32, 3, 29, 3, 11], &Device::Cpu).expect("ids"));
        for head in HeadKind::ALL {
            for kind in KINDS.into_iter().filter(|kind| kind.reason_against(head).is_none()) {
                let (layer, varmap) = build(head, kind, false).expect("valid sizes");
                let total = layer.log_probs(&hidden).unwrap().exp().unwrap().sum(D::Minus1).unwrap();
                assert!(total.to_vec1::<f32>().unwrap().iter().all(|sum| (sum - 1.0).abs() < 1e-5), "{kind:?}");
                let noise = output(kind).noise(&entries()).unwrap();
                let options = |seed| match &noise {
                    Some(noise) => output(kind).options(LossOptions::new(), noise, seed).unwrap(),
                    None => LossOptions::new(),
                };
                let loss = |seed| layer.loss(&hidden, &targets, &options(seed)).unwrap();
                let gradients = loss(1).backward().expect("a backward pass");
                let is_head = |(name, _): &(String, _)| name.starts_with("head.");
                let vars = crate::layers::init::sorted(&varmap).into_iter().filter(is_head);
                let trained = vars.filter(|(_, var)| gradients.get(var).is_some()).count();
                assert!(trained > 0, "{head:?} {kind:?}");
                let value = |seed| loss(seed).value.to_scalar::<f32>().unwrap();
                assert_eq!(value(1), value(1));
                let is_sampled = matches!(kind, OutputKind::Sampled | OutputKind::Nce | OutputKind::CharCnn);
                assert_eq!(value(1) != value(2), is_sampled, "{kind:?}");
            }
        }
    }

    #[test]
    fn a_frozen_head_is_the_head() {
        for head in HeadKind::ALL {
            let (layer, _) = build(head, OutputKind::CharCnn, false).expect("valid sizes");
            let frozen = layer.frozen().expect("rows are computed");
            let ids =
                |head: &dyn OutputLayer, hidden: &Tensor| head.top_k(hidden, 4).unwrap().token_ids.to_vec2::<u32>();
            let hidden = hidden();
            assert_eq!(ids(frozen.as_ref(), &hidden).unwrap(), ids(layer.as_ref(), &hidden).unwrap());
        }
    }

    #[test]
    fn combinations_that_do_not_exist_are_errors_that_name_the_flags() {
        let error = |head, kind, tied| build(head, kind, tied).err().expect("must fail").to_string();
        assert!(error(HeadKind::Mos, OutputKind::Nce, false).contains("--output nce"));
        for kind in [OutputKind::CharCnn, OutputKind::Adaptive, OutputKind::Hierarchical] {
            let error = error(HeadKind::Moc, kind, true);
            assert!(error.contains("--tied") && error.contains("--output"), "{error}");
        }
    }
}
