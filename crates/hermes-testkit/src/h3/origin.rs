//! An HTTP/3 origin of a test, scripted stream by stream.
//!
//! In: an identity, what its control streams begin with, what it does with each stream. Out: where it listens, and how
//! each of its connections ended.

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

/// One stream as an origin sees it.
#[derive(Debug)]
pub struct Exchange {
    /// The request's pseudo-header fields.
    pub pseudo: Vec<(String, String)>,
    /// Its other fields.
    pub headers: HeaderMap,
    /// Its body.
    pub recv: Receiving,
    /// Where the response goes.
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

/// An HTTP/3 origin (extended CONNECT and datagrams on): `serve` gets each stream.
#[derive(Debug)]
pub struct Origin {
    /// How each of its connections ended.
    pub ended: UnboundedReceiver<io::Error>,
    endpoint: Endpoint,
    _tasks: JoinSet<()>,
}

impl Origin {
    /// Listens at a port of the system's choice.
    ///
    /// # Errors
    /// No socket, or no certificate.
    pub fn serve<F, S>(identity: &Identity, client_ca: Option<&str>, serve: S) -> Result<Self>
    where
        F: Future<Output = io::Result<()>> + Send + 'static,
        S: Fn(Exchange) -> F + Clone + Send + 'static,
    {
        Self::over(origin::bind_udp(SocketAddr::from(([127, 0, 0, 1], 0)))?, identity, client_ca, serve)
    }

    /// Listens here.
    ///
    /// # Errors
    /// No certificate.
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

    /// Its control streams begin with these frames: SETTINGS, or what else they are to say.
    ///
    /// # Errors
    /// No certificate.
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
        let (tell, ended) = unbounded_channel();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Some(incoming) = accepting.accept().await {
                let (endpoint, greeting) = (accepting.clone(), greeting.clone());
                let (serve, tell) = (serve.clone(), tell.clone());
                connections.spawn(async move {
                    let Ok(quic) = incoming.await else { return };
                    serve_connection(endpoint, quic.clone(), &greeting, serve).await;
                    // Perhaps nobody wants to know.
                    let _ = tell.send(io::Error::other(quic.closed().await));
                });
            }
        });
        Ok(Self { ended, endpoint, _tasks: tasks })
    }

    /// Where it listens.
    ///
    /// # Errors
    /// The system's.
    pub fn address(&self) -> Result<SocketAddr> {
        self.endpoint.local_addr().map_err(Error::io("address of an HTTP/3 origin"))
    }
}

/// How a stream or a connection ends is for its client to judge.
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
    // They hear how the connection ended.
    while streams.join_next().await.is_some() {}
}
