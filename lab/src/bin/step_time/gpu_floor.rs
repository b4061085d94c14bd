//! The baseline of the time on a GPU: the bare matrix products by candle, each of all rows at once, of operands as they
//! are, or with sizes that are padded to a multiple of 8 elements where these take less time.

use std::time::{Duration, Instant};

use candle_core::{DType, Device, Result, Tensor};

use crate::floor::ProductSizes;

pub(crate) struct Products {
    contexts: Tensor,
    decoder: Tensor,
    /// Whether the products of the two gradients follow the product of the logits.
    all: bool,
}

impl Products {
    pub(crate) fn new(sizes: ProductSizes, all: bool, dtype: DType, device: &Device) -> Result<Self> {
        let padded = ProductSizes {
            context: sizes.context.next_multiple_of(8),
            vocab: sizes.vocab.next_multiple_of(8),
            ..sizes
        };
        let as_they_are = Self::with_sizes(sizes, all, dtype, device)?;
        if (padded.context, padded.vocab) == (sizes.context, sizes.vocab) {
            return Ok(as_they_are);
        }
        let padded = Self::with_sizes(padded, all, dtype, device)?;
        Ok(if padded.duration()? < as_they_are.duration()? { padded } else { as_they_are })
    }

    fn with_sizes(sizes: ProductSizes, all: bool, dtype: DType, device: &Device) -> Result<Self> {
        let random = |rows| Tensor::randn(0f32, 0.06, (rows, sizes.context), device)?.to_dtype(dtype);
        Ok(Products { contexts: random(sizes.rows)?, decoder: random(sizes.vocab)?, all })
    }

    /// The time of a second run.
    fn duration(&self) -> Result<Duration> {
        self.run()?;
        self.contexts.device().synchronize()?;
        let start = Instant::now();
        self.run()?;
        self.contexts.device().synchronize()?;
        Ok(start.elapsed())
    }

    pub(crate) fn run(&self) -> Result<()> {
        let logits = self.contexts.matmul(&self.decoder.t()?)?;
        if self.all {
            logits.matmul(&self.decoder)?;
            logits.t()?.matmul(&self.contexts)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;
    use lab::show::DeviceKind;

    #[test]
    fn products_of_every_dtype_of_a_gpu() {
        for device in DeviceKind::value_variants().iter().filter_map(|kind| kind.open().ok()) {
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                let products = Products::new(ProductSizes { rows: 6, context: 4, vocab: 11 }, true, dtype, &device)
                    .expect("tensors");
                products.run().expect("products");
            }
        }
    }
}
