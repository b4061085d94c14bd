//! These tests compare bijections, the words of a model of codes, and tables and their costs with plain loops.

use candle_core::{DType, Device, Tensor, D};
use candle_nn::ops::log_softmax;
use mos_codes::{Assignment, CodeCosts, CodeTable, Codebook, Error, Result, TableConfig, TargetCode};

/// A model of codes gives the log-probabilities of the first code at each position, and of the second after each first.
struct Model {
    /// The log-probabilities `[positions, codes]` of the first code.
    first: Tensor,
    /// The log-probabilities `[positions * codes, codes]` of the second code.
    second: Tensor,
}

impl Model {
    /// Makes a random model, in which some codes are impossible.
    fn random(positions: usize, codes: usize, seed: u64) -> Result<Self> {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let mut random = |rows: usize| -> Result<Tensor> {
            let logits = (0..rows * codes).map(|_| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let uniform = (state >> 11) as f64 / (1u64 << 53) as f64;
                if uniform < 0.05 {
                    f64::NEG_INFINITY
                } else {
                    8.0 * uniform
                }
            });
            let logits = Tensor::from_vec(logits.collect::<Vec<_>>(), (rows, codes), &Device::Cpu)?;
            Ok(log_softmax(&logits, D::Minus1)?)
        };
        Ok(Model { first: random(positions)?, second: random(positions * codes)? })
    }

    fn second(&self, positions: &Tensor, firsts: &Tensor) -> Result<Tensor> {
        let codes = self.first.dim(1)? as f64;
        let rows = (positions.to_dtype(DType::F64)?.affine(codes, 0.0)? + firsts.to_dtype(DType::F64)?)?;
        Ok(self.second.index_select(&rows.to_dtype(DType::U32)?, 0)?)
    }

    /// Computes the log-probability of every word at a position, by the definition.
    fn log_probs(&self, position: usize, book: &Codebook) -> Result<Vec<f64>> {
        let codes = book.code_count();
        let first: Vec<f64> = self.first.get(position)?.to_vec1()?;
        let log_prob = |word: u32| -> Result<f64> {
            let sequence = book.codes_of(word)?;
            let row = position * codes + sequence[0] as usize;
            let second: Vec<f64> = self.second.get(row)?.to_vec1()?;
            Ok(first[sequence[0] as usize] + sequence.get(1).map_or(0.0, |&code| second[code as usize]))
        };
        (0..book.word_count() as u32).map(log_prob).collect()
    }
}

fn counts(words: usize) -> Vec<f64> {
    (0..words).map(|word| ((word * 7919) % 101) as f64).collect()
}

/// Makes tables of LightRNN, of Hybrid-LightRNN with empty cells, of words that all have a code of their own, and one
/// that is no square, each by frequency and at random.
fn tables(words: usize) -> Result<Vec<CodeTable>> {
    let light = TableConfig::light_rnn(words);
    let hybrid = TableConfig::hybrid(words, words / 2)?;
    let configs = [light, hybrid, TableConfig::hybrid(words, words)?, light.with_own(3).with_table(2, words)];
    let both = |config| [CodeTable::by_frequency(config, &counts(words)), CodeTable::random(config, &counts(words), 5)];
    configs.into_iter().flat_map(both).collect()
}

#[test]
fn every_text_has_one_encoding() -> Result<()> {
    for table in tables(40)? {
        let book = table.codebook();
        assert_eq!((book.word_count(), book.code_count()), (40, table.config().code_count()));
        let words: Vec<u32> = (0..40).chain((0..40).rev()).collect();
        let codes = book.encode(&words)?;
        assert_eq!(book.decode(&codes)?, words);
        let mut first = None;
        for &code in &codes {
            assert!(book.continuations(first)?.contains(&code));
            let mask = book.mask(&[first], &Device::Cpu)?.squeeze(0)?.to_vec1::<f32>()?;
            let allowed = (0u32..).zip(&mask).filter(|(_, mask)| **mask == 0.0).map(|(code, _)| code);
            assert_eq!(allowed.collect::<Vec<_>>(), book.continuations(first)?);
            first = book.advance(first, code)?;
        }
        assert_eq!(first, None);
        // Any walk through the continuations is a text.
        let (mut walk, mut first) = (Vec::new(), None);
        for step in 0..200usize {
            let allowed = book.continuations(first)?;
            let code = allowed[step * 31 % allowed.len()];
            first = book.advance(first, code)?;
            walk.push(code);
        }
        if first.is_some() {
            walk.push(book.continuations(first)?[0]);
        }
        assert_eq!(book.encode(&book.decode(&walk)?)?, walk);
    }
    Ok(())
}

