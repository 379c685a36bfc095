//! HTTP by name, and HTTPS through CONNECT.
//!
//! In: the laptop's HTTP listener. Out: compared responses; one small exchange is timed each. No DNS knows the
//! requested names. The bank's certificate is from a CA that no node has, so a node that terminated TLS would be
//! detected.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use http::Method;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

use super::Tally;
use crate::client::{Client, RESPONSE_TIMEOUT};
use crate::content::{self, content};

/// The number of small responses that a client requests.
const SMALL: u64 = 150;
const SMALL_BYTES: usize = 8 << 10;
/// The size of the upload, which the server echoes.
const UPLOAD_BYTES: usize = content::LONG;
/// The size limit of a CONNECT response head.
const MAX_HEAD: usize = 8 << 10;

pub(super) type ClientTls = Arc<hermes_net::tls::RustlsClientConfig>;

/// Asks the laptop's node, as a proxy, for `http://SHOP/...`.
pub(super) async fn by_name(apps: SocketAddr, number: u64) -> anyhow::Result<Tally> {
    let client = Client::connect(apps).await?;
    exchanges(client, "http://SHOP", number).await
}

/// The TLS configuration of the bank's clients: they trust only the bank's CA.
pub(super) fn bank_tls(ca: &Path) -> anyhow::Result<ClientTls> {
    let roots = hermes_net::tls::Roots::load(ca)?;
    Ok(hermes_net::tls::client_config(None, hermes_net::tls::ServerIdentity::Name(roots), &[b"http/1.1"])?)
}

/// Opens a tunnel to `BANK:443` by CONNECT and speaks HTTPS in it.
pub(super) async fn end_to_end(apps: SocketAddr, tls: ClientTls, number: u64) -> anyhow::Result<Tally> {
    let stream = timeout(RESPONSE_TIMEOUT, connect(apps)).await.context("CONNECT BANK:443 was not answered")??;
    let stream = timeout(RESPONSE_TIMEOUT, hermes_net::tls::connect(tls, "bank", stream)).await;
    let stream = stream.context("no TLS handshake with BANK")?.context("TLS with BANK")?;
    exchanges(Client::over(stream).await?, "", number).await
}

async fn exchanges(mut client: Client, origin: &str, number: u64) -> anyhow::Result<Tally> {
    let mut tally = Tally::default();
    for exchange in 0..SMALL {
        let seed = number * SMALL + exchange;
        let uri = format!("{origin}/content/{seed}/{SMALL_BYTES}");
        let begun = Instant::now();
        let answer = client.get(&uri).await?;
        tally.times.push(begun.elapsed());
        ensure!(answer == content(seed, SMALL_BYTES), "{uri}: the answer is not what the service sent");
        tally.add(answer.len());
    }
    let upload = content(!number, UPLOAD_BYTES);
    let answer = client.send_request(Method::POST, &format!("{origin}/echo"), upload.clone()).await?;
    ensure!(answer == upload, "an upload of {UPLOAD_BYTES} bytes came back changed");
    tally.add(2 * upload.len());
    Ok(tally)
}

async fn connect(apps: SocketAddr) -> anyhow::Result<TcpStream> {
    let mut stream = TcpStream::connect(apps).await?;
    stream.set_nodelay(true)?;
    stream.write_all(b"CONNECT BANK:443 HTTP/1.1\r\nhost: BANK:443\r\n\r\n").await?;
    let mut head = Vec::new();
    // The head is read byte by byte: the bytes after it belong to TLS.
    while !head.ends_with(b"\r\n\r\n") {
        ensure!(head.len() < MAX_HEAD, "the answer to CONNECT BANK:443 has no end");
        head.push(stream.read_u8().await.context("the answer to CONNECT BANK:443 broke off")?);
    }
    if !head.starts_with(b"HTTP/1.1 200") {
        bail!("CONNECT BANK:443 was answered {}", String::from_utf8_lossy(&head).trim_end());
    }
    Ok(stream)
}
