//! One call of each kind, from the public method to its result. `scripts/walks.sh` counts the files of `src` that each
//! call visits, for docs/ARCHITECTURE.md. With `MOS_HEAD_WALK=setup` a test ends before the call.

use candle_core::{Device, Tensor, Var};
use mos_head::decode::{Sampling, TokenRequest};
use mos_head::distill::{DistillOptions, Divergence, Teacher};
use mos_head::sampled::NoiseDistribution;
use mos_head::{LossOptions, OutputLayer, Result, SoftmaxHead};

/// A head of 40 ids, and hidden states of 12 positions.
struct Walk {
    head: SoftmaxHead,
    hidden: Var,
    targets: Tensor,
}

impl Walk {
    /// Makes the head; `None` if the test is to end here.
    fn new() -> Result<Option<Self>> {
        let numbers = |rows: usize, factor: f32| -> Result<Var> {
            let values = (0..rows * 8).map(|i| (i as f32 * factor).sin()).collect();
            Ok(Var::from_tensor(&Tensor::from_vec(values, (rows, 8), &Device::Cpu)?)?)
        };
        let (weight, hidden) = (numbers(40, 0.7)?, numbers(12, 1.3)?);
        let head = SoftmaxHead::from_tensors(weight.as_tensor().clone(), None)?;
        let targets = Tensor::from_vec((0..12u32).map(|i| i * 3).collect(), 12, &Device::Cpu)?;
        let is_setup = std::env::var("MOS_HEAD_WALK").is_ok_and(|walk| walk == "setup");
        Ok((!is_setup).then_some(Walk { head, hidden, targets }))
    }
}

#[test]
fn loss_and_gradient() -> Result<()> {
    let Some(Walk { head, hidden, targets }) = Walk::new()? else { return Ok(()) };
    let loss = head.loss(&hidden, &targets, &LossOptions::default())?;
    assert_eq!(loss.backward()?.get(&hidden).expect("a gradient").dims(), [12, 8]);
    Ok(())
}

#[test]
fn token_request() -> Result<()> {
    let Some(Walk { head, hidden, .. }) = Walk::new()? else { return Ok(()) };
    let request = TokenRequest::new(Sampling::new().with_top_p(0.9), 1)?;
    let next = head.next_tokens(&hidden.narrow(0, 0, 1)?, &[&request])?;
    assert!(next[0].token_id < 40 && next[0].log_prob < 0.0);
    Ok(())
}

#[test]
fn sampled_loss() -> Result<()> {
    let Some(Walk { head, hidden, targets }) = Walk::new()? else { return Ok(()) };
    let negatives = NoiseDistribution::log_uniform(40)?.draw(8, 1)?;
    let loss = head.loss(&hidden, &targets, &LossOptions::new().with_sampled_softmax(negatives))?;
    assert_eq!(loss.backward()?.get(&hidden).expect("a gradient").dims(), [12, 8]);
    Ok(())
}

#[test]
fn teacher() -> Result<()> {
    let Some(Walk { head, hidden, .. }) = Walk::new()? else { return Ok(()) };
    let log_probs = candle_nn::ops::log_softmax(&Tensor::zeros_like(&head.log_probs(&hidden)?)?, 1)?;
    let options = DistillOptions::new(Divergence::ForwardKl);
    let loss = head.distill(&hidden, &Teacher::from_log_probs(&log_probs), &options)?;
    assert_eq!(loss.backward()?.get(&hidden).expect("a gradient").dims(), [12, 8]);
    Ok(())
}

#[cfg(feature = "distributed")]
#[test]
fn shard_loss() -> Result<()> {
    use std::sync::Arc;

    use mos_head::distributed::{Collectives, VocabParallel, VocabShard};

    /// The only rank, which receives what it sends.
    #[derive(Debug)]
    struct Alone;

    impl Collectives for Alone {
        fn rank(&self) -> usize {
            0
        }
        fn ranks(&self) -> usize {
            1
        }
        fn all_gather(&self, values: &[f64]) -> Result<Vec<f64>> {
            Ok(values.to_vec())
        }
        fn all_reduce_sum(&self, _: mos_head::distributed::Numbers) -> Result<()> {
            Ok(())
        }
        fn broadcast(&self, _: mos_head::distributed::Numbers, _: usize) -> Result<()> {
            Ok(())
        }
    }

    let Some(Walk { head, hidden, targets }) = Walk::new()? else { return Ok(()) };
    let head = VocabParallel::new(head, VocabShard::new(Arc::new(Alone), 40)?)?;
    let loss = head.loss(&hidden, &targets, &LossOptions::default())?;
    assert_eq!(loss.backward()?.get(&hidden).expect("a gradient").dims(), [12, 8]);
    Ok(())
}
