//! Log lines of the server, on standard error.

use glimmer_server::flags::ServeConfig;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::{Layer as _, filter::Targets, fmt, layer::SubscriberExt as _, util::SubscriberInitExt as _};

/// Starts logging as the flags say. Libraries below are heard from `warn` up, unless everything is asked for.
pub(crate) fn start(config: &ServeConfig) {
    let level = level(&config.log_level);
    let others = if level == LevelFilter::TRACE { level } else { level.min(LevelFilter::WARN) };
    let ours = ["glimmer", "glimmer_server", "glimmer_engine", "glimmer_model", "glimmer_text", "glimmer_checkpoint"];
    let filter = Targets::new().with_default(others).with_targets(ours.map(|name| (name, level)));
    let colours = std::io::IsTerminal::is_terminal(&std::io::stderr());
    let layer = if config.log_json {
        fmt::layer().json().flatten_event(true).with_writer(std::io::stderr).boxed()
    } else {
        fmt::layer().with_target(false).with_ansi(colours).with_writer(std::io::stderr).boxed()
    };
    // A second start, which only a test could make, keeps the first.
    drop(tracing_subscriber::registry().with(layer.with_filter(filter)).try_init());
}

/// The reference's names of levels.
fn level(name: &str) -> LevelFilter {
    match name {
        "critical" | "error" => LevelFilter::ERROR,
        "warning" => LevelFilter::WARN,
        "debug" => LevelFilter::DEBUG,
        "trace" => LevelFilter::TRACE,
        _ => LevelFilter::INFO,
    }
}
