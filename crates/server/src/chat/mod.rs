//! `/v1/chat/completions`.
//!
//! [`request`] reads the body into a [`Job`], [`job`] makes it a prompt and submits it, [`whole`] and [`stream`] write the
//! answer. The other conversational APIs make a [`Job`], too, and write their answers themselves.

pub mod job;
pub mod request;
pub mod stream;
pub mod whole;

use std::sync::Arc;

use axum::body::Body;
use axum::http::Response;
use bytes::Bytes;
use serde_json::{Map, Value};

use crate::app::App;
use crate::error::ApiError;

pub use job::{Job, Submitted};

/// Serves one request.
///
/// # Errors
/// Everything that is known before the first token.
pub async fn serve(app: Arc<App>, body: Bytes, request_id: Option<String>) -> Result<Response<Body>, ApiError> {
    let read = move |map: &Map<String, Value>, app: &App| {
        let mut job = request::read(map, app)?;
        job.common.request_id = request_id.or(job.common.request_id);
        Ok((job, ()))
    };
    let (ready, ()) = job::make_ready(&app, body, read, "chatcmpl-").await?;
    let submitted = ready.submit(&app)?;
    let (estimate, stream) = (submitted.run.estimate(), submitted.plan.stream);
    let response = if stream { stream::respond(app, submitted).await? } else { whole::respond(app, submitted).await? };
    Ok(estimate.stamp(response))
}
