//! The kernel compiler: CUDA C++ text to machine code for one architecture, with a cache on disk.
//!
//! The compiler library is loaded at run time. Kernels include only this crate's own headers, so nothing else of a toolkit is
//! needed. Compiled kernels are kept under the digest of everything that determines them (source, headers, options, compiler
//! version); a file is written under another name and renamed, so that processes may share the folder.

#![allow(unsafe_code, reason = "the compiler's interface is C")]

use std::{
    ffi::{CStr, CString, c_char},
    fs,
    panic::catch_unwind,
    path::{Path, PathBuf},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use cudarc::nvrtc::sys;
use sha2::{Digest, Sha256};

use crate::{
    device::panic_text,
    error::{CudaError, Result},
};

/// The headers that kernels include, with their texts.
const HEADERS: [(&CStr, &str); 19] = [
    (c"common.cuh", include_str!("kernels/common.cuh")),
    (c"lanes.cuh", include_str!("kernels/lanes.cuh")),
    (c"wgmma.cuh", include_str!("kernels/wgmma.cuh")),
    (c"fragments.cuh", include_str!("kernels/fragments.cuh")),
    (c"kda.cuh", include_str!("kernels/kda.cuh")),
    (c"kda_cursor.cuh", include_str!("kernels/kda_cursor.cuh")),
    (c"kda_image.cuh", include_str!("kernels/kda_image.cuh")),
    (c"kda_pairs.cuh", include_str!("kernels/kda_pairs.cuh")),
    (c"kda_pipeline.cuh", include_str!("kernels/kda_pipeline.cuh")),
    (c"kda_plain.cuh", include_str!("kernels/kda_plain.cuh")),
    (c"kda_rows.cuh", include_str!("kernels/kda_rows.cuh")),
    (c"kda_solve.cuh", include_str!("kernels/kda_solve.cuh")),
    (c"kda_walk.cuh", include_str!("kernels/kda_walk.cuh")),
    (c"async.cuh", include_str!("kernels/async.cuh")),
    (c"mhc_row.cuh", include_str!("kernels/mhc_row.cuh")),
    (c"experts.cuh", include_str!("kernels/experts.cuh")),
    (c"draws.cuh", include_str!("kernels/draws.cuh")),
    (c"few.cuh", include_str!("kernels/few.cuh")),
    (c"sparse.cuh", include_str!("kernels/sparse.cuh")),
];

/// A source file with its compile-time constants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unit {
    /// Name of the file.
    pub file: &'static str,
    /// Its text.
    pub text: &'static str,
    /// Constants and their values.
    pub constants: Vec<(&'static str, i64)>,
}

impl Unit {
    /// File and constants, for messages.
    pub fn describe(&self) -> String {
        let constants: Vec<String> = self.constants.iter().map(|(n, v)| format!("{n}={v}")).collect();
        format!("{} {}", self.file, constants.join(" ")).trim_end().to_owned()
    }
}

/// The compiler's result.
#[derive(Debug, Clone)]
pub struct Compiled {
    /// Machine code.
    pub code: Vec<u8>,
    /// Output of compiler and assembler: registers, stack and spills of each kernel (empty when read from the cache).
    pub log: String,
}

/// The compiler with its cache.
#[derive(Debug, Clone)]
pub struct Compiler {
    version: (i32, i32),
    cache: Option<PathBuf>,
}

impl Compiler {
    /// Loads the compiler library: from `library` when given, else through the loader's path and the toolkit's usual folder.
    /// `cache` is the folder of compiled kernels; it is created when it does not exist.
    ///
    /// # Errors
    /// [`CudaError::NoCompiler`] saying where it was looked for, [`CudaError::Cache`] when the folder cannot be created.
    pub fn load(library: Option<&Path>, cache: Option<PathBuf>) -> Result<Self> {
        if let Some(folder) = &cache {
            fs::create_dir_all(folder).map_err(|source| CudaError::Cache { path: folder.clone(), source })?;
        }
        let mut tried = vec!["the loader's path".to_owned()];
        // SAFETY: asks the loader for the library and calls nothing in it.
        let present = || catch_unwind(|| unsafe { sys::is_culib_present() }).unwrap_or(false);
        let usual = Path::new("/usr/local/cuda/lib64/libnvrtc.so.13");
        let found = match library {
            Some(path) => {
                tried = vec![path.display().to_string()];
                preload(path) && present()
            }
            None => {
                tried.push(usual.display().to_string());
                present() || preload(usual) && present()
            }
        };
        if !found {
            return Err(CudaError::NoCompiler {
                tried: format!("libnvrtc.so.13 was not found in {}", tried.join(", ")),
            });
        }
        let version = catch_unwind(|| {
            let (mut major, mut minor) = (0, 0);
            // SAFETY: the library is present; pointers to live locals.
            let code = unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) };
            (code == sys::nvrtcResult::NVRTC_SUCCESS).then_some((major, minor))
        });
        match version {
            Ok(Some(version)) => Ok(Self { version, cache }),
            Ok(None) => Err(CudaError::Library { what: "nvrtcVersion failed".to_owned() }),
            Err(panic) => Err(CudaError::Library { what: panic_text(&*panic) }),
        }
    }

    /// Version of the compiler.
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// The file of the compiler library, as far as the system tells.
    pub fn place(&self) -> Option<PathBuf> {
        let maps = fs::read_to_string("/proc/self/maps").ok()?;
        let line = maps.lines().find(|line| line.contains("/libnvrtc.so"))?;
        line.find('/').map(|start| PathBuf::from(&line[start..]))
    }

    /// Machine code of a unit for an architecture such as `sm_90a`, from the cache when it is there.
    ///
    /// # Errors
    /// [`CudaError::Compile`] with the compiler's output.
    pub fn compile(&self, unit: &Unit, architecture: &str) -> Result<Compiled> {
        let options = options(unit, architecture);
        let place = self.cache.as_ref().map(|folder| folder.join(self.digest(unit, &options)));
        if let Some(code) = place.as_ref().and_then(|p| fs::read(p).ok()).filter(|code| code.starts_with(b"\x7fELF")) {
            return Ok(Compiled { code, log: String::new() });
        }
        let compiled = match catch_unwind(|| run(unit, &options)) {
            Ok(compiled) => compiled?,
            Err(panic) => return Err(CudaError::Library { what: panic_text(&*panic) }),
        };
        if let Some(place) = place {
            // A cache that cannot be written costs time, nothing else.
            drop(store(&place, &compiled.code));
        }
        Ok(compiled)
    }

    fn digest(&self, unit: &Unit, options: &[String]) -> String {
        let mut digest = Sha256::new();
        let version = format!("{}.{}", self.version.0, self.version.1);
        let own = [unit.file, unit.text, &version];
        let options = options.iter().map(String::as_str);
        for part in HEADERS.map(|h| h.1).into_iter().chain(own).chain(options) {
            digest.update((part.len() as u64).to_le_bytes());
            digest.update(part.as_bytes());
        }
        let mut name: String = digest.finalize().iter().map(|b| format!("{b:02x}")).collect();
        name.push_str(".cubin");
        name
    }
}

