//! Data parallelism: ranks with the same parameters and texts of their own compute the loss of all texts, and add up
//! their gradients.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;
use std::sync::{Arc, PoisonError};

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor, Var};
use candle_nn::VarMap;

use crate::backend::agreement::{agree, first_other, Agreed, Call};
use crate::backend::collectives::{Collectives, Numbers};
use crate::error::{Error, Result};
use crate::loss::{LossOptions, OutputShape, Positions, Reduction};
use crate::tensors::checks::accumulation_dtype;

/// Ranks with the same parameters and texts of their own, which compute the loss of all texts and its gradients.
///
/// Every rank computes the loss of its texts with [`DataParallel::options`], adds up the gradients of all ranks with
/// [`DataParallel::all_reduce`], and steps. Sums and counts are added up, not means: the step is that of a single
/// process with the texts of all ranks, however many targets each rank has. Dropout and sampling should differ between
/// ranks: give each rank another seed. If other ranks share the vocabulary, these are the ranks with the same rows
/// (`Mpi::split`).
///
/// # Examples
///
/// ```no_run
/// use std::sync::Arc;
/// use candle_core::Tensor;
/// use candle_nn::{AdamW, Optimizer, VarMap};
/// use mos_head::distributed::{Collectives, DataParallel};
/// use mos_head::{LossOptions, OutputLayer};
///
/// fn step(
///     ranks: Arc<dyn Collectives>,
///     head: &dyn OutputLayer,
///     vars: &VarMap,
///     optimizer: &mut AdamW,
///     (hidden, targets): (&Tensor, &Tensor), // for this rank's texts
/// ) -> mos_head::Result<()> {
///     let ranks = DataParallel::new(ranks);
///     let options = ranks.options(targets, &LossOptions::new().with_ignore_index(0))?;
///     let mut gradients = head.loss(hidden, targets, &options)?.backward()?;
///     ranks.all_reduce(&mut gradients, vars)?;
///     optimizer.step(&gradients)?;
///     Ok(())
/// }
/// ```
#[derive(Clone, Debug)]
pub struct DataParallel {
    collectives: Arc<dyn Collectives>,
}

/// The number of elements up to which smaller gradients are added up in one operation.
const BUCKET_SIZE: usize = 1 << 20;

/// The names of the variables, which ranks compare, as errors name them.
const NAMES: &str = "names of the variables";
/// The dtypes and shapes of the variables, which ranks compare, as errors name them.
const SHAPES: &str = "dtypes and shapes of the variables";

impl DataParallel {
    /// Makes the handle of these ranks, each of which has texts of its own.
    pub fn new(collectives: Arc<dyn Collectives>) -> Self {
        DataParallel { collectives }
    }

    /// Returns the ranks.
    pub fn collectives(&self) -> &Arc<dyn Collectives> {
        &self.collectives
    }

    /// Returns the options with the denominator of all ranks, which is the number of their targets, without ignored
    /// ones, or the sum of their weights: the values of all ranks then add up to the mean over all targets. Another
    /// reduction than the mean needs no denominator. Every rank calls it.
    ///
    /// # Shapes
    ///
    /// - targets: `[..]`, this rank's; u8, u32 or i64
    ///
    /// # Errors
    ///
    /// The errors that a loss has for targets and options; [`Error::Ranks`] if another rank has an error.
    pub fn options(&self, targets: &Tensor, options: &LossOptions) -> Result<LossOptions> {
        let count = self.count(targets, options);
        let own_count = Agreed::own("count", *count.as_ref().unwrap_or(&f64::NAN));
        let (_, exchanged) = agree(&*self.collectives, Call::Count, count, &[own_count])?;
        let count: f64 = exchanged[0].iter().sum();
        if options.positions.reduction != Reduction::Mean {
            return Ok(options.clone());
        }
        // If no rank has a target, the loss is zero, whatever divides it.
        let options = options.clone().with_denominator(if count == 0.0 { 1.0 } else { count });
        options.validate()?;
        Ok(options)
    }

