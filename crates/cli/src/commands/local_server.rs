//! A server inside this process, for measurements without another one.

use std::{sync::Arc, thread::JoinHandle};

use anyhow::{Context as _, anyhow};
use glimmer_server::{app::App, serve::bind};
use tokio::sync::oneshot;

use super::serve::{Prepared, read_flags, runtime};

/// A server on a free port of this machine; dropped, it ends.
#[derive(Debug)]
pub(crate) struct LocalServer {
    /// Its URL.
    pub(crate) url: String,
    /// Where it computes.
    pub(crate) place: String,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl LocalServer {
    /// Loads what the flags of `serve` say and serves it. Host, port and certificates do not count.
    ///
    /// # Errors
    /// What is wrong with the flags or the model.
    pub(crate) fn start(arguments: &[String], threads: Option<u16>) -> anyhow::Result<Self> {
        let (mut settings, mut config) = read_flags(arguments, threads).map_err(|error| anyhow!("{error}"))?;
        config.options.log_stats = false;
        let prepared = Prepared::open(&mut settings, config)?;
        let (place, options) = (prepared.place_name(), prepared.config.options.clone());
        let loaded = prepared.load()?;
        let listener = bind(Some("127.0.0.1"), 0)?;
        let url = format!("http://{}", listener.local_addr().context("the server has no address")?);
        let runtime = runtime(&options.media_domains)?;
        let (stop, stopped) = oneshot::channel::<()>();
        let thread = std::thread::spawn(move || {
            let engine = Arc::clone(&loaded.engine);
            let served = runtime.block_on(async {
                let app = App::new(loaded.engine, loaded.model, options);
                let stopped = async {
                    // An error is the end of who would send.
                    let _ended = stopped.await;
                };
                glimmer_server::serve::serve(app, listener, stopped).await
            });
            if let Err(error) = served {
                crate::failure::print(&error.into());
            }
            engine.shutdown();
        });
        Ok(Self { url, place, stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for LocalServer {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic has been printed by its thread.
            drop(thread.join());
        }
    }
}
