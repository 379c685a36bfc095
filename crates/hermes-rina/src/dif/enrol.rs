//! Enrolment of neighbours.
//!
//! In: M_CONNECT, M_CONNECT_R, M_RELEASE. Out: sessions. Never: state for a peer that has not returned a cookie and
//! proved that it has the key, or a reply longer than its request.
//!
//! The initiator sends M_CONNECT with a nonce. The responder answers with a cookie and forgets the PDU. The initiator
//! repeats M_CONNECT with the cookie, and both sides derive the session's key from nonce, cookie and shared key. If both
//! sides connect at the same time, the higher nonce wins. A cookie that is older than the session cannot replace it.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::{Bytes, BytesMut};

use super::{Dif, Event, State, Timer};
use crate::auth::{Role, micros};
use crate::config::MIN_MTU;
use crate::event::FlowError;
use crate::message::{ConnectReply, Cookie, Message, Nonce, Reason, TAG_LEN};
use crate::neighbour::{Attempt, Neighbour, Session};

/// Minimum interval between two enrolments that hints of one peer start.
const HINT_INTERVAL: Duration = Duration::from_secs(1);
/// Number of hints that are sent in one second.
const HINTS_PER_SECOND: u32 = 200;
/// Length of a hint, in bytes.
const HINT_LENGTH: usize = 4 + 8 + TAG_LEN;

impl Dif {
    /// Enrols the neighbour at this address, unless it is enrolled. An [`Event::Enrolled`] or an
    /// [`Event::NeighbourLost`] follows.
    ///
    /// # Errors
    /// The table of neighbours is full.
    pub fn connect(&mut self, now: Duration, peer: SocketAddr) -> Result<(), FlowError> {
        if !self.neighbours.contains_key(&peer) {
            if self.neighbours.len() >= self.config.limits.neighbours {
                self.counters.neighbour_limit += 1;
                return Err(FlowError::TooMany);
            }
            self.neighbours.insert(peer, Neighbour { last_used: now, ..Neighbour::default() });
        }
        if self.neighbours.get(&peer).is_some_and(|one| one.session.is_none() && one.attempt.is_none()) {
            self.begin_attempt(now, peer);
        }
        Ok(())
    }

    /// Ends the enrolment of a neighbour: sends M_RELEASE once and closes all its flows.
    pub fn disconnect(&mut self, now: Duration, peer: SocketAddr) {
        let nonce = self.neighbours.get(&peer).and_then(|one| one.session.as_ref()).map(|session| session.nonce);
        if let Some(nonce) = nonce {
            self.send_session(peer, &Message::Release { nonce });
        }
        self.remove_neighbour(now, peer, Reason::Released);
    }

    fn begin_attempt(&mut self, now: Duration, peer: SocketAddr) {
        let nonce = self.random.bytes();
        let (retry_at, deadline) = (now + self.config.timing.retry, now + self.config.timing.enrol);
        let cookie = Cookie::default();
        if let Some(neighbour) = self.neighbours.get_mut(&peer) {
            neighbour.attempt = Some(Attempt { nonce, cookie, tries: 0, sent: now, retry_at, deadline, rtt: None });
        }
        self.send_connect(peer, nonce, cookie);
        self.schedule_neighbour(peer);
    }

    fn send_connect(&mut self, peer: SocketAddr, nonce: Nonce, cookie: Cookie) {
        let (mtu, dif) = (self.config.mtu, self.config.dif.clone());
        self.send_sealed(peer, Role::Initiator, &Message::Connect { nonce, cookie, mtu, dif });
    }

    /// Sends a PDU with a tag under the key of the DIF.
    fn send_sealed(&mut self, peer: SocketAddr, role: Role, message: &Message) {
        let mut out = BytesMut::with_capacity(160);
        message.encode(&mut out);
        self.key.seal(role, 0, &mut out);
        self.send_control(peer, out.freeze());
    }

    pub(super) fn schedule_neighbour(&mut self, peer: SocketAddr) {
        let Some(neighbour) = self.neighbours.get_mut(&peer) else { return };
        let at = match &neighbour.attempt {
            Some(attempt) => Some(attempt.retry_at.min(attempt.deadline)),
            None if neighbour.flows.is_empty() => Some(neighbour.last_used + self.config.timing.neighbour_idle),
            None => None,
        };
        self.timers.schedule(Timer::Neighbour(peer), at, &mut neighbour.scheduled);
    }

