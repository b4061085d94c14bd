//! All measures of one model.

use crate::distributions::{Components, PairwiseDivergence};
use crate::source::{values, Head, Source};
use crate::spectrum::{Rows, Spectrum};
use crate::{args::Args, low_rank::LowRank};
use candle_core::Tensor;
use lab::{show::progress, Result};

pub(crate) struct Study {
    pub(crate) name: String,
    /// The head, if it is known.
    pub(crate) head: Option<Head>,
    pub(crate) vocab: usize,
    pub(crate) contexts: usize,
    pub(crate) spectrum: Spectrum,
    pub(crate) tolerance: f64,
    pub(crate) rank: usize,
    /// The mean divergence, in nats.
    pub(crate) divergence: Option<f64>,
    pub(crate) priors: Option<Components>,
    pub(crate) posteriors: Option<Components>,
    /// The perplexity on these contexts.
    pub(crate) perplexity: Option<f64>,
    /// The best approximations: (rank, perplexity).
    pub(crate) low_rank: Vec<(usize, f64)>,
}

/// Contexts at a time.
const BLOCK: usize = 64;

pub(crate) fn study(source: &Source, args: &Args) -> Result<Study> {
    let (contexts, vocab) = (source.contexts(), source.vocab());
    check_memory(contexts, vocab, args.memory)?;
    let mut rows = Rows::new(vocab);
    let mut divergence = PairwiseDivergence::new(vocab);
    let (mut priors, mut posteriors) = (None, None);
    let mut nll = 0.0;

    let bar = progress::bar(contexts, format!("{} log-probabilities", source.label()));
    for start in (0..contexts).step_by(BLOCK) {
        let count = BLOCK.min(contexts - start);
        let log_probs = values(&source.log_probs(start, count)?)?;
        for row in log_probs.chunks_exact(vocab) {
            divergence.push(row);
        }
        rows.push(&log_probs);
        let targets = source.targets.as_ref().map(|targets| &targets[start..start + count]);
        for (row, &target) in log_probs.chunks_exact(vocab).zip(targets.into_iter().flatten()) {
            nll -= row[target as usize];
        }
        push(&mut priors, source.log_priors(start, count)?)?;
        if let Some(targets) = targets {
            push(&mut posteriors, source.log_posteriors(start, targets)?)?;
        }
        bar.inc(count as u64);
    }
    bar.finish_and_clear();

    let bar = progress::bar(1, format!("{} singular values of {contexts} x {vocab}", source.label()));
    bar.tick();
    let spectrum = rows.spectrum()?;
    bar.finish_and_clear();
    let epsilon = source.epsilon;
    let rank = spectrum.rank(epsilon);
    let low_rank = match &source.targets {
        Some(targets) => low_rank(source, &spectrum, rank, targets)?,
        None => vec![],
    };
    Ok(Study {
        name: source.name.clone(),
        head: source.head,
        vocab,
        contexts,
        tolerance: spectrum.tolerance(epsilon),
        rank,
        spectrum,
        divergence: divergence.mean(),
        priors,
        posteriors,
        perplexity: source.targets.as_ref().map(|_| (nll / contexts as f64).exp()),
        low_rank,
    })
}

fn check_memory(contexts: usize, vocab: usize, mib: usize) -> Result<()> {
    let needs = |contexts| Rows::memory(contexts, vocab) >> 20;
    if needs(contexts) <= mib {
        return Ok(());
    }
    let fits = (1..contexts).rev().find(|&contexts| needs(contexts) <= mib).unwrap_or(0);
    Err(format!(
        "the log-probabilities of {contexts} contexts and {vocab} token ids need {} MiB, more than --memory {mib}: \
         --contexts {fits} fits",
        needs(contexts)
    )
    .into())
}

/// Adds the log-weights [contexts, K] of some contexts, if there are components.
fn push(components: &mut Option<Components>, log_weights: Option<Tensor>) -> Result<()> {
    if let Some(log_weights) = log_weights {
        let count = log_weights.dim(1)?;
        let components = components.get_or_insert_with(|| Components::new(count));
        values(&log_weights)?.chunks_exact(count).for_each(|row| components.push(row));
    }
    Ok(())
}

