//! The results of a position are the same bits wherever it stands in a batch, whatever else is in the batch, and on any
//! number of threads, so that a sampler draws the same ids.

use candle_core::{DType, Device, Tensor};
use mos_head::decode::{NextToken, Sampler, Sampling, TokenRequest};
use mos_head::{Distributions, Mixture, Result};

const VOCAB: usize = 1021;
const MOST: usize = 70;

/// A mixture at `MOST` positions, and the mixture at some of them.
struct Problem {
    contexts: Tensor,
    log_priors: Tensor,
    weight: Tensor,
    bias: Tensor,
}

impl Problem {
    fn new(components: usize, d: usize, dtype: DType) -> Result<Self> {
        let mut state = 88_172_645_463_325_252u64;
        let mut tensor = |shape: &[usize], scale: f64| -> Result<Tensor> {
            let values = (0..shape.iter().product::<usize>()).map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                scale * ((state >> 11) as f64 / (1u64 << 53) as f64 - 0.5)
            });
            Ok(Tensor::from_vec(values.collect::<Vec<f64>>(), shape, &Device::Cpu)?.to_dtype(DType::F32)?)
        };
        Ok(Problem {
            contexts: tensor(&[MOST, components, d], 4.0)?.to_dtype(dtype)?,
            log_priors: tensor(&[MOST, components], 4.0)?,
            weight: tensor(&[VOCAB, d], 2.0)?.to_dtype(dtype)?,
            bias: tensor(&[VOCAB], 1.0)?.to_dtype(dtype)?,
        })
    }

    fn mixture(&self, first: usize, positions: usize) -> Result<Mixture> {
        let of = |tensor: &Tensor| Ok::<_, mos_head::Error>(tensor.narrow(0, first, positions)?.contiguous()?);
        Mixture::new(&of(&self.contexts)?, Some(&of(&self.log_priors)?), &self.weight, Some(&self.bias))
    }

    /// For each position the best ids, the bits of their log-probabilities, and an id that is drawn with this number.
    fn found(&self, first: usize, positions: usize) -> Result<Vec<Vec<u64>>> {
        let mixture = self.mixture(first, positions)?;
        let mut sampler = Sampler::new(Sampling::new(), 7)?;
        // The numbers of the positions before these.
        sampler.uniform(first);
        let drawn = mixture.sample(&mut sampler)?.to_vec1::<u32>()?;
        // The best ids with the forms of a draw: those of `top_k` depend on the number of rows.
        let request = TokenRequest::new(Sampling::greedy(), 0)?.with_best(50);
        let tokens = mixture.next_tokens(&vec![&request; positions])?;
        let of_position = |(token, id): (&NextToken, u32)| {
            let bits = token.best.iter().flat_map(|&(id, log_p)| [u64::from(id), log_p.to_bits()]);
            bits.chain([u64::from(id)]).collect()
        };
        Ok(tokens.iter().zip(drawn).map(of_position).collect())
    }
}

#[test]
fn a_position_has_the_same_bits_in_every_batch() -> Result<()> {
    for (components, d) in [(1, 37), (3, 37), (4, 37), (15, 37), (1, 128), (3, 128), (4, 128), (15, 128)] {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let problem = Problem::new(components, d, dtype)?;
            let all = problem.found(0, MOST)?;
            for batch in [1, 2, 5, 9] {
                for first in (0..MOST - batch).step_by(if batch == 1 { 13 } else { 9 }) {
                    let found = problem.found(first, batch)?;
                    assert!(found == all[first..first + batch], "{components} {d} {dtype:?}, {batch} from {first}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn a_position_has_the_same_bits_on_every_number_of_threads() -> Result<()> {
    for (components, d, dtype) in [(1, 37, DType::F32), (15, 128, DType::F32), (4, 128, DType::BF16)] {
        let problem = Problem::new(components, d, dtype)?;
        let of_threads = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
            pool.install(|| problem.found(0, MOST))
        };
        let one = of_threads(1)?;
        for threads in [2, 7] {
            assert!(of_threads(threads)? == one, "{components} {d} {dtype:?} on {threads} threads");
        }
    }
    Ok(())
}
