//! A client of a relay over HTTP/1.1, with blocking reads and writes: it adds as little as it can to what is measured.
//!
//! In: the address of a relay, channels, contents. Out: subscriptions and publications. Never: a check of the framing of
//! publications, which Hermes' tests do.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};

/// The time for the start of a server, and for each answer.
pub(super) const TIMEOUT: Duration = Duration::from_secs(30);

/// The outcome of a thread in a namespace.
pub(crate) fn ended<T>(thread: JoinHandle<hermes_testkit::Result<Result<T>>>) -> Result<T> {
    thread.join().map_err(|_| anyhow!("a thread of the benchmark panicked"))??
}

pub(super) fn connect(address: SocketAddr) -> Result<TcpStream> {
    let stream = TcpStream::connect(address).context(address.to_string())?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    Ok(stream)
}

/// Subscribes, and returns the connection after the head of the response.
pub(super) fn subscribe(address: SocketAddr, path: &str) -> Result<TcpStream> {
    let mut stream = connect(address)?;
    write!(stream, "GET {path} HTTP/1.1\r\nhost: relay\r\nhermes-subscribe: true\r\naccept: multipart/mixed\r\n\r\n")?;
    let head = read_head(&mut stream)?;
    ensure!(head.starts_with("HTTP/1.1 200"), "{head}");
    Ok(stream)
}

/// Reads the head of a response, and nothing after it.
pub(super) fn read_head(stream: &mut TcpStream) -> Result<String> {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte)?;
        head.push(byte[0]);
    }
    Ok(String::from_utf8_lossy(&head).into_owned())
}

/// A publication, by `reliable` or `realtime`, whose content ends with a number.
pub(super) struct Publication {
    request: Vec<u8>,
}

impl Publication {
    pub(super) fn new(path: &str, mode: &str, bytes: usize) -> Self {
        let head =
            format!("POST {path} HTTP/1.1\r\nhost: relay\r\nhermes-relay: {mode}\r\ncontent-length: {bytes}\r\n\r\n");
        let mut request = head.into_bytes();
        request.resize(request.len() + bytes, b'x');
        Self { request }
    }

    /// The request with this number.
    pub(super) fn numbered(&mut self, number: usize) -> &[u8] {
        let end = ending(number);
        let from = self.request.len().saturating_sub(end.len());
        self.request[from..].copy_from_slice(&end);
        &self.request
    }
}

/// The last bytes of the content with this number. No other content and no framing has them.
pub(super) fn ending(number: usize) -> [u8; 9] {
    let mut end = *b"#00000000";
    let mut rest = number;
    for digit in end[1..].iter_mut().rev() {
        *digit += (rest % 10) as u8;
        rest /= 10;
    }
    end
}

/// Reads until these bytes have arrived, and leaves what follows them in the buffer.
pub(super) fn await_bytes(stream: &mut TcpStream, buffer: &mut Vec<u8>, wanted: &[u8]) -> Result<()> {
    let mut part = [0; 64 << 10];
    let mut searched = 0;
    loop {
        if let Some(at) = memchr::memmem::find(&buffer[searched..], wanted) {
            buffer.drain(..searched + at + wanted.len());
            return Ok(());
        }
        searched = (buffer.len() + 1).saturating_sub(wanted.len());
        let read = stream.read(&mut part)?;
        ensure!(read > 0, "the relay closed a connection");
        buffer.extend_from_slice(&part[..read]);
    }
}

/// Publishes `count` times `unit` bytes, pipelined, and reads the responses beside. Returns when it began.
pub(super) fn publish_all(stream: &mut TcpStream, path: &str, unit: usize, count: usize) -> Result<Instant> {
    let begun = Instant::now();
    let mut responses = stream.try_clone()?;
    let reader = std::thread::spawn(move || -> Result<()> {
        let mut buffer = Vec::new();
        (0..count).try_for_each(|_| await_bytes(&mut responses, &mut buffer, b"HTTP/1.1 204"))
    });
    let mut publication = Publication::new(path, "reliable", unit);
    for number in 0..count {
        stream.write_all(publication.numbered(number))?;
    }
    reader.join().map_err(|_| anyhow!("a thread of the benchmark panicked"))??;
    Ok(begun)
}

/// Reads until `bytes` have arrived, of which the framing is a part. Returns when they had.
pub(super) fn read_all(stream: &mut TcpStream, bytes: usize) -> Result<Instant> {
    let mut buffer = vec![0; 256 << 10];
    let mut arrived = 0;
    while arrived < bytes {
        let read = stream.read(&mut buffer).with_context(|| format!("after {arrived} of {bytes} bytes"))?;
        ensure!(read > 0, "the connection ended after {arrived} of {bytes} bytes");
        arrived += read;
    }
    Ok(Instant::now())
}
