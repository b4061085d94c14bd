//! The tables of the documents, in markdown.

use crate::format::*;
use crate::results::{Line, Result, Results};
use crate::{captions, columns, papers::papers, quality, runs, vocabularies};

type Generator = fn(&Results) -> Result<String>;

/// The scores of a dialogue model: precision and recall of five responses.
const SWITCHBOARD: [(&str, &str); 9] = [
    ("bleu_1_p", "BLEU-1 P"),
    ("bleu_1_r", "BLEU-1 R"),
    ("bleu_2_p", "BLEU-2 P"),
    ("bleu_2_r", "BLEU-2 R"),
    ("bleu_3_p", "BLEU-3 P"),
    ("bleu_3_r", "BLEU-3 R"),
    ("bleu_4_p", "BLEU-4 P"),
    ("bleu_4_r", "BLEU-4 R"),
    ("distinct", "distinct replies, %"),
];

/// The tables that are more than columns, by the name in the marker.
pub(crate) const TABLES: [(&str, Generator); 26] = [
    ("step-ptb", |results| step(results, "ptb", 840.0)),
    ("step-llm", |results| step(results, "llm", 2048.0)),
    ("decoding", decoding),
    ("examples", quality::examples),
    ("steps", steps),
    ("steps-elsewhere", steps_elsewhere),
    ("dtypes", dtypes),
    ("confident", confident),
    ("language-model", language_model),
    ("decoding-all", decoding_all),
    ("penn-treebank", quality::penn_treebank),
    ("regularisers", quality::regularisers),
    ("outputs", quality::outputs),
    ("bottleneck", quality::bottleneck),
    ("ptb-small", |results| runs::finals(results, "ptb-small", &[])),
    ("multi30k", |results| runs::finals(results, "multi30k", &[("bleu", "test BLEU")])),
    ("switchboard", |results| runs::finals(results, "switchboard", &SWITCHBOARD)),
    ("equal-time", runs::equal_time_table),
    ("successors", runs::successors),
    ("multi30k-transformer-trials", vocabularies::trials),
    ("captions", captions::captions),
    ("multi30k-vocabularies", vocabularies::vocabularies),
    ("multi30k-equal-time", vocabularies::equal_time),
    ("papers-mos", |results| papers(results, "mos")),
    ("papers-fast", |results| papers(results, "fast")),
    ("papers-limits", |results| papers(results, "limits")),
];

/// Makes the table of this name.
pub(crate) fn make(name: &str, results: &Results) -> Result<String> {
    let table = match TABLES.iter().find(|(known, _)| *known == name) {
        Some((_, table)) => table(results),
        None => match columns::tables()?.iter().find(|table| table["table"] == name) {
            Some(table) => columns::table(table, results),
            None => return Err(format!("no table named {name}").into()),
        },
    };
    table.map_err(|error| format!("table {name}: {error}").into())
}

/// Returns `text` with every table between markers made anew.
pub(crate) fn rewrite(text: &str, results: &Results) -> Result<String> {
    let mut output = String::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        output += line;
        output.push('\n');
        let name = line.strip_prefix("<!-- figures: ").and_then(|rest| rest.strip_suffix(" -->"));
        let Some(name) = name else { continue };
        let table = make(name, results)?;
        lines.find(|line| *line == "<!-- /figures -->").ok_or(format!("no end of table {name}"))?;
        output += &format!("{table}<!-- /figures -->\n");
    }
    Ok(output)
}

/// Makes the table of one shape of a training step beside other implementations.
fn step(results: &Results, shape: &str, positions: f64) -> Result<String> {
    let lines = beside(results, shape, positions)?;
    let row = |line: &&Line| {
        let gradient = decoder_gradient_mib(line, lines[0])?;
        let gradient = gradient.map_or(String::new(), |mib| format!(", of which {mib:.0} are the decoder's gradient"));
        Ok(vec![label(line), digits(need(line, "seconds")?), format!("{:.0} MiB{gradient}", need(line, "extra_mib")?)])
    };
    let mut rows = lines.iter().map(row).collect::<Result<Vec<_>>>()?;
    if let Some(seconds) = lines.iter().find_map(|line| line.number("products_seconds")) {
        rows.push(vec!["the three matrix products alone".into(), digits(seconds), String::new()]);
    }
    Ok(markdown("| | seconds | memory beyond parameters and inputs |", rows) + &source(&lines, true))
}

