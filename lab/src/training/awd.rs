//! These settings are what AWD-LSTM (Merity et al., 2018) and the released mixture of softmaxes add to the training of
//! a language model.

use crate::show::values::{below_one, not_negative, positive};

/// Declares each setting once: its doc, its flag and its type.
macro_rules! awd {
    ($(#[doc $($doc:tt)*] #[arg $($arg:tt)*] $name:ident: $type:ty,)*) => {
        /// These are the settings and their flags. What is not set is off, or as the recipe has it.
        #[derive(Clone, Copy, Debug, PartialEq, clap::Args)]
        #[command(next_help_heading = "AWD-LSTM")]
        pub struct Awd {
            $(
                #[doc $($doc)*]
                #[arg $($arg)*]
                pub $name: Option<$type>,
            )*
        }

        impl Awd {
            /// Settings that add nothing.
            pub const NONE: Awd = Awd { $($name: None,)* };

            /// Returns these settings; a setting that is not given comes from `defaults`.
            pub fn over(self, defaults: Awd) -> Awd {
                Awd { $($name: self.$name.or(defaults.$name),)* }
            }

            /// Returns the flags of the settings that are given.
            pub(crate) fn flags(&self) -> Vec<String> {
                let flag = |name: &str, value: String| format!("--{} {value}", name.replace('_', "-"));
                let flags = [$(self.$name.map(|value| flag(stringify!($name), value.to_string()))),*];
                flags.into_iter().flatten().collect()
            }
        }
    };
}

awd! {
    /// LSTM units of the layers below the last [default: as --hidden]
    #[arg(long, value_parser = positive)]
    inner: usize,
    /// Tie the decoder to the embedding
    #[arg(long, num_args = 0..=1, default_missing_value = "true")]
    tied: bool,
    /// Dropout of whole rows of the embedding
    #[arg(long, value_name = "P", value_parser = below_one)]
    embedding_dropout: f64,
    /// Locked dropout of the first layer's inputs [default: --dropout]
    #[arg(long, value_name = "P", value_parser = below_one)]
    input_dropout: f64,
    /// Locked dropout between layers [default: --dropout]
    #[arg(long, value_name = "P", value_parser = below_one)]
    hidden_dropout: f64,
    /// Locked dropout of the last layer's outputs [default: --dropout]
    #[arg(long, value_name = "P", value_parser = below_one)]
    output_dropout: f64,
    /// Locked dropout of the contexts [default: --dropout]
    #[arg(long, value_name = "P", value_parser = below_one)]
    context_dropout: f64,
    /// Dropout of the recurrent weights (DropConnect), one mask for all steps and streams of a backward pass
    #[arg(long, value_name = "P", value_parser = below_one)]
    weight_dropout: f64,
    /// Activation regularisation: factor of the mean square of the last layer's outputs
    #[arg(long, value_name = "ALPHA", value_parser = not_negative)]
    ar: f64,
    /// Temporal activation regularisation: factor of the mean square of their differences
    #[arg(long, value_name = "BETA", value_parser = not_negative)]
    tar: f64,
    /// Factor of the parameters that is added to their gradients; with Adam and Adagrad decoupled, as in AdamW
    #[arg(long, value_parser = not_negative)]
    weight_decay: f64,
    /// Draw the length of every window around --bptt, at most N above it
    #[arg(long, value_name = "N")]
    random_bptt: usize,
    /// Compute the gradients of N streams at a time
    #[arg(long, value_name = "N", value_parser = positive)]
    small_batch: usize,
    /// Average the parameters (ASGD) once the validation loss is above the lowest of those more than N epochs before
    #[arg(long, value_name = "N", value_parser = positive)]
    nonmono: usize,
}

impl Awd {
    /// All settings that are random, and regularisers of their results.
    #[cfg(test)]
    pub(crate) const RANDOM: Awd = {
        let rate = Some(0.2);
        Awd {
            tied: Some(true),
            embedding_dropout: rate,
            input_dropout: rate,
            hidden_dropout: rate,
            output_dropout: rate,
            context_dropout: rate,
            weight_dropout: rate,
            ar: Some(2.0),
            tar: Some(1.0),
            random_bptt: Some(2),
            ..Awd::NONE
        }
    };

    /// Returns these settings without the four locked dropouts, so that `Recipe::dropout` holds.
    pub fn without_locked_dropout(self) -> Awd {
        Awd { input_dropout: None, hidden_dropout: None, output_dropout: None, context_dropout: None, ..self }
    }

    /// Returns whether the LSTM layers or their inputs and outputs have locked dropout.
    pub(crate) fn has_locked_dropout(&self) -> bool {
        *self != self.without_locked_dropout()
    }

    /// Returns the number of streams whose gradients are computed at a time, of this many.
    pub(crate) fn part(&self, streams: usize) -> usize {
        self.small_batch.unwrap_or(streams).min(streams)
    }

    /// Returns whether the decoder is the embedding's matrix.
    pub fn tied(&self) -> bool {
        self.tied.unwrap_or(false)
    }
}
