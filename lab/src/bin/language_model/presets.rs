//! The recipes of the papers, and one for a small machine.

use crate::{cache::CacheSettings, dynamic::DynamicSettings};
use clap::ValueEnum;
use lab::training::{Awd, OptimizerKind, Recipe};

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
}

/// The recipe from which the presets start.
const AWD: Recipe = Recipe {
    epochs: 1000,
    components: 15,
    layers: 3,
    batch: 12,
    bptt: 70,
    lr: 20.0,
    decay: 1.0,
    optimizer: OptimizerKind::Sgd,
    clip: 0.25,
    awd: Awd {
        tied: Some(true),
        weight_dropout: Some(0.5),
        embedding_dropout: Some(0.1),
        output_dropout: Some(0.4),
        ar: Some(2.0),
        tar: Some(1.0),
        weight_decay: Some(1.2e-6),
        random_bptt: Some(40),
        nonmono: Some(5),
        ..Awd::NONE
    },
    ..Recipe::BASE
};

const PTB_MOS: Recipe = Recipe {
    hidden: 620,
    embedding: Some(280),
    context: Some(280),
    awd: Awd {
        inner: Some(960),
        input_dropout: Some(0.4),
        hidden_dropout: Some(0.225),
        context_dropout: Some(0.29),
        ..AWD.awd
    },
    ..AWD
};

const WT2_MOS: Recipe = Recipe {
    hidden: 650,
    embedding: Some(300),
    context: Some(300),
    batch: 15,
    lr: 15.0,
    awd: Awd {
        inner: Some(1150),
        input_dropout: Some(0.55),
        hidden_dropout: Some(0.2),
        context_dropout: Some(0.29),
        random_bptt: Some(20),
        small_batch: Some(5),
        ..AWD.awd
    },
    ..AWD
};

/// This recipe has no regularisers (appendix B.2). The paper gives neither the number of epochs nor a schedule.
const BILLION: Recipe = Recipe {
    epochs: 5,
    components: 7,
    hidden: 1024,
    layers: 2,
    batch: 60,
    bptt: 35,
    lr: 20.0,
    decay: 0.7,
    awd: Awd { tied: Some(true), ..Awd::NONE },
    ..AWD
};

impl Preset {
    pub(crate) fn recipe(self) -> Recipe {
        match self {
            Preset::PtbMos | Preset::PtbMoc => PTB_MOS,
            Preset::PtbSoftmax => Recipe {
                hidden: 400,
                batch: 20,
                lr: 30.0,
                awd: Awd { inner: Some(1150), input_dropout: Some(0.4), hidden_dropout: Some(0.25), ..AWD.awd },
                ..AWD
            },
            Preset::Wt2Mos | Preset::Wt2Moc => WT2_MOS,
            Preset::Wt2Softmax => Recipe {
                hidden: 400,
                batch: 80,
                lr: 30.0,
                awd: Awd { inner: Some(1150), input_dropout: Some(0.65), hidden_dropout: Some(0.2), ..AWD.awd },
                ..AWD
            },
            Preset::BillionMos => Recipe { embedding: Some(900), context: Some(900), ..BILLION },
            Preset::BillionSoftmax => BILLION,
            Preset::Small => Recipe {
                epochs: 6,
                components: 5,
                hidden: 300,
                layers: 2,
                batch: 20,
                bptt: 35,
                decay: 0.7,
                dropout: 0.1,
                awd: Awd {
                    inner: Some(400),
                    weight_dropout: Some(0.1),
                    embedding_dropout: Some(0.05),
                    output_dropout: Some(0.2),
                    random_bptt: Some(10),
                    // The learning rate falls instead.
                    nonmono: None,
                    ..AWD.awd
                },
                ..AWD
            },
        }
    }

    /// Returns the learning rate of finetuning.
    pub(crate) fn finetuning_lr(self) -> f64 {
        match self {
            Preset::PtbMos | Preset::PtbMoc => 25.0,
            Preset::PtbSoftmax | Preset::Wt2Softmax => 30.0,
            _ => 20.0,
        }
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

    /// Returns the head that the preset is for.
    pub(crate) fn head(self) -> &'static str {
        match self {
            Preset::PtbMos | Preset::Wt2Mos | Preset::BillionMos => "mos",
            Preset::PtbMoc | Preset::Wt2Moc => "moc",
            Preset::PtbSoftmax | Preset::Wt2Softmax | Preset::BillionSoftmax => "softmax",
            Preset::Small => "all",
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
            let recipe = Recipe { components, ..preset.recipe() };
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
        let recipe = Preset::Small.recipe();
        let parameters = |kind| Sizes::new(kind, &recipe, 10_000).parameters(kind) as f64;
        let softmax = parameters(HeadKind::Softmax);
        assert!((4.5e6..5.5e6).contains(&softmax), "{softmax}");
        for kind in [HeadKind::Moc, HeadKind::Mos] {
            assert!((parameters(kind) / softmax - 1.0).abs() < 0.01, "{kind:?}: {}", parameters(kind));
        }
    }
}
