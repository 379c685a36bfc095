//! Connections between two clients of relays, each behind any NAT: two byte streams, made of publications.
//!
//! A listener subscribes to a channel. A caller publishes there where it receives, and maybe its first bytes. The listener
//! answers to that channel, and says where it receives itself (third paper, section 6). From then on each end publishes to the
//! channels of the other one. In: the URL of the listener's channel, and a byte stream such as a TCP connection. Out: both
//! streams, whole and in their order, however often an end's address changes, and over several relays at once. Never: an end
//! that ends well without the whole of both streams.

mod driver;
mod frame;
mod incoming;
mod outgoing;
mod paths;
mod ranges;
mod receive_base;
mod session;

use std::collections::{HashSet, VecDeque};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use hermes_signature::SigningKey;
use http::{HeaderValue, Uri};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use self::driver::{Driver, Reception, Rules};
use self::frame::{EndId, Frame, MAX_CHANNELS};
use self::receive_base::{AllowedChannels, base_of_key, channel_below};
use self::session::{Failure, Session};
use crate::{Client, ClientError, ClientOptions, Event, Received, SubscribeOptions, Subscription};

pub use self::frame::rewritten_frame;
pub use self::receive_base::ReceiveBase;

/// The group of listeners, of which one gets each call.
const LISTENERS: HeaderValue = HeaderValue::from_static("listeners");
/// The latest callers that a listener remembers. A caller whose answer was lost calls again.
const MAX_REMEMBERED: usize = 4096;
/// The time in which a listener subscribes for a call, and the pause between two attempts.
const RECEIVE_TIMEOUT: Duration = Duration::from_secs(15);
const RECEIVE_PAUSE: Duration = Duration::from_millis(500);
/// The longest frame. Chunks are at most a quarter of it.
const MAX_FRAME: usize = 1 << 20;

/// The rules of connections.
#[derive(Clone, Debug)]
pub struct ConnectionOptions {
    /// This end receives below these bases, at most eight. The connection uses all of them at once. Empty: below the URL of
    /// the listener; with a self-certifying URL, at the same relay below that of the own key.
    pub receive: Vec<ReceiveBase>,
    /// More bases of channels at which the other end may receive. Those below the listener's URL are always allowed.
    pub peer_receives: Vec<Uri>,
    /// The most bytes in memory of each stream that the other end or the application has not taken; at least 64 KiB.
    pub window: usize,
    /// Each part of a stream takes all paths, instead of one of them.
    pub is_redundant: bool,
    /// A listener gives its application the first bytes of a call before the caller has confirmed the connection. That saves a
    /// round trip. But a call whose answer was lost may reach two listeners, and a listener may get a call of long ago.
    pub takes_early: bool,
    /// Stops the connections. Their other ends learn of it.
    pub stop: CancellationToken,
}

impl Default for ConnectionOptions {
    fn default() -> Self {
        Self {
            receive: Vec::new(),
            peer_receives: Vec::new(),
            window: 1 << 20,
            is_redundant: false,
            takes_early: false,
            stop: CancellationToken::new(),
        }
    }
}

/// The volume of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Bytes of the application.
    pub sent: u64,
    /// Bytes for the application.
    pub received: u64,
    /// Publications that were sent again.
    pub repeated: u64,
}

/// The reason why a connection failed.
#[derive(Debug, thiserror::Error)]
pub enum ConnectionError {
    /// A relay refused a request, or cannot be reached.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The application's stream failed.
    #[error("the application failed: {0}")]
    Application(io::Error),
    /// This end was stopped.
    #[error("stopped")]
    Stopped,
    /// No listener has subscribed.
    #[error("nobody listens at this URL; start a listener, or look whether it has the same URL and relay")]
    NobodyListens,
    /// The caller left before the listener could answer.
    #[error("the caller left")]
    CallerIsGone,
    /// The other end receives where this end must not publish.
    #[error("the other end receives at {0:?}, which is not allowed here; add its base by --peer-receives")]
    NotAllowed(String),
    /// The other end failed, for this reason.
    #[error("the other end ended the connection: {0}")]
    Reset(String),
    /// The other end is silent, or breaks the protocol.
    #[error("{0}")]
    Failed(String),
}

