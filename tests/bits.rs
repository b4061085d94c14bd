//! Hashes of the exact bits of results, one line per case, so that two commits can be compared: a refactoring changes no
//! line. README.md says how. `problem.rs` names most of the library's interface, so that it is quickly adapted to a commit
//! that renames some.
//!
//! The lines of `plan` and of cases with a `budget` depend on the number of threads: the workspace of each is part of the
//! budget, and the rest decides on the chunks.

#[path = "bits/digest.rs"]
mod digest;
#[path = "bits/outputs.rs"]
mod outputs;
#[path = "bits/problem.rs"]
mod problem;
#[path = "common/ranks.rs"]
mod ranks;

use std::collections::HashSet;

use candle_core::{DType, Device, Tensor, D};
use candle_nn::VarBuilder;
use digest::Digest;
use mos_head::decode::TopK;
use mos_head::{linear_cross_entropy, Distributions, Loss, Mixture, Result};
use problem::{char_cnn, sampler, uniform, Problem, Sizes, BASE};

const CPU: Device = Device::Cpu;
const DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];

#[test]
fn results_are_repeatable_to_the_bit() {
    let lines = lines();
    print!("{}", lines.concat());
    if let Ok(file) = std::env::var("MOS_HEAD_BITS") {
        std::fs::write(file, lines.concat()).expect("a file that can be written");
    }
    let names: HashSet<&str> = lines.iter().filter_map(|line| line.split(' ').next()).collect();
    assert_eq!(names.len(), lines.len(), "two cases have the same name");
    assert_eq!(lines, self::lines());
}

/// Runs all cases.
fn lines() -> Vec<String> {
    let mut cases = Cases(Vec::new());
    every_head(&mut cases);
    every_option(&mut cases);
    shapes(&mut cases);
    views(&mut cases);
    functions(&mut cases);
    decoding(&mut cases);
    outputs(&mut cases);
    kept_sets(&mut cases);
    sums_and_ranks(&mut cases);
    cases.0
}

fn every_head(cases: &mut Cases) {
    let heads = "softmax softmax+no_bias softmax+tied softmax+transposed softmax+char_cnn softmax+scaled \
        softmax+scaled+capped moc1 moc3 moc3+identity+no_bias moc3+dropout moc3+capped moc3+char_cnn mos1 mos2 mos3 mos5 \
        mos15 mos3+identity mos3+prior_bias mos3+no_bias mos3+dropout mos3+scaled+capped mos3+tied mos3+char_cnn adaptive \
        adaptive+div2+bias adaptive+mos3 adaptive+mos3+dropout hierarchical hierarchical+given+no_bias hierarchical+mos3";
    for head in heads.split(' ') {
        cases.losses("head", head, DType::F32, "mean none+ignore_some+position_weights+class_weights evaluation");
        cases.run("decode", head, BASE, DType::F32, Problem::decode);
    }
    for head in ["adaptive", "hierarchical+given", "moc3+dropout", "softmax+char_cnn"] {
        for dtype in &DTYPES[1..] {
            cases.losses("head", head, *dtype, "sum+ignore_some");
            cases.run("decode", head, BASE, *dtype, Problem::decode);
        }
    }
}

fn every_option(cases: &mut Cases) {
    let options =
        "mean sum none penalty ignore_some ignore_all ignore_absent position_weights class_weights smoothing \
        z_loss hits budget sum+budget+smoothing none+budget+hits evaluation evaluation+budget+sum \
        sum+penalty+smoothing+z_loss+hits+ignore_some+position_weights+class_weights \
        none+smoothing+z_loss+hits+ignore_some+position_weights+class_weights+budget \
        evaluation+none+smoothing+z_loss+hits+ignore_some+position_weights+class_weights";
    DTYPES.iter().for_each(|dtype| cases.losses("options", "mos3", *dtype, options));
    cases.losses("options", "softmax", DType::F32, options);
    cases.losses("options", "softmax+scaled+capped", DType::BF16, options);

    let sampled = "sampled sampled+replaced+sum+ignore_some sampled+unigram+none+position_weights+class_weights \
        sampled+replaced+budget evaluation+sampled";
    let nce = "nce nce+replaced+sum+ignore_some+class_weights nce+unigram+penalty nce+none+position_weights";
    for (head, dtype) in [("softmax", DType::F32), ("softmax+char_cnn", DType::F32), ("softmax", DType::BF16)] {
        cases.losses("sampled", head, dtype, sampled);
        cases.losses("nce", head, dtype, nce);
    }
    for (head, dtype) in [("mos3", DType::F64), ("mos3+tied+dropout", DType::F32), ("mos3", DType::F16)] {
        cases.losses("sampled", head, dtype, sampled);
        cases.losses("rows", head, dtype, "sampled+rows+penalty");
    }
    for dtype in [DType::F32, DType::BF16] {
        cases.losses("rows", "softmax", dtype, "sampled+rows+ignore_some nce+unigram+rows");
    }
}

