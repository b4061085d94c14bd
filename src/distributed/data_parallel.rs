//! Texts that are cut among the ranks of a distributed program.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;
use std::sync::{Arc, PoisonError};

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor, Var};
use candle_nn::VarMap;

use crate::backend::agreement::{agree, first_other, Agreed, Call};
use crate::backend::collectives::{Collectives, Numbers};
use crate::backend::operands::accumulation_dtype;
use crate::error::{Error, Result};
use crate::loss::{LossOptions, Request};

/// Ranks with the same parameters and texts of their own: the loss of all texts, and its gradients.
///
/// Every rank computes the loss of its texts with [`DataParallel::options`], adds up the gradients of all ranks with
/// [`DataParallel::all_reduce`], and steps. Sum and count are added up, not means: the step is the one of a single process
/// with the texts of all ranks, however many targets each has. Dropout and sampling should differ between ranks: give each
/// another seed. If other ranks share the vocabulary, these are the ranks with the same rows (`Mpi::split`).
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
///     (hidden, targets): (&Tensor, &Tensor), // of this rank's texts
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

/// Numbers that are added up at a time, of variables that are smaller.
const BUCKET: usize = 1 << 20;

/// What ranks compare of their variables, by the names that errors have for it.
const NAMES: &str = "names of the variables";
const SHAPES: &str = "dtypes and shapes of the variables";

impl DataParallel {
    /// Every rank has texts of its own.
    pub fn new(collectives: Arc<dyn Collectives>) -> Self {
        DataParallel { collectives }
    }

    /// The ranks.
    pub fn collectives(&self) -> &Arc<dyn Collectives> {
        &self.collectives
    }

    /// The options with the denominator of all ranks: the number of their targets, without ignored ones, or the sum of
    /// their weights. The values of all ranks add up to the mean over all targets. Every rank calls it.
    ///
    /// # Shapes
    ///
    /// - targets: `[..]`, of this rank; u8, u32 or i64
    ///
    /// # Errors
    ///
    /// As for the targets and options of a loss; [`Error::Ranks`] if another rank has an error.
    pub fn options(&self, targets: &Tensor, options: &LossOptions) -> Result<LossOptions> {
        let count = self.count(targets, options);
        let of_rank = Agreed::own("count", *count.as_ref().unwrap_or(&f64::NAN));
        let (_, of_ranks) = agree(&*self.collectives, Call::Count, count, &[of_rank])?;
        let count: f64 = of_ranks[0].iter().sum();
        // Without a target there is no loss to divide.
        Ok(options.clone().with_denominator(if count == 0.0 { 1.0 } else { count }))
    }

    /// The denominator of this rank's mean.
    fn count(&self, targets: &Tensor, options: &LossOptions) -> Result<f64> {
        let request = Request::new(targets.dims(), None, targets, targets, options)?;
        let vocab = options.class_weights.as_ref().map_or(u32::MAX as usize, Tensor::elem_count);
        Ok(request.read_weights(&request.read_ids(vocab)?)?.iter().sum())
    }

    /// The sums over all ranks of some numbers, such as [`Loss::sum_and_count`](crate::Loss::sum_and_count). Every rank
    /// calls it with as many.
    ///
    /// # Errors
    ///
    /// If the engine fails.
    pub fn sums<const N: usize>(&self, mut numbers: [f64; N]) -> Result<[f64; N]> {
        self.collectives.all_reduce_sum(Numbers::F64(&mut numbers))?;
        Ok(numbers)
    }

    /// Replaces the gradient of each variable of a map by the sum over all ranks; of a variable without a gradient on this
    /// rank it counts as zero, and a variable without a gradient on any rank remains without one. Half precision is added
    /// up in f32. Every rank calls it with variables of the same names, dtypes and shapes.
    ///
    /// # Errors
    ///
    /// [`Error::Ranks`] if the ranks have other names, dtypes or shapes of variables, of which it names the first, or another
    /// rank has an error or makes another call; if a gradient is not of its variable's shape, or not of floats; if the engine
    /// fails. All but the last come before any gradient is changed.
    pub fn all_reduce(&self, gradients: &mut GradStore, vars: &VarMap) -> Result<()> {
        let named: Vec<(String, Var)> = {
            let vars = vars.data().lock().unwrap_or_else(PoisonError::into_inner);
            vars.iter().map(|(name, var)| (name.clone(), var.clone())).collect()
        };
        self.all_reduce_named(gradients, &named)
    }

