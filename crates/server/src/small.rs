//! The small routes: models, tokens, health, counters.

use std::sync::Arc;

use axum::body::Body;
use axum::http::{HeaderValue, Response, StatusCode, header};
use bytes::Bytes;
use glimmer_text::Budget;
use serde_json::Value;

use crate::app::App;
use crate::chat::request::{check_model, read as read_chat};
use crate::error::ApiError;
use crate::fields::{Fields, Problems, parse_object};
use crate::json::Json;
use crate::metrics;
use crate::sampling::check_vocabulary;
use crate::work::{Weight, off_thread};

/// `GET /`: a page to talk to the model. It loads nothing from elsewhere, and its policy says so to the browser.
#[must_use]
pub fn page() -> Response<Body> {
    const POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; \
                          connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
    let mut response = Response::new(Body::from(include_str!("page.html")));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8"));
    headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

/// `GET /v1/models`.
#[must_use]
pub fn models(app: &App) -> Response<Body> {
    let mut body = Vec::new();
    let mut json = Json::new(&mut body);
    json.raw("{\"object\":\"list\",\"data\":").list(&app.model.served_names, |json, name| {
        model_card(app, name, json);
    });
    json.raw("}");
    crate::json_response(body)
}

/// `GET /v1/models/{id}`.
///
/// # Errors
/// When no such model is served.
pub fn model(app: &App, id: &str) -> Result<Response<Body>, ApiError> {
    if !app.model.served_names.iter().any(|name| name == id) {
        return Err(ApiError::unknown_model(id));
    }
    let mut body = Vec::new();
    model_card(app, id, &mut Json::new(&mut body));
    Ok(crate::json_response(body))
}

fn model_card(app: &App, name: &str, json: &mut Json<'_>) {
    json.raw("{\"id\":").text(name).raw(",\"object\":\"model\",\"created\":").number(app.started);
    json.raw(",\"owned_by\":\"glimmer\",\"root\":").text(&app.model.root).raw(",\"parent\":null,\"max_model_len\":");
    json.number(app.model.max_model_len as u64).raw(",\"permission\":[{\"id\":").text(&format!("modelperm-{name}"));
    json.raw(",\"object\":\"model_permission\",\"created\":").number(app.started);
    json.raw(
        ",\"allow_create_engine\":false,\"allow_sampling\":true,\"allow_logprobs\":true,\"allow_search_indices\":false,\
         \"allow_view\":true,\"allow_fine_tuning\":false,\"organization\":\"*\",\"group\":null,\"is_blocking\":false}]}",
    );
}

/// `POST /tokenize`: of a prompt or of a conversation.
///
/// # Errors
/// What the body or the template refuses.
pub async fn tokenize(app: Arc<App>, body: Bytes) -> Result<Response<Body>, ApiError> {
    off_thread(Weight::Text(body.len()), move |gone| {
        let map = parse_object(&body)?;
        let problems = Problems::default();
        let fields = Fields::new(&map, &problems);
        let tokenizer = app.model.format.tokenizer();
        let ids = if fields.value("messages").is_some() {
            let mut job = read_chat(&map, &app)?;
            job.common.truncate = None;
            job.prompt(&app, None, gone)?.ids
        } else {
            check_model(&fields, &app)?;
            let Some(prompt) = fields.text("prompt") else {
                if fields.value("prompt").is_none() {
                    problems.add("prompt", "the field is required (or messages)");
                }
                return problems.check().and(Err(ApiError::internal()));
            };
            tokenizer.encode_within(prompt, &[], Budget { tokens: None, abandoned: Some(gone) })?
        };
        let with_texts = fields.flag("return_token_strs").unwrap_or(false);
        problems.check()?;
        let mut body = Vec::new();
        let mut json = Json::new(&mut body);
        json.raw("{\"count\":").number(ids.len() as u64);
        json.raw(",\"max_model_len\":").number(app.model.max_model_len as u64).raw(",\"tokens\":");
        json.list(&ids, |json, &id| {
            json.number(u64::from(id));
        });
        json.raw(",\"token_strs\":");
        if with_texts {
            json.list(&ids, |json, &id| {
                json.text(&tokenizer.decode(&[id], false));
            });
        } else {
            json.raw("null");
        }
        json.raw("}");
        Ok(crate::json_response(body))
    })
    .await
}

/// `POST /detokenize`.
///
/// # Errors
/// When the tokens are not.
pub async fn detokenize(app: Arc<App>, body: Bytes) -> Result<Response<Body>, ApiError> {
    off_thread(Weight::Text(body.len()), move |_| text_of(&app, &body)).await
}

fn text_of(app: &App, body: &[u8]) -> Result<Response<Body>, ApiError> {
    let map = parse_object(body)?;
    let problems = Problems::default();
    let fields = Fields::new(&map, &problems);
    check_model(&fields, app)?;
    if fields.value("tokens").is_none() {
        fields.missing("tokens");
    }
    let ids = fields.token_ids("tokens").unwrap_or_default();
    problems.check()?;
    check_vocabulary("tokens", &ids, app)?;
    let mut body = Vec::new();
    let text = app.model.format.tokenizer().decode(&ids, false);
    Json::new(&mut body).raw("{\"prompt\":").text(&text).raw("}");
    Ok(crate::json_response(body))
}

/// `GET /health`: 200 while requests are taken and finished.
#[must_use]
pub fn health(app: &App) -> Response<Body> {
    let status = app.engine.status();
    let healthy = status.dead.is_none() && !status.stuck && !app.is_draining();
    empty(if healthy { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE })
}

/// `GET /ping`.
#[must_use]
pub fn ping(app: &App) -> Response<Body> {
    health(app)
}

/// `GET /metrics`.
#[must_use]
pub fn metrics(app: &App) -> Response<Body> {
    let text = app.metrics.render(&app.engine.status(), &app.engine.counters());
    let mut response = Response::new(Body::from(text));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(metrics::CONTENT_TYPE));
    response
}

/// `GET /version`.
#[must_use]
pub fn version() -> Response<Body> {
    let mut body = Vec::new();
    Json::new(&mut body).raw("{\"version\":").text(env!("CARGO_PKG_VERSION")).raw("}");
    crate::json_response(body)
}

/// `GET /load`.
#[must_use]
pub fn load(app: &App) -> Response<Body> {
    let mut body = Vec::new();
    Json::new(&mut body).raw("{\"server_load\":").number(app.in_flight() as u64).raw("}");
    crate::json_response(body)
}

/// `POST /reset_prefix_cache`.
///
/// # Errors
/// Outside development the route does not exist.
pub fn reset_prefix_cache(app: &App) -> Result<Response<Body>, ApiError> {
    if !app.options.development {
        return Err(ApiError::unknown_route());
    }
    Ok(empty(if app.engine.reset_prefix_cache() { StatusCode::OK } else { StatusCode::CONFLICT }))
}

/// `GET /openapi.json`.
#[must_use]
pub fn openapi() -> Response<Body> {
    crate::json_response(OPENAPI.as_bytes().to_vec())
}

/// Description of all routes.
pub const OPENAPI: &str = include_str!("openapi.json");

/// The description as a value.
#[must_use]
pub fn openapi_value() -> Value {
    serde_json::from_str(OPENAPI).unwrap_or(Value::Null)
}

fn empty(status: StatusCode) -> Response<Body> {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = status;
    response
}
