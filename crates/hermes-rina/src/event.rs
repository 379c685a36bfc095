//! Values that the engine returns: events, datagrams to send, results of reads, errors.
//!
//! In: nothing. Out: the types. Never: behaviour.

use std::net::SocketAddr;

use bytes::Bytes;

use crate::message::{AppName, Qos, Reason};

/// The local identifier of a flow. It is never reused. The default is the identifier of no flow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FlowId(pub(crate) u64);

/// A request for a flow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlowRequest {
    /// The source.
    pub source: AppName,
    /// The destination.
    pub destination: AppName,
    /// The QoS cube.
    pub qos: Qos,
}

impl FlowRequest {
    /// Returns a request for a reliable flow to an application and its instance.
    pub fn to(process: impl Into<String>, instance: impl Into<String>) -> Self {
        let destination = AppName { process: process.into(), instance: instance.into() };
        Self { source: AppName::default(), destination, qos: Qos::Reliable }
    }
}

/// An event for the application.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A neighbour is enrolled.
    Enrolled {
        /// The address.
        peer: SocketAddr,
        /// The PDU size of both sides, in bytes.
        mtu: u16,
    },
    /// A neighbour was removed, or the enrolment failed.
    NeighbourLost {
        /// The address.
        peer: SocketAddr,
        /// The reason.
        reason: Reason,
    },
    /// A neighbour requests a flow. The application answers with `accept` or `refuse`.
    FlowRequested {
        /// The flow.
        flow: FlowId,
        /// The address of the neighbour.
        peer: SocketAddr,
        /// The request.
        request: FlowRequest,
    },
    /// The peer has accepted the flow.
    FlowAllocated {
        /// The flow.
        flow: FlowId,
    },
    /// The request failed. The flow no longer exists.
    AllocationFailed {
        /// The flow.
        flow: FlowId,
        /// The reason.
        reason: Reason,
    },
    /// Bytes or the end can be read. The event repeats after a read that returned [`Read::Blocked`].
    Readable {
        /// The flow.
        flow: FlowId,
    },
    /// Bytes can be written again, after a write that was cut short.
    Writable {
        /// The flow.
        flow: FlowId,
    },
    /// The flow no longer exists.
    Closed {
        /// The flow.
        flow: FlowId,
        /// The reason. `None`: both directions ended and all bytes were delivered.
        reason: Option<Reason>,
    },
}

/// Datagrams to send to one peer, at the end of the buffer that was passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transmit {
    /// The destination.
    pub peer: SocketAddr,
    /// Number of bytes.
    pub len: usize,
    /// Length of each datagram but the last, which may be shorter. `None`: the bytes are one datagram.
    pub segment_size: Option<usize>,
}

/// The result of a read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Read {
    /// Bytes in order.
    Bytes(Bytes),
    /// The flow has no bytes to read now. An [`Event::Readable`] follows.
    Blocked,
    /// The peer has ended its direction, and all bytes were read.
    End,
}

/// Bytes and entries in memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Neighbours, enrolled or enrolling.
    pub neighbours: usize,
    /// Flows in any state.
    pub flows: usize,
    /// Unacknowledged bytes of all flows.
    pub send: usize,
    /// Unread bytes of all flows.
    pub receive: usize,
    /// Management PDUs and replies that wait for the socket.
    pub control: usize,
}

/// The state of an open flow's path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathState {
    /// The smoothed round-trip time.
    pub rtt: std::time::Duration,
    /// The congestion window, in bytes.
    pub window: u64,
    /// Unacknowledged bytes.
    pub unacknowledged: usize,
    /// Unread bytes, in order.
    pub readable: usize,
}

/// An error of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FlowError {
    /// The flow does not exist, or no longer.
    #[error("unknown flow")]
    Unknown,
    /// The flow is in another state than the call requires.
    #[error("the flow is in another state")]
    State,
    /// The application has already ended its direction.
    #[error("write after finish")]
    Finished,
    /// A name is too long.
    #[error("name too long; expected at most 255 bytes")]
    NameTooLong,
    /// The QoS cube is not supported.
    #[error("unsupported QoS cube")]
    Qos,
    /// A table is full.
    #[error("limit of flows or neighbours reached")]
    TooMany,
}
