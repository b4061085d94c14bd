//! The recipes of the papers, and two for a small machine.

use crate::output::OutputFlags;
use crate::{cache::CacheSettings, dynamic::DynamicSettings};
use clap::{Parser, ValueEnum};
use lab::layers::Output;
use lab::training::{Awd, Recipe, RecipeFlags};
use lab::Result;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Preset {
    /// Penn Treebank, mixture of 15 softmaxes, 21.5 million parameters (Yang et al., 2018)
    PtbMos,
    /// The same model with a mixture of contexts
    PtbMoc,
    /// Penn Treebank, AWD-LSTM with a softmax, 24.2 million parameters (Merity et al., 2018)
    PtbSoftmax,
    /// WikiText-2, mixture of 15 softmaxes, 34.9 million parameters (Yang et al., 2018)
    Wt2Mos,
    /// The same model with a mixture of contexts
    Wt2Moc,
    /// WikiText-2, AWD-LSTM with a softmax, 33.6 million parameters (Merity et al., 2018)
    Wt2Softmax,
    /// One Billion Word Benchmark, mixture of 7 softmaxes, for --words 100000 (Yang et al., 2018)
    #[value(name = "1b-mos")]
    BillionMos,
    /// The same with a softmax, of 1024 dimensions
    #[value(name = "1b-softmax")]
    BillionSoftmax,
    /// 5 million parameters on 10,000 ids with any head, regularised for a few epochs
    Small,
    /// One Billion Word Benchmark, LSTM-512-512, 0.82 billion parameters at 793,471 words (Jozefowicz et al., 2016)
    #[value(name = "limits-lstm-512-512")]
    LimitsLstm512,
    /// LSTM-2048-512: 2048 cells, whose outputs are projected to 512 dimensions
    #[value(name = "limits-lstm-2048-512")]
    LimitsLstm2048,
    /// Two layers of LSTM-8192-1024, "BIG LSTM", 1.8 billion parameters
    #[value(name = "limits-lstm-8192-1024")]
    LimitsLstm8192,
    /// The same with inputs from spellings, 1.04 billion parameters
    LimitsCnnInputs,
    /// The same with the rows of the decoder from spellings too, 0.29 billion parameters (0.39 with --correction 128)
    LimitsCnnSoftmax,
    /// The character LSTM for --spell with a model of limits-cnn-inputs, 0.23 billion parameters together
    LimitsCharLstm,
    /// A model of this shape for Penn Treebank and a small machine
    LimitsSmall,
}

/// The flags of the released code for Penn Treebank and WikiText-2, but for the regularisers.
const RELEASED: &str =
    "--epochs 1000 --components 15 --layers 3 --batch 12 --bptt 70 --lr 20 --decay 1 --optimizer sgd --clip 0.25";
/// The regularisers of AWD-LSTM.
const AWD: &str =
    "--tied --weight-dropout 0.5 --embedding-dropout 0.1 --output-dropout 0.4 --ar 2 --tar 1 --weight-decay 1.2e-6 \
     --random-bptt 40";
const AVERAGED: &str = "--nonmono 5";
const PTB_MIXTURE: &str =
    "--hidden 620 --embedding 280 --context 280 --inner 960 --input-dropout 0.4 --hidden-dropout 0.225 \
     --context-dropout 0.29";
const PTB_SOFTMAX: &str = "--hidden 400 --batch 20 --lr 30 --inner 1150 --input-dropout 0.4 --hidden-dropout 0.25";
const WT2_MIXTURE: &str =
    "--hidden 650 --embedding 300 --context 300 --batch 15 --lr 15 --inner 1150 --input-dropout 0.55 \
     --hidden-dropout 0.2 --context-dropout 0.29 --random-bptt 20 --small-batch 5";
