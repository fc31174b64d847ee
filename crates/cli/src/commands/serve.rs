//! `glimmer serve`: flags, log, model; the rest is the server's.

use std::{
    io::Write as _,
    num::NonZero,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::Context as _;
use glimmer_bench::dummy::DummySource;
use glimmer_checkpoint::{
    Bytes, Checkpoint, Config,
    scheme::{Scheme, quantization_config, with_quantization_config},
};
use glimmer_server::{
    flags::{Device, FlagError, ModelShape, ServeConfig, Settings, help},
    live::{LoadError, Memory, Weights},
    port::{Port, bind, try_host},
    start::{Loaded, StartError},
    tls::Tls,
};

use crate::{
    args::{CacheType, CudaArgs},
    device::{Place, on_device},
    logging, open,
};

/// Serves until a signal or the end of the engine. Exit codes: 0 after a signal, 1 for flags that do not go together and for
/// failures, 2 for flags that do not exist or have wrong values.
pub(crate) fn run(arguments: &[String], threads: Option<u16>) -> anyhow::Result<ExitCode> {
    if arguments.iter().any(|argument| argument == "--help" || argument == "-h") {
        write!(anstream::stdout(), "{}", help())?;
        return Ok(ExitCode::SUCCESS);
    }
    let (settings, config) = match read_flags(arguments, threads) {
        Ok(read) => read,
        Err(error) => return refuse(&error),
    };
    let served = if config.dry_run {
        dry_run(settings, config)
    } else {
        logging::start(&config);
        serve(settings, config)
    };
    match served {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) => match error.downcast_ref::<FlagError>() {
            Some(flags) => refuse(flags),
            None => {
                crate::failure::print(&error);
                Ok(ExitCode::FAILURE)
            }
        },
    }
}

pub(super) fn read_flags(arguments: &[String], threads: Option<u16>) -> Result<(Settings, ServeConfig), FlagError> {
    let environment = |name: &str| std::env::var(name).ok();
    let mut settings = Settings::parse(arguments, &environment, &|path| std::fs::read_to_string(path))?;
    if let Some(threads) = threads {
        settings.derive("threads", threads, "command line, before serve");
    }
    settings.derive_parsers();
    let config = ServeConfig::new(&settings)?;
    Ok((settings, config))
}

/// Says what is wrong with the flags.
fn refuse(error: &FlagError) -> anyhow::Result<ExitCode> {
    let hint =
        if matches!(error, FlagError::Usage(_)) { "usage: glimmer serve [MODEL] [FLAGS]; see --help\n" } else { "" };
    crate::failure::print(&error.clone().into());
    write!(anstream::stderr(), "{hint}")?;
    Ok(ExitCode::from(error.exit_code()))
}

/// Prints every setting with its origin, after checks of all that the start looks at before it loads. A model that is not here
/// leaves those open that depend on it.
fn dry_run(mut settings: Settings, mut config: ServeConfig) -> anyhow::Result<()> {
    let opened = checkpoint(&config).map(|(checkpoint, _)| checkpoint);
    let (device, _) = device(&place(&config)?)?;
    one_rank(&config, device)?;
    match &opened {
        Ok(checkpoint) => config.resolve(&mut settings, &ModelShape::of(checkpoint), device)?,
        Err(error) => {
            let error = crate::failure::explain(error);
            writeln!(anstream::stderr(), "note: {error}; settings that depend on the model are left open")?;
        }
    }
    glimmer_server::open::check(opened.as_ref().ok(), &config)?;
    if !config.headless {
        try_host(config.host.as_deref(), config.port)?;
        tls(&config)?;
    }
    write!(anstream::stdout(), "{}", settings.describe())?;
    for note in config.notes(&settings, device) {
        writeln!(anstream::stderr(), "note: {note}")?;
    }
    Ok(())
}

