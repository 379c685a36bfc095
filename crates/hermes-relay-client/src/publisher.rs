//! Publishing: one request for each publication, on one connection.
//!
//! In: content. Out: how many subscribers have it in their queue. A connection that the relay closed between two
//! publications is replaced. Never: a publication that is sent twice.

use std::sync::Arc;

use bytes::Bytes;
use hermes_relay::fields::{DELIVER, DELIVERED, EVENT_ID, RELAY, SUBSCRIBERS};
use http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Method, StatusCode};

use crate::encryption::AES128GCM;
use crate::{Client, ClientError, Connection, number};

/// The rules of a publication.
#[derive(Clone, Debug, Default)]
pub struct PublishOptions {
    /// `content-type`; `None` leaves it out.
    pub content_type: Option<HeaderValue>,
    /// Whether the publisher waits for slow subscribers; `None` means as the route says.
    pub is_reliable: Option<bool>,
    /// One subscriber of each group gets it.
    pub is_for_one: bool,
}

/// The relay's answer to a publication.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Acceptance {
    /// The identifier of the publication. `None` for one that goes to one subscriber of each group.
    pub id: Option<String>,
    /// The subscribers of the channel.
    pub subscribers: u64,
    /// The subscribers in whose queue it is.
    pub delivered: u64,
}

/// Publishes to a channel.
pub struct Publisher {
    client: Arc<Client>,
    options: PublishOptions,
    connection: Option<Connection>,
}

impl Client {
    /// A publisher, which connects with its first publication.
    pub fn publisher(self: &Arc<Self>, options: PublishOptions) -> Publisher {
        Publisher { client: self.clone(), options, connection: None }
    }
}

impl Publisher {
    /// Publishes, and waits for the answer. A reliable publication may take as long as the slowest subscriber.
    ///
    /// # Errors
    /// The relay refuses it, or the connection broke: it may or may not have been published then.
    pub async fn publish(&mut self, body: Bytes) -> Result<Acceptance, ClientError> {
        let is_certified = self.client.url.path().strip_prefix("/pk/").is_some_and(|rest| rest.contains("/from/"));
        if is_certified && self.client.url.query().is_some() {
            let reason = "subscribers verify the signature without a query; give a token in a cookie";
            return Err(ClientError::Invalid(format!("{}: {reason}", self.client.url)));
        }
        let mut connection = match self.connection.take() {
            Some(connection) if connection.sender.is_ready() => connection,
            _ => self.client.connect().await?,
        };
        let mut fields = HeaderMap::new();
        let body = match &self.client.options.secret {
            Some(secret) => {
                fields.insert(CONTENT_ENCODING, HeaderValue::from_static(AES128GCM));
                secret.seal(&body).ok_or_else(|| ClientError::Invalid("cannot encrypt a publication".to_owned()))?
            }
            None => body,
        };
        fields.extend(self.options.content_type.clone().map(|value| (CONTENT_TYPE, value)));
        if let Some(is_reliable) = self.options.is_reliable {
            fields.insert(RELAY, HeaderValue::from_static(if is_reliable { "reliable" } else { "realtime" }));
        }
        if self.options.is_for_one {
            fields.insert(DELIVER, HeaderValue::from_static("one"));
        }
        // A proxy may repeat a PUT whose connection broke, since it is idempotent by its definition. It must not repeat a POST.
        let request = self.client.request(Method::POST, body, fields);
        let response = self.client.exchange(&mut connection, request, StatusCode::NO_CONTENT).await?;
        let headers = response.headers();
        let field = |name| number(headers, name);
        let id = headers.get(EVENT_ID).and_then(|id| id.to_str().ok());
        let (Some(subscribers), Some(delivered)) = (field(&SUBSCRIBERS), field(&DELIVERED)) else {
            return Err(ClientError::Invalid(format!("{} is no channel of a relay", self.client.url)));
        };
        let acceptance = Acceptance { id: id.map(str::to_owned), subscribers, delivered };
        // A response without content leaves the connection free at once.
        drop(response);
        self.connection = connection.sender.ready().await.is_ok().then_some(connection);
        Ok(acceptance)
    }
}
