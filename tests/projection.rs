//! The contexts of a projection of your own are checked before anything is computed of them.

use candle_core::{DType, Device, Tensor};
use mos_head::decode::{Sampler, Sampling};
use mos_head::parts::{Decoder, Projection};
use mos_head::{DropoutMasks, Error, Head, LossOptions, MixtureLayer, OutputLayer, Result};

/// Returns contexts of zeros, `[.., 2, 3]`, with a shape or dtype that `change` makes wrong.
#[derive(Debug)]
struct Changed {
    change: fn(Tensor) -> candle_core::Result<Tensor>,
}

impl Projection for Changed {
    fn hidden_size(&self) -> usize {
        5
    }

    fn context_dim(&self) -> usize {
        3
    }

    fn components(&self) -> usize {
        2
    }

    fn forward(&self, hidden: &Tensor, _: DropoutMasks) -> Result<(Tensor, Option<Tensor>)> {
        let leading = &hidden.dims()[..hidden.rank() - 1];
        let contexts = (self.change)(Tensor::zeros([leading, &[2, 3]].concat(), hidden.dtype(), hidden.device())?)?;
        let priors = Tensor::zeros(&contexts.dims()[..contexts.rank() - 1], hidden.dtype(), hidden.device())?;
        Ok((contexts, Some((priors - 2f64.ln())?)))
    }

    fn draw(&self, hidden: &Tensor, _: &mut Sampler) -> Result<Option<Tensor>> {
        let leading = &hidden.dims()[..hidden.rank() - 1];
        let contexts = Tensor::zeros([leading, &[1, 3]].concat(), hidden.dtype(), hidden.device())?;
        Ok(Some((self.change)(contexts)?))
    }
}

#[test]
fn contexts_of_another_shape_or_dtype_are_errors() -> Result<()> {
    let hidden = Tensor::ones((4, 6, 5), DType::F32, &Device::Cpu)?;
    let targets = Tensor::zeros((4, 6), DType::U32, &Device::Cpu)?;
    let head = |change| {
        let weight = Tensor::ones((7, 3), DType::F32, &Device::Cpu)?;
        Head::from_parts(Changed { change }, Decoder::from_tensors(weight, None)?)
    };
    type Change = fn(Tensor) -> candle_core::Result<Tensor>;
    let shapes: [(Change, &str); 5] = [
        (|contexts| contexts.narrow(1, 0, 5), "[4, 5, 2, 3]"),
        (|contexts| Tensor::cat(&[&contexts, &contexts.narrow(1, 0, 1)?], 1), "[4, 7, 2, 3]"),
        (|contexts| contexts.flatten(0, 1), "[24, 2, 3]"),
        (|contexts| Tensor::cat(&[&contexts, &contexts], 2), "[4, 6, 4, 3]"),
        (|contexts| contexts.narrow(3, 0, 2), "[4, 6, 2, 2]"),
    ];
    for (change, got) in shapes {
        let head = head(change)?;
        let found = [
            head.loss(&hidden, &targets, &LossOptions::new()).map(|_| ()),
            head.log_probs(&hidden).map(|_| ()),
            head.mixture(&hidden, DropoutMasks::Off).map(|_| ()),
        ];
        for found in found {
            let message = found.expect_err("contexts of another shape").to_string();
            assert_eq!(message, format!("contexts: expected shape [4, 6, 2, 3], got {got}"));
        }
        let mut sampler = Sampler::new(Sampling::new().with_ancestral(true), 1)?;
        let message = head.sample(&hidden, &mut sampler).expect_err("contexts of another shape").to_string();
        assert!(message.starts_with("contexts: expected shape [4, 6, 1, 3], got "), "{message}");
    }
    let wide = head(|contexts| contexts.to_dtype(DType::F64))?;
    let loss = wide.loss(&hidden, &targets, &LossOptions::new());
    assert!(matches!(loss, Err(Error::DType { argument: "contexts", got: DType::F64, .. })), "{loss:?}");
    head(Ok)?.loss(&hidden, &targets, &LossOptions::new())?;
    Ok(())
}
