//! Allocation and deallocation of flows.
//!
//! In: commands of the application; M_CREATE, M_CREATE_R, M_DELETE, M_DELETE_R of enrolled neighbours. Out: flows that
//! begin and end. Never: an answer to a request that the application has not decided.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::BytesMut;

use super::{Dif, Event, FlowError, FlowId, State};
use crate::event::FlowRequest;
use crate::flow::{Allocating, Connection, Deleting, Flow, Requested, Unconfirmed};
use crate::message::{DATA_HEADER, Endpoint, MAX_NAME, Message, Qos, Reason};
use crate::receiver::Receiver;
use crate::sender::Sender;

impl Dif {
    /// Requests a flow to an application at a neighbour, which is enrolled first if necessary. An
    /// [`Event::FlowAllocated`] or an [`Event::AllocationFailed`] follows.
    ///
    /// # Errors
    /// A table is full, a name is too long, or the QoS cube is not supported.
    pub fn allocate(&mut self, now: Duration, peer: SocketAddr, request: FlowRequest) -> Result<FlowId, FlowError> {
        if request.qos != Qos::Reliable {
            return Err(FlowError::Qos);
        }
        let names = [&request.source, &request.destination];
        if names.iter().any(|name| name.process.len().max(name.instance.len()) > MAX_NAME) {
            return Err(FlowError::NameTooLong);
        }
        self.connect(now, peer)?;
        let sequence = self.first_sequence();
        let unit = usize::from(self.config.mtu) - DATA_HEADER;
        let allocating = Allocating {
            request,
            sequence,
            sender: Sender::new(now, sequence, unit, None),
            tries: 0,
            retry_at: None,
            deadline: now + self.config.timing.allocate,
        };
        let state = State::Allocating(Box::new(allocating));
        let slot = self.insert_flow(now, peer, 0, true, state).ok_or(FlowError::TooMany)?;
        if self.is_enrolled(peer) {
            self.send_first_create(now, slot);
        }
        self.schedule_flow(slot);
        self.flows.slot(slot).map(|flow| flow.id).ok_or(FlowError::TooMany)
    }

    /// Accepts a requested flow.
    ///
    /// # Errors
    /// The flow does not exist, or is not a request.
    pub fn accept(&mut self, now: Duration, flow: FlowId) -> Result<(), FlowError> {
        let slot = self.flows.find(flow).ok_or(FlowError::Unknown)?;
        let one = self.flows.slot(slot).ok_or(FlowError::Unknown)?;
        let State::Requested(Requested { remote, .. }) = one.state else { return Err(FlowError::State) };
        let (peer, port, cep) = (one.peer, one.port, one.cep);
        let (unit, rtt) = self.path_of(peer);
        let sequence = self.first_sequence();
        let mut sender = Sender::new(now, sequence, unit, rtt);
        sender.open(remote.credit, unit, rtt);
        let limits = &self.config.limits;
        let receiver = Receiver::new(remote.sequence, limits.receive_window, limits.ranges, unit);
        let own = Endpoint { port: cep, cep, sequence, credit: limits.receive_window };
        let retry_at = now + self.config.timing.retry;
        let unconfirmed = Unconfirmed { own, remote_cep: remote.cep, tries: 0, retry_at };
        let mut connection = Connection::new(now, remote.cep, sender, receiver);
        connection.unconfirmed = Some(unconfirmed);
        if let Some(one) = self.flows.slot_mut(slot) {
            one.state = State::Open(Box::new(connection));
        }
        self.forget_pending(peer);
        self.counters.allocated += 1;
        self.send_session(peer, &Message::CreateReply { port, cep: remote.cep, result: Ok(own) });
        self.schedule_flow(slot);
        Ok(())
    }

    /// Refuses a requested flow, which no longer exists afterwards.
    ///
    /// # Errors
    /// The flow does not exist, or is not a request.
    pub fn refuse(&mut self, now: Duration, flow: FlowId, reason: Reason) -> Result<(), FlowError> {
        let slot = self.flows.find(flow).ok_or(FlowError::Unknown)?;
        let one = self.flows.slot(slot).ok_or(FlowError::Unknown)?;
        let State::Requested(Requested { remote, .. }) = one.state else { return Err(FlowError::State) };
        let (peer, port) = (one.peer, one.port);
        self.answer_refusal(peer, port, remote.cep, reason);
        self.remove_flow(now, slot);
        Ok(())
    }