impl ConnectionError {
    /// Whether the other end knows of it already, or does not exist.
    fn is_known_to_peer(&self) -> bool {
        matches!(self, Self::Reset(_) | Self::NobodyListens | Self::CallerIsGone)
    }
}

impl From<Failure> for ConnectionError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Reset(reason) => Self::Reset(reason),
            failure => Self::Failed(failure.to_string()),
        }
    }
}

/// An end of connections: a client of the listener's channel, and the rules.
#[derive(Clone)]
struct Endpoint {
    client: Arc<Client>,
    options: ConnectionOptions,
    bases: Vec<ReceiveBase>,
}

impl Endpoint {
    fn new(listen: Uri, mut client: ClientOptions, options: ConnectionOptions) -> Result<Self, ConnectionError> {
        let invalid = |why: String| ConnectionError::Client(ClientError::Invalid(why));
        if listen.query().is_some() {
            return Err(invalid(format!(
                "{listen}: a query does not count for all channels; give a token in a cookie"
            )));
        }
        if options.receive.len() > MAX_CHANNELS {
            return Err(invalid(format!("too many bases to receive below; at most {MAX_CHANNELS} are possible")));
        }
        if client.key.is_none() && receive_base::is_of_key(&listen) {
            // The caller needs a key to subscribe to a channel that nobody else can read.
            let (key, _) = SigningKey::generate().map_err(|error| invalid(error.to_string()))?;
            client.key = Some(Arc::new(key));
        }
        let of_key = client.key.as_ref().and_then(|key| base_of_key(&listen, key.public()));
        let base = of_key.unwrap_or_else(|| listen.clone());
        let bases = match options.receive.is_empty() {
            true => vec![ReceiveBase { url: base, source: client.source }],
            false => options.receive.clone(),
        };
        Ok(Self { client: Client::new(listen, client)?, options, bases })
    }

    fn rules(&self) -> Rules {
        let allowed = self.options.peer_receives.iter().chain(self.bases.iter().map(|own| &own.url));
        Rules {
            allowed: AllowedChannels::new(self.client.url(), allowed.cloned().collect()),
            client: self.client.clone(),
            sources: self.bases.iter().map(|own| own.source).collect(),
            is_redundant: self.options.is_redundant,
            takes_early: self.options.takes_early,
            stop: self.options.stop.clone(),
        }
    }

    /// Subscribes to new channels, one below each base. Returns the URLs of those that began, too.
    async fn receive(&self) -> Result<(Reception, Vec<String>), ConnectionError> {
        let mut channels = Vec::new();
        for base in &self.bases {
            let text = channel_below(&base.url);
            let url = text.parse().map_err(|error| ClientError::Invalid(format!("{text}: {error}")))?;
            let options = SubscribeOptions { max_bytes: MAX_FRAME, ..SubscribeOptions::default() };
            channels.push((text, Subscription::new(self.client.sibling(url, base.source)?, options)));
        }
        Ok(Reception::begin(channels).await?)
    }

    /// Subscribes like [`Self::receive`], and tries again for a while: the listener remembers the caller, so the call must not get
    /// lost with a relay that restarts.
    async fn receive_again(&self) -> Result<(Reception, Vec<String>), ConnectionError> {
        let until = Instant::now() + RECEIVE_TIMEOUT;
        loop {
            match self.receive().await {
                Err(ConnectionError::Client(error)) if error.is_transient() && Instant::now() < until => {
                    tokio::time::sleep(RECEIVE_PAUSE).await;
                }
                received => return received,
            }
        }
    }
}

fn now() -> std::time::Instant {
    Instant::now().into_std()
}

