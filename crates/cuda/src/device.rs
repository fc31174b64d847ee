//! A device: driver, context, one stream. Everything this backend does on a device happens in the order of that stream.
//!
//! The driver library is loaded at run time. Calling into it without knowing that it is there would panic, so
//! [`Device::open`] asks first, and the whole opening is guarded: a machine without a device gives a typed error.

#![allow(unsafe_code, reason = "the driver's interface is C")]

use std::{
    cell::Cell,
    ffi::CStr,
    panic::catch_unwind,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use cudarc::driver::sys;

use crate::{
    error::{CudaError, Result},
    graph::between_captures,
};

/// Oldest compute capability that the kernels run on.
const OLDEST: i32 = 8;

/// Oldest interface of a driver that runs what the compiler of CUDA 13.0 makes.
const OLDEST_DRIVER: i32 = 13_000;

/// A device with a context and a stream; clones share it.
#[derive(Debug, Clone)]
pub struct Device {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    /// How often somebody asked for the stream who is not seen by the notes of launches.
    asked: AtomicU64,
    properties: Properties,
}

// SAFETY: contexts and streams may be used from any thread; a thread makes the context current before each use.
unsafe impl Send for Inner {}
// SAFETY: as above; the driver synchronises calls itself.
unsafe impl Sync for Inner {}

/// What is known about a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Properties {
    /// Its number.
    pub ordinal: usize,
    /// Its name.
    pub name: String,
    /// Compute capability.
    pub capability: (i32, i32),
    /// Multiprocessors.
    pub multiprocessors: usize,
    /// Bytes of memory.
    pub memory: usize,
    /// Version of the driver's interface, such as 13000.
    pub driver: i32,
}

impl Properties {
    /// Target of the kernel compiler, such as `sm_90a`.
    pub fn architecture(&self) -> String {
        let (major, minor) = self.capability;
        let specific = if major >= 9 { "a" } else { "" };
        format!("sm_{major}{minor}{specific}")
    }
}

