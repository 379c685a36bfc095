//! HTTP/1.1 in plain sight: heads and bodies as they are on the wire, for tests that care for each byte.
//!
//! In: a stream, and bytes to send as they are. Out: heads, bodies with their trailers, or the bare stream. Serves
//! either side: the head of a request is read like that of a response. Corrects nothing and hides nothing. Every
//! wait is bounded, so that a test that would hang fails instead.

use std::{io, net::SocketAddr, time::Duration};

use bytes::{Bytes, BytesMut};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::TcpStream,
};

/// Nobody in a test is silent for so long and still right.
pub const SILENCE: Duration = Duration::from_secs(30);
/// A head longer than this is a mistake.
const HEAD: usize = 1 << 20;

/// A connection, with what was read of it and not yet used.
#[derive(Debug)]
pub struct Dialog<S> {
    stream: S,
    buffer: BytesMut,
}

/// The head of a request or response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Head {
    /// Request line or status line.
    pub first: String,
    /// Names in lower case, in their order.
    pub headers: Vec<(String, String)>,
}

/// A body that was read to its end.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Content {
    /// Its bytes, without chunking.
    pub data: Vec<u8>,
    /// What followed a chunked body.
    pub trailers: Vec<(String, String)>,
}

impl Head {
    /// The status of a response; 0 where there is none.
    pub fn status(&self) -> u16 {
        self.first.split(' ').nth(1).and_then(|text| text.parse().ok()).unwrap_or_default()
    }

    /// The method of a request.
    pub fn method(&self) -> &str {
        self.first.split(' ').next().unwrap_or_default()
    }

    /// The target of a request, in whatever form it came.
    pub fn target(&self) -> &str {
        self.first.split(' ').nth(1).unwrap_or_default()
    }

    /// The values of a field, joined by commas; `None` where it is absent.
    pub fn header(&self, name: &str) -> Option<String> {
        join(&self.headers, name)
    }
}

impl Content {
    /// As text.
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

impl Dialog<TcpStream> {
    /// Connects.
    ///
    /// # Errors
    /// The system's.
    pub async fn connect(address: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Self::new(stream))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Dialog<S> {
    /// Over a stream.
    pub fn new(stream: S) -> Self {
        Self { stream, buffer: BytesMut::new() }
    }

    /// Over a stream of which something was read already.
    pub fn with_unread(stream: S, unread: Bytes) -> Self {
        Self { stream, buffer: unread.into() }
    }

    /// Sends bytes as they are.
    ///
    /// # Errors
    /// The peer is gone, or takes nothing for [`SILENCE`].
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
    /// As [`Self::send`].
    pub async fn send_chunk(&mut self, data: &[u8]) -> io::Result<()> {
        let mut chunk = format!("{:x}\r\n", data.len()).into_bytes();
        chunk.extend_from_slice(data);
        chunk.extend_from_slice(b"\r\n");
        self.send(chunk).await
    }

    /// Ends our side.
    ///
    /// # Errors
    /// The peer is gone.
    pub async fn finish(&mut self) -> io::Result<()> {
        in_time("ending our side", self.stream.shutdown()).await
    }

    /// The next head.
    ///
    /// # Errors
    /// The connection ended or broke before, or what came is no head.
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

    /// The body that belongs to this head: by chunks, by length, or up to the end of the connection for a response
    /// that says neither.
    ///
    /// # Errors
    /// It breaks off.
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

    /// The next chunk of a chunked body; `None` at the last one, behind which the trailers stand.
    ///
    /// # Errors
    /// It breaks off, or is no chunk.
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

    /// What stands behind the last chunk.
    ///
    /// # Errors
    /// It breaks off.
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

    /// So many bytes.
    ///
    /// # Errors
    /// The connection ends or breaks before.
    pub async fn exactly(&mut self, length: usize) -> io::Result<Vec<u8>> {
        while self.buffer.len() < length {
            self.fill_some("before all bytes were there").await?;
        }
        Ok(self.buffer.split_to(length).to_vec())
    }

    /// Everything up to the orderly end of the connection.
    ///
    /// # Errors
    /// It breaks.
    pub async fn to_end(&mut self) -> io::Result<Vec<u8>> {
        while self.fill().await? {}
        Ok(self.buffer.split().to_vec())
    }

    /// Some bytes, as they come; `None` at the orderly end.
    ///
    /// # Errors
    /// The connection breaks.
    pub async fn some(&mut self) -> io::Result<Option<Bytes>> {
        if self.buffer.is_empty() && !self.fill().await? {
            return Ok(None);
        }
        Ok(Some(self.buffer.split().freeze()))
    }

    /// Whether it ends, orderly or not, before anything more comes. A connection that stays open in silence does not.
    pub async fn is_ended(&mut self) -> bool {
        match self.some().await {
            Ok(more) => more.is_none(),
            Err(error) => error.kind() != io::ErrorKind::TimedOut,
        }
    }

    /// What was received and not yet used: for proving that nothing came.
    pub fn unread(&self) -> &[u8] {
        &self.buffer
    }

    /// The stream, and what was read of it beyond what was used.
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

/// Waits for it at most [`SILENCE`].
///
/// # Errors
/// Its own, or `TimedOut` with what was waited for.
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
        let (mut near, mut far) = (Dialog::new(near), Dialog::new(far));
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
