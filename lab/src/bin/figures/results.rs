//! The measurements: one JSON object per line of `benches/results/*.jsonl`.

use std::fs;
use std::path::Path;

use serde_json::{Map, Value};

/// Errors name the file, and the line where one is at fault.
pub(crate) type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

pub(crate) const FILES: [&str; 11] =
    ["steps", "gpu", "decoding", "examples", "curves", "trials", "recipe", "bottleneck", "outputs", "codes", "runs"];
/// These keys say where a measurement comes from.
const REQUIRED: [&str; 4] = ["command", "processor", "date", "commit"];
/// Figures of time and memory, of which tables show one processor: the one that was measured last.
const SHOWN_FOR_ONE_PROCESSOR: [&str; 20] = [
    "step",
    "gpu-step",
    "gpu-chunks",
    "without-gradients",
    "dtypes",
    "instruction-sets",
    "positions",
    "memory",
    "confident",
    "budget",
    "decoding",
    "decoding-heads",
    "output-step",
    "language-model",
    "fine-tune",
    "assignment",
    "preset-seconds",
    "step-seconds",
    "successors-seconds",
    "vocabulary-seconds",
];
/// These keys say what is measured: a later line with the same values replaces an earlier one.
const IDENTITY: [&str; 21] = [
    "figure",
    "system",
    "seed",
    "preset",
    "shape",
    "positions",
    "implementation",
    "head",
    "epoch",
    "trial",
    "without",
    "output",
    "table",
    "components",
    "hidden",
    "activation",
    "spread",
    "dtype",
    "row_kernels",
    "chunk_rows",
    "processor",
];

/// Returns the repository.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the lab is a folder of the repository")
}

/// One measurement.
#[derive(Clone, Debug)]
pub(crate) struct Line {
    values: Map<String, Value>,
    /// The line as it stands in the file.
    text: String,
}

impl Line {
    fn parse(text: &str) -> Result<Self> {
        let line = Line { values: serde_json::from_str(text)?, text: text.to_owned() };
        for key in REQUIRED {
            if line.text(key).is_empty() {
                return Err(format!("no text under \"{key}\"").into());
            }
        }
        let date = line.text("date").as_bytes();
        let is_date = date.len() == 10
            && date.iter().enumerate().all(|(i, c)| if [4, 7].contains(&i) { *c == b'-' } else { c.is_ascii_digit() });
        if !is_date {
            return Err(format!("date {:?} is not YYYY-MM-DD", line.text("date")).into());
        }
        let commit = line.text("commit");
        if !(7..=40).contains(&commit.len()) || !commit.bytes().all(|c| c.is_ascii_hexdigit()) {
            return Err(format!("commit {commit:?} is not a hash").into());
        }
        Ok(line)
    }

    /// Returns the text under `key`, empty if there is none.
    pub(crate) fn text(&self, key: &str) -> &str {
        self.values.get(key).and_then(Value::as_str).unwrap_or("")
    }

    pub(crate) fn number(&self, key: &str) -> Option<f64> {
        self.values.get(key).and_then(Value::as_f64)
    }

    /// Returns the numbers of the array under `key`, empty if there is none.
    pub(crate) fn numbers(&self, key: &str) -> Vec<f64> {
        self.values
            .get(key)
            .and_then(Value::as_array)
            .map_or(vec![], |all| all.iter().filter_map(Value::as_f64).collect())
    }

    /// Returns the arrays of three numbers in the array under `key`, empty if there is none.
    pub(crate) fn triples(&self, key: &str) -> Vec<[f64; 3]> {
        let triple = |value: &Value| {
            let numbers: Vec<f64> = value.as_array()?.iter().filter_map(Value::as_f64).collect();
            numbers.try_into().ok()
        };
        self.values.get(key).and_then(Value::as_array).map_or(vec![], |all| all.iter().filter_map(triple).collect())
    }

