//! candle's matrix product on Metal with explicit row strides and offsets, and the addition of a matrix.

use candle_core::{DType, MetalDevice, MetalStorage, Result};
use candle_metal_kernels::metal::{Buffer, ComputePipeline, ConstantValues, Value};
use candle_metal_kernels::set_params;
use candle_metal_kernels::source::Source;
use candle_metal_kernels::utils::EncoderParam;
use candle_metal_kernels::utils::Output;
use objc2_metal::MTLSize;

/// A matrix in a buffer; offset and row stride are in elements.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    pub buffer: &'a Buffer,
    pub offset: usize,
    pub stride: usize,
    /// Whether the product takes its transpose.
    pub transposed: bool,
}

impl<'a> Matrix<'a> {
    /// A matrix in the storage of a tensor, with this offset and row stride.
    pub fn new(storage: &'a MetalStorage, offset: usize, stride: usize) -> Self {
        Self { buffer: storage.buffer(), offset, stride, transposed: false }
    }

    /// The matrix as the transpose that a product takes.
    pub fn transposed(self) -> Self {
        Self { transposed: true, ..self }
    }
}

/// `GEMMParams` of the kernel.
#[repr(C)]
struct Params {
    m: i32,
    n: i32,
    k: i32,
    lda: i32,
    ldb: i32,
    ldd: i32,
    tiles_n: i32,
    tiles_m: i32,
    batch_stride_a: usize,
    batch_stride_b: usize,
    batch_stride_d: usize,
    swizzle_log: i32,
    k_iterations: i32,
    batch_ndim: i32,
}

/// `GEMMAddMMParams` of the kernel.
#[repr(C)]
struct AddParams {
    ldc: i32,
    fdc: i32,
    batch_stride_c: usize,
    alpha: f32,
    beta: f32,
}

/// Lets the encoder take structures as their bytes.
macro_rules! as_bytes {
    ($($type:ty),+) => {$(
        impl EncoderParam for $type {
            fn set_param(encoder: &candle_metal_kernels::metal::ComputeCommandEncoder, position: usize, data: Self) {
                encoder.set_bytes(position, &data);
            }
        }
    )+};
}
as_bytes!(Params, AddParams);

/// How `d` is computed from the product of `a` and `b`.
#[derive(Clone, Copy)]
pub enum Into<'a> {
    /// `d = a b`.
    Product,
    /// `d = a b + c`, where `c` may be `d`.
    Sum(Matrix<'a>),
    /// `d = alpha a b + beta c`, where `c` may be `d`.
    Weighted(Matrix<'a>, f32, f32),
}

/// The kernel's tile: rows, columns, depth, and SIMD groups along rows and columns.
pub const TILE: [usize; 5] = [32, 32, 16, 2, 2];

impl Params {
    fn new((m, n, k): (usize, usize, usize), [a, b, d]: [Matrix<'_>; 3]) -> Self {
        let [tile_rows, tile_columns, tile_depth, ..] = TILE;
        Params {
            m: m as i32,
            n: n as i32,
            k: k as i32,
            lda: a.stride as i32,
            ldb: b.stride as i32,
            ldd: d.stride as i32,
            tiles_n: n.div_ceil(tile_columns) as i32,
            tiles_m: m.div_ceil(tile_rows) as i32,
            batch_stride_a: 0,
            batch_stride_b: 0,
            batch_stride_d: 0,
            swizzle_log: 0,
            k_iterations: (k / tile_depth) as i32,
            batch_ndim: 1,
        }
    }
}

/// The kernel of a product.
fn pipeline(
    device: &MetalDevice,
    dtype: DType,
    (m, n, k): (usize, usize, usize),
    [a, b]: [Matrix<'_>; 2],
    into: Into<'_>,
) -> Result<ComputePipeline> {
    let [tile_rows, tile_columns, tile_depth, warps_along_rows, warps_along_columns] = TILE;
    let constants = ConstantValues::new(vec![
        (10, Value::Bool(false)),
        (100, Value::Bool(!matches!(into, Into::Product))),
        (110, Value::Bool(matches!(into, Into::Weighted(..)))),
        (200, Value::Bool(m % tile_rows == 0)),
        (201, Value::Bool(n % tile_columns == 0)),
        (202, Value::Bool(k % tile_depth == 0)),
        (300, Value::Bool(false)),
    ]);
    let letter = |matrix: Matrix<'_>| if matrix.transposed { "t" } else { "n" };
    let dtype_name = dtype.as_str();
    let name = format!(
        "gemm_{}{}_{dtype_name}_{dtype_name}_{tile_rows}_{tile_columns}_{tile_depth}_{warps_along_rows}_\
         {warps_along_columns}",
        letter(a),
        letter(b)
    );
    let pipeline = device
        .kernels()
        .load_pipeline_with_constants(device.metal_device(), Source::Gemm, name, Some(constants))
        .map_err(candle_core::Error::wrap)?;
    Ok(pipeline)
}

/// Computes `d` `[m, n]` from `a` `[m, k]` and `b` `[k, n]`.
pub fn gemm(
    device: &MetalDevice,
    dtype: DType,
    (m, n, k): (usize, usize, usize),
    [a, b, d]: [Matrix<'_>; 3],
    into: Into<'_>,
) -> Result<()> {
    let [tile_rows, tile_columns, _, warps_along_rows, warps_along_columns] = TILE;
    let (c, alpha, beta) = match into {
        Into::Product => (None, 1.0, 0.0),
        Into::Sum(c) => (Some(c), 1.0, 1.0),
        Into::Weighted(c, alpha, beta) => (Some(c), alpha, beta),
    };
    // Loaded before the encoder, which holds a lock.
    let pipeline = pipeline(device, dtype, (m, n, k), [a, b], into)?;
    let params = Params::new((m, n, k), [a, b, d]);
    let guard = device.command_encoder()?;
    let encoder = guard.as_ref();
    encoder.set_compute_pipeline_state(&pipeline);
    let bytes = |matrix: Matrix<'_>| matrix.offset * dtype.size_in_bytes();
    set_params!(
        encoder,
        (
            (a.buffer, bytes(a)),
            (b.buffer, bytes(b)),
            (),
            Output::with_offset(d.buffer, bytes(d)),
            params,
            (),
            1i32,
            [0usize; 2].as_slice()
        )
    );
    if let Some(c) = c {
        // If C is D, the declaration of D as an output is enough for later commands to wait for it.
        encoder.set_input_buffer(2, Some(c.buffer), bytes(c));
        encoder.set_bytes(5, &AddParams { ldc: c.stride as i32, fdc: 1, batch_stride_c: 0, alpha, beta });
    }
    encoder.dispatch_thread_groups(
        MTLSize { width: n.div_ceil(tile_columns), height: m.div_ceil(tile_rows), depth: 1 },
        MTLSize { width: 32, height: warps_along_columns, depth: warps_along_rows },
    );
    Ok(())
}
