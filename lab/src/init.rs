//! Seeded initial values: candle's CPU generator takes no seed, so every variable is drawn again here.

use super::Result;
use candle_core::Tensor;
use candle_nn::VarMap;
use rand::{rngs::StdRng, Rng, SeedableRng};

/// Sets every variable to U(-bound, bound) in the order of the names; `bound(name)` 0 gives zeros.
pub fn uniform(varmap: &VarMap, seed: u64, bound: impl Fn(&str) -> f64) -> Result<()> {
    let mut rng = StdRng::seed_from_u64(seed);
    for (name, var) in sorted(varmap) {
        let bound = bound(&name) as f32;
        let values: Vec<f32> = (0..var.elem_count()).map(|_| bound * (2.0 * rng.random::<f32>() - 1.0)).collect();
        let values = Tensor::from_vec(values, var.shape(), var.device())?;
        var.set(&values.to_dtype(var.dtype())?)?;
    }
    Ok(())
}

/// Sets the variables of these names to ones.
pub fn ones(varmap: &VarMap, is_one: impl Fn(&str) -> bool) -> Result<()> {
    for (_, var) in sorted(varmap).into_iter().filter(|(name, _)| is_one(name)) {
        var.set(&var.ones_like()?)?;
    }
    Ok(())
}

/// The variables in the order of their names, so that nothing depends on a hash map's order.
pub fn sorted(varmap: &VarMap) -> Vec<(String, candle_core::Var)> {
    let data = varmap.data().lock().expect("no thread panicked while it held the variables");
    let mut vars: Vec<_> = data.iter().map(|(name, var)| (name.clone(), var.clone())).collect();
    vars.sort_by(|a, b| a.0.cmp(&b.0));
    vars
}
