//! The `glimmer` program: parses the command line, opens what it names, calls the libraries and prints.

#![forbid(unsafe_code)]

mod args;
mod commands;
mod device;
mod embedded;
mod failure;
mod interrupt;
mod lines;
mod load_args;
mod logging;
mod open;
mod output;
mod progress;
mod session;

use std::process::ExitCode;

use args::{BenchCommand, Cli, Command};

fn main() -> ExitCode {
    let cli = Cli::read(load_args::with_dashes(std::env::args_os())).unwrap_or_else(|error| error.exit());
    match run(cli) {
        Ok(code) => code,
        Err(error) if failure::is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            failure::print(&error);
            ExitCode::from(failure::code(&error))
        }
    }
}

/// Runs one command. Exit codes: 0 done, 1 the answer is no (a check failed), 2 an error, 130 ended by Ctrl-C; `--help` says the
/// same.
fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    let threads = open::threads(cli.threads);
    match cli.command {
        Command::Serve(args) => commands::serve::run(&args.flags, cli.threads),
        Command::Demo(args) => commands::demo::run(&args, threads),
        Command::Inspect(args) => commands::inspect::run(&args),
        Command::Plan(args) => commands::plan::run(&args),
        Command::Quantize(args) => commands::quantize::run(&args, threads),
        Command::Verify(args) => commands::verify::run(&args, threads),
        Command::Generate(args) => commands::generate::run(&args, threads),
        Command::Chat(args) => commands::chat::run(&args, threads),
        Command::Eval(args) => commands::eval::run(&args, threads),
        Command::Synth(args) => commands::synth::run(&args),
        Command::Dequantize(args) => commands::dequantize::run(&args),
        Command::MergeMtp(args) => commands::mend::merge_mtp(&args),
        Command::FixConfig(args) => commands::mend::fix_config(&args),
        Command::Replay(args) => commands::replay::run(&args, threads),
        Command::Doctor(args) => commands::doctor::run(&args, threads),
        Command::Bench(BenchCommand::Kernels(args)) => commands::bench::kernels(&args, threads),
        Command::Bench(BenchCommand::Model(args)) => commands::bench::model(&args, threads),
        Command::Bench(BenchCommand::Gptq(args)) => commands::bench::gptq(&args, threads),
        Command::Bench(BenchCommand::Serve(args)) => commands::bench_serve::run(&args),
        Command::Bench(BenchCommand::Grid(args)) => commands::bench_grid::run(&args, cli.threads),
        Command::Bench(BenchCommand::PrefixCost(args)) => commands::prefix_cost::run(&args, threads),
        Command::Bench(BenchCommand::Exactness(args)) => commands::exactness::run(&args, threads),
        Command::Bench(BenchCommand::Step(args)) => commands::steps::run(&args, threads),
        Command::Bench(BenchCommand::Parity(args)) => commands::parity::run(&args, threads),
        Command::Bench(BenchCommand::Soak(args)) => commands::soak::run(&args, cli.threads),
    }
}