/// Where to compute. `auto` takes a GPU where one can be used.
fn place(config: &ServeConfig) -> anyhow::Result<Place> {
    let path = |text: &Option<String>| text.as_ref().map(PathBuf::from);
    let cuda = CudaArgs {
        nvrtc: path(&config.nvrtc),
        kernel_cache: path(&config.kernel_cache),
        enforce_eager: config.graph_mode == "NONE",
        kv_cache_dtype: (config.cache_dtype == "float32").then_some(CacheType::Float32),
    };
    match config.device.as_str() {
        "cuda" => Place::gpu(&cuda),
        "cpu" => Ok(Place::Cpu),
        _ => Ok(Place::gpu(&cuda).unwrap_or_else(|error| {
            if cfg!(feature = "cuda") {
                crate::failure::warn(&[format!(
                    "the CPU computes, as no GPU can: {}",
                    crate::failure::explain(&error)
                )]);
            }
            Place::Cpu
        })),
    }
}

/// What flags have to fit of the place.
fn device(place: &Place) -> anyhow::Result<(Device, Memory)> {
    match place {
        Place::Cpu => Ok((Device::Cpu, Memory::Host)),
        #[cfg(feature = "cuda")]
        Place::Cuda(gpu) => {
            let (free, total) = gpu.memory()?;
            let memory_gib = total as f64 / f64::from(1 << 30);
            Ok((Device::Cuda { memory_gib, count: 1 }, Memory::Device { free, total, halves: gpu.halves() }))
        }
    }
}

/// Refuses several ranks on GPUs.
fn one_rank(config: &ServeConfig, device: Device) -> anyhow::Result<()> {
    let ranks = config.tensor_parallel.max(config.nodes);
    anyhow::ensure!(
        device == Device::Cpu || ranks == 1,
        "{ranks} ranks were asked for: this program computes on one GPU so far; leave --tensor-parallel-size and --nnodes out, or \
         see what several would hold with glimmer plan"
    );
    Ok(())
}

/// What is to be served, and where.
pub(super) struct Prepared {
    pub(super) config: ServeConfig,
    place: Place,
    memory: Memory,
    checkpoint: Checkpoint,
    /// Weights other than the checkpoint's.
    weights: Option<Weights>,
    threads: usize,
}

impl Prepared {
    /// Opens the model and settles what depends on it.
    pub(super) fn open(settings: &mut Settings, mut config: ServeConfig) -> anyhow::Result<Self> {
        #[allow(unused_mut, reason = "only a GPU is told what it will compile")]
        let mut place = place(&config)?;
        let (device, memory) = device(&place)?;
        one_rank(&config, device)?;
        let (checkpoint, weights) = checkpoint(&config)?;
        #[cfg(feature = "cuda")]
        if let Place::Cuda(gpu) = &mut place {
            gpu.compile_ahead(checkpoint.config());
        }
        config.resolve(settings, &ModelShape::of(&checkpoint), device)?;
        glimmer_server::open::check_record(&config)?;
        tracing::info!("glimmer {} starts with\n{}", env!("CARGO_PKG_VERSION"), settings.describe().trim_end());
        for note in config.notes(settings, device) {
            tracing::warn!("{note}");
        }
        let threads = config.threads.unwrap_or_else(|| open::threads(None));
        Ok(Self { config, place, memory, checkpoint, weights, threads })
    }

    /// Where it computes.
    pub(super) fn place_name(&self) -> String {
        self.place.name(self.threads)
    }

    /// Loads the model.
    pub(super) fn load(self) -> Result<Loaded, LoadError> {
        let Self { config, place, memory, checkpoint, weights, threads } = self;
        on_device!(place, open => {
            let open = || open(threads).map_err(Into::into);
            glimmer_server::live::load(memory, open, checkpoint, weights, &config)
        })
    }
}

/// Threads of a server that may fetch pictures of these hosts.
pub(super) fn runtime(hosts: &[String]) -> anyhow::Result<tokio::runtime::Runtime> {
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .max_blocking_threads(if hosts.is_empty() { cores.clamp(2, BLOCKING) } else { BLOCKING })
        .enable_all()
        .build()
        .context("cannot start the threads of connections")
}

