//! Random mixtures whose distributions are restricted to sets of ids: plain loops in f64, and candle's operations.

use candle_core::{DType, Device, Result, Tensor};
use mos_head::parts::LogitFunction;
use mos_head::sets::AllowedIds;
use rand::{rngs::StdRng, SeedableRng};

use super::case::{Case, Tensors};
use super::composed::log_softmax;
use super::problem::{Problem, Sets};
use super::reference::{self, distributions};

/// Cases of every way in which the log-probabilities of sets are computed.
pub fn cases() -> Vec<Problem> {
    let mut cases = Vec::new();
    for (components, positions, d, vocab, sets) in [
        (1, 1, 1, 1, Sets::Shared(1)),
        (1, 5, 7, 37, Sets::Shared(9)),
        (1, 6, 8, 30, Sets::Shared(30)),
        // Short lists: the logits of each list.
        (1, 13, 19, 600, Sets::Each(5)),
        (1, 11, 16, 900, Sets::Each(1)),
        // Long lists: the logits of all ids in any list, or of all ids.
        (1, 4, 5, 50, Sets::Each(6)),
        (1, 9, 5, 20, Sets::Each(18)),
        (3, 5, 7, 37, Sets::Shared(9)),
        (3, 4, 6, 700, Sets::Shared(300)),
        (3, 6, 5, 90, Sets::Each(12)),
        (3, 3, 6, 700, Sets::Each(400)),
        (3, 2, 3, 1, Sets::Each(1)),
    ] {
        let case = Problem { sets, ..Problem::new(positions, components, d, vocab) };
        cases.push(case);
        cases.push(Problem { logit_scale: 0.7, function: LogitFunction::Softcap(1.3), temperature: 0.6, ..case });
        cases.push(Problem { bias: false, transposed: true, temperature: 1.7, ..case });
    }
    for (components, sets) in [(1, Sets::Each(6)), (1, Sets::Shared(9)), (3, Sets::Each(12)), (3, Sets::Shared(9))] {
        cases.push(Problem { function: LogitFunction::Sigsoftmax, sets, ..Problem::new(5, components, 7, 37) });
    }
    cases
}

impl Problem {
    /// The ids of each position.
    pub fn lists(&self) -> Vec<Vec<u32>> {
        let mut rng = StdRng::seed_from_u64(self.vocab as u64);
        let mut draw = |n: usize| {
            let mut ids: Vec<usize> = rand::seq::index::sample(&mut rng, self.vocab, n).into_vec();
            ids.sort_unstable();
            ids.into_iter().map(|id| id as u32).collect::<Vec<_>>()
        };
        match self.sets {
            Sets::Shared(n) => vec![draw(n); self.positions],
            Sets::Each(most) => (0..self.positions).map(|t| draw(1 + (t * 7 + most - 1) % most)).collect(),
        }
    }

    pub fn allowed(&self) -> AllowedIds {
        let lists = self.lists();
        match self.sets {
            Sets::Shared(_) => AllowedIds::new(&lists[0]),
            Sets::Each(_) => per_position(&lists),
        }
    }

    /// An allowed id of each position.
    pub fn targets(&self) -> Vec<u32> {
        self.lists().iter().enumerate().map(|(t, list)| list[(t * t + 1) % list.len()]).collect()
    }

    /// Its operands as variables on the CPU.
    pub fn variables(&self, dtype: DType) -> Result<Tensors> {
        self.drawn(dtype).variables(dtype, &Device::Cpu)
    }

    /// `log P(v | S)` for the ids of these lists, one row for each position, from candle's operations.
    pub fn composed_restricted(&self, tensors: &Tensors, temperature: f64) -> Result<Vec<Tensor>> {
        let (log_p, _) = self.operands(tensors)?.log_probs(self.logits())?;
        let row = |(t, list): (usize, &Vec<u32>)| {
            let ids = Tensor::new(list.as_slice(), &Device::Cpu)?;
            log_softmax(&(log_p.get(t)?.index_select(&ids, 0)? / temperature)?)
        };
        self.lists().iter().enumerate().map(row).collect()
    }
}

/// `log P(v | S)` at each position for the ids of these lists, at a temperature, by loops.
pub fn renormalized(case: &Case, lists: &[Vec<u32>], temperature: f64) -> Vec<Vec<f64>> {
    let row = |((log_probs, _), list): ((Vec<f64>, _), &Vec<u32>)| {
        let mut row: Vec<f64> = list.iter().map(|&id| log_probs[id as usize] / temperature).collect();
        reference::log_softmax(&mut row);
        row
    };
    distributions(case).into_iter().zip(lists).map(row).collect()
}

/// The negative log-likelihood of each target, from rows of the log-probabilities of these lists.
pub fn nll(rows: &[Vec<f64>], lists: &[Vec<u32>], targets: &[u32]) -> Vec<f64> {
    let place = |t: usize| lists[t].iter().position(|id| *id == targets[t]).expect("allowed");
    (0..targets.len()).map(|t| -rows[t][place(t)]).collect()
}

/// The entropy of each row of log-probabilities.
pub fn entropies(rows: &[Vec<f64>]) -> Vec<f64> {
    rows.iter().map(|row| -row.iter().map(|x| x * x.exp()).sum::<f64>()).collect()
}

/// Lists one after another.
pub fn per_position(lists: &[Vec<u32>]) -> AllowedIds {
    let mut offsets = vec![0];
    for list in lists {
        offsets.push(offsets[offsets.len() - 1] + list.len());
    }
    AllowedIds::per_position(&lists.concat(), &offsets).expect("offsets that ascend")
}

pub fn ids(ids: &[u32], shape: &[usize]) -> Tensor {
    Tensor::from_vec(ids.to_vec(), shape, &Device::Cpu).expect("ids")
}

/// Demands an error of a number or option.
pub fn assert_config<T: std::fmt::Debug>(result: mos_head::Result<T>, name: &str, part: &str) {
    let error = result.expect_err(name);
    assert!(matches!(error, mos_head::Error::Config { argument, .. } if argument == name), "{name}: {error:?}");
    assert!(error.to_string().contains(part), "{error}");
}
