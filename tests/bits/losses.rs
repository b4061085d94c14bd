//! The cases of losses: every head and every option, shapes, views and functions without a head.

use candle_core::{DType, Tensor, D};
use candle_nn::VarBuilder;
use mos_head::{linear_cross_entropy, Distributions, Loss, Mixture};

use super::cases::{Cases, CPU, DTYPES};
use super::options::{adaptive, hierarchical, joined, moc, mos, softmax, LossOption, LossOption::*, Part::*};
use super::problem::{char_cnn, Problem, Sizes, BASE};

pub(crate) fn every_head(cases: &mut Cases) {
    let heads = [
        softmax(&[]),
        softmax(&[NoBias]),
        softmax(&[Tied]),
        softmax(&[Transposed]),
        softmax(&[Spelled]),
        softmax(&[Scaled]),
        softmax(&[Scaled, Capped]),
        moc(1, &[]),
        moc(3, &[]),
        moc(3, &[Identity, NoBias]),
        moc(3, &[Dropout]),
        moc(3, &[Capped]),
        moc(3, &[Spelled]),
        mos(1, &[]),
        mos(2, &[]),
        mos(3, &[]),
        mos(5, &[]),
        mos(15, &[]),
        mos(3, &[Identity]),
        mos(3, &[PriorBias]),
        mos(3, &[NoBias]),
        mos(3, &[Dropout]),
        mos(3, &[Scaled, Capped]),
        mos(3, &[Tied]),
        mos(3, &[Spelled]),
        adaptive(&[]),
        adaptive(&[HalfWidths, RootBias]),
        adaptive(&[MixtureRoot]),
        adaptive(&[MixtureRoot, Dropout]),
        hierarchical(&[]),
        hierarchical(&[GivenClasses, NoBias]),
        hierarchical(&[MixtureRoot]),
    ];
    for head in heads {
        cases.losses(
            "head",
            head,
            DType::F32,
            &[&[Mean], &[Unreduced, IgnoreSome, PositionWeights, ClassWeights], &[Evaluation]],
        );
        cases.run("decode", head, BASE, DType::F32, Problem::decode);
    }
    for head in [adaptive(&[]), hierarchical(&[GivenClasses]), moc(3, &[Dropout]), softmax(&[Spelled])] {
        for dtype in &DTYPES[1..] {
            cases.losses("head", head, *dtype, &[&[Sum, IgnoreSome]]);
            cases.run("decode", head, BASE, *dtype, Problem::decode);
        }
    }
}

pub(crate) fn every_option(cases: &mut Cases) {
    let options: &[&[LossOption]] = &[
        &[Mean],
        &[Sum],
        &[Unreduced],
        &[Penalty],
        &[IgnoreSome],
        &[IgnoreAll],
        &[IgnoreAbsent],
        &[PositionWeights],
        &[ClassWeights],
        &[Smoothing],
        &[ZLoss],
        &[Hits],
        &[Budget],
        &[Sum, Budget, Smoothing],
        &[Unreduced, Budget, Hits],
        &[Evaluation],
        &[Evaluation, Budget, Sum],
        &[Sum, Penalty, Smoothing, ZLoss, Hits, IgnoreSome, PositionWeights, ClassWeights],
        &[Unreduced, Smoothing, ZLoss, Hits, IgnoreSome, PositionWeights, ClassWeights, Budget],
        &[Evaluation, Unreduced, Smoothing, ZLoss, Hits, IgnoreSome, PositionWeights, ClassWeights],
    ];
    DTYPES.iter().for_each(|dtype| cases.losses("options", mos(3, &[]), *dtype, options));
    cases.losses("options", softmax(&[]), DType::F32, options);
    cases.losses("options", softmax(&[Scaled, Capped]), DType::BF16, options);

    let sampled: &[&[LossOption]] = &[
        &[Sampled],
        &[Sampled, Replaced, Sum, IgnoreSome],
        &[Sampled, Unigram, Unreduced, PositionWeights, ClassWeights],
        &[Sampled, Replaced, Budget],
        &[Evaluation, Sampled],
    ];
    let nce: &[&[LossOption]] = &[
        &[Nce],
        &[Nce, Replaced, Sum, IgnoreSome, ClassWeights],
        &[Nce, Unigram, Penalty],
        &[Nce, Unreduced, PositionWeights],
    ];
    for (head, dtype) in [(softmax(&[]), DType::F32), (softmax(&[Spelled]), DType::F32), (softmax(&[]), DType::BF16)] {
        cases.losses("sampled", head, dtype, sampled);
        cases.losses("nce", head, dtype, nce);
    }
    for (head, dtype) in [(mos(3, &[]), DType::F64), (mos(3, &[Tied, Dropout]), DType::F32), (mos(3, &[]), DType::F16)]
    {
        cases.losses("sampled", head, dtype, sampled);
        cases.losses("rows", head, dtype, &[&[Sampled, Rows, Penalty]]);
    }
    for dtype in [DType::F32, DType::BF16] {
        cases.losses("rows", softmax(&[]), dtype, &[&[Sampled, Rows, IgnoreSome], &[Nce, Unigram, Rows]]);
    }
}

