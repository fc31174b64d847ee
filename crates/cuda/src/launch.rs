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
    graph::between_captures,
    library::{Call, Library},
    upload::Uploads,
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
    /// Weights on their way.
    pub(crate) uploads: Uploads,
    /// Work since somebody asked for notes, and what [`Device::asked`] said then.
    notes: Mutex<Option<(u64, Vec<Work>)>>,
}

/// A kernel, ready to be launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kernel {
    function: sys::CUfunction,
    /// Its file.
    pub file: &'static str,
    /// Its name there.
    pub entry: &'static str,
}

// SAFETY: functions may be used from any thread; their modules are never unloaded while the context lives.
unsafe impl Send for Kernel {}

/// Size of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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

/// Arguments of a launch, in the kernel's order. Bytes that belong to none are zero.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Arguments {
    bytes: [u64; 64],
    places: [u8; 32],
    used: usize,
    count: usize,
}

/// All that there is to a launch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launch {
    /// The kernel.
    pub kernel: Kernel,
    /// Its size.
    pub grid: Grid,
    /// Blocks of a cluster.
    pub cluster: usize,
    /// Whether it may be set up while the launch in front of it runs.
    pub early: bool,
    /// What it is given.
    pub arguments: Arguments,
}

/// What the stages give to the stream.
#[expect(clippy::large_enum_variant, reason = "nearly all of a step's work are launches")]
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Work {
    /// A kernel's launch.
    Launch(Launch),
    /// A product of the library.
    Product(Call),
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
        self.places[self.count] = self.used as u8;
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
        Self {
            uploads: Uploads::new(device.clone()),
            device,
            compiler,
            loaded: Mutex::new(HashMap::new()),
            launches: AtomicUsize::new(0),
            notes: Mutex::new(None),
        }
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
        let _turn = between_captures();
        // SAFETY: the code is a whole image; the module stays loaded with the context.
        unsafe {
            check("cuModuleLoadData", sys::cuModuleLoadData(&raw mut module, compiled.code.as_ptr().cast()))?;
            check("cuModuleGetFunction", sys::cuModuleGetFunction(&raw mut function, module, name.as_ptr()))?;
        }
        let kernel = Kernel { function, file: file.name, entry };
        loaded.insert(key, kernel);
        Ok(kernel)
    }

    /// Launches a kernel behind everything that the stream has been given. A grid without blocks launches nothing.
    ///
    /// # Errors
    /// What the driver says about this or an earlier launch.
    pub fn launch(&self, kernel: Kernel, grid: Grid, arguments: Arguments) -> Result<()> {
        self.take(Launch { kernel, grid, cluster: 1, early: false, arguments })
    }

    /// As [`Kernels::launch`], for kernels that wait for the launch in front of them by themselves (`after_previous`).
    ///
    /// # Errors
    /// As [`Kernels::launch`].
    pub fn launch_early(&self, kernel: Kernel, grid: Grid, arguments: Arguments) -> Result<()> {
        self.launch_clusters(kernel, grid, 1, arguments)
    }

    /// As [`Kernels::launch_early`], in clusters of `cluster` blocks along the first axis.
    ///
    /// # Errors
    /// As [`Kernels::launch`].
    pub fn launch_clusters(&self, kernel: Kernel, grid: Grid, cluster: usize, arguments: Arguments) -> Result<()> {
        let early = self.device.properties().capability.0 >= 9;
        self.take(Launch { kernel, grid, cluster, early, arguments })
    }

    /// As [`Kernels::launch_clusters`], set up when the launch in front has ended: large clusters that are set up among its last
    /// blocks may not all find a place, and those left over run when the others are done.
    ///
    /// # Errors
    /// As [`Kernels::launch`].
    pub fn launch_whole(&self, kernel: Kernel, grid: Grid, cluster: usize, arguments: Arguments) -> Result<()> {
        self.take(Launch { kernel, grid, cluster, early: false, arguments })
    }

    /// Clusters of `cluster` blocks like the grid's that the device holds at a time.
    ///
    /// # Errors
    /// What the driver says.
    pub fn resident_clusters(&self, kernel: Kernel, grid: Grid, cluster: usize) -> Result<usize> {
        self.device.bind()?;
        let mut attributes = Attributes::new(cluster, false);
        let mut count = 0;
        // SAFETY: the configuration and its attributes outlive the call; the pointer is to a live local.
        unsafe {
            allow(kernel, grid, cluster)?;
            let config = attributes.config(grid, std::ptr::null_mut());
            let call = sys::cuOccupancyMaxActiveClusters(&raw mut count, kernel.function, &raw const config);
            check("cuOccupancyMaxActiveClusters", call)?;
        }
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// From now on work is noted beside being given to the device.
    pub(crate) fn note(&self) {
        *self.notes.lock().unwrap_or_else(PoisonError::into_inner) = Some((self.device.asked(), Vec::new()));
    }

    /// Ends that: the work since; none where [`Self::note`] was not called or the stream may have been given anything else.
    pub(crate) fn stop_noting(&self) -> Option<Vec<Work>> {
        let notes = self.notes.lock().unwrap_or_else(PoisonError::into_inner).take();
        notes.filter(|(asked, _)| *asked == self.device.asked()).map(|(_, work)| work)
    }

    /// Gives work to the device again.
    pub(crate) fn repeat(&self, work: &[Work], library: &mut Option<Library>) -> Result<()> {
        work.iter().try_for_each(|work| match (work, library.as_mut()) {
            (Work::Launch(launch), _) => self.enqueue(launch),
            (Work::Product(call), Some(library)) => library.multiply(&self.device, call).map(|_| ()),
            (Work::Product(_), None) => {
                Err(CudaError::Library { what: "products of a library that is gone".to_owned() })
            }
        })
    }

    /// Counts and notes a product that the library was given.
    pub(crate) fn took_product(&self, call: Call) {
        self.launches.fetch_add(1, Ordering::Relaxed);
        self.add_note(Work::Product(call));
    }

    fn add_note(&self, work: Work) {
        if let Some((_, notes)) = &mut *self.notes.lock().unwrap_or_else(PoisonError::into_inner) {
            notes.push(work);
        }
    }

    fn take(&self, launch: Launch) -> Result<()> {
        if launch.grid.blocks.contains(&0) {
            return Ok(());
        }
        self.settle()?;
        self.enqueue(&launch)?;
        self.add_note(Work::Launch(launch));
        Ok(())
    }

    /// Makes the stream wait for weights that are on their way.
    pub(crate) fn settle(&self) -> Result<()> {
        self.uploads.settle()
    }

    fn enqueue(&self, launch: &Launch) -> Result<()> {
        self.launches.fetch_add(1, Ordering::Relaxed);
        enqueue(&self.device, self.device.stream_for_launches(), launch)
    }

    /// Launches so far, products of the library included.
    pub fn launches(&self) -> usize {
        self.launches.load(Ordering::Relaxed)
    }
}

