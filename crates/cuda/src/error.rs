//! Errors of the device layer.

use std::path::PathBuf;

/// What can go wrong between this process and the device.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// The driver library is not installed.
    #[error("no CUDA driver: libcuda.so.1 was not found; install the NVIDIA driver or use the CPU")]
    NoDriver,
    /// The driver is older than the kernels that are compiled for it.
    #[error(
        "the CUDA driver has the interface of CUDA {}.{}; kernels need that of CUDA {}.{}: install NVIDIA driver 580 or newer, or \
         use the CPU",
        .found / 1000, .found % 1000 / 10, .needed / 1000, .needed % 1000 / 10
    )]
    OldDriver {
        /// Version of its interface, such as 12040.
        found: i32,
        /// The oldest that will do.
        needed: i32,
    },
    /// The driver is there and cannot be used.
    #[error("the CUDA driver cannot be used ({call}: {code}): {remedy}; or use the CPU")]
    UnusableDriver {
        /// The call.
        call: &'static str,
        /// The driver's name of the error.
        code: String,
        /// What to do.
        remedy: &'static str,
    },
    /// The device does no more work for this process.
    #[error(
        "the device was lost ({call}: {code}): {remedy}. Nothing that this process has on the device can be used any more; start it \
         again"
    )]
    Lost {
        /// The call that told.
        call: &'static str,
        /// The driver's name of the error.
        code: String,
        /// What to do.
        remedy: &'static str,
    },
    /// The compiler library is not installed.
    #[error("no CUDA compiler: {tried}; install the CUDA 13.0 toolkit or the wheel nvidia-cuda-nvrtc 13.0")]
    NoCompiler {
        /// Where it was looked for.
        tried: String,
    },
    /// There is no such device.
    #[error(
        "no CUDA device {ordinal}: the driver sees {found}; check nvidia-smi and CUDA_VISIBLE_DEVICES, or use the CPU"
    )]
    NoDevice {
        /// Which one was asked for.
        ordinal: usize,
        /// How many there are.
        found: usize,
    },
    /// The device is too old for the kernels.
    #[error(
        "device `{name}` has compute capability {major}.{minor}; the kernels need 8.0 or newer: use a newer device or the CPU"
    )]
    Architecture {
        /// Name of the device.
        name: String,
        /// Compute capability.
        major: i32,
        /// Compute capability.
        minor: i32,
    },
    /// Device memory is used up.
    #[error(
        "{what} needs {needed} bytes of device memory; {free} of {total} are free: end other programs on the device, or take less of \
         it (of a server: --gpu-memory-utilization, --max-num-seqs, --max-num-batched-tokens)"
    )]
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
    #[error(
        "kernel {kernel} does not compile: {log}; use the compiler of CUDA 13.0 (--nvrtc names its library), or the CPU"
    )]
    Compile {
        /// File and constants.
        kernel: String,
        /// The compiler's output.
        log: String,
    },
    /// A call of the driver failed.
    #[error("{call} failed: {code}; glimmer doctor says what is found of the device, or use the CPU")]
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

