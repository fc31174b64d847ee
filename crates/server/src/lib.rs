//! The HTTP front end: OpenAI's and Anthropic's APIs, streams, metrics, flags.
//!
//! The life of a request: [`router`] (limits, keys) -> an API's reader (`chat`, `completions`, `messages`, `responses`)
//! -> [`prepare`] (template, tokens, pictures) -> [`run`] (tickets of the [`engine`]) -> [`answer`] (stop strings, parser)
//! -> the API's writer -> one frame a batch of tokens. Two invariants hold along it:
//!
//! * Whatever ends an exchange drops its tickets, and a dropped ticket frees the engine's resources within one step.
//! * A streamed answer and a whole one are the same events, joined later or sooner.

#![forbid(unsafe_code)]

pub mod answer;
pub mod app;
pub mod chat;
pub mod completions;
mod connections;
mod each;
pub mod engine;
pub mod error;
pub mod fetch;
pub mod fields;
pub mod flags;
pub mod frames;
pub mod json;
pub mod live;
pub mod loading;
pub mod logprobs;
pub mod messages;
pub mod metrics;
pub mod open;
mod outbox;
pub mod plan;
pub mod port;
pub mod prepare;
pub mod responses;
pub mod router;
pub mod run;
pub mod sampling;
pub mod scripted;
pub mod serve;
pub mod single;
pub mod sizing;
pub mod small;
pub mod start;
pub mod stops;
mod streamed;
pub mod tls;
pub mod usage;
mod work;

use axum::body::Body;
use axum::http::{HeaderValue, Response, header};

/// What answers say of their maker.
pub const FINGERPRINT: &str = concat!("glimmer-", env!("CARGO_PKG_VERSION"));

/// A response of JSON.
pub(crate) fn json_response(body: Vec<u8>) -> Response<Body> {
    let mut response = Response::new(Body::from(body));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// A response of server-sent events that no proxy should hold back.
pub(crate) fn event_stream(body: frames::Produced) -> Response<Body> {
    let mut response = body.into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}
