//! The softmax, or the mixture of softmaxes, of two files: a decoder, and hidden states or contexts.

use super::file::{File, Positions};
use crate::args::Args;
use crate::source::{Decoder, Head, Origin, Source};
use candle_core::Tensor;
use lab::{layers::HeadKind, Result};
use mos_head::parts::LogitFunction;
use std::path::Path;

/// The contexts of a mixture of softmaxes; one softmax has K = 1.
struct Contexts {
    key: &'static str,
    kind: HeadKind,
    /// `[positions, K, d]`
    contexts: Tensor,
    /// `[positions, K]`
    log_priors: Option<Tensor>,
}

pub(super) fn open(path: &Path, weight_key: &str, states: &Path, args: &Args) -> Result<Source> {
    let (file, states) = (File::open(path)?, File::open(states)?);
    let dtype = args.dtype.dtype();
    let weight = file.tensor(weight_key)?;
    let &[vocab, width] = weight.dims() else {
        return Err(file.unexpected(weight_key, weight, "a matrix [vocab, d]"));
    };
    let bias = args.bias.as_deref().map(|key| file.tensor(key)).transpose()?;
    if let (Some(bias), Some(key)) = (bias.filter(|bias| bias.dims() != [vocab]), &args.bias) {
        return Err(file.unexpected(key, bias, &format!("[{vocab}]")));
    }
    let Contexts { key, kind, contexts, log_priors } = contexts(&states, width)?;
    let positions = Positions::spread(contexts.dim(0)?, args.contexts);
    let contexts = positions.rows(&contexts, dtype)?;
    states.check_finite(key, &contexts, &positions)?;
    let log_priors = log_priors.map(|all| positions.rows(&all, dtype)).transpose()?;
    if let Some(log_priors) = &log_priors {
        states.check_sums("log_priors", log_priors, &positions, "")?;
    }
    let targets = states.has("targets").then(|| states.targets("targets", &positions, vocab)).transpose()?;
    Ok(Source {
        name: path.display().to_string(),
        head: Some(Head { kind, width }),
        origin: Origin::Mixture {
            contexts,
            log_priors,
            decoder: Decoder {
                weight: weight.to_dtype(dtype)?,
                bias: bias.map(|bias| bias.to_dtype(dtype)).transpose()?,
                function: LogitFunction::Identity,
            },
        },
        targets,
        text: None,
        epsilon: args.dtype.epsilon(),
    })
}

/// Returns the hidden states or the contexts of a file, for a decoder with `width` columns.
fn contexts(states: &File, width: usize) -> Result<Contexts> {
    let (key, expected) = match (states.has("hidden"), states.has("contexts")) {
        (true, true) => return Err(states.error("it has both hidden and contexts, expected one of them".into())),
        (false, true) => ("contexts", format!("[.., K, {width}], not empty")),
        _ => ("hidden", format!("[.., {width}], not empty")),
    };
    let all = states.tensor(key)?;
    if all.dims().last() != Some(&width) || all.elem_count() == 0 {
        return Err(states.unexpected(key, all, &expected));
    }
    if key == "hidden" {
        let contexts = all.reshape(((), 1, width))?;
        return Ok(Contexts { key, kind: HeadKind::Softmax, contexts, log_priors: None });
    }
    let [leading @ .., components, _] = all.dims() else { return Err(states.unexpected(key, all, &expected)) };
    let log_priors = if *components == 1 && !states.has("log_priors") {
        None
    } else {
        let (log_priors, expected) = (states.tensor("log_priors")?, [leading, &[*components]].concat());
        if log_priors.dims() != expected {
            return Err(states.unexpected("log_priors", log_priors, &format!("{expected:?}")));
        }
        Some(log_priors.reshape(((), *components))?)
    };
    let contexts = all.reshape(((), *components, width))?;
    Ok(Contexts { key, kind: HeadKind::Mos, contexts, log_priors })
}

#[cfg(test)]
mod tests {
    use crate::sources::file::tests::*;
    use candle_core::Tensor;

