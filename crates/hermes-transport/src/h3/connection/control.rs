//! The unidirectional streams of a connection (RFC 9114, section 6.2): control, QPACK, and unknown types.
//!
//! In: the SETTINGS and GOAWAY of this node, and the peer's streams. Out: the bytes of this node's control stream, and
//! the peer's SETTINGS and GOAWAY in the [`Link`], or the error that closes the connection. Never: a push, or a dynamic
//! table of QPACK.

use std::io;

use bytes::BytesMut;
use hermes_net::quic;
use hermes_wire::h3::{self, Code, Frame, FrameDecoder, Instructions, Settings, stream};
use hermes_wire::varint;

use super::{Link, number};

/// The length of the longest encoded stream type, in bytes.
const TYPE: usize = varint::MAX_LEN;

/// Opens the control stream and sends SETTINGS on it. A server calls this before the handshake is complete, so that
/// SETTINGS arrive with its handshake messages. This saves a round trip for a client that waits for SETTINGS before it
/// sends an extended CONNECT.
pub async fn greet(connection: &quic::Connection, ours: Settings) -> io::Result<quic::SendStream> {
    let mut control = connection.open_uni().await?;
    let mut out = BytesMut::new();
    varint::encode(stream::CONTROL, &mut out);
    ours.put(&mut out);
    control.write_chunk(out.freeze()).await?;
    Ok(control)
}

impl Link {
    /// Writes the control stream: SETTINGS, and GOAWAY when this node drains the connection. Returns only with an
    /// error. No QPACK streams are opened, because without a dynamic table nothing is sent on them (RFC 9204, section
    /// 4.2).
    pub(super) async fn speak(&self, ours: Settings, control: Option<quic::SendStream>) -> Result<(), Fault> {
        let lost = |error: &dyn std::fmt::Display| Fault(Code::InternalError, error.to_string());
        let mut control = match control {
            Some(control) => control,
            None => greet(&self.connection, ours).await.map_err(|error| lost(&error))?,
        };
        let first_refused = self.farewell.wait().await;
        let mut out = BytesMut::new();
        h3::put_header(h3::GOAWAY, varint::len(first_refused), &mut out);
        varint::encode(first_refused, &mut out);
        control.write_chunk(out.freeze()).await.map_err(|error| lost(&error))?;
        // The control stream must stay open as long as the connection.
        std::future::pending().await
    }

    /// Reads one of the peer's unidirectional streams.
    pub(super) async fn read_control_stream(&self, mut recv: quic::RecvStream) -> Result<(), Fault> {
        let mut seen = Vec::with_capacity(TYPE);
        let kind = loop {
            let wanted = varint::decode(&seen).map(|(kind, _)| kind);
            if let Some(kind) = wanted {
                break kind;
            }
            // The type is read byte by byte, because the bytes after it belong to the reader of that type of stream.
            match recv.read_chunk(1, true).await {
                Ok(Some(chunk)) => seen.extend_from_slice(&chunk.bytes),
                // A stream may end before its type is complete (RFC 9114, section 6.2).
                Ok(None) | Err(_) => return Ok(()),
            }
        };
        match kind {
            stream::CONTROL | stream::QPACK_ENCODER | stream::QPACK_DECODER => {
                if self.critical.borrow().contains(&kind) {
                    return Err(Fault(Code::StreamCreationError, format!("a second stream of type {kind:#x}")));
                }
                self.critical.borrow_mut().push(kind);
                if kind == stream::CONTROL { self.obey(recv).await } else { hear_qpack(recv, kind).await }
            }
            stream::PUSH => {
                let (code, reason) = if self.is_server {
                    (Code::StreamCreationError, "a client pushes")
                } else {
                    (Code::IdError, "a push that was never allowed")
                };
                Err(Fault(code, reason.to_owned()))
            }
            _ => {
                // Streams of unknown types are not read (RFC 9114, section 9).
                let _ = recv.stop(number(Code::StreamCreationError));
                Ok(())
            }
        }
    }