    /// Aborts a flow, which no longer exists for the application afterwards. Bytes that were not sent or read are lost.
    ///
    /// # Errors
    /// The flow does not exist.
    pub fn reset(&mut self, now: Duration, flow: FlowId, reason: Reason) -> Result<(), FlowError> {
        let slot = self.flows.find(flow).ok_or(FlowError::Unknown)?;
        let one = self.flows.slot(slot).ok_or(FlowError::Unknown)?;
        let remote_cep = match &one.state {
            State::Requested(_) => return self.refuse(now, flow, reason),
            State::Allocating(allocating) if allocating.retry_at.is_none() => {
                self.remove_flow(now, slot);
                return Ok(());
            }
            State::Allocating(_) => 0,
            State::Open(connection) => connection.remote_cep,
            State::Deleting(_) | State::Lingering(_) => return Err(FlowError::Unknown),
        };
        self.begin_delete(now, slot, remote_cep, reason);
        Ok(())
    }

    /// Ends a flow locally and informs the peer.
    pub(super) fn begin_delete(&mut self, now: Duration, slot: u16, remote_cep: u32, reason: Reason) {
        let retry_at = now + self.config.timing.retry;
        self.set_state(slot, State::Deleting(Deleting { reason, remote_cep, tries: 0, retry_at }));
        self.send_delete(slot);
        self.schedule_flow(slot);
    }

    pub(super) fn send_delete(&mut self, slot: u16) {
        let Some(flow) = self.flows.slot(slot) else { return };
        let State::Deleting(Deleting { reason, remote_cep, .. }) = flow.state else { return };
        let (peer, from, port) = (flow.peer, flow.cep, flow.port);
        self.send_session(peer, &Message::Delete { reason, to: remote_cep, from, port });
    }

    /// Replaces the state of a flow and releases what the old one has buffered.
    pub(super) fn set_state(&mut self, slot: u16, state: State) {
        if let Some(flow) = self.flows.slot_mut(slot) {
            let (send, receive) = flow.buffered();
            flow.state = state;
            self.send_used -= send;
            self.receive_used -= receive;
        }
    }

    fn first_sequence(&mut self) -> u64 {
        self.random.number() >> 16
    }

    /// Returns the largest payload and the round trip of a neighbour's path.
    fn path_of(&self, peer: SocketAddr) -> (usize, Option<Duration>) {
        let session = self.neighbours.get(&peer).and_then(|one| one.session.as_ref());
        let mtu = session.map_or(self.config.mtu, |session| session.mtu);
        (usize::from(mtu) - DATA_HEADER, session.and_then(|session| session.rtt))
    }

    /// Inserts a flow into the tables. `None`: one of them is full.
    fn insert_flow(
        &mut self,
        now: Duration,
        peer: SocketAddr,
        port: u32,
        is_requester: bool,
        state: State,
    ) -> Option<u16> {
        let max = self.config.limits.flows_per_neighbour;
        let has_max = |this: &Self| this.neighbours.get(&peer).is_some_and(|one| one.flows.len() >= max);
        if self.flows.is_full() || has_max(self) {
            self.evict_lingering(now);
        }
        let is_full = has_max(self);
        let neighbour = self.neighbours.get_mut(&peer)?;
        let random = self.random.number();
        let make = |id, cep| Flow {
            id,
            peer,
            cep,
            port,
            is_requester,
            state,
            scheduled: None,
            wants_write: false,
            is_starved: false,
            wants_read: true,
        };
        let slot = if is_full { None } else { self.flows.insert(random, make) };
        match slot {
            Some(slot) => {
                neighbour.flows.insert(slot);
            }
            None => self.counters.flow_limit += 1,
        }
        slot
    }

    /// Sends a PDU with a tag under the key of the neighbour's session.
    pub(super) fn send_session(&mut self, peer: SocketAddr, message: &Message) {
        let Some(session) = self.neighbours.get(&peer).and_then(|one| one.session.as_ref()) else { return };
        let mut out = BytesMut::with_capacity(256);
        message.encode(&mut out);
        session.key.seal(session.role, 0, &mut out);
        self.send_control(peer, out.freeze());
    }

    /// Sends a request under a new port-id.
    pub(super) fn send_first_create(&mut self, now: Duration, slot: u16) {
        let Some(flow) = self.flows.slot_mut(slot) else { return };
        let session = self.neighbours.get_mut(&flow.peer).and_then(|one| one.session.as_mut());
        let (Some(session), State::Allocating(allocating)) = (session, &mut flow.state) else { return };
        session.next_port = session.next_port.wrapping_add(1);
        flow.port = session.next_port;
        (allocating.tries, allocating.retry_at) = (0, Some(now + self.config.timing.retry));
        self.send_create(slot);
        self.schedule_flow(slot);
    }

