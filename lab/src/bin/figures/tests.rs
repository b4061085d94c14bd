//! Pictures and tables show the measurements in `benches/results`, and nothing else.

use super::results::{parse, read, root, Results, FILES};
use super::{columns, format, outputs, pictures, results, runs, tables};

/// What makes a whole line.
const LINE: &str = r#"{"figure": "step", "shape": "ptb", "implementation": "mos-head", "command": "c",
    "processor": "p", "date": "2026-11-21", "commit": "0123abc", "seconds": 1.5}"#;

fn line() -> String {
    LINE.replace('\n', " ")
}

/// Names the first line that differs.
#[track_caller]
fn assert_same(path: &str, found: &str, expected: &str) {
    let mut pairs = found.lines().zip(expected.lines()).enumerate();
    if let Some((i, (found, expected))) = pairs.find(|(_, (found, expected))| found != expected) {
        panic!(
            "{path}, line {}: not what `cargo run --release -p lab --bin figures` makes of benches/results:\n  \
             {found}\n  {expected}",
            i + 1
        );
    }
    assert_eq!(found.len(), expected.len(), "{path} is shorter or longer than the figures");
}

#[test]
fn pictures_and_tables_are_made_of_the_measurements() {
    for (path, expected) in outputs::outputs(root()).expect("valid measurements") {
        assert_same(&path, &read(root(), &path).expect("a text"), &expected);
    }
}

/// A label of a picture: its text, and the pixels that it covers, from left to right and from top to bottom.
type Label = (String, [f64; 2], [f64; 2]);

/// Returns what stands between two quotes behind a name.
fn attribute<'a>(tag: &'a str, name: &str) -> &'a str {
    let (_, rest) = tag.split_once(&format!(" {name}=\"")).unwrap_or_else(|| panic!("no {name} in {tag}"));
    rest.split('"').next().expect("at least one part")
}

fn number(tag: &str, name: &str) -> f64 {
    attribute(tag, name).parse().unwrap_or_else(|_| panic!("{name} is no number in {tag}"))
}

/// Returns the labels of a picture, each as wide as in DejaVu Sans, which is one of the widest fonts.
fn labels(picture: &str) -> Vec<Label> {
    let label = |(tag, rest): (&str, &str)| {
        let text = rest.trim_start_matches('\n').split('\n').next().expect("at least one part").to_owned();
        let size = number(tag, "font-size");
        let width = size * text.chars().count() as f64 * if tag.contains("\"bold\"") { 0.6 } else { 0.57 };
        let left = number(tag, "x")
            - match attribute(tag, "text-anchor") {
                "start" => 0.0,
                "middle" => width / 2.0,
                _ => width,
            };
        let middle = number(tag, "y");
        (text, [left, left + width], [middle - size / 2.0, middle + size / 2.0])
    };
    picture.split("<text").skip(1).map(|part| label(part.split_once('>').expect("the end of a tag"))).collect()
}

#[test]
fn no_label_of_a_picture_is_cut_and_none_covers_another() {
    let pictures = outputs::outputs(root()).expect("valid measurements").into_iter();
    for (path, picture) in pictures.filter(|(path, _)| path.ends_with(".svg")) {
        let [width, height] = ["width", "height"].map(|name| number(&picture, name));
        let labels = labels(&picture);
        assert!(labels.len() > 5, "{path}");
        for (i, (text, across, down)) in labels.iter().enumerate() {
            assert!(across[0] >= 0.0 && across[1] <= width, "{path}: {text} is cut: {across:?}");
            assert!(down[0] >= 0.0 && down[1] <= height, "{path}: {text} is cut: {down:?}");
            let meets = |a: &[f64; 2], b: &[f64; 2]| a[0] < b[1] && b[0] < a[1];
            let other = labels[..i].iter().find(|(_, x, y)| meets(x, across) && meets(y, down));
            assert!(other.is_none(), "{path}: {text} covers {other:?}");
        }
    }
}

#[test]
fn the_picture_of_equal_time_shows_every_evaluation() {
    let results = Results::load(root()).expect("valid measurements");
    let (systems, _) = runs::equal_time(&results).expect("valid measurements");
    let picture = pictures::equal_time(&results).expect("a picture").expect("measurements");
    let circles: Vec<_> = picture.split("<circle").skip(1).collect();
    assert_eq!(circles.len(), systems.iter().map(|system| system.points.len()).sum::<usize>());
    let (across, down) = (number(&picture, "width"), number(&picture, "height"));
    for circle in circles {
        let at = (number(circle, "cx"), number(circle, "cy"));
        assert!((0.0..across).contains(&at.0) && (0.0..down).contains(&at.1), "{at:?}");
    }
}

/// Returns the names of all tables, README.md's first.
fn names() -> Vec<String> {
    let columns =
        columns::tables().expect("descriptions").into_iter().map(|table| table["table"].as_str().map(str::to_owned));
    tables::TABLES.iter().map(|(name, _)| (*name).to_owned()).chain(columns.map(|name| name.expect("a name"))).collect()
}

