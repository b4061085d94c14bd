//! Texts that are cut among ranks: a step is the one of a process with all texts.

#[path = "common/ranks.rs"]
mod ranks;
#[path = "common/texts.rs"]
mod texts;
#[path = "common/values.rs"]
mod values;

use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use mos_head::distributed::{Collectives, DataParallel};
use mos_head::{Error, LossOptions, OutputLayer, Reduction, Result};
use ranks::on_ranks;
use texts::{equal_one_process, head, HIDDEN};
use values::tensor;

#[test]
fn a_step_is_the_one_of_all_texts() {
    for ranks in 1..=4 {
        on_ranks(ranks, |ranks| equal_one_process(&ranks, None).expect("no error"));
    }
}

#[test]
fn a_variable_may_have_a_gradient_on_some_ranks_alone() -> Result<()> {
    let on_rank = |ranks: Arc<dyn Collectives>| -> Result<[Option<Vec<f32>>; 3]> {
        let vars = [1f32, 2.0, 3.0].map(|x| Var::new(&[x, x], &Device::Cpu));
        let vars = vars.into_iter().collect::<candle_core::Result<Vec<_>>>()?;
        // The first on all ranks, the second on one, the third on none.
        let loss = (vars[0].as_tensor() * (ranks.rank() + 1) as f64)?;
        let loss = if ranks.rank() == 1 { (loss + (vars[1].as_tensor() * 7.0)?)? } else { loss };
        let mut gradients = loss.sum_all()?.backward()?;
        let named: Vec<_> = ["first", "second", "third"].map(String::from).into_iter().zip(vars.clone()).collect();
        DataParallel::new(ranks).all_reduce_named(&mut gradients, &named)?;
        let gradient = |i: usize| gradients.get(&vars[i]).map(|gradient| gradient.to_vec1()).transpose();
        Ok([gradient(0)?, gradient(1)?, gradient(2)?])
    };
    for found in on_ranks(3, on_rank) {
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
    let on_rank = |ranks: Arc<dyn Collectives>| {
        let var = Var::zeros(2 + ranks.rank(), DType::F32, &Device::Cpu)?;
        let mut gradients = var.sum_all()?.backward()?;
        DataParallel::new(ranks).all_reduce_named(&mut gradients, &[("weight".into(), var)])
    };
    for result in on_ranks(2, on_rank) {
        assert!(
            matches!(result, Err(Error::Ranks { argument: "dtypes and shapes of the variables", .. })),
            "{result:?}"
        );
    }
    // A sum needs no denominator.
    for reduction in [Reduction::Sum, Reduction::None] {
        let options = LossOptions::new().with_reduction(reduction);
        for found in on_ranks(2, |ranks| {
            let targets = Tensor::ones(3, DType::U32, &Device::Cpu)?;
            let (head, _) = head(DType::F32)?;
            let options = DataParallel::new(ranks).options(&targets, &options)?;
            Ok::<_, Error>(head.loss(&tensor(&[3, HIDDEN], 1, DType::F32)?, &targets, &options)?.value.rank())
        }) {
            assert_eq!(found?, if reduction == Reduction::Sum { 0 } else { 1 });
        }
    }
    // Weights whose sum is no denominator: an error before any loss.
    let negative = LossOptions::new().with_position_weights(Tensor::full(-1f32, 3, &Device::Cpu)?);
    for found in
        on_ranks(2, |ranks| DataParallel::new(ranks).options(&Tensor::ones(3, DType::U32, &Device::Cpu)?, &negative))
    {
        assert!(matches!(found, Err(Error::Config { argument: "denominator", .. })), "{found:?}");
    }
    // One rank has an error of its own.
    let on_rank = |ranks: Arc<dyn Collectives>| {
        let targets = Tensor::ones(3, if ranks.rank() == 0 { DType::F32 } else { DType::U32 }, &Device::Cpu)?;
        DataParallel::new(ranks).options(&targets, &LossOptions::new().with_reduction(Reduction::Mean)).map(|_| ())
    };
    let found = on_ranks(2, on_rank);
    assert!(matches!(found[0], Err(Error::DType { argument: "targets", .. })), "{found:?}");
    assert!(matches!(found[1], Err(Error::Ranks { .. })), "{found:?}");
    Ok(())
}

type Named = Vec<(String, Var)>;

/// Eight variables of one shape: variable i has the gradient (i + 1) (rank + 1).
fn alike(ranks: &Arc<dyn Collectives>) -> Result<(VarMap, Named, GradStore)> {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F64, &Device::Cpu);
    let (mut named, mut sum) = (Vec::new(), Tensor::zeros((), DType::F64, &Device::Cpu)?);
    for i in 0..8 {
        let name = format!("layer.{i}.norm.weight");
        let norm = vb.get_with_hints(4, &name, candle_nn::init::ONE)?;
        sum = (sum + (norm.sum_all()? * ((i + 1) * (ranks.rank() + 1)) as f64)?)?;
        let var = vars.data().lock().expect("no panic")[&name].clone();
        named.push((name, var));
    }
    Ok((vars, named, sum.backward()?))
}

