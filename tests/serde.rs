//! Configurations as they stand in a model's JSON (feature `serde`).
#![cfg(feature = "serde")]

use candle_core::{DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap};
use mos_head::decode::Sampling;
use mos_head::parts::{CharCnnConfig, LogitFunction, LowRankConfig};
use mos_head::two_level::{AdaptiveConfig, Classes, HierarchicalConfig};
use mos_head::{ContextActivation, HeadConfig, LossOptions, MixtureConfig, OutputLayer, SoftmaxConfig};

#[test]
fn what_is_written_is_read_again() -> serde_json::Result<()> {
    let softmax = SoftmaxConfig::new(64, 1000).with_decoder_bias(false).with_softcap(30.0).with_logit_scale(0.5);
    assert_eq!(serde_json::from_str::<SoftmaxConfig>(&serde_json::to_string(&softmax)?)?, softmax);
    let mixture = MixtureConfig::new(64, 1000, 5)
        .with_context_dim(32)
        .with_prior_bias(true)
        .with_activation(ContextActivation::Identity)
        .with_dropout(0.2)
        .with_softcap(30.0);
    assert_eq!(serde_json::from_str::<MixtureConfig>(&serde_json::to_string(&mixture)?)?, mixture);
    let adaptive = AdaptiveConfig::new(64, 1000, vec![100, 500]).with_div_value(2.0).with_head_bias(true);
    assert_eq!(serde_json::from_str::<AdaptiveConfig>(&serde_json::to_string(&adaptive)?)?, adaptive);
    for classes in [Classes::Consecutive(2), Classes::Given(vec![1, 0, 1])] {
        let hierarchical = HierarchicalConfig::new(64, 3).with_bias(false).with_classes(classes);
        assert_eq!(serde_json::from_str::<HierarchicalConfig>(&serde_json::to_string(&hierarchical)?)?, hierarchical);
    }
    let adapter = LowRankConfig::new(1000, 64, 8).with_alpha(16.0);
    assert_eq!(serde_json::from_str::<LowRankConfig>(&serde_json::to_string(&adapter)?)?, adapter);
    let adapter = r#"{"vocab_size": 1000, "context_dim": 64, "rank": 8}"#;
    assert_eq!(serde_json::from_str::<LowRankConfig>(adapter)?, LowRankConfig::new(1000, 64, 8));
    let sampling = Sampling::new().with_temperature(0.8).with_top_p(0.95).with_top_k(40);
    assert_eq!(serde_json::from_str::<Sampling>(&serde_json::to_string(&sampling)?)?, sampling);
    Ok(())
}

#[test]
fn a_function_of_the_logits_has_a_name_and_a_softcap_may_be_a_number() -> serde_json::Result<()> {
    let softmax = SoftmaxConfig::new(64, 1000);
    let mixture = MixtureConfig::new(64, 1000, 5);
    for (text, function) in [
        ("\"softcap\": 30.0", LogitFunction::Softcap(30.0)),
        ("\"softcap\": 30", LogitFunction::Softcap(30.0)),
        ("\"softcap\": null", LogitFunction::Identity),
        ("\"logit_function\": {\"softcap\": 30.0}", LogitFunction::Softcap(30.0)),
        ("\"logit_function\": \"sigsoftmax\"", LogitFunction::Sigsoftmax),
        ("\"logit_function\": \"identity\"", LogitFunction::Identity),
    ] {
        let sizes = format!("\"hidden_size\": 64, \"vocab_size\": 1000, {text}");
        let expected = softmax.clone().with_logit_function(function);
        assert_eq!(serde_json::from_str::<SoftmaxConfig>(&format!("{{{sizes}}}"))?, expected);
        assert_eq!(serde_json::from_str::<SoftmaxConfig>(&serde_json::to_string(&expected)?)?, expected);
        let expected = mixture.clone().with_logit_function(function);
        assert_eq!(serde_json::from_str::<MixtureConfig>(&format!("{{{sizes}, \"components\": 5}}"))?, expected);
        assert_eq!(serde_json::from_str::<MixtureConfig>(&serde_json::to_string(&expected)?)?, expected);
    }
    let twice = r#"{"hidden_size": 64, "vocab_size": 1000, "softcap": 30.0, "logit_function": "sigsoftmax"}"#;
    assert!(serde_json::from_str::<SoftmaxConfig>(twice).is_err());
    Ok(())
}