    /// Handles the timeout of a neighbour.
    pub(super) fn expire_neighbour(&mut self, now: Duration, peer: SocketAddr) {
        let (retry, idle) = (self.config.timing.retry, self.config.timing.neighbour_idle);
        let Some(neighbour) = self.neighbours.get_mut(&peer) else { return };
        neighbour.scheduled = None;
        if let Some(attempt) = &mut neighbour.attempt {
            if now >= attempt.deadline {
                return self.remove_neighbour(now, peer, Reason::Unreachable);
            }
            if now >= attempt.retry_at {
                attempt.tries += 1;
                attempt.retry_at = now + retry * (1 << attempt.tries.min(2));
                let (nonce, cookie) = (attempt.nonce, attempt.cookie);
                self.send_connect(peer, nonce, cookie);
            }
        } else if neighbour.flows.is_empty() && now >= neighbour.last_used + idle {
            return self.remove_neighbour(now, peer, Reason::Idle);
        }
        self.schedule_neighbour(peer);
    }

    pub(super) fn remove_neighbour(&mut self, now: Duration, peer: SocketAddr, reason: Reason) {
        let Some(neighbour) = self.neighbours.get(&peer) else { return };
        let slots: Vec<u16> = neighbour.flows.iter().copied().collect();
        slots.into_iter().for_each(|slot| self.end_flow(now, slot, reason));
        if let Some(mut neighbour) = self.neighbours.remove(&peer) {
            self.timers.cancel(Timer::Neighbour(peer), &mut neighbour.scheduled);
            self.events.push_back(Event::NeighbourLost { peer, reason });
        }
    }

    /// Processes a management PDU.
    pub(super) fn on_management(&mut self, now: Duration, peer: SocketAddr, datagram: &Bytes) {
        let session = self.neighbours.get(&peer).and_then(|one| one.session.as_ref());
        let is_connect = datagram.get(1) == Some(&1);
        let body = match (datagram.get(1), session) {
            (Some(1), _) => self.key.open(Role::Initiator, datagram),
            (Some(2), _) => self.key.open(Role::Responder, datagram),
            (_, Some(session)) => session.key.open(session.role.other(), datagram),
            _ => {
                let echo = datagram.get(4..12).and_then(|echo| echo.try_into().ok()).unwrap_or_default();
                return self.send_hint(now, peer, echo, datagram.len());
            }
        };
        let Some(body) = body else {
            self.counters.wrong_tag += 1;
            return;
        };
        match Message::decode(body) {
            Ok(Message::Connect { nonce, cookie, mtu, dif }) if is_connect => {
                if dif != self.config.dif {
                    self.counters.wrong_dif += 1;
                } else if mtu < MIN_MTU {
                    self.counters.malformed += 1;
                } else {
                    self.on_connect(now, peer, nonce, cookie, mtu);
                }
            }
            Ok(Message::ConnectReply(reply)) => self.on_connect_reply(now, peer, reply),
            Ok(Message::Release { nonce }) => self.on_release(now, peer, nonce),
            Ok(other) => self.on_allocation(now, peer, other),
            Err(_) => self.counters.malformed += 1,
        }
    }

    fn on_connect(&mut self, now: Duration, peer: SocketAddr, nonce: Nonce, cookie: Cookie, mtu: u16) {
        if !self.cookies.is_valid(now, peer, &nonce, &cookie) {
            return self.challenge(now, peer, nonce);
        }
        let mtu = mtu.min(self.config.mtu);
        let neighbour = self.neighbours.get(&peer);
        if let Some(session) = neighbour.and_then(|one| one.session.as_ref()) {
            if (session.nonce, session.cookie) == (nonce, cookie) {
                // The reply was lost.
                return self.reply_enrolled(peer, nonce, cookie, mtu);
            }
            if cookie.issued <= session.since {
                // A replay, or an initiator that has received two cookies and follows the other one.
                self.counters.stale_connect += 1;
                return self.challenge(now, peer, nonce);
            }
        }
        if neighbour.and_then(|one| one.attempt.as_ref()).is_some_and(|attempt| attempt.nonce > nonce) {
            self.counters.stale_connect += 1;
            return;
        }
        if neighbour.is_none() && self.neighbours.len() >= self.config.limits.neighbours {
            self.counters.neighbour_limit += 1;
            let reply = ConnectReply::TooMany { nonce, cookie };
            return self.send_sealed(peer, Role::Responder, &Message::ConnectReply(reply));
        }
        self.reply_enrolled(peer, nonce, cookie, mtu);
        let key = self.key.of_session(&nonce, &cookie);
        let session = Session::new(key, Role::Responder, nonce, cookie, mtu, micros(now));
        self.install(now, peer, session);
    }

    fn challenge(&mut self, now: Duration, peer: SocketAddr, nonce: Nonce) {
        self.counters.challenges += 1;
        let cookie = self.cookies.issue(now, peer, &nonce);
        self.send_sealed(peer, Role::Responder, &Message::ConnectReply(ConnectReply::Challenge { nonce, cookie }));
    }

