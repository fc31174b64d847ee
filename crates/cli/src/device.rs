//! Where a model computes, as the command line says.
//!
//! Everything that computes is generic over the backend. [`on_device!`] takes the one decision and compiles what follows it
//! once for each backend that this program has.

use crate::args::{CudaArgs, DeviceArgs, DeviceName};

/// A place to compute, looked at and found usable.
#[derive(Debug)]
pub(crate) enum Place {
    /// The CPU.
    Cpu,
    /// A GPU.
    #[cfg(feature = "cuda")]
    Cuda(Box<cuda::Gpu>),
}

impl Place {
    /// The place that the arguments name.
    ///
    /// # Errors
    /// What is missing for it, and what to do.
    pub(crate) fn of(args: &DeviceArgs) -> anyhow::Result<Self> {
        match args.device {
            DeviceName::Cpu if args.cuda != CudaArgs::default() => {
                anyhow::bail!(
                    "--nvrtc, --kernel-cache, --enforce-eager and --kv-cache-dtype are for --device cuda; leave them out on the \
                     CPU"
                )
            }
            DeviceName::Cpu => Ok(Self::Cpu),
            DeviceName::Cuda => Self::gpu(&args.cuda),
        }
    }

    /// The first GPU.
    ///
    /// # Errors
    /// As [`Place::of`].
    #[cfg(feature = "cuda")]
    pub(crate) fn gpu(args: &CudaArgs) -> anyhow::Result<Self> {
        Ok(Self::Cuda(Box::new(cuda::Gpu::find(args)?)))
    }

    /// This program has none.
    ///
    /// # Errors
    /// Always.
    #[cfg(not(feature = "cuda"))]
    pub(crate) fn gpu(_args: &CudaArgs) -> anyhow::Result<Self> {
        anyhow::bail!(WITHOUT)
    }

    /// What answers, for a heading.
    pub(crate) fn name(&self, threads: usize) -> String {
        match self {
            Self::Cpu => format!("{threads} threads"),
            #[cfg(feature = "cuda")]
            Self::Cuda(gpu) => gpu.name().to_owned(),
        }
    }

    /// Whether it is the CPU.
    pub(crate) fn is_cpu(&self) -> bool {
        matches!(self, Self::Cpu)
    }
}

/// What a build without the feature says.
#[cfg(not(feature = "cuda"))]
pub(crate) const WITHOUT: &str = "--device cuda: this program was built without the feature `cuda`; build it with `cargo \
                                  build --release --features cuda` (which needs nothing of CUDA), or use --device cpu";

/// Evaluates an expression for the backend of a [`Place`], in which `open` makes backends for so many threads.
macro_rules! on_device {
    ($place:expr, $open:ident => $body:expr) => {
        match $place {
            $crate::device::Place::Cpu => {
                let $open =
                    |threads: usize| -> anyhow::Result<glimmer_tensor::Cpu> { Ok(glimmer_tensor::Cpu::new(threads)) };
                $body
            }
            #[cfg(feature = "cuda")]
            $crate::device::Place::Cuda(gpu) => {
                let $open = move |_threads: usize| -> anyhow::Result<glimmer_cuda::Cuda> { gpu.open() };
                $body
            }
        }
    };
}
pub(crate) use on_device;

#[cfg(feature = "cuda")]
pub(crate) mod cuda {
    //! The GPU with its compiler.

    use std::{path::PathBuf, sync::Once};

    use anyhow::Context as _;
    use glimmer_checkpoint::Config;
    use glimmer_cuda::{Cuda, Options, device::Device};

    use crate::args::{CacheType, CudaArgs};

    /// A GPU that could be opened.
    #[derive(Debug)]
    pub(crate) struct Gpu {
        device: Device,
        options: Options,
        /// The first backend compiles the kernels of the model ahead.
        ahead: Option<(Config, Once)>,
    }

    impl Gpu {
        /// Opens the first GPU and its compiler, to see that they are there.
        ///
        /// # Errors
        /// What is missing.
        pub(crate) fn find(args: &CudaArgs) -> anyhow::Result<Self> {
            let options = options(args);
            let opened = Cuda::open(&options).context("--device cuda")?;
            Ok(Self { device: opened.device().clone(), options, ahead: None })
        }

        /// Compiles what the model needs with the first backend, instead of kernel by kernel when each is first used.
        pub(crate) fn compile_ahead(&mut self, config: &Config) {
            // Without a folder nothing compiled ahead would be found again.
            if self.options.cache.is_some() {
                self.ahead = Some((config.clone(), Once::new()));
            }
        }

        pub(crate) fn name(&self) -> &str {
            &self.device.properties().name
        }

        /// Free and all bytes of its memory.
        pub(crate) fn memory(&self) -> anyhow::Result<(u64, u64)> {
            let (free, total) = self.device.free_memory()?;
            Ok((free as u64, total as u64))
        }

        /// Whether compiled kernels are kept in a folder.
        pub(crate) fn keeps_kernels(&self) -> bool {
            self.options.cache.is_some()
        }

        /// Whether its caches can be of halves.
        pub(crate) fn halves(&self) -> bool {
            self.options.half_cache && self.device.properties().capability.0 == 9
        }

        /// A backend.
        ///
        /// # Errors
        /// As [`Gpu::find`].
        pub(crate) fn open(&self) -> anyhow::Result<Cuda> {
            let cuda = Cuda::open(&self.options).context("--device cuda")?;
            let mut compiled = Ok(());
            if let Some((config, once)) = &self.ahead {
                once.call_once(|| compiled = cuda.prepare(config).map(|_| ()));
            }
            compiled.context("--device cuda")?;
            Ok(cuda)
        }
    }

    /// Options for the device: the folder of compiled kernels is the user's unless another one is named; latents and index keys
    /// are halves where there are kernels for them.
    pub(crate) fn options(args: &CudaArgs) -> Options {
        let cache = args.kernel_cache.clone().or_else(usable_folder);
        Options {
            compiler: args.nvrtc.clone(),
            cache,
            eager: args.enforce_eager,
            half_cache: args.kv_cache_dtype != Some(CacheType::Float32),
            ..Options::default()
        }
    }

    /// The user's folder of compiled kernels, where there is one that can be written.
    fn usable_folder() -> Option<PathBuf> {
        let folder = default_folder()?;
        std::fs::create_dir_all(&folder).ok().map(|()| folder)
    }

    /// `glimmer/kernels` in the user's cache folder.
    pub(crate) fn default_folder() -> Option<PathBuf> {
        let named = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let caches = named("XDG_CACHE_HOME").or_else(|| named("HOME").map(|home| home.join(".cache")))?;
        Some(caches.join("glimmer/kernels"))
    }
}