    /// Reads the peer's control stream.
    async fn obey(&self, mut recv: quic::RecvStream) -> Result<(), Fault> {
        let mut decoder = FrameDecoder::new(h3::MAX_CONTROL);
        let fault = |code, reason: &str| Err(Fault(code, reason.to_owned()));
        loop {
            while let Some(frame) = decoder.next().map_err(|error| Fault(error.code(), error.to_string()))? {
                let is_first = self.settings.get().is_none();
                let Frame::Control { kind, payload } = frame else {
                    let code = if is_first { Code::MissingSettings } else { Code::FrameUnexpected };
                    return fault(code, "DATA or HEADERS on the control stream");
                };
                if is_first && decoder.has_skipped() {
                    return fault(Code::MissingSettings, "the control stream does not begin with SETTINGS");
                }
                match (kind, self.settings.get()) {
                    (h3::SETTINGS, None) => {
                        let settings =
                            Settings::parse(&payload).map_err(|error| Fault(error.code(), error.to_string()))?;
                        // SETTINGS_H3_DATAGRAM requires QUIC datagrams (RFC 9297, section 2.1.1).
                        if settings.datagrams && self.connection.max_datagram_size().is_none() {
                            return fault(Code::SettingsError, "HTTP Datagrams without datagrams of QUIC");
                        }
                        self.settings.set(Some(settings));
                        self.settled.set(());
                    }
                    (_, None) => {
                        return fault(Code::MissingSettings, "the control stream does not begin with SETTINGS");
                    }
                    (h3::SETTINGS, Some(_)) => return fault(Code::FrameUnexpected, "SETTINGS a second time"),
                    (h3::GOAWAY, _) => self.hear_goaway(&payload)?,
                    (h3::PUSH_PROMISE, _) => return fault(Code::FrameUnexpected, "PUSH_PROMISE on the control stream"),
                    (h3::MAX_PUSH_ID, _) if !self.is_server => {
                        return fault(Code::FrameUnexpected, "MAX_PUSH_ID of a server");
                    }
                    (h3::MAX_PUSH_ID, _) => self.hear_max_push(&payload)?,
                    // This node never pushes, so no push ID is valid (RFC 9114, section 7.2.3).
                    (h3::CANCEL_PUSH, _) => {
                        let code = if h3::parse_id(&payload).is_some() { Code::IdError } else { Code::FrameError };
                        return fault(code, "CANCEL_PUSH of no push");
                    }
                    _ => {}
                }
            }
            match recv.read_chunk(h3::MAX_CONTROL, true).await {
                Ok(Some(chunk)) => decoder.push(chunk.bytes),
                Ok(None) => return fault(Code::ClosedCriticalStream, "the control stream ended"),
                Err(quic::ReadError::Reset(_)) => {
                    return fault(Code::ClosedCriticalStream, "the control stream was reset");
                }
                // Any other read error means that the connection has closed.
                Err(_) => return Ok(()),
            }
        }
    }

    /// Checks a MAX_PUSH_ID frame. A client may raise the ID, but not lower it (RFC 9114, section 7.2.7).
    fn hear_max_push(&self, payload: &[u8]) -> Result<(), Fault> {
        let Some(id) = h3::parse_id(payload) else {
            return Err(Fault(Code::FrameError, "a malformed MAX_PUSH_ID".to_owned()));
        };
        if id < self.most_pushes.replace(id) {
            return Err(Fault(Code::IdError, "MAX_PUSH_ID below what it was".to_owned()));
        }
        Ok(())
    }

    fn hear_goaway(&self, payload: &[u8]) -> Result<(), Fault> {
        let Some(id) = h3::parse_id(payload) else {
            return Err(Fault(Code::FrameError, "a malformed GOAWAY".to_owned()));
        };
        // The GOAWAY of a server names a request stream; the GOAWAY of a client names a push (RFC 9114, section 5.2).
        if (!self.is_server && id % 4 != self.first_request()) || self.goaway.get().is_some_and(|before| id > before) {
            return Err(Fault(Code::IdError, format!("GOAWAY with the identifier {id}")));
        }
        self.goaway.set(Some(id));
        Ok(())
    }
}

/// Reads a QPACK stream of the peer, until the connection closes. It may carry only instructions that need no dynamic
/// table, and must stay open (RFC 9204, section 4.2).
async fn hear_qpack(mut recv: quic::RecvStream, kind: u64) -> Result<(), Fault> {
    let mut instructions = Instructions::of(kind);
    loop {
        match recv.read_chunk(h3::MAX_CONTROL, true).await {
            Ok(Some(chunk)) => instructions
                .read(&chunk.bytes)
                .map_err(|code| Fault(code, "QPACK with a dynamic table, which was never allowed".to_owned()))?,
            Ok(None) | Err(quic::ReadError::Reset(_)) => {
                return Err(Fault(Code::ClosedCriticalStream, format!("the stream of type {kind:#x} ended")));
            }
            Err(_) => return Ok(()),
        }
    }
}

/// An error that closes the connection, with its HTTP/3 error code and its reason.
pub(super) struct Fault(pub(super) Code, pub(super) String);
