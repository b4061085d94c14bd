//! The output layer of a GGUF file.

use crate::Result;
use candle_core::quantized::gguf_file::Content;
use candle_core::Device;
use mos_head::{OutputLayer, SoftmaxHead};
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

/// Returns the softmax over a file's output layer, which must have this number of token ids and size of hidden states.
pub fn softmax_head(path: &Path, expected: [usize; 2]) -> Result<SoftmaxHead> {
    let head = output_layer(path)?;
    match [head.vocab_size(), head.hidden_size()] {
        found if found == expected => Ok(head),
        found => Err(format!("the output layer of {} is {found:?}, expected {expected:?}", path.display()).into()),
    }
}

/// Returns the softmax over a file's `output.weight`, or over its `token_embd.weight` if the two are tied.
fn output_layer(path: &Path) -> Result<SoftmaxHead> {
    let mut file = File::open(path)?;
    let content = Content::read(&mut file)?;
    let names = ["output.weight", "token_embd.weight"];
    let Some(name) = names.into_iter().find(|name| content.tensor_infos.contains_key(*name)) else {
        return Err(format!("{} has neither {} nor {}", path.display(), names[0], names[1]).into());
    };
    Ok(SoftmaxHead::from_quantised(Arc::new(content.tensor(&mut file, name, &Device::Cpu)?), None)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::quantized::{gguf_file, GgmlDType, QTensor};
    use candle_core::{DType, Tensor};

    #[test]
    fn the_output_layer_is_preferred_to_the_embedding() -> Result<()> {
        let path = std::env::temp_dir().join(format!("lab-{}.gguf", std::process::id()));
        let tensor = |vocab| QTensor::quantize(&Tensor::ones((vocab, 32), DType::F32, &Device::Cpu)?, GgmlDType::Q8_0);
        let (output, embedding) = (tensor(5)?, tensor(7)?);
        let tensors = [("output.weight", &output), ("token_embd.weight", &embedding), ("other", &embedding)];
        for (tensors, vocab) in [(&tensors[..2], Some(5)), (&tensors[1..], Some(7)), (&tensors[2..], None)] {
            gguf_file::write(&mut File::create(&path)?, &[], tensors)?;
            assert_eq!(output_layer(&path).ok().map(|head| head.vocab_size()), vocab);
        }
        std::fs::remove_file(path)?;
        Ok(())
    }
}
