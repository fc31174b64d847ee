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

use crate::app::App;
use crate::error::ApiError;
use crate::fields::parse_object;

pub use job::{Job, Submitted};

/// Serves one request.
///
/// # Errors
/// Everything that is known before the first token.
pub async fn serve(app: Arc<App>, body: Bytes, request_id: Option<String>) -> Result<Response<Body>, ApiError> {
    let reader = Arc::clone(&app);
    let prepared = crate::off_thread(body.len(), move || {
        let map = parse_object(&body)?;
        let mut job = request::read(&map, &reader)?;
        job.common.request_id = request_id.or(job.common.request_id);
        job.prepare(&reader, "chatcmpl-")
    });
    let submitted = prepared.await?.submit(&app)?;
    if submitted.plan.stream { stream::respond(app, submitted).await } else { whole::respond(app, submitted).await }
}
