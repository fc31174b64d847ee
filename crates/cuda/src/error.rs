//! Errors of the device layer.

use std::path::PathBuf;

/// What can go wrong between this process and the device.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// The driver library is not installed.
    #[error("no CUDA driver: libcuda.so.1 was not found; install the NVIDIA driver or use the CPU")]
    NoDriver,
    /// The compiler library is not installed.
    #[error("no CUDA compiler: {tried}; install the CUDA 13.0 toolkit or the wheel nvidia-cuda-nvrtc 13.0")]
    NoCompiler {
        /// Where it was looked for.
        tried: String,
    },
    /// There is no such device.
    #[error("no CUDA device {ordinal}: the driver sees {found}")]
    NoDevice {
        /// Which one was asked for.
        ordinal: usize,
        /// How many there are.
        found: usize,
    },
    /// The device is too old for the kernels.
    #[error("device `{name}` has compute capability {major}.{minor}; the kernels need 8.0 or newer")]
    Architecture {
        /// Name of the device.
        name: String,
        /// Compute capability.
        major: i32,
        /// Compute capability.
        minor: i32,
    },
    /// Device memory is used up.
    #[error("{what} needs {needed} bytes of device memory; {free} of {total} are free")]
    OutOfMemory {
        /// What for.
        what: &'static str,
        /// How much.
        needed: usize,
        /// Free bytes.
        free: usize,
        /// Bytes of the device.
        total: usize,
    },
    /// A kernel does not compile.
    #[error("kernel {kernel} does not compile: {log}")]
    Compile {
        /// File and constants.
        kernel: String,
        /// The compiler's output.
        log: String,
    },
    /// A call of the driver failed. After most of these the device is lost to this process.
    #[error("{call} failed: {code}")]
    Driver {
        /// The call.
        call: &'static str,
        /// The driver's name of the error.
        code: String,
    },
    /// A library of the driver did not behave as its interface says (a symbol is missing, for instance).
    #[error("the CUDA libraries do not fit this program: {what}")]
    Library {
        /// What happened.
        what: String,
    },
    /// The folder of compiled kernels cannot be used.
    #[error("folder of compiled kernels {path}: {source}")]
    Cache {
        /// The folder or file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

impl From<CudaError> for glimmer_tensor::Error {
    fn from(error: CudaError) -> Self {
        Self::Device(Box::new(error))
    }
}

/// Result of the device layer.
pub type Result<T> = std::result::Result<T, CudaError>;
