//! Routes, and what every request passes on its way to one: keys, limits, ids, the end of service.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::body::HttpBody as _;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Response, Uri, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::routing::{MethodRouter, get, post};
use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use tower_http::cors::{AllowHeaders, AllowMethods, AllowOrigin, CorsLayer};

use crate::app::App;
use crate::error::{ApiError, Dialect};
use crate::fields::parse_object;
use crate::work::{Weight, off_thread};
use crate::{chat, completions, messages, responses, small};

type Answer = Result<Response<Body>, ApiError>;

/// All routes: path, methods in lower case, handler. `/openapi.json` describes exactly these.
fn routes() -> Vec<(&'static str, &'static [&'static str], MethodRouter<Arc<App>>)> {
    vec![
        ("/", &["get"], get(|| async { small::page() })),
        ("/v1/models", &["get"], get(|State(app): State<Arc<App>>| async move { small::models(&app) })),
        ("/v1/models/{model}", &["get"], get(model)),
        ("/v1/chat/completions", &["post"], post(chat_completions)),
        ("/v1/completions", &["post"], post(plain_completions)),
        ("/v1/responses", &["post"], post(new_response)),
        ("/v1/responses/{response_id}", &["get"], get(stored_response)),
        ("/v1/responses/{response_id}/cancel", &["post"], post(stored_response)),
        ("/v1/messages", &["post"], post(new_message)),
        ("/v1/messages/count_tokens", &["post"], post(count_tokens)),
        ("/tokenize", &["post"], post(tokenize)),
        ("/detokenize", &["post"], post(detokenize)),
        ("/health", &["get"], get(|State(app): State<Arc<App>>| async move { small::health(&app) })),
        ("/ping", &["get", "post"], get(ping).post(ping)),
        ("/invocations", &["post"], post(invocations)),
        ("/metrics", &["get"], get(|State(app): State<Arc<App>>| async move { small::metrics(&app) })),
        ("/version", &["get"], get(|| async { small::version() })),
        ("/load", &["get"], get(|State(app): State<Arc<App>>| async move { small::load(&app) })),
        ("/openapi.json", &["get"], get(|| async { small::openapi() })),
        ("/reset_prefix_cache", &["post"], post(reset_prefix_cache)),
    ]
}

/// Paths and methods of all routes.
#[must_use]
pub fn paths() -> Vec<(&'static str, &'static [&'static str])> {
    routes().into_iter().map(|(path, methods, _)| (path, methods)).collect()
}

/// The server as a service.
pub fn router(app: Arc<App>) -> Router {
    let mut router = Router::new();
    for (path, _, handler) in routes() {
        router = router.route(path, handler);
    }
    let cors = cors(&app);
    router
        .fallback(|uri: Uri| async move { ApiError::unknown_route().response(dialect(uri.path())) })
        .method_not_allowed_fallback(|uri: Uri| async move { ApiError::method().response(dialect(uri.path())) })
        .layer(from_fn_with_state(Arc::clone(&app), gate))
        .layer(cors)
        .with_state(app)
}

fn cors(app: &App) -> CorsLayer {
    let options = &app.options;
    let any = |list: &[String]| list.iter().any(|item| item == "*");
    let values = |list: &[String]| list.iter().filter_map(|item| HeaderValue::from_str(item).ok()).collect::<Vec<_>>();
    let names = |list: &[String]| list.iter().filter_map(|item| HeaderName::try_from(item).ok()).collect::<Vec<_>>();
    let methods =
        |list: &[String]| list.iter().filter_map(|item| Method::try_from(item.as_str()).ok()).collect::<Vec<_>>();
    // With credentials a browser refuses `*`, so the request's own values are repeated.
    let mirror = options.allow_credentials;
    CorsLayer::new()
        .allow_credentials(options.allow_credentials)
        .allow_origin(match (any(&options.allowed_origins), mirror) {
            (true, true) => AllowOrigin::mirror_request(),
            (true, false) => AllowOrigin::any(),
            (false, _) => AllowOrigin::list(values(&options.allowed_origins)),
        })
        .allow_methods(match (any(&options.allowed_methods), mirror) {
            (true, true) => AllowMethods::mirror_request(),
            (true, false) => AllowMethods::any(),
            (false, _) => AllowMethods::list(methods(&options.allowed_methods)),
        })
        .allow_headers(match (any(&options.allowed_headers), mirror) {
            (true, true) => AllowHeaders::mirror_request(),
            (true, false) => AllowHeaders::any(),
            (false, _) => AllowHeaders::list(names(&options.allowed_headers)),
        })
}

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Keys, the end of service and request ids.
async fn gate(State(app): State<Arc<App>>, request: Request, next: Next) -> Response<Body> {
    let given = request.headers().get(REQUEST_ID).cloned();
    let path = request.uri().path();
    let dialect = dialect(path);
    let protected = ["/v1", "/v2", "/inference", "/invocations"].iter().any(|prefix| path.starts_with(prefix));
    // Browsers ask without a key whether they may ask.
    let free = request.method() == Method::OPTIONS || app.options.api_keys.is_empty();
    let mut response = if protected && !free && !authorised(&app, request.headers()) {
        ApiError::unauthorized().response(dialect)
    } else if app.is_draining() && request.method() == Method::POST {
        let mut response = ApiError::draining().response(dialect);
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        response
    } else {
        next.run(request).await
    };
    let id = given.or_else(|| {
        let fresh = app.options.request_id_headers.then(|| app.fresh_id());
        fresh.and_then(|id| HeaderValue::from_str(&id).ok())
    });
    if let Some(id) = id {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

/// Whose clients use a path.
#[must_use]
pub fn dialect(path: &str) -> Dialect {
    if path.starts_with("/v1/messages") { Dialect::Anthropic } else { Dialect::OpenAi }
}

fn authorised(app: &App, headers: &HeaderMap) -> bool {
    let bearer = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let bearer = bearer.and_then(|value| {
        let (scheme, key) = value.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
    });
    let key = bearer.or_else(|| headers.get("x-api-key").and_then(|value| value.to_str().ok()));
    // Every key is compared in full, so that the time taken tells nothing of them.
    key.is_some_and(|key| app.options.api_keys.iter().fold(false, |found, known| found | same(known, key)))
}

/// Compares in a time that depends on the lengths only.
fn same(known: &str, given: &str) -> bool {
    let differences = known.bytes().zip(given.bytes()).fold(0, |sum, (a, b)| sum | (a ^ b));
    known.len() == given.len() && differences == 0
}

/// Reads a body of JSON.
async fn body(app: &App, request: Request) -> Result<Bytes, ApiError> {
    let kind = request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let media_type = kind.split(';').next().unwrap_or_default().trim();
    if !media_type.eq_ignore_ascii_case("application/json") {
        let found = if kind.is_empty() { "nothing".to_owned() } else { crate::error::shorten(kind) };
        let problem = format!("expected the header Content-Type: application/json, found {found}");
        return Err(ApiError::schema(&[(String::new(), problem)]));
    }
    let limit = app.options.max_body_bytes;
    // A length that the head states is believed: nobody has to send what will be thrown away.
    if request.body().size_hint().lower() > limit as u64 {
        return Err(ApiError::too_large(limit));
    }
    arrive(request.into_body(), limit, BODY_PAUSE).await
}

/// A body up to `limit` bytes. A client that stops in the middle does not keep its connection for ever.
async fn arrive(body: Body, limit: usize, pause: Duration) -> Result<Bytes, ApiError> {
    let mut arriving = Limited::new(body, limit);
    let mut bytes = BytesMut::new();
    let late = |_| ApiError::slow_body(pause);
    while let Some(frame) = tokio::time::timeout(pause, arriving.frame()).await.map_err(late)? {
        match frame {
            Ok(frame) => bytes.extend(frame.into_data().unwrap_or_default()),
            Err(error) if error.is::<LengthLimitError>() => return Err(ApiError::too_large(limit)),
            Err(error) => {
                return Err(ApiError::schema(&[(String::new(), format!("the body did not arrive: {error}"))]));
            }
        }
    }
    Ok(bytes.freeze())
}

/// Longest pause of a body on its way.
const BODY_PAUSE: Duration = Duration::from_secs(60);

fn finish(answer: Answer, dialect: Dialect) -> Response<Body> {
    answer.unwrap_or_else(|error| error.response(dialect))
}

/// The client's name for a request, if it is fit for ids and logs.
fn request_id(request: &Request) -> Option<String> {
    const LONGEST: usize = 128;
    let id = request.headers().get(REQUEST_ID)?.to_str().ok()?;
    let fit = !id.is_empty() && id.len() <= LONGEST && id.bytes().all(|byte| byte.is_ascii_graphic());
    fit.then(|| id.to_owned())
}

async fn model(State(app): State<Arc<App>>, Path(id): Path<String>) -> Response<Body> {
    finish(small::model(&app, &id), Dialect::OpenAi)
}

async fn chat_completions(State(app): State<Arc<App>>, request: Request) -> Response<Body> {
    let id = request_id(&request);
    let answer = async {
        let body = body(&app, request).await?;
        chat::serve(Arc::clone(&app), body, id).await
    };
    finish(answer.await, Dialect::OpenAi)
}

async fn plain_completions(State(app): State<Arc<App>>, request: Request) -> Response<Body> {
    let id = request_id(&request);
    let answer = async {
        let body = body(&app, request).await?;
        completions::serve(Arc::clone(&app), body, id).await
    };
    finish(answer.await, Dialect::OpenAi)
}

/// SageMaker's one route: the body says which API it is meant for.
async fn invocations(State(app): State<Arc<App>>, request: Request) -> Response<Body> {
    let id = request_id(&request);
    let answer = async {
        let body = body(&app, request).await?;
        let read = body.clone();
        let keys = off_thread(Weight::Body(body.len()), move |_| {
            let map = parse_object(&read)?;
            Ok((map.contains_key("messages"), map.contains_key("prompt")))
        });
        match keys.await? {
            (true, _) => chat::serve(Arc::clone(&app), body, id).await,
            (false, true) => completions::serve(Arc::clone(&app), body, id).await,
            (false, false) => {
                Err(ApiError::schema(&[("messages".to_owned(), "the field is required (or prompt)".to_owned())]))
            }
        }
    };
    finish(answer.await, Dialect::OpenAi)
}

async fn new_response(State(app): State<Arc<App>>, request: Request) -> Response<Body> {
    let answer = async {
        let body = body(&app, request).await?;
        responses::serve(Arc::clone(&app), body).await
    };
    finish(answer.await, Dialect::OpenAi)
}

async fn stored_response(Path(id): Path<String>) -> Response<Body> {
    responses::stored(&id).response(Dialect::OpenAi)
}

async fn new_message(State(app): State<Arc<App>>, request: Request) -> Response<Body> {
    let answer = async {
        let body = body(&app, request).await?;
        messages::serve(Arc::clone(&app), body).await
    };
    finish(answer.await, Dialect::Anthropic)
}

async fn count_tokens(State(app): State<Arc<App>>, request: Request) -> Response<Body> {
    let answer = async {
        let body = body(&app, request).await?;
        messages::count_tokens(Arc::clone(&app), body).await
    };
    finish(answer.await, Dialect::Anthropic)
}

async fn tokenize(State(app): State<Arc<App>>, request: Request) -> Response<Body> {
    let answer = async {
        let body = body(&app, request).await?;
        small::tokenize(Arc::clone(&app), body).await
    };
    finish(answer.await, Dialect::OpenAi)
}

async fn detokenize(State(app): State<Arc<App>>, request: Request) -> Response<Body> {
    let answer = async {
        let body = body(&app, request).await?;
        small::detokenize(Arc::clone(&app), body).await
    };
    finish(answer.await, Dialect::OpenAi)
}

async fn ping(State(app): State<Arc<App>>) -> Response<Body> {
    small::ping(&app)
}

async fn reset_prefix_cache(State(app): State<Arc<App>>) -> Response<Body> {
    finish(small::reset_prefix_cache(&app), Dialect::OpenAi)
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::pin::Pin;
    use std::task::{Context, Poll};

    use hyper::body::Frame;

    use super::*;

    /// Gives some bytes and then nothing, without an end.
    struct Stuck(Option<Bytes>);

    impl hyper::body::Body for Stuck {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            self.0.take().map_or(Poll::Pending, |bytes| Poll::Ready(Some(Ok(Frame::data(bytes)))))
        }
    }

    #[tokio::test]
    async fn a_body_that_stops_arriving_is_given_up() {
        let pause = Duration::from_millis(20);
        let stuck = Body::new(Stuck(Some(Bytes::from_static(b"{\"a\":"))));
        assert_eq!(arrive(stuck, 100, pause).await.unwrap_err().status.as_u16(), 408);
        assert_eq!(arrive(Body::from("{}"), 100, pause).await.unwrap(), "{}");
        assert_eq!(arrive(Body::from("{}"), 1, pause).await.unwrap_err().status.as_u16(), 413);
    }
}
