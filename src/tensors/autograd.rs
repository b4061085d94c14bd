//! Attaches a computed value to candle's graph, so that `backward` finds its gradients.
//!
//! candle's own operations keep every intermediate result alive until the backward pass; its custom operations can keep
//! none. Here the value is computed beforehand, outside the graph; the forward pass of one node then returns it, and
//! its backward pass computes the gradients of its operands by a closure that holds whatever it needs. The loss of a
//! mixture (`mixture/node.rs`), each linear layer ([`linear`](super::linear)) and the rows of a char-CNN are such
//! nodes.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::sync::Mutex;

use candle_core::backend::BackendStorage;
use candle_core::backprop::GradStore;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp3, DType, InplaceOp1, Layout, MetalStorage, Shape, Storage, Tensor, TensorId, Var,
    WithDType,
};

use crate::error::Result;

/// Makes `value` a function of up to three operands, whose gradients `backward(operands, value, upstream)` computes:
/// `None` where none is needed, and where there is no operand, in whose place it gets another one, detached. If no
/// operand depends on a variable, it returns the value as it is. On the CPU the node takes the value's storage, which
/// nothing else may share; only a single number is copied.
pub(crate) fn attach(
    name: &'static str,
    value: Tensor,
    operands: [Option<&Tensor>; 3],
    backward: impl Fn([&Tensor; 3], &Tensor, &Tensor) -> Result<[Option<Tensor>; 3]> + Send + Sync + 'static,
) -> Result<Tensor> {
    attach_boxed(name, value, operands, Box::new(backward))
}

/// As [`attach`], compiled once for all nodes.
fn attach_boxed(
    name: &'static str,
    value: Tensor,
    operands: [Option<&Tensor>; 3],
    backward: Box<Backward>,
) -> Result<Tensor> {
    // A custom operation of candle has three operands.
    let present = || operands.iter().copied().flatten();
    let Some(absent) = present().find(|operand| operand.track_op()).map(Tensor::detach) else { return Ok(value) };
    // The node reads its storage from the first element on, so that the value must start there.
    let value = if value.layout().start_offset() == 0 { value } else { value.force_contiguous()? };
    let [a, b, c] = operands.map(|operand| operand.unwrap_or(&absent));
    let shape = value.shape().clone();
    Ok(a.apply_op3(b, c, PrecomputedNode { name, shape, value: Mutex::new(Some(value)), backward })?)
}

/// Converts a tensor to a dtype, as a node of its own if that changes anything.
pub(crate) fn converted(tensor: &Tensor, dtype: DType) -> Result<Tensor> {
    if tensor.dtype() == dtype {
        return Ok(tensor.clone());
    }
    let value = tensor.detach().to_dtype(dtype)?;
    attach("conversion", value, [Some(tensor), None, None], |[tensor, ..], _, upstream| {
        Ok([Some(upstream.to_dtype(tensor.dtype())?), None, None])
    })
}

/// Computes the gradients of a node's operands from the operands, the node's value and its gradient.
type Backward = dyn Fn([&Tensor; 3], &Tensor, &Tensor) -> Result<[Option<Tensor>; 3]> + Send + Sync;

/// A node of candle's graph whose forward pass returns a value that was computed before.
struct PrecomputedNode {
    name: &'static str,
    shape: Shape,
    /// The value, until the forward pass takes it.
    value: Mutex<Option<Tensor>>,
    backward: Box<Backward>,
}

impl PrecomputedNode {
    /// Takes the value, which a node has only once.
    fn take_value(&self) -> candle_core::Result<Tensor> {
        match self.value.lock().ok().and_then(|mut value| value.take()) {
            Some(value) => Ok(value),
            None => candle_core::bail!("{}: the forward pass of this node has run before", self.name),
        }
    }

    /// Copies the storage of the value by `clone`, which returns `None` if the storage is on another device.
    fn copy_storage<S>(
        &self,
        value: &Tensor,
        clone: impl FnOnce(&Storage, &Layout) -> Option<candle_core::Result<S>>,
    ) -> candle_core::Result<(S, Shape)> {
        let (storage, layout) = value.storage_and_layout();
        match clone(&storage, layout) {
            Some(storage) => Ok((storage?, self.shape.clone())),
            None => candle_core::bail!("{}: the value is on another device than the operands", self.name),
        }
    }
}

