//! `--output light-rnn`, `hybrid-light-rnn` and `bpe`: what is a code.

use crate::args::Args;
use candle_core::Device;
use lab::data::{load_table, Coding, Corpus};
use lab::layers::{Checkpoint, Entries, Output, OutputKind};
use lab::training::{Recipe, TrainingFlags, WORDS_PER_CODE};
use lab::Result;
use mos_codes::{CodeTable, TableConfig};

/// Returns the table of the first checkpoint that training continues from. Others must have the same: their texts are
/// checked.
fn resumed(flags: &TrainingFlags, config: TableConfig) -> Result<Option<CodeTable>> {
    for kind in flags.heads() {
        let leg = flags.leg(kind)?.map(|leg| leg.path).filter(|path| path.exists());
        let Some(path) = leg.or(flags.resume_path(kind)?) else { continue };
        let table = load_table(&Checkpoint::load(&path, &Device::Cpu)?, "codes", config);
        return table.map(Some).map_err(|error| format!("{}: {error}", path.display()).into());
    }
    Ok(None)
}

/// Returns the codes of the words, if the output has codes. Learns the table, if it is learned.
pub(crate) fn coding(args: &Args, corpus: &Corpus, recipe: &Recipe, device: &Device) -> Result<Option<Coding>> {
    let (words, output) = (&corpus.words, recipe.output.kind);
    if !output.is_coded() {
        return Ok(None);
    }
    let counts = Entries::count(words, &corpus.data.train).counts;
    let light = TableConfig::light_rnn(words.len());
    let codes = args.tables.codes.unwrap_or(light.code_count().max(words.len() / WORDS_PER_CODE));
    let config = match output {
        OutputKind::LightRnn => light,
        OutputKind::HybridLightRnn => TableConfig::hybrid(words.len(), codes)?,
        _ => return Ok(Some(Coding::from_pieces(words, &counts, codes)?)),
    };
    let recipe = Recipe { output: Output::FULL, ..*recipe };
    let table = match resumed(&args.training(), config)? {
        Some(table) => table,
        None => args.tables.choose(config, words, &counts, &corpus.data, &recipe, device)?,
    };
    args.tables.draw(&table, words, &counts)?;
    Ok(Some(Coding::from_table(&table, words)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use lab::data::{insert_table, language::Teacher};

    fn coded(corpus: &Corpus, flags: &str) -> Result<Option<Coding>> {
        let args =
            Args::try_parse_from(["language_model"].into_iter().chain(flags.split_whitespace())).expect("valid flags");
        coding(&args, corpus, &args.recipe()?, &Device::Cpu)
    }

    #[test]
    fn training_continues_with_the_table_of_its_checkpoint() {
        let corpus = Teacher::default().corpus(2000, 500, 1);
        let config = TableConfig::light_rnn(512);
        let table = CodeTable::random(config, &vec![1.0; 512], 9).expect("fits");
        let path = std::env::temp_dir().join(format!("language_model_codes_{}.safetensors", std::process::id()));
        let mut file = Checkpoint::default();
        insert_table(&mut file, "codes", &table).expect("a table");
        file.save(&path).expect("writes");
        let resume = format!("--head mos --resume {}", path.display());
        let found = coded(&corpus, &format!("--output light-rnn --table frequency {resume}")).expect("fits");
        assert_eq!(found.expect("codes").table(), Some(&table));
        let error = coded(&corpus, &format!("--output hybrid-light-rnn {resume}")).err().expect("another").to_string();
        assert!(error.contains("own") && error.contains("--codes"), "{error}");
        std::fs::remove_file(path).expect("was just written");
    }

    #[test]
    fn every_output_of_codes_restores_its_words() {
        let corpus = Teacher::default().corpus(2000, 500, 1);
        assert!(coded(&corpus, "--output full").expect("no codes").is_none());
        for output in ["light-rnn --table random", "hybrid-light-rnn --table frequency", "bpe"] {
            let coding = coded(&corpus, &format!("--output {output}")).expect("fits").expect("codes");
            let text = &corpus.data.valid[1..];
            let codes = coding.encode(&corpus.data.valid);
            // The last code of the first word is an input.
            let words = coding.decode(&codes[1..], &corpus.words).expect("words");
            assert_eq!(words, text.iter().map(|&id| corpus.words[id as usize].clone()).collect::<Vec<_>>(), "{output}");
            assert!((coding.per_word(&corpus.data.valid) * text.len() as f64 - (codes.len() - 1) as f64).abs() < 1e-6);
            assert!(coding.names().len() < 200);
        }
        let error = |flags: &str| coded(&corpus, flags).err().expect("no effect").to_string();
        assert!(error("--output bpe --table random").contains("--table"));
        assert!(error("--output light-rnn --codes 60").contains("--codes"));
        assert!(error("--output light-rnn --table random --rounds 2").contains("--rounds"));
        assert!(error("--output hybrid-light-rnn --codes 40").contains("at least"));
    }
}
