//! The cases of what is decoded, of scores and of what is computed of them, and of ranks.

use candle_core::{DType, D};
use mos_head::decode::TopK;

use super::cases::{Cases, DTYPES};
use super::options::{
    adaptive, hierarchical, joined, moc, mos, softmax, Distillation, Draw, Kind, LossOption, PolicyTerm, Score,
};
use super::options::{Distillation::*, Draw::*, LossOption::*, Part::*, PolicyTerm::*, Score::*};
use super::outputs;
use super::problem::{sampler, uniform, Problem, BASE};

/// Draws, log-probabilities, beam search, pruning and plans.
pub(crate) fn draws(cases: &mut Cases) {
    let mixtures = DTYPES.map(|dtype| (mos(3, &[Scaled, Capped]), dtype)).into_iter();
    let mixtures = mixtures.chain([softmax(&[]), moc(3, &[]), mos(15, &[])].map(|head| (head, DType::F32)));
    for (head, dtype) in mixtures.clone().chain([adaptive(&[]), hierarchical(&[])].map(|head| (head, DType::F32))) {
        let any: [&[Draw]; 7] =
            [&[Full], &[Greedy], &[Temperature], &[FromTopK], &[TopP], &[MinP], &[Temperature, FromTopK, TopP, MinP]];
        let from_components: [&[Draw]; 3] = [&[ComponentTemperature], &[Ancestral], &[Ancestral, ComponentTemperature]];
        let has_components = matches!(head.kind, Kind::Softmaxes(_) | Kind::Softmax);
        for draw in any.into_iter().chain(from_components.into_iter().filter(|_| has_components)) {
            cases.run(&format!("sample/{}", joined(draw)), head, BASE, dtype, |problem, digest| {
                let mut sampler = sampler(draw)?;
                (0..5).try_for_each(|_| digest.tensor(&problem.layer().sample(&problem.hidden, &mut sampler)?))
            });
        }
        cases.run("log_probs", head, BASE, dtype, |problem, digest| {
            digest.differentiable(&problem.layer().log_probs(&problem.hidden)?, &problem.vars)?;
            digest.differentiable(&problem.layer().log_probs_as(&problem.hidden, DType::F32)?, &problem.vars)
        });
        cases.run("beam_search", head, BASE, dtype, Problem::beam_search);
    }
    for (head, dtype) in mixtures {
        cases.run("prune", head, BASE, dtype, |problem, digest| {
            for mass in [0.0, 0.2, 0.6] {
                let pruned = problem.mixture_layer().prune(&problem.hidden, mass)?;
                digest.tensor(&pruned.total_variation)?;
                problem.digest_mixture(&pruned.mixture, digest)?;
            }
            Ok(())
        });
        cases.run("plan", head, BASE, dtype, |problem, digest| {
            let sets: [&[LossOption]; 6] =
                [&[Mean], &[Budget], &[Smoothing], &[Hits, Budget], &[Evaluation], &[Evaluation, Hits]];
            for options in sets {
                digest.text(&problem.mixture_layer().plan(&problem.hidden, &problem.options(options)?)?.to_string());
            }
            Ok(())
        });
    }
    cases.run("from_log_probs", softmax(&[]), BASE, DType::F32, |_, digest| {
        let log_probs = candle_nn::ops::log_softmax(&uniform(&[4, 101], 3.0, 9)?, D::Minus1)?;
        digest.top_k(&TopK::from_log_probs(&log_probs, 7)?)?;
        digest.tensor(&sampler(&[Temperature, FromTopK, TopP, MinP])?.sample(&log_probs)?)
    });
}