/// Returns the size of the decoder's gradient in f32, at `ours`, and only if it is most of the memory there.
pub(crate) fn decoder_gradient_mib(line: &Line, ours: &Line) -> Result<Option<f64>> {
    let mib = need(ours, "vocab")? * need(ours, "context")? * 4.0 / f64::from(1 << 20);
    let most = need(ours, "extra_mib")?;
    Ok(Some(mib).filter(|mib| std::ptr::eq(line, ours) && *mib > 0.5 * most))
}

/// Returns the implementations of the whole step at one shape, mos-head first, the others from the fastest to the
/// slowest.
pub(crate) fn beside<'a>(results: &'a Results, shape: &str, positions: f64) -> Result<Vec<&'a Line>> {
    let mut lines = in_order(results.lines_of("step"))?;
    lines.retain(|line| line.is("shape", shape) && line.number("positions") == Some(positions));
    lines.retain(|line| !is_products(line));
    match lines.first() {
        Some(first) if first.is("implementation", "mos-head") => Ok(lines),
        _ => Err(format!("mos-head was not measured at {shape} with {positions} positions").into()),
    }
}

fn is_products(line: &Line) -> bool {
    line.text("implementation").ends_with("products alone")
}

/// Orders steps by shape, falling number of positions, and time; in each group mos-head first and products last.
fn in_order(mut lines: Vec<&Line>) -> Result<Vec<&Line>> {
    for line in &lines {
        need(line, "positions")?;
        need(line, "seconds")?;
    }
    lines.sort_by(|a, b| {
        let place = |line: &Line| (!line.is("implementation", "mos-head"), is_products(line));
        let number = |line: &Line, key| line.number(key).unwrap_or(0.0);
        let by_positions = number(b, "positions").total_cmp(&number(a, "positions"));
        let by_time = number(a, "seconds").total_cmp(&number(b, "seconds"));
        place_of_shape(a).cmp(&place_of_shape(b)).then(by_positions).then(place(a).cmp(&place(b))).then(by_time)
    });
    Ok(lines)
}

fn seconds(line: &Line, key: &str) -> String {
    line.number(key).map_or(String::new(), |seconds| digits(seconds) + " s")
}

fn steps(results: &Results) -> Result<String> {
    let lines = in_order(results.lines_of("step"))?;
    let mut rows = vec![];
    for (i, line) in lines.iter().enumerate() {
        let is_new = i == 0 || sizes_key(lines[i - 1]) != sizes_key(line);
        let full = lines[..i].iter().all(|earlier| earlier.text("shape") != line.text("shape"));
        rows.push(vec![
            if is_new { sizes(line, full)? } else { String::new() },
            label(line),
            digits(need(line, "seconds")?) + " s",
            format!("{:.0} MiB", need(line, "extra_mib")?),
            seconds(line, "mixture_seconds"),
            seconds(line, "products_seconds"),
            line.number("mixture_over_products").map_or(String::new(), |ratio| format!("{ratio:.2}")),
        ]);
    }
    let header = "| shape | implementation | step | extra | mixture | products | mixture / products |";
    Ok(markdown(header, rows) + &source(&lines, true))
}

