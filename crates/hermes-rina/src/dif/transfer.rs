//! PDUs of allocated flows.
//!
//! In: data and acknowledgement PDUs. Out: events, and flows that have something to send. Never: memory beyond the
//! windows, or a reply to a peer that is not enrolled except a rate-limited hint.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::{Bytes, BytesMut};

use super::{Dif, Event, State};
use crate::flow::Lingering;
use crate::message::{AckInfo, DataHeader, Flags, Message, Reason};
use crate::receiver::Dropped;

impl Dif {
    pub(super) fn on_data(&mut self, now: Duration, peer: SocketAddr, header: &DataHeader, payload: Bytes) {
        let received = payload.len();
        let found = self.flows.by_cep(header.to, peer);
        let room = self.receive_room(found.map_or(0, |slot| self.flows.unread(slot)));
        let (Some(slot), Some(flow)) = (found, found.and_then(|slot| self.flows.slot_mut(slot))) else {
            return self.on_unknown(now, peer, header);
        };
        match &mut flow.state {
            State::Open(connection) if connection.remote_cep == header.from => {
                if header.flags.reset {
                    // The peer no longer lingers. If only its acknowledgement of our end is missing, nothing is lost.
                    if connection.is_end_read && connection.sender.is_finished() && connection.sender.buffered() == 0 {
                        return self.linger(now, slot);
                    }
                    return self.end_flow(now, slot, Reason::UnknownFlow);
                }
                let before = (connection.sender.buffered(), connection.receiver.buffered());
                if connection.sender.acknowledge(now, &header.ack, &[]).is_err() {
                    self.counters.invalid_ack += 1;
                    return;
                }
                connection.last_heard = now;
                connection.unconfirmed = None;
                if received > 0 {
                    connection.last_bytes = now;
                }
                let result = connection.receiver.receive(now, header, payload, room);
                self.send_used -= before.0 - connection.sender.buffered();
                self.receive_used += connection.receiver.buffered() - before.1;
                if let Err(dropped) = result {
                    self.count(dropped);
                }
                self.progress(now, slot);
            }
            State::Lingering(lingering) if lingering.remote_cep == header.from && !header.flags.reset => {
                // The peer has not received our last acknowledgement.
                let ack = AckInfo { sequence: lingering.next, echo: Some(header.number), ..AckInfo::default() };
                self.send_ack(peer, header.from, header.to, ack);
            }
            _ => self.counters.unknown_flow += 1,
        }
    }

    pub(super) fn on_ack(
        &mut self,
        now: Duration,
        peer: SocketAddr,
        (to, from): (u32, u32),
        ack: &AckInfo,
        ranges: &[(u32, u32)],
    ) {
        let found = self.flows.by_cep(to, peer);
        let (Some(slot), Some(flow)) = (found, found.and_then(|slot| self.flows.slot_mut(slot))) else {
            self.counters.unknown_flow += 1;
            return;
        };
        let State::Open(connection) = &mut flow.state else { return };
        if connection.remote_cep != from {
            self.counters.unknown_flow += 1;
            return;
        }
        let before = connection.sender.buffered();
        if connection.sender.acknowledge(now, ack, ranges).is_err() {
            self.counters.invalid_ack += 1;
            return;
        }
        connection.last_heard = now;
        connection.unconfirmed = None;
        let released = before - connection.sender.buffered();
        if released > 0 {
            connection.last_bytes = now;
        }
        self.send_used -= released;
        self.progress(now, slot);
    }

    fn count(&mut self, dropped: Dropped) {
        let counter = match dropped {
            Dropped::Duplicate => &mut self.counters.duplicate,
            Dropped::OutsideWindow => &mut self.counters.outside_window,
            Dropped::Inconsistent => &mut self.counters.inconsistent,
            Dropped::TooManyRanges => &mut self.counters.range_limit,
            Dropped::NoMemory => &mut self.counters.receive_limit,
        };
        *counter += 1;
    }

