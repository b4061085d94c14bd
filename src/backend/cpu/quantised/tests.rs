//! Blocks of all types against candle's copies and against products in f64.

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};

use super::blocks::Blocks;
use super::kind::BlockType;
use crate::backend::cpu::operands::context_rows::ContextRows;
use crate::backend::cpu::operands::matrix::ViewMut;
use crate::backend::cpu::vector::simd::Isa;
use crate::backend::plan::Kernels;

const TYPES: [GgmlDType; 5] = [GgmlDType::Q8_0, GgmlDType::Q6K, GgmlDType::Q4K, GgmlDType::Q5K, GgmlDType::Q4_0];

fn numbers(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state as f32 / u32::MAX as f32 - 0.5
    };
    (0..n).map(|_| next() + next() + next()).collect()
}

/// Rows of blocks, as bytes and as candle dequantises them.
struct Rows {
    kind: BlockType,
    bytes: Vec<u8>,
    width: usize,
    weights: Vec<f32>,
}

impl Rows {
    fn new(dtype: GgmlDType, ids: usize, blocks: usize) -> Self {
        let kind = BlockType::new(dtype).unwrap();
        let width = blocks * kind.weights();
        let tensor = Tensor::from_vec(numbers(ids * width, 7), (ids, width), &Device::Cpu).unwrap();
        let tensor = QTensor::quantize(&tensor, dtype).unwrap();
        let weights = tensor.dequantize(&Device::Cpu).unwrap().flatten_all().unwrap().to_vec1().unwrap();
        // An exact copy: a read past the last block is one past an allocation.
        Rows { kind, bytes: tensor.data().unwrap().to_vec(), width, weights }
    }

