//! An Apple GPU: kernels, compiled once, and matrix products.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Mutex, OnceLock};

use candle_core::backend::BackendStorage;
use candle_core::{DType, Device, MetalDevice, Storage, Tensor};
use candle_metal_kernels::metal::{
    Buffer, ComputeCommandEncoder, ComputePipeline, ConstantValues, Library, MetalDeviceType, Value,
};
use candle_metal_kernels::source::Source;
use candle_metal_kernels::utils::{set_param, Input, Output};
use candle_metal_kernels::{call_copy2d, copy2d};
use objc2_metal::{MTLCompileOptions, MTLDevice, MTLGPUFamily, MTLMathMode, MTLSize};

use super::arguments::{bindings, Binding};
use super::f32_products::{multiply, F32Products, ProductBuffers};
use super::kind::{source, KIND};
use crate::backend::gpu::arguments::Argument;
use crate::backend::gpu::device::{DeviceMatrix, DeviceProduct, Gpu, GpuKind, BLOCK};
use crate::error::{Error, Result};

/// A device, and the buffers of one mixture on it.
pub(in crate::backend) struct Metal {
    device: MetalDevice,
    /// All buffers that have an address, which is the index of a buffer, from one, and a byte offset within it.
    buffers: RefCell<Vec<Buffer>>,
    scratch: ProductBuffers,
}

/// The number of low bits of an address that hold the byte offset.
const OFFSET_BITS: u32 = 40;

impl Metal {
    /// The buffers of a new mixture on this device.
    pub(in crate::backend) fn from_device(device: &Device) -> Result<Self> {
        match device {
            Device::Metal(device) => {
                Ok(Metal { device: device.clone(), buffers: RefCell::default(), scratch: ProductBuffers::default() })
            }
            device => Err(wrong_device(format!("{:?}", device.location()))),
        }
    }

    /// The buffer of an address, and the byte offset within it.
    fn buffer(&self, address: u64) -> (Buffer, usize) {
        let index = (address >> OFFSET_BITS) as usize;
        (self.buffers.borrow()[index - 1].clone(), (address & ((1 << OFFSET_BITS) - 1)) as usize)
    }

    /// The pipeline of a kernel of this crate, compiled once for each GPU.
    fn pipeline(&self, kernel: &str) -> Result<ComputePipeline> {
        type Pipelines = HashMap<(u64, String), ComputePipeline>;
        static CACHE: OnceLock<Mutex<(HashMap<u64, Library>, Pipelines)>> = OnceLock::new();
        // A panic leaves the maps consistent.
        let mut cache = CACHE.get_or_init(Default::default).lock().unwrap_or_else(|error| error.into_inner());
        let (libraries, pipelines) = &mut *cache;
        let id = self.device.registry_id();
        if let Some(pipeline) = pipelines.get(&(id, kernel.to_owned())) {
            return Ok(pipeline.clone());
        }
        let library = match libraries.get(&id) {
            Some(library) => library.clone(),
            None => libraries.entry(id).or_insert(self.compile()?).clone(),
        };
        let function = library.get_function(kernel, None).map_err(candle_core::Error::wrap)?;
        let pipeline =
            self.device.new_compute_pipeline_state_with_function(&function).map_err(candle_core::Error::wrap)?;
        pipelines.insert((id, kernel.to_owned()), pipeline.clone());
        Ok(pipeline)
    }

    /// Compiles the kernels, with safe math.
    fn compile(&self) -> Result<Library> {
        let device = self.device.metal_device().as_ref();
        // The first family with SIMD-group matrices, which candle's products use.
        if !device.supportsFamily(MTLGPUFamily::Apple7) {
            return Err(wrong_device(format!("Metal on {}", device.name())));
        }
        let options = MTLCompileOptions::new();
        if objc2::available!(macos = 15, ios = 18) {
            options.setMathMode(MTLMathMode::Safe);
        } else {
            #[allow(deprecated)] // older systems have no other option
            options.setFastMathEnabled(false);
        }
        let library = self.device.new_library_with_source(&source(), Some(&options));
        Ok(library.map_err(candle_core::Error::wrap)?)
    }
}

/// The error of a device that is not an Apple GPU, or too old a one.
fn wrong_device(got: String) -> Error {
    Error::Device { argument: "hidden", expected: "Metal on an Apple GPU, M1 or A14 or later".into(), got }
}

