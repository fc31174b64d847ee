//! Loaded kernels and launching them.
//!
//! A kernel is named by its file, its constants and its entry; it is compiled when it is first asked for and kept. A model's
//! kernels can be compiled ahead, all at once, by [`Kernels::prepare`].

#![allow(unsafe_code, reason = "the driver's interface is C")]

use std::{
    collections::HashMap,
    ffi::{CString, c_void},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use bytemuck::Pod;
use cudarc::driver::sys;

use crate::{
    compile::{Compiled, Compiler, Unit},
    device::{Device, check},
    error::{CudaError, Result},
};

/// Constants of a file at most.
const MAX_CONSTANTS: usize = 8;

/// A source file: name, text, names of its constants.
#[derive(Debug)]
pub struct File {
    /// Name of the file.
    pub name: &'static str,
    /// Its text.
    pub text: &'static str,
    /// Names of its compile-time constants; a value below zero leaves a constant at the file's default.
    pub constants: &'static [&'static str],
}

impl File {
    /// The file with values for its constants.
    pub fn unit(&self, values: &[i64]) -> Unit {
        let given = self.constants.iter().copied().zip(values.iter().copied());
        Unit { file: self.name, text: self.text, constants: given.filter(|&(_, v)| v >= 0).collect() }
    }
}

/// File, values of its constants, entry.
type Key = (&'static str, [i64; MAX_CONSTANTS], &'static str);

/// The kernels of a device.
#[derive(Debug)]
pub struct Kernels {
    device: Device,
    compiler: Compiler,
    loaded: Mutex<HashMap<Key, Kernel>>,
    launches: AtomicUsize,
}

/// A kernel, ready to be launched.
#[derive(Debug, Clone, Copy)]
pub struct Kernel {
    function: sys::CUfunction,
}

// SAFETY: functions may be used from any thread; their modules are never unloaded while the context lives.
unsafe impl Send for Kernel {}

/// Size of a launch.
#[derive(Debug, Clone, Copy)]
pub struct Grid {
    /// Blocks.
    pub blocks: [usize; 3],
    /// Threads a block.
    pub threads: usize,
    /// Bytes of dynamic shared memory a block.
    pub shared: usize,
}

impl Grid {
    /// Blocks and threads without dynamic shared memory.
    pub fn new(blocks: [usize; 3], threads: usize) -> Self {
        Self { blocks, threads, shared: 0 }
    }
}

/// Arguments of a launch, in the kernel's order.
#[derive(Debug)]
pub struct Arguments {
    bytes: [u64; 64],
    places: [usize; 32],
    used: usize,
    count: usize,
}

impl Arguments {
    /// No arguments.
    pub fn new() -> Self {
        Self { bytes: [0; 64], places: [0; 32], used: 0, count: 0 }
    }

    /// Adds a value or a structure.
    #[must_use]
    pub fn with<T: Pod>(mut self, value: T) -> Self {
        let words = size_of::<T>().div_ceil(8);
        bytemuck::cast_slice_mut::<u64, u8>(&mut self.bytes[self.used..self.used + words])[..size_of::<T>()]
            .copy_from_slice(bytemuck::bytes_of(&value));
        self.places[self.count] = self.used;
        self.used += words;
        self.count += 1;
        self
    }

    /// Adds a number as the kernels' `int`.
    #[must_use]
    pub fn int(self, value: usize) -> Self {
        self.with(value as i32)
    }
}

impl Default for Arguments {
    fn default() -> Self {
        Self::new()
    }
}

impl Kernels {
    /// No kernels yet.
    pub fn new(device: Device, compiler: Compiler) -> Self {
        Self { device, compiler, loaded: Mutex::new(HashMap::new()), launches: AtomicUsize::new(0) }
    }

    /// Compiles units in parallel, so that loading them later only reads the cache or memory.
    ///
    /// # Errors
    /// The first failure.
    pub fn prepare(&self, units: &[Unit]) -> Result<Vec<Compiled>> {
        let architecture = self.device.properties().architecture();
        compile_all(&self.compiler, units, &architecture)
    }

