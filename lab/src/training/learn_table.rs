//! Learns the table of a code vocabulary: a language model of its codes is trained, and the words are reallocated to
//! the cells where it expects them, in turn (Li et al., NIPS 2016; Kong et al., AAAI 2019).

use super::model::{Model, Pass};
use super::{language_model::LanguageModel, recipe::Recipe, session::Session, sizes::InitialValues};
use crate::data::{insert_table, load_table, Coding, Data, Digest};
use crate::layers::{Checkpoint, HeadKind};
use crate::{show::progress, Result};
use candle_core::{Device, D};
use mos_codes::{Assignment, CodeCosts, CodeTable, TargetCode};
use std::path::Path;

/// The size of the largest vocabulary whose words are assigned exactly.
const EXACT: usize = 2500;
/// The number of cells, the cheapest ones, that are candidates for a word of a larger vocabulary.
const CANDIDATES: usize = 64;

/// This state has what is learned so far.
struct State {
    /// The number of rounds that are done.
    rounds: usize,
    /// The table of the last round, or the first.
    table: CodeTable,
    /// The best table, and the NLL of the validation text per word after its round.
    best: Option<(CodeTable, f64)>,
    /// The model after the last round.
    variables: Option<Checkpoint>,
}

/// Learns `rounds` tables, the first of which is `start`, and returns the best. Each is trained for one epoch of
/// `recipe`. `file` has the best table so far, and all that a later run needs to continue.
pub(crate) fn learn(
    words: &Data<u32>,
    vocabulary: &[String],
    start: CodeTable,
    rounds: usize,
    recipe: &Recipe,
    file: Option<&Path>,
    device: &Device,
) -> Result<CodeTable> {
    let digest = Digest::default().texts(vocabulary).ids(&words.train).ids(&words.valid).ids(&[recipe.seed as u32]);
    let digest = digest.to_string();
    let mut state = State { rounds: 0, table: start, best: None, variables: None };
    if let Some(path) = file.filter(|path| path.exists()) {
        state = State::load(path, &state.table, &digest, device)?;
        println!("table    {} rounds are done", state.rounds);
    }
    let recipe = Recipe { epochs: 1, finetune: false, ..*recipe };
    while state.rounds < rounds {
        if let Some(variables) = &state.variables {
            state.table = reallocated(&state.table, variables, words, vocabulary, &recipe, device)?;
        }
        let coding = Coding::from_table(&state.table, vocabulary)?;
        let model = model(&coding, state.variables.as_ref(), &recipe, device)?;
        let mut session = Session::new(HeadKind::Softmax, model, coding.data(words), &recipe)?;
        session.run(None, None, None)?;
        let nll = session.valid_nll()?;
        if !nll.is_finite() {
            return Err("the language model that learns the table diverged: try a lower --lr".into());
        }
        if state.best.as_ref().is_none_or(|(_, best)| nll < *best) {
            state.best = Some((state.table.clone(), nll));
        }
        state.rounds += 1;
        state.variables = Some(session.model.checkpoint());
        if let Some(path) = file {
            state.save(path, &digest)?;
        }
    }
    let (table, nll) = state.best.ok_or("--rounds is 0")?;
    println!("table    the best has a validation perplexity of {:.1}", nll.exp());
    Ok(table)
}

/// Returns a model of these codes, with these variables if any are given.
fn model(coding: &Coding, variables: Option<&Checkpoint>, recipe: &Recipe, device: &Device) -> Result<LanguageModel> {
    let model = LanguageModel::new(HeadKind::Softmax, coding.names().len(), InitialValues::Small, recipe, device)?;
    if let Some(variables) = variables {
        variables.restore_variables(model.varmap())?;
    }
    Ok(model)
}

