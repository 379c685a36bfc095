//! A raw HTTP/1.1 connection: heads and bodies as they are on the wire, for tests that check each byte.
//!
//! In: a stream, and raw bytes to send. Out: heads, bodies with trailers, or the bare stream. Works for both sides:
//! heads of requests and responses are parsed in the same way. Corrects and hides nothing. Every wait is bounded, so
//! that a test fails instead of hanging.

use std::{io, net::SocketAddr, time::Duration};

use bytes::{Bytes, BytesMut};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::TcpStream,
};

/// Timeout of every wait: no correct peer in a test is silent for so long.
pub const SILENCE: Duration = Duration::from_secs(60);
/// Maximum size of a head.
const HEAD: usize = 1 << 20;

/// A connection, with its unused received bytes.
#[derive(Debug)]
pub struct RawHttp1<S> {
    stream: S,
    buffer: BytesMut,
}

/// The head of a request or response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Head {
    /// The request line or status line.
    pub first: String,
    /// Field names in lower case, in their order.
    pub headers: Vec<(String, String)>,
}

/// A complete body.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Content {
    /// The content without chunking.
    pub data: Vec<u8>,
    /// The trailers after a chunked body.
    pub trailers: Vec<(String, String)>,
}

impl Head {
    /// The status of a response; 0 for a request.
    pub fn status(&self) -> u16 {
        self.first.split(' ').nth(1).and_then(|text| text.parse().ok()).unwrap_or_default()
    }

    /// The method of a request.
    pub fn method(&self) -> &str {
        self.first.split(' ').next().unwrap_or_default()
    }

    /// The target of a request, unparsed.
    pub fn target(&self) -> &str {
        self.first.split(' ').nth(1).unwrap_or_default()
    }

    /// The values of a field, joined by commas; `None` if it is absent.
    pub fn header(&self, name: &str) -> Option<String> {
        join(&self.headers, name)
    }
}

impl Content {
    /// The content as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.data).into_owned()
    }

    /// The values of a trailer field.
    pub fn trailer(&self, name: &str) -> Option<String> {
        join(&self.trailers, name)
    }
}

fn join(fields: &[(String, String)], name: &str) -> Option<String> {
    let values: Vec<&str> = fields.iter().filter(|(found, _)| found == name).map(|(_, value)| value.as_str()).collect();
    (!values.is_empty()).then(|| values.join(", "))
}

