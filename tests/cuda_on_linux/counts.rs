//! What a training step costs besides its arithmetic, counted: launches, products, bytes that are cleared, copies. The
//! driver computes nothing meanwhile, so that the sizes are those of published models.

use std::process::Command;

use candle_core::{DType, Device, Tensor, Var};
use mos_head::{ContextActivation, LossOptions, MixtureOfSoftmaxes, MixtureTensors, OutputLayer, Result, SoftmaxHead};

use crate::driver::Driver;

/// The variable that lets the emulated driver count: the path of the file of its calls.
const COUNT: &str = "MOS_HEAD_CUDA_COUNT";

/// The calls of one step.
#[derive(Debug, Default)]
struct Counts {
    kernels: usize,
    products: usize,
    allocations: usize,
    bytes_set: usize,
    uploads: usize,
    downloads: usize,
}

impl Counts {
    /// Counts the calls of some lines.
    fn new(lines: &str) -> Self {
        let mut counts = Counts::default();
        for line in lines.lines() {
            let mut words = line.split(' ');
            match words.next() {
                Some("kernel") => counts.kernels += 1,
                Some("product") => counts.products += 1,
                Some("allocate") => counts.allocations += 1,
                Some("set") => counts.bytes_set += words.next().and_then(|n| n.parse::<usize>().ok()).expect("bytes"),
                Some("upload") => counts.uploads += 1,
                Some("download") => counts.downloads += 1,
                _ => {}
            }
        }
        counts
    }

    /// Counts the calls of the last step of a test, which this function runs in a process of its own.
    fn last_step(test: &str) -> Option<Self> {
        Driver::emulated()?;
        let calls = std::env::temp_dir().join(format!("mos-head-calls-{}-{}", std::process::id(), test.len()));
        let output = Command::new(std::env::current_exe().expect("a path"))
            .args(["--exact", test, "--nocapture"])
            .env(COUNT, &calls)
            .output()
            .expect("the test starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let lines = std::fs::read_to_string(&calls).expect("calls");
        std::fs::remove_file(&calls).expect("a file");
        let steps: Vec<_> = lines.split("wait\n").filter(|lines| lines.contains("\nproduct ")).collect();
        Some(Counts::new(steps.last().expect("a step")))
    }
}

/// Whether this process is one whose calls are counted.
fn is_counted() -> bool {
    std::env::var_os(COUNT).is_some()
}

/// The sizes of a mixture of softmaxes, and of a single softmax if it has one component.
struct Sizes {
    positions: usize,
    hidden: usize,
    components: usize,
    context: usize,
    vocab: usize,
}

/// Runs three training steps in bf16, and waits for the device after each.
fn run_steps(sizes: Sizes) -> Result<()> {
    let Sizes { positions, hidden, components, context, vocab } = sizes;
    let device = Device::new_cuda(0)?;
    let variable = |dims: &[usize]| Var::zeros(dims, DType::BF16, &device);
    let states = variable(&[positions, hidden])?;
    let targets = Tensor::zeros(positions, DType::U32, &device)?;
    let weight = variable(&[vocab, context])?;
    let head: Box<dyn OutputLayer> = if components == 1 {
        Box::new(SoftmaxHead::from_tensors(weight.into_inner(), None)?)
    } else {
        let tensors = MixtureTensors {
            prior_weight: variable(&[components, hidden])?.into_inner(),
            prior_bias: None,
            latent_weight: variable(&[components * context, hidden])?.into_inner(),
            latent_bias: variable(&[components * context])?.into_inner(),
            decoder_weight: weight.into_inner(),
            decoder_bias: Some(variable(&[vocab])?.into_inner()),
        };
        Box::new(MixtureOfSoftmaxes::from_tensors(tensors, ContextActivation::Tanh)?)
    };
    for _ in 0..3 {
        head.loss(&states, &targets, &LossOptions::new())?.backward()?;
        device.synchronize()?;
    }
    Ok(())
}

/// Penn Treebank, Yang et al. (2018). The bytes that are set are candle's: zeros that the gradients of the contexts and
/// of the log-priors are added to.
#[test]
fn a_step_of_a_mixture() -> Result<()> {
    if is_counted() {
        return run_steps(Sizes { positions: 840, hidden: 620, components: 15, context: 280, vocab: 10_000 });
    }
    let Some(counts) = Counts::last_step("counts::a_step_of_a_mixture") else { return Ok(()) };
    assert!(counts.products == 10 && counts.kernels <= 30 && counts.allocations <= 57, "{counts:?}");
    assert!(counts.bytes_set <= 8_000_000 && counts.uploads <= 2 && counts.downloads == 0, "{counts:?}");
    Ok(())
}

/// A language model of a billion parameters, in two chunks. What is set is as large as the hidden states, twice.
#[test]
fn a_step_of_a_wide_softmax() -> Result<()> {
    if is_counted() {
        return run_steps(Sizes { positions: 2048, hidden: 2048, components: 1, context: 2048, vocab: 128_256 });
    }
    let Some(counts) = Counts::last_step("counts::a_step_of_a_wide_softmax") else { return Ok(()) };
    assert!(counts.products == 6 && counts.kernels <= 20 && counts.allocations <= 29, "{counts:?}");
    assert!(counts.bytes_set <= 17_000_000 && counts.uploads == 0 && counts.downloads == 0, "{counts:?}");
    Ok(())
}
