//! Products that add to a gradient read nothing past the end of its buffer, even if its last rows are less than a tile.

use candle_core::{DType, Device, Tensor, Var};
use metal_on_linux::{assert_close, metal, numbers};
use mos_head::{Distributions, Error, LossOptions, Mixture, Reduction, Result};

struct Case {
    positions: usize,
    components: usize,
    context: usize,
    vocab: usize,
    options: LossOptions,
    /// Whether each position is a chunk of its own, so that each but the first adds to the decoder's gradient.
    chunks: bool,
}

/// The gradients of contexts, decoder and bias.
fn gradients(case: &Case, device: &Device) -> Result<[Tensor; 3]> {
    let &Case { positions, components, context, vocab, .. } = case;
    let shapes: [&[usize]; 3] = [&[positions, components, context], &[vocab, context], &[vocab]];
    let mut variables = vec![];
    for (seed, shape) in (0..).zip(shapes) {
        variables.push(Var::from_tensor(&(numbers(shape, seed) * 0.5)?.to_device(device)?)?);
    }
    let log_priors = Tensor::full(-(components as f32).ln(), (positions, components), device)?;
    let targets: Vec<u32> = (0..positions).map(|i| (i * 37 % vocab) as u32).collect();
    let targets = Tensor::new(targets, device)?;
    let mixture = Mixture::new(&variables[0], Some(&log_priors), &variables[1], Some(&variables[2]))?;
    let mut options = case.options.clone().with_reduction(Reduction::Sum);
    if case.chunks {
        let Err(Error::Workspace { least, .. }) = mixture.loss(&targets, &options.clone().with_workspace_bytes(0))
        else {
            panic!("a workspace of no bytes")
        };
        options = options.with_workspace_bytes(least);
    }
    let gradients = mixture.loss(&targets, &options)?.backward()?;
    Ok([0, 1, 2].map(|i| gradients.get(&variables[i]).expect("a gradient").clone()))
}

fn check(case: &Case) -> Result<()> {
    let [got, expected] = [gradients(case, &metal())?, gradients(case, &Device::Cpu)?];
    for ((name, got), expected) in ["contexts", "decoder", "bias"].into_iter().zip(&got).zip(&expected) {
        assert_close(name, got, expected, DType::F32)?;
    }
    Ok(())
}

#[test]
fn the_gradients_of_decoder_and_bias_fill_their_buffers() -> Result<()> {
    // candle rounds buffers up to a power of two. The rows of a tile are 64, or 32 for the bias.
    for (vocab, context) in [(16, 16), (100, 40), (63, 65)] {
        check(&Case { positions: 5, components: 2, context, vocab, options: LossOptions::new(), chunks: true })?;
    }
    Ok(())
}

#[test]
fn the_gradient_of_contexts_fills_its_buffer() -> Result<()> {
    // More terms than are added one after another: the second product adds to the first.
    let vocab = 8200;
    for (positions, context) in [(8, 16), (50, 40)] {
        check(&Case { positions, components: 2, context, vocab, options: LossOptions::new(), chunks: false })?;
    }
    Ok(())
}
