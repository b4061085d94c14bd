//! Numbers of parameters, from the sizes alone.

use crate::args::Args;
use crate::spell::Speller;
use lab::layers::HeadKind;
use lab::training::Sizes;
use lab::Result;

/// The number of different characters in the spellings, as in Jozefowicz et al. (2016).
const CHARACTERS: usize = 256;

/// Prints the number of parameters of each head's model for a vocabulary of this size.
pub(crate) fn run(args: &Args, words: usize) -> Result<()> {
    for kind in args.training().heads() {
        let parameters = parameters(args, kind, words)?;
        println!("{}: {parameters} parameters, {:.3} billion", kind.name(), parameters as f64 / 1e9);
    }
    Ok(())
}

fn parameters(args: &Args, kind: HeadKind, words: usize) -> Result<usize> {
    let recipe = args.recipe()?;
    let Some(word) = args.preset.and_then(|preset| preset.word()) else {
        return Sizes::new(kind, &recipe, words).described(kind, CHARACTERS);
    };
    // The word model without its decoder, and the character LSTM.
    let sizes = Sizes::new(HeadKind::Softmax, &word.recipe()?, words);
    let word = sizes.described(HeadKind::Softmax, CHARACTERS)? - sizes.head.parameters(HeadKind::Softmax);
    let hidden = sizes.head.hidden;
    Ok(word + Speller::parameters(kind, Sizes::new(kind, &recipe, CHARACTERS), &recipe, hidden))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    /// The numbers of parameters of table 1 of Jozefowicz et al. (2016), in billions, at 793,471 words. The paper gives
    /// 1.8 with one digit after the point.
    #[test]
    fn the_numbers_of_parameters_are_those_of_the_paper() {
        for (flags, published, tolerance) in [
            ("--preset limits-lstm-512-512", 0.82, 0.01),
            ("--preset limits-lstm-2048-512", 0.83, 0.01),
            ("--preset limits-lstm-8192-1024", 1.8, 0.05),
            ("--preset limits-cnn-inputs", 1.04, 0.01),
            ("--preset limits-cnn-softmax", 0.29, 0.01),
            ("--preset limits-cnn-softmax --correction 128", 0.39, 0.01),
            ("--preset limits-char-lstm", 0.23, 0.01),
        ] {
            let args = Args::try_parse_from(format!("language_model {flags} --describe 793471").split_whitespace());
            let found = parameters(&args.expect("valid flags"), HeadKind::Softmax, 793_471).expect("a description");
            assert!((found as f64 / 1e9 - published).abs() < tolerance, "{flags}: {found}");
        }
    }
}
