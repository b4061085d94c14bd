//! A random mixture by its sizes and settings, on which scores, sets of allowed ids and distillation are tested.

use candle_core::{DType, Result};
use mos_head::parts::LogitFunction;
use mos_head::Mixture;

use super::case::{Case, Head, Logits, Sizes, Tensors};
use super::composed::Operands;

/// Which ids are allowed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Sets {
    /// The same number of ids at all positions.
    Shared(usize),
    /// From one to so many ids for each position.
    Each(usize),
}

/// A mixture, and what is asked of it.
#[derive(Clone, Copy, Debug)]
pub struct Problem {
    pub positions: usize,
    pub components: usize,
    pub d: usize,
    pub vocab: usize,
    /// The spread of the logits.
    pub spread: f64,
    pub logit_scale: f64,
    pub function: LogitFunction,
    pub bias: bool,
    /// Whether the bias of every third id is minus infinity.
    pub masked: bool,
    pub transposed: bool,
    /// The temperature of the scores.
    pub temperature: f64,
    /// Candidates for each position.
    pub n: usize,
    pub entropy: bool,
    pub outside: bool,
    pub collision: bool,
    pub workspace_bytes: Option<usize>,
    pub sets: Sets,
}

impl Problem {
    pub const fn new(positions: usize, components: usize, d: usize, vocab: usize) -> Self {
        Self {
            positions,
            components,
            d,
            vocab,
            spread: 1.0,
            logit_scale: 1.0,
            function: LogitFunction::Identity,
            bias: true,
            masked: false,
            transposed: false,
            temperature: 1.0,
            n: 1,
            entropy: true,
            outside: false,
            collision: false,
            workspace_bytes: None,
            sets: Sets::Shared(1),
        }
    }

    /// Its numbers, rounded to `dtype`. A single component has no log-prior.
    pub fn drawn(&self, dtype: DType) -> Case {
        let sizes = Sizes::new(0, self.d, self.components, self.vocab);
        let mut case = Case::random(Head::Mixture, sizes, &[self.positions], 7)
            .scaled("decoder.weight", 2.0 * self.spread / (self.d as f64).sqrt());
        (case.logits, case.transposed) = (self.logits(), self.transposed);
        if self.masked {
            let bias = case.values.get_mut("decoder.bias").expect("a bias");
            bias.iter_mut().skip(1).step_by(3).for_each(|bias| *bias = f64::NEG_INFINITY);
        }
        let absent = [("log_priors", self.components == 1), ("decoder.bias", !self.bias)];
        for (name, _) in absent.into_iter().filter(|(_, is_absent)| *is_absent) {
            case = case.without(name);
        }
        case.rounded(dtype).expect("numbers of this dtype")
    }

    pub fn logits(&self) -> Logits {
        Logits { scale: self.logit_scale, function: self.function }
    }

    /// What the mixture is made of, from the tensors of the case.
    pub fn operands(&self, tensors: &Tensors) -> Result<Operands> {
        self.drawn(DType::F64).operands(tensors)
    }

    pub fn mixture(&self, tensors: &Tensors) -> mos_head::Result<Mixture> {
        self.operands(tensors)?.mixture(self.logits())
    }
}
