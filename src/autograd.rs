//! Ties a value that has been computed to candle's graph, so that `backward` finds its gradients.
//!
//! candle's own operations keep every intermediate result alive until the backward pass, and its custom operations can keep
//! none. Here the value is computed beforehand, outside the graph; one node then hands it over, and computes the gradients
//! of its operands by a closure that holds whatever it needs.

use std::cell::RefCell;
use std::sync::Mutex;

use candle_core::backend::BackendStorage;
use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, CudaStorage, CustomOp3, Layout, MetalStorage, Shape, Storage, Tensor, TensorId};

use crate::error::Result;

/// `value` as a function of `operands`, whose gradients are `backward(operands, value, upstream)`: `None` where none is
/// wanted. The value itself, if no operand depends on a variable.
pub(crate) fn attach<B>(name: &'static str, value: Tensor, operands: [&Tensor; 3], backward: B) -> Result<Tensor>
where
    B: Fn([&Tensor; 3], &Tensor, &Tensor) -> Result<[Option<Tensor>; 3]> + Send + Sync + 'static,
{
    if !operands.iter().any(|operand| operand.track_op()) {
        return Ok(value);
    }
    let [a, b, c] = operands;
    let shape = value.shape().clone();
    Ok(a.apply_op3(b, c, Node { name, shape, value: Mutex::new(Some(value)), backward })?)
}

struct Node<B> {
    name: &'static str,
    shape: Shape,
    /// The value, until it is handed over.
    value: Mutex<Option<Tensor>>,
    backward: B,
}

impl<B> Node<B> {
    /// Hands the value's storage over, by way of `clone`.
    fn storage<S>(
        &self,
        clone: impl FnOnce(&Storage, &Layout) -> Option<candle_core::Result<S>>,
    ) -> candle_core::Result<(S, Shape)> {
        let value = self.value.lock().ok().and_then(|mut value| value.take());
        let Some(value) = value else { candle_core::bail!("the value of {} was handed over before", self.name) };
        let (storage, layout) = value.storage_and_layout();
        match clone(&storage, layout) {
            Some(storage) => Ok((storage?, self.shape.clone())),
            None => candle_core::bail!("the value of {} is on another device than its operands", self.name),
        }
    }
}

impl<B> CustomOp3 for Node<B>
where
    B: Fn([&Tensor; 3], &Tensor, &Tensor) -> Result<[Option<Tensor>; 3]>,
{
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
        self.storage(|storage, layout| match storage {
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
        self.storage(|storage, layout| match storage {
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
        self.storage(|storage, layout| match storage {
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
        // Detached: a gradient that is kept, as gradient accumulation does, must not keep the graph of its batch alive.
        let detached = |gradient: Option<Tensor>| gradient.map(|gradient| gradient.detach());
        let mut gradients = (self.backward)([a, b, c], value, upstream)?.map(detached);
        if is_root(value) {
            for (operand, gradient) in [a, b, c].into_iter().zip(&mut gradients) {
                put_aside(operand, gradient)?;
            }
        }
        let [a, b, c] = gradients;
        Ok((a, b, c))
    }
}

/// What [`backward`] knows while candle works.
struct Pass {
    root: TensorId,
    leaf: Option<TensorId>,
    /// What the gradient of the leaf has come to.
    gradient: Option<Tensor>,
}

thread_local! {
    static PASS: RefCell<Option<Pass>> = const { RefCell::new(None) };
}

/// The gradients of `value`, as from `value.backward()`. candle adds every gradient to zeros, a second copy of it; that of
/// `leaf`, a variable, goes past that sum as far as it comes from the node of `value` itself. Other nodes are left alone: the
/// backward pass of another loss may run on this thread meanwhile, where both are jobs of rayon.
pub(crate) fn backward(value: &Tensor, leaf: Option<&Tensor>) -> Result<GradStore> {
    /// Ends the pass, even by a panic.
    struct End(Option<Pass>);
    impl Drop for End {
        fn drop(&mut self) {
            PASS.replace(self.0.take());
        }
    }
    let _end = End(PASS.replace(Some(Pass { root: value.id(), leaf: leaf.map(Tensor::id), gradient: None })));
    let mut gradients = value.backward()?;
    let aside = PASS.with_borrow_mut(|pass| pass.as_mut().and_then(|pass| pass.gradient.take()));
    if let Some((leaf, gradient)) = leaf.zip(aside) {
        let gradient = match gradients.remove(leaf) {
            Some(rest) => (rest + gradient)?,
            None => gradient,
        };
        gradients.insert(leaf, gradient);
    }
    Ok(gradients)
}

/// Whether the gradient of `value` is one because the backward pass began with it.
pub(crate) fn is_root(value: &Tensor) -> bool {
    PASS.with_borrow(|pass| pass.as_ref().is_some_and(|pass| pass.root == value.id()))
}

/// Takes the gradient of an operand out of candle's hands if it is the leaf of this pass.
fn put_aside(operand: &Tensor, gradient: &mut Option<Tensor>) -> candle_core::Result<()> {
    PASS.with_borrow_mut(|pass| {
        if let Some(pass) = pass.as_mut().filter(|pass| pass.leaf == Some(operand.id())) {
            pass.gradient = match (pass.gradient.take(), gradient.take()) {
                (Some(a), Some(b)) => Some((a + b)?),
                (a, b) => a.or(b),
            };
        }
        Ok(())
    })
}
