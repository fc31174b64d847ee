//! Errors as clients see them.
//!
//! One type for every route. Its two bodies are OpenAI's (`{"error": {"message", "type", "param", "code"}}`) and
//! Anthropic's (`{"type": "error", "error": {"type", "message"}}`). Invariant: a message of a 4xx names what the client
//! has to change; a message of a 500 says nothing of the inside, which goes to the log.

use axum::body::Body;
use axum::http::{HeaderValue, Response, StatusCode, header};

use crate::engine::Refusal;
use crate::json::Json;
use glimmer_engine::request::RequestError;
use glimmer_text::TextError;

/// Whose client is asking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// OpenAI's APIs and our own routes.
    OpenAi,
    /// `/v1/messages`.
    Anthropic,
}

/// A refused or failed request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// HTTP status.
    pub status: StatusCode,
    /// OpenAI's `type`.
    pub kind: &'static str,
    /// What is wrong, expected and to be done.
    pub message: String,
    /// Dotted path of the field.
    pub param: Option<String>,
    /// Seconds after which to come back.
    pub retry_after_s: Option<u64>,
}

/// Most characters of client input that an error repeats.
const ECHO: usize = 200;
/// Most problems of a body that an error lists.
const PROBLEMS: usize = 10;

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, message: message.into(), param: None, retry_after_s: None }
    }

    /// The body is not what the route reads: pairs of a dotted path and what is wrong there.
    #[must_use]
    pub fn schema(problems: &[(String, String)]) -> Self {
        let listed: Vec<String> = problems
            .iter()
            .take(PROBLEMS)
            .map(|(path, problem)| if path.is_empty() { problem.clone() } else { format!("{path}: {problem}") })
            .collect();
        let mut message = listed.join("; ");
        if problems.len() > PROBLEMS {
            message.push_str(&format!("; and {} more", problems.len() - PROBLEMS));
        }
        let mut error = Self::new(StatusCode::BAD_REQUEST, "Bad Request", message);
        error.param = problems.first().map(|(path, _)| path.clone()).filter(|path| !path.is_empty());
        error
    }

    /// A value has the right type and cannot be used.
    #[must_use]
    pub fn parameter(param: &str, message: impl Into<String>) -> Self {
        let mut error = Self::new(StatusCode::BAD_REQUEST, "BadRequestError", message);
        error.param = Some(param.to_owned());
        error
    }

    /// The same with other names of fields, where a request was read as one of another API.
    #[must_use]
    pub fn renamed(mut self, names: &[(&str, &str)]) -> Self {
        for (from, to) in names {
            // The client's own words may hold such a name, too.
            if let Some(rest) = self.message.strip_prefix(from) {
                self.message = format!("{to}{rest}");
            }
            self.param = self.param.map(|param| param.replace(from, to));
        }
        self
    }

    /// The prompt and the tokens asked for do not fit the context.
    #[must_use]
    pub fn context(param: &str, max_model_len: usize, prompt: usize, requested: Option<usize>) -> Self {
        let message = match requested {
            Some(requested) => format!(
                "This model's maximum context length is {max_model_len} tokens. However, you requested {requested} output \
                 tokens and your prompt contains {prompt} input tokens, for a total of {} tokens. Please reduce the length \
                 of the input prompt or the number of requested output tokens.",
                prompt.saturating_add(requested)
            ),
            None => format!(
                "This model's maximum context length is {max_model_len} tokens. However, your prompt contains {prompt} \
                 input tokens and leaves no room for output tokens. Please reduce the length of the input prompt."
            ),
        };
        Self::parameter(param, message)
    }

    /// The prompt alone does not fit the context; how many tokens it has beyond what is certain was not counted.
    #[must_use]
    pub fn context_at_least(param: &str, max_model_len: usize, prompt: usize) -> Self {
        let message = format!(
            "This model's maximum context length is {max_model_len} tokens. However, your prompt contains at least {prompt} \
             input tokens and leaves no room for output tokens. Please reduce the length of the input prompt."
        );
        Self::parameter(param, message)
    }

    /// An error between text and tokens, of the field `param`.
    #[must_use]
    pub fn of_text(param: &str, error: TextError) -> Self {
        match error {
            TextError::TooManyTokens { most, at_least } => Self::context_at_least(param, most, at_least),
            error => error.into(),
        }
    }

    /// The model asked for is not served here.
    #[must_use]
    pub fn unknown_model(name: &str) -> Self {
        let message = format!("The model `{}` does not exist.", shorten(name));
        let mut error = Self::new(StatusCode::NOT_FOUND, "NotFoundError", message);
        error.param = Some("model".to_owned());
        error
    }

    /// Something that a path or field names is not kept here.
    #[must_use]
    pub fn not_found(param: &str, message: impl Into<String>) -> Self {
        let mut error = Self::new(StatusCode::NOT_FOUND, "NotFoundError", message);
        error.param = Some(param.to_owned());
        error
    }

    /// No such route.
    #[must_use]
    pub fn unknown_route() -> Self {
        Self::new(StatusCode::NOT_FOUND, "Not Found", "Not Found")
    }

    /// The route has other methods.
    #[must_use]
    pub fn method() -> Self {
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed", "Method Not Allowed")
    }

    /// No or a wrong API key.
    #[must_use]
    pub fn unauthorized() -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "Unauthorized", "Unauthorized")
    }

    /// The body stopped arriving.
    #[must_use]
    pub fn slow_body(pause: std::time::Duration) -> Self {
        let message = format!("nothing of the request's body came for {} seconds", pause.as_secs());
        Self::new(StatusCode::REQUEST_TIMEOUT, "Request Timeout", message)
    }

    /// The body is longer than the limit.
    #[must_use]
    pub fn too_large(limit_bytes: usize) -> Self {
        let message =
            format!("the request body exceeds the limit of {limit_bytes} bytes (server flag --max-request-body-bytes)");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "Payload Too Large", message)
    }

    /// The server is shutting down.
    #[must_use]
    pub fn draining() -> Self {
        let message = "the server is shutting down; send the request to another one";
        let mut error = Self::new(StatusCode::SERVICE_UNAVAILABLE, "Service Unavailable", message);
        error.retry_after_s = Some(1);
        error
    }

    /// The model is not there yet.
    #[must_use]
    pub fn loading() -> Self {
        let mut error = Self::new(StatusCode::SERVICE_UNAVAILABLE, "Service Unavailable", "the model is being loaded");
        error.retry_after_s = Some(1);
        error
    }

    /// Something inside failed; the reason is in the log.
    #[must_use]
    pub fn internal() -> Self {
        let message = "Internal server error; the server's log has the reason";
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "InternalServerError", message)
    }

    /// The engine is gone; a new request meets 503, a running one 500.
    #[must_use]
    pub fn engine_dead(running: bool) -> Self {
        let status = if running { StatusCode::INTERNAL_SERVER_ERROR } else { StatusCode::SERVICE_UNAVAILABLE };
        Self::new(status, "InternalServerError", "The engine has stopped; the server is going down")
    }

    /// A passing failure.
    #[must_use]
    pub fn retryable() -> Self {
        let message = "The request could not be finished; send it again";
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "ServiceUnavailableError", message)
    }

    /// Anthropic's name of this kind of error.
    #[must_use]
    pub fn anthropic_kind(&self) -> &'static str {
        match self.status.as_u16() {
            400 | 405 => "invalid_request_error",
            401 => "authentication_error",
            404 => "not_found_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            503 | 529 => "overloaded_error",
            _ => "api_error",
        }
    }

    /// Appends the JSON body.
    pub fn write(&self, dialect: Dialect, out: &mut Vec<u8>) {
        let mut json = Json::new(out);
        if dialect == Dialect::Anthropic {
            json.raw("{\"type\":\"error\",\"error\":{\"type\":").text(self.anthropic_kind());
            json.raw(",\"message\":").text(&self.message).raw("}}");
            return;
        }
        if self.status == StatusCode::UNAUTHORIZED {
            json.raw("{\"error\":\"Unauthorized\"}");
            return;
        }
        json.raw("{\"error\":{\"message\":").text(&self.message).raw(",\"type\":").text(self.kind);
        json.raw(",\"param\":").optional_text(self.param.as_deref());
        json.raw(",\"code\":").number(u64::from(self.status.as_u16())).raw("}}");
    }

    /// The HTTP response.
    #[must_use]
    pub fn response(&self, dialect: Dialect) -> Response<Body> {
        let mut body = Vec::new();
        self.write(dialect, &mut body);
        let mut response = Response::new(Body::from(body));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(seconds) = self.retry_after_s {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        let message = refusal.to_string();
        match refusal {
            Refusal::Overloaded { retry_after_s, .. } => {
                let mut error = Self::new(StatusCode::SERVICE_UNAVAILABLE, "Service Unavailable", message);
                error.retry_after_s = Some(retry_after_s.max(1));
                error
            }
            Refusal::Dead => Self::engine_dead(false),
            Refusal::Invalid { param, message } => Self::parameter(&param, message),
            Refusal::Retryable(reason) => {
                tracing::warn!(reason, "request refused");
                Self::retryable()
            }
        }
    }
}

