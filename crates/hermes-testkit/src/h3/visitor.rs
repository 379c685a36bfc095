//! A client that comes back: it keeps what the server gave it, and may ask with its first packet (0-RTT).
//!
//! In: a door. Out: connections, the later ones perhaps before their handshake is over. Never: a judgement about
//! what is safe to say early; tests say what they like.

use std::{io, net::SocketAddr, sync::Arc};

use quinn::{ClientConfig, Endpoint, ZeroRttAccepted, crypto::rustls::QuicClientConfig};
use rustls::client::Resumption;

use super::{Connection, refused, transport, wire, write};
use crate::{
    dial::{Door, NODE_NAME},
    dialog::in_time,
    tls,
};

/// A client with a memory.
#[derive(Debug)]
pub struct Visitor {
    endpoint: Endpoint,
    config: ClientConfig,
    to: SocketAddr,
}

impl Visitor {
    /// One that goes to this door, by this address of it: a relay may stand before it.
    ///
    /// # Errors
    /// No socket, or no certificate.
    pub fn new(door: &Door, to: SocketAddr) -> io::Result<Self> {
        let (ca, identity) = door.tls.as_ref().ok_or_else(|| refused("HTTP/3 is never in the clear"))?;
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

    /// Connects as anybody.
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

    /// Speaks at once. `None` where the server's ticket does not allow that, or there is none.
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
