//! The measurements: one JSON object per line of `benches/results/*.jsonl`.

use std::fs;
use std::path::Path;

use serde_json::{Map, Value};

/// Errors name the file, and the line where one is at fault.
pub(crate) type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

pub(crate) const FILES: [&str; 9] =
    ["steps", "decoding", "examples", "curves", "trials", "recipe", "bottleneck", "outputs", "codes"];
const REQUIRED: [&str; 7] = ["figure", "shape", "implementation", "command", "processor", "date", "commit"];
/// What a measurement is of: a later line with the same values replaces an earlier one.
const IDENTITY: [&str; 17] = [
    "figure",
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
    "processor",
];

/// One measurement.
#[derive(Clone, Debug)]
pub(crate) struct Line(Map<String, Value>);

impl Line {
    fn parse(text: &str) -> Result<Self> {
        let line = Line(serde_json::from_str(text)?);
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

    /// The text under `key`, empty if there is none.
    pub(crate) fn text(&self, key: &str) -> &str {
        self.0.get(key).and_then(Value::as_str).unwrap_or("")
    }

    pub(crate) fn number(&self, key: &str) -> Option<f64> {
        self.0.get(key).and_then(Value::as_f64)
    }

    /// The numbers of the array under `key`, empty if there is none.
    pub(crate) fn numbers(&self, key: &str) -> Vec<f64> {
        self.0.get(key).and_then(Value::as_array).map_or(vec![], |all| all.iter().filter_map(Value::as_f64).collect())
    }

    pub(crate) fn is(&self, key: &str, value: &str) -> bool {
        self.text(key) == value
    }

    fn replaces(&self, earlier: &Line) -> bool {
        IDENTITY.iter().all(|&key| self.0.get(key) == earlier.0.get(key))
    }
}

/// All measurements that hold, in the order of the files.
pub(crate) struct Results(Vec<Line>);

impl Results {
    /// Reads `benches/results` below `root`.
    pub(crate) fn load(root: &Path) -> Result<Self> {
        let mut lines = vec![];
        for file in FILES {
            let path = format!("benches/results/{file}.jsonl");
            lines.extend(parse(&read(root, &path)?).map_err(|error| format!("{path}, {error}"))?);
        }
        Ok(Self::new(lines))
    }

    /// A line takes the place of an earlier one of the same measurement.
    pub(crate) fn new(lines: Vec<Line>) -> Self {
        let mut kept: Vec<Line> = vec![];
        for line in lines {
            match kept.iter_mut().find(|earlier| line.replaces(earlier)) {
                Some(earlier) => *earlier = line,
                None => kept.push(line),
            }
        }
        Results(kept)
    }

    /// The lines of a figure; of a training step, those of the processor named first.
    pub(crate) fn of(&self, figure: &str) -> Vec<&Line> {
        let lines = || self.0.iter().filter(|line| line.is("figure", figure));
        let processor = lines().next().map_or("", |line| line.text("processor"));
        lines().filter(|line| figure != "step" || line.is("processor", processor)).collect()
    }

    /// Training steps on all other processors.
    pub(crate) fn steps_elsewhere(&self) -> Vec<&Line> {
        let processor = self.of("step").first().map_or("", |line| line.text("processor"));
        self.0.iter().filter(|line| line.is("figure", "step") && !line.is("processor", processor)).collect()
    }
}

/// All lines of one file, including those that are replaced.
pub(crate) fn parse(text: &str) -> Result<Vec<Line>> {
    let line = |(i, line)| Line::parse(line).map_err(|error| format!("line {}: {error}", i + 1).into());
    text.lines().enumerate().map(line).collect()
}

/// A text file, with the ends of lines of Unix whatever git made of them.
pub(crate) fn read(root: &Path, path: &str) -> Result<String> {
    let text = fs::read_to_string(root.join(path)).map_err(|error| format!("cannot read {path}: {error}"))?;
    Ok(text.replace("\r\n", "\n"))
}