    #[test]
    fn a_mixture_of_contexts_gives_the_same_as_its_log_probabilities() {
        let decoder = Decoder::new("same_mixture");
        let (contexts, log_priors, targets) =
            (random(&[14, 5, 3, WIDTH]), log_softmax(&random(&[14, 5, 3])), targets());
        let components = log_softmax(&decoder.logits(&contexts));
        let joint = components.broadcast_add(&log_priors.unsqueeze(3).expect("a dimension")).expect("fits");
        let log_probs = joint.log_sum_exp(2).expect("sums");
        let own = [("contexts", &contexts), ("log_priors", &log_priors), ("targets", &targets)];
        let expected = study_log_probs("sum", &[("p", &log_probs), ("t", &targets)], &["--targets", "t"]);
        let (found, expected) = (decoder.study(&own, &[]).expect("valid files"), expected.expect("a valid file"));
        assert_same(&expected, &found);
        assert_eq!(found.rank, VOCAB);

        let effective = |log_weights: &Tensor| {
            let weights = log_weights.exp().and_then(|weights| weights * log_weights).and_then(|sums| sums.sum_all());
            (-weights.and_then(|sum| sum.to_scalar::<f64>()).expect("a sum") / 70.0).exp()
        };
        let priors = found.priors.expect("it has components").in_a_context();
        assert_close(Some(effective(&log_priors)), Some(priors));
        let index = targets.reshape((14, 5, 1, 1)).and_then(|ids| ids.broadcast_as((14, 5, 3, 1))).expect("ids");
        let chosen = joint.gather(&index.contiguous().expect("copies"), 3).and_then(|joint| joint.squeeze(3));
        let posteriors = found.posteriors.expect("targets are known").in_a_context();
        assert_close(Some(effective(&log_softmax(&chosen.expect("ids")))), Some(posteriors));
    }

    #[test]
    fn one_context_needs_no_prior_and_is_a_softmax() {
        let decoder = Decoder::new("one");
        let (hidden, targets) = (random(&[14, 5, WIDTH]), targets());
        let contexts = hidden.unsqueeze(2).expect("a dimension");
        let softmax = decoder.study(&[("hidden", &hidden), ("targets", &targets)], &[]).expect("valid files");
        let mixture = decoder.study(&[("contexts", &contexts), ("targets", &targets)], &[]).expect("valid files");
        assert_same(&softmax, &mixture);
        assert_eq!(mixture.priors.expect("one component").in_all(), 1.0);
    }

    #[test]
    fn bad_contexts_are_errors_that_name_file_tensor_and_row() {
        let decoder = Decoder::new("bad_contexts");
        let (contexts, log_priors) = (random(&[30, 3, WIDTH]), log_softmax(&random(&[30, 3])));
        let fails = |states: &[(&str, &Tensor)], parts: &[&str]| {
            assert_fails(decoder.study(states, &[]), &[&["bottleneck_bottleneck_bad_contexts"], parts].concat());
        };
        fails(&[("contexts", &contexts)], &["no tensor log_priors"]);
        fails(&[("log_priors", &log_priors)], &["no tensor hidden", "log_priors"]);
        fails(&[("contexts", &contexts), ("hidden", &contexts)], &["both hidden and contexts"]);
        let narrow = random(&[30, 3, WIDTH - 1]);
        fails(&[("contexts", &narrow), ("log_priors", &log_priors)], &["contexts is [30, 3, 6]", "[.., K, 7]"]);
        fails(&[("contexts", &random(&[WIDTH]))], &["contexts is [7]", "[.., K, 7]"]);
        let two = log_softmax(&random(&[30, 2]));
        fails(&[("contexts", &contexts), ("log_priors", &two)], &["log_priors is [30, 2], expected [30, 3]"]);
        let large = with(&log_priors, 8, 0.0);
        fails(&[("contexts", &contexts), ("log_priors", &large)], &["row 8 of log_priors sum to 1."]);
        let nan = with(&log_priors, 9, f64::NAN);
        fails(&[("contexts", &contexts), ("log_priors", &nan)], &["row 9 of log_priors sum to NaN"]);
        let nan = with(&contexts.flatten_from(1).expect("a matrix"), 17, f64::NAN);
        let nan = nan.reshape((30, 3, WIDTH)).expect("the same size");
        fails(&[("contexts", &nan), ("log_priors", &log_priors)], &["row 17 of contexts has NaN"]);
        let nan = with(&random(&[30, WIDTH]), 2, f64::NAN);
        fails(&[("hidden", &nan)], &["row 2 of hidden has NaN"]);
    }
}
