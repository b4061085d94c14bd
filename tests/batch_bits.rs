//! The results of a position are the same bits wherever it stands in a batch, whatever else is in the batch, and on any
//! number of threads, so that a sampler draws the same ids.

mod common;

use candle_core::{DType, Device};
use common::case::{Case, Head, Sizes};
use mos_head::decode::{NextToken, Sampler, Sampling, TokenRequest};
use mos_head::{Distributions, Result};

const VOCAB: usize = 1021;
const MOST: usize = 70;

fn case(components: usize, d: usize, dtype: DType) -> Result<Case> {
    Ok(Case::random(Head::Mixture, Sizes::new(0, d, components, VOCAB), &[MOST], 5).rounded(dtype)?)
}

/// For each position the best ids, the bits of their log-probabilities, and an id that is drawn with this number.
fn found(case: &Case, first: usize, positions: usize, dtype: DType) -> Result<Vec<Vec<u64>>> {
    let mixture = case.at(first..first + positions).mixture(dtype, &Device::Cpu)?;
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

#[test]
fn a_position_has_the_same_bits_in_every_batch() -> Result<()> {
    for (components, d) in [(1, 37), (3, 37), (4, 37), (15, 37), (1, 128), (3, 128), (4, 128), (15, 128)] {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let case = case(components, d, dtype)?;
            let all = found(&case, 0, MOST, dtype)?;
            for batch in [1, 2, 5, 9] {
                for first in (0..MOST - batch).step_by(if batch == 1 { 13 } else { 9 }) {
                    let found = found(&case, first, batch, dtype)?;
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
        let case = case(components, d, dtype)?;
        let of_threads = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
            pool.install(|| found(&case, 0, MOST, dtype))
        };
        let one = of_threads(1)?;
        for threads in [2, 7] {
            assert!(of_threads(threads)? == one, "{components} {d} {dtype:?} on {threads} threads");
        }
    }
    Ok(())
}