    fn blocks(&self) -> Blocks<'_> {
        Blocks::new(self.kind, &self.bytes, self.width)
    }

    fn dots(&self, isa: Isa, contexts: &[f32], ids: std::ops::Range<usize>) -> Vec<f32> {
        let rows = contexts.len() / self.width;
        let mut to = vec![1.0; rows * ids.len()];
        let view = &mut ViewMut::new(&mut to, rows, ids.len(), ids.len());
        let contexts = ContextRows { values: contexts, stride: self.width };
        self.blocks().dots(isa, contexts, ids.clone(), false, view);
        to
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn copies_have_the_bits_of_candle() {
    for dtype in TYPES {
        for (ids, blocks) in [(1, 1), (3, 2), (5, 3)] {
            let rows = Rows::new(dtype, ids, blocks);
            for isa in Isa::available() {
                let stride = rows.width + 5;
                let mut to = vec![0.0; ids * stride];
                rows.blocks().dequantise(isa, 0..ids, stride, &mut to);
                for (to, expected) in to.chunks_exact(stride).zip(rows.weights.chunks_exact(rows.width)) {
                    assert_eq!(bits(&to[..rows.width]), bits(expected), "{dtype:?} {}", isa.kernels());
                }
            }
        }
    }
}

#[test]
fn copies_of_any_bytes_have_the_bits_of_plain_code() {
    for dtype in TYPES {
        let mut rows = Rows::new(dtype, 64, 1);
        let mut state = 1u32;
        for byte in &mut rows.bytes {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            *byte = (state >> 24) as u8;
        }
        let copy = |isa| {
            let mut to = vec![0.0; 64 * rows.width];
            rows.blocks().dequantise(isa, 0..64, rows.width, &mut to);
            to
        };
        let expected = copy(Isa::Scalar(pulp::Scalar));
        for isa in Isa::available() {
            for (got, &expected) in copy(isa).iter().zip(&expected) {
                let is_same = got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan();
                assert!(is_same, "{dtype:?} {}: {got:e} for {expected:e}", isa.kernels());
            }
        }
    }
}

#[test]
fn products_are_those_of_the_copies() {
    for dtype in TYPES {
        for (ids, blocks) in [(1, 1), (7, 3), (103, 8)] {
            let rows = Rows::new(dtype, ids, blocks);
            for isa in Isa::available() {
                for n in [1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 100] {
                    let contexts = numbers(n * rows.width, 3);
                    let got = rows.dots(isa, &contexts, 0..ids);
                    let mut size = 0.0f64;
                    let mut error = 0.0f64;
                    for (row, context) in contexts.chunks_exact(rows.width).enumerate() {
                        for (id, weights) in rows.weights.chunks_exact(rows.width).enumerate() {
                            let products = context.iter().zip(weights).map(|(&x, &w)| f64::from(x) * f64::from(w));
                            let (sum, squares) = products.fold((0.0, 0.0), |(s, q), p| (s + p, q + p * p));
                            size += squares;
                            error += (f64::from(got[row * ids + id]) - sum).powi(2);
                        }
                    }
                    // With fewer lanes more numbers are added one after the other.
                    let bound = match isa.kernels() {
                        Kernels::Scalar => 1e-12,
                        Kernels::Neon => 3.2e-13,
                        _ => 1.6e-13,
                    };
                    assert!(error <= bound * size, "{dtype:?} {} {n}: {error:e} of {size:e}", isa.kernels());
                }
            }
        }
    }
}

#[test]
fn a_product_has_the_same_bits_alone_in_batches_and_in_parts() {
    for dtype in TYPES {
        let (ids, blocks) = (23, 3);
        let rows = Rows::new(dtype, ids, blocks);
        let contexts = numbers(64 * rows.width, 5);
        for isa in Isa::available() {
            let all = rows.dots(isa, &contexts, 0..ids);
            for n in [1, 2, 3, 4, 5, 6, 7, 8, 9, 17] {
                let contexts = &contexts[..n * rows.width];
                assert_eq!(bits(&rows.dots(isa, contexts, 0..ids)), bits(&all[..n * ids]), "{dtype:?} {n}");
                for part in [0..1, 1..6, 6..23, 22..23, 4..4] {
                    let got = rows.dots(isa, contexts, part.clone());
                    for row in 0..n {
                        let expected = &all[row * ids..][part.clone()];
                        assert_eq!(bits(&got[row * part.len()..][..part.len()]), bits(expected), "{dtype:?} {n}");
                    }
                }
            }
        }
    }
}

#[test]
fn products_are_added_to_what_there_is() {
    for dtype in TYPES {
        let rows = Rows::new(dtype, 6, 1);
        for isa in Isa::available() {
            for n in [1, 3, 9] {
                let contexts = numbers(n * rows.width, 5);
                let mut to = vec![2.0; n * 6];
                let context_rows = ContextRows { values: &contexts, stride: rows.width };
                rows.blocks().dots(isa, context_rows, 0..6, true, &mut ViewMut::new(&mut to, n, 6, 6));
                let expected: Vec<f32> = rows.dots(isa, &contexts, 0..6).iter().map(|x| x + 2.0).collect();
                assert_eq!(bits(&to), bits(&expected), "{dtype:?} {n}");
            }
        }
    }
}

#[test]
fn scales_that_are_not_finite_pass_through() {
    for dtype in TYPES {
        for scale in [0x7e00u16, 0x7c00] {
            let mut rows = Rows::new(dtype, 3, 2);
            let at = rows.bytes.len() / 3 + if rows.kind == BlockType::Q6K { 208 } else { 0 };
            rows.bytes[at..at + 2].copy_from_slice(&scale.to_le_bytes());
            for isa in Isa::available() {
                for n in [1, 9] {
                    let got = rows.dots(isa, &numbers(n * rows.width, 5), 0..3);
                    for row in got.chunks_exact(3) {
                        assert!(row[0].is_finite() && !row[1].is_finite() && row[2].is_finite(), "{dtype:?} {row:?}");
                    }
                }
            }
        }
    }
}
