//! Answers to the lines of stdin, from the model and vocabularies of one checkpoint.

use crate::model::{load_model, Seq2Seq};
use crate::search::{draw, search, Beam};
use crate::{args::Args, dialogue::context, kinds::Task};
use candle_core::Device;
use lab::{layers::Checkpoint, Result};
use mos_head::decode::{Sampler, Sampling};
use std::io::BufRead;

const REPLIES: usize = 3;

pub(crate) fn run(args: &Args, device: &Device) -> Result<()> {
    let flag = if args.chat { "--chat" } else { "--translate" };
    let Some(Some(path)) = &args.common.resume else { return Err(format!("{flag} needs --resume FILE").into()) };
    let checkpoint = Checkpoint::load(path, device)?;
    let model = load_model(&checkpoint, device)?;
    let setting = &model.setting;
    if args.chat != (setting.task == Task::Dialogue) {
        return Err(format!("{flag} does not fit a checkpoint of the task {}", setting.task.name()).into());
    }
    let beam = args.beam(setting.task, if args.chat { REPLIES } else { 1 });
    let sampling = args.temperature.map(|temperature| Sampling::new().with_temperature(temperature));
    let mut sampler = sampling.map(|sampling| Sampler::new(sampling, args.common.seed)).transpose()?;
    let mut said: Vec<(bool, String)> = vec![]; // whether the model said it, and the text
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        if !args.chat {
            println!("{}", answers(&model, beam, sampler.as_mut(), &line)?.join("\n"));
            continue;
        }
        said.push((false, line));
        let recent = &said[said.len().saturating_sub(setting.turns)..];
        let context = context(recent.iter().map(|(mine, text)| (*mine, text.as_str())));
        let replies = answers(&model, beam, sampler.as_mut(), &context)?;
        for (i, reply) in replies.iter().enumerate() {
            println!("{}. {reply}", i + 1);
        }
        said.extend(replies.into_iter().next().map(|reply| (true, reply)));
    }
    Ok(())
}

/// Samples if there is a sampler, otherwise the results of the beam search.
fn answers(model: &Seq2Seq, beam: Beam, sampler: Option<&mut Sampler>, text: &str) -> Result<Vec<String>> {
    let source = model.setting.source.encode(text)?;
    let found = match sampler {
        Some(sampler) => draw(model, &source, beam.n_best, beam.max_length, sampler)?,
        None => search(model, &[&source], beam)?.concat(),
    };
    found.iter().map(|ids| model.setting.target.decode(ids)).collect()
}