/// An operation of candle that moves the storage out of a tensor, which has no elements from then on.
struct TakeStorage(Mutex<Option<CpuStorage>>);

impl InplaceOp1 for TakeStorage {
    fn name(&self) -> &'static str {
        "take"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        if let Ok(mut taken) = self.0.lock() {
            *taken = Some(std::mem::replace(storage, CpuStorage::U8(Vec::new())));
        }
        Ok(())
    }
}

/// Takes the storage of a tensor on the CPU, and leaves the tensor without elements. Returns `None` on a GPU, or if the
/// storage holds more than this tensor.
fn take_storage(tensor: &Tensor) -> candle_core::Result<Option<CpuStorage>> {
    let is_whole = match &*tensor.storage_and_layout().0 {
        Storage::Cpu(storage) => tensor.is_contiguous() && float_count(storage) == Some(tensor.elem_count()),
        _ => false,
    };
    if !is_whole {
        return Ok(None);
    }
    let take = TakeStorage(Mutex::new(None));
    tensor.inplace_op1(&take)?;
    Ok(take.0.into_inner().ok().flatten())
}

/// Takes the values out of a tensor that nothing else may refer to. On the CPU it copies nothing.
pub(crate) fn take_values<T: WithDType>(tensor: &Tensor) -> Result<Vec<T>> {
    Ok(match take_storage(tensor)? {
        Some(storage) => T::cpu_storage_data(storage)?,
        None => tensor.flatten_all()?.to_vec1()?,
    })
}

/// Turns values that nothing else may refer to into a variable. On the CPU it copies nothing.
pub(crate) fn into_variable(values: Tensor) -> Result<Var> {
    let (shape, device) = (values.shape().clone(), values.device().clone());
    Ok(match take_storage(&values)? {
        Some(CpuStorage::F16(values)) => Var::from_vec(values, shape, &device)?,
        Some(CpuStorage::BF16(values)) => Var::from_vec(values, shape, &device)?,
        Some(CpuStorage::F32(values)) => Var::from_vec(values, shape, &device)?,
        Some(CpuStorage::F64(values)) => Var::from_vec(values, shape, &device)?,
        _ => Var::from_tensor(&values)?,
    })
}

/// Returns the number of elements of a storage of floats, and `None` for a storage of another dtype.
fn float_count(storage: &CpuStorage) -> Option<usize> {
    match storage {
        CpuStorage::F16(values) => Some(values.len()),
        CpuStorage::BF16(values) => Some(values.len()),
        CpuStorage::F32(values) => Some(values.len()),
        CpuStorage::F64(values) => Some(values.len()),
        _ => None,
    }
}

/// The forward methods ignore the operands and return the value that was computed before. The backward method returns
/// the operands' gradients, detached, except those of variables, which are diverted.
impl CustomOp3 for PrecomputedNode {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let value = self.take_value()?;
        if value.elem_count() > 1 {
            if let Some(storage) = take_storage(&value)? {
                return Ok((storage, self.shape.clone()));
            }
        }
        self.copy_storage(&value, |storage, layout| match storage {
            Storage::Cpu(storage) => Some(storage.try_clone(layout)),
            _ => None,
        })
    }

    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> candle_core::Result<(CudaStorage, Shape)> {
        self.copy_storage(&self.take_value()?, |storage, layout| match storage {
            Storage::Cuda(storage) => Some(storage.try_clone(layout)),
            _ => None,
        })
    }

    fn metal_fwd(
        &self,
        _: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
    ) -> candle_core::Result<(MetalStorage, Shape)> {
        self.copy_storage(&self.take_value()?, |storage, layout| match storage {
            Storage::Metal(storage) => Some(storage.try_clone(layout)),
            _ => None,
        })
    }

    fn bwd(
        &self,
        a: &Tensor,
        b: &Tensor,
        c: &Tensor,
        value: &Tensor,
        upstream: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        // Accumulated gradients that are not detached would keep the graphs of their batches alive.
        let detached = |gradient: Option<Tensor>| gradient.map(|gradient| gradient.detach());
        let mut gradients = (self.backward)([a, b, c], value, upstream)?.map(detached);
        for (operand, gradient) in [a, b, c].into_iter().zip(&mut gradients) {
            divert_gradient(value, operand, gradient)?;
        }
        let [a, b, c] = gradients;
        Ok((a, b, c))
    }
}

