//! What a quantised decoder does not take is an error that names it, before any work.

mod common;
#[path = "common/ranks.rs"]
mod ranks;

use std::sync::Arc;

use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use candle_core::{DType, Device, Module, Tensor};
use common::quantised::{quantised, Parameters, BLOCKS, HIDDEN};
use common::values::uniform;
use mos_head::decode::{Sampler, Sampling};
use mos_head::distributed::VocabShard;
use mos_head::parts::{Decoder, LowRankAdapter, QuantisedLinear};
use mos_head::sampled::NoiseDistribution;
use mos_head::{
    Distributions, DropoutMasks, Error, LossOptions, MixtureLayer, OptionName, OutputLayer, Precision, Result,
    SoftmaxHead,
};
use ranks::on_ranks;

const VOCAB: usize = 19;
const D: usize = 256;

fn head() -> Result<SoftmaxHead> {
    SoftmaxHead::from_quantised(quantised(GgmlDType::Q6K, VOCAB, D, 1)?, None)
}

fn hidden(dtype: DType) -> Result<Tensor> {
    Ok(uniform(&[4, D], 1.0, 2)?.to_dtype(dtype)?)
}

fn targets() -> Result<Tensor> {
    Ok(Tensor::new(&[1u32, 2, 3, 18], &Device::Cpu)?)
}

fn message<T>(result: Result<T>) -> String {
    result.err().expect("an error").to_string()
}

/// A tensor of this shape that holds the bytes of another.
fn damaged(dtype: GgmlDType, rows: usize, shape: (usize, usize)) -> Result<Arc<QTensor>> {
    let bytes = quantised(dtype, rows, D, 1)?.data()?.into_owned();
    Ok(Arc::new(QTensor::new(QStorage::from_data(bytes.into(), &Device::Cpu, dtype)?, shape)?))
}

#[test]
fn other_types_are_named() -> Result<()> {
    for (dtype, name) in [(GgmlDType::Q4_1, "Q4_1"), (GgmlDType::Q5_0, "Q5_0"), (GgmlDType::Q2K, "Q2K")] {
        let weight = quantised(dtype, VOCAB, D, 1)?;
        let found = message(Decoder::from_quantised(weight.clone(), None));
        assert!(found.starts_with("decoder.weight: expected Q8_0, Q6K, Q5K, Q4K, Q4_0, F16, BF16 or F32;"), "{found}");
        assert!(found.contains("dequantize") && found.ends_with(&format!("got {name}")), "{found}");
        let found = message(QuantisedLinear::new(weight, None));
        assert!(found.starts_with("weight: ") && found.ends_with(&format!("got {name}")), "{found}");
    }
    Ok(())
}

#[test]
fn a_tensor_that_holds_less_or_more_than_its_shape_is_an_error() -> Result<()> {
    for dtype in BLOCKS {
        for rows in [VOCAB - 1, VOCAB + 1] {
            let found = message(Decoder::from_quantised(damaged(dtype, rows, (VOCAB, D))?, None));
            assert!(found.starts_with("decoder.weight: expected ") && found.contains(" bytes, "), "{found}");
        }
        assert!(Decoder::from_quantised(damaged(dtype, VOCAB, (VOCAB, D))?, None).is_ok());
    }
    Ok(())
}

#[test]
fn only_a_matrix_has_rows() -> Result<()> {
    let tensor = QTensor::quantize(&Tensor::zeros((2, 3, 32), DType::F32, &Device::Cpu)?, GgmlDType::Q8_0)?;
    let found = Decoder::from_quantised(Arc::new(tensor), None);
    assert!(matches!(found, Err(Error::Shape { argument: "decoder.weight", .. })));
    let bias = Tensor::zeros(VOCAB + 1, DType::F32, &Device::Cpu)?;
    let found = Decoder::from_quantised(quantised(GgmlDType::Q8_0, VOCAB, D, 1)?, Some(bias));
    assert!(matches!(found, Err(Error::Shape { argument: "decoder.bias", .. })));
    Ok(())
}

#[test]
fn operands_in_f64_are_errors() -> Result<()> {
    let (head, hidden) = (head()?, hidden(DType::F64)?);
    let is_dtype = |error: Error| matches!(error, Error::DType { argument: "hidden", got: DType::F64, .. });
    assert!(head.log_probs(&hidden).is_err_and(is_dtype));
    assert!(head.loss(&hidden, &targets()?, &LossOptions::new()).is_err_and(is_dtype));
    let found = head.decoder().mixture(&hidden.unsqueeze(1)?, None);
    assert!(matches!(found, Err(Error::DType { argument: "contexts", .. })));
    let layer = QuantisedLinear::new(quantised(GgmlDType::Q8_0, VOCAB, D, 1)?, None)?;
    assert!(layer.forward(&hidden).is_err());
    for dtype in [DType::F64, DType::BF16] {
        let factor = |shape: &[usize]| uniform(shape, 1.0, 3)?.to_dtype(dtype);
        let adapter = LowRankAdapter::from_tensors(factor(&[2, D])?, factor(&[VOCAB, 2])?, 1.0)?;
        let found = head.clone().with_adapter(adapter);
        assert!(matches!(found, Err(Error::DType { argument: "adapter", .. })));
    }
    Ok(())
}