/// Launches behind everything that a stream of the device has been given.
///
/// # Errors
/// What the driver says about this or an earlier launch.
pub(crate) fn enqueue(device: &Device, stream: sys::CUstream, launch: &Launch) -> Result<()> {
    device.bind()?;
    let (grid, cluster, mut arguments) = (launch.grid, launch.cluster, launch.arguments.clone());
    let mut pointers = [std::ptr::null_mut::<c_void>(); 32];
    for (pointer, &place) in pointers.iter_mut().zip(&arguments.places[..arguments.count]) {
        *pointer = (&raw mut arguments.bytes[usize::from(place)]).cast();
    }
    let mut attributes = Attributes::new(cluster, launch.early);
    let config = attributes.config(grid, stream);
    // SAFETY: the launchers beside the kernels pass what each kernel declares, with sizes checked against the memory.
    unsafe {
        allow(launch.kernel, grid, cluster)?;
        let function = launch.kernel.function;
        check(
            "cuLaunchKernelEx",
            sys::cuLaunchKernelEx(&raw const config, function, pointers.as_mut_ptr(), std::ptr::null_mut()),
        )
    }
}

/// Attributes of a launch.
struct Attributes {
    list: [sys::CUlaunchAttribute; 2],
    count: u32,
}

impl Attributes {
    fn new(cluster: usize, early: bool) -> Self {
        use sys::CUlaunchAttributeID as Id;
        // SAFETY: the union of plain numbers has no invalid bits.
        let blank: sys::CUlaunchAttributeValue = unsafe { std::mem::zeroed() };
        let none = sys::CUlaunchAttribute { id: Id::CU_LAUNCH_ATTRIBUTE_IGNORE, pad: [0; 4], value: blank };
        let mut attributes = Self { list: [none; 2], count: 0 };
        if early {
            let mut value = blank;
            value.programmaticStreamSerializationAllowed = 1;
            attributes.add(Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, value);
        }
        if cluster > 1 {
            let mut value = blank;
            value.clusterDim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: cluster as u32, y: 1, z: 1 };
            attributes.add(Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value);
        }
        attributes
    }

    fn add(&mut self, id: sys::CUlaunchAttributeID, value: sys::CUlaunchAttributeValue) {
        self.list[self.count as usize] = sys::CUlaunchAttribute { id, pad: [0; 4], value };
        self.count += 1;
    }

    /// The configuration; it points into `self`.
    fn config(&mut self, grid: Grid, stream: sys::CUstream) -> sys::CUlaunchConfig {
        let [x, y, z] = grid.blocks.map(|b| b as u32);
        sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: grid.threads as u32,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: grid.shared as u32,
            hStream: stream,
            attrs: self.list.as_mut_ptr(),
            numAttrs: self.count,
        }
    }
}

/// Allows a kernel the shared memory and the clusters that a launch asks for.
///
/// # Safety
/// The context of the kernel is current.
unsafe fn allow(kernel: Kernel, grid: Grid, cluster: usize) -> Result<()> {
    use sys::CUfunction_attribute_enum as What;
    let set = |what, value| {
        // SAFETY: the kernel is loaded, its context current.
        unsafe { check("cuFuncSetAttribute", sys::cuFuncSetAttribute(kernel.function, what, value)) }
    };
    if grid.shared > 48 << 10 {
        set(What::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, grid.shared as i32)?;
    }
    // Clusters of up to eight blocks fit every device that has clusters.
    if cluster > 8 {
        set(What::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)?;
    }
    Ok(())
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
