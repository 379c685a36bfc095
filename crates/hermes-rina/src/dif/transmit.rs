//! Output: datagrams of management, then PDUs of flows, one flow after the other.
//!
//! In: flows that may have something to send. Out: batches of equally long datagrams for one peer. Never: a datagram
//! beyond the MTU.

use std::time::Duration;

use bytes::BytesMut;

use super::{Dif, State};
use crate::event::Transmit;
use crate::message::{DATA_HEADER, DataHeader, Flags, Message};

/// Maximum number of bytes in one batch: the kernel segments at most 64 KiB.
const MAX_BATCH: usize = 65_000;

/// The result of a turn of one flow.
struct Turn {
    datagrams: usize,
    segment_size: usize,
    /// The flow may have more to send.
    has_more: bool,
}

impl Dif {
    /// Appends datagrams for one peer to `out`, at most `max_segments`. All but the last have the same length, so that
    /// one system call can send them (UDP_SEGMENT). `None`: there is nothing to send.
    pub fn poll_transmit(&mut self, now: Duration, out: &mut BytesMut, max_segments: usize) -> Option<Transmit> {
        if let Some((peer, datagram)) = self.control.pop_front() {
            out.extend_from_slice(&datagram);
            self.counters.datagrams_out += 1;
            return Some(Transmit { peer, len: datagram.len(), segment_size: None });
        }
        let start = out.len();
        while let Some(slot) = self.active.pop() {
            let Some(turn) = self.turn(now, slot, out, max_segments.max(1)) else { continue };
            if turn.has_more {
                self.active.push(slot);
            }
            self.schedule_flow(slot);
            if turn.datagrams > 0 {
                self.counters.datagrams_out += turn.datagrams as u64;
                let peer = self.flows.slot(slot)?.peer;
                let segment_size = (turn.datagrams > 1).then_some(turn.segment_size);
                return Some(Transmit { peer, len: out.len() - start, segment_size });
            }
        }
        None
    }

    /// Appends datagrams of one flow.
    fn turn(&mut self, now: Duration, slot: u16, out: &mut BytesMut, max_segments: usize) -> Option<Turn> {
        let room = self.receive_room(self.flows.unread(slot));
        let flow = self.flows.slot_mut(slot)?;
        let State::Open(connection) = &mut flow.state else { return None };
        let (to, from, start) = (connection.remote_cep, flow.cep, out.len());
        let mut plan = connection.sender.plan(now);
        if connection.receiver.is_ack_due() && (plan.is_none() || connection.receiver.has_ranges()) {
            let ranges = connection.receiver.ranges();
            let ack = connection.receiver.acknowledgement(now, room);
            Message::Ack { to, from, ack, ranges }.encode(out);
            return Some(Turn { datagrams: 1, segment_size: out.len() - start, has_more: plan.is_some() });
        }
        let mut turn = Turn { datagrams: 0, segment_size: 0, has_more: false };
        let mut ack = None;
        while let Some(next) = plan {
            let length = DATA_HEADER + next.length;
            let is_full = turn.datagrams == max_segments || out.len() - start + length > MAX_BATCH.max(length);
            if turn.datagrams > 0 && (is_full || length > turn.segment_size) {
                turn.has_more = true;
                break;
            }
            let ack = *ack.get_or_insert_with(|| connection.receiver.acknowledgement(now, room));
            let number = connection.sender.sent(now, &next) as u32;
            let flags = Flags { fin: next.is_fin, probe: next.is_ping(), ..Flags::default() };
            DataHeader { to, from, flags, number, sequence: next.start, ack }.encode(out);
            connection.sender.copy(&next, out);
            self.counters.retransmitted += u64::from(next.is_repeated());
            turn.datagrams += 1;
            if turn.datagrams == 1 {
                turn.segment_size = length;
            } else if length < turn.segment_size {
                turn.has_more = true;
                break;
            }
            plan = connection.sender.plan(now);
        }
        Some(turn)
    }
}
