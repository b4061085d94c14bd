//! The baseline of the time on a GPU: the bare matrix products by candle, each of all rows at once.

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
        let random = |rows| Tensor::randn(0f32, 0.06, (rows, sizes.context), device)?.to_dtype(dtype);
        Ok(Products { contexts: random(sizes.rows)?, decoder: random(sizes.vocab)?, all })
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

    #[test]
    fn products_of_every_dtype_of_a_gpu() {
        for device in lab::device::DeviceKind::gpus().into_iter().chain([Device::Cpu]) {
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                let products = Products::new(ProductSizes { rows: 6, context: 4, vocab: 11 }, true, dtype, &device)
                    .expect("tensors");
                products.run().expect("products");
            }
        }
    }
}
