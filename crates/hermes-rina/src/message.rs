//! Codec of the datagrams that two IPC processes of a DIF exchange.
//!
//! In: one UDP datagram, or a message. Out: a message, or its bytes. Never: state, keys or a judgement of the content.
//! A datagram carries exactly one PDU. Integers are big-endian. The first byte is the version, the second the kind.
//!
//! Management PDUs (CDAP style) end with a tag of 16 bytes, which `auth` computes and checks; this codec sees the body
//! before the tag. A text has one byte of length.
//!
//! | kind | PDU | fields after version and kind |
//! |---|---|---|
//! | 1 | M_CONNECT | 0, 0, nonce 16, cookie 24, MTU 2, DIF name |
//! | 2 | M_CONNECT_R | status 1, 0, nonce 16, cookie 24, MTU 2; with status 2 (not enrolled) only an echo of 8 bytes |
//! | 3 | M_CREATE | QoS 1, 0, port-id 4, CEP-id 4, first sequence number 8, credit 4, four names |
//! | 4 | M_CREATE_R | result 1, 0, port-id of the requester 4, CEP-id of it 4, own port-id 4, own CEP-id 4, sequence 8, credit 4 |
//! | 5 | M_DELETE | reason 1, 0, CEP-id of the receiver 4, CEP-id of the sender 4, port-id of the requester 4 |
//! | 6 | M_DELETE_R | 0, 0, CEP-id of the receiver 4, CEP-id of the sender 4 |
//! | 7 | M_RELEASE | 0, 0, nonce 16 |
//! | 16 | DTP data | flags 1, 0, to 4, from 4, PDU number 4, sequence 8, acknowledgement 20, payload |
//! | 17 | DTCP ack | flags 1, count 1, to 4, from 4, acknowledgement 20, count ranges of (offset 4, length 4) |
//! | 18 | DTP datagram | 0, 0, to 4, from 4, PDU number 4, payload |
//!
//! The codec knows the QoS cube "unreliable" and its datagrams; the engine refuses such flows.
//!
//! `to` and `from` are the CEP-ids of receiver and sender. An acknowledgement has five fields:
//!
//! - the next expected sequence number, 8 bytes
//! - the credit in bytes, 4 bytes
//! - the highest PDU number received, 4 bytes
//! - the time since its arrival in units of 16 us, 2 bytes
//! - the number of congestion marks received, 2 bytes

use bytes::{Buf, BufMut, Bytes, BytesMut};

/// Version of the protocol.
pub const VERSION: u8 = 1;
/// Length of the tag of a management PDU, in bytes.
pub const TAG_LEN: usize = 16;
/// Length of the header of a data PDU, in bytes.
pub const DATA_HEADER: usize = 44;
/// Length of an acknowledgement PDU without ranges, in bytes.
pub const ACK_HEADER: usize = 32;
/// Length of the header of an unreliable datagram, in bytes.
pub const DATAGRAM_HEADER: usize = 16;
/// Maximum number of ranges in an acknowledgement PDU.
pub const MAX_RANGES: usize = 32;
/// Maximum length of a DIF name, in bytes.
pub const MAX_DIF_NAME: usize = 64;
/// Maximum length of the name of an application process or of its instance, in bytes.
pub const MAX_NAME: usize = 255;
/// Highest sequence number. A flow starts below 2^48 and never reaches it.
pub const MAX_SEQUENCE: u64 = 1 << 62;
/// Unit of the delay in an acknowledgement, in microseconds.
pub const DELAY_UNIT_US: u64 = 16;

/// The first kind that is not a management PDU.
const FIRST_TRANSFER_KIND: u8 = 16;

/// A nonce of an enrolment.
pub type Nonce = [u8; 16];

/// A cookie: proof that its holder receives datagrams at its address. All zero: none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Cookie {
    /// Time of issue in microseconds, on the clock of the issuer.
    pub issued: u64,
    /// The MAC of the issuer.
    pub mac: [u8; 16],
}

/// The name of an application process, and of its instance.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct AppName {
    /// The name of the application process; at most [`MAX_NAME`] bytes.
    pub process: String,
    /// The name of its instance, such as `10.0.0.1:40000>10.0.1.2:80`; at most [`MAX_NAME`] bytes.
    pub instance: String,
}