    pub(super) fn send_create(&mut self, slot: u16) {
        let Some(flow) = self.flows.slot(slot) else { return };
        let State::Allocating(allocating) = &flow.state else { return };
        let FlowRequest { source, destination, qos } = allocating.request.clone();
        let (peer, port, cep, sequence) = (flow.peer, flow.port, flow.cep, allocating.sequence);
        let credit = self.config.limits.receive_window;
        self.send_session(peer, &Message::Create { qos, port, cep, sequence, credit, source, destination });
    }

    /// Processes a management PDU of an enrolled neighbour.
    pub(super) fn on_allocation(&mut self, now: Duration, peer: SocketAddr, message: Message) {
        match message {
            Message::Create { qos, port, cep, sequence, credit, source, destination } => {
                let remote = Endpoint { port, cep, sequence, credit };
                self.on_create(now, peer, remote, FlowRequest { source, destination, qos });
            }
            Message::CreateReply { port, cep, result } => self.on_create_reply(now, peer, port, cep, result),
            Message::Delete { reason, to, from, port } => self.on_delete(now, peer, reason, (to, from), port),
            Message::DeleteReply { to, .. } => match self.flows.by_cep(to, peer) {
                Some(slot) if matches!(self.flows.slot(slot).map(|one| &one.state), Some(State::Deleting(_))) => {
                    self.remove_flow(now, slot);
                }
                _ => self.counters.replayed += 1,
            },
            _ => self.counters.malformed += 1,
        }
    }

    fn on_create(&mut self, now: Duration, peer: SocketAddr, remote: Endpoint, request: FlowRequest) {
        let (port, cep) = (remote.port, remote.cep);
        let max_pending = self.config.limits.pending_per_neighbour;
        let Some(session) = self.neighbours.get_mut(&peer).and_then(|one| one.session.as_mut()) else { return };
        if let Some(slot) = session.requests.get(&port).copied() {
            return self.repeat_answer(peer, slot);
        }
        if !session.is_new(port) {
            match session.refusal(port) {
                Some(reason) => self.send_session(peer, &Message::CreateReply { port, cep, result: Err(reason) }),
                None => self.counters.replayed += 1,
            }
            return;
        }
        if request.qos != Qos::Reliable {
            return self.answer_refusal(peer, port, cep, Reason::Policy);
        }
        if session.pending >= max_pending {
            self.counters.pending_limit += 1;
            return self.answer_refusal(peer, port, cep, Reason::TooMany);
        }
        let deadline = now + self.config.timing.allocate;
        let state = State::Requested(Requested { remote, deadline });
        let Some(slot) = self.insert_flow(now, peer, port, false, state) else {
            return self.answer_refusal(peer, port, cep, Reason::TooMany);
        };
        if let Some(session) = self.neighbours.get_mut(&peer).and_then(|one| one.session.as_mut()) {
            session.requests.insert(port, slot);
            session.pending += 1;
        }
        if let Some(flow) = self.flows.slot(slot).map(|flow| flow.id) {
            self.events.push_back(Event::FlowRequested { flow, peer, request });
        }
        self.schedule_flow(slot);
    }

    /// Repeats a positive answer that may have been lost. An undecided request has no answer.
    pub(super) fn repeat_answer(&mut self, peer: SocketAddr, slot: u16) {
        let Some(flow) = self.flows.slot(slot) else { return };
        if let State::Open(connection) = &flow.state
            && let Some(Unconfirmed { own, remote_cep, .. }) = connection.unconfirmed
        {
            let port = flow.port;
            self.send_session(peer, &Message::CreateReply { port, cep: remote_cep, result: Ok(own) });
        }
    }

    pub(super) fn answer_refusal(&mut self, peer: SocketAddr, port: u32, cep: u32, reason: Reason) {
        if let Some(session) = self.neighbours.get_mut(&peer).and_then(|one| one.session.as_mut()) {
            session.refuse(port, reason);
        }
        self.send_session(peer, &Message::CreateReply { port, cep, result: Err(reason) });
    }

    fn forget_pending(&mut self, peer: SocketAddr) {
        if let Some(session) = self.neighbours.get_mut(&peer).and_then(|one| one.session.as_mut()) {
            session.pending = session.pending.saturating_sub(1);
        }
    }