/// Returns the table with the words where the model that was trained with it expects them.
fn reallocated(
    table: &CodeTable,
    variables: &Checkpoint,
    words: &Data<u32>,
    vocabulary: &[String],
    recipe: &Recipe,
    device: &Device,
) -> Result<CodeTable> {
    let coding = Coding::from_table(table, vocabulary)?;
    let model = model(&coding, Some(variables), recipe, device)?;
    let costs = costs(&model, &coding, &words.train, recipe)?;
    let assignment =
        if vocabulary.len() <= EXACT { Assignment::Exact } else { Assignment::Approximate { candidates: CANDIDATES } };
    let after = costs.reallocate(table, assignment)?;
    let moved = moved(table, &after)?;
    let per_token = |table| Ok::<_, mos_codes::Error>(costs.total(table)? / words.train.len() as f64);
    let (from, to) = (per_token(table)?, per_token(&after)?);
    println!("table    {moved} words move, from {from:.3} to {to:.3} nats per token of the text");
    Ok(after)
}

/// Sums what every word of the text costs in every row and every column.
fn costs(model: &LanguageModel, coding: &Coding, text: &[u32], recipe: &Recipe) -> Result<CodeCosts> {
    let table = coding.table().ok_or("pieces have no table")?;
    let mut costs = CodeCosts::new(table);
    let codes = coding.encode(text);
    // Each label is a word and the place of its code, as one number.
    let labels = coding.encode_with(text, |word, _, place| 2 * word + place as u32);
    let mut state = model.start(recipe, Pass::Evaluation { parts: 1 })?;
    let batches = model.batches(&codes, recipe, Pass::Evaluation { parts: 1 });
    let bar = progress::bar(batches.len(), "costs of the table".into());
    for batch in &batches {
        let hidden = model.forward(&codes, batch, &mut state, None)?.hidden;
        let log_probs = model.head().log_probs(&hidden)?.flatten_to(D::Minus2)?;
        let labels = model.targets_of(&labels, batch)?;
        let targets: Vec<(usize, u32)> = labels.into_iter().enumerate().filter_map(|(i, l)| Some((i, l?))).collect();
        let target_code = |label: u32| [TargetCode::First, TargetCode::Second][label as usize % 2];
        let rows = candle_core::Tensor::from_iter(targets.iter().map(|(i, _)| *i as u32), model.device())?;
        let targets: Vec<(u32, TargetCode)> = targets.into_iter().map(|(_, l)| (l / 2, target_code(l))).collect();
        costs.add(&log_probs.index_select(&rows, 0)?, &targets)?;
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(costs)
}

/// Returns the number of words whose codes differ.
fn moved(before: &CodeTable, after: &CodeTable) -> Result<usize> {
    let (before, after) = (before.codes()?.to_vec2::<u32>()?, after.codes()?.to_vec2::<u32>()?);
    Ok(before.iter().zip(&after).filter(|(a, b)| a != b).count())
}

impl State {
    fn save(&self, path: &Path, digest: &str) -> Result<()> {
        let mut file = Checkpoint::default();
        if let Some(variables) = &self.variables {
            file.tensors
                .extend(variables.tensors.iter().map(|(name, tensor)| (format!("model.{name}"), tensor.clone())));
        }
        insert_table(&mut file, "last", &self.table)?;
        if let Some((table, nll)) = &self.best {
            insert_table(&mut file, "codes", table)?;
            file.metadata.insert("nll".into(), nll.to_string());
        }
        file.metadata.insert("rounds".into(), self.rounds.to_string());
        file.metadata.insert("digest".into(), digest.into());
        file.save(path)
    }

    fn load(path: &Path, like: &CodeTable, digest: &str, device: &Device) -> Result<Self> {
        let file = Checkpoint::load(path, device)?;
        if file.get::<String>("digest")? != digest {
            return Err(format!("{} has the table of another text or --seed", path.display()).into());
        }
        let table = |name| load_table(&file, name, like.config());
        let variables = file.tensors.iter().filter_map(|(name, tensor)| {
            let name = name.strip_prefix("model.")?;
            Some((name.to_owned(), tensor.clone()))
        });
        let variables = Checkpoint { tensors: variables.collect(), ..Checkpoint::default() };
        let best = Some((table("codes")?, file.get("nll")?));
        Ok(State { rounds: file.get("rounds")?, table: table("last")?, best, variables: Some(variables) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mos_codes::TableConfig;

    fn words() -> (Data<u32>, Vec<String>, CodeTable) {
        let vocabulary: Vec<String> = (0..23).map(|id| format!("w{id}")).collect();
        let text = |targets: usize| (0..=targets).map(|i| (i * i % 23) as u32).collect();
        let data = Data::new("squares".into(), &vocabulary, text(1500), text(300));
        let table = CodeTable::random(TableConfig::light_rnn(23).with_own(2), &[1.0; 23], 3).expect("fits");
        (data, vocabulary, table)
    }

    fn rounds(rounds: usize, file: Option<&Path>) -> CodeTable {
        let (data, vocabulary, table) = words();
        let recipe = Recipe { hidden: 12, batch: 4, bptt: 8, lr: 0.02, decay: 1.0, ..Recipe::BASE };
        learn(&data, &vocabulary, table, rounds, &recipe, file, &Device::Cpu).expect("learns")
    }

    #[test]
    fn the_best_table_is_kept_and_learning_goes_on_where_it_stopped() {
        let path = std::env::temp_dir().join(format!("learn_table_{}.safetensors", std::process::id()));
        let (mut nlls, mut best) = (vec![], None);
        for done in 1..=3 {
            let table = rounds(done, Some(&path));
            let file = Checkpoint::load(&path, &Device::Cpu).expect("was just written");
            assert_eq!(file.get::<usize>("rounds").expect("a number"), done);
            assert_eq!(load_table(&file, "codes", table.config()).expect("fits"), table);
            nlls.push(file.get::<f64>("nll").expect("a number"));
            best = Some(table);
        }
        assert!(nlls.is_sorted_by(|a, b| a >= b) && nlls[2] < nlls[0], "{nlls:?}");
        let before = std::fs::read(&path).expect("was just written");
        assert_eq!(rounds(3, Some(&path)), best.expect("three rounds"));
        assert!(std::fs::read(&path).expect("still there") == before, "nothing is left to learn");

        let (mut data, vocabulary, table) = words();
        data.train[0] = 1;
        let result = learn(&data, &vocabulary, table, 3, &Recipe::BASE, Some(&path), &Device::Cpu);
        let error = result.expect_err("another text").to_string();
        assert!(error.contains("another text"), "{error}");
        std::fs::remove_file(path).expect("was just written");
    }

    #[test]
    fn resumed_learning_equals_uninterrupted_learning() {
        let path = std::env::temp_dir().join(format!("learn_table_resumed_{}.safetensors", std::process::id()));
        rounds(2, Some(&path));
        assert_eq!(rounds(3, Some(&path)), rounds(3, None));
        std::fs::remove_file(path).expect("was just written");
    }

    #[test]
    fn costs_are_those_of_the_text() {
        let (data, vocabulary, table) = words();
        let recipe = Recipe { hidden: 12, batch: 4, bptt: 8, ..Recipe::BASE };
        let coding = Coding::from_table(&table, &vocabulary).expect("fits");
        let model = model(&coding, None, &recipe, &Device::Cpu).unwrap();
        let costs = costs(&model, &coding, &data.train, &recipe).expect("costs").total(&table).expect("its table");
        // The costs leave out words with a code of their own, and the first word, which is an input only.
        let session = Session::new(HeadKind::Softmax, model, coding.data(&data), &recipe).expect("valid sizes");
        let whole = session.evaluate(&session.data.train).expect("evaluates") * (session.data.train.len() - 1) as f64;
        assert!(costs > 0.0 && costs < whole, "{costs} {whole}");
        let shared = coding.encode_with(&data.train, |word, _, _| {
            u32::from(table.codes().unwrap().to_vec2::<u32>().unwrap()[word as usize][0] >= 2)
        });
        let share = shared[1..].iter().sum::<u32>() as f64 / (shared.len() - 1) as f64;
        // An untrained model gives all codes about the same probability.
        assert!((costs / whole - share).abs() < 0.02, "{} {share}", costs / whole);
    }
}