/// The QoS cube of a flow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Qos {
    /// A byte stream, in order and complete.
    #[default]
    Reliable,
    /// Datagrams, which may be lost, duplicated or reordered.
    Unreliable,
}

/// The reason why a flow was refused or ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// The destination refused.
    Refused,
    /// The destination is unreachable.
    Unreachable,
    /// The time limit expired.
    Timeout,
    /// No application of that name exists.
    NotFound,
    /// A policy denies the flow.
    Policy,
    /// A table is full.
    TooMany,
    /// The application aborted the flow.
    Aborted,
    /// The peer ended its enrolment.
    Released,
    /// The peer restarted and has lost the flow.
    Restarted,
    /// The peer does not know the flow.
    UnknownFlow,
    /// The flow was idle for longer than the limit.
    Idle,
}

/// All reasons; the position plus one is the number on the wire.
pub const REASONS: [Reason; 11] = [
    Reason::Refused,
    Reason::Unreachable,
    Reason::Timeout,
    Reason::NotFound,
    Reason::Policy,
    Reason::TooMany,
    Reason::Aborted,
    Reason::Released,
    Reason::Restarted,
    Reason::UnknownFlow,
    Reason::Idle,
];

impl std::fmt::Display for Reason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Reason::Refused => "the destination refused",
            Reason::Unreachable => "the destination is unreachable",
            Reason::Timeout => "the destination did not answer in time",
            Reason::NotFound => "no application has that name",
            Reason::Policy => "a policy of the destination denies the flow",
            Reason::TooMany => "a table of the destination is full",
            Reason::Aborted => "the application at the far end aborted the flow",
            Reason::Released => "the neighbour ended its enrolment",
            Reason::Restarted => "the neighbour has restarted",
            Reason::UnknownFlow => "the neighbour does not know the flow",
            Reason::Idle => "the flow was idle for too long",
        })
    }
}

impl Reason {
    fn number(self) -> u8 {
        REASONS.iter().position(|reason| *reason == self).map_or(0, |at| at as u8 + 1)
    }

    fn from_number(number: u8) -> Result<Self, MessageError> {
        let at = usize::from(number).checked_sub(1);
        at.and_then(|at| REASONS.get(at).copied()).ok_or(MessageError::Field("reason"))
    }
}

/// The answer to an M_CONNECT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConnectReply {
    /// The sender must repeat its M_CONNECT with this cookie.
    Challenge {
        /// The nonce of the M_CONNECT.
        nonce: Nonce,
        /// The cookie to present.
        cookie: Cookie,
    },
    /// The neighbour is enrolled.
    Enrolled {
        /// The nonce of the M_CONNECT.
        nonce: Nonce,
        /// The cookie that was presented.
        cookie: Cookie,
        /// The largest datagram that the responder sends or receives, in bytes.
        mtu: u16,
    },
    /// The sender of a PDU is not enrolled.
    NotEnrolled {
        /// Bytes 4 to 12 of that PDU.
        echo: [u8; 8],
    },
    /// The table of neighbours is full.
    TooMany {
        /// The nonce of the M_CONNECT.
        nonce: Nonce,
        /// The cookie that was presented.
        cookie: Cookie,
    },
}

/// An acknowledgement with its credit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AckInfo {
    /// The next expected sequence number.
    pub sequence: u64,
    /// Number of bytes after it that the receiver accepts.
    pub credit: u32,
    /// The highest PDU number received, truncated. `None`: no PDU was received.
    pub echo: Option<u32>,
    /// The time since that PDU arrived, in units of [`DELAY_UNIT_US`].
    pub delay: u16,
    /// Number of congestion marks received, modulo 2^16.
    pub marks: u16,
}

/// Flags of a data PDU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Flags {
    /// The byte stream ends after this payload. The end occupies one sequence number.
    pub fin: bool,
    /// The sender does not know the flow, or has dropped it.
    pub reset: bool,
    /// A node on the path experienced congestion.
    pub mark: bool,
    /// The receiver must acknowledge at once.
    pub probe: bool,
}

