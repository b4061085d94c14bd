//! Log-probabilities that a file has.

use super::file::{File, Positions};
use crate::args::Args;
use crate::source::{Origin, Source};
use candle_core::{DType, D};
use lab::Result;
use std::path::Path;

pub(super) fn open(path: &Path, key: &str, args: &Args) -> Result<Source> {
    let file = File::open(path)?;
    let all = file.tensor(key)?;
    // They were rounded when they were written, whatever the dtype that they are converted to.
    let stored = match all.dtype() {
        DType::F64 => f64::EPSILON,
        DType::F32 => f64::from(f32::EPSILON),
        dtype => {
            return Err(
                file.error(format!("{key} is {dtype:?}, expected F32 or F64: the rank is counted above its roundoff"))
            );
        }
    };
    let vocab = match all.dims().last() {
        Some(&vocab) if all.elem_count() > 0 => vocab,
        _ => return Err(file.unexpected(key, all, "[.., vocab], not empty")),
    };
    let all = all.reshape(((), vocab))?;
    let positions = Positions::spread(all.dim(0)?, args.contexts);
    let mut log_probs = positions.rows(&all, args.dtype.dtype())?;
    file.check_finite(key, &log_probs, &positions)?;
    if args.logits {
        log_probs = candle_nn::ops::log_softmax(&log_probs, D::Minus1)?;
    }
    file.check_sums(key, &log_probs, &positions, " (--logits normalises logits)")?;
    let targets = args.targets.as_deref().map(|key| file.targets(key, &positions, vocab)).transpose()?;
    Ok(Source {
        name: path.display().to_string(),
        head: None,
        origin: Origin::LogProbs(log_probs),
        targets,
        text: None,
        epsilon: args.dtype.epsilon().max(stored),
    })
}

#[cfg(test)]
mod tests {
    use crate::report;
    use crate::sources::file::tests::*;
    use candle_core::{DType, Tensor};

    #[test]
    fn log_probabilities_of_a_softmax_give_the_same_as_the_softmax() {
        let decoder = Decoder::new("same_softmax");
        let (hidden, targets) = (random(&[14, 5, WIDTH]), targets());
        let logits = decoder.logits(&hidden);
        let log_probs = log_softmax(&logits);
        for count in ["70", "11"] {
            let more = ["--contexts", count];
            let expected = decoder.study(&[("hidden", &hidden), ("targets", &targets)], &more).expect("valid files");
            let given = [&more[..], &["--targets", "t"]].concat();
            let found = study_log_probs("given", &[("p", &log_probs), ("t", &targets)], &given).expect("valid");
            assert_same(&expected, &found);
            let given = [&given[..], &["--logits"]].concat();
            let found = study_log_probs("logits", &[("p", &logits), ("t", &targets)], &given).expect("valid");
            assert_same(&expected, &found);
            assert_eq!(found.rank, WIDTH + 2);
            assert!(found.head.is_none() && found.priors.is_none() && found.posteriors.is_none());
        }
    }

    /// Their roundoff would give them full rank.
    #[test]
    fn log_probabilities_in_f32_have_the_rank_above_the_roundoff_of_f32() {
        let decoder = Decoder::new("stored");
        let log_probs = log_softmax(&decoder.logits(&random(&[30, WIDTH]))).to_dtype(DType::F32).expect("converts");
        let found = study_log_probs("stored", &[("p", &log_probs)], &[]).expect("a valid file");
        assert_eq!((found.rank, found.perplexity), (WIDTH + 2, None));
        assert!(found.spectrum.rank(f64::EPSILON) > WIDTH + 2);
    }

    #[test]
    fn bad_log_probabilities_are_errors_that_name_file_tensor_and_row() {
        let log_probs = log_softmax(&random(&[30, VOCAB]));
        let fails = |tensor: &Tensor, more: &[&str], parts: &[&str]| {
            let tensors = [("p", tensor), ("t", &targets())];
            assert_fails(study_log_probs("wrong", &tensors, more), &[&["bottleneck_wrong"], parts].concat());
        };
        let twice = (&log_probs + 2f64.ln()).expect("adds");
        fails(&twice, &[], &["row 0 of p sum to 2", "expected 1", "--logits"]);
        fails(&with(&log_probs, 21, 0.0), &[], &["row 21 of p sum to 1."]);
        // A row has the number that it has in the file.
        fails(&with(&log_probs, 21, 0.0), &["--contexts", "10"], &["row 21 of p sum to 1."]);
        for (value, text) in [(f64::NAN, "NaN"), (f64::NEG_INFINITY, "-inf"), (f64::INFINITY, "inf")] {
            for more in [&[][..], &["--logits"]] {
                fails(&with(&log_probs, 4, value), more, &["row 4 of p has", text]);
            }
        }
        fails(&random(&[0, VOCAB]), &[], &["p is [0, 40], expected [.., vocab], not empty"]);
        fails(&log_probs.to_dtype(DType::BF16).expect("converts"), &[], &["p is BF16, expected F32 or F64"]);
        fails(&log_softmax(&random(&[29, VOCAB])), &["--targets", "t"], &["t is [14, 5], expected 29"]);
        fails(&log_softmax(&random(&[70, 29])), &["--targets", "t"], &["target 30 is not below vocab 29"]);
        fails(&log_probs, &["--targets", "next"], &["no tensor next", "p, t"]);
        let nothing = study_log_probs("wrong", &[("q", &log_probs)], &[]);
        assert_fails(nothing, &["bottleneck_wrong", "no tensor p", "its tensors: q"]);
    }

    #[test]
    fn log_probabilities_within_the_tolerance_are_accepted() {
        let log_probs = log_softmax(&random(&[30, VOCAB]));
        let raised = |by: f64| study_log_probs("tolerance", &[("p", &(&log_probs + by).expect("adds"))], &[]);
        assert!(raised(9e-4).is_ok() && raised(-9e-4).is_ok());
        assert!(raised(1.1e-3).is_err() && raised(-1.1e-3).is_err());
    }

    #[test]
    fn the_report_leaves_out_what_needs_a_decoder() {
        let log_probs = log_softmax(&random(&[6, VOCAB]));
        let found = [study_log_probs("report", &[("p", &log_probs)], &[]).expect("a valid file")];
        let text = report::text(&found);
        assert!(text.ends_with("rank 6 of 6. A softmax of width d has at most d + 2."), "{text}");
        assert!(!text.contains("this width"), "{text}");
        let json = report::json(&found);
        assert!(json[0]["head"].is_null() && json[0]["context"].is_null() && json[0]["rank"] == 6, "{json}");
    }
}
