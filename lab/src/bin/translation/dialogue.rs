//! Dialogues as pairs of a context (the utterances before) and the response to it.

use crate::corpus::{Corpus, Pair};
use lab::{data::read, Result};
use rand::seq::SliceRandom;
use rand::{rngs::StdRng, SeedableRng};
use serde_json::Value;
use std::path::Path;

/// The marks before each utterance of a context: whether the responder said it.
pub(crate) const MARKS: [&str; 2] = ["<you>", "<me>"];

/// One in this many dialogues is for validation, and as many are for the test.
const HELD_OUT: usize = 6;
/// The seed of the split: all trainings are compared on the same dialogues, whatever their own seed is.
const SPLIT: u64 = 1;

struct Utterance {
    speaker: String,
    text: String,
}

/// Reads one dialogue per line, an object with `utts`: a list of [speaker, text, ..]. Dialogues are held out whole: a
/// sixth of them at random for validation and a sixth for the test, at least one each.
pub(crate) fn corpus(path: &Path, turns: usize) -> Result<Corpus> {
    let mut dialogues = Vec::new();
    for (i, line) in read(path)?.lines().enumerate() {
        let dialogue = parse(line).map_err(|error| format!("{} line {}: {error}", path.display(), i + 1))?;
        dialogues.push(pairs(&dialogue, turns));
    }
    if dialogues.len() < 3 {
        return Err(format!("{} has {} dialogues, expected at least 3", path.display(), dialogues.len()).into());
    }
    dialogues.shuffle(&mut StdRng::seed_from_u64(SPLIT));
    let held_out = (dialogues.len() / HELD_OUT).max(1);
    let (valid, rest) = dialogues.split_at(held_out);
    let (test, train) = rest.split_at(held_out);
    if [valid, test, train].iter().any(|part| part.iter().all(Vec::is_empty)) {
        return Err(format!("{} has no dialogue of two utterances to learn from or to hold out", path.display()).into());
    }
    let name = format!("the dialogues of {}", path.display());
    Ok(Corpus { name, train: train.concat(), valid: valid.concat(), test: test.concat() })
}

fn parse(line: &str) -> Result<Vec<Utterance>> {
    let value: Value = serde_json::from_str(line)?;
    let utterances = value.get("utts").and_then(Value::as_array).ok_or("expected an object with a list \"utts\"")?;
    let utterance = |value: &Value| {
        let part = |i: usize| value.get(i).and_then(Value::as_str);
        let (speaker, text) =
            part(0).zip(part(1)).ok_or_else(|| format!("expected [speaker, text, ..], got {value}"))?;
        Ok(Utterance { speaker: speaker.to_owned(), text: text.to_owned() })
    };
    utterances.iter().map(utterance).collect()
}

/// Returns every utterance but the first, as a response to at most `turns` utterances before it.
fn pairs(dialogue: &[Utterance], turns: usize) -> Vec<Pair> {
    let pair = |i: usize| {
        let response = &dialogue[i];
        let before = dialogue[i.saturating_sub(turns)..i].iter();
        let context = context(before.map(|said| (said.speaker == response.speaker, said.text.as_str())));
        Pair { source: context, target: response.text.clone() }
    };
    let spoken = |i: &usize| !dialogue[*i].text.trim().is_empty();
    (1..dialogue.len()).filter(spoken).map(pair).collect()
}

/// Returns a context from utterances, each with whether the responder said it.
pub(crate) fn context<'a>(utterances: impl Iterator<Item = (bool, &'a str)>) -> String {
    utterances.map(|(mine, text)| format!("{} {text}", MARKS[usize::from(mine)])).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn a_context_says_who_spoke() {
        let line = r#"{"utts": [["A", "hello", []], ["B", "hi", []], ["A", "how are you"], ["A", "today"]]}"#;
        let pairs = pairs(&parse(line).unwrap(), 2);
        let found: Vec<_> = pairs.iter().map(|pair| (pair.source.as_str(), pair.target.as_str())).collect();
        let expected =
            [("<you> hello", "hi"), ("<me> hello <you> hi", "how are you"), ("<you> hi <me> how are you", "today")];
        assert_eq!(found, expected);
    }

    fn file(name: &str, dialogues: usize) -> std::path::PathBuf {
        let line = |i: usize| format!("{{\"utts\": [[\"A\", \"question {i}\"], [\"B\", \"answer {i}\"]]}}\n");
        let path = std::env::temp_dir().join(format!("translation_{name}_{}.jsonl", std::process::id()));
        std::fs::write(&path, (0..dialogues).map(line).collect::<String>()).unwrap();
        path
    }

    #[test]
    fn a_sixth_is_for_validation_and_a_sixth_for_the_test() {
        for (dialogues, held_out) in [(3, 1), (6, 1), (60, 10), (65, 10)] {
            let path = file("split", dialogues);
            let Corpus { train, valid, test, .. } = corpus(&path, 2).unwrap();
            std::fs::remove_file(path).unwrap();
            assert_eq!([train.len(), valid.len(), test.len()], [dialogues - 2 * held_out, held_out, held_out]);
            let all = [train, valid, test].concat();
            let different: HashSet<&str> = all.iter().map(|pair| pair.target.as_str()).collect();
            assert_eq!(different.len(), dialogues);
        }
    }

    #[test]
    fn two_dialogues_cannot_be_split() {
        let path = file("two", 2);
        let error = corpus(&path, 2).err().unwrap().to_string();
        std::fs::remove_file(path).unwrap();
        assert!(error.contains("2 dialogues, expected at least 3"), "{error}");
    }

    #[test]
    fn a_line_without_utterances_is_an_error_that_names_it() {
        let path = std::env::temp_dir().join(format!("translation_dialogue_{}.jsonl", std::process::id()));
        std::fs::write(&path, "{\"utts\": []}\n{\"turns\": []}\n").unwrap();
        let error = corpus(&path, 1).err().unwrap().to_string();
        assert!(error.contains("line 2") && error.contains("utts"), "{error}");
        std::fs::remove_file(path).unwrap();
    }
}
