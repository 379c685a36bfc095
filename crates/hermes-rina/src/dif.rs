//! The engine of an IPC process.
//!
//! In: datagrams, commands of the application, time. Out: datagrams, events, the time of the next timeout. Never: a
//! socket, a clock, or entropy of its own. Each datagram costs constant time; only deadlines and gaps cost a logarithm.
//!
//! `enrol` has the neighbours, `allocate` the flows' beginning and end, `transfer` the PDUs of flows, `transmit` the
//! output, and `expiry` the timeouts.

mod allocate;
mod enrol;
mod expiry;
mod transfer;
mod transmit;

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;

use crate::auth::{Cookies, Key, Random};
use crate::config::{Config, ConfigError};
use crate::counters::Counters;
use crate::event::{Event, FlowError, FlowId, PathState, Read, Usage};
use crate::flow::{FlowTable, State};
use crate::message::{self, Message};
use crate::neighbour::Neighbour;
use crate::timers::{Timer, Timers};

/// An IPC process: one member of a DIF.
///
/// After each call, the caller drains [`Dif::poll_event`] and [`Dif::poll_transmit`], and then waits for a datagram, a
/// command or [`Dif::next_timeout`].
#[derive(Debug)]
pub struct Dif {
    config: Config,
    key: Key,
    random: Random,
    cookies: Cookies,
    counters: Counters,
    neighbours: HashMap<SocketAddr, Neighbour>,
    flows: FlowTable,
    /// Flows in the order in which they began to linger.
    lingering: VecDeque<FlowId>,
    timers: Timers,
    events: VecDeque<Event>,
    control: VecDeque<(SocketAddr, Bytes)>,
    active: ActiveQueue,
    /// Flows whose writes were cut short by the total limit.
    starved: VecDeque<FlowId>,
    send_used: usize,
    receive_used: usize,
    hints: HintBudget,
}

/// The part of the free bytes that one flow may have unread: an eighth.
const RECEIVE_SHARE: usize = 8;
/// The bytes that each flow may have unread while any are free.
const MIN_RECEIVE_SHARE: usize = 64 << 10;

/// Slots of flows that may have PDUs to send, each at most once.
#[derive(Debug, Default)]
struct ActiveQueue {
    queue: VecDeque<u16>,
    is_queued: Vec<bool>,
}

impl ActiveQueue {
    fn push(&mut self, slot: u16) {
        let at = usize::from(slot);
        if self.is_queued.len() <= at {
            self.is_queued.resize(at + 1, false);
        }
        if let Some(is_queued) = self.is_queued.get_mut(at).filter(|is_queued| !**is_queued) {
            *is_queued = true;
            self.queue.push_back(slot);
        }
    }

    fn pop(&mut self) -> Option<u16> {
        let slot = self.queue.pop_front()?;
        if let Some(is_queued) = self.is_queued.get_mut(usize::from(slot)) {
            *is_queued = false;
        }
        Some(slot)
    }
}

/// Number of hints to unknown peers that are left in the current second.
#[derive(Debug, Default)]
struct HintBudget {
    second: u64,
    used: u32,
}

impl Dif {
    /// Creates an IPC process. The seed must be unpredictable, and different for each process.
    ///
    /// # Errors
    /// The configuration is invalid.
    pub fn new(config: Config, seed: &[u8; 32]) -> Result<Self, ConfigError> {
        config.check()?;
        let (random, cookies) = Random::new(seed);
        Ok(Self {
            key: Key::of_dif(&config.dif, config.key.as_deref()),
            random,
            cookies,
            counters: Counters::default(),
            neighbours: HashMap::new(),
            flows: FlowTable::new(config.limits.flows),
            lingering: VecDeque::new(),
            timers: Timers::default(),
            events: VecDeque::new(),
            control: VecDeque::new(),
            active: ActiveQueue::default(),
            starved: VecDeque::new(),
            send_used: 0,
            receive_used: 0,
            hints: HintBudget::default(),
            config,
        })
    }

    /// Processes a datagram of a peer. The engine keeps slices of it: a buffer for receive offload should be well filled.
    pub fn handle_datagram(&mut self, now: Duration, peer: SocketAddr, datagram: Bytes) {
        self.receive(now, peer, datagram, false);
    }

    /// Processes a datagram that arrived with a congestion mark (ECN).
    pub fn handle_marked_datagram(&mut self, now: Duration, peer: SocketAddr, datagram: Bytes) {
        self.receive(now, peer, datagram, true);
    }

    fn receive(&mut self, now: Duration, peer: SocketAddr, datagram: Bytes, is_marked: bool) {
        self.counters.datagrams_in += 1;
        if message::is_management(&datagram) {
            return self.on_management(now, peer, &datagram);
        }
        match Message::decode(datagram) {
            Ok(Message::Data { mut header, payload }) => {
                header.flags.mark |= is_marked;
                self.on_data(now, peer, &header, payload);
            }
            Ok(Message::Ack { to, from, ack, ranges }) => self.on_ack(now, peer, (to, from), &ack, &ranges),
            _ => self.counters.malformed += 1,
        }
    }

    /// Returns the next event.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Returns the time at which [`Dif::handle_timeout`] must be called.
    pub fn next_timeout(&self) -> Option<Duration> {
        self.timers.next()
    }

    /// Returns the counters.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Returns what is in memory.
    pub fn usage(&self) -> Usage {
        Usage {
            neighbours: self.neighbours.len(),
            flows: self.flows.len(),
            send: self.send_used,
            receive: self.receive_used,
            control: self.control.len(),
        }
    }

