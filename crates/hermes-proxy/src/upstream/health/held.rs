//! A connection of HTTP/2 that the checks of one endpoint keep, and ask on.
//!
//! In: a connection whose far end TLS has proven. Out: whether it answers a PING, and when the connection is over. So a check costs
//! the far end a frame, and no handshake; one that dies is known to at once. Never: a session's connection, nor a request.

use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use h2::client::{Connection, SendRequest};
use h2::{Ping, PingPong};
use hermes_net::Io;
use tokio::time::Instant;

pub(super) struct Held {
    connection: Connection<Io, Bytes>,
    ping: PingPong,
    began: Instant,
    /// Without it the connection would end.
    _sender: SendRequest<Bytes>,
}

impl Held {
    /// # Errors
    /// The far end does not speak HTTP/2.
    pub(super) async fn begin(io: Io) -> Result<Self, String> {
        let (sender, mut connection) =
            h2::client::Builder::new().enable_push(false).handshake(io).await.map_err(|error| error.to_string())?;
        let ping = connection.ping_pong().ok_or("PING is in use")?;
        Ok(Self { connection, ping, began: Instant::now(), _sender: sender })
    }

    /// Waits for an answer. Who gives that up cannot ask again.
    ///
    /// # Errors
    /// The connection is over.
    pub(super) async fn ask(&mut self) -> Result<(), String> {
        let Self { connection, ping, .. } = self;
        tokio::select! {
            pong = ping.ping(Ping::opaque()) => pong.map(drop).map_err(|error| error.to_string()),
            ended = Pin::new(connection) => Err(ended.err().map_or_else(|| "closed".to_owned(), |error| error.to_string())),
        }
    }

    /// Waits for its end; how long it lasted.
    pub(super) async fn over(&mut self) -> Duration {
        // How it ended is seen by who connects next.
        let _ = Pin::new(&mut self.connection).await;
        self.began.elapsed()
    }
}
