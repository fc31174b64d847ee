//! The life of the server: bind, serve, watch the engine, drain.
//!
//! The port is bound before anything is loaded, so that a busy port fails at once. On the signal to stop new requests are
//! refused while running ones go on, up to a limit of time; the listener stays open meanwhile, because a balancer learns
//! from `/health` that it has to go elsewhere.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use crate::app::App;
use crate::port::Port;
pub use crate::port::bind;
use crate::router::router;

/// Why the server ended.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The address cannot be listened on.
    #[error("cannot listen on {host}:{port}: {source}; choose another --host or --port, or stop what uses it")]
    Bind {
        /// Host as given.
        host: String,
        /// Port as given.
        port: u16,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// The listener failed later.
    #[error("serving: {0}")]
    Serve(#[from] std::io::Error),
    /// The engine ended.
    #[error("the engine has ended: {0}")]
    EngineDead(String),
}

/// How often the engine is looked at.
const LOOK: Duration = Duration::from_millis(100);
/// How often throughput is logged.
const LOG: Duration = Duration::from_secs(10);
/// Time for the last responses to reach their clients.
const FLUSH: Duration = Duration::from_millis(500);

/// Serves until `stop` is ready or the engine ends.
///
/// # Errors
/// [`ServeError::EngineDead`] if the engine ends, [`ServeError::Serve`] if the listener fails.
pub async fn serve(
    app: Arc<App>,
    port: impl Into<Port>,
    stop: impl Future<Output = ()> + Send + 'static,
) -> Result<(), ServeError> {
    let (close, closed) = tokio::sync::oneshot::channel::<()>();
    let closed = async {
        // An error is the sender's end, which is the same message.
        let _closed = closed.await;
    };
    let mut server = port.into().start(router(Arc::clone(&app)), closed)?;
    if app.options.log_stats {
        tokio::spawn(log_throughput(Arc::downgrade(&app)));
    }
    let result = tokio::select! {
        ended = &mut server => {
            return ended.map_err(|error| std::io::Error::other(error).into());
        }
        reason = engine_death(&app) => {
            app.drain();
            Err(ServeError::EngineDead(reason))
        }
        () = stop => {
            drain(&app).await;
            Ok(())
        }
    };
    let _receiver_may_be_gone = close.send(());
    if tokio::time::timeout(FLUSH, &mut server).await.is_err() {
        // Idle connections that clients keep open, or answers beyond the limit of time.
        server.abort();
    }
    result
}

async fn drain(app: &App) {
    app.drain();
    let running = app.in_flight();
    let timeout = app.options.shutdown_timeout;
    tracing::info!(running, timeout_s = timeout.as_secs_f64(), "Shutting down: waiting for running requests");
    let aborting = || tracing::warn!(running = app.in_flight(), "Shutting down: aborting what is still running");
    tokio::select! {
        waited = tokio::time::timeout(timeout, app.idle()) => {
            if waited.is_err() {
                aborting();
            }
        }
        // Whoever asks twice does not want to wait.
        _ = stop_signal() => aborting(),
    }
}

async fn engine_death(app: &App) -> String {
    let mut recording = true;
    loop {
        let status = app.engine.status();
        if let Some(error) = status.record_error.filter(|_| recording) {
            tracing::error!(error, "--record-steps: steps are no longer recorded");
            recording = false;
        }
        if let Some(reason) = status.dead {
            tracing::error!(reason, "the engine has ended");
            return reason;
        }
        if status.stuck {
            let reason = "a step did not end within --execute-model-timeout, as if the device hung";
            tracing::error!(reason, "the engine is stuck");
            return reason.to_owned();
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// Ready when the process is asked to stop (SIGTERM, SIGINT).
///
/// # Errors
/// When the signals cannot be listened to.
pub async fn stop_signal() -> std::io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    Ok(())
}

/// The lines that scripts look for when a server starts.
#[must_use]
pub fn capacity_lines(cache_tokens: u64, max_model_len: u64) -> [String; 2] {
    let concurrency = cache_tokens as f64 / max_model_len.max(1) as f64;
    [
        format!("GPU KV cache size: {} tokens", grouped(cache_tokens)),
        format!("Maximum concurrency for {} tokens per request: {concurrency:.2}x", grouped(max_model_len)),
    ]
}

/// A number with commas.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Readings of the counters that throughput is computed from.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Reading {
    /// Prompt tokens.
    pub prompt: u64,
    /// Generated tokens.
    pub generated: u64,
    /// Verified drafts.
    pub drafts: u64,
    /// Drafted tokens.
    pub drafted: u64,
    /// Accepted tokens.
    pub accepted: u64,
}

async fn log_throughput(app: std::sync::Weak<App>) {
    let mut before = Reading::default();
    let mut positions: Vec<u64> = Vec::new();
    loop {
        tokio::time::sleep(LOG).await;
        let Some(app) = app.upgrade() else { return };
        let (prompt, generated) = app.metrics.throughput();
        let counters = app.engine.counters();
        let now = Reading {
            prompt,
            generated,
            drafts: counters.drafts,
            drafted: counters.draft_tokens,
            accepted: counters.accepted(),
        };
        let idle = now == before && app.in_flight() == 0;
        if !idle {
            let status = app.engine.status();
            let rate = (counters.prefix_hits, counters.prefix_queries);
            tracing::info!("{}", throughput_line(before, now, LOG, &status, rate));
            let each: Vec<u64> = counters
                .accepted_by_position
                .iter()
                .enumerate()
                .map(|(index, &count)| count.saturating_sub(positions.get(index).copied().unwrap_or(0)))
                .collect();
            if let Some(line) = speculation_line(before, now, LOG, &each) {
                tracing::info!("{line}");
            }
        }
        before = now;
        positions = counters.accepted_by_position;
    }
}

/// The line with throughput and queue lengths.
#[must_use]
pub fn throughput_line(
    before: Reading,
    now: Reading,
    elapsed: Duration,
    status: &crate::engine::Status,
    (hits, queries): (u64, u64),
) -> String {
    let seconds = elapsed.as_secs_f64();
    let rate = |now: u64, before: u64| now.saturating_sub(before) as f64 / seconds;
    let hit_rate = if queries == 0 { 0.0 } else { 100.0 * hits as f64 / queries as f64 };
    format!(
        "Avg prompt throughput: {:.1} tokens/s, Avg generation throughput: {:.1} tokens/s, Running: {} reqs, Waiting: {} \
         reqs, GPU KV cache usage: {:.1}%, Prefix cache hit rate: {hit_rate:.1}%",
        rate(now.prompt, before.prompt),
        rate(now.generated, before.generated),
        status.running,
        status.waiting_capacity + status.waiting_deferred,
        100.0 * status.kv_usage,
    )
}

/// The line about drafts; none if there were none.
#[must_use]
pub fn speculation_line(before: Reading, now: Reading, elapsed: Duration, by_position: &[u64]) -> Option<String> {
    let drafts = now.drafts.saturating_sub(before.drafts);
    if drafts == 0 {
        return None;
    }
    let (drafted, accepted) =
        (now.drafted.saturating_sub(before.drafted), now.accepted.saturating_sub(before.accepted));
    let seconds = elapsed.as_secs_f64();
    let rates: Vec<String> = by_position.iter().map(|&count| format!("{:.3}", count as f64 / drafts as f64)).collect();
    Some(format!(
        "SpecDecoding metrics: Mean acceptance length: {:.2}, Accepted throughput: {:.2} tokens/s, Drafted throughput: \
         {:.2} tokens/s, Accepted: {accepted} tokens, Drafted: {drafted} tokens, Per-position acceptance rate: {}, Avg \
         Draft acceptance rate: {:.1}%",
        1.0 + accepted as f64 / drafts as f64,
        accepted as f64 / seconds,
        drafted as f64 / seconds,
        rates.join(", "),
        100.0 * accepted as f64 / drafted.max(1) as f64,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Status;

    #[test]
    fn the_lines_that_scripts_look_for() {
        assert_eq!(
            capacity_lines(6_194_528, 262_144),
            ["GPU KV cache size: 6,194,528 tokens", "Maximum concurrency for 262,144 tokens per request: 23.63x",]
        );
        let now = Reading { prompt: 1000, generated: 500, drafts: 100, drafted: 200, accepted: 106 };
        let status = Status { running: 3, waiting_capacity: 1, kv_usage: 0.125, ..Status::default() };
        assert_eq!(
            throughput_line(Reading::default(), now, Duration::from_secs(10), &status, (1, 4)),
            "Avg prompt throughput: 100.0 tokens/s, Avg generation throughput: 50.0 tokens/s, Running: 3 reqs, Waiting: 1 \
             reqs, GPU KV cache usage: 12.5%, Prefix cache hit rate: 25.0%"
        );
        assert_eq!(
            speculation_line(Reading::default(), now, Duration::from_secs(10), &[70, 36]).unwrap(),
            "SpecDecoding metrics: Mean acceptance length: 2.06, Accepted throughput: 10.60 tokens/s, Drafted throughput: \
             20.00 tokens/s, Accepted: 106 tokens, Drafted: 200 tokens, Per-position acceptance rate: 0.700, 0.360, Avg \
             Draft acceptance rate: 53.0%"
        );
        assert_eq!(speculation_line(now, now, Duration::from_secs(10), &[]), None);
    }

    #[test]
    fn a_busy_port_is_an_error_that_names_it() {
        let taken = bind(Some("127.0.0.1"), 0).unwrap();
        let port = taken.local_addr().unwrap().port();
        let error = bind(Some("127.0.0.1"), port).unwrap_err().to_string();
        assert!(error.contains(&format!("127.0.0.1:{port}")), "{error}");
        assert!(bind(Some("no.such.host.invalid"), 1).is_err());
    }
}
