//! What benchmarks of few positions share.

use std::time::{Duration, Instant};

use rayon::prelude::*;

/// Reads a matrix once, on all threads.
pub fn read(values: &[f32]) -> u32 {
    let part = values.len().div_ceil(rayon::current_num_threads() * 4).max(1);
    let bits = |values: &[f32]| values.iter().fold(0, |sum: u32, x| sum.wrapping_add(x.to_bits()));
    values.par_chunks(part).map(bits).reduce(|| 0, u32::wrapping_add)
}

/// The sorted milliseconds of `n` calls that take turns, each at least twice, so that all of them see the same machine.
pub fn turns(
    n: usize,
    seconds: f64,
    mut call: impl FnMut(usize) -> mos_head::Result<()>,
) -> mos_head::Result<Vec<Vec<f64>>> {
    let mut times = vec![Vec::new(); n];
    let start = Instant::now();
    while times[0].len() < 2 || start.elapsed() < Duration::from_secs_f64(seconds) {
        for (i, times) in times.iter_mut().enumerate() {
            let start = Instant::now();
            call(i)?;
            times.push(start.elapsed().as_secs_f64() * 1e3);
        }
    }
    times.iter_mut().for_each(|times| times.sort_by(f64::total_cmp));
    Ok(times)
}

pub fn median(sorted: &[f64]) -> f64 {
    sorted[sorted.len() / 2]
}
