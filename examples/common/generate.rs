//! Text sampled from a language model, token by token.

use super::language_model::LanguageModel;
use super::Result;
use candle_core::Tensor;
use rand::{rngs::StdRng, Rng, SeedableRng};
/// `count` tokens after `start`, drawn from the model's distribution.
pub(crate) fn generate(model: &LanguageModel, start: u32, count: usize, seed: u64) -> Result<Vec<u32>> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut states = model.start(1)?;
    let mut token = start;
    let mut text = Vec::with_capacity(count);
    for _ in 0..count {
        let input = Tensor::new(&[[token]], model.device())?;
        let hidden = model.hidden(&input, &mut states, None)?;
        let log_probs = model.head().log_probs(&hidden)?.flatten_all()?.to_vec1::<f32>()?;
        token = draw(&log_probs, rng.random());
        text.push(token);
    }
    Ok(text)
}

/// The token in which the cumulative probability passes `u`.
fn draw(log_probs: &[f32], u: f64) -> u32 {
    let mut left = u;
    for (token, log_prob) in log_probs.iter().enumerate() {
        left -= f64::from(*log_prob).exp();
        if left < 0.0 {
            return token as u32;
        }
    }
    log_probs.len() as u32 - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_draw_follows_the_distribution() {
        let log_probs = [0.5f32.ln(), f32::NEG_INFINITY, 0.25f32.ln(), 0.25f32.ln()];
        let drawn: Vec<u32> = [0.0, 0.49, 0.51, 0.74, 0.76, 0.999_999].map(|u| draw(&log_probs, u)).to_vec();
        assert_eq!(drawn, [0, 0, 2, 2, 3, 3]);
    }
}
