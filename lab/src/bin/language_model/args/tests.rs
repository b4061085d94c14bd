use super::*;

fn recipe(flags: &[&str]) -> Recipe {
    Args::try_parse_from([&["language_model", "--data", "DIR"], flags].concat())
        .expect("valid flags")
        .recipe()
        .expect("no contradiction")
}

#[test]
fn flags_change_a_preset() {
    let plain = recipe(&["--preset", "ptb-mos"]);
    assert_eq!((plain.hidden, plain.lr, plain.awd.ar), (620, 20.0, Some(2.0)));
    let changed = recipe(&["--preset", "ptb-mos", "--hidden", "64", "--ar", "0", "--dropout", "0.2"]);
    assert_eq!((changed.hidden, changed.awd.ar, changed.awd.inner), (64, Some(0.0), Some(960)));
    assert_eq!((changed.dropout, changed.awd.input_dropout, changed.awd.weight_dropout), (0.2, None, Some(0.5)));
    assert!(recipe(&["--tied"]).awd.tied() && !recipe(&["--preset", "small", "--tied", "false"]).awd.tied());
    assert_eq!(recipe(&[]).awd, Awd::NONE);
}

#[test]
fn the_learning_rate_fits_the_optimizer() {
    assert_eq!(recipe(&[]).lr, 20.0);
    assert_eq!(recipe(&["--optimizer", "adam"]).lr, 0.001);
    assert_eq!(recipe(&["--preset", "wt2-mos"]).lr, 15.0);
    assert_eq!(recipe(&["--preset", "wt2-mos", "--lr", "3"]).lr, 3.0);
}

#[test]
fn a_preset_has_its_head() {
    let heads = |flags: &[&str]| {
        let flags = [&["language_model", "--data", "DIR"], flags].concat();
        Args::try_parse_from(flags).expect("valid flags").training().heads()
    };
    assert_eq!(heads(&["--preset", "ptb-mos"]), [HeadKind::Mos]);
    assert_eq!(heads(&["--preset", "small"]), HeadKind::ALL);
    assert_eq!(heads(&["--preset", "small", "--head", "moc"]), [HeadKind::Moc]);
    let args = Args::try_parse_from(["language_model", "--data", "DIR", "--preset", "ptb-mos", "--head", "softmax"]);
    let error = args.expect("valid flags").check_head().expect_err("another head").to_string();
    assert!(error.contains("--head mos") && error.contains("softmax"), "{error}");
}

#[test]
fn heads_that_cannot_have_the_output_are_left_out_of_all() {
    let flags = |flags: &str| {
        let args = ["language_model"].into_iter().chain(flags.split_whitespace());
        Args::try_parse_from(args).expect("valid flags").training()
    };
    for all in ["--output nce", "--output nce --head all", "--output nce --search 2"] {
        assert_eq!(flags(all).heads(), [HeadKind::Softmax, HeadKind::Moc], "{all}");
        assert_eq!(flags(all).left_out.len(), 1);
        assert!(flags(all).left_out[0].1.contains("one softmax"));
    }
    // An error when it is built: nothing else is asked for.
    assert_eq!(flags("--output nce --head mos").heads(), [HeadKind::Mos]);
    assert_eq!(flags("--output sampled").heads(), HeadKind::ALL);
}

#[test]
fn finetuning_averages_until_it_no_longer_improves() {
    let plain = recipe(&["--finetune", "FILE"]);
    assert!(plain.finetune && plain.optimizer == OptimizerKind::Sgd && plain.epochs == 1000);
    assert_eq!((plain.lr, plain.decay, plain.awd.nonmono), (20.0, 1.0, Some(5)));
    assert_eq!(recipe(&["--preset", "ptb-mos", "--finetune", "FILE"]).lr, 25.0);
    assert_eq!(recipe(&["--preset", "ptb-mos", "--optimizer", "adam"]).awd.nonmono, None);
}