pub(crate) fn shapes(cases: &mut Cases) {
    let sizes = |leading, hidden, context, vocab| Sizes { leading, hidden, context, vocab };
    for (name, sizes) in [
        ("empty", sizes(&[2, 0], 9, 7, 37)),
        ("one_row", sizes(&[1], 9, 7, 37)),
        ("two_rows", sizes(&[2, 1], 32, 32, 64)),
        ("five_rows", sizes(&[5], 17, 16, 33)),
        ("one_id", sizes(&[6], 9, 7, 1)),
        ("two_ids", sizes(&[6], 1, 1, 2)),
        ("rank_4", sizes(&[2, 2, 3], 16, 16, 48)),
        ("vocab_3001", sizes(&[7, 19], 40, 33, 3001)),
        ("many_rows", sizes(&[1100], 5, 6, 70)),
    ] {
        for (head, dtype) in [(softmax(&[]), DType::F32), (mos(3, &[]), DType::F32), (mos(2, &[]), DType::BF16)] {
            cases.run(name, head, sizes, dtype, |problem, digest| {
                problem
                    .losses(&[&[Mean], &[Unreduced, Hits], &[Smoothing, ZLoss, IgnoreSome], &[Evaluation]], digest)?;
                problem.decode(digest)
            });
            cases.run(&format!("{name}/budget"), head, sizes, dtype, |problem, digest| {
                problem.losses(&[&[Budget], &[Budget, Smoothing], &[Evaluation, Budget]], digest)
            });
        }
    }
    // Several chunks under the default budget.
    let sets: [&[LossOption]; 2] = [&[Mean], &[Hits]];
    for options in sets {
        let sizes = sizes(&[500], 16, 16, 20011);
        cases.run(&format!("vocab_20011/{}", joined(options)), mos(1, &[]), sizes, DType::F32, |p, digest| {
            p.losses(&[options], digest)
        });
    }
}

pub(crate) fn views(cases: &mut Cases) {
    type View = fn(&Tensor) -> candle_core::Result<Tensor>;
    let views: [(&str, &[usize], View); 4] = [
        ("swapped", &[7, 3, 20], |x| x.transpose(0, 1)),
        ("last_swapped", &[3, 20, 7], |x| x.transpose(1, 2)),
        ("broadcast", &[7, 20], |x| x.broadcast_as((3, 7, 20))),
        ("narrowed", &[4, 9, 25], |x| x.narrow(0, 1, 3)?.narrow(1, 2, 7)?.narrow(2, 3, 20)),
    ];
    for (name, shape, view) in views {
        for head in [softmax(&[]), mos(3, &[]), adaptive(&[])] {
            cases.run(name, head, BASE, DType::F32, |problem, digest| {
                problem.hidden = view(&problem.variable("view", shape)?)?;
                problem.losses(&[&[Sum, IgnoreSome]], digest)?;
                problem.decode(digest)
            });
        }
    }
    for dtype in [DType::U8, DType::I64] {
        cases.run(&format!("targets_{}", dtype.as_str()), mos(3, &[]), BASE, DType::F32, |problem, digest| {
            problem.targets = problem.targets.t()?.contiguous()?.t()?.to_dtype(dtype)?;
            problem.losses(&[&[Unreduced, IgnoreSome]], digest)?;
            problem.decode(digest)
        });
    }
    cases.run("tied_input", softmax(&[Tied]), BASE, DType::F32, |problem, digest| {
        let inputs = problem.variables()["embedding"].index_select(&problem.targets.flatten_all()?, 0)?;
        problem.hidden = (&problem.hidden + inputs.reshape((3, 7, 20))?)?;
        problem.losses(&[&[Mean], &[Smoothing], &[Sampled], &[Sampled, Rows]], digest)
    });
    for (name, variable, value) in [
        ("minus_infinity", "decoder.bias", f64::NEG_INFINITY),
        ("large", "decoder.bias", 1e4),
        ("nan", "hidden", f64::NAN),
        ("infinity", "decoder.bias", f64::INFINITY),
    ] {
        let heads = [
            (softmax(&[]), DType::F32),
            (mos(3, &[]), DType::F32),
            (mos(3, &[]), DType::F64),
            (mos(3, &[]), DType::F16),
        ];
        for (head, dtype) in heads {
            cases.run(name, head, BASE, dtype, |problem, digest| {
                let variable = &problem.variables()[variable];
                let mut values = variable.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>()?;
                values[45] = value;
                variable.set(&Tensor::from_vec(values, variable.shape(), &CPU)?.to_dtype(dtype)?)?;
                problem.losses(&[&[Mean], &[Unreduced, Smoothing], &[Hits], &[Evaluation]], digest)?;
                digest.tensor(&problem.layer().log_probs(&problem.hidden)?)
            });
        }
    }
}