#[test]
fn the_frequent_words_have_codes_of_their_own() -> Result<()> {
    let config = TableConfig::hybrid(40, 20)?;
    let counts = counts(40);
    for table in [CodeTable::by_frequency(config, &counts)?, CodeTable::random(config, &counts, 3)?] {
        let is_own = |word: &u32| table.codebook().codes_of(*word).unwrap().len() == 1;
        let (own, shared): (Vec<u32>, Vec<u32>) = (0..40).partition(is_own);
        assert_eq!(own.len(), config.own);
        let least = own.iter().map(|&word| counts[word as usize]).fold(f64::INFINITY, f64::min);
        assert!(shared.iter().all(|&word| counts[word as usize] <= least));
        let mut in_rows: Vec<u32> = (0..config.rows).flat_map(|row| table.row(row)).flatten().collect();
        in_rows.sort_unstable();
        assert_eq!(in_rows, shared);
    }
    assert!(CodeTable::random(config, &counts, 3)? != CodeTable::random(config, &counts, 4)?);
    Ok(())
}

#[test]
fn words_have_the_probability_of_their_codes() -> Result<()> {
    for (seed, table) in (1..).zip(tables(40)?) {
        let book = table.codebook();
        let model = Model::random(5, book.code_count(), seed)?;
        for word in 0..40 {
            let words = [word, (word + 1) % 40, word, 39 - word, 0];
            let found = book.word_log_probs(&words, &model.first, |positions, codes| model.second(positions, codes))?;
            for (position, (&word, found)) in words.iter().zip(found).enumerate() {
                let expected = model.log_probs(position, book)?[word as usize];
                assert!(found == expected || (found - expected).abs() < 1e-12, "{found} {expected}");
            }
        }
        let total: f64 = model.log_probs(0, book)?.into_iter().map(f64::exp).sum();
        assert!(total <= 1.0 + 1e-12);
    }
    Ok(())
}

#[test]
fn the_best_words_are_those_of_a_full_sort() -> Result<()> {
    for (seed, table) in (1..).zip(tables(40)?) {
        let book = table.codebook();
        let model = Model::random(5, book.code_count(), seed)?;
        for k in [1, 3, 40] {
            let mut steps = Vec::new();
            let found = book.top_words(&model.first, k, |positions, codes| {
                steps.extend(positions.to_vec1::<u32>()?.into_iter().zip(codes.to_vec1::<u32>()?));
                model.second(positions, codes)
            })?;
            let taken = steps.len();
            steps.sort_unstable();
            steps.dedup();
            assert_eq!(steps.len(), taken, "no step twice");
            let (tokens, log_probs) = (found.words.to_vec2::<u32>()?, found.log_probs.to_vec2::<f64>()?);
            for position in 0..5 {
                let all = model.log_probs(position, book)?;
                let mut expected: Vec<u32> = (0..40).collect();
                expected.sort_by(|&a, &b| all[b as usize].total_cmp(&all[a as usize]).then(a.cmp(&b)));
                assert_eq!(tokens[position], expected[..k]);
                for (&word, found) in tokens[position].iter().zip(&log_probs[position]) {
                    let expected = all[word as usize];
                    assert!(*found == expected || (found - expected).abs() < 1e-12);
                }
            }
        }
    }
    Ok(())
}