    fn on_create_reply(
        &mut self,
        now: Duration,
        peer: SocketAddr,
        port: u32,
        cep: u32,
        result: Result<Endpoint, Reason>,
    ) {
        let (unit, rtt) = self.path_of(peer);
        let found = self.flows.by_cep(cep, peer);
        let flow =
            found.and_then(|slot| self.flows.slot_mut(slot)).filter(|flow| flow.is_requester && flow.port == port);
        let (Some(slot), Some(flow)) = (found, flow) else {
            self.counters.replayed += 1;
            return;
        };
        match (&mut flow.state, result) {
            (State::Allocating(_), Err(reason)) => self.end_flow(now, slot, reason),
            (State::Allocating(allocating), Ok(remote)) => {
                let mut sender = std::mem::replace(&mut allocating.sender, Sender::new(now, 0, unit, None));
                sender.open(remote.credit, unit, rtt);
                let limits = &self.config.limits;
                let mut receiver = Receiver::new(remote.sequence, limits.receive_window, limits.ranges, unit);
                // The responder repeats its answer until it hears from us.
                receiver.demand_ack();
                flow.state = State::Open(Box::new(Connection::new(now, remote.cep, sender, receiver)));
                self.counters.allocated += 1;
                self.events.push_back(Event::FlowAllocated { flow: flow.id });
                self.progress(now, slot);
            }
            (State::Open(connection), Ok(remote)) if connection.remote_cep == remote.cep => {
                connection.receiver.demand_ack();
                self.active.push(slot);
            }
            _ => self.counters.replayed += 1,
        }
    }

    fn on_delete(&mut self, now: Duration, peer: SocketAddr, reason: Reason, (to, from): (u32, u32), port: u32) {
        let slot = if to == 0 {
            let session = self.neighbours.get_mut(&peer).and_then(|one| one.session.as_mut());
            // The request may still arrive, and must not be accepted then.
            session.and_then(|session| {
                session.is_new(port);
                session.requests.get(&port).copied()
            })
        } else {
            self.flows.by_cep(to, peer)
        };
        let is_theirs = |state: &State| match state {
            State::Open(connection) => connection.remote_cep == from,
            State::Requested(requested) => requested.remote.cep == from,
            State::Deleting(deleting) => deleting.remote_cep == from,
            State::Allocating(_) | State::Lingering(_) => false,
        };
        if let Some(slot) = slot.filter(|slot| self.flows.slot(*slot).is_some_and(|flow| is_theirs(&flow.state))) {
            self.end_flow(now, slot, reason);
        }
        self.send_session(peer, &Message::DeleteReply { to: from, from: to });
    }

    /// Removes a flow and tells the application, if it still knows the flow.
    pub(super) fn end_flow(&mut self, now: Duration, slot: u16, reason: Reason) {
        let Some(removed) = self.remove_flow(now, slot) else { return };
        let flow = removed.id;
        match removed.state {
            State::Allocating(_) => {
                self.counters.allocation_failed += 1;
                self.events.push_back(Event::AllocationFailed { flow, reason });
            }
            State::Requested(_) | State::Open(_) => {
                self.counters.aborted += 1;
                self.events.push_back(Event::Closed { flow, reason: Some(reason) });
            }
            State::Deleting(_) | State::Lingering(_) => {}
        }
    }

    /// Removes a flow from all tables.
    pub(super) fn remove_flow(&mut self, now: Duration, slot: u16) -> Option<Flow> {
        let mut flow = self.flows.remove(slot)?;
        self.timers.cancel(super::Timer::Flow(slot), &mut flow.scheduled);
        let (send, receive) = flow.buffered();
        self.send_used -= send;
        self.receive_used -= receive;
        if let Some(neighbour) = self.neighbours.get_mut(&flow.peer) {
            neighbour.flows.remove(&slot);
            neighbour.last_used = now;
            let session = neighbour.session.as_mut().filter(|_| !flow.is_requester);
            // A later session may have another request with this port-id.
            if let Some(session) = session.filter(|session| session.requests.get(&flow.port) == Some(&slot)) {
                session.requests.remove(&flow.port);
                session.pending -= usize::from(matches!(flow.state, State::Requested(_)));
            }
        }
        if self.neighbours.get(&flow.peer).is_some_and(|neighbour| neighbour.flows.is_empty()) {
            self.schedule_neighbour(flow.peer);
        }
        self.wake_starved();
        Some(flow)
    }
}
