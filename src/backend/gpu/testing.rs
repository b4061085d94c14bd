//! The GPU backends on an emulated GPU: the kernels of each language are compiled for the host (`tests/gpu_host`), and
//! products are plain loops. These tests say nothing about a GPU's matrix library, compiler, exp, log and speed.

use std::cell::RefCell;
use std::ffi::{c_char, c_int, c_uint, c_void, CString};
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, OnceLock};

use candle_core::{CpuStorage, DType, Device, Storage, Tensor};
use half::{bf16, f16};

use super::arguments::Argument;
use super::device::{DeviceMatrix, DeviceProduct, Gpu, GpuKind};
use super::kernels::HEADERS;
use crate::backend::metal::arguments::{bindings, Binding};
use crate::backend::metal::f32_products::{self, F32Products, ProductBuffers};
use crate::backend::needs::CXX;
use crate::backend::{cuda, metal};
use crate::error::Result;

/// Launches a kernel by its name, with a number of blocks, a pointer for each argument and the sizes of the arguments.
type Launch = unsafe extern "C" fn(*const c_char, c_uint, *mut *mut c_void, *const usize, usize) -> c_int;

/// The functions of a library of kernels.
struct Library {
    launch: Mutex<Launch>,
    /// Gives up what the library holds; it launches no kernel afterwards.
    release: unsafe extern "C" fn(),
}

/// The languages of the kernels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Language {
    Cuda,
    Metal,
}

pub(super) const LANGUAGES: [Language; 2] = [Language::Cuda, Language::Metal];

impl Language {
    /// The name and the text of the file that includes the headers of the kernels.
    fn source(self) -> (&'static str, &'static str) {
        match self {
            Language::Cuda => ("mixture.cu", include_str!("../cuda/mixture.cu")),
            Language::Metal => ("mixture.metal", include_str!("../metal/mixture.metal")),
        }
    }

    /// The names and texts of the source and of the headers.
    fn files(self) -> impl Iterator<Item = (&'static str, &'static str)> {
        let own: &[_] = match self {
            Language::Cuda => &[
                ("tensor_cores.h", include_str!("../cuda/tensor_cores.h")),
                ("exponentials.h", include_str!("../cuda/exponentials.h")),
            ],
            Language::Metal => &[],
        };
        std::iter::once(self.source()).chain(HEADERS).chain(own.iter().copied())
    }

    /// The properties of the GPUs that have this language.
    pub(super) fn kind(self) -> &'static GpuKind {
        match self {
            Language::Cuda => &cuda::kind::KIND,
            Language::Metal => &metal::kind::KIND,
        }
    }
}

/// A GPU emulated on the host. Its kernels see a copy of each tensor between two guard pages, so that the first access
/// outside a tensor ends the process.
pub(super) struct EmulatedGpu {
    pub(super) language: Language,
    library: &'static Library,
    is_mutant: bool,
    scratch: ProductBuffers,
    /// The tensors, kept alive, and their copies.
    copies: RefCell<Vec<(Tensor, Guarded)>>,
}

impl EmulatedGpu {
    /// An emulated GPU with the kernels in a language; `None`, which a line or a failure says, without a C++ compiler.
    pub(super) fn new(language: Language) -> Option<Self> {
        static LIBRARIES: [OnceLock<std::result::Result<Library, String>>; 2] = [const { OnceLock::new() }; 2];
        let library = LIBRARIES[language as usize].get_or_init(|| compile(language, None)).as_ref();
        let library = library.inspect_err(|reason| CXX.is_missing(reason)).ok()?;
        Some(Self::with_kernels(language, library, false))
    }

    /// An emulated GPU for each language; none, as [`EmulatedGpu::new`] says, without a C++ compiler.
    pub(super) fn all() -> impl Iterator<Item = Self> {
        LANGUAGES.into_iter().filter_map(Self::new)
    }

    /// An emulated GPU with these kernels.
    fn with_kernels(language: Language, library: &'static Library, is_mutant: bool) -> Self {
        let (scratch, copies) = (ProductBuffers::default(), RefCell::default());
        EmulatedGpu { language, library, is_mutant, scratch, copies }
    }

