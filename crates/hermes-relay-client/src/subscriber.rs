//! Subscribing: a response whose parts are publications.
//!
//! In: the channel, and the identifier of the latest publication that the caller has. Out: publications, and holes between
//! them. The subscription is refreshed at half of its timeout. Never: a hole that the caller does not learn of.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hermes_relay::fields::{EVENT_ID, GROUP, HEARTBEAT, LAST_EVENT_ID, MISSED, SUBSCRIBE, SUBSCRIPTION, TIMEOUT};
use hermes_relay::framing::multipart::{Parser, Part};
use http::header::{ACCEPT, CONTENT_ENCODING, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use tokio::time::Instant;

use crate::encryption::AES128GCM;
use crate::{Client, ClientError, Connection, number};

/// The heartbeats that may be missing before a subscription counts as broken, and the longest time between two.
const MISSING_HEARTBEATS: u32 = 3;
const MAX_HEARTBEAT: Duration = Duration::from_secs(3600);

/// The rules of a subscription.
#[derive(Clone, Debug, Default)]
pub struct SubscribeOptions {
    /// The timeout after which the relay forgets a subscriber that went away silently; `None` means the longest.
    pub timeout: Option<Duration>,
    /// The latest publication that the caller has; `None` means that only later ones count.
    pub after: Option<String>,
    /// The group for publications that go to one of its members.
    pub group: Option<HeaderValue>,
    /// The longest publication that is accepted, in bytes; 0 means 64 MiB. A longer one counts as missed.
    pub max_bytes: usize,
}

/// A publication, or a hole between publications.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A publication.
    Publication {
        /// The position to resume from.
        id: String,
        /// Its `content-*` fields.
        headers: HeaderMap,
        /// Its content.
        body: Bytes,
    },
    /// A publication that was not encrypted with the client's secret. Anybody who may publish can send it.
    Unreadable {
        /// The position to resume from.
        id: String,
    },
    /// Publications that the subscriber does not get.
    Missed {
        /// The position to resume from.
        id: String,
        /// Their number; `None` if nobody knows it.
        count: Option<u64>,
    },
}

impl Event {
    /// The position to resume from.
    pub fn id(&self) -> &str {
        match self {
            Self::Publication { id, .. } | Self::Unreadable { id } | Self::Missed { id, .. } => id,
        }
    }
}

type Refreshing = Pin<Box<dyn Future<Output = Result<(), ClientError>> + Send>>;

/// Subscribes to a channel.
pub struct Subscriber {
    client: Arc<Client>,
    body: Incoming,
    parser: Parser,
    waiting: VecDeque<Event>,
    subscription: HeaderValue,
    timeout: Duration,
    position: String,
    refresh_at: Instant,
    /// The longest silence of a relay that still sends heartbeats. `None`: it does not say how often it does.
    max_silence: Option<Duration>,
    silent_at: Instant,
    /// A refresh on a connection of its own. Publications are read meanwhile.
    refreshing: Option<Refreshing>,
    _connection: Connection,
}

impl Client {
    /// Begins a subscription.
    ///
    /// # Errors
    /// The relay refuses it, or cannot be reached.
    pub async fn subscribe(self: &Arc<Self>, options: &SubscribeOptions) -> Result<Subscriber, ClientError> {
        let mut connection = self.connect().await?;
        let mut fields = HeaderMap::new();
        fields.insert(SUBSCRIBE, HeaderValue::from_static("true"));
        fields.insert(ACCEPT, HeaderValue::from_static("multipart/mixed"));
        fields.extend(options.timeout.map(|timeout| (TIMEOUT, timeout.as_secs().into())));
        fields.extend(options.group.clone().map(|group| (GROUP, group)));
        if let Some(after) = &options.after {
            let value = HeaderValue::from_str(after);
            fields.insert(LAST_EVENT_ID, value.map_err(|error| ClientError::Invalid(error.to_string()))?);
        }
        let request = self.request(Method::GET, Bytes::new(), fields);
        let exchange = self.exchange(&mut connection, request, StatusCode::OK);
        let response = self.patiently("the response to a subscription", exchange).await??;
        let headers = response.headers();
        let no_relay = || ClientError::Invalid(format!("{} is no channel of a relay", self.url));
        let content_type = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let max_bytes = if options.max_bytes == 0 { 64 << 20 } else { options.max_bytes };
        let parser = Parser::new(content_type, max_bytes).ok_or_else(no_relay)?;
        let subscription = headers.get(SUBSCRIPTION).cloned().ok_or_else(no_relay)?;
        let timeout = Duration::from_secs(number(headers, &TIMEOUT).ok_or_else(no_relay)?);
        let max_silence = number(headers, &HEARTBEAT).map(|seconds| {
            MISSING_HEARTBEATS * Duration::from_secs(seconds).clamp(Duration::from_secs(1), MAX_HEARTBEAT)
        });
        let position = headers.get(EVENT_ID).and_then(|id| id.to_str().ok()).ok_or_else(no_relay)?.to_owned();
        Ok(Subscriber {
            client: self.clone(),
            body: response.into_body(),
            parser,
            waiting: VecDeque::new(),
            subscription,
            timeout,
            position,
            refresh_at: Instant::now() + timeout / 2,
            max_silence,
            silent_at: Instant::now() + max_silence.unwrap_or_default(),
            refreshing: None,
            _connection: connection,
        })
    }