const WT2_SOFTMAX: &str = "--hidden 400 --batch 80 --lr 30 --inner 1150 --input-dropout 0.65 --hidden-dropout 0.2";
/// This recipe has no regularisers (appendix B.2). The paper gives neither the number of epochs nor a schedule.
const BILLION: &str = "--tied --epochs 5 --components 7 --hidden 1024 --layers 2 --batch 60 --bptt 35 --decay 0.7";
/// The learning rate falls in the place of an average.
const SMALL: &str =
    "--epochs 6 --components 5 --hidden 300 --inner 400 --layers 2 --batch 20 --bptt 35 --decay 0.7 --dropout 0.1 \
     --weight-dropout 0.1 --embedding-dropout 0.05 --output-dropout 0.2 --random-bptt 10";

/// Adagrad at learning rate 0.2, windows of 20 steps in 128 streams, 8192 negatives for a batch, and a norm of the
/// LSTM's gradients of at most 1; the paper gives no number of epochs.
const LIMITS: &str =
    "--epochs 10 --layers 1 --batch 128 --bptt 20 --lr 0.2 --decay 1 --optimizer adagrad --clip 1 --clip-lstm true \
     --dropout 0.1 --output sampled --samples 8192 --noise log-uniform";
const LIMITS_BIG: &str = "--layers 2 --hidden 1024 --cells 8192 --dropout 0.25 --cnn limits";
const SPELLED: &str = "--spelled-inputs true";
const LIMITS_SMALL: &str = "--epochs 5 --hidden 192 --cells 512 --batch 20 --samples 1000";
/// The paper does not give the sizes of its character LSTM.
const LIMITS_CHARACTERS: &str = "--hidden 1024 --embedding 512 --output full";

/// The flags of a preset; a later one changes an earlier one.
#[derive(Parser)]
#[command(no_binary_name = true, args_override_self = true)]
struct Flags {
    #[command(flatten)]
    recipe: RecipeFlags,
    #[command(flatten)]
    awd: Awd,
    #[command(flatten)]
    output: OutputFlags,
    #[arg(long)]
    bptt: usize,
}

impl Preset {
    /// Returns the head that the preset is for, its learning rate of finetuning, and its flags.
    fn parts(self) -> (&'static str, f64, Vec<&'static str>) {
        match self {
            Preset::PtbMos => ("mos", 25.0, vec![RELEASED, AWD, AVERAGED, PTB_MIXTURE]),
            Preset::PtbMoc => ("moc", 25.0, vec![RELEASED, AWD, AVERAGED, PTB_MIXTURE]),
            Preset::PtbSoftmax => ("softmax", 30.0, vec![RELEASED, AWD, AVERAGED, PTB_SOFTMAX]),
            Preset::Wt2Mos => ("mos", 20.0, vec![RELEASED, AWD, AVERAGED, WT2_MIXTURE]),
            Preset::Wt2Moc => ("moc", 20.0, vec![RELEASED, AWD, AVERAGED, WT2_MIXTURE]),
            Preset::Wt2Softmax => ("softmax", 30.0, vec![RELEASED, AWD, AVERAGED, WT2_SOFTMAX]),
            Preset::BillionMos => ("mos", 20.0, vec![RELEASED, BILLION, "--embedding 900 --context 900"]),
            Preset::BillionSoftmax => ("softmax", 20.0, vec![RELEASED, BILLION]),
            Preset::Small => ("all", 20.0, vec![RELEASED, AWD, SMALL]),
            Preset::LimitsLstm512 => ("softmax", 20.0, vec![LIMITS, "--hidden 512 --cells 512"]),
            Preset::LimitsLstm2048 => ("softmax", 20.0, vec![LIMITS, "--hidden 512 --cells 2048"]),
            Preset::LimitsLstm8192 => ("softmax", 20.0, vec![LIMITS, LIMITS_BIG]),
            Preset::LimitsCnnInputs => ("softmax", 20.0, vec![LIMITS, LIMITS_BIG, SPELLED]),
            Preset::LimitsCnnSoftmax => {
                ("softmax", 20.0, vec![LIMITS, LIMITS_BIG, SPELLED, "--output char-cnn --correction 0"])
            }
            Preset::LimitsCharLstm => ("softmax", 20.0, vec![LIMITS, LIMITS_CHARACTERS]),
            Preset::LimitsSmall => ("softmax", 20.0, vec![LIMITS, LIMITS_SMALL]),
        }
    }

