//! Progress bars on stderr (hidden if stderr is not a terminal), so that stdout has only the results.

use indicatif::{ProgressBar, ProgressStyle};

/// Returns a bar of `steps` steps with the prefix `label`.
pub fn bar(steps: usize, label: String) -> ProgressBar {
    let bar = ProgressBar::new(steps as u64).with_prefix(label);
    let template = "{prefix} [{bar:32}] {pos}/{len} {elapsed}<{eta} {msg}";
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style.progress_chars("=> ")),
        Err(_) => bar,
    }
}
