//! `/v1/messages`: Anthropic's API, mapped onto a chat job.

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
use crate::error::ApiError;
use crate::fields::parse_object;
use crate::json::Json;
use crate::work::{Weight, off_thread};

/// Serves one request.
///
/// # Errors
/// Everything that is known before the first token.
pub async fn serve(app: Arc<App>, body: Bytes) -> Result<Response<Body>, ApiError> {
    let read = |map: &Map<String, Value>, app: &App| Ok((request::read(map, app, true)?, ()));
    let (ready, ()) = make_ready(&app, body, read, "msg_").await?;
    let submitted = ready.submit(&app)?;
    let estimate = submitted.run.estimate();
    let response = if submitted.plan.stream {
        let wire = stream::Writer::new(Arc::clone(&app), &submitted.plan);
        crate::single::respond(app, submitted, wire).await?
    } else {
        whole::respond(&app, submitted).await?
    };
    Ok(estimate.stamp(response))
}

/// `POST /v1/messages/count_tokens`.
///
/// # Errors
/// What the body or the template refuses.
pub async fn count_tokens(app: Arc<App>, body: Bytes) -> Result<Response<Body>, ApiError> {
    let (bytes, reader) = (body.len(), Arc::clone(&app));
    let job = off_thread(Weight::Body(bytes), move |_| request::read(&parse_object(&body)?, &reader, false)).await?;
    off_thread(job.weight(bytes), move |gone| {
        let count = job.prompt(&app, None, gone)?.ids.len();
        let mut body = Vec::new();
        Json::new(&mut body).raw("{\"input_tokens\":").number(count as u64).raw("}");
        Ok(crate::json_response(body))
    })
    .await
}