    /// Computes the denominator of this rank's mean.
    fn count(&self, targets: &Tensor, options: &LossOptions) -> Result<f64> {
        options.validate()?;
        let class_weights = options.class_weights.as_ref();
        let vocab = class_weights.map_or(u32::MAX as usize, Tensor::elem_count);
        let shape = OutputShape { leading: targets.dims(), vocab, like: targets };
        let positions = Positions::new(shape, &options.positions, Some(targets), class_weights)?;
        Ok(positions.read_weights(&positions.read_ids(vocab)?)?.iter().sum())
    }

    /// Computes the sums over all ranks of some numbers, such as [`Loss::sum_and_count`](crate::Loss::sum_and_count).
    /// Every rank calls it with the same number of numbers.
    ///
    /// # Errors
    ///
    /// If the engine fails.
    pub fn sums<const N: usize>(&self, mut numbers: [f64; N]) -> Result<[f64; N]> {
        self.collectives.all_reduce_sum(Numbers::F64(&mut numbers))?;
        Ok(numbers)
    }

    /// Replaces the gradient of each variable of a map by the sum over all ranks. A gradient that is missing on some
    /// ranks counts as zero there; a variable that has a gradient on no rank still has none. Half precision is added up
    /// in f32. Every rank calls it with variables of the same names, dtypes and shapes.
    ///
    /// # Errors
    ///
    /// [`Error::Ranks`] if names, dtypes or shapes of variables differ between ranks (it names the first variable that
    /// does), or another rank has an error or makes another call; if a gradient does not have its variable's shape, or
    /// is not of floats; if the engine fails. Only the last error can come after a gradient has changed.
    pub fn all_reduce(&self, gradients: &mut GradStore, vars: &VarMap) -> Result<()> {
        let named: Vec<(String, Var)> = {
            let vars = vars.data().lock().unwrap_or_else(PoisonError::into_inner);
            vars.iter().map(|(name, var)| (name.clone(), var.clone())).collect()
        };
        self.all_reduce_named(gradients, &named)
    }

    /// Does the same as [`DataParallel::all_reduce`] for variables that are not in a [`VarMap`]. Ranks match them by
    /// their names, in whatever order they are; the gradient of a variable with several names is added up once.
    ///
    /// # Errors
    ///
    /// The errors of [`DataParallel::all_reduce`], or if two variables have the same name.
    pub fn all_reduce_named(&self, gradients: &mut GradStore, variables: &[(String, Var)]) -> Result<()> {
        let mut named: Vec<&(String, Var)> = variables.iter().collect();
        named.sort_by(|a, b| a.0.cmp(&b.0));
        let first_names = first_names(&named);
        let names: Vec<_> = named.iter().zip(first_names).map(|((name, _), first)| (name, first)).collect();
        let shapes: Vec<_> = named.iter().map(|(_, var)| (var.dtype().as_str(), var.dims())).collect();
        let numbers = [
            Agreed::equal("number of variables", named.len() as f64),
            Agreed::hashed(NAMES, |state| names.hash(state)),
            Agreed::hashed(SHAPES, |state| shapes.hash(state)),
        ];
        let agreed = agree(&*self.collectives, Call::Gradients, check_gradients(gradients, &named), &numbers);
        if let Err(Error::Ranks { argument: argument @ (NAMES | SHAPES), values, .. }) = agreed {
            // Every rank has this error, and the same number of variables.
            let variable_hash = |i: usize| match argument {
                NAMES => Agreed::hashed(argument, |state| names[i].hash(state)).value(),
                _ => Agreed::hashed(argument, |state| shapes[i].hash(state)).value(),
            };
            let hashes: Vec<f64> = (0..named.len()).map(variable_hash).collect();
            let first = first_other(&*self.collectives, &hashes)?;
            let element = first.map(|i| named[i].0.clone());
            return Err(Error::Ranks { argument, element, values });
        }
        agreed?;
        let mut seen = HashSet::new();
        let variables: Vec<&Var> = named.into_iter().map(|(_, var)| var).filter(|var| seen.insert(var.id())).collect();
        let mut ranks_with_gradient: Vec<f64> =
            variables.iter().map(|var| f64::from(u8::from(gradients.get(var).is_some()))).collect();
        self.collectives.all_reduce_sum(Numbers::F64(&mut ranks_with_gradient))?;
        let variables =
            variables.into_iter().zip(ranks_with_gradient).filter(|(_, ranks)| *ranks > 0.0).map(|(var, _)| var);

        let mut bucket: Vec<&Var> = Vec::new();
        for var in variables {
            let size: usize = bucket.iter().map(|var| var.elem_count()).sum();
            let is_other_dtype = match bucket.first() {
                Some(first) => accumulation(first)? != accumulation(var)?,
                None => false,
            };
            if !bucket.is_empty() && (is_other_dtype || size + var.elem_count() > BUCKET_SIZE) {
                self.all_reduce_bucket(gradients, &std::mem::take(&mut bucket))?;
            }
            bucket.push(var);
        }
        self.all_reduce_bucket(gradients, &bucket)
    }

