//! A GPU computes the same as the CPU: several chunks; and, ignored unless asked for, more than 2^31 logits, more than
//! 65 535 rows in one chunk, and a large vocabulary. Without a GPU these tests are skipped.

mod common;

use std::process::Command;

use approx::assert_relative_eq;
use candle_core::{DType, Device, Tensor, Var};
use common::needs::GPU;
use common::values::{gradients, numbers, uniform, Numbers};
use mos_head::{LossOptions, OutputLayer, Result, SoftmaxHead};

/// The loss, the negative log-likelihood of each position, and the gradients of the hidden states and of the decoder.
fn step(
    [positions, width, vocab]: [usize; 3],
    options: &LossOptions,
    dtype: DType,
    device: &Device,
) -> Result<Vec<Numbers>> {
    let variable = |rows: usize| -> Result<Var> {
        // Logits of the same size at every width.
        let scale = 2.0 / (width as f64).powf(0.25);
        Ok(Var::from_tensor(&uniform(&[rows, width], scale, rows as u64)?.to_dtype(dtype)?.to_device(device)?)?)
    };
    let (hidden, weight) = (variable(positions)?, variable(vocab)?);
    let targets: Vec<u32> = (0..positions).map(|i| (i * 7919 % vocab) as u32).collect();
    let head = SoftmaxHead::from_tensors(weight.as_tensor().clone(), None)?;
    let loss = head.loss(&hidden, &Tensor::from_vec(targets, positions, device)?, options)?;
    let gradients = gradients(&loss.backward()?, [hidden.as_tensor(), &weight]);
    assert!(gradients.iter().all(|gradient| !gradient.is_empty()));
    Ok([vec![numbers(&loss.value), numbers(&loss.nll)], gradients].concat())
}

fn assert_same(sizes: [usize; 3], options: &LossOptions, dtype: DType, device: &Device) -> Result<()> {
    let expected = step(sizes, &LossOptions::new(), dtype, &Device::Cpu)?;
    let found = step(sizes, options, dtype, device)?;
    let tolerance = if dtype == DType::F32 { 1e-4 } else { 2e-2 };
    assert_relative_eq!(found[..], expected[..], max_relative = tolerance);
    Ok(())
}

/// The sizes are positions, width and ids.
fn on_the_gpu(sizes: [usize; 3], options: &LossOptions) -> Result<()> {
    match common::gpu() {
        Ok(device) => {
            [DType::F32, DType::BF16].into_iter().try_for_each(|dtype| assert_same(sizes, options, dtype, &device))
        }
        Err(reason) => {
            GPU.is_missing(reason);
            Ok(())
        }
    }
}

#[test]
fn several_chunks_are_the_same_as_on_the_cpu() -> Result<()> {
    // In bf16, contexts of three widths are multiplied by a kernel of this crate.
    [16, 72, 280, 520]
        .into_iter()
        .try_for_each(|width| on_the_gpu([300, width, 1000], &LossOptions::new().with_workspace_bytes(1 << 19)))
}

#[test]
#[ignore = "for a GPU"]
fn a_hundred_thousand_rows_of_a_large_vocabulary_are_the_same_as_on_the_cpu() -> Result<()> {
    on_the_gpu([100_000, 16, 128_256], &LossOptions::new())
}

#[test]
#[ignore = "for a GPU"]
fn a_chunk_of_more_than_two_to_the_31_logits_is_the_same_as_on_the_cpu() -> Result<()> {
    on_the_gpu([70_000, 16, 33_278], &LossOptions::new().with_workspace_bytes(20 << 30))
}

/// Opening the GPU either works or gives candle's reason, which a demand shows.
#[test]
fn a_demanded_gpu_that_cannot_be_opened_fails_the_test_with_the_reason() {
    let mut this = Command::new(std::env::current_exe().expect("this test"));
    this.args(["--exact", "several_chunks_are_the_same_as_on_the_cpu"]);
    let mut run = |demand: &str| this.env(GPU.variable, demand).output().expect("a process");
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    let (demanded, skipped) = (run("1"), run("0"));
    let failed = text(demanded.stdout);
    let Err(reason) = common::gpu() else {
        assert!(demanded.status.success() && skipped.stderr.is_empty(), "{failed}");
        return;
    };
    assert!(!demanded.status.success() && failed.contains(&reason), "{failed}");
    let line = text(skipped.stderr);
    assert!(skipped.status.success() && line.starts_with("skipped: several_chunks"), "{line}");
}
