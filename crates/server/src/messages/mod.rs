//! `/v1/messages`: Anthropic's API, mapped onto a chat job.

mod request;
mod stream;
mod whole;

use std::sync::Arc;

use axum::body::Body;
use axum::http::Response;
use bytes::Bytes;

use crate::app::App;
use crate::error::ApiError;
use crate::fields::parse_object;
use crate::json::Json;

/// Serves one request.
///
/// # Errors
/// Everything that is known before the first token.
pub async fn serve(app: Arc<App>, body: Bytes) -> Result<Response<Body>, ApiError> {
    let reader = Arc::clone(&app);
    let prepared = crate::off_thread(body.len(), move || {
        let job = request::read(&parse_object(&body)?, &reader, true)?;
        job.prepare(&reader, "msg_")
    });
    let submitted = prepared.await?.submit(&app)?;
    if submitted.plan.stream {
        let wire = stream::Writer::new(Arc::clone(&app), &submitted.plan);
        crate::single::respond(app, submitted, wire).await
    } else {
        whole::respond(&app, submitted).await
    }
}

/// `POST /v1/messages/count_tokens`.
///
/// # Errors
/// What the body or the template refuses.
pub async fn count_tokens(app: Arc<App>, body: Bytes) -> Result<Response<Body>, ApiError> {
    crate::off_thread(body.len(), move || {
        let job = request::read(&parse_object(&body)?, &app, false)?;
        let count = job.prompt(&app)?.ids.len();
        let mut body = Vec::new();
        Json::new(&mut body).raw("{\"input_tokens\":").number(count as u64).raw("}");
        Ok(crate::json_response(body))
    })
    .await
}