impl RawHttp1<TcpStream> {
    /// Connects to an address.
    ///
    /// # Errors
    /// The system's error.
    pub async fn connect(address: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Self::new(stream))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> RawHttp1<S> {
    /// Wraps a stream.
    pub fn new(stream: S) -> Self {
        Self { stream, buffer: BytesMut::new() }
    }

    /// Wraps a stream of which some bytes were read already.
    pub fn with_unread(stream: S, unread: Bytes) -> Self {
        Self { stream, buffer: unread.into() }
    }

    /// Sends raw bytes.
    ///
    /// # Errors
    /// The peer closed the connection, or accepts nothing for [`SILENCE`].
    pub async fn send(&mut self, bytes: impl AsRef<[u8]>) -> io::Result<()> {
        let writing = async {
            self.stream.write_all(bytes.as_ref()).await?;
            self.stream.flush().await
        };
        in_time("sending", writing).await
    }

    /// Sends one chunk of a chunked body; an empty one would be the last.
    ///
    /// # Errors
    /// The errors of [`Self::send`].
    pub async fn send_chunk(&mut self, data: &[u8]) -> io::Result<()> {
        let mut chunk = format!("{:x}\r\n", data.len()).into_bytes();
        chunk.extend_from_slice(data);
        chunk.extend_from_slice(b"\r\n");
        self.send(chunk).await
    }

    /// Closes our direction of the stream.
    ///
    /// # Errors
    /// The peer closed the connection.
    pub async fn finish(&mut self) -> io::Result<()> {
        in_time("ending our side", self.stream.shutdown()).await
    }

    /// Reads the next head.
    ///
    /// # Errors
    /// The connection ended or failed before, or the bytes are not a head.
    pub async fn head(&mut self) -> io::Result<Head> {
        loop {
            if let Some(end) = find(&self.buffer, b"\r\n\r\n") {
                let text = self.buffer.split_to(end + 4);
                return parse(&text[..end]);
            }
            if self.buffer.len() > HEAD {
                return Err(io::Error::other("a head without an end"));
            }
            self.fill_some("before the end of a head").await?;
        }
    }

    /// Reads the body that belongs to this head: by chunks, by length, or up to the end of the connection for a
    /// response without either.
    ///
    /// # Errors
    /// The body is truncated.
    pub async fn body(&mut self, head: &Head) -> io::Result<Content> {
        let status = head.status();
        if head.header("transfer-encoding").is_some_and(|value| value.ends_with("chunked")) {
            return self.chunked().await;
        }
        let data = match head.header("content-length").map(|length| length.parse::<usize>()) {
            Some(length) => self.exactly(length.map_err(io::Error::other)?).await?,
            None if !head.first.starts_with("HTTP/") || matches!(status, 100..200 | 204 | 304) => Vec::new(),
            None => self.to_end().await?,
        };
        Ok(Content { data, trailers: Vec::new() })
    }

    async fn chunked(&mut self) -> io::Result<Content> {
        let mut data = Vec::new();
        while let Some(chunk) = self.chunk().await? {
            data.extend_from_slice(&chunk);
        }
        Ok(Content { data, trailers: self.trailers().await? })
    }

    /// Reads the next chunk of a chunked body; `None` at the last one, which the trailers follow.
    ///
    /// # Errors
    /// The body is truncated, or the bytes are not a chunk.
    pub async fn chunk(&mut self) -> io::Result<Option<Bytes>> {
        let line = self.line().await?;
        let digits = line.split(';').next().unwrap_or_default().trim();
        let length = usize::from_str_radix(digits, 16).map_err(io::Error::other)?;
        if length == 0 {
            return Ok(None);
        }
        let data = self.exactly(length).await?;
        match self.exactly(2).await?.as_slice() {
            b"\r\n" => Ok(Some(Bytes::from(data))),
            other => Err(io::Error::other(format!("a chunk that ends with {other:?}"))),
        }
    }

    /// Reads the trailers after the last chunk.
    ///
    /// # Errors
    /// The trailers are truncated.
    pub async fn trailers(&mut self) -> io::Result<Vec<(String, String)>> {
        let mut trailers = Vec::new();
        loop {
            let line = self.line().await?;
            if line.is_empty() {
                return Ok(trailers);
            }
            trailers.push(field(&line)?);
        }
    }

    async fn line(&mut self) -> io::Result<String> {
        loop {
            if let Some(end) = find(&self.buffer, b"\r\n") {
                let line = self.buffer.split_to(end + 2);
                return Ok(String::from_utf8_lossy(&line[..end]).into_owned());
            }
            self.fill_some("before the end of a line").await?;
        }
    }

    /// Reads exactly this number of bytes.
    ///
    /// # Errors
    /// The connection ends or fails before.
    pub async fn exactly(&mut self, length: usize) -> io::Result<Vec<u8>> {
        while self.buffer.len() < length {
            self.fill_some("before all bytes were there").await?;
        }
        Ok(self.buffer.split_to(length).to_vec())
    }

    /// Reads everything up to the end of the connection.
    ///
    /// # Errors
    /// The connection fails.
    pub async fn to_end(&mut self) -> io::Result<Vec<u8>> {
        while self.fill().await? {}
        Ok(self.buffer.split().to_vec())
    }

    /// Reads the next available bytes; `None` at the end of the stream.
    ///
    /// # Errors
    /// The connection fails.
    pub async fn some(&mut self) -> io::Result<Option<Bytes>> {
        if self.buffer.is_empty() && !self.fill().await? {
            return Ok(None);
        }
        Ok(Some(self.buffer.split().freeze()))
    }

    /// Whether the connection ends, by FIN or reset, before more bytes arrive. False if it stays open.
    pub async fn is_ended(&mut self) -> bool {
        match self.some().await {
            Ok(more) => more.is_none(),
            Err(error) => error.kind() != io::ErrorKind::TimedOut,
        }
    }

    /// The unused received bytes, to prove that nothing arrived.
    pub fn unread(&self) -> &[u8] {
        &self.buffer
    }

    /// The stream, and the unused received bytes.
    pub fn into_parts(self) -> (S, Bytes) {
        (self.stream, self.buffer.freeze())
    }

    /// The stream itself.
    pub fn stream(&self) -> &S {
        &self.stream
    }

    async fn fill_some(&mut self, when: &str) -> io::Result<()> {
        if self.fill().await? {
            return Ok(());
        }
        let seen = String::from_utf8_lossy(&self.buffer).into_owned();
        Err(io::Error::new(io::ErrorKind::UnexpectedEof, format!("the connection ended {when}; unread: {seen:?}")))
    }

    async fn fill(&mut self) -> io::Result<bool> {
        self.buffer.reserve(64 << 10);
        let read = in_time("reading", self.stream.read_buf(&mut self.buffer)).await?;
        Ok(read > 0)
    }
}

/// Waits for a future for at most [`SILENCE`].
///
/// # Errors
/// The future's error, or `TimedOut` with `what`.
pub async fn in_time<T>(what: &str, future: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    match tokio::time::timeout(SILENCE, future).await {
        Ok(result) => result,
        Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, format!("{what}: nothing for {SILENCE:?}"))),
    }
}

fn find(bytes: &[u8], needle: &[u8]) -> Option<usize> {
    bytes.windows(needle.len()).position(|window| window == needle)
}

fn parse(text: &[u8]) -> io::Result<Head> {
    let text = String::from_utf8_lossy(text).into_owned();
    let mut lines = text.split("\r\n");
    let first = lines.next().unwrap_or_default().to_owned();
    Ok(Head { first, headers: lines.map(field).collect::<io::Result<_>>()? })
}

fn field(line: &str) -> io::Result<(String, String)> {
    let (name, value) = line.split_once(':').ok_or_else(|| io::Error::other(format!("no header line: {line:?}")))?;
    Ok((name.to_ascii_lowercase(), value.trim().to_owned()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn chunks_and_trailers_are_read_as_they_stand() {
        let (near, far) = tokio::io::duplex(1 << 16);
        let (mut near, mut far) = (RawHttp1::new(near), RawHttp1::new(far));
        near.send("HTTP/1.1 200 OK\r\nA: 1\r\na: 2\r\nTransfer-Encoding: chunked\r\n\r\n").await.unwrap();
        near.send_chunk(b"hello ").await.unwrap();
        near.send_chunk(b"world").await.unwrap();
        near.send("0\r\nx-end: yes\r\n\r\nrest").await.unwrap();
        let head = far.head().await.unwrap();
        assert_eq!((head.status(), head.header("a").as_deref()), (200, Some("1, 2")));
        let content = far.body(&head).await.unwrap();
        assert_eq!((content.text().as_str(), content.trailer("x-end").as_deref()), ("hello world", Some("yes")));
        drop(near);
        assert_eq!(far.to_end().await.unwrap(), b"rest");
    }
}
