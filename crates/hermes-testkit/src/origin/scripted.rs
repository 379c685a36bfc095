//! Origins that do exactly what a test says, byte by byte or stream by stream, on a free port of loopback.
//!
//! In: a handler for connections or streams. Out: a running origin. The test's own channels pass what the origin has
//! seen to the test. An error ends only its connection; the client sees the effect.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
};

use rustls::ServerConfig;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use crate::{
    Result,
    multiplex::{Exchange, serve_connection},
    origin::{Origin, listen},
    raw_http1::{Head, RawHttp1},
};

/// The request heads that an origin has received.
pub type Heads = UnboundedReceiver<Head>;

const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
/// The first byte of TLS: a record of a handshake (RFC 8446, section 5.1).
const HANDSHAKE: u8 = 22;

/// `serve` gets each connection, as it is.
///
/// # Errors
/// When no port can be bound.
pub fn h1<F, S>(serve: S) -> Result<Origin>
where
    F: Future<Output = io::Result<()>> + Send + 'static,
    S: Fn(RawHttp1<TcpStream>) -> F + Send + 'static,
{
    h1_at(LOOPBACK, serve)
}

/// Works like [`h1`], at another address.
///
/// # Errors
/// When no port can be bound there.
pub fn h1_at<F, S>(address: IpAddr, serve: S) -> Result<Origin>
where
    F: Future<Output = io::Result<()>> + Send + 'static,
    S: Fn(RawHttp1<TcpStream>) -> F + Send + 'static,
{
    Origin::accepting(listen(SocketAddr::new(address, 0))?, move |stream| {
        let served = serve(RawHttp1::new(stream));
        async move { drop(served.await) }
    })
}

/// An origin that passes each request head to the test and answers with the text that `response` returns for it.
///
/// # Errors
/// When no port can be bound.
pub fn recording(response: impl Fn(&Head) -> String + Clone + Send + 'static) -> Result<(Origin, Heads)> {
    let (sender, heads) = unbounded_channel();
    let origin = h1(move |mut http1| {
        let (sender, response) = (sender.clone(), response.clone());
        async move {
            loop {
                let head = http1.head().await?;
                http1.body(&head).await?;
                let text = response(&head);
                // The test may have heard enough.
                let _ = sender.send(head);
                http1.send(text).await?;
            }
        }
    })?;
    Ok((origin, heads))
}

/// `serve` gets each connection over TLS, with `config`. For a connection without a handshake, `stranger` gets the
/// first byte.
///
/// # Errors
/// When no port can be bound.
pub fn h1_by_tls<F, S>(
    config: Arc<ServerConfig>,
    stranger: impl Fn(u8) + Clone + Send + 'static,
    serve: S,
) -> Result<Origin>
where
    F: Future<Output = io::Result<()>> + Send + 'static,
    S: Fn(RawHttp1<TlsStream<TcpStream>>) -> F + Clone + Send + 'static,
{
    Origin::accepting(listen(SocketAddr::new(LOOPBACK, 0))?, move |stream| {
        let (acceptor, serve, stranger) = (TlsAcceptor::from(config.clone()), serve.clone(), stranger.clone());
        async move {
            let mut first = [0];
            if stream.peek(&mut first).await.is_ok_and(|length| length > 0) && first[0] != HANDSHAKE {
                stranger(first[0]);
            }
            if let Ok(stream) = acceptor.accept(stream).await {
                drop(serve(RawHttp1::new(stream)).await);
            }
        }
    })
}

/// A plaintext HTTP/2 origin; `serve` gets each stream.
///
/// # Errors
/// When no port can be bound.
pub fn h2<F, S>(serve: S) -> Result<Origin>
where
    F: Future<Output = io::Result<()>> + Send + 'static,
    S: Fn(Exchange) -> F + Clone + Send + 'static,
{
    h2_on(listen(SocketAddr::new(LOOPBACK, 0))?, serve)
}

/// The same on a listener (prior knowledge, extended CONNECT on).
///
/// # Errors
/// When the listener has no address.
pub fn h2_on<F, S>(listener: TcpListener, serve: S) -> Result<Origin>
where
    F: Future<Output = io::Result<()>> + Send + 'static,
    S: Fn(Exchange) -> F + Clone + Send + 'static,
{
    Origin::accepting(listener, move |stream| serve_connection(stream, serve.clone()))
}
