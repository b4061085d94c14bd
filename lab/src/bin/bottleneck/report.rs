//! The results as text and as JSON.

use crate::{distributions::Components, source::Head, study::Study};
use lab::show::report::{number, table};
use serde_json::{json, Value};

pub(crate) fn text(studies: &[Study]) -> String {
    let mut parts = vec![];
    let columns =
        ["model", "head", "d", "vocab", "contexts", "rank", "pairwise KL", "priors", "posteriors", "perplexity"];
    let effective = |components: &Option<Components>| number(components.as_ref().map(Components::in_a_context), 2);
    let cells = |study: &Study| {
        vec![
            study.name.clone(),
            study.head.map_or("-", |head| head.kind.name()).into(),
            study.head.map_or("-".into(), |head| head.width.to_string()),
            study.vocab.to_string(),
            study.contexts.to_string(),
            study.rank.to_string(),
            number(study.divergence, 3),
            effective(&study.priors),
            effective(&study.posteriors),
            number(study.perplexity, 2),
        ]
    };
    parts.push(table(&columns, &studies.iter().map(cells).collect::<Vec<_>>()));
    parts.push(
        "rank: singular values of the log-probabilities above the roundoff. pairwise KL: between the distributions of\n\
         two contexts, nats. priors, posteriors: effective number of components in a context."
            .into(),
    );
    parts.extend(studies.iter().filter(|study| !study.low_rank.is_empty()).map(low_rank));
    parts.extend(studies.iter().map(verdict));
    parts.join("\n\n")
}

fn low_rank(study: &Study) -> String {
    let cells = |&(rank, perplexity): &(usize, f64)| {
        let is_bound = study.head.is_some_and(|head| rank == head.width + 2);
        let note = if is_bound { "what a softmax of this width can have" } else { "" };
        vec![rank.to_string(), format!("{perplexity:.2}"), note.to_owned()]
    };
    let rows: Vec<_> = study.low_rank.iter().map(cells).collect();
    let title = format!("{}, the best approximation of each rank:\n", study.name);
    title + table(&["rank", "perplexity", ""], &rows).lines().map(str::trim_end).collect::<Vec<_>>().join("\n").as_str()
}

fn verdict(study: &Study) -> String {
    let Study { name, rank, contexts, vocab, .. } = study;
    let most = contexts.min(vocab);
    let Some(Head { width, .. }) = study.head else {
        return format!("{name}: rank {rank} of {most}. A softmax of width d has at most d + 2.");
    };
    if *rank <= width + 2 {
        return format!("{name}: rank {rank} of {most}, within the {} of a softmax of width {width}.", width + 2);
    }
    if rank == most {
        return format!("{name}: full rank, {rank} of {most}. No softmax of width {width} can express it.");
    }
    format!("{name}: rank {rank} of {most}, above the {} of a softmax of width {width}.", width + 2)
}

pub(crate) fn json(studies: &[Study]) -> Value {
    let components = |components: &Option<Components>| {
        components.as_ref().map(|all| json!({ "in_a_context": all.in_a_context(), "in_all": all.in_all() }))
    };
    let study = |study: &Study| {
        let low_rank: Vec<Value> = study
            .low_rank
            .iter()
            .map(|&(rank, perplexity)| json!({ "rank": rank, "perplexity": perplexity }))
            .collect();
        json!({
            "model": study.name,
            "head": study.head.map(|head| head.kind.name()),
            "context": study.head.map(|head| head.width),
            "vocab": study.vocab,
            "contexts": study.contexts,
            "rank": study.rank,
            "tolerance": study.tolerance,
            "largest_singular_value": study.spectrum.values.first(),
            "singular_values_below_percent": study.spectrum.distribution(),
            "pairwise_kl_nats": study.divergence,
            "effective_priors": components(&study.priors),
            "effective_posteriors": components(&study.posteriors),
            "perplexity": study.perplexity,
            "low_rank": low_rank,
        })
    };
    studies.iter().map(study).collect()
}