impl From<&RequestError> for ApiError {
    fn from(error: &RequestError) -> Self {
        if let RequestError::Excluded(position) = error {
            tracing::warn!(%error, "request failed");
            let message = format!(
                "no token is left at position {position}: the token limits (allowed_token_ids, bad_words, min_tokens) and the \
                 shape of the answer (response_format, structured_outputs, tools) exclude every token; leave one of them out"
            );
            return Self::parameter("allowed_token_ids", message);
        }
        tracing::error!(%error, "request failed");
        match error {
            RequestError::Retryable(_) => Self::retryable(),
            RequestError::Internal(_) | RequestError::Excluded(_) => Self::internal(),
        }
    }
}

impl From<TextError> for ApiError {
    /// Errors between messages and tokens: what the client wrote, or the server's files.
    fn from(error: TextError) -> Self {
        match &error {
            TextError::Message { path, expected, found } => {
                Self::schema(&[(path.clone(), format!("expected {expected}, found {}", shorten(found)))])
            }
            TextError::TooManyTokens { .. } => Self::of_text("messages", error),
            // Nobody reads it.
            TextError::Abandoned => Self::retryable(),
            TextError::TemplateRefused { .. }
            | TextError::TemplateRender { .. }
            | TextError::TemplateFuel { .. }
            | TextError::TornUserText { .. }
            | TextError::NoFreeMarker
            | TextError::MediaCount { .. }
            | TextError::EmptyMedia { .. }
            | TextError::DataUrl { .. } => Self::parameter("messages", error.to_string()),
            _ => {
                tracing::error!(%error, "preparing a prompt");
                Self::internal()
            }
        }
    }
}