/// Scores, policy losses, distillation and requests, of heads that are a mixture and of others.
pub(crate) fn scores(cases: &mut Cases) {
    let mixtures = DTYPES.map(|dtype| (mos(3, &[]), dtype)).into_iter();
    let f32 = [
        softmax(&[]),
        softmax(&[Scaled, Capped]),
        softmax(&[Adapter]),
        softmax(&[Spelled]),
        moc(3, &[]),
        mos(3, &[Scaled, Capped]),
        mos(3, &[Adapter]),
        mos(15, &[]),
        adaptive(&[]),
        hierarchical(&[]),
    ];
    for (head, dtype) in mixtures.chain(f32.map(|head| (head, DType::F32))) {
        let scores: [&[Score]; 6] =
            [&[LogProb], &[IsArgmax], &[Entropy], &[Outside], &[Tempered], &[Entropy, Outside, Tempered, IsArgmax]];
        for options in scores {
            cases.run(&format!("scores/{}", joined(options)), head, BASE, dtype, |problem, digest| {
                problem.scores(problem.layer(), options, digest)
            });
        }
        let policies: [&[PolicyTerm]; 4] = [
            &[Ratio],
            &[Ratio, Kl, Importance, EntropyBonus],
            &[Ratio, PolicyTemperature, EntropyBonus],
            &[Ratio, Constant],
        ];
        for options in policies {
            cases.run(&format!("policy/{}", joined(options)), head, BASE, dtype, |problem, digest| {
                problem.policy_loss(problem.layer(), options, digest)
            });
        }
        let distillations: [&[Distillation]; 5] = [
            &[Forward],
            &[Reverse],
            &[JensenShannon],
            &[Forward, TeacherTemperature, Weights],
            &[Reverse, HardTargets],
        ];
        for options in distillations {
            cases.run(&format!("distill/{}", joined(options)), head, BASE, dtype, |problem, digest| {
                problem.distill(problem.layer(), options, digest)
            });
        }
        cases.run("next_tokens", head, BASE, dtype, |problem, digest| problem.next_tokens(problem.layer(), digest));
    }
    for head in [softmax(&[Adapter]), mos(3, &[Adapter])] {
        cases.losses(
            "adapter",
            head,
            DType::F32,
            &[&[Mean], &[Unreduced, IgnoreSome], &[Smoothing], &[Hits], &[Budget], &[Evaluation]],
        );
        cases.run("decode", head, BASE, DType::F32, Problem::decode);
    }
}

pub(crate) fn kept_sets(cases: &mut Cases) {
    for (head, dtype) in [
        (softmax(&[]), DType::F32),
        (softmax(&[]), DType::BF16),
        (softmax(&[Adapter]), DType::F32),
        (softmax(&[Transposed]), DType::F64),
        (mos(3, &[]), DType::F32),
        (mos(3, &[Scaled, Capped]), DType::F64),
        (mos(3, &[]), DType::F16),
    ] {
        cases.run("kept_sets", head, BASE, dtype, |problem, digest| problem.kept_sets(digest));
    }
}

/// Accumulated gradients, losses of a chunk's scores, and a vocabulary that ranks share.
pub(crate) fn sums_and_ranks(cases: &mut Cases) {
    for (head, dtype) in [
        (softmax(&[]), DType::F32),
        (softmax(&[Tied]), DType::BF16),
        (mos(3, &[]), DType::F32),
        (adaptive(&[]), DType::F32),
    ] {
        let sets: [&[LossOption]; 2] = [&[Mean], &[Sum, IgnoreSome]];
        for options in sets {
            cases.run(&format!("gradient_sum/{}", joined(options)), head, BASE, dtype, |problem, digest| {
                problem.gradient_sum(options, digest)
            });
        }
    }
    for (head, dtype) in
        [(softmax(&[]), DType::F32), (mos(3, &[]), DType::F32), (mos(3, &[]), DType::F64), (mos(2, &[]), DType::BF16)]
    {
        cases.run("chunk_losses", head, BASE, dtype, |problem, digest| problem.chunk_losses(digest));
    }
    for (components, dtype) in [(1, DType::F32), (3, DType::F32), (3, DType::F64), (2, DType::BF16)] {
        let name = format!("ranks/{components}");
        cases.run(&name, softmax(&[]), BASE, dtype, |_, digest| outputs::ranks(components, dtype, digest));
    }
}
