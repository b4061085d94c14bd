//! What a case has other than the default: values, each with the name that lines have for it.

/// An option with the name that lines have for it.
pub(crate) trait Named: Copy {
    fn name(self) -> &'static str;
}

/// The name that lines have for options that a case has together.
pub(crate) fn joined<T: Named>(options: &[T]) -> String {
    options.iter().map(|option| option.name()).collect::<Vec<_>>().join("+")
}

/// Defines options of one kind, and the name of each.
macro_rules! options {
    ($($(#[$about:meta])* $kind:ident { $($option:ident = $name:literal,)+ })+) => {$(
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub(crate) enum $kind {
            $($option,)+
        }

        impl Named for $kind {
            fn name(self) -> &'static str {
                match self {
                    $($kind::$option => $name,)+
                }
            }
        }
    )+};
}

options! {
    /// An option of a loss.
    LossOption {
        // The reduction is the mean unless another is named.
        Mean = "mean",
        Sum = "sum",
        Unreduced = "none",
        // The first target is ignored, every target is the one that is ignored, or none is.
        IgnoreSome = "ignore_some",
        IgnoreAll = "ignore_all",
        IgnoreAbsent = "ignore_absent",
        PositionWeights = "position_weights",
        ClassWeights = "class_weights",
        Smoothing = "smoothing",
        ZLoss = "z_loss",
        // Correct predictions are counted.
        Hits = "hits",
        // The workspace holds about a quarter of the positions.
        Budget = "budget",
        Evaluation = "evaluation",
        // A term of the hidden states is added.
        Penalty = "penalty",
        Sampled = "sampled",
        Nce = "nce",
        // Negatives are drawn with replacement, or by frequencies.
        Replaced = "replaced",
        Unigram = "unigram",
        // The rows of the decoder that are drawn have the gradient in its place.
        Rows = "rows",
    }

    /// A part of a head.
    Part {
        NoBias = "no_bias",
        Tied = "tied",
        // The decoder is a transposed view.
        Transposed = "transposed",
        // The decoder is computed of spellings.
        Spelled = "char_cnn",
        Scaled = "scaled",
        Capped = "capped",
        Adapter = "adapter",
        // Contexts have no activation.
        Identity = "identity",
        Dropout = "dropout",
        PriorBias = "prior_bias",
        // Two levels: the root has a bias, each cluster is half as wide as the one before, the classes are given, or
        // the root is a mixture of three softmaxes.
        RootBias = "bias",
        HalfWidths = "div2",
        GivenClasses = "given",
        MixtureRoot = "mos3",
    }

    /// What a sampler does.
    Draw {
        Full = "full",
        Greedy = "greedy",
        Temperature = "temperature",
        ComponentTemperature = "component_temperature",
        FromTopK = "top_k",
        TopP = "top_p",
        MinP = "min_p",
        Ancestral = "ancestral",
    }

    /// A score besides the log-probability, or the temperature of all.
    Score {
        LogProb = "plain",
        IsArgmax = "best",
        Entropy = "entropy",
        Outside = "outside",
        Tempered = "temperature",
    }

    /// A term of a policy loss, or what changes it.
    PolicyTerm {
        Ratio = "ppo",
        Kl = "kl",
        Importance = "importance",
        EntropyBonus = "entropy",
        PolicyTemperature = "temperature",
        Constant = "constant",
    }

    /// The divergence of distillation, or what changes it.
    Distillation {
        Forward = "forward",
        Reverse = "reverse",
        JensenShannon = "jensen_shannon",
        TeacherTemperature = "temperature",
        Weights = "weights",
        HardTargets = "hard",
    }
}

/// What a head is, without its parts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    Softmax,
    /// Mixtures of this many components.
    Contexts(usize),
    Softmaxes(usize),
    Adaptive,
    Hierarchical,
}

/// A head with its parts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Head {
    pub(crate) kind: Kind,
    pub(crate) parts: &'static [Part],
}

pub(crate) const fn softmax(parts: &'static [Part]) -> Head {
    Head { kind: Kind::Softmax, parts }
}

/// A mixture of contexts.
pub(crate) const fn moc(components: usize, parts: &'static [Part]) -> Head {
    Head { kind: Kind::Contexts(components), parts }
}

/// A mixture of softmaxes.
pub(crate) const fn mos(components: usize, parts: &'static [Part]) -> Head {
    Head { kind: Kind::Softmaxes(components), parts }
}

pub(crate) const fn adaptive(parts: &'static [Part]) -> Head {
    Head { kind: Kind::Adaptive, parts }
}

pub(crate) const fn hierarchical(parts: &'static [Part]) -> Head {
    Head { kind: Kind::Hierarchical, parts }
}

impl Head {
    pub(crate) fn has(self, part: Part) -> bool {
        self.parts.contains(&part)
    }

    /// The name that lines have for the head.
    pub(crate) fn name(self) -> String {
        let kind = match self.kind {
            Kind::Softmax => "softmax".into(),
            Kind::Contexts(components) => format!("moc{components}"),
            Kind::Softmaxes(components) => format!("mos{components}"),
            Kind::Adaptive => "adaptive".into(),
            Kind::Hierarchical => "hierarchical".into(),
        };
        if self.parts.is_empty() {
            return kind;
        }
        format!("{kind}+{}", joined(self.parts))
    }
}