impl CudaError {
    /// The error of a driver's call, by the driver's name of it.
    pub(crate) fn of_call(call: &'static str, code: String) -> Self {
        let remedy = |table: &[(&[&str], &'static str)]| {
            let name = code.strip_prefix("CUDA_ERROR_").unwrap_or(&code);
            table.iter().find(|(names, _)| names.contains(&name)).map(|&(_, remedy)| remedy)
        };
        if let Some(remedy) = remedy(UNUSABLE) {
            return Self::UnusableDriver { call, code, remedy };
        }
        if let Some(remedy) = remedy(LOST) {
            return Self::Lost { call, code, remedy };
        }
        Self::Driver { call, code }
    }
}

/// Errors behind which a driver does nothing, and what to do.
const UNUSABLE: &[(&[&str], &str)] = &[
    (&["NO_DEVICE"], "it sees no device; check nvidia-smi and CUDA_VISIBLE_DEVICES"),
    (
        &["STUB_LIBRARY"],
        "this libcuda is the toolkit's stub; install the driver, and take the stub out of the loader's path",
    ),
    (
        &["SYSTEM_DRIVER_MISMATCH", "COMPAT_NOT_SUPPORTED_ON_DEVICE"],
        "its library and its kernel module are of different versions; reboot after the update, or mount the host's library into the \
         container",
    ),
    (&["SYSTEM_NOT_READY"], "its services are not ready; on hosts with NVSwitch start nvidia-fabricmanager"),
    (
        &["NOT_PERMITTED", "OPERATING_SYSTEM"],
        "this process may not use the device; check the permissions of /dev/nvidia*",
    ),
    (
        &["DEVICE_UNAVAILABLE"],
        "another process has the device for itself; end it, or change the compute mode with nvidia-smi",
    ),
];

/// Errors behind which the device does nothing for this process, and what to do.
const LOST: &[(&[&str], &str)] = &[
    (
        &[
            "ILLEGAL_ADDRESS",
            "ILLEGAL_INSTRUCTION",
            "INVALID_ADDRESS_SPACE",
            "INVALID_PC",
            "LAUNCH_FAILED",
            "MISALIGNED_ADDRESS",
            "ASSERT",
            "TENSOR_MEMORY_LEAK",
        ],
        "a kernel failed, which is a defect of this program if the device is sound; report it, with a log of --record-steps if it \
         comes again",
    ),
    (&["LAUNCH_TIMEOUT"], "a kernel took longer than the system allows; use a device without a display"),
    (
        &[
            "ECC_UNCORRECTABLE",
            "NVLINK_UNCORRECTABLE",
            "HARDWARE_STACK_ERROR",
            "CONTAINED",
            "EXTERNAL_DEVICE",
            "DEVICE_NOT_LICENSED",
        ],
        "the hardware failed; look at the system's log (Xid) and nvidia-smi -q, and replace the device if it comes again",
    ),
    (
        &["CONTEXT_IS_DESTROYED", "DEINITIALIZED", "UNKNOWN", "MPS_CLIENT_TERMINATED"],
        "its driver gave up; look at the system's log (Xid)",
    ),
];

impl From<CudaError> for glimmer_tensor::Error {
    fn from(error: CudaError) -> Self {
        Self::Device(Box::new(error))
    }
}

/// Result of the device layer.
pub type Result<T> = std::result::Result<T, CudaError>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_driver_says_is_told_with_what_to_do() {
        let of = |code: &str| CudaError::of_call("cuStreamSynchronize", format!("CUDA_ERROR_{code}"));
        assert!(matches!(of("ILLEGAL_ADDRESS"), CudaError::Lost { .. }));
        assert!(matches!(of("ECC_UNCORRECTABLE"), CudaError::Lost { .. }));
        assert!(matches!(of("NO_DEVICE"), CudaError::UnusableDriver { .. }));
        assert!(matches!(of("SYSTEM_DRIVER_MISMATCH"), CudaError::UnusableDriver { .. }));
        assert!(matches!(of("INVALID_VALUE"), CudaError::Driver { .. }));
        for error in [
            CudaError::NoDriver,
            CudaError::OldDriver { found: 12_040, needed: 13_000 },
            of("ILLEGAL_ADDRESS"),
            of("NO_DEVICE"),
            of("INVALID_VALUE"),
            CudaError::NoDevice { ordinal: 0, found: 0 },
            CudaError::NoCompiler { tried: "libnvrtc.so.13 was not found in the loader's path".to_owned() },
            CudaError::Compile { kernel: "few.cu NT=1".to_owned(), log: "error: expected a \";\"".to_owned() },
            CudaError::OutOfMemory { what: "a matrix", needed: 3 << 30, free: 1 << 30, total: 140 << 30 },
        ] {
            let told = error.to_string();
            let advice = ["use the CPU", "start it again", "or the CPU", "install", "end other programs"];
            assert!(advice.iter().any(|advice| told.contains(advice)), "{told}");
        }
        let old = CudaError::OldDriver { found: 12_040, needed: 13_000 }.to_string();
        assert!(old.contains("CUDA 12.4") && old.contains("CUDA 13.0"), "{old}");
        let both = CudaError::OutOfMemory { what: "a matrix", needed: 7, free: 5, total: 9 }.to_string();
        assert!(both.contains("needs 7 bytes") && both.contains("5 of 9 are free"), "{both}");
    }
}
