//! Texts that are cut among ranks: a step is the one of a process with all texts.

#[path = "common/ranks.rs"]
mod ranks;
#[path = "common/values.rs"]
mod values;

use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use mos_head::{
    Collectives, DataParallel, Error, LossOptions, MixtureConfig, MixtureOfSoftmaxes, OutputLayer, Reduction, Result,
};
use ranks::on_ranks;
use values::tensor;

const POSITIONS: usize = 29;
const HIDDEN: usize = 6;
const VOCAB: usize = 40;

/// A head, and its variables by name, which are the same on every rank.
fn head(dtype: DType) -> Result<(MixtureOfSoftmaxes, Vec<Var>)> {
    let map = VarMap::new();
    let vb = VarBuilder::from_varmap(&map, dtype, &Device::Cpu);
    let head = MixtureOfSoftmaxes::new(&MixtureConfig::new(HIDDEN, VOCAB, 3), vb)?;
    let mut named: Vec<_> = map.data().lock().expect("no panic").clone().into_iter().collect();
    named.sort_by(|a, b| a.0.cmp(&b.0));
    for (i, (_, var)) in named.iter().enumerate() {
        var.set(&tensor(var.dims(), i, dtype)?)?;
    }
    Ok((head, named.into_iter().map(|(_, var)| var).collect()))
}

fn numbers(gradients: &GradStore, vars: &[Var]) -> Result<Vec<f64>> {
    let of = |var: &Var| gradients.get(var).expect("a gradient").flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>();
    Ok(vars.iter().map(of).collect::<candle_core::Result<Vec<_>>>()?.concat())
}

#[test]
fn a_step_is_the_one_of_all_texts() -> Result<()> {
    let of_ids = tensor(&[VOCAB], 4, DType::F32)?.abs()?;
    let of_positions = tensor(&[POSITIONS], 5, DType::F32)?.abs()?;
    let ids = (0..POSITIONS).map(|t| (t * 11 % VOCAB) as u32);
    let targets = Tensor::from_iter(ids, &Device::Cpu)?;
    for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 1e-5), (DType::BF16, 3e-2)] {
        let hidden = tensor(&[POSITIONS, HIDDEN], 9, dtype)?;
        for (ignored, weighted) in [(99, false), (33, true), (0, false)] {
            let options = |of_rank: &Tensor| {
                let options = LossOptions::new().with_ignore_index(ignored);
                match weighted {
                    true => options.with_class_weights(of_ids.clone()).with_position_weights(of_rank.clone()),
                    false => options,
                }
            };
            let (whole, vars) = head(dtype)?;
            let expected = whole.loss(&hidden, &targets, &options(&of_positions))?;
            let expected_gradients = numbers(&expected.backward()?, &vars)?;
            let expected = expected.value.to_dtype(DType::F64)?.to_scalar::<f64>()?;
            for ranks in 1..=4 {
                let of_rank = |ranks: Arc<dyn Collectives>| -> Result<(f64, Vec<f64>)> {
                    // The last has most targets.
                    let (start, end) = match (ranks.rank() * 3, ranks.rank() + 1 == ranks.ranks()) {
                        (start, true) => (start, POSITIONS),
                        (start, false) => (start, start + 3),
                    };
                    let rows = |whole: &Tensor| whole.narrow(0, start, end - start);
                    let (head, vars) = head(dtype)?;
                    let ranks = DataParallel::new(ranks);
                    let options = ranks.options(&rows(&targets)?, &options(&rows(&of_positions)?))?;
                    let loss = head.loss(&rows(&hidden)?, &rows(&targets)?, &options)?;
                    let mut gradients = loss.backward()?;
                    ranks.all_reduce(&mut gradients, &vars)?;
                    let [value] = ranks.sums([loss.value.to_dtype(DType::F64)?.to_scalar::<f64>()?])?;
                    Ok((value, numbers(&gradients, &vars)?))
                };
                let found = on_ranks(ranks, of_rank).into_iter().collect::<Result<Vec<_>>>()?;
                assert!(found.iter().all(|of_rank| *of_rank == found[0]), "the same bits");
                let (value, gradients) = &found[0];
                assert!((value - expected).abs() <= tolerance * expected.abs(), "{value} {expected}");
                let largest = expected_gradients.iter().fold(0f64, |largest, x| largest.max(x.abs()));
                for (found, expected) in gradients.iter().zip(&expected_gradients) {
                    assert!((found - expected).abs() <= tolerance * largest, "{dtype:?} {found} {expected}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn a_variable_may_have_a_gradient_on_some_ranks_alone() -> Result<()> {
    let of_rank = |ranks: Arc<dyn Collectives>| -> Result<[Option<Vec<f32>>; 3]> {
        let vars = [1f32, 2.0, 3.0].map(|x| Var::new(&[x, x], &Device::Cpu));
        let vars = vars.into_iter().collect::<candle_core::Result<Vec<_>>>()?;
        // The first on all ranks, the second on one, the third on none.
        let loss = (vars[0].as_tensor() * (ranks.rank() + 1) as f64)?;
        let loss = if ranks.rank() == 1 { (loss + (vars[1].as_tensor() * 7.0)?)? } else { loss };
        let mut gradients = loss.sum_all()?.backward()?;
        DataParallel::new(ranks).all_reduce(&mut gradients, &vars)?;
        let of = |i: usize| gradients.get(&vars[i]).map(|gradient| gradient.to_vec1()).transpose();
        Ok([of(0)?, of(1)?, of(2)?])
    };
    for found in on_ranks(3, of_rank) {
        assert_eq!(found?, [Some(vec![6.0, 6.0]), Some(vec![7.0, 7.0]), None]);
    }
    Ok(())
}

#[test]
fn no_targets_are_a_loss_of_zero_and_other_variables_an_error() -> Result<()> {
    let options = LossOptions::new().with_ignore_index(1);
    for found in on_ranks(2, |ranks| {
        let targets = Tensor::ones(3, DType::U32, &Device::Cpu)?;
        let (head, _) = head(DType::F32)?;
        let ranks = DataParallel::new(ranks);
        let options = ranks.options(&targets, &options)?;
        Ok::<_, Error>(head.loss(&tensor(&[3, HIDDEN], 1, DType::F32)?, &targets, &options)?.value.to_scalar::<f32>()?)
    }) {
        assert_eq!(found?, 0.0);
    }
    let of_rank = |ranks: Arc<dyn Collectives>| {
        let var = Var::zeros(2 + ranks.rank(), DType::F32, &Device::Cpu)?;
        let mut gradients = var.sum_all()?.backward()?;
        DataParallel::new(ranks).all_reduce(&mut gradients, &[var])
    };
    for result in on_ranks(2, of_rank) {
        assert!(
            matches!(result, Err(Error::Ranks { argument: "dtypes and shapes of the variables", .. })),
            "{result:?}"
        );
    }
    // One rank has an error of its own.
    let of_rank = |ranks: Arc<dyn Collectives>| {
        let targets = Tensor::ones(3, if ranks.rank() == 0 { DType::F32 } else { DType::U32 }, &Device::Cpu)?;
        DataParallel::new(ranks).options(&targets, &LossOptions::new().with_reduction(Reduction::Mean)).map(|_| ())
    };
    let found = on_ranks(2, of_rank);
    assert!(matches!(found[0], Err(Error::DType { argument: "targets", .. })), "{found:?}");
    assert!(matches!(found[1], Err(Error::Ranks { .. })), "{found:?}");
    Ok(())
}
