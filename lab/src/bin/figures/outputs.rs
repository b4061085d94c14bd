//! Every file that is made from the measurements.

use std::path::Path;

use crate::results::{read, Result, Results};
use crate::{bars, pictures, tables};

/// The documents in which tables may stand.
pub(crate) const DOCUMENTS: [&str; 4] = ["README.md", "lab/README.md", "benches/RESULTS.md", "docs/measurements.md"];

/// Returns the documents that exist, with their texts.
pub(crate) fn documents(root: &Path) -> Result<Vec<(&'static str, String)>> {
    let existing = DOCUMENTS.into_iter().filter(|path| root.join(path).exists());
    existing.map(|path| Ok((path, read(root, path)?))).collect()
}

/// Returns paths below `root` and the texts that belong there: pictures, documents with their tables, and the
/// measurements that are not replaced.
pub(crate) fn outputs(root: &Path) -> Result<Vec<(String, String)>> {
    let results = Results::load(root)?;
    let pictures = [("step", bars::step(&results)?), ("curves", pictures::curves(&results)?)];
    let pictures = pictures.into_iter().chain([("rank", pictures::rank(&results)?)]);
    let mut outputs: Vec<_> = pictures.map(|(name, picture)| (format!("docs/{name}.svg"), picture)).collect();
    outputs.extend(pictures::memory(&results)?.map(|picture| ("docs/memory.svg".to_owned(), picture)));
    outputs.extend(pictures::equal_time(&results)?.map(|picture| ("docs/equal-time.svg".to_owned(), picture)));
    for (path, text) in documents(root)? {
        let text = tables::rewrite(&text, &results).map_err(|error| format!("{path}, {error}"))?;
        outputs.push((path.to_owned(), text));
    }
    outputs.extend(results.files().iter().cloned());
    Ok(outputs)
}
