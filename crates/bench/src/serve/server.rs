//! What a server says of itself: its model, its version, how it counts tokens.

use bytes::Bytes;
use serde_json::{Value, json};

use super::client::Client;
use super::error::ServeBenchError;

/// The first model of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelCard {
    /// Name in requests.
    pub id: String,
    /// Where its files are, as the server sees it.
    pub root: String,
    /// Most tokens of prompt and answer.
    pub length: Option<u64>,
}

/// The first model that the server lists.
///
/// # Errors
/// [`ServeBenchError::Server`] if it lists none or does not answer.
pub async fn first_model(client: &Client) -> Result<ModelCard, ServeBenchError> {
    const PATH: &str = "/v1/models";
    let text = client.text(PATH).await?;
    let list: Value = serde_json::from_str(&text).unwrap_or_default();
    let card = &list["data"][0];
    let Some(id) = card["id"].as_str() else {
        let problem = "no models are listed; name one by --model".to_owned();
        return Err(ServeBenchError::Server { url: format!("{}{PATH}", client.address()), problem });
    };
    Ok(ModelCard {
        id: id.to_owned(),
        root: card["root"].as_str().unwrap_or(id).to_owned(),
        length: card["max_model_len"].as_u64(),
    })
}

/// The server's version, if it tells.
pub async fn version(client: &Client) -> Option<String> {
    let text = client.text("/version").await.ok()?;
    let value: Value = serde_json::from_str(&text).ok()?;
    value["version"].as_str().map(str::to_owned)
}

/// Tokens of a text as the server counts, if it has a route for that.
pub async fn token_count(client: &Client, model: &str, text: &str) -> Option<usize> {
    let body = json!({"model": model, "prompt": text, "add_special_tokens": false}).to_string();
    let answer = client.post("/tokenize", Bytes::from(body), &[]).await.ok()?;
    let served = answer.status().is_success();
    let value: Value = serde_json::from_str(&answer.text().await.ok()?).ok()?;
    let count = value["count"].as_u64().filter(|_| served)?;
    usize::try_from(count).ok()
}
