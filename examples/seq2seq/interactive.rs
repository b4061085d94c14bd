//! Answers to the lines of stdin, by a model and a vocabulary that come from one checkpoint.

use crate::args::Args;
use crate::common::{checkpoint::Checkpoint, Result};
use crate::dialogue::context;
use crate::model::Seq2Seq;
use crate::search::{search, Beam};
use crate::session::{load_model, Setting};
use crate::task::Task;
use candle_core::Device;
use std::io::BufRead;

const REPLIES: usize = 3;

pub(crate) fn run(args: &Args, device: &Device) -> Result<()> {
    let flag = if args.chat { "--chat" } else { "--translate" };
    let Some(Some(path)) = &args.common.resume else { return Err(format!("{flag} needs --resume FILE").into()) };
    let checkpoint = Checkpoint::load(path, device)?;
    let setting = Setting::from_checkpoint(&checkpoint)?;
    if args.chat != (setting.task == Task::Dialogue) {
        return Err(format!("{flag} was asked of a checkpoint of the task {}", setting.task.name()).into());
    }
    let model = load_model(&checkpoint, device)?;
    let beam = setting.task.beam(args, if args.chat { REPLIES } else { 1 });
    let mut said: Vec<(bool, String)> = vec![]; // by the model or not
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        if !args.chat {
            println!("{}", answers(&model, &setting, beam, &line)?.join("\n"));
            continue;
        }
        said.push((false, line));
        let recent = &said[said.len().saturating_sub(setting.turns)..];
        let context = context(recent.iter().map(|(mine, text)| (*mine, text.as_str())));
        let replies = answers(&model, &setting, beam, &context)?;
        for (i, reply) in replies.iter().enumerate() {
            println!("{}. {reply}", i + 1);
        }
        said.extend(replies.into_iter().next().map(|reply| (true, reply)));
    }
    Ok(())
}

fn answers(model: &Seq2Seq, setting: &Setting, beam: Beam, text: &str) -> Result<Vec<String>> {
    let source = setting.source.encode(text)?;
    let found = search(model, &[&source], beam)?;
    found.iter().flatten().map(|tokens| setting.target.decode(tokens)).collect()
}
