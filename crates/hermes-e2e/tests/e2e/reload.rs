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

use hermes_testkit::{dialog::Dialog, overlay::Overlay};

fn overlay() -> Overlay {
    Overlay::new(hermes()).unwrap()
}

fn loopback() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

async fn get(to: SocketAddr, host: &str, path: &str) -> std::io::Result<(u16, String)> {
    let mut dialog = Dialog::connect(to).await?;
    dialog.send(format!("GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n")).await?;
    let head = dialog.head().await?;
    let body = dialog.body(&head).await?;
    Ok((head.status(), body.text()))
}

/// CONNECT over HTTP/1.1, the tunnel open.
async fn connect(to: SocketAddr, authority: &str) -> Dialog<tokio::net::TcpStream> {
    let mut dialog = Dialog::connect(to).await.unwrap();
    dialog.send(format!("CONNECT {authority} HTTP/1.1\r\nhost: {authority}\r\n\r\n")).await.unwrap();
    let head = dialog.head().await.unwrap();
    assert_eq!(head.status(), 200, "{head:?}");
    dialog
}

/// There and back through a tunnel to an echo.
async fn echoes(tunnel: &mut Dialog<tokio::net::TcpStream>, words: &[u8]) -> bool {
    tunnel.send(words).await.is_ok() && tunnel.exactly(words.len()).await.is_ok_and(|back| back == words)
}
