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
    pub(in crate::backend) fn from_device(device: &Device) -> Result<Self> {
        match device {
            Device::Metal(device) => {
                Ok(Metal { device: device.clone(), buffers: RefCell::default(), scratch: ProductBuffers::default() })
            }
            device => Err(wrong_device(format!("{:?}", device.location()))),
        }
    }

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

/// `GEMMAddMMParams` of candle's `mlx_gemm.metal`: how the matrix C is added to the product.
#[repr(C)]
struct Addition {
    row_stride: i32,
    column_stride: i32,
    batch_stride: usize,
    alpha: f32,
    beta: f32,
}

/// The tiling of a product by candle's kernel: rows, columns and terms of a tile, and the warps along rows and columns.
struct GemmTiling {
    rows: usize,
    columns: usize,
    terms: usize,
    warps: (usize, usize),
}

impl Metal {
    /// One of the tilings that candle's kernel is compiled for, chosen as candle does for f32.
    fn tiles(&self, p: &DeviceProduct) -> GemmTiling {
        let by_transposed = !p.lhs.transposed && p.rhs.transposed;
        let is_large = p.m * p.n >= 1 << 20;
        let (rows, columns, terms, warps) = match self.device.metal_device().device_type() {
            _ if p.m < 16 || p.n < 16 => (32, 32, 16, (2, 2)),
            MetalDeviceType::Phone | MetalDeviceType::BasePro if by_transposed => (64, 32, 32, (2, 2)),
            MetalDeviceType::Phone | MetalDeviceType::BasePro => (64, 64, 16, (2, 2)),
            _ if is_large => (64, 64, 16, (2, 2)),
            _ if by_transposed => (32, 64, 16, (1, 2)),
            _ => (64, 32, 32, (2, 2)),
        };
        GemmTiling { rows, columns, terms, warps }
    }

    /// Computes a product and adds the matrix at the address `addend` if it accumulates. That matrix has the strides of
    /// the result. Its buffer must hold whole tiles, since candle's kernel also reads the rows of the last tile that
    /// the result does not have.
    fn multiply_tiles(&self, p: &DeviceProduct, tiles: &GemmTiling, addend: u64) -> Result<()> {
        let letter = |matrix: &DeviceMatrix| if matrix.transposed { 't' } else { 'n' };
        let name = format!(
            "gemm_{}{}_f32_{}_{}_{}_{}_{}",
            letter(&p.lhs),
            letter(&p.rhs),
            tiles.rows,
            tiles.columns,
            tiles.terms,
            tiles.warps.0,
            tiles.warps.1
        );
        let constants = ConstantValues::new(vec![
            (10, Value::Bool(false)),                              // has_batch
            (100, Value::Bool(p.accumulate)),                      // use_out_source
            (110, Value::Bool(false)),                             // do_axpby
            (200, Value::Bool(p.m.is_multiple_of(tiles.rows))),    // align_M
            (201, Value::Bool(p.n.is_multiple_of(tiles.columns))), // align_N
            (202, Value::Bool(p.k.is_multiple_of(tiles.terms))),   // align_K
            (300, Value::Bool(false)),                             // do_gather
        ]);
        let sizes = GemmParams {
            m: p.m as i32,
            n: p.n as i32,
            k: p.k as i32,
            lhs_stride: p.lhs.stride as i32,
            rhs_stride: p.rhs.stride as i32,
            out_stride: p.out_stride as i32,
            tiles_n: p.n.div_ceil(tiles.columns) as i32,
            tiles_m: p.m.div_ceil(tiles.rows) as i32,
            batch_strides: [0; 3],
            swizzle_log: 0,
            whole_steps: (p.k / tiles.terms) as i32,
            batch_dimensions: 1,
        };
        let addition =
            Addition { row_stride: p.out_stride as i32, column_stride: 1, batch_stride: 0, alpha: 1.0, beta: 1.0 };
        let pipeline = self
            .device
            .kernels()
            .load_pipeline_with_constants(self.device.metal_device(), Source::Gemm, name, Some(constants))
            .map_err(candle_core::Error::wrap)?;
        let [lhs, rhs, addend, out] = [p.lhs.address, p.rhs.address, addend, p.out].map(|address| self.buffer(address));

        let encoder = self.device.command_encoder()?;
        let encoder: &ComputeCommandEncoder = encoder.as_ref();
        encoder.set_compute_pipeline_state(&pipeline);
        set_param(encoder, 0, Input::with_offset(&lhs.0, lhs.1));
        set_param(encoder, 1, Input::with_offset(&rhs.0, rhs.1));
        if p.accumulate {
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
            MTLSize { width: 32, height: tiles.warps.1, depth: tiles.warps.0 },
        );
        Ok(())
    }

    /// Copies f32 matrices with rows of `stride` elements.
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
    fn multiply_f32(&self, p: &DeviceProduct) -> Result<()> {
        let tiles = self.tiles(p);
        let bytes = |elements: usize| elements * DType::F32.size_in_bytes();
        let (out, offset) = self.buffer(p.out);
        let whole_tiles = (p.m.next_multiple_of(tiles.rows) - 1) * p.out_stride + p.n;
        if !p.accumulate || offset + bytes(whole_tiles) <= out.length() {
            return self.multiply_tiles(p, &tiles, p.out);
        }
        // The buffer ends within the last tile: the rows of this tile are added from a copy in a larger buffer.
        let before = p.m - p.m % tiles.rows;
        let before_in_lhs = if p.lhs.transposed { before } else { before * p.lhs.stride };
        let last = DeviceProduct {
            m: p.m - before,
            lhs: DeviceMatrix { address: p.lhs.address + bytes(before_in_lhs) as u64, ..p.lhs },
            out: p.out + bytes(before * p.out_stride) as u64,
            ..*p
        };
        let copy = self.scratch.last_rows(self, tiles.rows * p.out_stride)?;
        self.copy(last.out, copy, last.m, last.n, last.out_stride)?;
        if before > 0 {
            self.multiply_tiles(&DeviceProduct { m: before, ..*p }, &tiles, p.out)?;
        }
        self.multiply_tiles(&last, &tiles, copy)
    }

    fn scratch(&self) -> &ProductBuffers {
        &self.scratch
    }

    fn fresh(&self, elements: usize) -> Result<Tensor> {
        Ok(Tensor::zeros(elements, DType::F32, &Device::Metal(self.device.clone()))?)
    }
}