fn shapes(cases: &mut Cases) {
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
        for (head, dtype) in [("softmax", DType::F32), ("mos3", DType::F32), ("mos2", DType::BF16)] {
            cases.run(name, head, sizes, dtype, |problem, digest| {
                problem.losses("mean none+hits smoothing+z_loss+ignore_some evaluation", digest)?;
                problem.decode(digest)
            });
            cases.run(&format!("{name}/budget"), head, sizes, dtype, |problem, digest| {
                problem.losses("budget budget+smoothing evaluation+budget", digest)
            });
        }
    }
    // Several chunks under the default budget.
    for options in ["mean", "hits"] {
        let sizes = sizes(&[500], 16, 16, 20011);
        cases.run(&format!("vocab_20011/{options}"), "mos1", sizes, DType::F32, |p, digest| p.losses(options, digest));
    }
}

fn views(cases: &mut Cases) {
    type View = fn(&Tensor) -> candle_core::Result<Tensor>;
    let views: [(&str, &[usize], View); 4] = [
        ("swapped", &[7, 3, 20], |x| x.transpose(0, 1)),
        ("last_swapped", &[3, 20, 7], |x| x.transpose(1, 2)),
        ("broadcast", &[7, 20], |x| x.broadcast_as((3, 7, 20))),
        ("narrowed", &[4, 9, 25], |x| x.narrow(0, 1, 3)?.narrow(1, 2, 7)?.narrow(2, 3, 20)),
    ];
    for (name, shape, view) in views {
        for head in ["softmax", "mos3", "adaptive"] {
            cases.run(name, head, BASE, DType::F32, |problem, digest| {
                problem.hidden = view(&problem.variable("view", shape)?)?;
                problem.losses("sum+ignore_some", digest)?;
                problem.decode(digest)
            });
        }
    }
    for dtype in [DType::U8, DType::I64] {
        cases.run(&format!("targets_{}", dtype.as_str()), "mos3", BASE, DType::F32, |problem, digest| {
            problem.targets = problem.targets.t()?.contiguous()?.t()?.to_dtype(dtype)?;
            problem.losses("none+ignore_some", digest)?;
            problem.decode(digest)
        });
    }
    cases.run("tied_input", "softmax+tied", BASE, DType::F32, |problem, digest| {
        let inputs = problem.variables()["embedding"].index_select(&problem.targets.flatten_all()?, 0)?;
        problem.hidden = (&problem.hidden + inputs.reshape((3, 7, 20))?)?;
        problem.losses("mean smoothing sampled sampled+rows", digest)
    });
    for (name, variable, value) in [
        ("minus_infinity", "decoder.bias", f64::NEG_INFINITY),
        ("large", "decoder.bias", 1e4),
        ("nan", "hidden", f64::NAN),
        ("infinity", "decoder.bias", f64::INFINITY),
    ] {
        let heads = [("softmax", DType::F32), ("mos3", DType::F32), ("mos3", DType::F64), ("mos3", DType::F16)];
        for (head, dtype) in heads {
            cases.run(name, head, BASE, dtype, |problem, digest| {
                let variable = &problem.variables()[variable];
                let mut values = variable.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>()?;
                values[45] = value;
                variable.set(&Tensor::from_vec(values, variable.shape(), &CPU)?.to_dtype(dtype)?)?;
                problem.losses("mean none+smoothing hits evaluation", digest)?;
                digest.tensor(&problem.layer().log_probs(&problem.hidden)?)
            });
        }
    }
}