    fn flags(self) -> Result<Flags> {
        let (_, _, flags) = self.parts();
        Ok(Flags::try_parse_from(flags.iter().flat_map(|text| text.split(' ')))?)
    }

    pub(crate) fn recipe(self) -> Result<Recipe> {
        let Flags { recipe, awd, output, bptt } = self.flags()?;
        let output = output.over(Output::FULL);
        Ok(recipe.over(Recipe { bptt, awd, output, ..Recipe::BASE }, Recipe::BASE.seed))
    }

    /// Returns the preset of the word model that this one spells the words of, if it is one for --spell.
    pub(crate) fn word(self) -> Option<Preset> {
        (self == Preset::LimitsCharLstm).then_some(Preset::LimitsCnnInputs)
    }

    /// Returns the learning rate of finetuning.
    pub(crate) fn finetuning_lr(self) -> f64 {
        self.parts().1
    }

    /// Returns the head that the preset is for.
    pub(crate) fn head(self) -> &'static str {
        self.parts().0
    }

    /// Returns the settings of dynamic evaluation, from those of the released code (see [`DynamicSettings`]), and of
    /// the cache (Merity et al., 2018).
    pub(crate) fn adaptation(self) -> (DynamicSettings, CacheSettings) {
        let released = |decay, epsilon: f64, segments: f64| DynamicSettings {
            lr: 0.002 / segments.sqrt(),
            decay,
            epsilon: epsilon / segments.sqrt(),
        };
        match self {
            // 929,589 and 2,088,628 tokens in segments of 100 x 5.
            Preset::Wt2Mos | Preset::Wt2Moc | Preset::Wt2Softmax => {
                (released(0.02, 0.002, 4177.0), CacheSettings { window: 3785, theta: 0.662, lambda: 0.1279 })
            }
            _ => (released(0.075, 0.001, 1859.0), CacheSettings { window: 500, theta: 1.0, lambda: 0.1 }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lab::{layers::HeadKind, training::Sizes};

    #[test]
    fn the_numbers_of_parameters_are_those_of_the_papers() {
        let parameters = |preset: Preset, kind, components, vocab| {
            let recipe = Recipe { components, ..preset.recipe().expect("valid flags") };
            Sizes::new(kind, &recipe, vocab).parameters(kind)
        };
        assert_eq!(parameters(Preset::PtbMos, HeadKind::Mos, 15, 10_000), 21_500_620);
        assert_eq!(parameters(Preset::PtbMos, HeadKind::Mos, 16, 10_000), 21_675_120);
        assert_eq!(parameters(Preset::PtbMoc, HeadKind::Moc, 15, 10_000), 21_500_620);
        assert_eq!(parameters(Preset::Wt2Mos, HeadKind::Mos, 15, 33_278), 34_909_528);
        assert_eq!(parameters(Preset::PtbSoftmax, HeadKind::Softmax, 1, 10_000), 24_221_600);
        assert_eq!(parameters(Preset::Wt2Moc, HeadKind::Moc, 15, 33_278), 34_909_528);
        assert_eq!(parameters(Preset::Wt2Softmax, HeadKind::Softmax, 1, 33_278), 33_556_078);
        // Published as 113 and 119 million.
        assert_eq!(parameters(Preset::BillionMos, HeadKind::Mos, 7, 100_000) / 1_000_000, 112);
        assert_eq!(parameters(Preset::BillionSoftmax, HeadKind::Softmax, 1, 100_000) / 1_000_000, 119);
    }

    #[test]
    fn the_heads_of_the_small_preset_have_equal_numbers_of_parameters() {
        let recipe = Preset::Small.recipe().expect("valid flags");
        let parameters = |kind| Sizes::new(kind, &recipe, 10_000).parameters(kind) as f64;
        let softmax = parameters(HeadKind::Softmax);
        assert!((4.5e6..5.5e6).contains(&softmax), "{softmax}");
        for kind in [HeadKind::Moc, HeadKind::Mos, HeadKind::Mixtape] {
            assert!((parameters(kind) / softmax - 1.0).abs() < 0.01, "{kind:?}: {}", parameters(kind));
        }
    }
}
