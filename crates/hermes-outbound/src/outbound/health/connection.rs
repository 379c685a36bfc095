//! An HTTP/2 connection that the checks of one endpoint keep open.
//!
//! In: a connection whose peer TLS has authenticated. Out: whether the peer answers a PING, and the end of the
//! connection. A check thus costs the peer one frame and no handshake, and a failure is noticed at once. Never: a
//! session's connection, or a request.

use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use h2::client::{Connection, SendRequest};
use h2::{Ping, PingPong};
use hermes_net::Io;
use tokio::time::Instant;

pub(super) struct ProbeConnection {
    connection: Connection<Io, Bytes>,
    ping: PingPong,
    began: Instant,
    /// Held because the connection would end without it.
    _sender: SendRequest<Bytes>,
}

impl ProbeConnection {
    /// # Errors
    /// The far end does not speak HTTP/2.
    pub(super) async fn begin(io: Io) -> Result<Self, String> {
        let (sender, mut connection) =
            h2::client::Builder::new().enable_push(false).handshake(io).await.map_err(|error| error.to_string())?;
        let ping = connection.ping_pong().ok_or("PING is in use")?;
        Ok(Self { connection, ping, began: Instant::now(), _sender: sender })
    }

    /// Sends a PING and waits for the answer. A cancelled call makes the connection unusable.
    ///
    /// # Errors
    /// The connection ended.
    pub(super) async fn probe(&mut self) -> Result<(), String> {
        let Self { connection, ping, .. } = self;
        tokio::select! {
            pong = ping.ping(Ping::opaque()) => pong.map(drop).map_err(|error| error.to_string()),
            ended = Pin::new(connection) => Err(ended.err().map_or_else(|| "closed".to_owned(), |error| error.to_string())),
        }
    }

    /// Waits for the end of the connection; returns its duration.
    pub(super) async fn over(&mut self) -> Duration {
        // The next connection attempt shows the reason.
        let _ = Pin::new(&mut self.connection).await;
        self.began.elapsed()
    }
}