/// Losses and networks without a head.
fn functions(cases: &mut Cases) {
    for dtype in DTYPES {
        cases.run("mixture", "softmax+transposed", BASE, dtype, |problem, digest| {
            let contexts = problem.variable("contexts", &[3, 7, 2, 20])?;
            let log_priors = candle_nn::ops::log_softmax(&problem.variable("priors", &[3, 7, 2])?, D::Minus1)?;
            let mixture = Mixture::new(&contexts, Some(&log_priors), &problem.variables()["weight"].t()?, None)?;
            for mixture in [mixture.clone(), mixture.with_logit_scale(1.7)?.with_softcap(3.0)?] {
                for options in ["mean", "none+smoothing+ignore_some", "hits"] {
                    let loss = mixture.loss(&problem.targets, &problem.options(options)?)?;
                    problem.digest_loss(&loss, options, digest)?;
                }
                problem.digest_mixture(&mixture, digest)?;
            }
            Ok(())
        });
        cases.run("linear_cross_entropy", "softmax+transposed", BASE, dtype, |problem, digest| {
            let (weight, bias) = (problem.variables()["weight"].t()?, problem.variable("bias", &[BASE.vocab])?);
            for options in ["mean", "none+z_loss+ignore_some", "smoothing", "evaluation"] {
                let given = problem.options(options)?;
                let loss = linear_cross_entropy(&problem.hidden, &weight, Some(&bias), &problem.targets, &given)?;
                problem.digest_loss(&loss, options, digest)?;
            }
            Ok(())
        });
        cases.run("char_cnn", "softmax+char_cnn", BASE, dtype, |problem, digest| {
            let rows = char_cnn(&BASE, BASE.hidden, VarBuilder::from_varmap(&problem.vars, dtype, &CPU).pp("rows"))?;
            let ids = Tensor::new(&[3u32, 0, 100, 57], &CPU)?;
            for rows in [rows.rows()?, rows.rows_of(&ids)?, rows.rows_of_spellings(&["abba", "cade"])?] {
                digest.differentiable(&rows, &problem.vars)?;
            }
            Ok(())
        });
    }
    for options in ["mean", "sum+ignore_some", "none+position_weights+class_weights", "ignore_all", "evaluation"] {
        cases.run(&format!("from_nll/{options}"), "softmax", BASE, DType::F32, |problem, digest| {
            let nll = problem.variable("nll", BASE.leading)?.sqr()?;
            let loss = Loss::from_nll(&nll, &problem.targets_for(options)?, &problem.options(options)?)?;
            problem.digest_loss(&loss, options, digest)
        });
    }
}

