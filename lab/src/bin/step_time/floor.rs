//! The baseline of the time: the bare matrix products by the `gemm` crate, with the best of several tilings.

use std::time::Instant;

use gemm::Parallelism;
use rayon::prelude::*;

#[derive(Clone, Copy)]
pub struct ProductSizes {
    /// Positions times components.
    pub rows: usize,
    pub context: usize,
    pub vocab: usize,
}

/// The first product alone, or all three, in the fastest tiling.
pub struct Floor {
    buffers: Buffers,
    tiling: Tiling,
    products: usize,
}

impl Floor {
    /// Returns all three products, or the first alone. Each run writes the decoder's gradient into fresh memory, as a
    /// step does.
    pub fn new(sizes: ProductSizes, all: bool) -> Self {
        best_of(sizes, if all { 3 } else { 1 })
    }

    pub fn run(&mut self) {
        self.buffers.run(self.tiling, self.buffers.sizes.rows, self.products);
    }
}

/// The rows of logits at a time, and the tiles of each product: `None` leaves them to the `gemm` crate.
#[derive(Clone, Copy)]
struct Tiling {
    rows: usize,
    vocab: Option<usize>,
    block: Option<(usize, usize)>,
}

fn best_of(sizes: ProductSizes, products: usize) -> Floor {
    let mut buffers = Buffers::new(sizes);
    let mut candidates = Vec::new();
    for rows in [120, 240, 480, 960] {
        let rows = rows.min(sizes.rows);
        for vocab in [None, Some(192), Some(512), Some(2048)] {
            candidates.push(Tiling { rows, vocab, block: vocab.map(|_| (256, 240)) });
        }
        candidates.push(Tiling { rows, vocab: Some(512), block: Some((128, sizes.context)) });
        candidates.push(Tiling { rows, vocab: Some(512), block: None });
    }
    // The least time per row over a few chunks decides.
    let mut best = (f64::INFINITY, candidates[0]);
    for tiling in candidates {
        let chunks = 480usize.div_ceil(tiling.rows);
        let rows = (chunks * tiling.rows).min(sizes.rows);
        let first = buffers.run(tiling, rows, products);
        // A second run after a long one would hardly be faster.
        let second = if first < 1.0 { buffers.run(tiling, rows, products) } else { first };
        let seconds = first.min(second) / rows as f64;
        if seconds < best.0 {
            best = (seconds, tiling);
        }
    }
    Floor { buffers, tiling: best.1, products }
}

struct Buffers {
    sizes: ProductSizes,
    contexts: Vec<f32>,
    decoder: Vec<f32>,
    logits: Vec<f32>,
    context_gradient: Vec<f32>,
}

impl Buffers {
    fn new(sizes: ProductSizes) -> Self {
        let ProductSizes { rows, context, vocab } = sizes;
        Buffers {
            sizes,
            contexts: vec![0.25; rows * context],
            decoder: vec![0.125; vocab * context],
            logits: vec![0.0; rows.min(960) * vocab],
            context_gradient: vec![0.0; rows * context],
        }
    }

    /// Returns the seconds that the products of the first `rows` rows take.
    fn run(&mut self, tiling: Tiling, rows: usize, products: usize) -> f64 {
        let (d, vocab) = (self.sizes.context, self.sizes.vocab);
        let start = Instant::now();
        let mut decoder_gradient = vec![0.0; if products == 3 { vocab * d } else { 0 }];
        for first in (0..rows).step_by(tiling.rows) {
            let n = tiling.rows.min(rows - first);
            let contexts = Matrix::new(&mut self.contexts[first * d..], d);
            let decoder = Matrix::new(&mut self.decoder, d);
            let logits = Matrix::new(&mut self.logits, vocab);
            let vocab_tile = tiling.vocab.map(|tile| (n, tile));
            product(logits, (n, vocab), d, contexts, decoder.transposed(), false, vocab_tile);
            if products == 3 {
                let gradient = Matrix::new(&mut self.context_gradient[first * d..], d);
                product(gradient, (n, d), vocab, logits, decoder, false, tiling.block);
                let gradient = Matrix::new(&mut decoder_gradient, d);
                let vocab_tile = tiling.vocab.map(|tile| (tile, d));
                product(gradient, (vocab, d), n, logits.transposed(), contexts, first > 0, vocab_tile);
            }
        }
        start.elapsed().as_secs_f64()
    }
}

/// Elements at `data[row * strides.0 + col * strides.1]`.
#[derive(Clone, Copy)]
struct Matrix {
    data: *mut f32,
    strides: (isize, isize),
}

// SAFETY: `product` lets threads write to tiles that do not overlap, of vectors that outlive the threads.
unsafe impl Send for Matrix {}
// SAFETY: as above.
unsafe impl Sync for Matrix {}

impl Matrix {
    fn new(data: &mut [f32], stride: usize) -> Self {
        Matrix { data: data.as_mut_ptr(), strides: (stride as isize, 1) }
    }

    fn transposed(self) -> Self {
        Matrix { strides: (self.strides.1, self.strides.0), ..self }
    }

    fn at(self, row: usize, col: usize) -> Self {
        let offset = row as isize * self.strides.0 + col as isize * self.strides.1;
        Matrix { data: self.data.wrapping_offset(offset), ..self }
    }
}

/// Computes `dst[m, n] (+)= lhs[m, k] rhs[k, n]`, in tiles that are distributed over the threads, or as one product.
fn product(
    dst: Matrix,
    (m, n): (usize, usize),
    k: usize,
    lhs: Matrix,
    rhs: Matrix,
    add: bool,
    tile: Option<(usize, usize)>,
) {
    let multiply = |dst: Matrix, m: usize, n: usize, lhs: Matrix, rhs: Matrix, parallelism| {
        // SAFETY: the callers' sizes lie within the vectors that `Buffers` allocated for them.
        unsafe {
            gemm::gemm(
                m,
                n,
                k,
                dst.data,
                dst.strides.1,
                dst.strides.0,
                add,
                lhs.data,
                lhs.strides.1,
                lhs.strides.0,
                rhs.data,
                rhs.strides.1,
                rhs.strides.0,
                if add { 1f32 } else { 0. },
                1.,
                false,
                false,
                false,
                parallelism,
            );
        }
    };
    let Some((rows, cols)) = tile else {
        return multiply(dst, m, n, lhs, rhs, Parallelism::Rayon(0));
    };
    let tiles: Vec<(usize, usize)> =
        (0..m).step_by(rows).flat_map(|r| (0..n).step_by(cols).map(move |c| (r, c))).collect();
    tiles.into_par_iter().for_each(|(r, c)| {
        multiply(dst.at(r, c), rows.min(m - r), cols.min(n - c), lhs.at(r, 0), rhs.at(0, c), Parallelism::None);
    });
}
