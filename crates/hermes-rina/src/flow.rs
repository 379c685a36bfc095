//! A flow and its states, and the table of all flows.
//!
//! In: flows. Out: flows by local identifier or by CEP-id, in constant time. Never: PDUs.
//!
//! The low 16 bits of a CEP-id are the slot in the table. The high bits are random, as is the peer's CEP-id: a sender
//! off the path must guess both, the addresses, and a sequence number inside the window.

use std::net::SocketAddr;
use std::time::Duration;

use crate::config::Timing;
use crate::event::{FlowId, FlowRequest};
use crate::message::{Endpoint, Reason};
use crate::receiver::Receiver;
use crate::sender::Sender;

/// A flow.
#[derive(Debug)]
pub(crate) struct Flow {
    pub(crate) id: FlowId,
    pub(crate) peer: SocketAddr,
    /// The own CEP-id.
    pub(crate) cep: u32,
    /// The port-id of the requester.
    pub(crate) port: u32,
    pub(crate) is_requester: bool,
    pub(crate) state: State,
    pub(crate) scheduled: Option<Duration>,
    /// A write was cut short, and the application waits for space.
    pub(crate) wants_write: bool,
    /// The flow is in the queue of those that the total limit has cut short.
    pub(crate) is_starved: bool,
    /// The application waits for bytes.
    pub(crate) wants_read: bool,
}

/// The state of a flow.
#[derive(Debug)]
pub(crate) enum State {
    /// This node has requested the flow.
    Allocating(Box<Allocating>),
    /// The peer has requested the flow, and the application has not decided.
    Requested(Requested),
    /// The flow is allocated.
    Open(Box<Connection>),
    /// This node has aborted the flow and repeats M_DELETE.
    Deleting(Deleting),
    /// Both directions have ended. The flow answers retransmissions.
    Lingering(Lingering),
}

/// A request of this node.
#[derive(Debug)]
pub(crate) struct Allocating {
    pub(crate) request: FlowRequest,
    pub(crate) sequence: u64,
    /// Holds bytes that the application has already written.
    pub(crate) sender: Sender,
    pub(crate) tries: u32,
    /// The next repetition. `None`: the neighbour is not enrolled.
    pub(crate) retry_at: Option<Duration>,
    pub(crate) deadline: Duration,
}

/// A request of the peer.
#[derive(Debug)]
pub(crate) struct Requested {
    pub(crate) remote: Endpoint,
    pub(crate) deadline: Duration,
}

/// An aborted flow.
#[derive(Debug)]
pub(crate) struct Deleting {
    pub(crate) reason: Reason,
    /// The CEP-id of the peer; 0 if unknown.
    pub(crate) remote_cep: u32,
    pub(crate) tries: u32,
    pub(crate) retry_at: Duration,
}

/// An ended flow.
#[derive(Debug)]
pub(crate) struct Lingering {
    pub(crate) remote_cep: u32,
    /// The sequence number after the peer's end.
    pub(crate) next: u64,
    pub(crate) until: Duration,
}

/// The data transfer of an allocated flow (EFCP).
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) remote_cep: u32,
    pub(crate) sender: Sender,
    pub(crate) receiver: Receiver,
    pub(crate) last_heard: Duration,
    pub(crate) last_probe: Duration,
    /// The last time at which bytes moved.
    pub(crate) last_bytes: Duration,
    /// The positive M_CREATE_R, repeated until the requester sends a PDU.
    pub(crate) unconfirmed: Option<Unconfirmed>,
    /// The application has read the end.
    pub(crate) is_end_read: bool,
}

/// A positive answer that may have been lost.
#[derive(Debug)]
pub(crate) struct Unconfirmed {
    pub(crate) own: Endpoint,
    pub(crate) remote_cep: u32,
    pub(crate) tries: u32,
    pub(crate) retry_at: Duration,
}

impl Connection {
    pub(crate) fn new(now: Duration, remote_cep: u32, sender: Sender, receiver: Receiver) -> Self {
        Self {
            remote_cep,
            sender,
            receiver,
            last_heard: now,
            last_probe: now,
            last_bytes: now,
            unconfirmed: None,
            is_end_read: false,
        }
    }

    /// Whether both directions have ended and the application knows it.
    pub(crate) fn is_complete(&self) -> bool {
        self.is_end_read && self.sender.is_complete() && self.receiver.is_complete()
    }

    fn probe_at(&self, timing: &Timing) -> Duration {
        self.last_heard.max(self.last_probe) + timing.keepalive
    }