fn serve(mut settings: Settings, config: ServeConfig) -> anyhow::Result<()> {
    let prepared = Prepared::open(&mut settings, config)?;
    let (runtime, config) = (runtime(&prepared.config.options.media_domains)?, &prepared.config);
    if config.headless {
        let waiting = async {
            let mut stop = std::pin::pin!(glimmer_server::serve::stop_signal());
            // Signals are listened to before anybody reads that one is waited for.
            tokio::select! {
                biased;
                signal = &mut stop => return signal,
                () = std::future::ready(()) => {}
            }
            tracing::warn!(
                "--headless: on the CPU rank 0 computes alone; this process only waits for the signal to stop"
            );
            stop.await
        };
        return Ok(runtime.block_on(waiting)?);
    }
    let port = Port::new(bind(config.host.as_deref(), config.port)?, tls(config)?);
    let options = config.options.clone();
    tracing::info!("Computing on {}", prepared.place_name());
    let served = runtime.block_on(glimmer_server::start::run(options, port, move || prepared.load()));
    // What still runs (a load that was interrupted, requests beyond the time limit) ends with the process.
    runtime.shutdown_background();
    served.map_err(|error| match error {
        StartError::Load(error) => error.into(),
        error => error.into(),
    })
}

/// The certificate.
#[cfg(feature = "tls")]
fn tls(config: &ServeConfig) -> anyhow::Result<Option<Tls>> {
    Ok(config.tls.as_ref().map(Tls::open).transpose()?)
}

/// The flags were refused before.
#[cfg(not(feature = "tls"))]
#[allow(clippy::unnecessary_wraps, reason = "the same signature as with the feature")]
fn tls(_config: &ServeConfig) -> anyhow::Result<Option<Tls>> {
    Ok(None)
}

/// Threads for connections. Requests are prepared elsewhere, so these only move bytes.
const WORKERS: usize = 2;
/// Most threads for bodies, templates, pictures and grammars. They compute, so more than cores gain nothing, and each keeps the
/// memory of the largest body that it has met; only where they wait for other hosts' pictures does it take all of them.
const BLOCKING: usize = 16;

/// The model; with `--load-format dummy` the files of its directory and weights that are made when they are loaded.
fn checkpoint(config: &ServeConfig) -> anyhow::Result<(Checkpoint, Option<Weights>)> {
    let directory = config.model.as_deref().map(Path::new);
    match directory.filter(|_| config.dummy_weights) {
        None => Ok((open::model(directory)?, None)),
        Some(directory) => {
            let (checkpoint, source) = invented(directory, config)?;
            let bytes = source.bytes();
            Ok((checkpoint, Some(Weights { source: Box::new(source), bytes })))
        }
    }
}

/// Weights invented for the configuration in `directory`, and a checkpoint without any whose other files are those there.
fn invented(directory: &Path, config: &ServeConfig) -> anyhow::Result<(Checkpoint, DummySource)> {
    /// A shard without tensors.
    const EMPTY: &[u8] = b"\x08\0\0\0\0\0\0\0{}      ";
    let path = directory.join("config.json");
    let mut text = open::text(&path)?;
    let parsed = Config::parse(&text).with_context(|| path.display().to_string())?;
    if config.dummy_int4 {
        text = with_quantization_config(&text, &quantization_config(&parsed, Scheme::default()))?;
    }
    let stated = parsed.quantization.as_ref().is_some_and(|block| block["quant_method"] == "compressed-tensors");
    let source = DummySource::new(&text, config.dummy_layers, config.dummy_int4 || stated)?;
    let source = source.seeded(config.seed.unsigned_abs());
    let made = source.config_text().as_bytes().to_vec();
    let mut files =
        vec![("config.json".to_owned(), Bytes::new(made)), ("model.safetensors".to_owned(), Bytes::new(EMPTY))];
    for entry in std::fs::read_dir(directory).with_context(|| format!("cannot list {}", directory.display()))? {
        let path = entry?.path();
        let kind = path.extension().and_then(|kind| kind.to_str()).unwrap_or_default();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let made = ["config.json", "model.safetensors.index.json"].contains(&name.as_str());
        if ["json", "jinja"].contains(&kind) && !made {
            let content = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
            files.push((name, Bytes::new(content)));
        }
    }
    let checkpoint = Checkpoint::from_files(files)?.located(format!("{} with invented weights", directory.display()));
    Ok((checkpoint, source))
}