#[test]
fn a_grown_mixture_has_linear_contexts_as_wide_as_the_hidden_states() {
    for flags in [&["--grow", "FILE"][..], &["--grow", "FILE", "--preset", "small"]] {
        let grown = recipe(flags);
        assert_eq!((grown.context, grown.activation), (Some(grown.hidden), ContextActivation::Identity));
    }
    let tied = recipe(&["--grow", "FILE", "--tied", "--embedding", "50"]);
    assert_eq!((tied.hidden, tied.context, tied.embedding), (50, Some(50), Some(50)));
    let args = |flags: &str| Args::try_parse_from(format!("language_model --grow F {flags}").split_whitespace());
    assert_eq!(args("").expect("valid flags").training().heads(), [HeadKind::Mos]);
    let error = args("--head moc").expect("valid flags").recipe().expect_err("another head").to_string();
    assert!(error.contains("--grow") && error.contains("--head mos"), "{error}");
    for flags in ["--resume G", "--finetune G", "--spread 0.5", "--activation tanh", "--context 5", "--evaluate G"] {
        assert!(args(flags).is_err(), "{flags}");
    }
}

#[test]
fn mixtape_is_asked_for_by_name() {
    let heads = |flags: &str| {
        let args = Args::try_parse_from(format!("language_model {flags}").split_whitespace());
        args.expect("valid flags").training().heads()
    };
    assert_eq!(heads("--head mixtape"), [HeadKind::Mixtape]);
    assert_eq!(heads("--head all"), HeadKind::ALL);
}

#[test]
fn spelling_has_its_own_sizes_and_a_softmax() {
    let spelled = recipe(&["--spell", "FILE", "--hidden", "64"]);
    assert_eq!((spelled.hidden, spelled.embedding, spelled.optimizer), (64, Some(32), OptimizerKind::Adam));
    let args = |flags: &str| Args::try_parse_from(format!("language_model --spell F {flags}").split_whitespace());
    assert_eq!(args("--renormalise 0").expect("valid flags").training().heads(), [HeadKind::Softmax]);
    assert_eq!(args("--head all").expect("valid flags").training().heads(), HeadKind::ALL);
    for flags in ["--tied", "--output nce", "--codes 9", "--finetune F", "--generate 5", "--evaluate F", "--cache"] {
        assert!(args(flags).is_err(), "{flags}");
    }
}

#[cfg(feature = "mpi")]
#[test]
fn processes_train_models_of_words() {
    let args = |flags: &str| Args::try_parse_from(format!("language_model --mpi {flags}").split_whitespace());
    for flags in ["--evaluate F", "--spell F"] {
        assert!(args(flags).is_err(), "{flags}");
    }
    let error = args("--output bpe").expect("valid flags").ranks().expect_err("codes").to_string();
    assert!(error.contains("--mpi"), "{error}");
}

#[test]
fn sizes_that_contradict_a_tied_decoder_are_errors() {
    assert_eq!(recipe(&["--preset", "ptb-mos", "--embedding", "300"]).context, Some(300));
    for flags in [
        &["--preset", "ptb-mos", "--embedding", "300", "--context", "200"][..],
        &["--preset", "ptb-softmax", "--embedding", "300", "--hidden", "200"],
    ] {
        let args = Args::try_parse_from([&["language_model", "--data", "DIR"], flags].concat()).expect("valid flags");
        let error = args.recipe().expect_err("a contradiction").to_string();
        assert!(error.contains("300") && error.contains("200"), "{error}");
    }
}

#[test]
fn flags_without_effect_are_errors() {
    let flags =
        ["--dynamic-lr 1", "--cache-window 5", "--floor 1e-8", "--export F", "--preset small", "--renormalise 5"];
    for flags in flags {
        let with = |start: &str| Args::try_parse_from(format!("language_model {start} {flags}").split_whitespace());
        assert!(with("").is_err(), "{flags}");
    }
    for flags in ["--lr 1", "--tied", "--bptt 3", "--head mos", "--generate 5", "--dynamic-lr 1"] {
        let with = |start: &str| Args::try_parse_from(format!("language_model {start} {flags}").split_whitespace());
        assert!(with("--evaluate F").is_err(), "{flags}");
    }
    assert!(
        Args::try_parse_from("language_model --evaluate F --cache --cache-window 5 --floor 1e-8".split(' ')).is_ok()
    );
}