    /// The kernel `entry` of a file with these constants.
    ///
    /// # Errors
    /// [`CudaError::Compile`], or what the driver says.
    pub fn get(&self, file: &'static File, values: &[i64], entry: &'static str) -> Result<Kernel> {
        let mut key = [-1; MAX_CONSTANTS];
        key[..values.len()].copy_from_slice(values);
        let key = (file.name, key, entry);
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = loaded.get(&key) {
            return Ok(*kernel);
        }
        let compiled = self.compiler.compile(&file.unit(values), &self.device.properties().architecture())?;
        self.device.bind()?;
        let name = CString::new(entry).map_err(|_| CudaError::Library { what: format!("entry {entry:?}") })?;
        let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the code is a whole image; the module stays loaded with the context.
        unsafe {
            check("cuModuleLoadData", sys::cuModuleLoadData(&raw mut module, compiled.code.as_ptr().cast()))?;
            check("cuModuleGetFunction", sys::cuModuleGetFunction(&raw mut function, module, name.as_ptr()))?;
        }
        let kernel = Kernel { function };
        loaded.insert(key, kernel);
        Ok(kernel)
    }

    /// Launches a kernel behind everything that the stream has been given. A grid without blocks launches nothing.
    ///
    /// # Errors
    /// What the driver says about this or an earlier launch.
    pub fn launch(&self, kernel: Kernel, grid: Grid, arguments: Arguments) -> Result<()> {
        self.enqueue(kernel, grid, arguments, false)
    }

    /// As [`Kernels::launch`], for kernels that wait for the launch in front of them by themselves (`after_previous`): they
    /// may be set up while it still runs.
    ///
    /// # Errors
    /// As [`Kernels::launch`].
    pub fn launch_early(&self, kernel: Kernel, grid: Grid, arguments: Arguments) -> Result<()> {
        self.enqueue(kernel, grid, arguments, self.device.properties().capability.0 >= 9)
    }

    fn enqueue(&self, kernel: Kernel, grid: Grid, mut arguments: Arguments, early: bool) -> Result<()> {
        if grid.blocks.contains(&0) {
            return Ok(());
        }
        self.device.bind()?;
        self.launches.fetch_add(1, Ordering::Relaxed);
        let mut pointers = [std::ptr::null_mut::<c_void>(); 32];
        for (pointer, &place) in pointers.iter_mut().zip(&arguments.places[..arguments.count]) {
            *pointer = (&raw mut arguments.bytes[place]).cast();
        }
        let [x, y, z] = grid.blocks.map(|b| b as u32);
        // SAFETY: the launchers beside the kernels pass what each kernel declares, with sizes checked against the memory.
        unsafe {
            if grid.shared > 48 << 10 {
                let what = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                check("cuFuncSetAttribute", sys::cuFuncSetAttribute(kernel.function, what, grid.shared as i32))?;
            }
            let mut value: sys::CUlaunchAttributeValue = std::mem::zeroed();
            value.programmaticStreamSerializationAllowed = i32::from(early);
            let mut attribute = sys::CUlaunchAttribute {
                id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                pad: [0; 4],
                value,
            };
            let config = sys::CUlaunchConfig {
                gridDimX: x,
                gridDimY: y,
                gridDimZ: z,
                blockDimX: grid.threads as u32,
                blockDimY: 1,
                blockDimZ: 1,
                sharedMemBytes: grid.shared as u32,
                hStream: self.device.stream(),
                attrs: &raw mut attribute,
                numAttrs: u32::from(early),
            };
            let function = kernel.function;
            check(
                "cuLaunchKernelEx",
                sys::cuLaunchKernelEx(&raw const config, function, pointers.as_mut_ptr(), std::ptr::null_mut()),
            )
        }
    }

    /// Launches so far.
    pub fn launches(&self) -> usize {
        self.launches.load(Ordering::Relaxed)
    }
}

/// Compiles units on all cores, results in their order.
///
/// # Errors
/// The first failure.
pub fn compile_all(compiler: &Compiler, units: &[Unit], architecture: &str) -> Result<Vec<Compiled>> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(units.len().max(1));
    let next = AtomicUsize::new(0);
    let results: Vec<Mutex<Option<Result<Compiled>>>> = units.iter().map(|_| Mutex::new(None)).collect();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(i) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|&i| i < units.len()) {
                    *results[i].lock().unwrap_or_else(PoisonError::into_inner) =
                        Some(compiler.compile(&units[i], architecture));
                }
            });
        }
    });
    let mut compiled = Vec::with_capacity(units.len());
    for (unit, result) in units.iter().zip(results) {
        match result.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(result) => compiled.push(result?),
            None => return Err(CudaError::Compile { kernel: unit.describe(), log: "was not compiled".to_owned() }),
        }
    }
    Ok(compiled)
}
