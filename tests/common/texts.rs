//! Texts that are cut among ranks, and a vocabulary among others, and the comparison with one process.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::sync::Arc;

use approx::{assert_abs_diff_eq, assert_relative_eq};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use mos_head::distributed::{Collectives, DataParallel, VocabParallel, VocabShard};
use mos_head::{LossOptions, MixtureConfig, MixtureOfSoftmaxes, OutputLayer, Result};

use crate::values::{numbers, tensor, Numbers};

const POSITIONS: usize = 29;
pub const HIDDEN: usize = 6;
const VOCAB: usize = 40;

/// A head with these rows of the decoder, and its variables by name.
fn rows_of_head(dtype: DType, rows: Range<usize>) -> Result<(MixtureOfSoftmaxes, Vec<(String, Var)>)> {
    let map = VarMap::new();
    let vb = VarBuilder::from_varmap(&map, dtype, &Device::Cpu);
    let head = MixtureOfSoftmaxes::new(&MixtureConfig::new(HIDDEN, rows.len(), 3), vb)?;
    let mut named: Vec<_> = map.data().lock().expect("no panic").clone().into_iter().collect();
    named.sort_by(|a, b| a.0.cmp(&b.0));
    for (i, (name, var)) in named.iter().enumerate() {
        let values = if name.starts_with("decoder.") {
            tensor(&[&[VOCAB], &var.dims()[1..]].concat(), i, dtype)?.narrow(0, rows.start, rows.len())?
        } else {
            tensor(var.dims(), i, dtype)?
        };
        var.set(&values)?;
    }
    Ok((head, named))
}

/// A head, and its variables by name, which are the same on every rank.
pub fn head(dtype: DType) -> Result<(MixtureOfSoftmaxes, Vec<(String, Var)>)> {
    rows_of_head(dtype, 0..VOCAB)
}

/// The gradients of all variables, one after another; of those with a row for each id, these rows.
fn gradients(store: &GradStore, vars: &[(String, Var)], rows: Range<usize>) -> Result<Numbers> {
    let rows = |(_, var): &(String, Var)| {
        let gradient = store.get(var).expect("a gradient");
        Ok(numbers(&if gradient.dim(0)? == VOCAB {
            gradient.narrow(0, rows.start, rows.len())?
        } else {
            gradient.clone()
        }))
    };
    Ok(vars.iter().map(rows).collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
}

/// Loss and gradients of one process with all texts equal what the ranks with some of the texts, and perhaps with some
/// of the vocabulary, add up to. Ranks with the same rows get the same bits.
pub fn equal_one_process(texts: &Arc<dyn Collectives>, vocabulary: Option<&Arc<dyn Collectives>>) -> Result<()> {
    let class_weights = tensor(&[VOCAB], 4, DType::F32)?.abs()?;
    let position_weights = tensor(&[POSITIONS], 5, DType::F32)?.abs()?;
    let ids = (0..POSITIONS).map(|t| (t * 11 % VOCAB) as u32);
    let targets = Tensor::from_iter(ids, &Device::Cpu)?;
    for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 1e-5), (DType::BF16, 3e-2)] {
        let hidden = tensor(&[POSITIONS, HIDDEN], 9, dtype)?;
        for (ignored, weighted) in [(99, false), (33, true), (0, false)] {
            let options = |rank_weights: &Tensor| {
                let options = LossOptions::new().with_ignore_index(ignored);
                if weighted {
                    options.with_class_weights(class_weights.clone()).with_position_weights(rank_weights.clone())
                } else {
                    options
                }
            };
            let (whole, vars) = head(dtype)?;
            let expected = whole.loss(&hidden, &targets, &options(&position_weights))?;
            let shard = vocabulary.map(|ranks| VocabShard::new(ranks.clone(), VOCAB)).transpose()?;
            let rows = shard.as_ref().map_or(0..VOCAB, VocabShard::range);
            let expected_gradients = gradients(&expected.backward()?, &vars, rows.clone())?;
            let expected = expected.value.to_dtype(DType::F64)?.to_scalar::<f64>()?;

            // The last has most targets.
            let (start, end) = match (texts.rank() * 3, texts.rank() + 1 == texts.ranks()) {
                (start, true) => (start, POSITIONS),
                (start, false) => (start, start + 3),
            };
            let own_text = |whole: &Tensor| whole.narrow(0, start, end - start);
            let (head, vars) = rows_of_head(dtype, rows.clone())?;
            let head: Box<dyn OutputLayer> = match shard {
                Some(shard) => Box::new(VocabParallel::new(head, shard)?),
                None => Box::new(head),
            };
            let ranks = DataParallel::new(texts.clone());
            let options = ranks.options(&own_text(&targets)?, &options(&own_text(&position_weights)?))?;
            let loss = head.loss(&own_text(&hidden)?, &own_text(&targets)?, &options)?;
            let mut store = loss.backward()?;
            ranks.all_reduce_named(&mut store, &vars)?;
            let [value] = ranks.sums([loss.value.to_dtype(DType::F64)?.to_scalar::<f64>()?])?;
            let gradients = gradients(&store, &vars, 0..VOCAB)?;

            let mut bits = DefaultHasher::new();
            gradients.iter().chain([&value]).for_each(|number| number.to_bits().hash(&mut bits));
            let all_bits = texts.all_gather(&[(bits.finish() >> 12) as f64])?;
            assert!(all_bits.iter().all(|rank_bits| *rank_bits == all_bits[0]), "{all_bits:?}");
            assert_abs_diff_eq!(value, expected, epsilon = tolerance * expected.abs());
            assert_relative_eq!(gradients, expected_gradients, max_relative = tolerance);
        }
    }
    Ok(())
}
