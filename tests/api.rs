//! Guarantees of the types: one object-safe trait for all heads, `Send` and `Sync`, conversions of errors.

use std::fmt::{Debug, Display};

use candle_core::{DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap};
use mos_head::two_level::{AdaptiveSoftmax, HierarchicalSoftmax};
use mos_head::{
    ContextActivation, Error, Loss, LossOptions, Mixture, MixtureConfig, MixtureLayer, MixtureOfContexts,
    MixtureOfSoftmaxes, OutputLayer, Plan, Reduction, Result, SoftmaxConfig, SoftmaxHead,
};

fn is_shareable<T: Send + Sync + 'static>() {}
fn is_a_head<T: OutputLayer + Clone + Debug>() {}

#[test]
fn heads_options_and_results_are_shared_between_threads() {
    is_shareable::<SoftmaxHead>();
    is_shareable::<MixtureOfContexts>();
    is_shareable::<MixtureOfSoftmaxes>();
    is_shareable::<AdaptiveSoftmax>();
    is_shareable::<HierarchicalSoftmax>();
    is_shareable::<Mixture>();
    is_shareable::<LossOptions>();
    is_shareable::<Loss>();
    is_shareable::<Plan>();
    is_shareable::<Error>();
    is_shareable::<Box<dyn OutputLayer>>();
}

#[test]
fn heads_can_be_cloned_and_printed() {
    is_a_head::<SoftmaxHead>();
    is_a_head::<MixtureOfContexts>();
    is_a_head::<MixtureOfSoftmaxes>();
    is_a_head::<AdaptiveSoftmax>();
    is_a_head::<HierarchicalSoftmax>();
}

#[test]
fn an_error_converts_to_any_error_and_through_candle() {
    fn through_candle() -> candle_core::Result<SoftmaxHead> {
        let weight = Tensor::zeros(3, DType::F32, &Device::Cpu)?;
        Ok(SoftmaxHead::from_tensors(weight, None)?)
    }
    fn through_anything() -> std::result::Result<SoftmaxHead, Box<dyn std::error::Error + Send + Sync>> {
        Ok(through_candle()?)
    }
    let message = through_anything().expect_err("a vector is no decoder").to_string();
    assert!(message.contains("decoder.weight"), "{message}");
    let candle = Error::from(candle_core::Error::Msg("from candle".into()));
    assert!(matches!(&candle, Error::Candle(_)));
    assert_eq!(candle_core::Error::from(candle).to_string(), "from candle");
}

#[test]
fn a_boxed_head_is_chosen_at_run_time_and_used_from_several_threads() -> Result<()> {
    let variables = VarMap::new();
    let vb = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
    let mixture = MixtureConfig::new(6, 10, 2).with_context_dim(4);
    let heads: Vec<Box<dyn MixtureLayer>> = vec![
        Box::new(SoftmaxHead::new(&SoftmaxConfig::new(6, 10), vb.pp("softmax"))?),
        Box::new(MixtureOfContexts::new(&mixture, vb.pp("moc"))?),
        Box::new(MixtureOfSoftmaxes::new(&mixture, vb.pp("mos"))?),
    ];
    let components: Vec<usize> = heads.iter().map(|head| head.components()).collect();
    assert_eq!(components, [1, 1, 2], "a mixture of contexts is one softmax");
    let hidden = Tensor::rand(-1_f32, 1.0, (3, 6), &Device::Cpu)?;
    let targets = Tensor::new(&[0_u32, 9, 4], &Device::Cpu)?;
    std::thread::scope(|scope| {
        for head in &heads {
            for _ in 0..2 {
                scope.spawn(|| {
                    let loss = head.loss(&hidden, &targets, &LossOptions::new());
                    loss.and_then(|loss| loss.backward()).expect("a loss and its gradients");
                });
            }
        }
    });
    Ok(())
}

#[test]
fn defaults_are_those_of_a_training_step_and_of_the_paper() {
    assert_eq!(Reduction::default(), Reduction::Mean);
    assert_eq!(ContextActivation::default(), ContextActivation::Tanh);
    let config = MixtureConfig::new(4, 10, 2).with_context_dim(3);
    assert_eq!((config.hidden_size, config.context_dim, config.vocab_size, config.components), (4, 3, 10, 2));
    assert!(config.decoder_bias && !config.prior_bias);
    assert_eq!((config.activation, config.dropout), (ContextActivation::Tanh, 0.0));
    assert!(SoftmaxConfig::new(4, 10).decoder_bias);
}

#[test]
fn a_plan_keeps_to_the_budget_and_can_be_printed() -> Result<()> {
    fn shown(plan: impl Display + Debug) -> String {
        plan.to_string()
    }
    let variables = VarMap::new();
    let vb = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
    let head = MixtureOfSoftmaxes::new(&MixtureConfig::new(16, 1000, 4).with_context_dim(8), vb)?;
    let hidden = Tensor::zeros((5, 40, 16), DType::F32, &Device::Cpu)?;
    let whole = head.plan(&hidden, &LossOptions::new())?;
    assert_eq!((whole.positions, whole.positions_per_chunk, whole.rows_per_chunk), (200, 200, 800));
    let least = match head.plan(&hidden, &LossOptions::new().with_workspace_bytes(0)) {
        Err(Error::Workspace { least, .. }) => least,
        other => panic!("expected a workspace of 0 bytes to be refused, got {other:?}"),
    };
    let budget = least + least / 2;
    let cut = head.plan(&hidden, &LossOptions::new().with_workspace_bytes(budget))?;
    assert!(cut.positions_per_chunk < 200 && cut.rows_per_chunk == 4 * cut.positions_per_chunk, "{cut:?}");
    assert!(cut.workspace_bytes <= budget && cut.budget_bytes == budget, "{cut:?}");
    assert!(shown(&cut).contains("200 positions"), "{cut}");
    Ok(())
}

#[test]
fn the_default_budget_is_32_mib_or_480_rows_of_logits() -> Result<()> {
    let plan = |vocab: usize, positions: usize| {
        let variables = VarMap::new();
        let vb = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
        let head = MixtureOfSoftmaxes::new(&MixtureConfig::new(4, vocab, 4).with_context_dim(4), vb)?;
        head.plan(&Tensor::zeros((positions, 4), DType::F32, &Device::Cpu)?, &LossOptions::new())
    };
    let budget = plan(100, 1000)?.budget_bytes;
    assert!((32 << 20..40 << 20).contains(&budget), "{budget}");
    assert_eq!(plan(100_000, 120)?.rows_per_chunk, 480);
    // One more position makes two chunks, of 61 and 60.
    assert_eq!(plan(100_000, 121)?.positions_per_chunk, 61);
    Ok(())
}
