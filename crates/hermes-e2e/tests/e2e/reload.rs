//! Reconfiguration without loss: documents and certificates change under traffic, and only what they say changes.
//!
//! Real nodes, real sockets, every byte checked.

mod documents;
mod listeners;
mod load;
mod sessions;
mod trust;

use hermes_testkit::binary::hermes;
use std::net::SocketAddr;

use hermes_testkit::{overlay::Overlay, raw_http1::RawHttp1};

fn overlay() -> Overlay {
    Overlay::new(hermes()).unwrap()
}

fn loopback() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

async fn get(to: SocketAddr, host: &str, path: &str) -> std::io::Result<(u16, String)> {
    let mut http1 = RawHttp1::connect(to).await?;
    http1.send(format!("GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n")).await?;
    let head = http1.head().await?;
    let body = http1.body(&head).await?;
    Ok((head.status(), body.text()))
}

/// CONNECT over HTTP/1.1, the tunnel open.
async fn connect(to: SocketAddr, authority: &str) -> RawHttp1<tokio::net::TcpStream> {
    let mut http1 = RawHttp1::connect(to).await.unwrap();
    http1.send(format!("CONNECT {authority} HTTP/1.1\r\nhost: {authority}\r\n\r\n")).await.unwrap();
    let head = http1.head().await.unwrap();
    assert_eq!(head.status(), 200, "{head:?}");
    http1
}

/// There and back through a tunnel to an echo.
async fn echoes(tunnel: &mut RawHttp1<tokio::net::TcpStream>, words: &[u8]) -> bool {
    tunnel.send(words).await.is_ok() && tunnel.exactly(words.len()).await.is_ok_and(|back| back == words)
}