/// The first four tables are README.md's to choose from.
#[test]
fn no_table_of_results_is_written_by_hand() {
    let results = Results::load(root()).expect("valid measurements");
    let documents = outputs::documents(root()).expect("texts");
    for (i, name) in names().iter().enumerate() {
        let marker = format!("\n<!-- figures: {name} -->\n");
        let places: Vec<_> = documents.iter().flat_map(|(path, text)| text.matches(&marker).map(|_| *path)).collect();
        let is_measured = tables::make(name, &results).expect(name) != format::UNMEASURED;
        let least = usize::from(i >= 4 && is_measured);
        assert!((least..=1).contains(&places.len()), "table {name} belongs in one document, found: {places:?}");
    }
}

#[test]
fn every_file_of_measurements_is_read() {
    let files = std::fs::read_dir(root().join("benches/results")).expect("a folder");
    let names = files.map(|file| file.expect("a file").file_name().into_string().expect("a name"));
    let mut names: Vec<_> = names.collect();
    names.sort();
    let mut known = FILES.map(|file| format!("{file}.jsonl"));
    known.sort();
    assert_eq!(names, known);
}

#[test]
fn a_line_without_its_origin_is_an_error_that_names_it() {
    assert_eq!(parse(&line()).expect("a whole line").len(), 1);
    for key in ["command", "processor", "date", "commit"] {
        let without = line().replace(&format!("\"{key}\""), "\"other\"");
        let error = parse(&[line(), without].join("\n")).expect_err(key).to_string();
        assert!(error.contains("line 2") && error.contains(key), "{error}");
    }
    for (value, wrong) in [("2026-11-21", "21.11.2026"), ("0123abc", "main"), ("0123abc", "0123")] {
        let error = parse(&line().replace(value, wrong)).expect_err(wrong).to_string();
        assert!(error.contains(wrong), "{error}");
    }
    assert!(parse("{\"figure\": \"step\"").is_err());
}

#[test]
fn a_later_line_replaces_an_earlier_one_of_the_same_measurement() {
    let later = line().replace("1.5", "2.5").replace("0123abc", "89abcde");
    let elsewhere = line().replace("\"p\"", "\"q\"").replace("2026-11-21", "2026-11-20");
    let results = Results::new(parse(&[line(), later, elsewhere].join("\n")).expect("three lines"));
    assert_eq!(seconds(results.lines_of("step")), [Some(2.5)]);
    assert_eq!(seconds(results.steps_elsewhere()), [Some(1.5)]);
}

#[test]
fn tables_show_the_processor_that_was_measured_last() {
    let newer = line().replace("\"p\"", "\"q\"").replace("2026-11-21", "2026-11-22").replace("1.5", "2.5");
    // A peer that was measured later does not count.
    let peer = line().replace("mos-head", "PyTorch, eager").replace("2026-11-21", "2026-11-23").replace("1.5", "3.5");
    let text = [newer, line(), peer].join("\n");
    let results = Results::new(parse(&text).expect("three lines"));
    assert_eq!(seconds(results.lines_of("step")), [Some(2.5)]);
    assert_eq!(seconds(results.steps_elsewhere()), [Some(1.5), Some(3.5)]);
    // Only steps have a table of other processors.
    let text = text.replace("\"step\"", "\"dtypes\"");
    assert_eq!(seconds(Results::new(parse(&text).expect("three lines")).lines_of("dtypes")), [Some(2.5)]);
}

fn seconds(lines: Vec<&results::Line>) -> Vec<Option<f64>> {
    lines.iter().map(|line| line.number("seconds")).collect()
}

#[test]
fn a_number_edited_by_hand_is_found() {
    let results = Results::load(root()).expect("valid measurements");
    for name in names() {
        let empty = format!("before\n<!-- figures: {name} -->\n<!-- /figures -->\nafter\n");
        let made = tables::rewrite(&empty, &results).expect(&name);
        if made.contains(format::UNMEASURED) {
            continue;
        }
        assert_eq!(tables::rewrite(&made, &results).expect(&name), made, "{name}");
        let row = made.lines().filter(|line| line.starts_with('|')).nth(2).expect("a row");
        let digit = row.rfind(|c: char| c.is_ascii_digit()).unwrap_or_else(|| panic!("no number in {row}"));
        let other = if &row[digit..=digit] == "7" { "3" } else { "7" };
        let edited = made.replace(row, &format!("{}{other}{}", &row[..digit], &row[digit + 1..]));
        assert_ne!(edited, made);
        assert_eq!(tables::rewrite(&edited, &results).expect(&name), made, "{name}");
    }
}

#[test]
fn markers_without_a_table_or_an_end_are_errors() {
    let results = Results::load(root()).expect("valid measurements");
    let error = |text: &str| tables::rewrite(text, &results).expect_err(text).to_string();
    assert!(error("<!-- figures: speed -->\n<!-- /figures -->\n").contains("no table named speed"));
    assert!(error("<!-- figures: steps -->\n| 1 |\n").contains("no end of table steps"));
}
