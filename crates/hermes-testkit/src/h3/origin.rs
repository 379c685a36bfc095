//! An HTTP/3 origin of a test, scripted for each stream.
//!
//! In: an identity, the first frames of its control streams, a handler for streams. Out: its address, and the result of
//! each of its connections.

use std::{io, net::SocketAddr, sync::Arc};

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use quinn::{Endpoint, ServerConfig, crypto::rustls::QuicServerConfig};
use tokio::{
    sync::mpsc::{UnboundedReceiver, unbounded_channel},
    task::JoinSet,
};

use super::{Connection, Receiving, Sending, transport, wire};
use crate::{Error, Result, ca::Identity, origin, tls};

/// A stream on the side of an origin.
#[derive(Debug)]
pub struct Exchange {
    /// The request's pseudo-header fields.
    pub pseudo: Vec<(String, String)>,
    /// The other fields.
    pub headers: HeaderMap,
    /// The unread body.
    pub recv: Receiving,
    /// The handle for the response.
    pub send: Sending,
    /// The connection.
    pub connection: quinn::Connection,
}

impl Exchange {
    /// A pseudo-header field.
    pub fn pseudo(&self, name: &str) -> &str {
        self.pseudo.iter().find(|(found, _)| found == name).map_or("", |(_, value)| value)
    }
}

/// An HTTP/3 origin (extended CONNECT and datagrams enabled): `serve` handles each stream.
#[derive(Debug)]
pub struct Origin {
    /// The results of its connections.
    pub ended: UnboundedReceiver<io::Error>,
    endpoint: Endpoint,
    _tasks: JoinSet<()>,
}

impl Origin {
    /// Listens on a port that the system selects.
    ///
    /// # Errors
    /// The socket or the certificate is not available.
    pub fn serve<F, S>(identity: &Identity, client_ca: Option<&str>, serve: S) -> Result<Self>
    where
        F: Future<Output = io::Result<()>> + Send + 'static,
        S: Fn(Exchange) -> F + Clone + Send + 'static,
    {
        Self::over(origin::bind_udp(SocketAddr::from(([127, 0, 0, 1], 0)))?, identity, client_ca, serve)
    }

    /// Listens on this socket.
    ///
    /// # Errors
    /// The certificate is not available.
    pub fn over<F, S>(
        socket: std::net::UdpSocket,
        identity: &Identity,
        client_ca: Option<&str>,
        serve: S,
    ) -> Result<Self>
    where
        F: Future<Output = io::Result<()>> + Send + 'static,
        S: Fn(Exchange) -> F + Clone + Send + 'static,
    {
        let greeting = [(wire::ENABLE_CONNECT_PROTOCOL, 1), (wire::H3_DATAGRAM, 1)];
        Self::greeting(&wire::settings(&greeting), socket, identity, client_ca, serve)
    }

    /// Listens with these first frames on its control streams: SETTINGS, or others.
    ///
    /// # Errors
    /// The certificate is not available.
    pub fn greeting<F, S>(
        greeting: &[u8],
        socket: std::net::UdpSocket,
        identity: &Identity,
        client_ca: Option<&str>,
        serve: S,
    ) -> Result<Self>
    where
        F: Future<Output = io::Result<()>> + Send + 'static,
        S: Fn(Exchange) -> F + Clone + Send + 'static,
    {
        let greeting = Bytes::copy_from_slice(greeting);
        let config = tls::server(identity, client_ca, &["h3"])?;
        let crypto = QuicServerConfig::try_from(config).map_err(|error| Error::Tls(error.to_string()))?;
        let mut config = ServerConfig::with_crypto(Arc::new(crypto));
        config.transport_config(transport());
        let (bounds, runtime) = (quinn::EndpointConfig::default(), Arc::new(quinn::TokioRuntime));
        let endpoint = Endpoint::new(bounds, Some(config), socket, runtime).map_err(Error::io("an HTTP/3 origin"))?;
        let accepting = endpoint.clone();
        let (sender, ended) = unbounded_channel();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Some(incoming) = accepting.accept().await {
                let (endpoint, greeting) = (accepting.clone(), greeting.clone());
                let (serve, sender) = (serve.clone(), sender.clone());
                connections.spawn(async move {
                    let Ok(quic) = incoming.await else { return };
                    serve_connection(endpoint, quic.clone(), &greeting, serve).await;
                    // The test may have dropped the receiver.
                    let _ = sender.send(io::Error::other(quic.closed().await));
                });
            }
        });
        Ok(Self { ended, endpoint, _tasks: tasks })
    }

    /// The address of the listener.
    ///
    /// # Errors
    /// The system's error.
    pub fn address(&self) -> Result<SocketAddr> {
        self.endpoint.local_addr().map_err(Error::io("address of an HTTP/3 origin"))
    }
}

/// The client evaluates the result of a stream or a connection.
async fn serve_connection<F, S>(endpoint: Endpoint, quic: quinn::Connection, greeting: &[u8], serve: S)
where
    F: Future<Output = io::Result<()>> + Send + 'static,
    S: Fn(Exchange) -> F,
{
    let mut this = Connection::over(quic, endpoint);
    if this.begin(greeting).await.is_err() {
        return;
    }
    let mut streams = JoinSet::new();
    loop {
        tokio::select! {
            accepted = this.quic.accept_bi() => {
                let Ok((send, recv)) = accepted else { break };
                let mut recv = Receiving { recv, unread: BytesMut::new() };
                let connection = this.quic.clone();
                let Ok((pseudo, headers)) = recv.head().await else { continue };
                streams.spawn(serve(Exchange { pseudo, headers, recv, send: Sending { send }, connection }));
            }
            Some(_) = streams.join_next() => {}
        }
    }
    // The streams notice the end of the connection.
    while streams.join_next().await.is_some() {}
}
