//! HTTP/2 frame by frame, for messages that no library sends.
//!
//! In: a connection, and frames with any type, flags, stream and payload, valid or not. Out: the received frames.
//! Header blocks are written as literals without indexing (RFC 7541, section 6.2.2), so that any byte can be in any
//! field; received ones are not decoded. Every wait is bounded.

use std::{io, net::SocketAddr};

use bytes::Bytes;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
};

use crate::raw_http1::RawHttp1;

/// The connection preface of a client (RFC 9113, section 3.4).
pub const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Frame types (RFC 9113, section 6).
pub mod kind {
    /// The frame type DATA.
    pub const DATA: u8 = 0;
    /// The frame type HEADERS.
    pub const HEADERS: u8 = 1;
    /// The frame type RST_STREAM.
    pub const RST_STREAM: u8 = 3;
    /// The frame type SETTINGS.
    pub const SETTINGS: u8 = 4;
    /// The frame type PUSH_PROMISE.
    pub const PUSH_PROMISE: u8 = 5;
    /// The frame type PING.
    pub const PING: u8 = 6;
    /// The frame type GOAWAY.
    pub const GOAWAY: u8 = 7;
    /// The frame type WINDOW_UPDATE.
    pub const WINDOW_UPDATE: u8 = 8;
    /// The frame type CONTINUATION.
    pub const CONTINUATION: u8 = 9;
}

/// The stream ends with this frame.
pub const END_STREAM: u8 = 0x1;
/// The acknowledgement flag of SETTINGS and PING.
pub const ACK: u8 = 0x1;
/// The header block ends with this frame.
pub const END_HEADERS: u8 = 0x4;

/// SETTINGS_INITIAL_WINDOW_SIZE
pub const INITIAL_WINDOW_SIZE: u16 = 4;

/// The error code ENHANCE_YOUR_CALM (RFC 9113, section 7).
pub const CALM: u32 = 0xb;
/// The error code REFUSED_STREAM.
pub const REFUSED_STREAM: u32 = 0x7;
/// The error code CANCEL.
pub const CANCEL: u32 = 0x8;

/// A frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// The frame type: see [`kind`].
    pub kind: u8,
    /// The flags.
    pub flags: u8,
    /// The stream; 0 is the connection.
    pub stream: u32,
    /// The payload.
    pub payload: Bytes,
}

impl Frame {
    /// A frame of these parts.
    pub fn new(kind: u8, flags: u8, stream: u32, payload: impl Into<Bytes>) -> Self {
        Self { kind, flags, stream, payload: payload.into() }
    }

    /// A HEADERS frame with END_HEADERS.
    pub fn headers(stream: u32, ends: bool, fields: &[(&str, &str)]) -> Self {
        let fields: Vec<_> = fields.iter().map(|(name, value)| (name.as_bytes(), value.as_bytes())).collect();
        Self::new(kind::HEADERS, END_HEADERS | u8::from(ends), stream, block(&fields))
    }

    /// A complete GET request.
    pub fn get(stream: u32, authority: &str, path: &str) -> Self {
        let fields = [(":method", "GET"), (":scheme", "http"), (":authority", authority), (":path", path)];
        Self::headers(stream, true, &fields)
    }

    /// An RST_STREAM frame.
    pub fn reset(stream: u32, reason: u32) -> Self {
        Self::new(kind::RST_STREAM, 0, stream, reason.to_be_bytes().to_vec())
    }

    /// A SETTINGS frame.
    pub fn settings(settings: &[(u16, u32)]) -> Self {
        let pairs = settings.iter().map(|(id, value)| [&id.to_be_bytes()[..], &value.to_be_bytes()].concat());
        Self::new(kind::SETTINGS, 0, 0, pairs.collect::<Vec<_>>().concat())
    }

    /// The encoded frame.
    pub fn bytes(&self) -> Vec<u8> {
        // The length field has 24 bits.
        let length = u32::try_from(self.payload.len()).unwrap_or(u32::MAX).to_be_bytes();
        [&length[1..], &[self.kind, self.flags], &self.stream.to_be_bytes(), &self.payload].concat()
    }

    /// The error code of RST_STREAM or GOAWAY.
    pub fn reason(&self) -> Option<u32> {
        let at = match self.kind {
            kind::RST_STREAM => 0,
            kind::GOAWAY => 4,
            _ => return None,
        };
        let code = self.payload.get(at..at + 4)?;
        Some(code.iter().fold(0, |code, byte| code << 8 | u32::from(*byte)))
    }
}

/// A header block of literals without indexing.
pub fn block(fields: &[(&[u8], &[u8])]) -> Vec<u8> {
    let mut out = Vec::new();
    for (name, value) in fields {
        out.push(0);
        put_text(&mut out, name);
        put_text(&mut out, value);
    }
    out
}

/// A string literal (RFC 7541, section 5.2): a length with a prefix of 7 bits, and the raw bytes.
fn put_text(out: &mut Vec<u8>, text: &[u8]) {
    let mut length = text.len();
    if length < 127 {
        out.extend(u8::try_from(length));
    } else {
        out.push(127);
        length -= 127;
        while length >= 128 {
            out.extend(u8::try_from(length % 128 + 128));
            length /= 128;
        }
        out.extend(u8::try_from(length));
    }
    out.extend_from_slice(text);
}

/// A connection with access to each frame.
#[derive(Debug)]
pub struct Frames<S> {
    http1: RawHttp1<S>,
}

