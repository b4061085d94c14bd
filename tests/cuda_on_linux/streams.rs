//! Several streams and threads.

use candle_core::{Device, Tensor, Var};
use mos_head::{LossOptions, OutputLayer, Result, SoftmaxHead};

/// Numbers from -1 to 1.
fn numbers(shape: &[usize], device: &Device) -> Result<Tensor> {
    let values: Vec<f32> = (0..shape.iter().product()).map(|i| (i as f32 * 0.37).sin()).collect();
    Ok(Tensor::from_vec(values, shape, device)?)
}

/// The results of a loss and of decoding on one device, read on another.
fn results(device: &Device, reader: &Device) -> Result<Vec<f32>> {
    let weight = Var::from_tensor(&numbers(&[9, 4], device)?)?;
    let bias = Var::from_tensor(&numbers(&[9], device)?)?;
    let hidden = Var::from_tensor(&numbers(&[5, 4], device)?)?;
    let head = SoftmaxHead::from_tensors(weight.as_tensor().clone(), Some(bias.as_tensor().clone()))?;
    let loss = head.loss(&hidden, &Tensor::new(&[1u32, 8, 0, 3, 3], device)?, &LossOptions::new())?;
    let gradients = loss.backward()?;
    let mut tensors = vec![head.log_probs(&hidden)?, loss.nll, loss.value];
    for variable in [&weight, &bias, &hidden] {
        tensors.push(gradients.get(variable).expect("a gradient").clone());
    }
    // Neither candle nor this crate orders the operations of other streams after a kernel.
    device.synchronize()?;
    let read: Vec<_> = tensors.iter().map(|tensor| tensor.to_device(reader)).collect::<candle_core::Result<_>>()?;
    let mut values = vec![];
    for tensor in read {
        values.extend(tensor.flatten_all()?.to_vec1::<f32>()?);
    }
    Ok(values)
}

/// Asserts that two lists are equal up to rounding.
fn assert_close(got: &[f32], expected: &[f32]) {
    assert_eq!(got.len(), expected.len());
    for (got, expected) in got.iter().zip(expected) {
        assert!((got - expected).abs() <= 1e-5, "{got} instead of {expected}");
    }
}

#[test]
fn results_can_be_used_on_another_stream_after_synchronizing() -> Result<()> {
    let [device, reader] = [Device::new_cuda_with_stream(0)?, Device::new_cuda_with_stream(0)?];
    let expected = results(&Device::Cpu, &Device::Cpu)?;
    assert_close(&results(&device, &reader)?, &expected);
    assert_close(&results(&reader, &device)?, &expected);
    Ok(())
}

#[test]
fn threads_have_streams_of_their_own() -> Result<()> {
    let expected = results(&Device::Cpu, &Device::Cpu)?;
    std::thread::scope(|scope| {
        let run = || (0..5).map(|_| Device::new_cuda(0).map_err(Into::into).and_then(|d| results(&d, &d))).collect();
        let threads: Vec<_> = (0..3).map(|_| scope.spawn(run)).collect();
        for thread in threads {
            let all: Result<Vec<_>> = thread.join().expect("no panic");
            all?.iter().for_each(|got| assert_close(got, &expected));
        }
        Ok(())
    })
}

#[test]
fn a_head_can_move_to_another_thread() -> Result<()> {
    let device = Device::new_cuda(0)?;
    let head = SoftmaxHead::from_tensors(numbers(&[9, 4], &device)?, None)?;
    let hidden = numbers(&[5, 4], &device)?;
    let here = head.log_probs(&hidden)?.flatten_all()?.to_vec1::<f32>()?;
    device.synchronize()?;
    let there =
        std::thread::spawn(move || -> Result<Vec<f32>> { Ok(head.log_probs(&hidden)?.flatten_all()?.to_vec1()?) });
    assert_eq!(there.join().expect("no panic")?, here);
    Ok(())
}
