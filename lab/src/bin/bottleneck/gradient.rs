//! The share of the logits' gradient that a decoder passes on to its contexts (arXiv 2603.10145).
//!
//! ```text
//! G = dL/dz   [positions, vocab], L the cross-entropy of the targets, z = c W^T + b, P = softmax(f(z))
//! share = ||G W (W^T W)^(-1/2)||_F / ||G||_F
//! ```
//!
//! The gradient of the contexts is `G W`, so that nothing remains of what is orthogonal to the columns of W: the share
//! is the norm of G's projection onto them, relative to that of G. A softmax has `G = f'(z) (P - Y)`. The logits of
//! component k of a mixture of softmaxes have `G_k = r_k f'(z_k) (s_k - y)`, with the responsibility `r_k = pi_k s_kt /
//! P(t)` of the component for the target t; those of Mixtape's context k have `G_k = pi_k (P - Y)`, with its priors of
//! each id. The sums of squares are over all positions and components.

use crate::source::{values, Decoder, Origin, Source};
use crate::{args::Args, spectrum::Rows};
use candle_core::Tensor;
use faer::{Mat, MatRef};
use lab::show::report::{number, table};
use lab::{show::progress, Result};
use mos_head::{parts::LogitFunction, Distributions, OutputLayer};
use serde_json::{json, Value};

/// The gradients of the logits that are computed at a time, at most, unless those of one position need more.
const CHUNK_BYTES: usize = 64 << 20;
/// Three copies of a logit exist at once: the log-probability, its value in f64, and what the backend computes it from.
const BYTES_PER_LOGIT: usize = 3 * size_of::<f64>();

pub(crate) fn run(args: &Args, sources: &[Source]) -> Result<()> {
    let budget = CHUNK_BYTES.min(args.memory.saturating_mul(1 << 20));
    let found = sources.iter().map(|source| passed(source, budget)).collect::<Result<Vec<_>>>()?;
    println!("{}", text(&found));
    if args.json {
        println!("{}", json(&found));
    }
    Ok(())
}

struct Passed {
    name: String,
    head: String,
    components: usize,
    width: usize,
    vocab: usize,
    positions: usize,
    /// The rank of the decoder's weight.
    rank: usize,
    /// The share of the gradient's norm; `None` if the gradient is zero.
    share: Option<f64>,
}

/// Measures the gradient of a source in chunks of positions, each of which takes `budget` bytes at most.
fn passed(source: &Source, budget: usize) -> Result<Passed> {
    let decoder = source.decoder()?;
    let missing = || format!("{}: --gradient needs the tensor targets in the file of --hidden", source.name);
    let targets = source.targets.as_deref().ok_or_else(missing)?;
    let (vocab, components) = (source.vocab(), source.components()?);
    let columns = Columns::new(decoder, source.epsilon)?;
    let chunk = (budget / (components * vocab * BYTES_PER_LOGIT)).max(1);
    let (mut all, mut projected) = (0.0, 0.0);
    let bar = progress::bar(targets.len(), format!("{} gradients", source.label()));
    for (i, targets) in targets.chunks(chunk).enumerate() {
        let gradient = logit_gradient(source, decoder, i * chunk, targets)?;
        let gradient = MatRef::from_row_major_slice(&gradient, targets.len() * components, vocab);
        all += gradient.squared_norm_l2();
        projected += columns.projection(gradient).squared_norm_l2();
        bar.inc(targets.len() as u64);
    }
    bar.finish_and_clear();
    Ok(Passed {
        name: source.name.clone(),
        head: source.label().to_owned(),
        components,
        width: columns.whitening.nrows(),
        vocab,
        positions: targets.len(),
        rank: columns.whitening.ncols(),
        share: (all > 0.0).then(|| (projected / all).sqrt()),
    })
}

