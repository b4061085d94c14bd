//! One JSON line per head and evaluation, appended to a file, so that curves can be drawn from it.

use super::recipe::Recipe;
use crate::Result;
use serde_json::json;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;

/// A model is evaluated at this time.
pub(crate) struct At {
    /// The number of epochs, with the fraction of the one that is not over.
    pub(crate) epochs: f64,
    /// The number of the optimizer's steps.
    pub(crate) steps: usize,
    /// The seconds of training in this epoch.
    pub(crate) seconds: f64,
}

/// Appends the line of an evaluation. `nlls` are the mean NLLs of training and of validation, in nats; numbers that are
/// not finite become `null`.
pub(crate) fn append(
    path: &Path,
    head: &str,
    At { epochs, steps, seconds }: At,
    nlls: [f64; 2],
    parameters: usize,
    recipe: &Recipe,
) -> Result<()> {
    let Recipe { seed, lr, dropout, spread, .. } = *recipe;
    let [activation, logit_function] =
        [format!("{:?}", recipe.activation), format!("{:?}", recipe.logit_function)].map(|name| name.to_lowercase());
    let line = json!({
        "program": program(), "head": head, "epoch": epochs, "steps": steps, "train_nll": nlls[0],
        "valid_nll": nlls[1], "valid_ppl": nlls[1].exp(), "seconds": seconds, "parameters": parameters,
        "output": recipe.output.name(), "seed": seed, "lr": lr, "dropout": dropout, "activation": activation,
        "logit_function": logit_function, "spread": spread,
    });
    let failed = |error| format!("cannot write {}: {error}", path.display());
    let mut file = OpenOptions::new().create(true).append(true).open(path).map_err(failed)?;
    Ok(writeln!(file, "{line}").map_err(failed)?)
}

/// Returns the name of the program that runs.
fn program() -> String {
    let path = std::env::current_exe().ok();
    path.and_then(|path| Some(path.file_stem()?.to_string_lossy().into_owned())).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    #[test]
    fn lines_are_appended() {
        let path = std::env::temp_dir().join(format!("results_{}.jsonl", std::process::id()));
        let at = |epochs| At { epochs, steps: 7, seconds: 3.5 };
        append(&path, "moc", at(1.5), [2.0, 1.0], 12, &Recipe::BASE).expect("writes");
        append(&path, "mos", at(2.0), [f64::NAN; 2], 13, &Recipe::BASE).expect("writes");
        let text = std::fs::read_to_string(&path).expect("was just written");
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[0]["program"], program());
        assert_eq!(lines[0]["valid_ppl"], 1f64.exp());
        assert_eq!(lines[0]["logit_function"], "identity");
        assert_eq!((&lines[1]["head"], &lines[1]["epoch"]), (&json!("mos"), &json!(2.0)));
        assert_eq!((&lines[1]["train_nll"], &lines[1]["parameters"]), (&Value::Null, &json!(13)));
        std::fs::remove_file(path).expect("was just written");
    }
}
