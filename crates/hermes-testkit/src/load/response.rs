//! HTTP/1.1 as a load generator needs it: one request out, one answer in, compared.
//!
//! In: a stream and the expected payload. Out: success or the [`Failure`]. Only responses with `Content-Length` are
//! supported: our origins send it and no proxy has a reason to remove it. The parser is far cheaper than an HTTP
//! library, so that the load generator does not distort the measurement.

use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

use super::outcome::Failure;

/// Headers of one answer; proxies add a handful.
const HEADERS: usize = 32;
/// An answer's head longer than this is no answer of ours.
const HEAD: usize = 16 << 10;

/// A client connection with the bytes that were read but not used yet.
pub(super) struct Connection<S> {
    stream: S,
    buffer: BytesMut,
}

struct Head {
    status: u16,
    /// Bytes of the head itself.
    length: usize,
    body: usize,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Connection<S> {
    pub(super) fn new(stream: S) -> Self {
        Self { stream, buffer: BytesMut::with_capacity(4096) }
    }

    /// Sends `request` and demands `200` with exactly `payload`.
    pub(super) async fn get(&mut self, request: &[u8], payload: &[u8]) -> Result<(), Failure> {
        self.stream.write_all(request).await?;
        let head = self.head().await?;
        if head.status != 200 {
            return Err(Failure::Status(head.status));
        }
        let end = head.length + head.body;
        while self.buffer.len() < end {
            self.fill().await?;
        }
        let right = self.buffer[head.length..end] == *payload;
        drop(self.buffer.split_to(end));
        if right { Ok(()) } else { Err(Failure::WrongBytes) }
    }

    /// Sends a CONNECT and returns the stream once the tunnel is open.
    pub(super) async fn tunnel(mut self, request: &[u8]) -> Result<S, Failure> {
        self.stream.write_all(request).await?;
        let head = self.head().await?;
        match head.status {
            200 if self.buffer.len() == head.length => Ok(self.stream),
            200 => Err(Failure::Malformed("bytes in the tunnel before ours")),
            status => Err(Failure::Status(status)),
        }
    }

    async fn head(&mut self) -> Result<Head, Failure> {
        loop {
            if let Some(head) = parse(&self.buffer)? {
                return Ok(head);
            }
            if self.buffer.len() > HEAD {
                return Err(Failure::Malformed("head too long"));
            }
            self.fill().await?;
        }
    }

    async fn fill(&mut self) -> Result<(), Failure> {
        self.buffer.reserve(4096);
        match self.stream.read_buf(&mut self.buffer).await? {
            0 => Err(Failure::Closed),
            _ => Ok(()),
        }
    }
}

fn parse(bytes: &[u8]) -> Result<Option<Head>, Failure> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS];
    let mut response = httparse::Response::new(&mut headers);
    let parsed = response.parse(bytes).map_err(|_| Failure::Malformed("not an HTTP response"))?;
    let httparse::Status::Complete(length) = parsed else {
        return Ok(None);
    };
    let status = response.code.unwrap_or_default();
    if response.headers.iter().any(|h| h.name.eq_ignore_ascii_case("transfer-encoding")) {
        return Err(Failure::Malformed("transfer-encoding where a length was sent"));
    }
    let body = response.headers.iter().find(|h| h.name.eq_ignore_ascii_case("content-length"));
    let body = match body {
        None => 0,
        Some(header) => std::str::from_utf8(header.value)
            .ok()
            .and_then(|value| value.trim().parse().ok())
            .ok_or(Failure::Malformed("content-length"))?,
    };
    Ok(Some(Head { status, length, body }))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    async fn answered(answer: &[u8]) -> Result<(), Failure> {
        let (client, mut server) = tokio::io::duplex(1 << 16);
        server.write_all(answer).await.unwrap();
        server.shutdown().await.unwrap();
        Connection::new(client).get(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", b"payload").await
    }

    #[tokio::test]
    async fn only_the_right_answer_is_a_success() {
        let cases: [(&[u8], Result<(), Failure>); 7] = [
            (b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\npayload", Ok(())),
            (b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\npaYload", Err(Failure::WrongBytes)),
            (b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\npayloa", Err(Failure::WrongBytes)),
            (b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\npayl", Err(Failure::Closed)),
            (b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n", Err(Failure::Status(503))),
            (b"HTTP/1.1 200 OK\r\n\r\npayload", Err(Failure::WrongBytes)),
            (b"\x16\x03\x01", Err(Failure::Malformed("not an HTTP response"))),
        ];
        for (answer, expected) in cases {
            assert_eq!(answered(answer).await, expected, "{}", String::from_utf8_lossy(answer));
        }
    }

    #[tokio::test]
    async fn a_connection_is_used_again_and_again() {
        let (client, mut server) = tokio::io::duplex(1 << 16);
        let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\npayload";
        // Both answers at once: the second must still be there for the second request.
        server.write_all(&[answer.as_slice(), answer].concat()).await.unwrap();
        let mut connection = Connection::new(client);
        for _ in 0..2 {
            connection.get(b"GET / HTTP/1.1\r\n\r\n", b"payload").await.unwrap();
        }
    }
}