impl Gpu for Metal {
    fn kind(&self) -> &'static GpuKind {
        &KIND
    }

    fn address(&self, tensor: &Tensor) -> Result<u64> {
        let (storage, layout) = tensor.storage_and_layout();
        let Storage::Metal(storage) = &*storage else {
            return Err(wrong_device(format!("{:?}", tensor.device().location())));
        };
        let mut buffers = self.buffers.borrow_mut();
        buffers.push(storage.buffer().clone());
        let offset = layout.start_offset() * storage.dtype().size_in_bytes();
        Ok(((buffers.len() as u64) << OFFSET_BITS) + offset as u64)
    }

    fn launch(&self, kernel: &str, blocks: usize, arguments: &[Argument]) -> Result<()> {
        if blocks == 0 {
            return Ok(());
        }
        let bindings = bindings(arguments);
        // Parameters that the kernel does not access must be bound too.
        let any = bindings.iter().find_map(|binding| match binding {
            Binding::Read(address) | Binding::Write(address) => Some(self.buffer(*address).0),
            _ => None,
        });
        // The encoder's lock is taken last, since candle's allocations take it too.
        let pipeline = self.pipeline(kernel)?;
        let encoder = self.device.command_encoder()?;
        let encoder: &ComputeCommandEncoder = encoder.as_ref();
        encoder.set_compute_pipeline_state(&pipeline);
        for (slot, binding) in bindings.iter().enumerate() {
            match binding {
                Binding::Read(address) => {
                    let (buffer, offset) = self.buffer(*address);
                    set_param(encoder, slot, Input::with_offset(&buffer, offset));
                }
                Binding::Write(address) => {
                    let (buffer, offset) = self.buffer(*address);
                    set_param(encoder, slot, Output::with_offset(&buffer, offset));
                }
                Binding::Absent => encoder.set_input_buffer(slot, any.as_ref(), 0),
                Binding::Bytes(bytes) => set_param(encoder, slot, &bytes[..]),
            }
        }
        encoder.dispatch_thread_groups(size(blocks, 1), size(BLOCK, 1));
        Ok(())
    }

    fn multiply(&self, product: &DeviceProduct) -> Result<()> {
        multiply(self, product)
    }
}

/// A size of two dimensions.
fn size(width: usize, height: usize) -> MTLSize {
    MTLSize { width, height, depth: 1 }
}

/// `GEMMParams` of candle's `mlx_gemm.metal`.
#[repr(C)]
struct GemmParams {
    m: i32,
    n: i32,
    k: i32,
    lhs_stride: i32,
    rhs_stride: i32,
    out_stride: i32,
    tiles_n: i32,
    tiles_m: i32,
    batch_strides: [usize; 3],
    swizzle_log: i32,
    whole_steps: i32,
    batch_dimensions: i32,
}

impl GemmParams {
    fn new(product: &DeviceProduct, tiling: &GemmTiling) -> Self {
        GemmParams {
            m: product.m as i32,
            n: product.n as i32,
            k: product.k as i32,
            lhs_stride: product.lhs.stride as i32,
            rhs_stride: product.rhs.stride as i32,
            out_stride: product.out_stride as i32,
            tiles_n: product.n.div_ceil(tiling.columns) as i32,
            tiles_m: product.m.div_ceil(tiling.rows) as i32,
            batch_strides: [0; 3],
            swizzle_log: 0,
            whole_steps: (product.k / tiling.step) as i32,
            batch_dimensions: 1,
        }
    }
}

/// `GEMMAddMMParams` of candle's `mlx_gemm.metal`: how the matrix C is added to the product.
#[repr(C)]
struct Addition {
    row_stride: i32,
    column_stride: i32,
    batch_stride: usize,
    alpha: f32,
    beta: f32,
}

/// The tiling of a product by candle's kernel: a threadgroup computes a tile of the result, step by step over the inner
/// dimension.
struct GemmTiling {
    rows: usize,
    columns: usize,
    /// The terms that each step adds to the sums.
    step: usize,
    warps_along_rows: usize,
    warps_along_columns: usize,
}

impl Metal {
    /// One of the tilings that candle's kernel is compiled for, chosen as candle does for f32.
    fn tiling(&self, product: &DeviceProduct) -> GemmTiling {
        let is_by_transposed = !product.lhs.is_transposed && product.rhs.is_transposed;
        let is_large = product.m * product.n >= 1 << 20;
        let (rows, columns, step, warps_along_rows, warps_along_columns) =
            match self.device.metal_device().device_type() {
                _ if product.m < 16 || product.n < 16 => (32, 32, 16, 2, 2),
                MetalDeviceType::Phone | MetalDeviceType::BasePro if is_by_transposed => (64, 32, 32, 2, 2),
                MetalDeviceType::Phone | MetalDeviceType::BasePro => (64, 64, 16, 2, 2),
                _ if is_large => (64, 64, 16, 2, 2),
                _ if is_by_transposed => (32, 64, 16, 1, 2),
                _ => (64, 32, 32, 2, 2),
            };
        GemmTiling { rows, columns, step, warps_along_rows, warps_along_columns }
    }