impl Frames<TcpStream> {
    /// Connects in plaintext, and sends these SETTINGS.
    ///
    /// # Errors
    /// The connection failed, or the peer does not speak HTTP/2.
    pub async fn connect(address: SocketAddr, settings: &[(u16, u32)]) -> io::Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Self::begin(stream, settings).await
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Frames<S> {
    /// Starts as a client: sends preface and SETTINGS, and acknowledges those of the server.
    ///
    /// # Errors
    /// The peer does not speak HTTP/2.
    pub async fn begin(stream: S, settings: &[(u16, u32)]) -> io::Result<Self> {
        let mut this = Self { http1: RawHttp1::new(stream) };
        this.http1.send([PREFACE, &Frame::settings(settings).bytes()].concat()).await?;
        this.settle().await?;
        Ok(this)
    }

    /// Starts as a server: reads the preface, sends SETTINGS, and acknowledges those of the client.
    ///
    /// # Errors
    /// The peer does not speak HTTP/2.
    pub async fn accept(mut http1: RawHttp1<S>, settings: &[(u16, u32)]) -> io::Result<Self> {
        if http1.exactly(PREFACE.len()).await? != PREFACE {
            return Err(io::Error::other("no preface"));
        }
        http1.send(Frame::settings(settings).bytes()).await?;
        let mut this = Self { http1 };
        this.settle().await?;
        Ok(this)
    }

    /// Waits for the peer's SETTINGS, and acknowledges them.
    async fn settle(&mut self) -> io::Result<()> {
        self.until("SETTINGS", |frame| frame.kind == kind::SETTINGS && frame.flags & ACK == 0).await?;
        self.send(&[Frame::new(kind::SETTINGS, ACK, 0, "")]).await
    }

    /// Sends frames in one write.
    ///
    /// # Errors
    /// The peer closed the connection, or accepts nothing.
    pub async fn send(&mut self, frames: &[Frame]) -> io::Result<()> {
        self.http1.send(frames.iter().map(Frame::bytes).collect::<Vec<_>>().concat()).await
    }

    /// Sends bytes that need not be frames.
    ///
    /// # Errors
    /// The errors of [`Self::send`].
    pub async fn send_bytes(&mut self, bytes: impl AsRef<[u8]>) -> io::Result<()> {
        self.http1.send(bytes).await
    }

    /// Closes our direction of the connection.
    ///
    /// # Errors
    /// The peer closed the connection.
    pub async fn finish(&mut self) -> io::Result<()> {
        self.http1.finish().await
    }

    /// Reads the next frame.
    ///
    /// # Errors
    /// No frame arrives, or the connection ended or failed.
    pub async fn next(&mut self) -> io::Result<Frame> {
        let head = self.http1.exactly(9).await?;
        let number = |bytes: &[u8]| bytes.iter().fold(0u32, |number, byte| number << 8 | u32::from(*byte));
        let payload = self.http1.exactly(number(&head[..3]) as usize).await?;
        Ok(Frame::new(head[3], head[4], number(&head[5..]) & (u32::MAX >> 1), payload))
    }

    /// Reads the next matching frame, and skips others.
    ///
    /// # Errors
    /// The connection ended or failed before; the message contains `what`.
    pub async fn until(&mut self, what: &str, fits: impl Fn(&Frame) -> bool) -> io::Result<Frame> {
        loop {
            let frame = self.next().await;
            let frame = frame.map_err(|error| io::Error::new(error.kind(), format!("waiting for {what}: {error}")))?;
            if fits(&frame) {
                return Ok(frame);
            }
        }
    }

    /// Waits for the acknowledgement of a PING: the peer has read everything that was sent before.
    ///
    /// # Errors
    /// No acknowledgement arrives.
    pub async fn ping(&mut self) -> io::Result<()> {
        self.send(&[Frame::new(kind::PING, 0, 0, &b"are you?"[..])]).await?;
        self.until("an answer to a PING", |frame| frame.kind == kind::PING && frame.flags & ACK != 0).await.map(drop)
    }

    /// Reads to the end of the connection; returns the error code of GOAWAY, if one arrived. A peer that closes before
    /// it has read everything resets the connection, and its last frames may be lost.
    ///
    /// # Errors
    /// The connection stays open.
    pub async fn goodbye(&mut self) -> io::Result<Option<u32>> {
        let mut output = None;
        loop {
            match self.next().await {
                Ok(frame) if frame.kind == kind::GOAWAY => output = frame.reason(),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::TimedOut => return Err(error),
                Err(_) => return Ok(output),
            }
        }
    }

    /// The connection, and the unused received bytes.
    pub fn into_parts(self) -> (S, Bytes) {
        self.http1.into_parts()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_those_of_rfc_9113() {
        assert_eq!(Frame::reset(3, CANCEL).bytes(), [0, 0, 4, 3, 0, 0, 0, 0, 3, 0, 0, 0, 8]);
        assert_eq!(Frame::reset(3, CANCEL).reason(), Some(CANCEL));
        assert_eq!(Frame::settings(&[(4, 1)]).payload, &[0, 4, 0, 0, 0, 1][..]);
    }

    #[test]
    fn literals_are_those_of_rfc_7541() {
        assert_eq!(block(&[(b"a", b"bc")]), b"\0\x01a\x02bc");
        let long = [b'x'; 1337];
        // The example of C.1.2 with a prefix of 7 bits: 1337 - 127 = 1210 = 9 * 128 + 58.
        assert_eq!(block(&[(b"", &long)])[..5], [0, 0, 127, 58 + 128, 9]);
    }
}