    /// Returns the number under `key` of the object `scores`.
    pub(crate) fn score(&self, key: &str) -> Option<f64> {
        self.values.get("scores")?.get(key)?.as_f64()
    }

    pub(crate) fn is(&self, key: &str, value: &str) -> bool {
        self.text(key) == value
    }

    /// Returns whether it measures PyTorch.
    pub(crate) fn is_of_peer(&self) -> bool {
        self.text("implementation").starts_with("PyTorch")
    }

    fn replaces(&self, earlier: &Line) -> bool {
        IDENTITY.iter().all(|&key| self.values.get(key) == earlier.values.get(key))
    }
}

/// All measurements that hold, in the order of the files.
pub(crate) struct Results {
    lines: Vec<Line>,
    /// The path of each file, and the lines that hold.
    files: Vec<(String, String)>,
}

impl Results {
    /// Reads `benches/results` below `root`.
    pub(crate) fn load(root: &Path) -> Result<Self> {
        let mut files = vec![];
        let mut lines = vec![];
        for file in FILES {
            let path = format!("benches/results/{file}.jsonl");
            let parsed = parse(&read(root, &path)?).map_err(|error| format!("{path}, {error}"))?;
            let lasting = Self::new(parsed).lines;
            files.push((path, lasting.iter().map(|line| line.text.clone() + "\n").collect()));
            lines.extend(lasting);
        }
        Ok(Results { lines, files })
    }

    /// Keeps the lines that hold. A line takes the place of an earlier one of the same measurement; lines that no table
    /// shows do not hold.
    pub(crate) fn new(lines: Vec<Line>) -> Self {
        let mut kept: Vec<Line> = vec![];
        for line in lines {
            match kept.iter_mut().find(|earlier| line.replaces(earlier)) {
                Some(earlier) => *earlier = line,
                None => kept.push(line),
            }
        }
        let mut results = Results { lines: kept, files: vec![] };
        for figure in SHOWN_FOR_ONE_PROCESSOR.into_iter().filter(|figure| *figure != "step") {
            let processor = results.processor(figure).to_owned();
            results.lines.retain(|line| !line.is("figure", figure) || line.is("processor", &processor));
        }
        results
    }

    /// Returns every file without the lines that do not hold.
    pub(crate) fn files(&self) -> &[(String, String)] {
        &self.files
    }

    /// Returns the processor that this crate was measured on last, by the date, and by the order of lines of one date.
    fn processor(&self, figure: &str) -> &str {
        let ours = self.lines.iter().filter(|line| line.is("figure", figure) && !line.is_of_peer());
        ours.max_by_key(|line| line.text("date")).map_or("", |line| line.text("processor"))
    }

    /// Returns the lines of a figure. A figure of time or memory has only the lines of the processor that was measured
    /// last.
    pub(crate) fn lines_of(&self, figure: &str) -> Vec<&Line> {
        let processor = self.processor(figure);
        let is_shown = |line: &&Line| !SHOWN_FOR_ONE_PROCESSOR.contains(&figure) || line.is("processor", processor);
        self.lines.iter().filter(|line| line.is("figure", figure)).filter(is_shown).collect()
    }

    /// Returns the training steps on all other processors.
    pub(crate) fn steps_elsewhere(&self) -> Vec<&Line> {
        let processor = self.processor("step");
        self.lines.iter().filter(|line| line.is("figure", "step") && !line.is("processor", processor)).collect()
    }
}

/// Returns all lines of one file, including those that are replaced.
pub(crate) fn parse(text: &str) -> Result<Vec<Line>> {
    let line = |(i, line)| Line::parse(line).map_err(|error| format!("line {}: {error}", i + 1).into());
    text.lines().enumerate().map(line).collect()
}

/// Returns a text file, with the ends of lines of Unix whatever git made of them.
pub(crate) fn read(root: &Path, path: &str) -> Result<String> {
    let text = fs::read_to_string(root.join(path)).map_err(|error| format!("cannot read {path}: {error}"))?;
    Ok(text.replace("\r\n", "\n"))
}