/// Losses and networks without a head.
pub(crate) fn functions(cases: &mut Cases) {
    for dtype in DTYPES {
        cases.run("mixture", softmax(&[Transposed]), BASE, dtype, |problem, digest| {
            let contexts = problem.variable("contexts", &[3, 7, 2, 20])?;
            let log_priors = candle_nn::ops::log_softmax(&problem.variable("priors", &[3, 7, 2])?, D::Minus1)?;
            let mixture = Mixture::new(&contexts, Some(&log_priors), &problem.variables()["weight"].t()?, None)?;
            for mixture in [mixture.clone(), mixture.with_logit_scale(1.7)?.with_softcap(3.0)?] {
                let sets: [&[LossOption]; 3] = [&[Mean], &[Unreduced, Smoothing, IgnoreSome], &[Hits]];
                for options in sets {
                    let loss = mixture.loss(&problem.targets, &problem.options(options)?)?;
                    problem.digest_loss(&loss, options, digest)?;
                }
                problem.digest_mixture(&mixture, digest)?;
            }
            Ok(())
        });
        cases.run("linear_cross_entropy", softmax(&[Transposed]), BASE, dtype, |problem, digest| {
            let (weight, bias) = (problem.variables()["weight"].t()?, problem.variable("bias", &[BASE.vocab])?);
            let sets: [&[LossOption]; 4] = [&[Mean], &[Unreduced, ZLoss, IgnoreSome], &[Smoothing], &[Evaluation]];
            for options in sets {
                let given = problem.options(options)?;
                let loss = linear_cross_entropy(&problem.hidden, &weight, Some(&bias), &problem.targets, &given)?;
                problem.digest_loss(&loss, options, digest)?;
            }
            Ok(())
        });
        cases.run("char_cnn", softmax(&[Spelled]), BASE, dtype, |problem, digest| {
            let rows = char_cnn(&BASE, BASE.hidden, VarBuilder::from_varmap(&problem.vars, dtype, &CPU).pp("rows"))?;
            let ids = Tensor::new(&[3u32, 0, 100, 57], &CPU)?;
            for rows in [rows.rows()?, rows.rows_of(&ids)?, rows.rows_of_spellings(&["abba", "cade"])?] {
                digest.differentiable(&rows, &problem.vars)?;
            }
            Ok(())
        });
    }
    let sets: [&[LossOption]; 5] =
        [&[Mean], &[Sum, IgnoreSome], &[Unreduced, PositionWeights, ClassWeights], &[IgnoreAll], &[Evaluation]];
    for options in sets {
        cases.run(&format!("from_nll/{}", joined(options)), softmax(&[]), BASE, DType::F32, |problem, digest| {
            let nll = problem.variable("nll", BASE.leading)?.sqr()?;
            let loss = Loss::from_nll(&nll, &problem.targets_for(options)?, &problem.options(options)?)?;
            problem.digest_loss(&loss, options, digest)
        });
    }
}