/// A data PDU without its payload.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DataHeader {
    /// The CEP-id of the receiver.
    pub to: u32,
    /// The CEP-id of the sender.
    pub from: u32,
    /// The flags.
    pub flags: Flags,
    /// The number of the PDU, truncated; a retransmission has a new number.
    pub number: u32,
    /// The sequence number of the first byte.
    pub sequence: u64,
    /// The acknowledgement of the other direction.
    pub ack: AckInfo,
}

/// A PDU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    /// M_CONNECT: enrolment of a neighbour.
    Connect {
        /// The nonce of the initiator.
        nonce: Nonce,
        /// The cookie of the responder; zero in the first message.
        cookie: Cookie,
        /// The largest datagram that the initiator sends or receives, in bytes.
        mtu: u16,
        /// The name of the DIF.
        dif: String,
    },
    /// M_CONNECT_R.
    ConnectReply(ConnectReply),
    /// M_CREATE: flow allocation.
    Create {
        /// The QoS cube.
        qos: Qos,
        /// The port-id of the requester, which also identifies the request.
        port: u32,
        /// The CEP-id of the requester.
        cep: u32,
        /// The first sequence number of the requester.
        sequence: u64,
        /// The credit that the requester grants, in bytes.
        credit: u32,
        /// The source.
        source: AppName,
        /// The destination.
        destination: AppName,
    },
    /// M_CREATE_R.
    CreateReply {
        /// The port-id of the requester.
        port: u32,
        /// The CEP-id of the requester.
        cep: u32,
        /// The endpoint of the responder, or the reason of the refusal.
        result: Result<Endpoint, Reason>,
    },
    /// M_DELETE: deallocation of a flow, or of a request.
    Delete {
        /// The reason.
        reason: Reason,
        /// The CEP-id of the receiver; 0 if unknown.
        to: u32,
        /// The CEP-id of the sender.
        from: u32,
        /// The port-id of the flow's requester.
        port: u32,
    },
    /// M_DELETE_R.
    DeleteReply {
        /// The CEP-id of the receiver.
        to: u32,
        /// The CEP-id of the sender; 0 if unknown.
        from: u32,
    },
    /// M_RELEASE: the sender ends its enrolment.
    Release {
        /// The nonce of the enrolment's initiator.
        nonce: Nonce,
    },
    /// DTP: bytes of a reliable flow.
    Data {
        /// The header.
        header: DataHeader,
        /// The payload.
        payload: Bytes,
    },
    /// DTCP: an acknowledgement alone.
    Ack {
        /// The CEP-id of the receiver.
        to: u32,
        /// The CEP-id of the sender.
        from: u32,
        /// The acknowledgement.
        ack: AckInfo,
        /// Received ranges, each an offset from the acknowledged sequence number and a length.
        ranges: Vec<(u32, u32)>,
    },
    /// DTP: a datagram of an unreliable flow.
    Datagram {
        /// The CEP-id of the receiver.
        to: u32,
        /// The CEP-id of the sender.
        from: u32,
        /// The number of the PDU.
        number: u32,
        /// The payload.
        payload: Bytes,
    },
}

/// The endpoint of the responder of a flow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Endpoint {
    /// The port-id.
    pub port: u32,
    /// The CEP-id.
    pub cep: u32,
    /// The first sequence number.
    pub sequence: u64,
    /// The credit that this endpoint grants, in bytes.
    pub credit: u32,
}

/// An error in a datagram. The receiver drops it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// The datagram ends too early.
    #[error("truncated PDU")]
    Truncated,
    /// Bytes follow the last field.
    #[error("extra bytes after the PDU")]
    Extra,
    /// The version is unknown.
    #[error("unknown protocol version {0}")]
    Version(u8),
    /// The kind is unknown.
    #[error("unknown PDU kind {0}")]
    Kind(u8),
    /// A field has an invalid value.
    #[error("invalid {0} in a PDU")]
    Field(&'static str),
}

impl From<bytes::TryGetError> for MessageError {
    fn from(_: bytes::TryGetError) -> Self {
        MessageError::Truncated
    }
}

/// Whether the datagram is a management PDU, which ends with a tag.
pub fn is_management(datagram: &[u8]) -> bool {
    datagram.get(1).is_some_and(|kind| *kind < FIRST_TRANSFER_KIND)
}

mod decode;
mod encode;
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test")]
mod tests;