fn decoding(cases: &mut Cases) {
    let mixtures = DTYPES.map(|dtype| ("mos3+scaled+capped", dtype)).into_iter();
    let mixtures = mixtures.chain(["softmax", "moc3", "mos15"].map(|head| (head, DType::F32)));
    for (head, dtype) in mixtures.clone().chain(["adaptive", "hierarchical"].map(|head| (head, DType::F32))) {
        let any = "full greedy temperature top_k top_p min_p temperature+top_k+top_p+min_p";
        let of_components = ["component_temperature", "ancestral", "ancestral+component_temperature"];
        let has_components = head.starts_with("mos") || head.starts_with("softmax");
        for sampling in any.split(' ').chain(of_components.into_iter().filter(|_| has_components)) {
            cases.run(&format!("sample/{sampling}"), head, BASE, dtype, |problem, digest| {
                let mut sampler = sampler(sampling)?;
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
            for options in ["mean", "budget", "smoothing", "hits+budget", "evaluation", "evaluation+hits"] {
                digest.text(&problem.mixture_layer().plan(&problem.hidden, &problem.options(options)?)?.to_string());
            }
            Ok(())
        });
    }
    cases.run("from_log_probs", "softmax", BASE, DType::F32, |_, digest| {
        let log_probs = candle_nn::ops::log_softmax(&uniform(&[4, 101], 3.0, 9)?, D::Minus1)?;
        digest.top_k(&TopK::from_log_probs(&log_probs, 7)?)?;
        digest.tensor(&sampler("temperature+top_k+top_p+min_p")?.sample(&log_probs)?)
    });
}

/// Scores, policy losses, distillation and requests, of heads that are a mixture and of others.
fn outputs(cases: &mut Cases) {
    let mixtures = DTYPES.map(|dtype| ("mos3", dtype)).into_iter();
    let f32 =
        "softmax softmax+scaled+capped softmax+adapter softmax+char_cnn moc3 mos3+scaled+capped mos3+adapter mos15 \
        adaptive hierarchical";
    for (head, dtype) in mixtures.chain(f32.split_whitespace().map(|head| (head, DType::F32))) {
        for options in ["plain", "best", "entropy", "outside", "temperature", "entropy+outside+temperature+best"] {
            cases.run(&format!("scores/{options}"), head, BASE, dtype, |problem, digest| {
                problem.scores(problem.layer(), options, digest)
            });
        }
        for options in ["ppo", "ppo+kl+importance+entropy", "ppo+temperature+entropy", "ppo+constant"] {
            cases.run(&format!("policy/{options}"), head, BASE, dtype, |problem, digest| {
                problem.policy_loss(problem.layer(), options, digest)
            });
        }
        for options in ["forward", "reverse", "jensen_shannon", "forward+temperature+weights", "reverse+hard"] {
            cases.run(&format!("distill/{options}"), head, BASE, dtype, |problem, digest| {
                problem.distill(problem.layer(), options, digest)
            });
        }
        cases.run("next_tokens", head, BASE, dtype, |problem, digest| problem.next_tokens(problem.layer(), digest));
    }
    for head in ["softmax+adapter", "mos3+adapter"] {
        cases.losses("adapter", head, DType::F32, "mean none+ignore_some smoothing hits budget evaluation");
        cases.run("decode", head, BASE, DType::F32, Problem::decode);
    }
}

fn kept_sets(cases: &mut Cases) {
    for (head, dtype) in [
        ("softmax", DType::F32),
        ("softmax", DType::BF16),
        ("softmax+adapter", DType::F32),
        ("softmax+transposed", DType::F64),
        ("mos3", DType::F32),
        ("mos3+scaled+capped", DType::F64),
        ("mos3", DType::F16),
    ] {
        cases.run("kept_sets", head, BASE, dtype, |problem, digest| problem.kept_sets(digest));
    }
}

/// Accumulated gradients, losses of a chunk's scores, and a vocabulary that ranks share.
fn sums_and_ranks(cases: &mut Cases) {
    for (head, dtype) in
        [("softmax", DType::F32), ("softmax+tied", DType::BF16), ("mos3", DType::F32), ("adaptive", DType::F32)]
    {
        for options in ["mean", "sum+ignore_some"] {
            cases.run(&format!("gradient_sum/{options}"), head, BASE, dtype, |problem, digest| {
                problem.gradient_sum(options, digest)
            });
        }
    }
    for (head, dtype) in [("softmax", DType::F32), ("mos3", DType::F32), ("mos3", DType::F64), ("mos2", DType::BF16)] {
        cases.run("chunk_losses", head, BASE, dtype, |problem, digest| problem.chunk_losses(digest));
    }
    for (components, dtype) in [(1, DType::F32), (3, DType::F32), (3, DType::F64), (2, DType::BF16)] {
        let name = format!("ranks/{components}");
        cases.run(&name, "softmax", BASE, dtype, |_, digest| outputs::ranks(components, dtype, digest));
    }
}

/// The lines of the cases.
struct Cases(Vec<String>);

impl Cases {
    /// One line.
    fn run(
        &mut self,
        name: &str,
        head: &str,
        sizes: Sizes,
        dtype: DType,
        case: impl FnOnce(&mut Problem, &mut Digest) -> Result<()>,
    ) {
        let (name, mut digest) = (format!("{name}/{head}/{}", dtype.as_str()), Digest::new());
        let done = Problem::new(head, sizes, dtype).and_then(|mut problem| case(&mut problem, &mut digest));
        done.unwrap_or_else(|error| panic!("{name}: {error}"));
        self.0.push(format!("{name} {:016x}\n", digest.0));
    }

    /// One line for each set of options.
    fn losses(&mut self, name: &str, head: &str, dtype: DType, options: &str) {
        for options in options.split(' ') {
            let name = format!("{name}/{options}");
            self.run(&name, head, BASE, dtype, |problem, digest| problem.losses(options, digest));
        }
    }
}