/// Computes perplexities at powers of two, and at the highest rank that a softmax of this width, if it is known, can
/// have: its width, the normaliser and the bias.
fn low_rank(source: &Source, spectrum: &Spectrum, rank: usize, targets: &[u32]) -> Result<Vec<(usize, f64)>> {
    let mut ranks: Vec<usize> = (0..).map(|i| 1 << i).take_while(|&r| r < rank).collect();
    ranks.extend(source.head.map(|head| head.width + 2));
    ranks.push(rank);
    ranks.retain(|&r| r <= rank);
    ranks.sort_unstable();
    ranks.dedup();
    let (contexts, vocab) = (source.contexts(), source.vocab());
    let mut low_rank = LowRank::new(spectrum, ranks);
    let bar = progress::bar(contexts, format!("{} of lower rank", source.label()));
    for start in (0..contexts).step_by(BLOCK) {
        let count = BLOCK.min(contexts - start);
        let log_probs = values(&source.log_probs(start, count)?)?;
        debug_assert_eq!(log_probs.len(), count * vocab);
        low_rank.push(&log_probs, &targets[start..start + count]);
        bar.inc(count as u64);
    }
    bar.finish_and_clear();
    Ok(low_rank.perplexities())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sources;
    use crate::sources::tests::{args, file, saved, Temporary};
    use candle_core::{DType, Device};
    use lab::{data::language::Teacher, layers::HeadKind};
    use std::path::Path;

    fn study_of(args: &Args) -> Result<Study> {
        study(&sources::open(args)?[0], args)
    }

    #[test]
    fn a_softmax_has_the_rank_of_its_width_and_a_mixture_exceeds_it() {
        for (kind, exceeds) in [(HeadKind::Softmax, false), (HeadKind::Moc, false), (HeadKind::Mos, true)] {
            let path = saved(kind.name(), kind, Teacher::default().built_in(1));
            let found = study_of(&args(&["--contexts", "300"], &[&path])).expect("a checkpoint of the lab");

            let width = if kind == HeadKind::Softmax { 6 } else { 5 };
            assert_eq!((found.head.expect("known").width, found.contexts, found.vocab), (width, 300, 512));
            // A decoder's bias starts as zero, and adds no rank.
            let expected = width + 1;
            assert!(
                if exceeds { found.rank > 2 * expected } else { found.rank == expected },
                "{kind:?} {}",
                found.rank
            );
            assert_eq!(found.posteriors.is_some(), kind == HeadKind::Mos);
            // The highest rank is the model itself.
            let (rank, perplexity) = *found.low_rank.last().expect("targets are known");
            assert_eq!(rank, found.rank);
            let own = found.perplexity.expect("targets are known");
            assert!((perplexity / own - 1.0).abs() < 1e-6, "{kind:?}: {perplexity} {own}");
        }
    }

    /// Writes hidden states of this width, and a matrix and a bias, as two files.
    fn files(name: &str, width: usize, states: usize) -> [Temporary; 2] {
        let random = |shape: &[usize]| Tensor::randn(0f32, 1.0, shape, &Device::Cpu).expect("draws");
        let targets = Tensor::arange(0u32, states as u32, &Device::Cpu).expect("counts");
        let head = [("lm_head.weight", &random(&[40, 7])), ("lm_head.bias", &random(&[40]))];
        let hidden = [("hidden", &random(&[states, width])), ("targets", &targets)];
        [file(&format!("{name}_head"), &head), file(&format!("{name}_states"), &hidden)]
    }

    fn study_of_files([head, states]: &[Temporary; 2], key: &str, more: &[&str]) -> Result<Study> {
        let states = states.to_str().expect("a text");
        study_of(&args(&[&["--weight", key, "--hidden", states], more].concat(), &[head]))
    }

    #[test]
    fn the_normaliser_and_the_bias_add_one_rank_each() {
        let paths = files("rank", 7, 30);
        for precision in ["f64", "f32"] {
            let rank = |more: &[&str]| {
                let more = [more, &["--dtype", precision]].concat();
                study_of_files(&paths, "lm_head.weight", &more).expect("valid files").rank
            };
            assert_eq!(rank(&[]), 8, "{precision}");
            assert_eq!(rank(&["--bias", "lm_head.bias"]), 9, "{precision}");
        }
    }

    #[test]
    fn the_perplexity_is_that_of_candles_cross_entropy() {
        let paths = files("perplexity", 7, 30);
        let found = study_of_files(&paths, "lm_head.weight", &[]).expect("valid files").perplexity.expect("targets");
        let load = |path: &Path, key: &str| {
            let tensors = candle_core::safetensors::load(path, &Device::Cpu).expect("reads");
            tensors[key].clone()
        };
        let logits = load(&paths[1], "hidden").matmul(&load(&paths[0], "lm_head.weight").t().expect("a matrix"));
        let loss = candle_nn::loss::cross_entropy(&logits.expect("fits"), &load(&paths[1], "targets")).expect("a loss");
        let expected = f64::from(loss.to_dtype(DType::F32).and_then(|loss| loss.to_scalar::<f32>()).expect("a number"));
        assert!((found.ln() - expected).abs() < 1e-5, "{found} {expected}");
    }

    #[test]
    fn bad_files_are_errors_that_name_what_is_wrong() {
        let error =
            |paths, key: &str, more: &[&str]| study_of_files(paths, key, more).err().expect("must fail").to_string();
        let contains = |error: String, parts: &[&str]| {
            parts.iter().for_each(|part| assert!(error.contains(part), "{part:?} is not in: {error}"));
        };
        let paths = files("bad", 7, 30);
        contains(error(&paths, "head.weight", &[]), &["no tensor head.weight", "lm_head.bias, lm_head.weight"]);
        contains(error(&paths, "lm_head.bias", &[]), &["lm_head.bias is [40]", "[vocab, d]"]);
        contains(error(&paths, "lm_head.weight", &["--bias", "lm_head.weight"]), &["[40, 7], expected [40]"]);
        let paths = files("narrow", 6, 30);
        contains(error(&paths, "lm_head.weight", &[]), &["hidden is [30, 6]", "[.., 7]"]);
        let paths = files("empty", 7, 0);
        contains(error(&paths, "lm_head.weight", &[]), &["hidden is [0, 7]", "not empty"]);
        let paths = files("far", 7, 50);
        contains(error(&paths, "lm_head.weight", &[]), &["target 40 is not below vocab 40"]);
        std::fs::write(&*paths[0], "").expect("writes");
        contains(error(&paths, "lm_head.weight", &[]), &["cannot read", "far_head"]);
    }

    #[test]
    fn too_many_contexts_for_the_memory_are_an_error_that_says_how_many_fit() {
        assert!(check_memory(1000, 1000, 100).is_ok());
        let error = check_memory(1000, 10_000, 100).expect_err("240 MB").to_string();
        assert!(error.contains("--contexts 4"), "{error}");
        // A tall matrix is reduced to a triangle.
        assert!(check_memory(1_000_000, 500, 100).is_ok());
    }
}
