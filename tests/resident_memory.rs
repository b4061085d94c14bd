//! A chunk's exponentials give their pages back to the system as the decoder's gradient takes pages: a loss in a single
//! chunk never has both in memory.

#![cfg(target_os = "linux")]

use candle_core::{DType, Device, Tensor, Var};
use mos_head::{LossOptions, MixtureLayer, OutputLayer, Result, SoftmaxHead};

/// A number of `/proc/self/status`, in bytes.
fn status(name: &str) -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(name)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 1024
}

// The only test in this file, because the memory is that of the whole process.
#[test]
fn exponentials_and_gradient_are_not_resident_together() -> Result<()> {
    const POSITIONS: usize = 480;
    // The exponentials take more than the 32 MiB that a call keeps for the next one, in bf16 too.
    const VOCAB: usize = 40_000;
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        // The gradient and the exponentials have as many numbers. In bf16 the gradient is rounded at once; in f16 it is a
        // sum in f32, which gives its pages back as it is rounded.
        let random = |rows| Tensor::randn(0f32, 0.1, (rows, POSITIONS), &Device::Cpu)?.to_dtype(dtype);
        let weight = Var::from_tensor(&random(VOCAB)?)?;
        let head = SoftmaxHead::from_tensors(weight.as_tensor().clone(), None)?;
        let hidden = Var::from_tensor(&random(POSITIONS)?)?;
        let targets = Tensor::arange(0u32, POSITIONS as u32, &Device::Cpu)?;
        let options = LossOptions::new();
        let plan = head.plan(hidden.as_tensor(), &options)?;
        assert_eq!(plan.positions_per_chunk, POSITIONS);
        // The graph's own `backward` adds each gradient to zeros, and so holds a copy.
        let step = || head.loss(hidden.as_tensor(), &targets, &options)?.backward();
        // The first step starts the threads.
        step()?;
        // Resets the peak of the process, if the system allows it; else it is that of the first step.
        let _ = std::fs::write("/proc/self/clear_refs", "5");
        let before = status("VmRSS");
        let gradients = step()?;
        let peak = status("VmHWM").saturating_sub(before);
        assert_eq!(gradients.get(&weight).unwrap().dims(), [VOCAB, POSITIONS]);
        let each = VOCAB * POSITIONS * dtype.size_in_bytes();
        let both = each + plan.workspace_bytes;
        assert!(peak < both - each / 2, "{dtype:?}: {peak} bytes, of which {each} and {each} are not needed together");
    }
    Ok(())
}
