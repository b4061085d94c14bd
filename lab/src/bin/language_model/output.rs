//! The flags of what lies between the words and the model: inputs, and the output between a head and its vocabulary.

use lab::layers::{CnnSize, Noise, Output, OutputKind};
use lab::show::values::positive;
use lab::Result;

/// A flag without a value keeps what the preset has, or the default.
#[derive(Debug, clap::Args)]
pub(crate) struct OutputFlags {
    /// What lies between the head and the vocabulary [default: full]
    #[arg(long, value_enum)]
    output: Option<OutputKind>,
    /// Number of negatives of a sampled output [default: a tenth of the vocabulary]
    #[arg(long, value_name = "N", value_parser = positive)]
    samples: Option<usize>,
    /// The distribution of the negatives [default: unigram]
    #[arg(long, value_enum)]
    noise: Option<Noise>,
    /// Whether the inputs are computed from spellings, in place of an embedding
    #[arg(long, value_name = "BOOL")]
    spelled_inputs: Option<bool>,
    /// The sizes of networks from spellings [default: small]
    #[arg(long, value_enum)]
    cnn: Option<CnnSize>,
    /// Dimensions of the correction of each word's row in --output char-cnn, 0 for none [default: 32]
    #[arg(long, value_name = "N")]
    correction: Option<usize>,
}

impl OutputFlags {
    /// Returns the output of these flags over another one.
    pub(crate) fn over(&self, defaults: Output) -> Output {
        Output {
            kind: self.output.unwrap_or(defaults.kind),
            samples: self.samples.or(defaults.samples),
            noise: self.noise.unwrap_or(defaults.noise),
            spelled_inputs: self.spelled_inputs.unwrap_or(defaults.spelled_inputs),
            cnn: self.cnn.unwrap_or(defaults.cnn),
            correction: self.correction.unwrap_or(defaults.correction),
        }
    }

    /// Fails if a flag has no effect on this output.
    pub(crate) fn check(&self, output: Output) -> Result<()> {
        let is_sampled = output.kind.is_sampled();
        let is_spelled = output.kind == OutputKind::CharCnn;
        for (is_given, is_used, message) in [
            (self.samples.is_some(), is_sampled, "--samples is for --output sampled, nce and char-cnn"),
            (self.noise.is_some(), is_sampled, "--noise is for --output sampled, nce and char-cnn"),
            (self.correction.is_some(), is_spelled, "--correction is for --output char-cnn"),
            (
                self.cnn.is_some(),
                is_spelled || output.spelled_inputs,
                "--cnn is for --spelled-inputs and --output char-cnn",
            ),
        ] {
            if is_given && !is_used {
                return Err(message.into());
            }
        }
        if output.spelled_inputs && output.kind.is_coded() {
            return Err("--spelled-inputs is for models of words, not of codes".into());
        }
        Ok(())
    }
}