    /// As [`DataParallel::all_reduce`], for variables that are not in a [`VarMap`]. Ranks match them by their names, whatever
    /// order they are in; a variable with several names is added up once.
    ///
    /// # Errors
    ///
    /// As for [`DataParallel::all_reduce`], or if two variables have the same name.
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
        if let Err(Error::Ranks { argument: argument @ (NAMES | SHAPES), of_ranks, .. }) = agreed {
            // An error on every rank, each of which has as many variables.
            let alone = |i: usize| match argument {
                NAMES => Agreed::hashed(argument, |state| names[i].hash(state)).value(),
                _ => Agreed::hashed(argument, |state| shapes[i].hash(state)).value(),
            };
            let hashes: Vec<f64> = (0..named.len()).map(alone).collect();
            let first = first_other(&*self.collectives, &hashes)?;
            let element = first.map(|i| named[i].0.clone());
            return Err(Error::Ranks { argument, element, of_ranks });
        }
        agreed?;
        let mut seen = HashSet::new();
        let variables: Vec<&Var> = named.into_iter().map(|(_, var)| var).filter(|var| seen.insert(var.id())).collect();
        let mut with_gradient: Vec<f64> =
            variables.iter().map(|var| f64::from(u8::from(gradients.get(var).is_some()))).collect();
        self.collectives.all_reduce_sum(Numbers::F64(&mut with_gradient))?;
        let variables = variables.into_iter().zip(with_gradient).filter(|(_, ranks)| *ranks > 0.0).map(|(var, _)| var);

        let mut bucket: Vec<&Var> = Vec::new();
        for var in variables {
            let size: usize = bucket.iter().map(|var| var.elem_count()).sum();
            let is_other = match bucket.first() {
                Some(first) => accumulation(first)? != accumulation(var)?,
                None => false,
            };
            if !bucket.is_empty() && (is_other || size + var.elem_count() > BUCKET) {
                self.all_reduce_bucket(gradients, &std::mem::take(&mut bucket))?;
            }
            bucket.push(var);
        }
        self.all_reduce_bucket(gradients, &bucket)
    }

    /// Adds up the gradients of some variables, with one accumulation dtype, in one operation.
    fn all_reduce_bucket(&self, gradients: &mut GradStore, variables: &[&Var]) -> Result<()> {
        let Some(first) = variables.first() else { return Ok(()) };
        let dtype = accumulation(first)?;
        let flat = |var: &&Var| match gradients.remove(var) {
            Some(gradient) => gradient.detach().flatten_all()?.to_dtype(dtype),
            None => Tensor::zeros(var.elem_count(), dtype, var.device()),
        };
        let flat = variables.iter().map(flat).collect::<candle_core::Result<Vec<_>>>()?;
        let sums = match &flat[..] {
            [one] => self.collectives.all_reduce_sum_tensor(one)?,
            several => self.collectives.all_reduce_sum_tensor(&Tensor::cat(several, 0)?)?,
        };
        let mut start = 0;
        for var in variables {
            let sum = sums.narrow(0, start, var.elem_count())?.reshape(var.shape())?.to_dtype(var.dtype())?;
            gradients.insert(var, sum);
            start += var.elem_count();
        }
        Ok(())
    }
}

/// The first name of each variable, which is the same one for all names of a tied variable.
fn first_names<'a>(named: &[&'a (String, Var)]) -> Vec<&'a String> {
    let mut first = HashMap::new();
    named.iter().map(|(name, var)| *first.entry(var.id()).or_insert(name)).collect()
}

/// Checks that names are not given twice, and that each gradient can be added up; the errors name the variable.
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

/// The dtype that gradients of a variable are added up in.
fn accumulation(var: &Var) -> Result<DType> {
    accumulation_dtype("variables", var.dtype())
}
