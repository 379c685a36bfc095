//! The failure of one stream of HTTP/2 or HTTP/3, and the reason for a reset.
//!
//! In: errors and codes of both protocols. Out: their common meaning, such as that the peer processed nothing, reset
//! the stream, or wants no further bytes. Never: the error of a session, which [`crate::error`] defines.

use std::io;

use h2::Reason;
use hermes_wire::h3::Code;

use crate::error::Oversize;

/// The failure of a stream.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{text}")]
pub struct StreamError {
    why: Why,
    /// True if the whole connection failed.
    pub is_of_connection: bool,
    text: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Why {
    /// The peer did not process the stream.
    Unprocessed,
    /// The peer cancelled the stream, or its tunnel failed.
    Reset,
    /// The peer sent its complete message and wants no more of the request (RFC 9113, section 8.1; RFC 9114, section
    /// 4.1). Servers then reset the stream with NO_ERROR.
    Parted,
    /// The head or the trailers exceed the peer's limit. Nothing was sent.
    Oversize(Oversize),
    Other,
}

impl StreamError {
    /// True if the peer did not process the stream, so that the request may be sent again to this peer or another.
    pub fn is_unprocessed(&self) -> bool {
        self.why == Why::Unprocessed
    }

    /// True if the error is no failure: the peer has completed its response and wants no further bytes.
    pub fn has_parted(&self) -> bool {
        self.why == Why::Parted
    }

    /// Returns the size and the limit if this node's head or trailers exceed the peer's limit. The peer did not fail
    /// then.
    pub fn oversize(&self) -> Option<Oversize> {
        match self.why {
            Why::Oversize(oversize) => Some(oversize),
            _ => None,
        }
    }
}

impl StreamError {
    /// Returns the error of a stream that the peer reset with this HTTP/3 error code (RFC 9114, section 8.1).
    pub fn of_code(code: u64) -> Self {
        let is = |other: Code| code == other.value();
        let why = if is(Code::RequestRejected) {
            Why::Unprocessed
        } else if is(Code::RequestCancelled) || is(Code::ConnectError) {
            Why::Reset
        } else if is(Code::NoError) {
            Why::Parted
        } else {
            Why::Other
        };
        Self { why, is_of_connection: false, text: format!("the peer reset the stream with {code:#x}") }
    }

    /// Returns the error of a stream whose connection failed.
    pub fn of_connection(text: impl Into<String>) -> Self {
        Self { why: Why::Other, is_of_connection: true, text: text.into() }
    }

    /// Returns an error for any other reason.
    pub fn other(text: impl Into<String>) -> Self {
        Self { why: Why::Other, is_of_connection: false, text: text.into() }
    }
}

impl From<Oversize> for StreamError {
    fn from(oversize: Oversize) -> Self {
        Self { why: Why::Oversize(oversize), is_of_connection: false, text: oversize.to_string() }
    }
}

impl From<h2::Error> for StreamError {
    fn from(error: h2::Error) -> Self {
        let is_of_connection = !error.is_reset();
        let why = match error.reason() {
            Some(Reason::REFUSED_STREAM) => Why::Unprocessed,
            // h2 reports GOAWAY only for streams with a higher ID than the GOAWAY frame names (RFC 9113, section 6.8).
            Some(_) if error.is_go_away() && error.is_remote() => Why::Unprocessed,
            Some(Reason::NO_ERROR) if !error.is_go_away() => Why::Parted,
            Some(Reason::CONNECT_ERROR | Reason::CANCEL) => Why::Reset,
            _ => Why::Other,
        };
        Self { why, is_of_connection, text: error.to_string() }
    }
}

impl From<StreamError> for io::Error {
    fn from(error: StreamError) -> Self {
        match error.why {
            Why::Reset => io::ErrorKind::ConnectionReset.into(),
            _ => io::Error::other(error),
        }
    }
}

/// The reason for which this node resets a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reset {
    /// The stream is no longer wanted.
    Cancel,
    /// The connection of a tunnel failed.
    Connect,
    /// The source of the bytes failed.
    Internal,
    /// The peer's message is malformed.
    Malformed,
}

impl Reset {
    pub fn h2(self) -> Reason {
        match self {
            Reset::Cancel => Reason::CANCEL,
            Reset::Connect => Reason::CONNECT_ERROR,
            Reset::Internal => Reason::INTERNAL_ERROR,
            Reset::Malformed => Reason::PROTOCOL_ERROR,
        }
    }

    pub fn h3(self) -> Code {
        match self {
            Reset::Cancel => Code::RequestCancelled,
            Reset::Connect => Code::ConnectError,
            Reset::Internal => Code::InternalError,
            Reset::Malformed => Code::MessageError,
        }
    }
}