fn steps_elsewhere(results: &Results) -> Result<String> {
    let elsewhere = results.steps_elsewhere();
    let mut processors: Vec<&str> = vec![];
    for line in &elsewhere {
        if !processors.contains(&line.text("processor")) {
            processors.push(line.text("processor"));
        }
    }
    let mut lines = vec![];
    for processor in processors {
        lines.extend(in_order(elsewhere.iter().copied().filter(|line| line.is("processor", processor)).collect())?);
    }
    let mut rows = vec![];
    for (i, line) in lines.iter().enumerate() {
        let same = |key| i > 0 && lines[i - 1].text(key) == line.text(key);
        let same_sizes = same("processor") && sizes_key(lines[i - 1]) == sizes_key(line);
        rows.push(vec![
            if same("processor") { String::new() } else { line.text("processor").into() },
            if same_sizes { String::new() } else { sizes(line, true)? },
            label(line),
            short(need(line, "seconds")?) + " s",
            extra(line),
        ]);
    }
    Ok(markdown("| processor | shape | implementation | step | extra |", rows) + &source(&lines, false))
}

/// Formats the memory of a step beyond parameters and inputs, if the line has it.
fn extra(line: &Line) -> String {
    line.number("extra_mib").map_or(String::new(), |mib| format!("{mib:.0} MiB"))
}

fn dtypes(results: &Results) -> Result<String> {
    let lines = results.lines_of("dtypes");
    let row = |line: &&Line| {
        let peer = |implementation: &str| {
            let is_like = |peer: &&&Line| ["shape", "dtype"].iter().all(|key| peer.text(key) == line.text(key));
            let mut peers = lines.iter().filter(is_like);
            peers.find(|peer| peer.is("implementation", implementation))
        };
        let peer_seconds = |name| peer(name).map_or(String::new(), |line| seconds(line, "seconds"));
        Ok(vec![
            format!("{}, {}", line.text("shape"), line.text("dtype")),
            seconds(line, "seconds"),
            seconds(line, "mixture_seconds"),
            format!("{:.2}", need(line, "mixture_over_products")?),
            extra(line),
            peer_seconds("PyTorch, torch.compile"),
            peer("PyTorch, torch.compile").map_or(String::new(), |line| extra(line)),
            peer_seconds("PyTorch, three products alone"),
        ])
    };
    let rows = lines.iter().filter(|line| !line.is_of_peer()).map(row).collect::<Result<_>>()?;
    let header =
        "| | step | mixture | mixture / products in f32 | extra | torch.compile | its extra | PyTorch's products |";
    Ok(markdown(header, rows) + &source(&lines, true))
}

/// Makes the table of logits and log-priors of a model that is sure of itself.
fn confident(results: &Results) -> Result<String> {
    const CASES: [(&str, &str); 5] = [
        ("plain_ms", "plain"),
        ("logits_ms", "logits of scale 15"),
        ("priors_ms", "log-priors over 20 nats"),
        ("wide_priors_ms", "log-priors over 40 nats"),
        ("confident_ms", "logits of scale 15, log-priors over 20 nats"),
    ];
    let lines = results.lines_of("confident");
    let Some(line) = lines.first() else { return Ok(UNMEASURED.into()) };
    let plain = need(line, "plain_ms")?;
    let row = |(key, case): (&str, &str)| {
        let time = need(line, key)?;
        Ok(vec![case.into(), format!("{} ms", digits(time)), format!("{:.2}", time / plain)])
    };
    let rows = CASES.into_iter().map(row).collect::<Result<_>>()?;
    Ok(markdown("| mixture with gradients, 84 positions of ptb | time | of plain |", rows) + &source(&lines, true))
}

/// Makes the table of the positions per second of a whole language model.
fn language_model(results: &Results) -> Result<String> {
    const IMPLEMENTATIONS: [&str; 3] = ["mos-head", "PyTorch, eager", "PyTorch, torch.compile"];
    let lines = results.lines_of("language-model");
    let ours = || lines.iter().filter(|line| !line.is_of_peer());
    let Some(first) = ours().next() else { return Ok(UNMEASURED.into()) };
    let row = |line: &&Line| {
        let mut row = vec![head_with_components(line)];
        for implementation in IMPLEMENTATIONS {
            let is_head =
                |other: &&&Line| other.text("head") == line.text("head") && other.is("implementation", implementation);
            let speed = lines.iter().find(is_head).map(|line| need(line, "positions_per_second")).transpose()?;
            row.push(speed.map_or(String::new(), count));
        }
        Ok(row)
    };
    let rows = ours().map(row).collect::<Result<_>>()?;
    let header = format!("| {} | {} |", first.text("shape"), IMPLEMENTATIONS.join(" | "));
    Ok(markdown(&header, rows) + &source(&lines, true))
}

