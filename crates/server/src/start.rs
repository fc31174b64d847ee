//! From a bound port to the end of service.
//!
//! The port answers 503 while the model is loaded, then the server takes it over. A signal ends each phase: loading at once,
//! serving through a drain. Invariant: `/health` says 200 only while requests are taken and finished.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::app::{App, Options};
use crate::engine::{Engine, Model};
use crate::loading::Loading;
use crate::port::Port;
use crate::serve::{ServeError, serve, stop_signal};

/// A model that is ready to be served.
pub struct Loaded {
    /// Where requests go.
    pub engine: Arc<dyn Engine>,
    /// What the front end knows of the model.
    pub model: Model,
}

impl fmt::Debug for Loaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loaded").field("model", &self.model.served_names).finish_non_exhaustive()
    }
}

/// Why the server ended.
#[derive(Debug, thiserror::Error)]
pub enum StartError<L> {
    /// The model could not be loaded.
    #[error(transparent)]
    Load(L),
    /// Loading panicked.
    #[error("loading the model failed inside; the log has the reason")]
    LoadPanicked,
    /// Serving ended with an error.
    #[error(transparent)]
    Serve(#[from] ServeError),
}

/// Loads with `load` and serves until a signal asks to stop.
///
/// # Errors
/// [`StartError`]; a signal is none.
pub async fn run<L: Send + 'static>(
    options: Options,
    port: Port,
    load: impl FnOnce() -> Result<Loaded, L> + Send + 'static,
) -> Result<(), StartError<L>> {
    let loading = Loading::start(&port).map_err(ServeError::Serve)?;
    let mut stop = Box::pin(stop_signal());
    let loaded = tokio::select! {
        loaded = tokio::task::spawn_blocking(load) => match loaded {
            Ok(loaded) => loaded.map_err(StartError::Load)?,
            Err(error) => {
                tracing::error!(%error, "loading the model");
                return Err(StartError::LoadPanicked);
            }
        },
        signal = &mut stop => {
            signal.map_err(ServeError::Serve)?;
            tracing::info!("Stopped while the model was being loaded");
            return Ok(());
        }
    };
    let app = App::new(loaded.engine, loaded.model, options);
    loading.stop().await;
    tracing::info!("Application startup complete. Serving {} on {}", app.model.served_names.join(", "), port.url());
    let stop = async {
        if let Err(error) = stop.await {
            // Without signals the server runs until it is killed, which is better than not at all.
            tracing::error!(%error, "waiting for signals");
            std::future::pending::<()>().await;
        }
    };
    let engine = Arc::clone(&app.engine);
    let served = serve(app, port, stop).await;
    // An engine that hangs in its step must not keep the process.
    let ended = tokio::task::spawn_blocking(move || engine.shutdown());
    if tokio::time::timeout(LAST_STEP, ended).await.is_err() {
        tracing::warn!("the engine's last step did not end in {} s; leaving it", LAST_STEP.as_secs());
    }
    Ok(served?)
}

/// Time for the engine's last step at the end.
const LAST_STEP: Duration = Duration::from_secs(5);