#[test]
fn few_first_codes_are_tried_for_the_best_word() -> Result<()> {
    let table = CodeTable::by_frequency(TableConfig::light_rnn(900), &counts(900))?;
    // The first row has nearly all of the probability.
    let logits: Vec<f64> = (0..60).map(|code| if code == 0 { 20.0 } else { 0.0 }).collect();
    let first = log_softmax(&Tensor::from_vec(logits, (1, 60), &Device::Cpu)?, D::Minus1)?;
    let mut rows = 0;
    let found = table.codebook().top_words(&first, 2, |_: &Tensor, codes: &Tensor| -> Result<Tensor> {
        rows += codes.dim(0)?;
        Ok((Tensor::zeros((codes.dim(0)?, 60), DType::F64, &Device::Cpu)? - 60f64.ln())?)
    })?;
    assert_eq!(found.words.dims(), [1, 2]);
    assert!(rows < 10, "{rows} of 30 rows");
    Ok(())
}

#[test]
fn costs_are_summed_by_word_and_the_best_table_costs_the_least() -> Result<()> {
    for table in tables(16)? {
        let (book, config) = (table.codebook(), table.config());
        let text: Vec<u32> = (0..300u32).map(|i| i * i % 17 % 16).collect();
        let targets: Vec<(u32, TargetCode)> = text
            .iter()
            .flat_map(|&word| {
                let places = [TargetCode::First, TargetCode::Second];
                places.into_iter().take(book.codes_of(word).unwrap().len()).map(move |place| (word, place))
            })
            .collect();
        let log_probs = Model::random(targets.len(), config.code_count(), 3)?.first.clamp(-20.0, 0.0)?;
        let mut costs = CodeCosts::new(&table);
        // The log-probabilities come in parts, as a model gives them.
        for first in (0..targets.len()).step_by(70) {
            let part = &targets[first..targets.len().min(first + 70)];
            costs.add(&log_probs.narrow(0, first, part.len())?, part)?;
        }
        let rows = log_probs.to_vec2::<f64>()?;
        let cost = |table: &CodeTable| -> f64 {
            let target_cost = |(row, (word, place)): (&Vec<f64>, &(u32, TargetCode))| {
                let codes = table.codebook().codes_of(*word).unwrap();
                match codes {
                    [_] => 0.0,
                    [first, second] => -row[if *place == TargetCode::First { *first } else { *second } as usize],
                    _ => unreachable!(),
                }
            };
            rows.iter().zip(&targets).map(target_cost).sum()
        };
        let close = |a: f64, b: f64| (a - b).abs() < 1e-3;
        assert!(close(costs.total(&table)?, cost(&table)));
        let best = costs.reallocate(&table, Assignment::Exact)?;
        assert!(close(costs.total(&best)?, cost(&best)));
        assert!(costs.total(&best)? <= costs.total(&table)? + 1e-3);
        let near = costs.reallocate(&table, Assignment::Approximate { candidates: 4 })?;
        assert!(costs.total(&near)? >= costs.total(&best)? - 1e-3);
        for seed in 0..50 {
            let other = CodeTable::random(config, &counts(16), seed)?;
            assert!(costs.total(&other)? >= costs.total(&best)? - 1e-3);
        }
        let text = best.codebook().encode(&text)?;
        assert_eq!(best.codebook().decode(&text)?.len(), 300);
    }
    Ok(())
}

#[test]
fn tables_are_saved_as_codes() -> Result<()> {
    for table in tables(40)? {
        let again = CodeTable::from_codes(table.config(), &table.codes()?)?;
        assert_eq!(again, table);
    }
    Ok(())
}

