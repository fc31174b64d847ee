//! `/v1/responses`: the part of OpenAI's responses API that needs no memory between requests.
//!
//! Nothing is stored, so a `previous_response_id` is never found, nor is a response that somebody asks for later.

mod request;
mod stream;
mod whole;

use std::sync::Arc;

use axum::body::Body;
use axum::http::Response;
use bytes::Bytes;
use serde_json::{Map, Value};

use crate::app::App;
use crate::chat::job::make_ready;
use crate::error::{ApiError, shorten};

/// Serves one request.
///
/// # Errors
/// Everything that is known before the first token.
pub async fn serve(app: Arc<App>, body: Bytes) -> Result<Response<Body>, ApiError> {
    let read = |map: &Map<String, Value>, app: &App| {
        let job = request::read(map, app)?;
        let echo = whole::Echo::new(map, &job);
        Ok((job, echo))
    };
    let (ready, echo) = make_ready(&app, body, read, "resp_").await?;
    let submitted = ready.submit(&app)?;
    let estimate = submitted.run.estimate();
    let response = if submitted.plan.stream {
        let wire = stream::Writer::new(Arc::clone(&app), &submitted.plan, echo);
        crate::single::respond(app, submitted, wire).await?
    } else {
        whole::respond(&app, submitted, &echo).await?
    };
    Ok(estimate.stamp(response))
}

/// `GET /v1/responses/{id}` and its `cancel`: nothing is stored.
#[must_use]
pub fn stored(id: &str) -> ApiError {
    ApiError::not_found(
        "response_id",
        format!("Response with id '{}' not found: responses are not stored", shorten(id)),
    )
}