#[test]
fn other_sizes_of_hidden_states_are_errors() -> Result<()> {
    let states = Tensor::zeros((4, D + 1), DType::F32, &Device::Cpu)?;
    assert!(matches!(head()?.log_probs(&states), Err(Error::Shape { argument: "hidden", .. })));
    let layer = QuantisedLinear::new(quantised(GgmlDType::Q8_0, VOCAB, D, 1)?, None)?;
    assert!(layer.forward(&states).is_err());
    Ok(())
}

#[test]
fn reduced_precision_is_unsupported() -> Result<()> {
    let (head, hidden) = (head()?, hidden(DType::F32)?);
    let is_named = |error: Error| {
        matches!(error, Error::Unsupported { option: OptionName::Precision, head: "a quantised decoder" })
    };
    let options = LossOptions::new().with_precision(Precision::Bf16Products);
    assert!(head.loss(&hidden, &targets()?, &options).is_err_and(is_named));
    let mixture = head.mixture(&hidden, DropoutMasks::Off)?.with_precision(Precision::Bf16Products);
    assert!(mixture.log_probs().is_err_and(is_named));
    assert!(mixture.top_k(3).is_err_and(is_named));
    assert!(mixture.sample(&mut Sampler::new(Sampling::new(), 1)?).is_err_and(is_named));
    Ok(())
}

#[test]
fn variables_of_a_sample_s_rows_are_unsupported() -> Result<()> {
    let negatives = NoiseDistribution::log_uniform(VOCAB)?.draw(5, 3)?;
    let options = LossOptions::new().with_sampled_softmax(negatives).with_decoder_rows(true);
    let found = head()?.loss(&hidden(DType::F32)?, &targets()?, &options);
    let unsupported = Error::Unsupported { option: OptionName::DecoderRows, head: "a quantised decoder" };
    assert_eq!(message(found), unsupported.to_string());
    Ok(())
}

#[test]
fn a_vocabulary_that_ranks_share_is_unsupported() -> Result<()> {
    let on_rank = |ranks| -> Result<()> {
        let shard = VocabShard::new(ranks, VOCAB)?;
        let mixture = head()?.mixture(&hidden(DType::F32)?, DropoutMasks::Off)?.vocab_parallel(&shard);
        let is_named = |error: Error| matches!(error, Error::Unsupported { option: OptionName::QuantisedRows, .. });
        assert!(mixture.loss(&targets()?, &LossOptions::new()).is_err_and(is_named));
        assert!(mixture.top_k(2).is_err_and(is_named));
        Ok(())
    };
    on_ranks(1, on_rank).into_iter().collect()
}

#[test]
fn a_gpu_is_an_error_that_says_what_works_there() -> Result<()> {
    for device in common::devices().into_iter().filter(|device| !device.is_cpu()) {
        let bytes = quantised(GgmlDType::Q8_0, VOCAB, D, 1)?.data()?.into_owned();
        let storage = QStorage::from_data(bytes.into(), &device, GgmlDType::Q8_0)?;
        let weight = Arc::new(QTensor::new(storage, (VOCAB, D))?);
        for found in [
            message(Decoder::from_quantised(weight.clone(), None)),
            message(QuantisedLinear::new(weight.clone(), None)),
            message(SoftmaxHead::from_quantised(weight, None)),
        ] {
            assert!(found.contains("QTensor::dequantize(&device)"), "{found}");
        }
        let states = Tensor::zeros((4, D), DType::F32, &device)?;
        let found = message(head()?.log_probs(&states));
        assert!(found.starts_with("hidden: expected device Cpu, as the decoder is quantised"), "{found}");
    }
    Ok(())
}

#[test]
fn the_states_of_a_mixture_have_the_dtype_of_its_projection() -> Result<()> {
    let mixture = Parameters::random(GgmlDType::Q8_0, VOCAB, D)?.mixture()?;
    let states = Tensor::zeros((4, HIDDEN), DType::F32, &Device::Cpu)?;
    mixture.log_probs(&states)?;
    let found = message(mixture.log_probs(&states.to_dtype(DType::F16)?));
    assert!(found.starts_with("hidden: expected dtype F32, as the projection's parameters"), "{found}");
    Ok(())
}