    /// Adds up the gradients of some variables, which have one accumulation dtype, in one operation, on the device of
    /// the first.
    fn all_reduce_bucket(&self, gradients: &mut GradStore, variables: &[&Var]) -> Result<()> {
        let Some(first) = variables.first() else { return Ok(()) };
        let dtype = accumulation(first)?;
        let flat = |var: &&Var| match gradients.remove(var) {
            Some(gradient) => gradient.detach().flatten_all()?.to_dtype(dtype)?.to_device(first.device()),
            None => Tensor::zeros(var.elem_count(), dtype, first.device()),
        };
        let flat = variables.iter().map(flat).collect::<candle_core::Result<Vec<_>>>()?;
        let sums = match &flat[..] {
            [one] => self.collectives.all_reduce_sum_tensor(one)?,
            several => self.collectives.all_reduce_sum_tensor(&Tensor::cat(several, 0)?)?,
        };
        let mut start = 0;
        for var in variables {
            let sum = sums.narrow(0, start, var.elem_count())?.reshape(var.shape())?.to_dtype(var.dtype())?;
            gradients.insert(var, sum.to_device(var.device())?);
            start += var.elem_count();
        }
        Ok(())
    }
}

/// Returns, for each name, the first name of its variable: a tied variable has several names.
fn first_names<'a>(named: &[&'a (String, Var)]) -> Vec<&'a String> {
    let mut first = HashMap::new();
    named.iter().map(|(name, var)| *first.entry(var.id()).or_insert(name)).collect()
}

/// Checks that no name is given twice, and that each gradient can be added up. The errors name the variable.
fn check_gradients(gradients: &GradStore, named: &[&(String, Var)]) -> Result<()> {
    if let Some(pair) = named.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return Err(Error::config("variables", "a name of its own for each", format!("{} twice", pair[0].0)));
    }
    for (name, var) in named {
        let Some(gradient) = gradients.get(var) else { continue };
        if gradient.dims() != var.dims() {
            let expected = format!("a gradient of shape {:?} of {name}", var.dims());
            return Err(Error::config("gradients", expected, format!("{:?}", gradient.dims())));
        }
        if accumulation(var).is_err() || accumulation_dtype("gradients", gradient.dtype()).is_err() {
            let expected = format!("gradients in f16, bf16, f32 or f64 of {name}");
            return Err(Error::config("variables", expected, format!("{:?}, of {:?}", gradient.dtype(), var.dtype())));
        }
    }
    Ok(())
}

/// Returns the dtype in which gradients of a variable are added up.
fn accumulation(var: &Var) -> Result<DType> {
    accumulation_dtype("variables", var.dtype())
}
