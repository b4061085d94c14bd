//! Progress bars on stderr (hidden when stderr is no terminal), so that stdout carries results only.

use indicatif::{ProgressBar, ProgressStyle};

/// A bar of `steps` steps; `label` says what is going on.
pub(crate) fn bar(steps: usize, label: String) -> ProgressBar {
    let bar = ProgressBar::new(steps as u64).with_prefix(label);
    let template = "{prefix} [{bar:32}] {pos}/{len} {elapsed}<{eta} {msg}";
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style.progress_chars("=> ")),
        Err(_) => bar,
    }
}