    fn reply_enrolled(&mut self, peer: SocketAddr, nonce: Nonce, cookie: Cookie, mtu: u16) {
        let reply = ConnectReply::Enrolled { nonce, cookie, mtu };
        self.send_sealed(peer, Role::Responder, &Message::ConnectReply(reply));
    }

    fn on_connect_reply(&mut self, now: Duration, peer: SocketAddr, reply: ConnectReply) {
        if let ConnectReply::NotEnrolled { echo } = reply {
            return self.on_hint(now, peer, echo);
        }
        let attempt = self.neighbours.get_mut(&peer).and_then(|one| one.attempt.as_mut());
        match (reply, attempt) {
            (ConnectReply::Challenge { nonce, cookie }, Some(attempt)) if attempt.nonce == nonce => {
                if attempt.tries == 0 && attempt.cookie == Cookie::default() {
                    attempt.rtt = Some(now.saturating_sub(attempt.sent));
                }
                // An expired cookie brings another challenge.
                (attempt.cookie, attempt.retry_at) = (cookie, now + self.config.timing.retry);
                self.send_connect(peer, nonce, cookie);
            }
            (ConnectReply::Enrolled { nonce, cookie, mtu }, Some(attempt))
                if (attempt.nonce, attempt.cookie) == (nonce, cookie) && mtu >= MIN_MTU =>
            {
                let (rtt, mtu) = (attempt.rtt, mtu.min(self.config.mtu));
                let key = self.key.of_session(&nonce, &cookie);
                let mut session = Session::new(key, Role::Initiator, nonce, cookie, mtu, micros(now));
                session.rtt = rtt;
                self.install(now, peer, session);
            }
            (ConnectReply::TooMany { nonce, .. }, Some(attempt)) if attempt.nonce == nonce => {
                self.remove_neighbour(now, peer, Reason::TooMany);
            }
            _ => self.counters.replayed += 1,
        }
    }

    /// Installs a session. Flows of an earlier session end, and requests are sent again.
    fn install(&mut self, now: Duration, peer: SocketAddr, session: Session) {
        let mtu = session.mtu;
        let neighbour = self.neighbours.entry(peer).or_default();
        let slots: Vec<u16> = neighbour.flows.iter().copied().collect();
        (neighbour.session, neighbour.attempt, neighbour.last_used) = (Some(session), None, now);
        self.counters.enrolled += 1;
        self.events.push_back(Event::Enrolled { peer, mtu });
        for slot in slots {
            if matches!(self.flows.slot(slot).map(|flow| &flow.state), Some(State::Allocating(_))) {
                self.send_first_create(now, slot);
            } else {
                self.end_flow(now, slot, Reason::Restarted);
            }
        }
        self.schedule_neighbour(peer);
    }

    fn on_release(&mut self, now: Duration, peer: SocketAddr, nonce: Nonce) {
        let session = self.neighbours.get(&peer).and_then(|one| one.session.as_ref());
        if session.is_some_and(|session| session.nonce == nonce) {
            self.remove_neighbour(now, peer, Reason::Released);
        }
    }

    /// Informs a peer that it is not enrolled, for example because this node has restarted.
    pub(super) fn send_hint(&mut self, now: Duration, peer: SocketAddr, echo: [u8; 8], received: usize) {
        self.counters.not_enrolled += 1;
        // A peer that answers our enrolment may already use a session that we do not have yet.
        let is_enrolling = self.neighbours.get(&peer).is_some_and(|one| one.attempt.is_some());
        if received <= HINT_LENGTH || is_enrolling {
            return;
        }
        if self.hints.second != now.as_secs() {
            (self.hints.second, self.hints.used) = (now.as_secs(), 0);
        }
        if self.hints.used >= HINTS_PER_SECOND {
            self.counters.hint_limit += 1;
            return;
        }
        self.hints.used += 1;
        self.send_sealed(peer, Role::Responder, &Message::ConnectReply(ConnectReply::NotEnrolled { echo }));
    }

    /// Starts an enrolment if a hint answers a PDU of one of our flows. The session stays until the enrolment succeeds.
    fn on_hint(&mut self, now: Duration, peer: SocketAddr, echo: [u8; 8]) {
        let [a, b, c, d, e, f, g, h] = echo;
        let (first, cep) = (u32::from_be_bytes([a, b, c, d]), u32::from_be_bytes([e, f, g, h]));
        let flow = self.flows.by_cep(cep, peer).and_then(|slot| self.flows.slot(slot));
        let is_ours = flow.is_some_and(|flow| flow.has_sent(first));
        let Some(neighbour) = self.neighbours.get_mut(&peer).filter(|one| is_ours && one.attempt.is_none()) else {
            self.counters.replayed += 1;
            return;
        };
        if neighbour.last_hint.is_none_or(|last| now >= last + HINT_INTERVAL) {
            neighbour.last_hint = Some(now);
            self.begin_attempt(now, peer);
        }
    }
}
