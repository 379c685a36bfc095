//! Timeouts.
//!
//! In: the time. Out: repetitions of management PDUs, probes, and the end of what has expired. Never: work for flows
//! whose deadline has not passed.

use std::time::Duration;

use super::{Dif, State, Timer};
use crate::message::Reason;

/// Number of repetitions of M_DELETE and of a positive M_CREATE_R.
const MAX_REPEATS: u32 = 6;

impl Dif {
    /// Handles all timeouts that have passed.
    pub fn handle_timeout(&mut self, now: Duration) {
        while let Some(timer) = self.timers.pop(now) {
            match timer {
                Timer::Flow(slot) => {
                    if let Some(flow) = self.flows.slot_mut(slot) {
                        flow.scheduled = None;
                        self.expire_flow(now, slot);
                        self.schedule_flow(slot);
                    }
                }
                Timer::Neighbour(peer) => self.expire_neighbour(now, peer),
            }
        }
    }

    fn expire_flow(&mut self, now: Duration, slot: u16) {
        let timing = &self.config.timing;
        let Some(flow) = self.flows.slot_mut(slot) else { return };
        let peer = flow.peer;
        match &mut flow.state {
            State::Allocating(allocating) if now >= allocating.deadline => {
                // Without an M_CREATE on its way, the peer knows nothing of the flow.
                let was_sent = allocating.retry_at.is_some();
                self.expire_request(now, slot, was_sent);
            }
            State::Allocating(allocating) => {
                if allocating.retry_at.is_some_and(|at| at <= now) {
                    allocating.tries += 1;
                    allocating.retry_at = Some(now + timing.retry * (1 << allocating.tries.min(4)));
                    self.send_create(slot);
                }
            }
            State::Requested(requested) => {
                if now >= requested.deadline {
                    let (port, cep) = (flow.port, requested.remote.cep);
                    self.answer_refusal(peer, port, cep, Reason::Timeout);
                    self.end_flow(now, slot, Reason::Timeout);
                }
            }
            State::Open(connection) => {
                let remote_cep = connection.remote_cep;
                if let Err(reason) = connection.timeout(now, timing) {
                    return self.abort(now, slot, remote_cep, reason);
                }
                if let Some(answer) = connection.unconfirmed.as_mut().filter(|answer| answer.retry_at <= now) {
                    answer.tries += 1;
                    if answer.tries > MAX_REPEATS {
                        return self.abort(now, slot, remote_cep, Reason::Timeout);
                    }
                    answer.retry_at = now + timing.retry * (1 << answer.tries.min(4));
                    self.repeat_answer(peer, slot);
                }
                self.active.push(slot);
            }
            State::Deleting(deleting) => {
                if now >= deleting.retry_at {
                    deleting.tries += 1;
                    deleting.retry_at = now + timing.retry * (1 << deleting.tries.min(4));
                    if deleting.tries > MAX_REPEATS {
                        self.remove_flow(now, slot);
                    } else {
                        self.send_delete(slot);
                    }
                }
            }
            State::Lingering(lingering) => {
                if now >= lingering.until {
                    self.remove_flow(now, slot);
                    self.trim_lingering();
                }
            }
        }
    }

    /// Ends an open flow, informs the application, and the peer, if it is still alive.
    fn abort(&mut self, now: Duration, slot: u16, remote_cep: u32, reason: Reason) {
        if let Some(flow) = self.flows.slot(slot).map(|flow| flow.id) {
            self.counters.aborted += 1;
            self.events.push_back(super::Event::Closed { flow, reason: Some(reason) });
        }
        self.begin_delete(now, slot, remote_cep, reason);
    }

    /// Gives up a request of this node.
    fn expire_request(&mut self, now: Duration, slot: u16, was_sent: bool) {
        if !was_sent {
            return self.end_flow(now, slot, Reason::Timeout);
        }
        if let Some(flow) = self.flows.slot(slot).map(|flow| flow.id) {
            self.counters.allocation_failed += 1;
            self.events.push_back(super::Event::AllocationFailed { flow, reason: Reason::Timeout });
        }
        self.begin_delete(now, slot, 0, Reason::Timeout);
    }

    /// Drops entries of flows that no longer exist. Flows leave in the order in which they began to linger.
    pub(super) fn trim_lingering(&mut self) {
        while self.lingering.front().is_some_and(|id| self.flows.find(*id).is_none()) {
            self.lingering.pop_front();
        }
    }
}
