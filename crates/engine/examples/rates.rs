//! Tokens a second of a model directory: prompts, and decoding at 1, 4 and 16 sequences for each draft depth.
//!
//! ```text
//! cargo run --release -p glimmer-engine --example rates -- models/micro-bf16 [prompt tokens] [new tokens] [threads]
//! ```
#![allow(clippy::print_stdout, reason = "a program that prints")]

use std::error::Error;

use glimmer_checkpoint::Checkpoint;
use glimmer_engine::{Flow, Generator, Request, Settings};
use glimmer_tensor::cpu::Cpu;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let directory = arguments.next().unwrap_or_else(|| "models/micro-bf16".to_owned());
    let mut number = |default: usize| arguments.next().map_or(Ok(default), |a| a.parse());
    let (prompt, new) = (number(256)?, number(128)?);
    let threads = number(std::thread::available_parallelism().map_or(1, usize::from))?;
    let checkpoint = Checkpoint::open(&directory)?;
    let has_drafts = checkpoint.config().text.mtp_layer().is_some();
    println!("{directory}: prompts of {prompt} tokens, {new} new tokens each, {threads} thread(s)");
    println!("{:>9} {:>6} {:>14} {:>14} {:>12}", "sequences", "depth", "prefill tok/s", "decode tok/s", "tokens/step");
    for sequences in [1, 4, 16] {
        for depth in if has_drafts { 0..=2 } else { 0..=0 } {
            let context = Some(prompt + new + 1);
            let settings = Settings { sequences, depth, context, rows: 256, ..Settings::default() };
            let mut generator = Generator::load(Cpu::new(threads), &checkpoint, &settings)?;
            let vocab = generator.vocabulary();
            for s in 0..sequences {
                let tokens = (0..prompt).map(|t| ((t * 7919 + s * 104_729) % (vocab / 2)) as u32).collect();
                generator.submit(Request { ignore_eos: true, ..Request::new(tokens, new) })?;
            }
            generator.run(&mut |_| Flow::Continue)?;
            let stats = generator.stats();
            println!(
                "{sequences:>9} {depth:>6} {:>14.0} {:>14.0} {:>12.2}",
                stats.prefill_rate(),
                stats.decode_rate(),
                stats.drafts.mean_length()
            );
        }
    }
    Ok(())
}