#[test]
fn mistakes_are_errors_that_name_them() -> Result<()> {
    let message = |result: Result<()>| result.unwrap_err().to_string();
    let unit = |result: Result<CodeTable>| message(result.map(|_| ()));
    assert_eq!(
        message(TableConfig::hybrid(10_000, 199).map(|_| ())),
        "codes: expected at least 200 for 10000 words, got 199"
    );
    assert_eq!(TableConfig::hybrid(10_000, 200)?, TableConfig::light_rnn(10_000));
    let config = TableConfig::light_rnn(40);
    assert!(unit(CodeTable::by_frequency(config.with_table(6, 6), &counts(40))).contains("places for 40 words"));
    assert!(unit(CodeTable::by_frequency(config, &counts(39))).contains("one for each of 40 words"));
    assert!(unit(CodeTable::random(config, &[f64::NAN; 40], 1)).contains("NaN"));
    assert!(unit(CodeTable::by_frequency(TableConfig::light_rnn(0), &[])).contains("words"));

    let table = CodeTable::by_frequency(config, &counts(40))?;
    let codes = |codes: &Tensor| unit(CodeTable::from_codes(config, codes));
    assert!(codes(&table.codes()?.narrow(0, 0, 39)?).contains("[40, 2]"));
    assert!(codes(&table.codes()?.to_dtype(DType::I64)?).contains("u32"));
    let twice = Tensor::cat(&[table.codes()?.narrow(0, 0, 39)?, table.codes()?.narrow(0, 0, 1)?], 0)?;
    assert!(codes(&twice).starts_with("codes") && codes(&twice).contains("word 39"));
    assert!(codes(&table.codes()?.zeros_like()?).contains("word 0"));

    let book = table.codebook();
    let first = Tensor::zeros((2, 14), DType::F32, &Device::Cpu)?;
    let second = |_: &Tensor, codes: &Tensor| Ok(Tensor::zeros((codes.dim(0)?, 13), DType::F32, &Device::Cpu)?);
    let log_probs = |words: &[u32], first: &Tensor| message(book.word_log_probs(words, first, second).map(|_| ()));
    assert!(log_probs(&[1, 2, 3], &first).contains("first: expected shape [3, 14]"));
    assert!(log_probs(&[1, 40], &first).contains("below 40"));
    assert!(log_probs(&[1, 40], &first).ends_with("got 40 at index 1"));
    assert!(message(book.encode(&[1, 2, 40]).map(|_| ())).ends_with("got 40 at index 2"));
    assert!(message(book.decode(&[99]).map(|_| ())).ends_with("got 99 at index 0"));
    assert!(message(book.mask(&[None, Some(99)], &Device::Cpu).map(|_| ())).ends_with("got 99 at index 1"));
    assert!(log_probs(&[1, 2], &first).contains("second: expected shape [2, 14]"));
    let top = |first: &Tensor, k| message(book.top_words(first, k, second).map(|_| ()));
    assert!(top(&first, 0).contains("k") && top(&first, 41).contains("at most 40"));
    assert!(top(&first.zeros_like()?.affine(1.0, f64::NAN)?, 1).contains("position 0 is NaN"));
    assert!(top(&first.zeros_like()?.affine(1.0, f64::INFINITY)?, 1).contains("position 0 is NaN or infinite"));
    assert!(top(&first.narrow(1, 0, 13)?, 1).contains("[2, 14]"));

    let mut costs = CodeCosts::new(&table);
    assert!(message(costs.add(&first, &[(1, TargetCode::First)])).contains("[1, 14]"));
    assert!(message(costs.add(&first, &[(1, TargetCode::First), (40, TargetCode::First)]))
        .ends_with("below 40, got 40 at index 1"));
    let other = CodeTable::by_frequency(config.with_own(1), &counts(40))?;
    assert!(matches!(costs.total(&other), Err(Error::Config { argument: "table", .. })));
    let places = [(1, TargetCode::First), (2, TargetCode::Second)];
    assert!(matches!(costs.add(&(&first / 0.0)?, &places), Err(Error::Distribution { position: 0 })));
    let second_is_nan = Tensor::new(&[[-1f32; 14], [f32::NAN; 14]], &Device::Cpu)?;
    assert!(matches!(costs.add(&second_is_nan, &places), Err(Error::Distribution { position: 1 })));
    assert!(matches!(costs.add(&(&first + f64::INFINITY)?, &places), Err(Error::Distribution { position: 0 })));
    assert!(matches!(costs.add(&(&first - f64::INFINITY)?, &places), Err(Error::Distribution { position: 0 })));
    let second_first = [(2, TargetCode::Second), (1, TargetCode::First)];
    assert!(matches!(costs.add(&(&first - f64::INFINITY)?, &second_first), Err(Error::Distribution { position: 0 })));
    assert_eq!(costs.total(&table)?, 0.0, "an error adds nothing");
    costs.add(&(&first - 1e31)?, &places)?;
    assert!(unit(costs.reallocate(&table, Assignment::Exact)).contains("costs"));
    Ok(())
}

