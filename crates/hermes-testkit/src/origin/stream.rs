//! TCP echo, plain and over TLS.
//!
//! In: bytes. Out: the same bytes, and the end of the stream when the client has ended its side: half-close works.

use std::sync::Arc;

use rustls::ServerConfig;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::TcpListener,
};
use tokio_rustls::TlsAcceptor;

use crate::{Result, origin::Origin};

/// Bytes in flight in one echo.
const BUFFER: usize = 64 << 10;

/// Echoes every connection.
///
/// # Errors
/// When the listener has no address.
pub fn echo(listener: TcpListener) -> Result<Origin> {
    Origin::accepting(listener, |stream| async move {
        // A client that resets its connection is its own affair.
        let _ = echo_stream(stream).await;
    })
}

/// Echoes every connection inside TLS.
///
/// # Errors
/// When the listener has no address.
pub fn echo_tls(listener: TcpListener, config: Arc<ServerConfig>) -> Result<Origin> {
    let acceptor = TlsAcceptor::from(config);
    Origin::accepting(listener, move |stream| {
        let acceptor = acceptor.clone();
        async move {
            if let Ok(stream) = acceptor.accept(stream).await {
                let _ = echo_stream(stream).await;
            }
        }
    })
}

async fn echo_stream(mut stream: impl AsyncRead + AsyncWrite + Unpin) -> std::io::Result<()> {
    // Small first: most echoes are of one request, and a thousand of them should not take 64 MiB.
    let mut buffer = vec![0; 4096];
    loop {
        let length = stream.read(&mut buffer).await?;
        if length == 0 {
            return stream.shutdown().await;
        }
        stream.write_all(&buffer[..length]).await?;
        if length == buffer.len() && length < BUFFER {
            buffer.resize(BUFFER, 0);
        }
    }
}
