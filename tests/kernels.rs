//! Every instruction set that the kernels support gives the same results. The environment variable that selects one is
//! read once per process, so each is tested in its own process.

mod common;

use std::process::Command;

use candle_core::{DType, Device};
use common::case::{weights, Case, Logits, Sizes, ENTRIES};
use common::check::{build, Check};
use common::needs;
use common::objective::Objective;
use common::problem::Problem;
use mos_head::parts::LogitFunction;
use mos_head::{LossOptions, MixtureLayer, Result};

/// On its own, this checks the best instruction set.
#[test]
fn this_process_equals_the_reference() -> Result<()> {
    for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
        for vocab in [1, 2, 15, 16, 17, 100] {
            for head in ENTRIES {
                let mut case = Case::random(head, Sizes::new(7, 9, 3, vocab), &[5], 90);
                let all = Objective {
                    ignore_index: Some(vocab as i64 - 1),
                    class_weights: Some(weights(vocab, 1)),
                    label_smoothing: 0.1,
                    z_loss: 0.01,
                    ..Objective::default()
                };
                for (objective, logits) in [
                    (Objective::default(), Logits::PLAIN),
                    (Objective::default(), Logits { scale: 1.3, function: LogitFunction::Sigsoftmax }),
                    (all.clone(), Logits { scale: 0.7, function: LogitFunction::Softcap(2.0) }),
                    (all, Logits { scale: 0.7, function: LogitFunction::Sigsoftmax }),
                ] {
                    case.logits = logits;
                    let check = Check { least_scale: 1.0, ..Check::new(dtype) };
                    check.run(&case, &objective, &Device::Cpu)?;
                }
            }
        }
    }
    for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 1e-5), (DType::F16, 1e-5), (DType::BF16, 1e-5)] {
        for (n, temperature) in [(1, 1.0), (2, 0.7)] {
            Problem { n, temperature, ..Problem::new(5, 3, 9, 100) }.check(dtype, tolerance)?;
            Problem { n, temperature, ..Problem::new(11, 1, 40, 17) }.check(dtype, tolerance)?;
        }
    }
    let case = Case::random(ENTRIES[0], Sizes::new(2, 2, 1, 3), &[1], 91);
    let tensors = case.variables(DType::BF16, &Device::Cpu)?;
    let plan = build(&case, &tensors)?.plan(&tensors["hidden"], &LossOptions::new())?;
    println!("kernels: {}", plan.kernels);
    Ok(())
}

#[test]
fn every_instruction_set_equals_the_reference() {
    for name in ["amx", "avx512bf16", "avx512", "avx2", "neon", "scalar", "nonsense"] {
        let output = Command::new(std::env::current_exe().expect("this test"))
            .args(["--exact", "this_process_equals_the_reference", "--nocapture"])
            .env("MOS_HEAD_SIMD", name)
            .output()
            .expect("a process");
        let printed =
            [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).join("\n");
        // An instruction set that this machine lacks is an error that names those it has.
        let is_lacking = printed.contains("MOS_HEAD_SIMD")
            && printed.contains("scalar on this machine")
            && printed.contains(&format!("{name:?}"));
        let is_right = output.status.success() && printed.contains(&format!("kernels: {name}"));
        assert!(is_lacking || is_right, "{name}: {printed}");
        assert!(name != "scalar" || is_right, "{printed}");
        assert!(name != "nonsense" || is_lacking, "{printed}");
        if is_lacking && name != "nonsense" {
            needs::is_skipped(&format!("the kernels of {name}"), "this machine cannot run them");
        }
    }
}
