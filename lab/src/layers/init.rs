//! Seeded initial values: candle's CPU generator takes no seed, so every variable is drawn again here.

use crate::Result;
use candle_core::{Tensor, Var};
use candle_nn::VarMap;
use rand::{rngs::StdRng, Rng, SeedableRng};

/// Sets every variable to U(-bound, bound) in the order of the names; `bound(name)` 0 gives zeros.
pub fn uniform(varmap: &VarMap, seed: u64, bound: impl Fn(&str) -> f64) -> Result<()> {
    let mut rng = StdRng::seed_from_u64(seed);
    sorted(varmap).iter().try_for_each(|(name, var)| draw(var, bound(name), &mut rng))
}

/// Sets a variable to U(-bound, bound): values that depend on the seed and on its name alone.
pub fn uniform_by_name(var: &Var, seed: u64, name: &str, bound: f64) -> Result<()> {
    // FNV-1a, which is the same in every version of Rust.
    let seed = name.bytes().fold(seed, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    draw(var, bound, &mut StdRng::seed_from_u64(seed))
}

fn draw(var: &Var, bound: f64, rng: &mut StdRng) -> Result<()> {
    let bound = bound as f32;
    let values: Vec<f32> = (0..var.elem_count()).map(|_| bound * (2.0 * rng.random::<f32>() - 1.0)).collect();
    let values = Tensor::from_vec(values, var.shape(), var.device())?;
    Ok(var.set(&values.to_dtype(var.dtype())?)?)
}

/// Sets the variables of these names to ones.
pub fn ones(varmap: &VarMap, is_one: impl Fn(&str) -> bool) -> Result<()> {
    for (_, var) in sorted(varmap).into_iter().filter(|(name, _)| is_one(name)) {
        var.set(&var.ones_like()?)?;
    }
    Ok(())
}

/// Returns the variables in the order of their names, so that nothing depends on a hash map's order.
pub fn sorted(varmap: &VarMap) -> Vec<(String, Var)> {
    let data = varmap.data().lock().expect("no thread panicked while it held the variables");
    let mut vars: Vec<_> = data.iter().map(|(name, var)| (name.clone(), var.clone())).collect();
    vars.sort_by(|a, b| a.0.cmp(&b.0));
    vars
}