/// Makes the table of the ten most probable ids after one position.
fn decoding(results: &Results) -> Result<String> {
    const SHAPES: [&str; 3] = ["v128256-k1-b1", "v10000-k15-b1", "v33278-k15-b1"];
    let lines = results.lines_of("decoding");
    let mut header = "| |".to_owned();
    let mut used = vec![];
    let mut rows = vec![];
    for implementation in ["mos-head", "PyTorch", "composed of candle operations", "read of the decoder"] {
        let read = implementation == "read of the decoder";
        let mut row = vec![];
        for shape in SHAPES {
            let shape = if read { shape.split('-').next().unwrap_or("") } else { shape };
            let line = lines.iter().find(|line| line.is("shape", shape) && line.is("implementation", implementation));
            let line = *line.ok_or(format!("no line of {implementation} at {shape}"))?;
            if row.is_empty() {
                row.push(label(line));
            }
            row.push(milliseconds(need(line, if read { "read_ms" } else { "top_10_ms" })?) + " ms");
            if implementation == "mos-head" {
                let components = need(line, "components")?;
                let softmaxes =
                    if components == 1.0 { "one softmax".into() } else { format!("{components} softmaxes") };
                let (vocab, d) = (count(need(line, "vocab")?), need(line, "context")?);
                header += &format!(" {softmaxes}, {vocab} ids (d = {d}) |");
            }
            used.push(line);
        }
        rows.push(row);
    }
    Ok(markdown(&header, rows) + &source(&used, true))
}

fn decoding_all(results: &Results) -> Result<String> {
    let lines = results.lines_of("decoding");
    let find = |shape: &str, implementation: &str| {
        let mut lines = lines.iter();
        lines.find(|line| line.is("shape", shape) && line.is("implementation", implementation)).copied()
    };
    let mut rows = vec![];
    for line in lines.iter().filter(|line| line.is("implementation", "mos-head")) {
        let shape = line.text("shape");
        let (components, batch) = (need(line, "components")?, need(line, "positions")?);
        let cell =
            |line: Option<&Line>, key| line.and_then(|line| line.number(key)).map_or(String::new(), milliseconds);
        let decoder = shape.split('-').next().filter(|_| batch == 1.0).unwrap_or("");
        let mut row = vec![format!("{}, {components}, {batch}", count(need(line, "vocab")?))];
        row.push(cell(find(decoder, "read of the decoder"), "read_ms"));
        for key in ["top_1_ms", "top_10_ms", "top_50_ms", "sample_ms", "ancestral_ms", "log_probs_ms"] {
            row.push(cell(Some(line), key));
        }
        row.push(cell(find(shape, "composed of candle operations"), "top_10_ms"));
        row.push(cell(find(shape, "PyTorch"), "top_10_ms"));
        row.push(cell(find(shape, "PyTorch"), "sample_ms"));
        rows.push(row);
    }
    let header = "| V, K, batch | read | top-1 | top-10 | top-50 | sample | ancestral | log-probs | composed top-10 \
                  | PyTorch top-10 | PyTorch sample |";
    Ok(markdown(header, rows) + &source(&lines, true))
}

fn label(line: &Line) -> String {
    match line.text("implementation") {
        "composed of candle operations" => "the formula composed of candle operations".into(),
        "read of the decoder" => "reading the decoder once".into(),
        "PyTorch, three products alone" => "PyTorch, its three products alone".into(),
        other => other.replace("linear_cross_entropy", "`linear_cross_entropy`"),
    }
}

fn sizes_key(line: &Line) -> (&str, Option<f64>) {
    (line.text("shape"), line.number("positions"))
}
