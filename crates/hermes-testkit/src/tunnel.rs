//! A byte stream through a proxy over any protocol.
//!
//! In: an open tunnel: a bare connection, a stream of HTTP/2 or HTTP/3, or the chunked bodies of an HTTP/1.1 POST. Out:
//! its two directions, each with its own end. Chunking is written here by hand, so that the product does not check
//! itself.

use std::io;

use bytes::{Bytes, BytesMut};
use h2::{Reason, RecvStream, SendStream};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, Join, ReadHalf, Sink, WriteHalf};

use crate::{
    h3,
    multiplex::{self, Multiplex},
    raw_http1::{RawHttp1, in_time},
};

/// Any connection.
pub trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Stream for T {}

/// A boxed connection.
pub type BoxedStream = Box<dyn Stream>;

/// Maximum number of bytes of one read.
const CHUNK_SIZE: usize = 64 << 10;

/// An open tunnel.
pub struct Tunnel {
    /// The direction from the target.
    pub reader: Reader,
    /// The direction to the target.
    pub writer: Writer,
}

/// A direction of a stream.
pub enum Reader {
    /// A connection, and its bytes that were read already.
    Io(ReadHalf<BoxedStream>, Bytes),
    /// An HTTP/2 stream; its connection lives as long as the stream.
    H2(RecvStream, Box<Multiplex>),
    /// An HTTP/3 stream; its connection lives as long as the stream.
    H3(h3::Receiving, Box<h3::Connection>),
    /// A chunked body.
    Chunked(Box<RawHttp1<Join<ReadHalf<BoxedStream>, Sink>>>),
}

/// The other direction.
pub enum Writer {
    /// A connection.
    Io(WriteHalf<BoxedStream>),
    /// An HTTP/2 stream.
    H2(SendStream<Bytes>),
    /// An HTTP/3 stream.
    H3(h3::Sending),
    /// A chunked body.
    Chunked(WriteHalf<BoxedStream>),
}

impl Tunnel {
    /// A bare connection.
    pub fn io(stream: BoxedStream, ahead: Bytes) -> Self {
        let (reader, writer) = tokio::io::split(stream);
        Self { reader: Reader::Io(reader, ahead), writer: Writer::Io(writer) }
    }

    /// The bodies of a POST whose response head was read.
    pub fn chunked(stream: BoxedStream, ahead: Bytes) -> Self {
        let (reader, writer) = tokio::io::split(stream);
        let http1 = RawHttp1::with_unread(tokio::io::join(reader, tokio::io::sink()), ahead);
        Self { reader: Reader::Chunked(Box::new(http1)), writer: Writer::Chunked(writer) }
    }

    /// A stream of HTTP/2.
    pub fn h2(connection: Multiplex, recv: RecvStream, send: SendStream<Bytes>) -> Self {
        Self { reader: Reader::H2(recv, Box::new(connection)), writer: Writer::H2(send) }
    }

    /// A stream of HTTP/3.
    pub fn h3(connection: h3::Connection, recv: h3::Receiving, send: h3::Sending) -> Self {
        Self { reader: Reader::H3(recv, Box::new(connection)), writer: Writer::H3(send) }
    }
}

impl Reader {
    /// Reads the next piece; `None` at the end of the stream.
    ///
    /// # Errors
    /// The tunnel failed.
    pub async fn chunk(&mut self) -> io::Result<Option<Bytes>> {
        match self {
            Reader::Io(_, ahead) if !ahead.is_empty() => Ok(Some(std::mem::take(ahead))),
            Reader::Io(stream, _) => {
                let mut part = BytesMut::with_capacity(CHUNK_SIZE);
                let read = in_time("reading a tunnel", stream.read_buf(&mut part)).await?;
                Ok((read > 0).then(|| part.freeze()))
            }
            Reader::H2(stream, _) => multiplex::receive(stream).await,
            Reader::H3(stream, _) => stream.chunk().await,
            Reader::Chunked(http1) => match http1.chunk().await? {
                Some(part) => Ok(Some(part)),
                None => http1.trailers().await.map(|_| None),
            },
        }
    }

    /// Reads everything up to the end of the stream.
    ///
    /// # Errors
    /// The tunnel failed.
    pub async fn to_end(&mut self) -> io::Result<Vec<u8>> {
        let mut all = Vec::new();
        while let Some(chunk) = self.chunk().await? {
            all.extend_from_slice(&chunk);
        }
        Ok(all)
    }

    /// Reads at least this number of bytes, and all that arrived with them.
    ///
    /// # Errors
    /// The tunnel ended or failed before.
    pub async fn at_least(&mut self, length: usize) -> io::Result<Vec<u8>> {
        let mut all = Vec::new();
        while all.len() < length {
            match self.chunk().await? {
                Some(chunk) => all.extend_from_slice(&chunk),
                None => {
                    return Err(io::Error::new(
                        io::ErrorKind::UnexpectedEof,
                        format!("{} of {length} bytes", all.len()),
                    ));
                }
            }
        }
        Ok(all)
    }
}

impl Writer {
    /// Sends bytes.
    ///
    /// # Errors
    /// The tunnel failed.
    pub async fn send(&mut self, data: impl Into<Bytes>) -> io::Result<()> {
        let data = data.into();
        match self {
            Writer::Io(stream) => {
                in_time("writing a tunnel", async {
                    stream.write_all(&data).await?;
                    stream.flush().await
                })
                .await
            }
            Writer::H2(stream) => multiplex::send_all(stream, data, false).await,
            Writer::H3(stream) => stream.data(data).await,
            // An empty chunk would be the last one.
            Writer::Chunked(_) if data.is_empty() => Ok(()),
            Writer::Chunked(stream) => {
                in_time("writing a tunnel", async {
                    stream.write_all(format!("{:x}\r\n", data.len()).as_bytes()).await?;
                    stream.write_all(&data).await?;
                    stream.write_all(b"\r\n").await?;
                    stream.flush().await
                })
                .await
            }
        }
    }

    /// Closes this direction.
    ///
    /// # Errors
    /// The tunnel failed.
    pub async fn finish(&mut self) -> io::Result<()> {
        match self {
            Writer::Io(stream) => in_time("ending a tunnel", stream.shutdown()).await,
            Writer::H2(stream) => stream.send_data(Bytes::new(), true).map_err(io::Error::other),
            Writer::H3(stream) => stream.finish(),
            Writer::Chunked(stream) => {
                in_time("ending a tunnel", async {
                    stream.write_all(b"0\r\n\r\n").await?;
                    stream.flush().await
                })
                .await
            }
        }
    }

    /// Resets the stream, if the protocol supports it.
    pub fn reset(&mut self) {
        match self {
            Writer::H2(stream) => stream.send_reset(Reason::CANCEL),
            Writer::H3(stream) => stream.reset(h3::wire::code::REQUEST_CANCELLED),
            Writer::Io(_) | Writer::Chunked(_) => {}
        }
    }
}