    /// Copies what the kernels wrote back to the tensors.
    fn write_back(&self) {
        self.copies.borrow().iter().for_each(|(_, copy)| copy.write_back());
    }

    /// An emulated GPU whose kernels have one text replaced by another.
    pub(super) fn mutant(language: Language, text: &str, replacement: &str) -> Option<Self> {
        let library = compile(language, Some((text, replacement))).inspect_err(|reason| CXX.is_missing(reason)).ok()?;
        Some(Self::with_kernels(language, Box::leak(Box::new(library)), true))
    }
}

impl Drop for EmulatedGpu {
    fn drop(&mut self) {
        if self.is_mutant {
            // SAFETY: only this device has the library, and it launches no kernel any more.
            unsafe { (self.library.release)() }
        }
    }
}

/// A copy of a tensor's bytes that ends at a page boundary, between two guard pages.
struct Guarded {
    original: *mut u8,
    pages: *mut u8,
    bytes: usize,
}

const PAGE: usize = 4096;

impl Guarded {
    /// Copies `bytes` bytes.
    ///
    /// # Safety
    ///
    /// `original` must be valid for reads and writes of `bytes` bytes as long as the copy lives.
    unsafe fn new(original: *mut u8, bytes: usize) -> Self {
        let readable = bytes.next_multiple_of(PAGE);
        let (null, anonymous) = (std::ptr::null_mut(), libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: the pages are fresh, and the accessible ones among them hold `bytes` bytes.
        unsafe {
            let pages: *mut u8 = libc::mmap(null, readable + 2 * PAGE, libc::PROT_NONE, anonymous, -1, 0).cast();
            assert!(pages.cast() != libc::MAP_FAILED, "out of memory");
            assert_eq!(libc::mprotect(pages.add(PAGE).cast(), readable, libc::PROT_READ | libc::PROT_WRITE), 0);
            let guarded = Guarded { original, pages, bytes };
            std::ptr::copy_nonoverlapping(original, guarded.first(), bytes);
            guarded
        }
    }

    /// The first byte of the copy.
    fn first(&self) -> *mut u8 {
        // SAFETY: the offset is within the pages.
        unsafe { self.pages.add(PAGE + self.bytes.next_multiple_of(PAGE) - self.bytes) }
    }

    /// The end of the original.
    fn end(&self) -> *mut u8 {
        self.original.wrapping_add(self.bytes)
    }

    /// Copies the bytes back to the original.
    fn write_back(&self) {
        // SAFETY: as in `new`; nothing else reads or writes the tensor during a launch.
        unsafe { std::ptr::copy_nonoverlapping(self.first(), self.original, self.bytes) }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: `new` mapped these pages.
        unsafe { libc::munmap(self.pages.cast(), self.bytes.next_multiple_of(PAGE) + 2 * PAGE) };
    }
}

/// Compiles the kernels, with one text replaced by another if there is a `change`, and loads them. The error says why
/// the C++ compiler cannot be started.
fn compile(language: Language, change: Option<(&str, &str)>) -> std::result::Result<Library, String> {
    static COUNT: Mutex<usize> = Mutex::new(0);
    let number = {
        let mut count = COUNT.lock().unwrap();
        *count += 1;
        *count
    };
    let emulator = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gpu_host");
    let folder = std::env::temp_dir().join(format!("mos-head-{language:?}-{}-{number}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    if let Some((from, _)) = change {
        let count: usize = language.files().map(|(_, text)| text.matches(from).count()).sum();
        assert_eq!(count, 1, "{from} must occur exactly once");
    }
    for (name, text) in language.files() {
        let text = text.replace("../gpu/kernels/", "");
        let text = change.map_or(text.clone(), |(from, to)| text.replace(from, to));
        std::fs::write(folder.join(name), text).unwrap();
    }
    let library = folder.join("libmixture.so");
    let runner = match language {
        Language::Cuda => "cuda.cpp",
        Language::Metal => "metal.cpp",
    };
    let compiler = std::env::var("CXX").unwrap_or("c++".into());
    let status = Command::new(&compiler)
        .args(["-std=c++17", "-O1", "-Wall", "-Werror", "-Wno-attributes", "-shared", "-fPIC"])
        // The emulated driver has functions of the same names; a program that is linked to it would call these.
        .arg("-Wl,-Bsymbolic")
        // A change may leave variables unused.
        .args(change.map(|_| "-w"))
        .args([&folder, &emulator, &emulator.join("cuda")].into_iter().flat_map(|folder| [Path::new("-I"), folder]))
        .arg(emulator.join(runner))
        .arg("-o")
        .arg(&library)
        .status();
    match status {
        Ok(status) => assert!(status.success(), "the kernels do not compile for the host"),
        Err(error) => {
            std::fs::remove_dir_all(&folder).unwrap();
            return Err(format!("{compiler}: {error}"));
        }
    }
    let path = CString::new(library.to_str().unwrap()).unwrap();
    // SAFETY: the library was compiled above and is never unloaded; its functions have these types.
    let library = unsafe {
        let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
        if library.is_null() {
            panic!("the kernels cannot be loaded: {:?}", std::ffi::CStr::from_ptr(libc::dlerror()));
        }
        let [launch, release] = [c"launch", c"release"].map(|name| libc::dlsym(library, name.as_ptr()));
        assert!(!launch.is_null() && !release.is_null(), "no function `launch` or `release`");
        Library {
            launch: Mutex::new(std::mem::transmute::<*mut c_void, Launch>(launch)),
            release: std::mem::transmute::<*mut c_void, unsafe extern "C" fn()>(release),
        }
    };
    std::fs::remove_dir_all(&folder).unwrap();
    Ok(library)
}

impl Gpu for EmulatedGpu {
    fn kind(&self) -> &'static GpuKind {
        self.language.kind()
    }

    fn address(&self, tensor: &Tensor) -> Result<u64> {
        let (storage, layout) = tensor.storage_and_layout();
        assert!(layout.is_contiguous());
        let Storage::Cpu(storage) = &*storage else { panic!("not on the CPU") };
        let first = match storage {
            CpuStorage::F32(values) => values.as_ptr() as *mut u8,
            CpuStorage::F16(values) => values.as_ptr() as *mut u8,
            CpuStorage::BF16(values) => values.as_ptr() as *mut u8,
            CpuStorage::U32(values) => values.as_ptr() as *mut u8,
            CpuStorage::I64(values) => values.as_ptr() as *mut u8,
            _ => panic!("no kernel takes {:?}", tensor.dtype()),
        };
        let bytes = tensor.elem_count() * tensor.dtype().size_in_bytes();
        let original = first.wrapping_add(layout.start_offset() * tensor.dtype().size_in_bytes());
        let known = |(_, copy): &&(Tensor, Guarded)| copy.original == original && copy.bytes == bytes;
        if let Some((_, copy)) = self.copies.borrow().iter().find(known) {
            return Ok(copy.first() as u64);
        }
        // SAFETY: the tensor has that many bytes and is kept alive with the copy.
        let copy = unsafe { Guarded::new(original, bytes) };
        let address = copy.first() as u64;
        let mut copies = self.copies.borrow_mut();
        let overlaps = |other: &Guarded| copy.original < other.end() && other.original < copy.end();
        assert!(!copies.iter().any(|(_, other)| overlaps(other)), "two buffers overlap");
        copies.push((tensor.clone(), copy));
        Ok(address)
    }

    fn launch(&self, kernel: &str, blocks: usize, arguments: &[Argument]) -> Result<()> {
        let mut arguments = arguments.to_vec();
        let mut bindings = bindings(&arguments);
        let (mut pointers, sizes): (Vec<_>, Vec<_>) = arguments.iter_mut().map(value_of).unzip();
        if self.language == Language::Metal {
            pointers = bindings.iter_mut().map(bound_pointer).collect();
        }
        let name = CString::new(kernel).unwrap();
        let launch = self.library.launch.lock().unwrap();
        // SAFETY: each pointer points to an argument of the type that the kernel has there, and the addresses among the
        // arguments belong to copies that live as long as `self`.
        let status =
            unsafe { launch(name.as_ptr(), blocks as c_uint, pointers.as_mut_ptr(), sizes.as_ptr(), sizes.len()) };
        assert_eq!(status, 0, "no kernel {kernel}");
        self.write_back();
        Ok(())
    }

    fn multiply(&self, product: &DeviceProduct) -> Result<()> {
        match self.language {
            Language::Cuda => self.multiply_on_host(product),
            Language::Metal => f32_products::multiply(self, product),
        }
    }
}

/// The pointer to an argument's value that a CUDA launch takes, and the bytes of the value.
fn value_of(argument: &mut Argument) -> (*mut c_void, usize) {
    fn pointer<T>(value: &mut T) -> (*mut c_void, usize) {
        ((value as *mut T).cast(), size_of::<T>())
    }
    match argument {
        Argument::Logits(x) => pointer(x),
        Argument::Objective(x) => pointer(x),
        Argument::Rows(x) => pointer(x),
        Argument::Scored(x) => pointer(x),
        Argument::Read(x) | Argument::Write(x) => pointer(x),
        Argument::Int(x) => pointer(x),
        Argument::Long(x) => pointer(x),
        Argument::Float(x) => pointer(x),
    }
}

/// The pointer that a Metal launch binds; an absent buffer has an unmapped address.
fn bound_pointer(binding: &mut Binding) -> *mut c_void {
    match binding {
        Binding::Read(address) | Binding::Write(address) => *address as *mut c_void,
        Binding::Absent => 8 as *mut c_void,
        Binding::Bytes(bytes) => bytes.as_mut_ptr().cast(),
    }
}

impl F32Products for EmulatedGpu {
    fn multiply_f32(&self, product: &DeviceProduct) -> Result<()> {
        assert_eq!((product.lhs.dtype, product.rhs.dtype, product.alpha), (DType::F32, DType::F32, None));
        self.multiply_on_host(product)
    }

