//! Servers that do the least: a relay that copies publications, and a forwarder of TCP.
//!
//! In: an address. Out: the bytes that `hermes` would send, without its decisions. A thread for each connection, with blocking
//! reads and writes. Never: a check of what the benchmark sends.

use std::collections::HashMap;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

use anyhow::{Context as _, Result};
use clap::{Args, Subcommand};

use crate::pep::split_one;

const BUFFER: usize = 64 << 10;

/// A server, as a process of its own.
#[derive(Debug, Clone, Args)]
pub(crate) struct BareArgs {
    #[command(subcommand)]
    server: Server,
}

#[derive(Debug, Clone, Subcommand)]
enum Server {
    /// Copies each POST to the GET of the same path.
    Relay { listen: SocketAddr },
    /// Copies each connection to another address.
    Forwarder { listen: SocketAddr, to: SocketAddr },
}

/// Serves until the process is ended.
///
/// # Errors
/// The address is in use.
pub(crate) fn serve(args: &BareArgs) -> Result<()> {
    match args.server {
        Server::Relay { listen } => relay(listen),
        Server::Forwarder { listen, to } => forward(listen, to),
    }
}

type Subscribers = Arc<Mutex<HashMap<String, TcpStream>>>;

fn relay(listen: SocketAddr) -> Result<()> {
    let subscribers = Subscribers::default();
    for client in TcpListener::bind(listen)?.incoming().flatten() {
        let subscribers = subscribers.clone();
        thread::spawn(move || relay_one(client, &subscribers));
    }
    Ok(())
}

fn relay_one(mut client: TcpStream, subscribers: &Subscribers) -> Result<()> {
    client.set_nodelay(true)?;
    let mut buffer = Vec::with_capacity(BUFFER);
    let mut chunk = Vec::new();
    loop {
        let head = loop {
            match buffer.windows(4).position(|window| window == b"\r\n\r\n") {
                Some(at) => break at + 4,
                None => more(&mut client, &mut buffer)?,
            }
        };
        let text = String::from_utf8_lossy(&buffer[..head]).to_ascii_lowercase();
        let path = text.split(' ').nth(1).context("no path")?.to_owned();
        if text.starts_with("get") {
            let response =
                b"HTTP/1.1 200 OK\r\ncontent-type: multipart/mixed; boundary=0123456789abcdef0123456789abcdef\r\n\
                transfer-encoding: chunked\r\n\r\n";
            let subscriber = client.try_clone()?;
            subscribers.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).insert(path, subscriber);
            client.write_all(response)?;
            buffer.clear();
            continue;
        }
        let length = text.split("content-length: ").nth(1).and_then(|rest| rest.split("\r\n").next());
        let end = head + length.context("no content-length")?.parse::<usize>()?;
        while buffer.len() < end {
            more(&mut client, &mut buffer)?;
        }
        let subscriber =
            subscribers.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).get(&path).map(TcpStream::try_clone);
        if let Some(subscriber) = subscriber {
            let part = format!(
                "\r\n--0123456789abcdef0123456789abcdef\r\ncontent-length: {}\r\nhermes-event-id: 0123456789abcdef-1\r\n\r\n",
                end - head
            );
            chunk.clear();
            write!(chunk, "{:x}\r\n{part}", part.len() + end - head)?;
            chunk.extend_from_slice(&buffer[head..end]);
            chunk.extend_from_slice(b"\r\n");
            // A subscriber that has what it wants may leave before the rest.
            let _ = subscriber?.write_all(&chunk);
        }
        let response = b"HTTP/1.1 204 No Content\r\nhermes-subscribers: 1\r\nhermes-delivered: 1\r\n\
            hermes-event-id: 0123456789abcdef-1\r\ndate: Thu, 01 Jan 1970 00:00:00 GMT\r\n\r\n";
        client.write_all(response)?;
        buffer.drain(..end);
    }
}

fn more(client: &mut TcpStream, buffer: &mut Vec<u8>) -> Result<()> {
    let filled = buffer.len();
    buffer.resize(filled + BUFFER, 0);
    let read = client.read(&mut buffer[filled..])?;
    buffer.truncate(filled + read);
    anyhow::ensure!(read > 0, "the client left");
    Ok(())
}

fn forward(listen: SocketAddr, to: SocketAddr) -> Result<()> {
    for client in TcpListener::bind(listen)?.incoming().flatten() {
        thread::spawn(move || split_one(client, to));
    }
    Ok(())
}
