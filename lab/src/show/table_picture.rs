//! Rows of a table of words as an SVG file (Kong et al., 2019, table 6).

use super::plot::COLORS;
use crate::Result;
use mos_codes::CodeTable;
use plotters::prelude::*;
use std::path::Path;

/// Numbers of rows, and of words in each row, that are drawn.
const ROWS: usize = 16;
const WORDS: usize = 9;
const LINE: i32 = 26;

/// Draws the rows with the most frequent words, each with its most frequent words.
pub(crate) fn draw(path: &Path, table: &CodeTable, words: &[String], counts: &[f64]) -> Result<()> {
    let rows = frequent_rows(table, counts);
    let lines = rows.iter().map(|(row, row_words)| {
        let names: Vec<&str> = row_words.iter().map(|&word| words[word as usize].as_str()).collect();
        (format!("row {row}"), names.join("   "))
    });
    svg(path, &lines.collect::<Vec<_>>()).map_err(|error| format!("cannot draw {}: {error}", path.display()).into())
}

/// Rows by the sum of their counts, with their words by count.
fn frequent_rows(table: &CodeTable, counts: &[f64]) -> Vec<(usize, Vec<u32>)> {
    let count = |word: &u32| counts[*word as usize];
    let mut rows: Vec<(usize, Vec<u32>)> = (0..table.config().rows)
        .map(|row| {
            let mut words: Vec<u32> = table.row(row).into_iter().flatten().collect();
            words.sort_by(|a, b| count(b).total_cmp(&count(a)));
            (row, words)
        })
        .collect();
    let total = |row: &(usize, Vec<u32>)| row.1.iter().map(count).sum::<f64>();
    rows.sort_by(|a, b| total(b).total_cmp(&total(a)));
    rows.truncate(ROWS);
    rows.iter_mut().for_each(|(_, words)| words.truncate(WORDS));
    rows
}

fn svg(path: &Path, lines: &[(String, String)]) -> Result<()> {
    let height = LINE * (lines.len() as i32 + 2);
    let area = SVGBackend::new(path, (960, height as u32)).into_drawing_area();
    area.fill(&WHITE)?;
    area.draw_text("Words that share a row", &("sans-serif", 20).into_text_style(&area), (16, 12))?;
    let style = ("sans-serif", 16).into_text_style(&area);
    for (y, (row, words)) in (1..).zip(lines) {
        area.draw_text(row, &style.color(&COLORS[0]), (16, LINE * y + 16))?;
        area.draw_text(words, &style, (90, LINE * y + 16))?;
    }
    area.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use mos_codes::TableConfig;

    #[test]
    fn the_most_frequent_words_are_drawn() {
        let words: Vec<String> = (0..400).map(|id| format!("w{id}")).collect();
        let counts: Vec<f64> = (0..400).map(f64::from).collect();
        let table = CodeTable::random(TableConfig::light_rnn(400), &counts, 1).expect("fits");
        let path = std::env::temp_dir().join(format!("table_{}.svg", std::process::id()));
        draw(&path, &table, &words, &counts).expect("draws");
        let file = std::fs::read_to_string(&path).expect("was just written");
        assert_eq!(file.lines().filter(|line| line.trim_start().starts_with("row ")).count(), ROWS);
        let rows = frequent_rows(&table, &counts);
        assert!(rows.iter().all(|(_, words)| words.len() == WORDS && words.is_sorted_by(|a, b| a > b)));
        assert!(rows.iter().any(|(_, words)| words[0] == 399));
        std::fs::remove_file(path).expect("was just written");
    }
}
