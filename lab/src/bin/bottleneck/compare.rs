//! The contexts in which two models differ most (Yang et al., 2018, table 14).

use crate::args::Args;
use crate::source::{values, Source, Text};
use candle_core::{Device, Tensor};
use lab::data::{Corpus, END_OF_SENTENCE};
use lab::Result;
use mos_head::Distributions;

/// Tokens of a context that are printed, at most.
const SHOWN: usize = 30;
/// Contexts at a time.
const BLOCK: usize = 256;

pub(crate) fn run(args: &Args, sources: &[Source]) -> Result<()> {
    let [a, b] = sources else { return Err("--compare needs two checkpoints".into()) };
    let (Some(text), Some(other)) = (&a.text, &b.text) else { return Err("--compare needs checkpoints".into()) };
    if a.vocab() != b.vocab() {
        let [a, b] = [a, b].map(|source| format!("{} has {} token ids", source.name, source.vocab()));
        return Err(format!("{a}, but {b}").into());
    }
    if text.corpus.data.digest != other.corpus.data.digest {
        let [first, second] = [text, other].map(|text| &text.corpus.data.name);
        return Err(format!("{} was trained on {first}, but {} on {second}", a.name, b.name).into());
    }
    let (a_log_probs, b_log_probs) = (log_probs(a)?, log_probs(b)?);
    let mut order: Vec<usize> = (0..a_log_probs.len()).collect();
    let gain = |&i: &usize| b_log_probs[i] - a_log_probs[i];
    order.sort_by(|i, j| gain(j).total_cmp(&gain(i)));
    let top = args.top.min(order.len() / 2);
    let (ends, starts) = (order.iter().rev().take(top), order.iter().take(top));
    for (better, worse, chosen) in [(b, a, starts.collect::<Vec<_>>()), (a, b, ends.collect())] {
        println!("Where {} is better than {}:\n", better.name, worse.name);
        for &i in chosen {
            println!("{}", context(text, i));
            println!("  target: {} ({:+.2} nats)", word(&text.corpus, target(text, i)), gain(&i).abs());
            for source in [a, b] {
                let name = if a.label() == b.label() { &source.name } else { source.label() };
                println!("  {name:<8} {}", best(source, &text.corpus, i)?);
            }
            println!();
        }
    }
    Ok(())
}

/// Returns the log-probability of each context's target.
fn log_probs(source: &Source) -> Result<Vec<f64>> {
    let targets = source.targets.as_deref().unwrap_or_default();
    let mut found = vec![];
    for (i, targets) in targets.chunks(BLOCK).enumerate() {
        let mixture = source.mixture(i * BLOCK, targets.len())?;
        let targets = Tensor::new(targets, &Device::Cpu)?;
        found.extend(values(&mixture.log_prob(&targets)?)?);
    }
    Ok(found)
}

fn target(text: &Text, i: usize) -> u32 {
    text.ids[text.places[i]]
}

fn word(corpus: &Corpus, id: u32) -> &str {
    &corpus.words[id as usize]
}

/// Returns the sentence before the target and the one before that, as far as they are shown.
fn context(text: &Text, i: usize) -> String {
    let before = &text.ids[..text.places[i]];
    let words = before.iter().map(|&id| word(&text.corpus, id));
    let mut ends = 0;
    let mut shown: Vec<&str> = words
        .rev()
        .take(SHOWN)
        .take_while(|&word| {
            ends += usize::from(word == END_OF_SENTENCE);
            ends < 2
        })
        .collect();
    shown.reverse();
    format!("  .. {} ___", shown.join(" "))
}

/// Returns the five most probable tokens, with their probabilities.
fn best(source: &Source, corpus: &Corpus, i: usize) -> Result<String> {
    let top = source.mixture(i, 1)?.top_k(5.min(corpus.words.len()))?;
    let ids = top.token_ids.flatten_all()?.to_vec1::<u32>()?;
    let log_probs = values(&top.log_probs)?;
    let pair = |(id, log_prob): (u32, f64)| format!("{} {:.2}", word(corpus, id), log_prob.exp());
    Ok(ids.into_iter().zip(log_probs).map(pair).collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sources::open;
    use crate::sources::tests::{args, folder, saved};
    use lab::{data::language::Teacher, layers::HeadKind};

    fn sources(args: &Args) -> Vec<Source> {
        open(args).expect("opens")
    }

    #[test]
    fn models_of_other_vocabularies_or_texts_are_errors_that_name_them() {
        let corpus = |folder| Corpus::from_folder(folder, None).expect("a corpus");
        let folders = [folder("three", "a b a b a\n"), folder("same_three", "b a b\n")];
        let paths = [
            saved("built_in", HeadKind::Softmax, Teacher::default().built_in(1)),
            saved("three", HeadKind::Mos, corpus(&folders[0])),
            saved("same_three", HeadKind::Mos, corpus(&folders[1])),
        ];
        let error = |a: usize, b: usize| {
            let args = args(&["--compare"], &[&paths[a], &paths[b]]);
            run(&args, &sources(&args)).expect_err("must fail").to_string()
        };
        let sizes = error(0, 1);
        assert!(sizes.contains("has 512 token ids") && sizes.contains("has 3 token ids"), "{sizes}");
        let texts = error(1, 2);
        assert!(texts.contains("bottleneck_three") && texts.contains("bottleneck_same_three"), "{texts}");
        let one = open(&args(&["--compare"], &[&paths[0]])).err().expect("must fail").to_string();
        assert!(one.contains("--compare needs two checkpoints, got 1"), "{one}");
        let same = args(&["--compare"], &[&paths[1], &paths[1]]);
        run(&same, &sources(&same)).expect("a model can be compared with itself");
    }

    #[test]
    fn a_context_is_the_sentence_so_far_and_the_one_before() {
        let folder = folder("context", "a b\nc d\ne f g\n");
        let path = saved("context", HeadKind::Softmax, Corpus::from_folder(&folder, None).expect("a corpus"));
        let source = sources(&args(&[], &[&path])).remove(0);
        let text = source.text.as_ref().expect("a text");
        let shown = |place| context(text, text.places.iter().position(|&other| other == place).expect("all places"));
        assert_eq!(shown(8), "  .. c d <eos> e ___");
        assert_eq!(shown(1), "  .. <eos> ___");
        let all = best(&source, &text.corpus, 0).expect("a ranking");
        assert_eq!(all.split(", ").count(), 5);
    }
}
