//! The final table and the JSON line.

use super::trie::Mass;
use lab::show::report::{self, number};
use lab::{layers::HeadKind, training::heads::Outcome};
use serde_json::{json, Value};

/// These are the measurements of a character LSTM after its training.
pub(super) struct Spelled {
    pub(super) test_nll: Option<f64>,
    /// How words are spelled at the sampled positions of the validation text.
    pub(super) mass: Option<Mass>,
}

/// The word model with its own output layer.
pub(super) struct WordModelResults {
    pub(super) kind: HeadKind,
    pub(super) parameters: usize,
    pub(super) valid_nll: f64,
    pub(super) test_nll: Option<f64>,
    pub(super) sample_nll: Option<f64>,
    /// The number of positions in the sample.
    pub(super) positions: Option<usize>,
}

/// Makes the table of the perplexities of words. The perplexity of strings is at least the perplexity of words given
/// the vocabulary.
pub(super) fn table(words: &WordModelResults, rows: &[Outcome<Spelled>]) -> String {
    let columns = ["output", "parameters", "valid ppl", "test ppl", "sample ppl", "vocabulary's mass", "renormalised"];
    let ppl = |nll: Option<f64>| number(nll.map(f64::exp), 2);
    let word_row = vec![
        format!("words, {}", words.kind.name()),
        words.parameters.to_string(),
        ppl(Some(words.valid_nll)),
        ppl(words.test_nll),
        ppl(words.sample_nll),
        number(words.positions.map(|_| 1.0), 4),
        ppl(words.sample_nll),
    ];
    let cells = |row: &Outcome<Spelled>| {
        let mass = row.more.as_ref().and_then(|spelled| spelled.mass);
        vec![
            format!("characters, {}", row.kind.name()),
            row.parameters.to_string(),
            ppl(Some(row.valid_nll)),
            ppl(row.more.as_ref().and_then(|spelled| spelled.test_nll)),
            ppl(mass.map(|mass| mass.nll)),
            number(mass.map(|mass| mass.log_mass.exp()), 4),
            ppl(mass.map(Mass::renormalised)),
        ]
    };
    let table = report::table(&columns, &[vec![word_row], rows.iter().map(cells).collect()].concat());
    let Some(positions) = words.positions else { return table };
    format!(
        "{table}\nThe last three are of {positions} positions of the validation text: as strings; the probability of \
         the vocabulary (geometric mean); given the vocabulary, as the perplexity of the word model is."
    )
}

pub(super) fn json(words: &WordModelResults, row: &Outcome<Spelled>) -> Value {
    let mass = row.more.as_ref().and_then(|spelled| spelled.mass);
    row.json(json!({
        "name": format!("characters, {}", row.kind.name()),
        "test_perplexity": row.more.as_ref().and_then(|spelled| spelled.test_nll).map(f64::exp),
        "positions": words.positions,
        "sample_perplexity": mass.map(|mass| mass.nll.exp()),
        "vocabulary_mass": mass.map(|mass| mass.log_mass.exp()),
        "renormalised_perplexity": mass.map(|mass| mass.renormalised().exp()),
        "word_model": {
            "head": words.kind.name(),
            "parameters": words.parameters,
            "valid_perplexity": words.valid_nll.exp(),
            "test_perplexity": words.test_nll.map(f64::exp),
            "sample_perplexity": words.sample_nll.map(f64::exp),
        },
    }))
}