    fn deadline(&self, timing: &Timing) -> Duration {
        let others =
            [self.sender.deadline(), self.receiver.deadline(), self.unconfirmed.as_ref().map(|answer| answer.retry_at)];
        let liveness = self.probe_at(timing).min(self.last_heard + timing.dead).min(self.last_bytes + timing.idle);
        others.into_iter().flatten().fold(liveness, Duration::min)
    }

    /// Handles timeouts that have passed. `Err`: the flow ends.
    pub(crate) fn timeout(&mut self, now: Duration, timing: &Timing) -> Result<(), Reason> {
        if now >= self.last_heard + timing.dead {
            return Err(Reason::Timeout);
        }
        if now >= self.last_bytes + timing.idle {
            return Err(Reason::Idle);
        }
        if now >= self.probe_at(timing) {
            self.last_probe = now;
            self.sender.ping();
        }
        self.sender.timeout(now);
        self.receiver.timeout(now);
        Ok(())
    }
}

impl Flow {
    /// Returns the time of the next timeout.
    pub(crate) fn deadline(&self, timing: &Timing) -> Duration {
        match &self.state {
            State::Allocating(allocating) => {
                allocating.retry_at.map_or(allocating.deadline, |at| at.min(allocating.deadline))
            }
            State::Requested(requested) => requested.deadline,
            State::Open(connection) => connection.deadline(timing),
            State::Deleting(deleting) => deleting.retry_at,
            State::Lingering(lingering) => lingering.until,
        }
    }

    /// Whether a PDU with this first identifier was sent by this flow.
    pub(crate) fn has_sent(&self, first: u32) -> bool {
        match &self.state {
            State::Allocating(_) => self.port == first,
            State::Open(connection) => connection.remote_cep == first,
            State::Deleting(deleting) => deleting.remote_cep == first,
            State::Requested(_) | State::Lingering(_) => false,
        }
    }

    /// Returns the number of bytes in memory, to send and to read.
    pub(crate) fn buffered(&self) -> (usize, usize) {
        match &self.state {
            State::Allocating(allocating) => (allocating.sender.buffered(), 0),
            State::Open(connection) => (connection.sender.buffered(), connection.receiver.buffered()),
            _ => (0, 0),
        }
    }
}

/// The table of flows.
#[derive(Debug)]
pub(crate) struct FlowTable {
    slots: Vec<Option<Flow>>,
    free: Vec<u16>,
    limit: usize,
    serial: u64,
}

impl FlowTable {
    pub(crate) fn new(limit: usize) -> Self {
        Self { slots: Vec::new(), free: Vec::new(), limit, serial: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Returns the unread bytes of a flow.
    pub(crate) fn unread(&self, slot: u16) -> usize {
        self.slot(slot).map_or(0, |flow| flow.buffered().1)
    }

    pub(crate) fn is_full(&self) -> bool {
        self.len() >= self.limit
    }

    /// Inserts a flow. `random` becomes the high bits of its CEP-id. `None`: the table is full.
    pub(crate) fn insert(&mut self, random: u64, make: impl FnOnce(FlowId, u32) -> Flow) -> Option<u16> {
        if self.is_full() {
            return None;
        }
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => {
                let slot = u16::try_from(self.slots.len()).ok()?;
                self.slots.push(None);
                slot
            }
        };
        self.serial += 1;
        let id = FlowId(self.serial << 16 | u64::from(slot));
        // Zero means "unknown" in PDUs.
        let high = (random as u16).max(1);
        let cep = u32::from(high) << 16 | u32::from(slot);
        if let Some(place) = self.slots.get_mut(usize::from(slot)) {
            *place = Some(make(id, cep));
        }
        Some(slot)
    }

    pub(crate) fn slot(&self, slot: u16) -> Option<&Flow> {
        self.slots.get(usize::from(slot))?.as_ref()
    }

    pub(crate) fn slot_mut(&mut self, slot: u16) -> Option<&mut Flow> {
        self.slots.get_mut(usize::from(slot))?.as_mut()
    }

    pub(crate) fn find(&self, id: FlowId) -> Option<u16> {
        let slot = id.0 as u16;
        self.slot(slot).filter(|flow| flow.id == id).map(|_| slot)
    }

    /// Returns the slot of the flow with this CEP-id and peer.
    pub(crate) fn by_cep(&self, cep: u32, peer: SocketAddr) -> Option<u16> {
        let slot = cep as u16;
        self.slot(slot).filter(|flow| flow.cep == cep && flow.peer == peer).map(|_| slot)
    }

    pub(crate) fn remove(&mut self, slot: u16) -> Option<Flow> {
        let flow = self.slots.get_mut(usize::from(slot))?.take()?;
        self.free.push(slot);
        Some(flow)
    }
}
