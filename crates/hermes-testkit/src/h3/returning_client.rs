//! A returning client: it keeps the server's tickets and tokens, and may send 0-RTT data.
//!
//! In: a listener client, requests. Out: connections; later ones may be used before their handshake is complete. Never: a check
//! whether a request is safe in 0-RTT data; tests may send anything.

use std::{io, net::SocketAddr, sync::Arc};

use quinn::{ClientConfig, Endpoint, ZeroRttAccepted, crypto::rustls::QuicClientConfig};
use rustls::client::Resumption;

use super::{Connection, refused, transport, wire, write};
use crate::{
    dial::{ListenerClient, NODE_NAME},
    raw_http1::in_time,
    tls,
};

/// A client with a memory.
#[derive(Debug)]
pub struct ReturningClient {
    endpoint: Endpoint,
    config: ClientConfig,
    to: SocketAddr,
}

impl ReturningClient {
    /// A client of this listener that connects to this address, which may be that of a relay.
    ///
    /// # Errors
    /// No socket, or no certificate.
    pub fn new(listener: &ListenerClient, to: SocketAddr) -> io::Result<Self> {
        let (ca, identity) = listener.tls.as_ref().ok_or_else(|| refused("HTTP/3 is never in the clear"))?;
        let mut tls = tls::client(ca, identity.as_ref(), &["h3"]).map_err(refused)?;
        let remembering = Arc::make_mut(&mut tls);
        remembering.resumption = Resumption::in_memory_sessions(8);
        remembering.enable_early_data = true;
        let mut config = ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls).map_err(refused)?));
        config.transport_config(transport());
        Ok(Self { endpoint: Endpoint::client(SocketAddr::from(([127, 0, 0, 1], 0)))?, config, to })
    }

    fn connecting(&self) -> io::Result<quinn::Connecting> {
        self.endpoint.connect_with(self.config.clone(), self.to, NODE_NAME).map_err(refused)
    }

    /// Connects and completes the handshake, without 0-RTT data.
    ///
    /// # Errors
    /// No connection, or no HTTP/3 on it.
    pub async fn connect(&self) -> io::Result<Connection> {
        let connecting = self.connecting()?;
        let quic = in_time("the QUIC handshake", async { connecting.await.map_err(io::Error::other) }).await?;
        let mut this = self.connection(quic);
        this.begin(&[]).await?;
        Ok(this)
    }

    /// Sends 0-RTT data. `None` without a ticket of the server that allows it.
    ///
    /// # Errors
    /// No connection.
    pub async fn early(&self) -> io::Result<Option<(Connection, ZeroRttAccepted)>> {
        let Ok((quic, accepted)) = self.connecting()?.into_0rtt() else { return Ok(None) };
        let mut this = self.connection(quic);
        let mut control = this.open_uni().await?;
        write(&mut control, [&[0][..], &wire::settings(&[])].concat().into()).await?;
        this.control = Some(control);
        Ok(Some((this, accepted)))
    }

    fn connection(&self, quic: quinn::Connection) -> Connection {
        Connection::over(quic, self.endpoint.clone())
    }
}
