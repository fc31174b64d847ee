//! The server under test: its process, its memory, its metrics.

use std::ffi::OsString;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::http::{Request, exchange};
use crate::error::BenchError;

/// Key that the server asks for.
pub(super) const KEY: &str = "soak";

/// A running server. Killed when dropped.
#[derive(Debug)]
pub(super) struct Server {
    child: Child,
    pub(super) address: SocketAddr,
}

/// Figures of `/metrics`.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Figures {
    pub(super) running: f64,
    pub(super) waiting: f64,
    /// Share of the pages that running sequences hold.
    pub(super) page_use: f64,
    pub(super) preemptions: f64,
    pub(super) prefix_hits: f64,
    pub(super) prefix_queries: f64,
    pub(super) image_hits: f64,
    pub(super) accepted_drafts: f64,
    pub(super) generated_tokens: f64,
    /// Ended by an error of the engine.
    pub(super) errors: f64,
    /// Ended because their client had gone.
    pub(super) aborts: f64,
}

impl Figures {
    fn read(text: &str) -> Self {
        let value = |name: &str, label: &str| -> f64 {
            let named = |line: &&str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with('{'));
            let lines = text.lines().filter(named).filter(|line| line.contains(label));
            lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
        };
        Self {
            running: value("vllm:num_requests_running", ""),
            waiting: value("vllm:num_requests_waiting", ""),
            page_use: value("vllm:kv_cache_usage_perc", ""),
            preemptions: value("vllm:num_preemptions_total", ""),
            prefix_hits: value("vllm:prefix_cache_hits_total", ""),
            prefix_queries: value("vllm:prefix_cache_queries_total", ""),
            image_hits: value("vllm:mm_cache_hits_total", ""),
            accepted_drafts: value("vllm:spec_decode_num_accepted_tokens_total", ""),
            generated_tokens: value("vllm:generation_tokens_total", ""),
            errors: value("vllm:request_success_total", "finished_reason=\"error\""),
            aborts: value("vllm:request_success_total", "finished_reason=\"abort\""),
        }
    }

    /// Whether nothing runs, nothing waits and nothing is held.
    pub(super) fn idle(&self) -> bool {
        self.running + self.waiting + self.page_use == 0.0
    }
}

impl Server {
    /// Starts `program serve` on a free port and waits until it is healthy.
    pub(super) fn start(program: &Path, flags: &[OsString]) -> Result<Self, BenchError> {
        let failed = |error: std::io::Error| BenchError::model(program.display().to_string(), error);
        let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
        let address = free.map_err(|error| BenchError::model("a free port", error))?;
        let mut command = Command::new(program);
        command.arg("serve").args(["--host", "127.0.0.1", "--api-key", KEY, "--uvicorn-log-level", "warning"]);
        command.args(["--port", &address.port().to_string()]).args(flags);
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().map_err(failed)?;
        let mut server = Self { child, address };
        while !server.get("/health").is_ok_and(|(status, _)| status == 200) {
            if let Some(code) = server.child.try_wait().map_err(failed)? {
                let problem = format!("serve ended before it was ready, {code}; its own words stand above");
                return Err(BenchError::model(program.display().to_string(), problem));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(server)
    }

    pub(super) fn get(&self, path: &str) -> std::io::Result<(u16, Vec<u8>)> {
        exchange(self.address, &Request { method: "GET", path, kind: "text/plain", key: KEY, body: b"" })
    }

    pub(super) fn figures(&self) -> Result<Figures, String> {
        match self.get("/metrics") {
            Ok((200, text)) => Ok(Figures::read(&String::from_utf8_lossy(&text))),
            Ok((status, _)) => Err(format!("/metrics answered {status}")),
            Err(error) => Err(format!("/metrics: {error}")),
        }
    }

    /// Polls the figures until they are as wanted; the last ones if that takes longer than `patience`.
    pub(super) fn figures_until(
        &self,
        patience: Duration,
        wanted: impl Fn(&Figures) -> bool,
    ) -> Result<Figures, String> {
        let end = Instant::now() + patience;
        loop {
            let figures = self.figures()?;
            if wanted(&figures) || Instant::now() > end {
                return Ok(figures);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Resident memory in MiB; `None` where the system does not tell.
    pub(super) fn resident_mib(&self) -> Option<f64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).ok()?;
        let line = status.lines().find(|line| line.starts_with("VmRSS:"))?;
        line.split_whitespace().nth(1)?.parse::<f64>().ok().map(|kib| kib / 1024.0)
    }

    /// Asks the process to end; how it ended, if not well.
    pub(super) fn stop(mut self) -> Result<(), String> {
        let pid = self.child.id().to_string();
        let told = Command::new("kill").args(["-TERM", &pid]).status();
        if !told.is_ok_and(|status| status.success()) {
            return Err("the server could not be sent SIGTERM".to_owned());
        }
        match self.child.wait() {
            Ok(code) if code.success() => Ok(()),
            Ok(code) => Err(format!("the server ended with {code} after SIGTERM")),
            Err(error) => Err(format!("waiting for the server: {error}")),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ended = self.child.kill();
        let _reaped = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_read_by_name_and_label() {
        let text = "# TYPE x counter\nvllm:num_requests_running{a=\"b\"} 3\nvllm:num_requests_waiting{} 1\n\
                    vllm:num_requests_waiting_by_reason{} 7\nvllm:request_success_total{finished_reason=\"abort\"} 5\n\
                    vllm:request_success_total{finished_reason=\"error\"} 2\n";
        let figures = Figures::read(text);
        assert_eq!((figures.running, figures.waiting, figures.aborts, figures.errors), (3.0, 1.0, 5.0, 2.0));
        assert!(!figures.idle() && Figures::default().idle());
    }
}
