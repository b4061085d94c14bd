//! Configurations as they stand in a model's JSON (feature `serde`).
#![cfg(feature = "serde")]

use mos_head::{Activation, AdaptiveConfig, Classes, HierarchicalConfig, MixtureConfig, Sampling, SoftmaxConfig};

#[test]
fn what_is_written_is_read_again() -> serde_json::Result<()> {
    let softmax = SoftmaxConfig::new(64, 1000).with_decoder_bias(false).with_softcap(30.0).with_logit_scale(0.5);
    assert_eq!(serde_json::from_str::<SoftmaxConfig>(&serde_json::to_string(&softmax)?)?, softmax);
    let mixture = MixtureConfig::new(64, 1000, 5)
        .with_context(32)
        .with_prior_bias(true)
        .with_activation(Activation::Identity)
        .with_dropout(0.2)
        .with_softcap(30.0);
    assert_eq!(serde_json::from_str::<MixtureConfig>(&serde_json::to_string(&mixture)?)?, mixture);
    let adaptive = AdaptiveConfig::new(64, 1000, vec![100, 500]).with_div_value(2.0).with_head_bias(true);
    assert_eq!(serde_json::from_str::<AdaptiveConfig>(&serde_json::to_string(&adaptive)?)?, adaptive);
    for classes in [Classes::Consecutive(2), Classes::Given(vec![1, 0, 1])] {
        let hierarchical = HierarchicalConfig::new(64, 3).with_bias(false).with_classes(classes);
        assert_eq!(serde_json::from_str::<HierarchicalConfig>(&serde_json::to_string(&hierarchical)?)?, hierarchical);
    }
    let sampling = Sampling::new().with_temperature(0.8).with_top_p(0.95).with_top_k(40);
    assert_eq!(serde_json::from_str::<Sampling>(&serde_json::to_string(&sampling)?)?, sampling);
    Ok(())
}

#[test]
fn what_is_left_out_has_its_default() -> serde_json::Result<()> {
    assert_eq!(
        serde_json::from_str::<SoftmaxConfig>(r#"{"hidden": 64, "vocab": 1000}"#)?,
        SoftmaxConfig::new(64, 1000)
    );
    let sizes = r#"{"hidden": 64, "vocab": 1000}"#;
    assert_eq!(serde_json::from_str::<HierarchicalConfig>(sizes)?, HierarchicalConfig::new(64, 1000));
    assert!(serde_json::from_str::<AdaptiveConfig>(sizes).is_err());
    let sizes = r#"{"hidden": 64, "vocab": 1000, "cutoffs": [100, 500]}"#;
    assert_eq!(serde_json::from_str::<AdaptiveConfig>(sizes)?, AdaptiveConfig::new(64, 1000, vec![100, 500]));
    let sizes = r#"{"hidden": 64, "vocab": 1000, "components": 5}"#;
    assert_eq!(serde_json::from_str::<MixtureConfig>(sizes)?, MixtureConfig::new(64, 1000, 5));
    let some = r#"{"hidden": 64, "vocab": 1000, "components": 5, "context": 32, "activation": "identity"}"#;
    let expected = MixtureConfig::new(64, 1000, 5).with_context(32).with_activation(Activation::Identity);
    assert_eq!(serde_json::from_str::<MixtureConfig>(some)?, expected);
    assert_eq!(serde_json::from_str::<Sampling>(r#"{"temperature": 0.7}"#)?, Sampling::new().with_temperature(0.7));
    assert!(serde_json::from_str::<MixtureConfig>(r#"{"hidden": 64, "vocab": 1000}"#).is_err());
    Ok(())
}