    /// The publication as it was before its publisher encrypted it.
    fn decrypted(&self, event: Event) -> Event {
        let Some(secret) = &self.options.secret else { return event };
        let Event::Publication { id, mut headers, body } = event else { return event };
        let is_encrypted = headers.remove(CONTENT_ENCODING).is_some_and(|coding| coding == AES128GCM);
        match secret.open(&body).filter(|_| is_encrypted) {
            Some(body) => Event::Publication { id, headers, body },
            None => Event::Unreadable { id },
        }
    }

    async fn refresh(self: Arc<Self>, subscription: HeaderValue, timeout: Duration) -> Result<(), ClientError> {
        let mut connection = self.connect().await?;
        let mut fields = HeaderMap::new();
        fields.insert(SUBSCRIPTION, subscription);
        fields.insert(TIMEOUT, timeout.as_secs().into());
        let request = self.request(Method::GET, Bytes::new(), fields);
        let exchange = self.exchange(&mut connection, request, StatusCode::NO_CONTENT);
        self.patiently("the response to a refresh", exchange).await?.map(drop)
    }
}

impl Subscriber {
    /// The position at which the subscription began, to resume from if no event has arrived.
    pub fn position(&self) -> &str {
        &self.position
    }

    /// Waits for the next event. `None`: the subscription has ended.
    ///
    /// # Errors
    /// The connection broke, or the relay refuses a refresh. The caller may subscribe again after the last identifier. A
    /// publication of a self-certifying channel that its key has not signed is [`ClientError::Invalid`].
    pub async fn next(&mut self) -> Result<Option<Event>, ClientError> {
        loop {
            if let Some(event) = self.waiting.pop_front() {
                return Ok(Some(event));
            }
            let frame = tokio::select! {
                frame = self.body.frame() => frame,
                // The network has changed, and no packet of the old connection arrives.
                () = tokio::time::sleep_until(self.silent_at), if self.max_silence.is_some() => {
                    return Err(ClientError::Broken("the relay is silent".to_owned()));
                }
                refreshed = refreshed(&mut self.refreshing) => {
                    self.refreshing = None;
                    self.after_refresh(refreshed)?;
                    continue;
                }
                () = tokio::time::sleep_until(self.refresh_at), if self.refreshing.is_none() => {
                    let (client, subscription, timeout) = (self.client.clone(), self.subscription.clone(), self.timeout);
                    self.refreshing = Some(Box::pin(client.refresh(subscription, timeout)));
                    continue;
                }
            };
            self.silent_at = Instant::now() + self.max_silence.unwrap_or_default();
            match frame {
                Some(Ok(frame)) => self.parser.push(frame.data_ref().map_or(&[][..], |data| data)),
                Some(Err(error)) => return Err(ClientError::Broken(format!("the subscription broke off: {error}"))),
                None if self.parser.has_ended() => return Ok(None),
                None => return Err(ClientError::Broken("the subscription broke off".to_owned())),
            }
            let malformed = |error| ClientError::Broken(format!("malformed publication: {error}"));
            while let Some(part) = self.parser.next_part().map_err(malformed)? {
                let event = event(part);
                if let Some(Event::Publication { id, headers, body }) = &event {
                    self.client.check_holder(id, headers, body)?;
                }
                self.waiting.extend(event.map(|event| self.client.decrypted(event)));
            }
        }
    }

    /// If the relay cannot be reached now, the refresh is tried again before the timeout.
    fn after_refresh(&mut self, refreshed: Result<(), ClientError>) -> Result<(), ClientError> {
        match refreshed {
            Ok(()) => {
                self.refresh_at = Instant::now() + self.timeout / 2;
                Ok(())
            }
            Err(ClientError::Refused { status: StatusCode::NOT_FOUND, .. }) => {
                Err(ClientError::Broken("the relay has forgotten the subscription".to_owned()))
            }
            // A token ends soon.
            Err(ClientError::Refused { max_timeout: Some(max), .. }) if max < self.timeout => {
                self.timeout = max;
                self.refresh_at = Instant::now();
                Ok(())
            }
            Err(error) if error.is_transient() => {
                self.refresh_at = Instant::now() + self.timeout / 8;
                Ok(())
            }
            Err(error) => Err(error),
        }
    }
}

/// The outcome of a refresh; never ready without one.
async fn refreshed(refreshing: &mut Option<Refreshing>) -> Result<(), ClientError> {
    match refreshing {
        Some(refreshing) => refreshing.await,
        None => std::future::pending().await,
    }
}

fn event(part: Part) -> Option<Event> {
    if part.is_heartbeat() {
        return None;
    }
    let Part { mut headers, body, skipped } = part;
    let id = headers.remove(EVENT_ID)?.to_str().ok()?.to_owned();
    if let Some(missed) = headers.get(MISSED) {
        return Some(Event::Missed { id, count: missed.to_str().ok().and_then(|text| text.parse().ok()) });
    }
    if skipped.is_some() {
        return Some(Event::Missed { id, count: Some(1) });
    }
    Some(Event::Publication { id, headers, body })
}
