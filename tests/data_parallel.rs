//! Texts that are cut among ranks: a step is the one of a process with all texts.

#[path = "common/ranks.rs"]
mod ranks;
#[path = "common/texts.rs"]
mod texts;
#[path = "common/values.rs"]
mod values;

use std::sync::Arc;

use candle_core::{DType, Device, Tensor, Var};
use mos_head::{Collectives, DataParallel, Error, LossOptions, OutputLayer, Reduction, Result};
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