    /// So few that small matrices have several tiles.
    fn most_tile_elements(&self) -> usize {
        40
    }

    fn most_summands(&self) -> usize {
        16
    }

    fn scratch(&self) -> &ProductBuffers {
        &self.scratch
    }

    fn fresh(&self, elements: usize) -> Result<Tensor> {
        Ok(Tensor::full(f32::NAN, elements, &Device::Cpu)?)
    }
}

impl EmulatedGpu {
    /// Computes a product by plain loops.
    fn multiply_on_host(&self, p: &DeviceProduct) -> Result<()> {
        assert_eq!(p.lhs.dtype, p.rhs.dtype);
        assert!(p.k > 0, "sums without terms: {p:?}");
        let alpha = p.alpha.map_or(1.0, |alpha| read(alpha, 0, DType::F32));
        let at = |matrix: &DeviceMatrix, row: usize, column: usize| {
            let (row, column) = if matrix.is_transposed { (column, row) } else { (row, column) };
            read(matrix.address, row * matrix.stride + column, matrix.dtype)
        };
        for i in 0..p.m {
            for j in 0..p.n {
                let sum: f32 = (0..p.k).map(|l| at(&p.lhs, i, l) * at(&p.rhs, l, j)).sum();
                let index = i * p.out_stride + j;
                let before = if p.accumulates { read(p.out, index, p.out_dtype) } else { 0.0 };
                let result = alpha * sum + before;
                // SAFETY: the product's matrices are in tensors of the chunks.
                unsafe {
                    match p.out_dtype {
                        DType::BF16 => *(p.out as *mut bf16).add(index) = bf16::from_f32(result),
                        _ => *(p.out as *mut f32).add(index) = result,
                    }
                }
            }
        }
        self.write_back();
        Ok(())
    }
}

/// Reads an element of a tensor of this dtype.
fn read(address: u64, index: usize, dtype: DType) -> f32 {
    // SAFETY: the address and index name an element of a tensor of this dtype.
    unsafe {
        match dtype {
            DType::F32 => *(address as *const f32).add(index),
            DType::F16 => (*(address as *const f16).add(index)).to_f32(),
            _ => (*(address as *const bf16).add(index)).to_f32(),
        }
    }
}

mod case;
mod log_prob_terms;
mod mutants;
mod parameters;
mod scores;
mod skips;
mod tests;