/// Opens a connection to the listener at this URL, and carries `io` over it until both streams have ended. A program that
/// wants to read and write itself gives one end of a [`tokio::io::duplex`].
///
/// # Errors
/// Nobody listens, a relay refuses, or the connection fails later. Then bytes may be missing in both directions.
pub async fn connect<Io: AsyncRead + AsyncWrite + Send>(
    url: Uri,
    client: ClientOptions,
    options: ConnectionOptions,
    io: Io,
) -> Result<Totals, ConnectionError> {
    let end = Endpoint::new(url, client, options)?;
    let mut driver = Driver::new(Session::call(end.options.window, now()), io, end.rules());
    driver.call()?;
    driver.run(end.receive()).await
}

/// Accepts connections at a URL.
pub struct Listener {
    end: Endpoint,
    subscription: Subscription,
    remembered: Remembered,
}

impl Listener {
    /// Begins to listen. A call at a URL with several listeners goes to one of them.
    ///
    /// # Errors
    /// The relay refuses the subscription, or cannot be reached.
    pub async fn new(url: Uri, client: ClientOptions, options: ConnectionOptions) -> Result<Self, ConnectionError> {
        let end = Endpoint::new(url, client, options)?;
        let options = SubscribeOptions { group: Some(LISTENERS), max_bytes: MAX_FRAME, ..SubscribeOptions::default() };
        let mut subscription = Subscription::new(end.client.clone(), options);
        subscription.begin().await?;
        Ok(Self { end, subscription, remembered: Remembered::default() })
    }

    /// Waits for the next call. The program bounds the number of its calls.
    ///
    /// # Errors
    /// The relay refuses the subscription for good.
    pub async fn accept(&mut self) -> Result<Call, ConnectionError> {
        loop {
            let Received::Event(Event::Publication { body, .. }) = self.subscription.next().await? else { continue };
            let Some(opening) = Frame::decode(&body).filter(|frame| frame.to.is_none()) else { continue };
            let Some(caller) = opening.from.clone() else { continue };
            if self.remembered.is_new(&caller) {
                return Ok(Call { end: self.end.clone(), caller, opening });
            }
        }
    }
}

/// The latest callers.
#[derive(Debug, Default)]
struct Remembered {
    callers: HashSet<EndId>,
    order: VecDeque<EndId>,
}

impl Remembered {
    fn is_new(&mut self, caller: &EndId) -> bool {
        if !self.callers.insert(caller.clone()) {
            return false;
        }
        self.order.push_back(caller.clone());
        if self.order.len() > MAX_REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.callers.remove(&oldest);
        }
        true
    }
}

/// A call that waits for an answer.
pub struct Call {
    end: Endpoint,
    caller: EndId,
    opening: Frame,
}

impl Call {
    /// Accepts the connection, and carries `io` over it until both streams have ended.
    ///
    /// # Errors
    /// The caller left or receives where this end must not publish, a relay refuses, or the connection fails later.
    pub async fn run<Io: AsyncRead + AsyncWrite + Send>(self, io: Io) -> Result<Totals, ConnectionError> {
        let Self { end, caller, opening } = self;
        let mut driver = Driver::new(Session::accept(caller, end.options.window, now()), io, end.rules());
        driver.answer(&opening)?;
        drop(opening);
        driver.run(end.receive_again()).await
    }

    /// Refuses the connection. The caller learns the reason.
    ///
    /// # Errors
    /// The caller receives where this end must not publish.
    pub async fn refuse(self, reason: &str) -> Result<(), ConnectionError> {
        let mut paths = paths::Paths::default();
        let channels = &self.opening.receive;
        self.end.rules().reach(&mut paths, &channels[..channels.len().min(1)])?;
        paths.reset(&EndId::random(), self.caller, reason).await;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_remembers_the_latest_callers() {
        let mut remembered = Remembered::default();
        let first = EndId::random();
        assert!(remembered.is_new(&first) && !remembered.is_new(&first));
        assert!((0..MAX_REMEMBERED).all(|_| remembered.is_new(&EndId::random())));
        assert_eq!(remembered.order.len(), MAX_REMEMBERED);
        assert!(remembered.is_new(&first));
    }
}
