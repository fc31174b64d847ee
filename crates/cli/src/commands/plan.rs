//! `glimmer plan`.

use std::{io::Write as _, path::Path, process::ExitCode};

use glimmer_checkpoint::Config;
use glimmer_server::{
    flags::{Settings, help},
    plan::{self, PlanRequest},
};

use crate::{args::PlanArgs, open};

/// Prints what a model and the flags of `serve` need of memory. Exit code 1 when it does not fit.
pub(crate) fn run(args: &PlanArgs) -> anyhow::Result<ExitCode> {
    let mut out = anstream::stdout().lock();
    if args.arguments.iter().any(|argument| argument == "--help" || argument == "-h") {
        write!(out, "glimmer plan [MODEL] [OPTIONS] [flags of serve]\n\nOptions:\n{}\n{}", plan::HELP, help())?;
        return Ok(ExitCode::SUCCESS);
    }
    let (mut request, rest) = PlanRequest::take(&args.arguments)?;
    request.host_bytes = glimmer_server::sizing::host_memory();
    let environment = |name: &str| std::env::var(name).ok();
    let settings = Settings::parse(&rest, &environment, &|path| std::fs::read_to_string(path))?;
    let config = match settings.value("model").as_str() {
        Some(model) => {
            let path = Path::new(model);
            let file = if path.is_dir() { path.join("config.json") } else { path.to_owned() };
            Config::from_file(&file).or_else(|error| open::refuse(path, error, "plan for"))?
        }
        None => open::embedded_model()?.config().clone(),
    };
    let report = plan::plan(&config, &request, settings)?;
    if request.json {
        serde_json::to_writer_pretty(&mut out, &report.to_json())?;
        writeln!(out)?;
    } else {
        write!(out, "{}", report.to_text())?;
    }
    Ok(ExitCode::from(u8::from(!report.fits())))
}
