//! An HTTP/2 connection that the checks of one endpoint keep open.
//!
//! In: a connection whose peer TLS has authenticated. Out: whether the peer answers a PING, and the end of the
//! connection. So a check costs the peer one frame instead of a handshake, and the end of the connection reveals a
//! failure at once. Never: a connection of sessions, or a request.

use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use h2::client::{Connection, SendRequest};
use h2::{Ping, PingPong};
use hermes_net::Io;
use tokio::time::Instant;

/// An HTTP/2 connection on which checks send PING.
pub(super) struct ProbeConnection {
    connection: Connection<Io, Bytes>,
    ping: PingPong,
    began: Instant,
    /// Stored because h2 ends the connection when its last sender is dropped.
    _sender: SendRequest<Bytes>,
}

impl ProbeConnection {
    /// Starts HTTP/2 on a connection.
    ///
    /// # Errors
    /// The HTTP/2 handshake failed.
    pub(super) async fn begin(io: Io) -> Result<Self, String> {
        let (sender, mut connection) =
            h2::client::Builder::new().enable_push(false).handshake(io).await.map_err(|error| error.to_string())?;
        let ping = connection.ping_pong().ok_or("PING is in use")?;
        Ok(Self { connection, ping, began: Instant::now(), _sender: sender })
    }

    /// Sends a PING and waits for its acknowledgement. After a cancelled call, the connection cannot be probed again.
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

    /// Waits until the connection ends, and returns how long it existed.
    pub(super) async fn over(&mut self) -> Duration {
        // The reason is ignored, because the next connection attempt reports why the endpoint is unreachable.
        let _ = Pin::new(&mut self.connection).await;
        self.began.elapsed()
    }
}