    /// Answers a data PDU of no known flow, with at most as many bytes.
    fn on_unknown(&mut self, now: Duration, peer: SocketAddr, header: &DataHeader) {
        if !self.is_enrolled(peer) {
            let mut echo = [0; 8];
            let ceps = [header.to.to_be_bytes(), header.from.to_be_bytes()];
            echo.iter_mut().zip(ceps.iter().flatten()).for_each(|(to, from)| *to = *from);
            return self.send_hint(now, peer, echo, crate::message::DATA_HEADER);
        }
        self.counters.unknown_flow += 1;
        if !header.flags.reset {
            let flags = Flags { reset: true, ..Flags::default() };
            let header = DataHeader { to: header.from, from: header.to, flags, ..DataHeader::default() };
            let mut out = BytesMut::new();
            header.encode(&mut out);
            self.send_control(peer, out.freeze());
        }
    }

    fn send_ack(&mut self, peer: SocketAddr, to: u32, from: u32, ack: AckInfo) {
        let mut out = BytesMut::new();
        Message::Ack { to, from, ack, ranges: Vec::new() }.encode(&mut out);
        self.send_control(peer, out.freeze());
    }

    /// Emits events, ends a complete flow, and queues the flow for output.
    pub(super) fn progress(&mut self, now: Duration, slot: u16) {
        let Some(flow) = self.flows.slot_mut(slot) else { return };
        let State::Open(connection) = &mut flow.state else { return };
        let receiver = &connection.receiver;
        if flow.wants_read && (receiver.readable() > 0 || receiver.is_complete()) {
            flow.wants_read = false;
            self.events.push_back(Event::Readable { flow: flow.id });
        }
        if flow.wants_write
            && connection.sender.buffered() <= self.config.limits.send_buffer / 2
            && self.send_used < self.config.limits.total_send
        {
            flow.wants_write = false;
            self.events.push_back(Event::Writable { flow: flow.id });
        }
        if connection.is_complete() {
            return self.linger(now, slot);
        }
        self.active.push(slot);
        self.schedule_flow(slot);
        self.wake_starved();
    }

    /// Ends a flow whose directions are both complete.
    fn linger(&mut self, now: Duration, slot: u16) {
        let room = self.receive_room(self.flows.unread(slot));
        let Some(flow) = self.flows.slot_mut(slot) else { return };
        let State::Open(connection) = &mut flow.state else { return };
        let (id, peer, cep, remote_cep) = (flow.id, flow.peer, flow.cep, connection.remote_cep);
        let last = connection.receiver.is_ack_pending().then(|| connection.receiver.acknowledgement(now, room));
        let until = now + self.config.timing.linger;
        let next = connection.receiver.next();
        self.set_state(slot, State::Lingering(Lingering { remote_cep, next, until }));
        if let Some(ack) = last {
            self.send_ack(peer, remote_cep, cep, ack);
        }
        self.trim_lingering();
        self.lingering.push_back(id);
        self.events.push_back(Event::Closed { flow: id, reason: None });
        self.schedule_flow(slot);
    }

    /// Removes the flow that has lingered longest, because the table is full.
    pub(super) fn evict_lingering(&mut self, now: Duration) {
        while let Some(id) = self.lingering.pop_front() {
            if let Some(slot) = self.flows.find(id) {
                self.remove_flow(now, slot);
                return;
            }
        }
    }

    /// Wakes flows whose writes were cut short by the total limit, once half of it is free.
    pub(super) fn wake_starved(&mut self) {
        if self.starved.is_empty() || self.send_used > self.config.limits.total_send / 2 {
            return;
        }
        for id in std::mem::take(&mut self.starved) {
            let slot = self.flows.find(id);
            let Some(flow) = slot.and_then(|slot| self.flows.slot_mut(slot)) else { continue };
            flow.is_starved = false;
            if std::mem::take(&mut flow.wants_write) {
                self.events.push_back(Event::Writable { flow: id });
            }
        }
    }
}
