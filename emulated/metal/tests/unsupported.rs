//! Unsupported devices and dtypes are typed errors.

use candle_core::{DType, Device, Tensor};
use metal_on_linux::{metal, numbers};
use mos_head::{Error, LossOptions, OutputLayer, SoftmaxHead};

fn loss(dtype: DType, device: &Device) -> mos_head::Result<mos_head::Loss> {
    let on = |tensor: Tensor| tensor.to_dtype(dtype).unwrap().to_device(device).unwrap();
    let head = SoftmaxHead::from_tensors(on(numbers(&[7, 3], 1)), None)?;
    head.loss(&on(numbers(&[2, 3], 2)), &Tensor::new(&[1u32, 2], device)?, &LossOptions::evaluation())
}

#[test]
fn a_gpu_without_simd_group_matrices_is_an_error() {
    // Apple6. Nothing else in this process loads a kernel or reads the environment at the same time.
    std::env::set_var("MOS_HEAD_METAL_FAMILY", "1006");
    match loss(DType::F32, &metal()) {
        Err(Error::Device { argument: "hidden", expected, .. }) => assert!(expected.contains("M1"), "{expected}"),
        other => panic!("{other:?}"),
    }
    std::env::remove_var("MOS_HEAD_METAL_FAMILY");
    assert!(loss(DType::F32, &metal()).is_ok());
    match loss(DType::F64, &metal()) {
        Err(Error::DType { argument: "hidden", got: DType::F64, expected }) => {
            assert!(expected.contains("f32"), "{expected}")
        }
        other => panic!("{other:?}"),
    }
}
