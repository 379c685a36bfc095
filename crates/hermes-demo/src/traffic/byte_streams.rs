//! Raw TCP: a program that connects to an address of the laptop and does not use HTTP.
//!
//! In: the laptop's TCP listener. Out: messages that came back one by one, then a long stream, both
//! directions at once, ended by a half-close.

use std::net::SocketAddr;

use anyhow::{Context, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

use super::Tally;
use crate::client::RESPONSE_TIMEOUT;
use crate::content::{self, content};

const MESSAGES: u64 = 150;
const MESSAGE_BYTES: usize = 64;
const STREAM_BYTES: usize = content::LONG;

/// Sends messages, each after the last came back, then a stream.
pub(super) async fn echo(database: SocketAddr, number: u64) -> anyhow::Result<Tally> {
    let mut stream = TcpStream::connect(database).await?;
    stream.set_nodelay(true)?;
    let mut tally = Tally::default();
    for message in 0..MESSAGES {
        let sent = content(number * MESSAGES + message, MESSAGE_BYTES);
        let mut back = [0; MESSAGE_BYTES];
        let begun = Instant::now();
        let exchange = async {
            stream.write_all(&sent).await?;
            stream.read_exact(&mut back).await
        };
        timeout(RESPONSE_TIMEOUT, exchange).await.context("no echo came")??;
        tally.times.push(begun.elapsed());
        ensure!(sent == back[..], "a message came back changed");
        tally.add(2 * MESSAGE_BYTES);
    }
    let sent = content(!number, STREAM_BYTES);
    let back = timeout(RESPONSE_TIMEOUT, both_ways(stream, &sent)).await.context("a stream did not end")??;
    ensure!(back == sent, "a stream of {STREAM_BYTES} bytes came back changed ({} bytes)", back.len());
    tally.add(2 * STREAM_BYTES);
    Ok(tally)
}

async fn both_ways(stream: TcpStream, sent: &[u8]) -> anyhow::Result<Vec<u8>> {
    let (mut read, mut write) = stream.into_split();
    let mut back = Vec::with_capacity(sent.len());
    let send = async {
        write.write_all(sent).await?;
        write.shutdown().await
    };
    let (sent, read) = tokio::join!(send, read.read_to_end(&mut back));
    sent.context("sending")?;
    read.context("receiving")?;
    Ok(back)
}