#[test]
fn sizes_that_no_table_has_are_errors() {
    let light = TableConfig::light_rnn(4);
    for config in
        [light.with_table(usize::MAX, usize::MAX), light.with_table(1 << 32, 1 << 32), light.with_own(1 << 40)]
    {
        let error = CodeTable::random(config, &[1.0; 4], 1).unwrap_err().to_string();
        assert!(error.starts_with("table: expected at most"), "{error}");
    }
    assert!(TableConfig::hybrid(usize::MAX, usize::MAX - 1).is_err());
    // Two words in half a billion rows, each of which is a code, would take 25 GB.
    let config = TableConfig::light_rnn(2).with_table(1 << 29, 2);
    let error = CodeTable::by_frequency(config, &[2.0, 1.0]).unwrap_err().to_string();
    assert_eq!(error, "table: expected at most 16777216 places, got 0 codes and a table of 536870912 x 2");
    // The costs of 2^24 words in 2^23 rows would be 2^47 numbers.
    let config = TableConfig::light_rnn(1 << 24).with_table(1 << 23, 2);
    let error = CodeTable::by_frequency(config, &[]).unwrap_err().to_string();
    assert!(error.starts_with("words * (rows + columns): expected at most"), "{error}");
    for codes in [(1 << 24) + 1, 1 << 30] {
        let error = Codebook::new(codes, &[&[0u32][..], &[1, 2]]).unwrap_err();
        assert_eq!(error.to_string(), format!("codes: expected at most 16777216, got {codes}"));
        assert!(matches!(error, Error::Config { argument: "codes", .. }));
    }
    let endless = Tensor::zeros((1, 3), DType::F32, &Device::Cpu).unwrap().broadcast_as((1 << 62, 3)).unwrap();
    let book = Codebook::new(3, &[&[0u32][..], &[1, 2]]).unwrap();
    let second = |_: &Tensor, _: &Tensor| -> Result<Tensor> { unreachable!() };
    let error = book.top_words(&endless, 1, second).unwrap_err().to_string();
    assert!(error.starts_with("first: expected shape of at most"), "{error}");
    assert!(Codebook::new(usize::MAX, &[&[0u32][..]]).unwrap_err().to_string().starts_with("codes"));
    // This table is smaller than LightRNN's, and a word that has no cell has a code of its own.
    assert_eq!(TableConfig::hybrid(10, 7).unwrap().own, 1);
}

#[test]
fn costs_of_frequent_words_stay_exact() -> Result<()> {
    let table = CodeTable::by_frequency(TableConfig::light_rnn(2).with_table(2, 1), &[2.0, 1.0])?;
    let log_probs = Tensor::full(-0.4f32, (1 << 16, 3), &Device::Cpu)?;
    let targets = vec![(0, TargetCode::First); 1 << 16];
    let mut costs = CodeCosts::new(&table);
    for _ in 0..300 {
        costs.add(&log_probs, &targets)?;
    }
    let expected = 0.4 * f64::from(300 << 16);
    assert!((costs.total(&table)? / expected - 1.0).abs() < 1e-6);
    Ok(())
}

/// Makes costs of the words of a square table, of about `base`, with differences of up to `spread`.
fn large_costs(table: &CodeTable, base: f64, spread: u64) -> Result<CodeCosts> {
    let (words, codes) = (table.codebook().word_count(), table.config().code_count());
    let mut state = 7u64;
    let cost = |_| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        -(base + (state >> 33) as f64 % spread as f64)
    };
    let log_probs = (0..2 * words * codes).map(cost).collect::<Vec<f64>>();
    let log_probs = Tensor::from_vec(log_probs, (2 * words, codes), &Device::Cpu)?;
    let places = [TargetCode::First, TargetCode::Second];
    let targets: Vec<_> = (0..words as u32).flat_map(|word| places.map(|place| (word, place))).collect();
    let mut costs = CodeCosts::new(table);
    costs.add(&log_probs, &targets)?;
    Ok(costs)
}