    /// Returns the addresses of all neighbours.
    pub fn neighbours(&self) -> Vec<SocketAddr> {
        self.neighbours.keys().copied().collect()
    }

    /// Whether the neighbour at this address is enrolled.
    pub fn is_enrolled(&self, peer: SocketAddr) -> bool {
        self.neighbours.get(&peer).is_some_and(|neighbour| neighbour.session.is_some())
    }

    /// Returns the state of an open flow's path.
    pub fn path(&self, flow: FlowId) -> Option<PathState> {
        let State::Open(connection) = &self.flows.slot(self.flows.find(flow)?)?.state else { return None };
        Some(PathState {
            rtt: connection.sender.rtt().smoothed(),
            window: connection.sender.congestion_window(),
            unacknowledged: connection.sender.buffered(),
            readable: connection.receiver.readable(),
        })
    }

    /// Takes bytes from the front of `bytes` and returns their number. If bytes are left, an [`Event::Writable`] follows.
    /// Bytes that are written before the peer accepts the flow are sent when it does.
    ///
    /// # Errors
    /// The flow does not exist, is not allocated, or was finished.
    pub fn write(&mut self, now: Duration, flow: FlowId, bytes: &mut Bytes) -> Result<usize, FlowError> {
        let slot = self.flows.find(flow).ok_or(FlowError::Unknown)?;
        let one = self.flows.slot_mut(slot).ok_or(FlowError::Unknown)?;
        let sender = match &mut one.state {
            State::Allocating(allocating) => &mut allocating.sender,
            State::Open(connection) => {
                connection.last_bytes = now;
                &mut connection.sender
            }
            State::Requested(_) => return Err(FlowError::State),
            State::Deleting(_) | State::Lingering(_) => return Err(FlowError::Unknown),
        };
        if sender.is_finished() {
            return Err(FlowError::Finished);
        }
        let total = self.config.limits.total_send.saturating_sub(self.send_used);
        let length = self.config.limits.send_buffer.saturating_sub(sender.buffered()).min(total).min(bytes.len());
        sender.write(bytes.split_to(length));
        self.send_used += length;
        if !bytes.is_empty() {
            self.counters.send_limit += 1;
            // A flow with bytes of its own is woken by their acknowledgement.
            if !one.is_starved && total == length {
                one.is_starved = true;
                self.starved.push_back(flow);
            }
            one.wants_write = true;
        }
        self.progress(now, slot);
        Ok(length)
    }

    /// Returns at most `max` bytes that the peer has sent.
    ///
    /// # Errors
    /// The flow does not exist, or is not allocated.
    pub fn read(&mut self, now: Duration, flow: FlowId, max: usize) -> Result<Read, FlowError> {
        let slot = self.flows.find(flow).ok_or(FlowError::Unknown)?;
        let one = self.flows.slot_mut(slot).ok_or(FlowError::Unknown)?;
        let connection = match &mut one.state {
            State::Open(connection) => connection,
            State::Allocating(_) | State::Requested(_) => return Err(FlowError::State),
            State::Deleting(_) | State::Lingering(_) => return Err(FlowError::Unknown),
        };
        let read = match connection.receiver.read(max.max(1)) {
            Some(bytes) => {
                self.receive_used -= bytes.len();
                connection.last_bytes = now;
                if !connection.receiver.is_ack_due() {
                    return Ok(Read::Bytes(bytes));
                }
                Read::Bytes(bytes)
            }
            None if connection.receiver.is_complete() => {
                connection.is_end_read = true;
                Read::End
            }
            None => {
                one.wants_read = true;
                return Ok(Read::Blocked);
            }
        };
        self.progress(now, slot);
        Ok(read)
    }

    /// Ends the own direction of the flow, after all bytes that were written. The other direction stays open.
    ///
    /// # Errors
    /// The flow does not exist, or is not allocated.
    pub fn finish(&mut self, now: Duration, flow: FlowId) -> Result<(), FlowError> {
        let slot = self.flows.find(flow).ok_or(FlowError::Unknown)?;
        match self.flows.slot_mut(slot).map(|flow| &mut flow.state) {
            Some(State::Allocating(allocating)) => allocating.sender.finish(),
            Some(State::Open(connection)) => connection.sender.finish(),
            Some(State::Requested(_)) => return Err(FlowError::State),
            _ => return Err(FlowError::Unknown),
        }
        self.progress(now, slot);
        Ok(())
    }

    /// Schedules the flow's next timeout.
    fn schedule_flow(&mut self, slot: u16) {
        if let Some(flow) = self.flows.slot_mut(slot) {
            let at = flow.deadline(&self.config.timing);
            self.timers.schedule(Timer::Flow(slot), Some(at), &mut flow.scheduled);
        }
    }

    /// Queues a management PDU or a reply.
    fn send_control(&mut self, peer: SocketAddr, datagram: Bytes) {
        if self.control.len() >= self.config.limits.control_queue {
            self.counters.control_limit += 1;
        } else {
            self.control.push_back((peer, datagram));
        }
    }

    /// Returns the number of bytes that a flow may still receive, which has this number unread. One flow gets a part of
    /// what is free, so that flows whose application does not read leave room for others.
    fn receive_room(&self, unread: usize) -> usize {
        let free = self.config.limits.total_receive.saturating_sub(self.receive_used);
        (free / RECEIVE_SHARE).max(MIN_RECEIVE_SHARE).saturating_sub(unread).min(free)
    }
}