#[test]
fn a_file_chooses_the_head() -> Result<(), Box<dyn std::error::Error>> {
    let mixture = MixtureConfig::new(8, 30, 3).with_context_dim(4);
    let configs = [
        (HeadConfig::Softmax(SoftmaxConfig::new(8, 30)), "softmax", 2),
        (HeadConfig::MixtureOfContexts(mixture.clone()), "mixture_of_contexts", 5),
        (HeadConfig::MixtureOfSoftmaxes(mixture), "mixture_of_softmaxes", 5),
        (HeadConfig::Adaptive(AdaptiveConfig::new(8, 30, vec![10]).with_div_value(2.0)), "adaptive", 3),
        (HeadConfig::Hierarchical(HierarchicalConfig::new(8, 30)), "hierarchical", 14),
    ];
    for (config, name, variables) in configs {
        let text = serde_json::to_string(&config)?;
        assert!(text.starts_with(&format!(r#"{{"head":"{name}","hidden_size":8,"vocab_size":30"#)), "{text}");
        let read: HeadConfig = serde_json::from_str(&text)?;
        assert_eq!(read, config);
        let vars = VarMap::new();
        let head = read.build(VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
        assert_eq!((head.hidden_size(), head.vocab_size(), vars.all_vars().len()), (8, 30, variables), "{name}");
        let hidden = Tensor::rand(-1f32, 1f32, (2, 8), &Device::Cpu)?;
        let loss = head.loss(&hidden, &Tensor::new(&[3u32, 29], &Device::Cpu)?, &LossOptions::new())?;
        assert!(loss.value.to_scalar::<f32>()? > 0.0);
    }
    Ok(())
}

#[test]
fn what_is_left_out_has_its_default() -> serde_json::Result<()> {
    assert_eq!(
        serde_json::from_str::<SoftmaxConfig>(r#"{"hidden_size": 64, "vocab_size": 1000}"#)?,
        SoftmaxConfig::new(64, 1000)
    );
    let sizes = r#"{"hidden_size": 64, "vocab_size": 1000}"#;
    assert_eq!(serde_json::from_str::<HierarchicalConfig>(sizes)?, HierarchicalConfig::new(64, 1000));
    assert!(serde_json::from_str::<AdaptiveConfig>(sizes).is_err());
    let sizes = r#"{"hidden_size": 64, "vocab_size": 1000, "cutoffs": [100, 500]}"#;
    assert_eq!(serde_json::from_str::<AdaptiveConfig>(sizes)?, AdaptiveConfig::new(64, 1000, vec![100, 500]));
    let sizes = r#"{"hidden_size": 64, "vocab_size": 1000, "components": 5}"#;
    assert_eq!(serde_json::from_str::<MixtureConfig>(sizes)?, MixtureConfig::new(64, 1000, 5));
    let some =
        r#"{"hidden_size": 64, "vocab_size": 1000, "components": 5, "context_dim": 32, "activation": "identity"}"#;
    let expected = MixtureConfig::new(64, 1000, 5).with_context_dim(32).with_activation(ContextActivation::Identity);
    assert_eq!(serde_json::from_str::<MixtureConfig>(some)?, expected);
    assert_eq!(serde_json::from_str::<Sampling>(r#"{"temperature": 0.7}"#)?, Sampling::new().with_temperature(0.7));
    assert_eq!(serde_json::from_str::<CharCnnConfig>(r#"{"context_dim": 32}"#)?, CharCnnConfig::new(32));
    assert!(serde_json::from_str::<MixtureConfig>(r#"{"hidden_size": 64, "vocab_size": 1000}"#).is_err());
    Ok(())
}
