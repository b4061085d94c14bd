//! Every file that is made from the measurements.

use std::path::Path;

use crate::results::{read, Result, Results};
use crate::{pictures, tables};

/// Paths below `root` and the texts that belong there.
pub(crate) fn outputs(root: &Path) -> Result<Vec<(&'static str, String)>> {
    let results = Results::load(root)?;
    let mut outputs = vec![
        ("docs/step.svg", pictures::step(&results)?),
        ("docs/curves.svg", pictures::curves(&results)?),
        ("docs/rank.svg", pictures::rank(&results)?),
    ];
    for path in ["README.md", "examples/README.md", "benches/RESULTS.md"] {
        let text = tables::rewrite(&read(root, path)?, &results).map_err(|error| format!("{path}, {error}"))?;
        outputs.push((path, text));
    }
    Ok(outputs)
}