/// Computes the gradient of the logits `[positions, K, vocab]` of some positions.
fn logit_gradient(source: &Source, decoder: &Decoder, start: usize, targets: &[u32]) -> Result<Vec<f64>> {
    if let Origin::Mixtape { layer, hidden, .. } = &source.origin {
        let hidden = hidden.narrow(0, start, targets.len())?;
        let mut gradient = values(&layer.log_probs(&hidden)?)?;
        for (row, &target) in gradient.chunks_exact_mut(source.vocab()).zip(targets) {
            softmax_gradient(row, target as usize, 1.0);
        }
        let gradient = Tensor::from_vec(gradient, (targets.len(), 1, source.vocab()), hidden.device())?;
        return values(&layer.priors(&hidden)?.to_dtype(gradient.dtype())?.broadcast_mul(&gradient)?);
    }
    let contexts = source.mixture(start, targets.len())?.contexts()?;
    let (positions, components, width) = contexts.dims3()?;
    let contexts = contexts.reshape((positions * components, width))?;
    let mut rows = values(&decoder.mixture(&contexts.unsqueeze(1)?, None)?.log_probs()?)?;
    let log_posteriors = match source.log_posteriors(start, targets)? {
        Some(log_posteriors) => values(&log_posteriors)?,
        None => vec![0.0; positions],
    };
    let targets = targets.iter().flat_map(|&target| std::iter::repeat_n(target as usize, components));
    for ((row, log_posterior), target) in rows.chunks_exact_mut(source.vocab()).zip(log_posteriors).zip(targets) {
        softmax_gradient(row, target, log_posterior.exp());
    }
    if decoder.function != LogitFunction::Identity {
        let slope = slope(decoder.function)?;
        let logits = values(&decoder.logits(&contexts)?)?;
        rows.iter_mut().zip(logits).for_each(|(gradient, logit)| *gradient *= slope(logit));
    }
    Ok(rows)
}

/// Turns log-probabilities into the gradient of a softmax's logits, `r (p - y)`, without cancellation at the target.
fn softmax_gradient(log_probs: &mut [f64], target: usize, responsibility: f64) {
    let at_target = responsibility * log_probs[target].exp_m1();
    log_probs.iter_mut().for_each(|value| *value = responsibility * value.exp());
    log_probs[target] = at_target;
}

/// Returns the derivative of a function of the logits.
fn slope(function: LogitFunction) -> Result<Box<dyn Fn(f64) -> f64>> {
    Ok(match function {
        LogitFunction::Identity => Box::new(|_| 1.0),
        LogitFunction::Sigsoftmax => Box::new(|logit| 1.0 + 1.0 / (1.0 + logit.exp())),
        _ => return Err(format!("--gradient does not know the derivative of {function:?}").into()),
    })
}

/// The column space of a decoder's weight W. An orthonormal basis of it are the left singular vectors
/// `W V diag(s)^-1`, whose singular values s are above the roundoff.
struct Columns {
    /// W, `[vocab, d]`
    weight: Mat<f64>,
    /// `V diag(s)^-1`, `[d, rank]`
    whitening: Mat<f64>,
}

impl Columns {
    fn new(decoder: &Decoder, epsilon: f64) -> Result<Self> {
        let (vocab, width) = decoder.weight.dims2()?;
        let weight = values(&decoder.weight)?;
        let mut rows = Rows::new(width);
        rows.push(&weight);
        let spectrum = rows.spectrum()?;
        let rank = spectrum.rank(epsilon);
        let whitening = Mat::from_fn(width, rank, |i, j| spectrum.vectors[(i, j)] / spectrum.values[j]);
        Ok(Self { weight: MatRef::from_row_major_slice(&weight, vocab, width).to_owned(), whitening })
    }

    /// Returns the coordinates of rows `[.., vocab]` in the basis.
    fn projection(&self, rows: MatRef<'_, f64>) -> Mat<f64> {
        (rows * &self.weight) * &self.whitening
    }
}

