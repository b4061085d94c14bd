//! The options of a loss as plain numbers: the one description for the reference, the composed form and the library's
//! `LossOptions`.

use candle_core::{Device, Result, Tensor};
use mos_head::{LossOptions, Reduction};

use super::on;

/// `l_t = tau_t (sum_v q_v (-log p(v)) + alpha mean_k lse_k^2)`, `q_v = c_v ((1 - eps) [v = y] + eps / V)`.
#[derive(Clone, Debug)]
pub struct Objective {
    pub reduction: Reduction,
    pub ignore_index: Option<i64>,
    pub position_weights: Option<Vec<f64>>,
    pub class_weights: Option<Vec<f64>>,
    pub label_smoothing: f64,
    pub z_loss: f64,
}

impl Default for Objective {
    fn default() -> Self {
        Self {
            reduction: Reduction::Mean,
            ignore_index: None,
            position_weights: None,
            class_weights: None,
            label_smoothing: 0.0,
            z_loss: 0.0,
        }
    }
}

impl Objective {
    /// Only the reduction differs from the default.
    pub fn reduced(reduction: Reduction) -> Self {
        Self { reduction, ..Self::default() }
    }

    /// The weight of a position before class weights: 0 if its target is ignored.
    pub fn position_weight(&self, position: usize, target: i64) -> f64 {
        if self.ignore_index == Some(target) {
            return 0.0;
        }
        self.position_weights.as_ref().map_or(1.0, |w| w[position])
    }

    /// The weight of the id `v`.
    pub fn class_weight(&self, v: usize) -> f64 {
        self.class_weights.as_ref().map_or(1.0, |w| w[v])
    }

    /// `q_v` for target `y` among `vocab` ids.
    pub fn target_mass(&self, v: usize, y: usize, vocab: usize) -> f64 {
        let hit = if v == y { 1.0 - self.label_smoothing } else { 0.0 };
        self.class_weight(v) * (hit + self.label_smoothing / vocab as f64)
    }

    /// The library's options for this objective; `lead` is the shape of the targets.
    pub fn options(&self, lead: &[usize], device: &Device) -> Result<LossOptions> {
        self.apply(LossOptions::new(), lead, device)
    }

    /// `options` with those of this objective.
    pub fn apply(&self, options: LossOptions, lead: &[usize], device: &Device) -> Result<LossOptions> {
        let mut options = options.with_reduction(self.reduction);
        if let Some(index) = self.ignore_index {
            options = options.with_ignore_index(index);
        }
        if let Some(weights) = &self.position_weights {
            options = options.with_position_weights(single(weights, lead, device)?);
        }
        if let Some(weights) = &self.class_weights {
            options = options.with_class_weights(single(weights, &[weights.len()], device)?);
        }
        if self.label_smoothing != 0.0 {
            options = options.with_label_smoothing(self.label_smoothing);
        }
        if self.z_loss != 0.0 {
            options = options.with_z_loss(self.z_loss);
        }
        Ok(options)
    }
}

fn single(values: &[f64], shape: &[usize], device: &Device) -> Result<Tensor> {
    let values: Vec<f32> = values.iter().map(|&x| x as f32).collect();
    on(device, &Tensor::from_vec(values, shape, &Device::Cpu)?)
}
