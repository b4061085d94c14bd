//! The built-in task: from English of a few dozen words to an invented language with another word order, genders, and
//! agreement of articles, adjectives and verbs. Every sentence has exactly one translation.
//!
//! ```text
//! the big dog sees two old cats today  ->  hodi lo kano grando dos gatas viejas vidat
//! ```

use crate::corpus::{Corpus, Pair};
use rand::seq::IndexedRandom;
use rand::{rngs::StdRng, Rng, SeedableRng};
use std::collections::HashSet;

/// Singular, stem, whether feminine.
const NOUNS: [(&str, &str, bool); 16] = [
    ("dog", "kan", false),
    ("cat", "gat", true),
    ("girl", "fil", true),
    ("boy", "filk", false),
    ("king", "reg", false),
    ("queen", "regin", true),
    ("tree", "arb", false),
    ("house", "dom", true),
    ("horse", "kaval", false),
    ("flower", "flor", true),
    ("teacher", "instru", true),
    ("doctor", "medik", false),
    ("bird", "pas", false),
    ("star", "stel", true),
    ("river", "riv", false),
    ("book", "libr", true),
];
const ADJECTIVES: [(&str, &str); 12] = [
    ("big", "grand"),
    ("small", "pequ"),
    ("old", "viej"),
    ("young", "yun"),
    ("red", "rus"),
    ("green", "verd"),
    ("good", "bon"),
    ("quiet", "kalm"),
    ("happy", "felic"),
    ("strange", "stran"),
    ("rich", "rik"),
    ("tired", "lac"),
];
/// After "he" and after "they", and the stem.
const VERBS: [(&str, &str, &str); 12] = [
    ("sees", "see", "vid"),
    ("loves", "love", "am"),
    ("finds", "find", "trov"),
    ("follows", "follow", "sekv"),
    ("draws", "draw", "desen"),
    ("hears", "hear", "aud"),
    ("likes", "like", "plac"),
    ("knows", "know", "kon"),
    ("paints", "paint", "pint"),
    ("remembers", "remember", "memor"),
    ("wants", "want", "vol"),
    ("meets", "meet", "renkont"),
];
const ADVERBS: [(&str, &str); 6] =
    [("today", "hodi"), ("often", "oft"), ("tomorrow", "morgi"), ("again", "denov"), ("here", "tie"), ("now", "nun")];
/// The word, whether plural, and the stem of its four forms; "dos" has only one form.
const DETERMINERS: [(&str, bool, &str); 6] = [
    ("the", false, "l"),
    ("the", true, "l"),
    ("a", false, "un"),
    ("two", true, "dos"),
    ("my", false, "mi"),
    ("my", true, "mi"),
];

pub(crate) fn corpus(train: usize, valid: usize, seed: u64) -> Corpus {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut seen = HashSet::new();
    let mut pairs = Vec::new();
    while pairs.len() < train + valid {
        let pair = sentence(&mut rng);
        if seen.insert(pair.source.clone()) {
            pairs.push(pair);
        }
    }
    let valid = pairs.split_off(train);
    Corpus { name: "a built-in language".into(), train: pairs, valid, test: vec![] }
}

/// Returns a noun phrase in both languages, and whether it is plural.
fn phrase(rng: &mut StdRng) -> (String, String, bool) {
    let (determiner, plural, stem) = pick(&DETERMINERS, rng);
    let (noun, noun_stem, feminine) = pick(&NOUNS, rng);
    let ending = format!("{}{}", if feminine { "a" } else { "o" }, if plural { "s" } else { "" });
    let adjectives: Vec<_> = {
        let count = rng.random_range(0..3);
        ADJECTIVES.choose_multiple(rng, count).copied().collect()
    };
    let mut source = vec![determiner.to_owned()];
    let mut target = vec![if stem == "dos" { stem.to_owned() } else { format!("{stem}{ending}") }];
    source.extend(adjectives.iter().map(|(word, _)| (*word).to_owned()));
    source.push(format!("{noun}{}", if plural { "s" } else { "" }));
    target.push(format!("{noun_stem}{ending}"));
    target.extend(adjectives.iter().map(|(_, stem)| format!("{stem}{ending}")));
    (source.join(" "), target.join(" "), plural)
}

fn sentence(rng: &mut StdRng) -> Pair {
    let (subject, new_subject, plural) = phrase(rng);
    let (object, new_object, _) = phrase(rng);
    let (verb, verb_of_many, stem) = pick(&VERBS, rng);
    let verb = if plural { verb_of_many } else { verb };
    let new_verb = format!("{stem}{}", if plural { "ant" } else { "at" });
    let (adverb, new_adverb) = if rng.random::<bool>() { pick(&ADVERBS, rng) } else { ("", "") };
    Pair {
        source: format!("{subject} {verb} {object} {adverb}").trim().to_owned(),
        target: format!("{new_adverb} {new_subject} {new_object} {new_verb}").trim().to_owned(),
    }
}

fn pick<T: Copy, const N: usize>(from: &[T; N], rng: &mut StdRng) -> T {
    from[rng.random_range(0..N)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_language_agrees_and_the_held_out_sentences_are_new() {
        let corpus = corpus(2000, 200, 1);
        let known: HashSet<_> = corpus.train.iter().map(|pair| &pair.source).collect();
        assert!(corpus.valid.iter().all(|pair| !known.contains(&pair.source)));
        for pair in corpus.train.iter().filter(|pair| pair.source.starts_with("two")) {
            assert!(pair.target.ends_with("ant"), "{pair:?}");
        }
        assert_eq!(self::corpus(2000, 200, 1).valid, corpus.valid);
        assert_ne!(self::corpus(2000, 200, 2).valid, corpus.valid);
    }
}