fn text(found: &[Passed]) -> String {
    let columns = ["model", "head", "K", "d", "rank of W", "vocab", "positions", "passed on, %"];
    let cells = |passed: &Passed| {
        vec![
            passed.name.clone(),
            passed.head.clone(),
            passed.components.to_string(),
            passed.width.to_string(),
            passed.rank.to_string(),
            passed.vocab.to_string(),
            passed.positions.to_string(),
            number(passed.share.map(|share| 100.0 * share), 2),
        ]
    };
    let table = table(&columns, &found.iter().map(cells).collect::<Vec<_>>());
    let share =
        "passed on: ||G W (W^T W)^(-1/2)|| / ||G||, G the gradient of the logits, W the decoder (arXiv 2603.10145).";
    format!("{table}\n\n{share}")
}

fn json(found: &[Passed]) -> Value {
    let value = |passed: &Passed| {
        json!({
            "model": passed.name,
            "head": passed.head,
            "components": passed.components,
            "context": passed.width,
            "decoder_rank": passed.rank,
            "vocab": passed.vocab,
            "positions": passed.positions,
            "gradient_share": passed.share,
        })
    };
    found.iter().map(value).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sources::tests::{args, file, saved_with};
    use crate::sources::{self, log_softmax, random};
    use candle_core::{Tensor, Var, D};
    use lab::layers::{Checkpoint, HeadKind};
    use lab::{data::language::Teacher, training::Recipe};

    /// More than any test needs.
    const ALL: usize = 1 << 30;
    const VOCAB: usize = 40;
    const WIDTH: usize = 7;
    const POSITIONS: usize = 23;

    /// Opens a decoder and the contexts `[positions, K, d]` of a mixture with known targets.
    fn opened(name: &str, weight: &Tensor, contexts: &Tensor, more: &[&str]) -> Source {
        let (positions, components, _) = contexts.dims3().expect("[positions, K, d]");
        let vocab = weight.dim(0).expect("a matrix");
        let targets: Vec<i64> = (0..positions).map(|i| (i * 7 % vocab) as i64).collect();
        let targets = Tensor::new(targets, weight.device()).expect("copies");
        let log_priors = log_softmax(&random(&[positions, components]));
        let decoder = file(&format!("{name}_decoder"), &[("w", weight), ("b", &random(&[vocab]))]);
        let tensors = [("contexts", contexts), ("log_priors", &log_priors), ("targets", &targets)];
        let states = file(&format!("{name}_states"), &tensors);
        let flags = ["--gradient", "--weight", "w", "--bias", "b", "--hidden", states.to_str().expect("a text")];
        sources::open(&args(&[&flags, more].concat(), &[&decoder])).expect("valid files").remove(0)
    }

    fn share(source: &Source, budget: usize) -> f64 {
        passed(source, budget).expect("targets are known").share.expect("a gradient")
    }

    /// Computes the gradient of the logits by candle, and its projection onto an orthonormal basis of these columns.
    fn dense(source: &Source, columns: &Tensor) -> candle_core::Result<f64> {
        let decoder = source.decoder().expect("a decoder");
        let mixture = source.mixture(0, source.contexts()).expect("a mixture");
        let (contexts, log_priors) = (mixture.contexts().expect("copies"), mixture.log_priors().expect("copies"));
        let logits = contexts.broadcast_matmul(&decoder.weight.t()?)?;
        let logits = Var::from_tensor(&logits.broadcast_add(decoder.bias.as_ref().expect("a bias"))?)?;
        let changed = match decoder.function {
            LogitFunction::Identity => logits.as_tensor().clone(),
            // 2 z - log(1 + exp(z)), for logits that are small.
            _ => (logits.affine(2.0, 0.0)? - logits.exp()?.affine(1.0, 1.0)?.log()?)?,
        };
        let log_probs = log_softmax(&changed).broadcast_add(&log_priors.unsqueeze(2)?)?.log_sum_exp(1)?;
        projected(source, &log_probs, &logits, columns)
    }

    /// Projects the gradient of these logits `[positions, K, vocab]`, through log-probabilities `[positions, vocab]`.
    fn projected(source: &Source, log_probs: &Tensor, logits: &Var, columns: &Tensor) -> candle_core::Result<f64> {
        let targets = Tensor::new(source.targets.as_deref().expect("targets"), log_probs.device())?.unsqueeze(1)?;
        let nll = log_probs.gather(&targets, D::Minus1)?.mean_all()?.neg()?;
        let gradients = nll.backward()?;
        let gradient = gradients.get(logits).expect("it depends on the logits").flatten_to(1)?;
        let matrix = |tensor: &Tensor| -> candle_core::Result<Mat<f64>> {
            let (rows, width) = tensor.dims2()?;
            let values = values(tensor).expect("copies");
            Ok(MatRef::from_row_major_slice(&values, rows, width).to_owned())
        };
        let (gradient, columns) = (matrix(&gradient)?, matrix(columns)?);
        let svd = columns.thin_svd().expect("converges");
        Ok((gradient.as_ref() * svd.U()).norm_l2() / gradient.norm_l2())
    }

    #[track_caller]
    fn assert_close(found: f64, expected: f64, tolerance: f64) {
        assert!((found / expected - 1.0).abs() <= tolerance, "{found} {expected}");
    }

    #[test]
    fn the_share_is_that_of_candles_gradient_projected_onto_the_singular_vectors() {
        for components in [1, 3] {
            let weight = random(&[VOCAB, WIDTH]);
            let source = opened("dense", &weight, &random(&[POSITIONS, components, WIDTH]), &[]);
            let found = passed(&source, ALL).expect("targets are known");
            assert_eq!((found.components, found.rank, found.positions), (components, WIDTH, POSITIONS));
            let expected = dense(&source, &weight).expect("fits");
            assert!((0.05..0.95).contains(&expected), "{expected}");
            assert_close(found.share.expect("a gradient"), expected, 1e-10);
        }
    }

    #[test]
    fn chunks_do_not_change_the_share() {
        let source = opened("chunks", &random(&[VOCAB, WIDTH]), &random(&[POSITIONS, 3, WIDTH]), &[]);
        let whole = share(&source, ALL);
        let position = 3 * VOCAB * BYTES_PER_LOGIT;
        for budget in [1, position, 4 * position, 22 * position] {
            assert_close(share(&source, budget), whole, 1e-12);
        }
    }

    #[test]
    fn a_square_weight_of_full_rank_passes_all_on() {
        for components in [1, 3] {
            let source = opened("square", &random(&[WIDTH, WIDTH]), &random(&[POSITIONS, components, WIDTH]), &[]);
            assert_close(share(&source, ALL), 1.0, 1e-8);
        }
    }

    #[test]
    fn dependent_columns_of_the_weight_add_nothing() {
        let columns = random(&[VOCAB, 3]);
        let weight = columns.matmul(&random(&[3, WIDTH])).expect("fits");
        let source = opened("dependent", &weight, &random(&[POSITIONS, 2, WIDTH]), &[]);
        let found = passed(&source, ALL).expect("targets are known");
        assert_eq!((found.rank, found.width), (3, WIDTH));
        assert_close(found.share.expect("a gradient"), dense(&source, &columns).expect("fits"), 1e-10);
    }

    #[test]
    fn a_weight_of_zeros_passes_nothing_on() {
        let weight = random(&[VOCAB, WIDTH]).zeros_like().expect("zeros");
        let source = opened("zeros", &weight, &random(&[POSITIONS, 2, WIDTH]), &[]);
        let found = passed(&source, ALL).expect("targets are known");
        assert_eq!((found.rank, found.share), (0, Some(0.0)));
    }

    #[test]
    fn f32_differs_by_rounding() {
        let source = opened("f32", &random(&[VOCAB, WIDTH]), &random(&[POSITIONS, 3, WIDTH]), &["--dtype", "f32"]);
        let weight = &source.decoder().expect("a decoder").weight;
        assert_close(share(&source, ALL), dense(&source, weight).expect("fits"), 1e-5);
    }

    /// An untrained model of six units, whose mixtures have contexts of size 5.
    const RECIPE: Recipe = Recipe { hidden: 6, embedding: Some(8), context: Some(5), seed: 1, ..Recipe::BASE };

    #[test]
    fn every_head_of_a_checkpoint_has_a_share_with_every_function_of_its_logits() {
        let functions = [LogitFunction::Identity, LogitFunction::Sigsoftmax];
        for (kind, logit_function) in HeadKind::ALL.into_iter().flat_map(|kind| functions.map(|f| (kind, f))) {
            let (name, recipe) = (format!("share_{}", kind.name()), Recipe { logit_function, ..RECIPE });
            let path = saved_with(&name, kind, Teacher::default().built_in(1), &recipe);
            let args = args(&["--gradient", "--contexts", "60"], &[&path]);
            let sources = sources::open(&args).expect("a checkpoint of the lab");
            run(&args, &sources).expect("targets are known");
            let decoder = sources[0].decoder().expect("a decoder");
            assert_eq!(decoder.function, logit_function);
            assert_close(share(&sources[0], ALL), dense(&sources[0], &decoder.weight).expect("fits"), 1e-10);
        }
    }

    #[test]
    fn mixtape_has_the_share_of_the_logits_of_its_contexts() {
        let path = saved_with("share_mixtape", HeadKind::Mixtape, Teacher::default().built_in(1), &RECIPE);
        let source = sources::open(&args(&["--contexts", "60"], &[&path])).expect("a checkpoint of the lab").remove(0);
        let Origin::Mixtape { layer, decoder, hidden } = &source.origin else { panic!("a Mixtape") };
        let checkpoint = Checkpoint::load(&path, hidden.device()).expect("reads");
        let tensor = |name: &str| checkpoint.tensors[name].to_dtype(hidden.dtype());
        let expected = || {
            let contexts = hidden.matmul(&tensor("head.latent.weight")?.t()?)?;
            let contexts = contexts.broadcast_add(&tensor("head.latent.bias")?)?.tanh()?.reshape((60, 4, 5))?;
            let logits = Var::from_tensor(&contexts.broadcast_matmul(&decoder.weight.t()?)?)?;
            let priors = layer.priors(hidden).expect("priors");
            let mixed = (priors * logits.as_tensor())?.sum(1)?;
            let log_probs = log_softmax(&mixed.broadcast_add(decoder.bias.as_ref().expect("a bias"))?);
            let difference = (&log_probs - source.log_probs(0, 60).expect("rows"))?.abs()?.max_all()?;
            assert!(difference.to_scalar::<f64>()? < 1e-12);
            projected(&source, &log_probs, &logits, &decoder.weight)
        };
        assert_close(share(&source, ALL), expected().expect("fits"), 1e-10);
        assert_close(share(&source, 1), share(&source, ALL), 1e-12);
    }

    #[test]
    fn missing_targets_and_log_probabilities_are_errors() {
        let decoder = file("no_targets_decoder", &[("w", &random(&[VOCAB, WIDTH]))]);
        let states = file("no_targets_states", &[("hidden", &random(&[POSITIONS, WIDTH]))]);
        let flags = ["--gradient", "--weight", "w", "--hidden", states.to_str().expect("a text")];
        let args = args(&flags, &[&decoder]);
        let error = run(&args, &sources::open(&args).expect("valid files")).expect_err("no targets").to_string();
        assert!(error.contains("no_targets_decoder") && error.contains("the tensor targets"), "{error}");
        let flags = ["bottleneck", "--gradient", "--log-probs", "p", "file"];
        let error = <Args as clap::Parser>::try_parse_from(flags).expect_err("no decoder").to_string();
        assert!(error.contains("--log-probs"), "{error}");
    }
}