fn options(unit: &Unit, architecture: &str) -> Vec<String> {
    let mut options = vec![
        format!("--gpu-architecture={architecture}"),
        "--std=c++17".to_owned(),
        "-default-device".to_owned(),
        "--ptxas-options=-v".to_owned(),
        "--generate-line-info".to_owned(),
    ];
    options.extend(unit.constants.iter().map(|(name, value)| format!("-D{name}={value}")));
    options
}

/// Opens a library by its path so that it is found by name later, with the companion that lies beside it.
pub(crate) fn preload(path: &Path) -> bool {
    use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
    /// Libraries stay open for the life of the process.
    static OPEN: Mutex<Vec<Library>> = Mutex::new(Vec::new());
    let companion = path.with_file_name("libnvrtc-builtins.so.13.0");
    for file in [companion.as_path(), path] {
        // SAFETY: the vendor's libraries have no initialisation that could do harm.
        match unsafe { Library::open(Some(file), RTLD_NOW | RTLD_GLOBAL) } {
            Ok(library) => OPEN.lock().unwrap_or_else(PoisonError::into_inner).push(library),
            Err(_) if file != path => {}
            Err(_) => return false,
        }
    }
    true
}

fn run(unit: &Unit, options: &[String]) -> Result<Compiled> {
    let fail = |log: String| CudaError::Compile { kernel: unit.describe(), log };
    let text = |s: &str| CString::new(s).map_err(|_| fail("a zero byte in the source".to_owned()));
    let (source, name) = (text(unit.text)?, text(unit.file)?);
    let texts = HEADERS.iter().map(|h| text(h.1)).collect::<Result<Vec<_>>>()?;
    let options = options.iter().map(|o| text(o)).collect::<Result<Vec<_>>>()?;
    let options: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
    let headers: Vec<*const c_char> = texts.iter().map(|t| t.as_ptr()).collect();
    let names = HEADERS.map(|h| h.0.as_ptr());
    let mut program = std::ptr::null_mut();
    // SAFETY: all strings end with zero and outlive the calls; the counts are those of the arrays.
    unsafe {
        let created = sys::nvrtcCreateProgram(
            &raw mut program,
            source.as_ptr(),
            name.as_ptr(),
            HEADERS.len() as i32,
            headers.as_ptr(),
            names.as_ptr(),
        );
        if created != sys::nvrtcResult::NVRTC_SUCCESS {
            return Err(fail(format!("{created:?}")));
        }
        let result = sys::nvrtcCompileProgram(program, options.len() as i32, options.as_ptr());
        let mut size = 0;
        let mut log = Vec::new();
        if sys::nvrtcGetProgramLogSize(program, &raw mut size) == sys::nvrtcResult::NVRTC_SUCCESS && size > 0 {
            log.resize(size, 0u8);
            sys::nvrtcGetProgramLog(program, log.as_mut_ptr().cast());
        }
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_owned();
        let mut code = Vec::new();
        let mut complete = result == sys::nvrtcResult::NVRTC_SUCCESS
            && sys::nvrtcGetCUBINSize(program, &raw mut size) == sys::nvrtcResult::NVRTC_SUCCESS;
        if complete {
            code.resize(size, 0u8);
            complete = sys::nvrtcGetCUBIN(program, code.as_mut_ptr().cast()) == sys::nvrtcResult::NVRTC_SUCCESS;
        }
        sys::nvrtcDestroyProgram(&raw mut program);
        if complete { Ok(Compiled { code, log }) } else { Err(fail(format!("{result:?}: {log}"))) }
    }
}

fn store(place: &Path, code: &[u8]) -> std::io::Result<()> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let draft = place.with_extension(format!("{}.{number}.tmp", std::process::id()));
    fs::write(&draft, code)?;
    fs::rename(&draft, place)
}