/// The state of [`backward`] during candle's backward pass.
struct BackwardPass {
    /// The loss, from which the gradients start.
    root: TensorId,
    /// The nodes of the loss's graph, by value.
    nodes: HashSet<TensorId>,
    /// The variables that have had a gradient from one of this crate's nodes, and its sum so far.
    gradients: HashMap<TensorId, (Tensor, Tensor)>,
}

thread_local! {
    static PASS: RefCell<Option<BackwardPass>> = const { RefCell::new(None) };
}

/// Computes the gradients of `value + penalty`, two scalars, like candle's `backward`. candle adds every gradient to
/// zeros, which is a second copy; the gradients that this crate's nodes have for variables bypass that sum. Nodes of
/// other graphs are not affected: if both are rayon jobs, the backward pass of another loss may run on this thread
/// meanwhile.
pub(crate) fn backward(value: &Tensor, penalty: Option<&Tensor>) -> Result<GradStore> {
    if let Some(penalty) = penalty.filter(|penalty| penalty.sorted_nodes().iter().any(|node| node.id() == value.id())) {
        // The penalty depends on the value too, whose gradient is therefore not one.
        return Ok((value + penalty)?.backward()?);
    }
    /// Restores the outer pass, also on a panic.
    struct RestoreOuterPass(Option<BackwardPass>);
    impl Drop for RestoreOuterPass {
        fn drop(&mut self) {
            PASS.replace(self.0.take());
        }
    }
    let total = match penalty {
        Some(penalty) => (value + penalty)?,
        None => value.clone(),
    };
    let nodes = total.sorted_nodes().into_iter().map(Tensor::id).collect();
    let pass = BackwardPass { root: value.id(), nodes, gradients: HashMap::new() };
    let _restore = RestoreOuterPass(PASS.replace(Some(pass)));
    let mut gradients = total.backward()?;
    let diverted = PASS.with_borrow_mut(|pass| pass.as_mut().map(|pass| std::mem::take(&mut pass.gradients)));
    for (variable, gradient) in diverted.into_iter().flat_map(HashMap::into_values) {
        let gradient = match gradients.remove(&variable) {
            Some(from_other_nodes) => (from_other_nodes + gradient)?,
            None => gradient,
        };
        gradients.insert(&variable, gradient);
    }
    Ok(gradients)
}

/// Returns the ids of the variables that a tensor depends on; a variable depends on itself.
pub(crate) fn variable_ids(tensor: &Tensor) -> Vec<TensorId> {
    tensor.sorted_nodes().into_iter().filter(|node| node.is_variable()).map(Tensor::id).collect()
}

/// Returns whether `value` is the loss of this backward pass, so that its gradient is one.
pub(crate) fn is_root(value: &Tensor) -> bool {
    PASS.with_borrow(|pass| pass.as_ref().is_some_and(|pass| pass.root == value.id()))
}

/// Takes a node's gradient of an operand from candle, and adds it to the pass, if the operand is a variable and the
/// node is in the graph of the pass.
fn divert_gradient(value: &Tensor, operand: &Tensor, gradient: &mut Option<Tensor>) -> candle_core::Result<()> {
    if !operand.is_variable() {
        return Ok(());
    }
    let take_sum = |pass: &mut Option<BackwardPass>| {
        let pass = pass.as_mut().filter(|pass| pass.nodes.contains(&value.id()))?;
        Some(pass.gradients.remove(&operand.id()))
    };
    let Some(sum_so_far) = PASS.with_borrow_mut(take_sum) else { return Ok(()) };
    // The pass is not borrowed here: an operation of candle may run another job of rayon.
    let sum = match (sum_so_far, gradient.take()) {
        (Some((_, a)), Some(b)) => Some((a + b)?),
        (a, b) => a.map(|(_, a)| a).or(b),
    };
    PASS.with_borrow_mut(|pass| {
        if let Some((pass, sum)) = pass.as_mut().zip(sum) {
            pass.gradients.insert(operand.id(), (operand.clone(), sum));
        }
    });
    Ok(())
}