#[test]
fn variables_of_one_shape_are_added_up_by_their_names() -> Result<()> {
    // The order of a map's variables differs from map to map.
    let reduce_map = |ranks: Arc<dyn Collectives>| -> Result<Vec<f64>> {
        let (vars, named, mut gradients) = alike(&ranks)?;
        DataParallel::new(ranks).all_reduce(&mut gradients, &vars)?;
        named.iter().map(|(_, var)| Ok(gradients.get(var).expect("a gradient").to_vec1::<f64>()?[0])).collect()
    };
    let reduce_list = |ranks: Arc<dyn Collectives>| -> Result<Vec<f64>> {
        let (_, named, mut gradients) = alike(&ranks)?;
        let mut listed = named.clone();
        listed.rotate_left(3 * ranks.rank());
        DataParallel::new(ranks).all_reduce_named(&mut gradients, &listed)?;
        named.iter().map(|(_, var)| Ok(gradients.get(var).expect("a gradient").to_vec1::<f64>()?[0])).collect()
    };
    let expected: Vec<f64> = (1..=8).map(|i| f64::from(3 * i)).collect();
    for found in on_ranks(2, reduce_map).into_iter().chain(on_ranks(2, reduce_list)) {
        assert_eq!(found?, expected);
    }
    Ok(())
}

#[test]
fn variables_of_other_names_are_an_error() {
    let on_rank = |ranks: Arc<dyn Collectives>| {
        let (_, mut named, mut gradients) = alike(&ranks)?;
        named[5].0 = format!("layer.5.of.{}", ranks.rank());
        DataParallel::new(ranks).all_reduce_named(&mut gradients, &named)
    };
    for found in on_ranks(2, on_rank) {
        assert!(matches!(found, Err(Error::Ranks { argument: "names of the variables", .. })), "{found:?}");
        let message = found.unwrap_err().to_string();
        assert!(message.starts_with("names of the variables, first at layer.5.of."), "{message}");
    }
    let on_rank = |ranks: Arc<dyn Collectives>| {
        let (_, mut named, mut gradients) = alike(&ranks)?;
        if ranks.rank() == 1 {
            let var = Var::zeros((2, 2), DType::F64, &Device::Cpu)?;
            gradients.insert(&var, var.zeros_like()?);
            named[3].1 = var;
        }
        DataParallel::new(ranks).all_reduce_named(&mut gradients, &named)
    };
    for found in on_ranks(2, on_rank) {
        let message = found.unwrap_err().to_string();
        assert!(message.starts_with("dtypes and shapes of the variables, first at layer.3.norm.weight: "), "{message}");
    }
    let on_rank = |ranks: Arc<dyn Collectives>| {
        let (_, mut named, mut gradients) = alike(&ranks)?;
        named.truncate(8 - ranks.rank());
        DataParallel::new(ranks).all_reduce_named(&mut gradients, &named)
    };
    for found in on_ranks(2, on_rank) {
        assert!(matches!(found, Err(Error::Ranks { argument: "number of variables", .. })), "{found:?}");
    }
}

#[test]
fn a_tied_variable_is_added_up_once_and_other_ties_are_an_error() -> Result<()> {
    let on_rank = |ranks: Arc<dyn Collectives>| -> Result<f64> {
        let (_, mut named, mut gradients) = alike(&ranks)?;
        let tied = named[2].1.clone();
        named.push(("tied.weight".into(), tied.clone()));
        DataParallel::new(ranks).all_reduce_named(&mut gradients, &named)?;
        Ok(gradients.get(&tied).expect("a gradient").to_vec1::<f64>()?[0])
    };
    for found in on_ranks(2, on_rank) {
        assert_eq!(found?, 9.0);
    }
    let on_rank = |ranks: Arc<dyn Collectives>| {
        let (_, mut named, mut gradients) = alike(&ranks)?;
        named.push(("tied.weight".into(), named[ranks.rank()].1.clone()));
        DataParallel::new(ranks).all_reduce_named(&mut gradients, &named)
    };
    for found in on_ranks(2, on_rank) {
        assert!(matches!(found, Err(Error::Ranks { argument: "names of the variables", .. })), "{found:?}");
    }
    Ok(())
}

#[test]
fn a_name_that_is_given_twice_or_a_gradient_of_another_shape_is_named() {
    let message = |at_fault: fn(&mut Named, &mut GradStore) -> Result<()>| {
        on_ranks(2, |ranks| {
            let (_, mut named, mut gradients) = alike(&ranks).expect("variables");
            if ranks.rank() == 1 {
                at_fault(&mut named, &mut gradients).expect("a fault");
            }
            DataParallel::new(ranks).all_reduce_named(&mut gradients, &named).map_err(|error| error.to_string())
        })
    };
    let found = message(|named, _| {
        named[6].0 = named[1].0.clone();
        Ok(())
    });
    assert!(found[0].as_ref().is_err_and(|message| message.contains("every rank")), "{found:?}");
    assert!(found[1].as_ref().is_err_and(|message| message.contains("layer.1.norm.weight twice")), "{found:?}");
    let found = message(|named, gradients| {
        gradients.insert(&named[4].1, Tensor::zeros((2, 2), DType::F64, &Device::Cpu)?);
        Ok(())
    });
    assert!(found[0].as_ref().is_err_and(|message| message.contains("every rank")), "{found:?}");
    assert!(found[1].as_ref().is_err_and(|message| message.contains("layer.4.norm.weight")), "{found:?}");
}