    /// candle's kernel for a product with this tiling, compiled once.
    fn gemm_pipeline(&self, product: &DeviceProduct, tiling: &GemmTiling) -> Result<ComputePipeline> {
        let letter = |matrix: &DeviceMatrix| if matrix.is_transposed { 't' } else { 'n' };
        let name = format!(
            "gemm_{}{}_f32_f32_{}_{}_{}_{}_{}",
            letter(&product.lhs),
            letter(&product.rhs),
            tiling.rows,
            tiling.columns,
            tiling.step,
            tiling.warps_along_rows,
            tiling.warps_along_columns
        );
        let constants = ConstantValues::new(vec![
            (10, Value::Bool(false)),                                     // has_batch
            (100, Value::Bool(product.accumulates)),                      // use_out_source
            (110, Value::Bool(false)),                                    // do_axpby
            (200, Value::Bool(product.m.is_multiple_of(tiling.rows))),    // align_M
            (201, Value::Bool(product.n.is_multiple_of(tiling.columns))), // align_N
            (202, Value::Bool(product.k.is_multiple_of(tiling.step))),    // align_K
            (300, Value::Bool(false)),                                    // do_gather
        ]);
        let pipeline = self
            .device
            .kernels()
            .load_pipeline_with_constants(self.device.metal_device(), Source::Gemm, name, Some(constants))
            .map_err(candle_core::Error::wrap)?;
        Ok(pipeline)
    }

    /// Computes a product, and adds the matrix at the address `addend` if the product accumulates. That matrix has the
    /// strides of the result. Its buffer must hold whole tiles, since candle's kernel also reads the rows of the last
    /// tile that the result does not have.
    fn multiply_tiles(&self, product: &DeviceProduct, tiling: &GemmTiling, addend: u64) -> Result<()> {
        let sizes = GemmParams::new(product, tiling);
        let addition = Addition {
            row_stride: product.out_stride as i32,
            column_stride: 1,
            batch_stride: 0,
            alpha: 1.0,
            beta: 1.0,
        };
        let pipeline = self.gemm_pipeline(product, tiling)?;
        let [lhs, rhs, addend, out] =
            [product.lhs.address, product.rhs.address, addend, product.out].map(|address| self.buffer(address));

        let encoder = self.device.command_encoder()?;
        let encoder: &ComputeCommandEncoder = encoder.as_ref();
        encoder.set_compute_pipeline_state(&pipeline);
        set_param(encoder, 0, Input::with_offset(&lhs.0, lhs.1));
        set_param(encoder, 1, Input::with_offset(&rhs.0, rhs.1));
        if product.accumulates {
            set_param(encoder, 2, Input::with_offset(&addend.0, addend.1));
            encoder.set_bytes(5, &addition);
        }
        set_param(encoder, 3, Output::with_offset(&out.0, out.1));
        encoder.set_bytes(4, &sizes);
        // The shape and strides of the batch, which is one product.
        encoder.set_bytes(6, &1i32);
        encoder.set_bytes(7, &[0usize; 2]);
        encoder.dispatch_thread_groups(
            size(sizes.tiles_n as usize, sizes.tiles_m as usize),
            MTLSize { width: 32, height: tiling.warps_along_columns, depth: tiling.warps_along_rows },
        );
        Ok(())
    }

    /// Copies an f32 matrix with rows of `stride` elements.
    fn copy(&self, from: u64, to: u64, rows: usize, columns: usize, stride: usize) -> Result<()> {
        let [from, to] = [from, to].map(|address| self.buffer(address));
        let encoder = self.device.command_encoder()?;
        call_copy2d(
            self.device.metal_device(),
            &encoder,
            self.device.kernels(),
            copy2d::FLOAT,
            &from.0,
            &to.0,
            rows,
            columns,
            stride,
            stride,
            from.1,
            to.1,
        )
        .map_err(candle_core::Error::wrap)?;
        Ok(())
    }
}

impl F32Products for Metal {
    fn multiply_f32(&self, product: &DeviceProduct) -> Result<()> {
        let tiling = self.tiling(product);
        let bytes = |elements: usize| elements * DType::F32.size_in_bytes();
        let (out, offset) = self.buffer(product.out);
        let whole_tiles = (product.m.next_multiple_of(tiling.rows) - 1) * product.out_stride + product.n;
        if !product.accumulates || offset + bytes(whole_tiles) <= out.length() {
            return self.multiply_tiles(product, &tiling, product.out);
        }
        // The buffer ends within the last tile: the rows of this tile are added from a copy in a larger buffer.
        let before = product.m - product.m % tiling.rows;
        let before_in_lhs = if product.lhs.is_transposed { before } else { before * product.lhs.stride };
        let last = DeviceProduct {
            m: product.m - before,
            lhs: DeviceMatrix { address: product.lhs.address + bytes(before_in_lhs) as u64, ..product.lhs },
            out: product.out + bytes(before * product.out_stride) as u64,
            ..*product
        };
        let copy = self.scratch.last_rows(self, tiling.rows * product.out_stride)?;
        self.copy(last.out, copy, last.m, last.n, last.out_stride)?;
        if before > 0 {
            self.multiply_tiles(&DeviceProduct { m: before, ..*product }, &tiling, product.out)?;
        }
        self.multiply_tiles(&last, &tiling, copy)
    }

    fn scratch(&self) -> &ProductBuffers {
        &self.scratch
    }

    fn fresh(&self, elements: usize) -> Result<Tensor> {
        Ok(Tensor::zeros(elements, DType::F32, &Device::Metal(self.device.clone()))?)
    }
}