thread_local! {
    /// The context that this thread made current last.
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

/// Version of the driver's interface (such as 13000) and the number of devices that it sees.
///
/// # Errors
/// [`CudaError::NoDriver`], or what the driver says.
pub fn visible() -> Result<(i32, usize)> {
    guarded(|| {
        let (mut found, mut driver) = (0, 0);
        // SAFETY: the driver is present; all pointers are to live locals.
        unsafe {
            check("cuInit", sys::cuInit(0))?;
            check("cuDriverGetVersion", sys::cuDriverGetVersion(&raw mut driver))?;
            check("cuDeviceGetCount", sys::cuDeviceGetCount(&raw mut found))?;
        }
        Ok((driver, usize::try_from(found).unwrap_or(0)))
    })
}

/// Calls the driver if it is there. A library that does not fit makes the bindings panic, which is an error here.
fn guarded<T>(call: impl FnOnce() -> Result<T> + std::panic::UnwindSafe) -> Result<T> {
    // SAFETY: asks the loader for the library and calls nothing in it.
    if !catch_unwind(|| unsafe { sys::is_culib_present() }).unwrap_or(false) {
        return Err(CudaError::NoDriver);
    }
    match catch_unwind(call) {
        Ok(result) => result,
        Err(panic) => Err(CudaError::Library { what: panic_text(&*panic) }),
    }
}

impl Device {
    /// Opens device `ordinal`.
    ///
    /// # Errors
    /// [`CudaError::NoDriver`], [`CudaError::OldDriver`], [`CudaError::NoDevice`], [`CudaError::Architecture`], or what the driver
    /// says.
    pub fn open(ordinal: usize) -> Result<Self> {
        let (driver, found) = visible()?;
        if driver < OLDEST_DRIVER {
            return Err(CudaError::OldDriver { found: driver, needed: OLDEST_DRIVER });
        }
        if ordinal >= found {
            return Err(CudaError::NoDevice { ordinal, found });
        }
        guarded(|| Self::open_present(ordinal, driver))
    }

    fn open_present(ordinal: usize, driver: i32) -> Result<Self> {
        let mut device = 0;
        // SAFETY: the driver is present, the ordinal exists, the pointer is to a live local.
        unsafe { check("cuDeviceGet", sys::cuDeviceGet(&raw mut device, ordinal as i32))? };
        let attribute = |what| {
            let mut value = 0;
            // SAFETY: the device exists, the pointer is to a live local.
            unsafe { check("cuDeviceGetAttribute", sys::cuDeviceGetAttribute(&raw mut value, what, device))? };
            Ok(value)
        };
        use sys::CUdevice_attribute_enum as A;
        let mut name = [0; 128];
        let mut memory = 0;
        // SAFETY: the buffer is as long as said and ends with a zero.
        let name = unsafe {
            check("cuDeviceGetName", sys::cuDeviceGetName(name.as_mut_ptr(), name.len() as i32 - 1, device))?;
            check("cuDeviceTotalMem", sys::cuDeviceTotalMem_v2(&raw mut memory, device))?;
            CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned()
        };
        let properties = Properties {
            ordinal,
            capability: (
                attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            multiprocessors: attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?.unsigned_abs() as usize,
            name,
            memory,
            driver,
        };
        let (major, minor) = properties.capability;
        if major < OLDEST {
            return Err(CudaError::Architecture { name: properties.name, major, minor });
        }
        let (mut context, mut stream) = (std::ptr::null_mut(), std::ptr::null_mut());
        let _turn = between_captures();
        // SAFETY: the device exists; the context is made current before the stream is created in it.
        unsafe {
            check("cuDevicePrimaryCtxRetain", sys::cuDevicePrimaryCtxRetain(&raw mut context, device))?;
            check("cuCtxSetCurrent", sys::cuCtxSetCurrent(context))?;
            check("cuStreamCreate", sys::cuStreamCreate(&raw mut stream, 1))?;
        }
        CURRENT.set(context as usize);
        Ok(Self { inner: Arc::new(Inner { device, context, stream, asked: AtomicU64::new(0), properties }) })
    }

    /// What is known about the device.
    pub fn properties(&self) -> &Properties {
        &self.inner.properties
    }

    /// Makes the context current in this thread.
    ///
    /// # Errors
    /// What the driver says.
    pub(crate) fn bind(&self) -> Result<()> {
        let context = self.inner.context;
        if CURRENT.get() != context as usize {
            // SAFETY: the context lives as long as `self`.
            unsafe { check("cuCtxSetCurrent", sys::cuCtxSetCurrent(context))? };
            CURRENT.set(context as usize);
        }
        Ok(())
    }

    /// The stream, to give it anything.
    pub(crate) fn stream(&self) -> sys::CUstream {
        self.inner.asked.fetch_add(1, Ordering::Relaxed);
        self.inner.stream
    }

    /// The stream, to give it a launch that is noted.
    pub(crate) fn stream_for_launches(&self) -> sys::CUstream {
        self.inner.stream
    }

    /// How often [`Self::stream`] was called: whether the stream may have been given more than noted launches.
    pub(crate) fn asked(&self) -> u64 {
        self.inner.asked.load(Ordering::Relaxed)
    }

    /// Waits until all work is done.
    ///
    /// # Errors
    /// What went wrong in a kernel since the last wait.
    pub fn synchronize(&self) -> Result<()> {
        self.bind()?;
        // SAFETY: the stream lives as long as `self`.
        unsafe { check("cuStreamSynchronize", sys::cuStreamSynchronize(self.inner.stream)) }
    }

    /// Free and total bytes of device memory.
    ///
    /// # Errors
    /// What the driver says.
    pub fn free_memory(&self) -> Result<(usize, usize)> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: pointers to live locals.
        unsafe { check("cuMemGetInfo", sys::cuMemGetInfo_v2(&raw mut free, &raw mut total))? };
        Ok((free, total))
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let _turn = between_captures();
        // SAFETY: nothing uses the stream or the context any more. Errors leave nothing to be done.
        unsafe {
            sys::cuCtxSetCurrent(self.context);
            sys::cuStreamDestroy_v2(self.stream);
            sys::cuDevicePrimaryCtxRelease_v2(self.device);
        }
        CURRENT.set(0);
    }
}

/// A driver call's result as an error.
pub(crate) fn check(call: &'static str, code: sys::CUresult) -> Result<()> {
    if code == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(CudaError::of_call(call, format!("{code:?}")))
}

/// The message of a panic.
pub(crate) fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("unknown").to_owned()
}