#[test]
fn the_best_table_is_found_by_differences_that_are_small_beside_the_costs() -> Result<()> {
    let config = TableConfig::light_rnn(4);
    let orders: Vec<Vec<u32>> = (0..256u32)
        .map(|i| (0..4).map(|place| i >> (2 * place) & 3).collect::<Vec<_>>())
        .filter(|cells| (0..4).all(|cell| cells.contains(&cell)))
        .collect();
    assert_eq!(orders.len(), 24);
    let tables = orders.iter().map(|cells| {
        let codes: Vec<u32> = cells.iter().flat_map(|cell| [cell / 2, 2 + cell % 2]).collect();
        CodeTable::from_codes(config, &Tensor::from_vec(codes, (4, 2), &Device::Cpu)?)
    });
    let tables = tables.collect::<Result<Vec<_>>>()?;
    for (base, spread) in [(0.0, 100), (1e8, 5), (1e8, 100), (1e11, 100)] {
        let costs = large_costs(&tables[0], base, spread)?;
        let totals = tables.iter().map(|table| costs.total(table)).collect::<Result<Vec<f64>>>()?;
        let least = totals.iter().copied().fold(f64::INFINITY, f64::min);
        for method in [Assignment::Exact, Assignment::Approximate { candidates: 4 }] {
            for table in &tables {
                assert_eq!(costs.total(&costs.reallocate(table, method)?)?, least, "{base} {spread} {method:?}");
            }
        }
    }
    Ok(())
}

#[test]
fn no_table_is_worse_than_the_one_given() -> Result<()> {
    // There are too many words for the approximation to find the least cost.
    let table = CodeTable::random(TableConfig::light_rnn(900), &counts(900), 1)?;
    for base in [0.0, 1e8] {
        let costs = large_costs(&table, base, 100)?;
        let best = costs.reallocate(&table, Assignment::Exact)?;
        assert!(costs.total(&best)? < costs.total(&table)?);
        for candidates in [1, 64] {
            let near = costs.reallocate(&best, Assignment::Approximate { candidates })?;
            assert!(costs.total(&near)? <= costs.total(&best)?, "{base} {candidates}");
            let near = costs.reallocate(&table, Assignment::Approximate { candidates })?;
            assert!(costs.total(&near)? < costs.total(&table)?, "{base} {candidates}");
        }
    }
    Ok(())
}

#[test]
fn more_candidates_than_cells_are_all_cells() -> Result<()> {
    let table = CodeTable::random(TableConfig::light_rnn(900), &counts(900), 1)?;
    let costs = CodeCosts::new(&table);
    let better = costs.reallocate(&table, Assignment::Approximate { candidates: usize::MAX })?;
    assert_eq!(better.codebook().word_count(), 900);
    assert!(costs.reallocate(&table, Assignment::Approximate { candidates: 0 }).is_err());
    Ok(())
}

#[test]
fn a_table_of_other_words_has_no_costs() -> Result<()> {
    let config = TableConfig::light_rnn(5).with_own(3).with_table(2, 2);
    let shares = |codes: [[u32; 2]; 5]| CodeTable::from_codes(config, &Tensor::new(&codes, &Device::Cpu)?);
    let four = shares([[0, 0], [3, 5], [3, 6], [4, 5], [4, 6]])?;
    let two = CodeTable::by_frequency(config, &[5.0, 4.0, 3.0, 2.0, 1.0])?;
    let error = CodeCosts::new(&four).total(&two).unwrap_err().to_string();
    assert_eq!(error, "table: expected a cell for word 1, got a code of its own");
    Ok(())
}

#[test]
fn impossible_words_are_in_the_order_of_their_ids() -> Result<()> {
    let book = Codebook::new(8, &[[0, 7], [1, 7], [2, 7], [3, 7], [4, 7], [5, 7], [5, 6]])?;
    let impossible = f64::NEG_INFINITY;
    let first = Tensor::new(&[[impossible, impossible, impossible, -1.0, -1.0, -1.0, -9.0, -9.0]], &Device::Cpu)?;
    for k in 1..=7 {
        let second = |_: &Tensor, codes: &Tensor| -> Result<Tensor> {
            Ok(Tensor::full(impossible, (codes.dim(0)?, 8), &Device::Cpu)?)
        };
        let found = book.top_words(&first, k, second)?;
        assert_eq!(found.words.to_vec2::<u32>()?, [(0..k as u32).collect::<Vec<_>>()]);
        assert_eq!(found.log_probs.dtype(), DType::F64);
    }
    Ok(())
}