/// The beginning of a client's text, for an error.
#[must_use]
pub fn shorten(text: &str) -> String {
    match text.char_indices().nth(ECHO) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}...", &text[..end]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(error: &ApiError, dialect: Dialect) -> String {
        let mut out = Vec::new();
        error.write(dialect, &mut out);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn bodies_of_both_dialects() {
        let error = ApiError::parameter("top_p", "top_p: \"2\"");
        assert_eq!(
            body(&error, Dialect::OpenAi),
            r#"{"error":{"message":"top_p: \"2\"","type":"BadRequestError","param":"top_p","code":400}}"#
        );
        assert_eq!(
            body(&error, Dialect::Anthropic),
            r#"{"type":"error","error":{"type":"invalid_request_error","message":"top_p: \"2\""}}"#
        );
        assert_eq!(body(&ApiError::unauthorized(), Dialect::OpenAi), r#"{"error":"Unauthorized"}"#);
    }

    #[test]
    fn many_problems_make_a_short_error() {
        let problems: Vec<_> = (0..500).map(|i| (format!("stop[{i}]"), "expected text".to_owned())).collect();
        let error = ApiError::schema(&problems);
        assert_eq!(error.param.as_deref(), Some("stop[0]"));
        assert!(error.message.ends_with("stop[9]: expected text; and 490 more"), "{}", error.message);
        assert_eq!(shorten(&"x".repeat(4000)).len(), 203);
    }

    #[test]
    fn refusals_and_failures_have_their_status() {
        let busy = ApiError::from(Refusal::Overloaded { reason: "r".to_owned(), retry_after_s: 0 });
        assert_eq!((busy.status.as_u16(), busy.kind, busy.retry_after_s), (503, "Service Unavailable", Some(1)));
        assert_eq!(busy.anthropic_kind(), "overloaded_error");
        assert_eq!(ApiError::from(Refusal::Dead).status.as_u16(), 503);
        let failed = ApiError::from(&RequestError::Internal("secret".to_owned()));
        assert_eq!((failed.status.as_u16(), failed.message.contains("secret")), (500, false));
        assert_eq!(ApiError::from(&RequestError::Retryable("x".to_owned())).kind, "ServiceUnavailableError");
        let contradicts = ApiError::from(&RequestError::Excluded(7));
        assert_eq!(contradicts.status.as_u16(), 400);
        assert!(contradicts.message.contains("position 7") && contradicts.message.contains("min_tokens"));
    }
}
