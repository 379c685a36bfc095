//! The keepalive of a reverse connection, which detects whether the peer is reachable.
//!
//! In: the number of reads from the connection, and time. Out: the state of the path, and probes when the connection
//! receives nothing. A NAT that has dropped its mapping, or an address that no longer exists, sends no error, so
//! silence is the only symptom. Never: a close of the connection, which is left to the caller.

use std::future::Future;
use std::pin::Pin;
use std::task::Context;
use std::time::Duration;

use futures_util::FutureExt as _;
use h2::{Ping, PingPong};
use hermes_net::quic;
use hermes_net::tcp::{AckMonitor, AckState};
use tokio::time::{Instant, Sleep, sleep};

/// The probe interval of one connection to an endpoint while sessions use any connection to that endpoint. An address
/// change of a NAT is not signalled to either side: packets of the peer are lost, and nothing makes the node send. The
/// interval permits detection within one second. Only one connection to an endpoint probes at this interval, and only
/// if it receives nothing else, which costs five small exchanges a second. If a probe is not answered, all connections
/// to the endpoint probe.
pub const USED_PROBE_INTERVAL: Duration = Duration::from_millis(200);
/// The probe interval on the dialling side in all other cases.
pub const UNUSED_PROBE_INTERVAL: Duration = Duration::from_secs(1);
/// The probe interval on the accepting side. It is longer than on the dialling side, so that the probes of the latter
/// usually suffice for both.
pub const ACCEPTOR_PROBE_INTERVAL: Duration = Duration::from_millis(1500);
/// The time within which, in addition to three round trips, a probe must be acknowledged even if its packet is lost.
/// TCP retransmits it after two round trips and 200 ms (RFC 8985, section 7.2, with Linux's minimum timeout), and the
/// acknowledgement takes another round trip. After this time, a second connection is dialled. The first one is not
/// closed, because it may recover from a short outage.
const ACK_TIMEOUT: Duration = Duration::from_millis(250);
/// The number of round trips that are added to [`ACK_TIMEOUT`] and [`MOVED_ACK_TIMEOUT`].
const ROUND_TRIPS: u32 = 3;
/// The interval at which the acknowledgement of a probe is checked.
const ACK_POLL_INTERVAL: Duration = Duration::from_millis(25);
/// The time within which, in addition to two round trips, a probe is acknowledged if no packet is lost.
const PROMPT_ACK_TIMEOUT: Duration = ACK_POLL_INTERVAL.saturating_mul(2);
/// The time within which, in addition to three round trips, an old connection must receive something after the node has
/// dialled from another address. Its NAT has probably dropped the mapping of the old connection.
const MOVED_ACK_TIMEOUT: Duration = Duration::from_millis(500);
/// The time without received bytes after which a connection accepts no new request, even if the peer's kernel
/// acknowledges data. No answer to a probe takes that long.
const SILENT_AFTER: Duration = Duration::from_secs(2);
/// The time without received bytes after which a connection is closed. Until then its streams may recover.
pub const DEAD_AFTER: Duration = Duration::from_secs(10);

/// The state of a connection, as derived from what it receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Liveness {
    /// The peer is reachable.
    Alive,
    /// The peer has not answered in time. The connection should get no new request.
    Silent,
    /// The peer is unreachable. The connection should be closed.
    Dead,
}

/// A means to make the peer send something.
pub enum Probe {
    /// PING frames of HTTP/2.
    Ping(PingPong),
    /// A QUIC connection, which retransmits a probe by itself.
    Quic(quic::Connection),
    /// A probe for tests, which is answered when the cell is true.
    #[cfg(test)]
    Given(std::rc::Rc<std::cell::Cell<bool>>),
}

impl Probe {
    /// Sends a probe. Returns true if [`Self::is_answered`] can detect the answer.
    fn send_probe(&mut self) -> bool {
        match self {
            // Sending fails if the connection has closed, which other code detects, or if an earlier PING is unanswered
            // although other frames have arrived.
            Probe::Ping(ping) => ping.send_ping(Ping::opaque()).is_ok(),
            Probe::Quic(connection) => {
                // Opens a stream of a reserved type (RFC 9114, section 6.2.3), because quinn cannot send PING on
                // demand.
                if let Some(Ok(mut stream)) = connection.open_uni().now_or_never() {
                    let _ = stream.write(&RESERVED).now_or_never();
                    let _ = stream.finish();
                }
                false
            }
            #[cfg(test)]
            Probe::Given(_) => true,
        }
    }

    /// True if the answer to a probe can be detected, which quinn does not report.
    fn sees_answers(&self) -> bool {
        !matches!(self, Probe::Quic(_))
    }

    /// True if probes are needed at this interval. An unused QUIC connection needs none, because QUIC itself sends
    /// keepalives.
    fn is_to_ask(&self, after: Duration) -> bool {
        self.sees_answers() || after < UNUSED_PROBE_INTERVAL
    }

    /// True if the probe was answered. Registers the task to be woken for the answer.
    fn is_answered(&mut self, cx: &mut Context<'_>) -> bool {
        match self {
            Probe::Ping(ping) => ping.poll_pong(cx).is_ready(),
            Probe::Quic(_) => false,
            #[cfg(test)]
            Probe::Given(answered) => answered.take(),
        }
    }
}

/// A function that returns the state of TCP acknowledgements, or `None` if it cannot be read.
type Look = Box<dyn Fn() -> Option<AckState>>;

/// The first reserved stream type (RFC 9114, section 6.2.3).
const RESERVED: [u8; 1] = [0x21];

/// The keepalive of one connection.
pub struct Keepalive {
    /// `None` if this keepalive sends no probes, because QUIC itself does.
    probe: Option<Probe>,
    /// Reads the acknowledgements of sent bytes; `None` for QUIC. PING alone does not distinguish a dead path from a
    /// slow one, on which its answer is queued after other data.
    look: Option<Look>,
    /// The time without received bytes after which a probe is sent.
    after: Duration,
    /// True if a probe should be sent at the next poll.
    asks_now: bool,
    /// The time at which the unanswered probe was sent; `None` if no answer is due.
    asked_at: Option<Instant>,
    /// The timer of the next check.
    alarm: Pin<Box<Sleep>>,
    /// The number of reads at the last poll.
    heard: u64,
    /// The time at which a poll last found a new read.
    heard_at: Instant,
    /// The time by which the connection must receive something, because its path may have failed; `None` otherwise.
    doubted_until: Option<Instant>,
    /// True if the node has dialled from another address since the connection last received something.
    is_elsewhere: bool,
    /// True if, at the last check, an acknowledgement was so late that a packet must have been lost.
    is_late: bool,
    /// True if, at the last check, not even the peer's kernel had acknowledged data within [`ACK_TIMEOUT`].
    is_unanswered: bool,
}

impl Keepalive {
    pub fn new(probe: Option<Probe>, acks: Option<AckMonitor>, after: Duration) -> Self {
        Self {
            probe,
            look: acks.map(|acks| Box::new(move || acks.state().ok()) as Look),
            after,
            asks_now: false,
            asked_at: None,
            alarm: Box::pin(sleep(after)),
            heard: 0,
            heard_at: Instant::now(),
            doubted_until: None,
            is_elsewhere: false,
            is_late: false,
            is_unanswered: false,
        }
    }

    /// Sets the time without received bytes after which a probe is sent.
    pub fn ask_after(&mut self, silence: Duration) {
        if silence < std::mem::replace(&mut self.after, silence) {
            let at = self.alarm.deadline().min(Instant::now() + silence);
            self.alarm.as_mut().reset(at);
        }
    }

    /// True if nothing was received for two seconds.
    pub fn is_silent(&self) -> bool {
        self.heard_at.elapsed() >= SILENT_AFTER
    }

    /// True if an acknowledgement is so late that a packet must have been lost.
    pub fn is_late(&self) -> bool {
        self.is_late
    }

    fn ack_state(&self) -> Option<AckState> {
        self.look.as_ref()?()
    }

    /// Checks whether the probe was acknowledged in time.
    fn look_for_answer(&mut self) {
        (self.is_late, self.is_unanswered) = (false, false);
        let Some(asked_at) = self.asked_at else { return };
        let is_heard = self.heard_at > asked_at;
        let waited = asked_at.max(self.heard_at).elapsed();
        if !is_heard && waited < PROMPT_ACK_TIMEOUT {
            return;
        }
        match self.ack_state().and_then(|known| Some((known.rtt, known.owed_for?.min(waited)))) {
            Some((rtt, owed_for)) => {
                self.is_late = owed_for >= PROMPT_ACK_TIMEOUT + 2 * rtt;
                self.is_unanswered = owed_for >= ACK_TIMEOUT + ROUND_TRIPS * rtt;
            }
            // The peer is reachable, because it has sent other data since the probe.
            None if is_heard => self.asked_at = None,
            None => {}
        }
    }

    /// Sends a probe at the next poll, without regard to the interval.
    pub fn send_probe(&mut self) {
        self.asks_now = true;
        self.alarm.as_mut().reset(Instant::now());
    }

    /// Requires that the connection receives something soon, because a newer connection of the node may have replaced
    /// it. `comes_from_elsewhere` is true if the node dialled the newer connection from another address.
    pub fn doubt(&mut self, comes_from_elsewhere: bool) {
        let within = match self.probe.as_ref().is_some_and(Probe::sees_answers) {
            true if comes_from_elsewhere => MOVED_ACK_TIMEOUT,
            true => SILENT_AFTER,
            // QUIC sends keepalives once a second, and a peer with a new address sends at once.
            false => 3 * MOVED_ACK_TIMEOUT,
        };
        self.is_elsewhere |= comes_from_elsewhere;
        let round_trips = self.ack_state().map_or(Duration::ZERO, |known| ROUND_TRIPS * known.rtt);
        let until = Instant::now() + within + round_trips;
        self.doubted_until = Some(self.doubted_until.map_or(until, |before| before.min(until)));
        self.send_probe();
    }

    /// Stops probes and checks, and drops their references to the connection, so that its socket can close.
    pub fn end(&mut self) {
        (self.probe, self.look) = (None, None);
    }

    /// Returns the state of the connection, and sends a probe if one is due. The task is woken for the next check.
    /// `heard` is the number of reads from the connection.
    pub fn poll(&mut self, cx: &mut Context<'_>, heard: u64) -> Liveness {
        if std::mem::replace(&mut self.heard, heard) != heard {
            self.heard_at = Instant::now();
            (self.doubted_until, self.is_elsewhere) = (None, false);
            (self.is_late, self.is_unanswered) = (false, false);
        }
        if self.asked_at.is_some() && self.probe.as_mut().is_some_and(|probe| probe.is_answered(cx)) {
            self.asked_at = None;
            (self.is_late, self.is_unanswered) = (false, false);
        }
        while self.alarm.as_mut().poll(cx).is_ready() {
            let now = Instant::now();
            let asks_now = std::mem::take(&mut self.asks_now);
            let is_quiet = now >= self.heard_at + self.after;
            self.look_for_answer();
            if let Some(probe) = &mut self.probe
                && self.asked_at.is_none()
                && (asks_now || (is_quiet && probe.is_to_ask(self.after)))
            {
                // h2 permits one PING at a time, so the answer to an earlier one is removed first.
                let _: bool = probe.is_answered(cx);
                self.asked_at = probe.send_probe().then_some(now);
                let _: bool = probe.is_answered(cx);
            }
            let is_owed = self.asked_at.is_some() || self.doubted_until.is_some();
            let quiet = Some(self.heard_at + self.after).filter(|at| *at > now);
            self.alarm.as_mut().reset(if is_owed {
                now + ACK_POLL_INTERVAL
            } else {
                quiet.unwrap_or(now + self.after)
            });
        }
        if self.doubted_until.is_some_and(|until| Instant::now() >= until) || (self.is_elsewhere && self.is_unanswered)
        {
            return Liveness::Dead;
        }
        match self.heard_at.elapsed() {
            silence if silence >= DEAD_AFTER => Liveness::Dead,
            _ if self.is_unanswered || self.is_silent() => Liveness::Silent,
            _ => Liveness::Alive,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;
    use std::task::Poll;

    use super::*;

    const RTT: Duration = Duration::from_millis(300);

    /// A connection whose peer behaves as the test sets.
    struct Given {
        keepalive: Keepalive,
        answers: Rc<Cell<bool>>,
        /// The time since which bytes are unacknowledged.
        owed_since: Rc<Cell<Option<Instant>>>,
        looks: Rc<Cell<u32>>,
        heard: u64,
        began: Instant,
    }

    impl Given {
        fn new() -> Self {
            let answers = Rc::new(Cell::new(false));
            let (owed_since, looks) = (Rc::new(Cell::new(None::<Instant>)), Rc::new(Cell::new(0)));
            let mut keepalive = Keepalive::new(Some(Probe::Given(answers.clone())), None, USED_PROBE_INTERVAL);
            let (owed, looked) = (owed_since.clone(), looks.clone());
            keepalive.look = Some(Box::new(move || {
                looked.set(looked.get() + 1);
                Some(AckState {
                    rtt: RTT,
                    owed_for: owed.get().map(|since| since.elapsed()),
                    waiting_for: None,
                    acknowledged: 0,
                })
            }));
            Self { keepalive, answers, owed_since, looks, heard: 0, began: Instant::now() }
        }

        /// Returns the time from the start until the condition holds, or `None` if it does not hold within this time.
        async fn becomes(
            &mut self,
            within: Duration,
            is_so: impl Fn(&Keepalive, Liveness) -> bool,
        ) -> Option<Duration> {
            let becomes = std::future::poll_fn(|cx| {
                let beat = self.keepalive.poll(cx, self.heard);
                if is_so(&self.keepalive, beat) { Poll::Ready(()) } else { Poll::Pending }
            });
            tokio::time::timeout(within, becomes).await.ok()?;
            Some(self.began.elapsed())
        }
    }

    /// True if the found time equals `time`, within the poll interval.
    fn is_about(found: Option<Duration>, time: Duration) -> bool {
        found.is_some_and(|found| found >= time && found <= time + 2 * ACK_POLL_INTERVAL)
    }

    #[tokio::test(start_paused = true)]
    async fn a_far_path_has_three_round_trips_more_to_be_heard() {
        for (elsewhere, within) in [(true, MOVED_ACK_TIMEOUT), (false, SILENT_AFTER)] {
            let mut given = Given::new();
            given.keepalive.doubt(elsewhere);
            let died = given.becomes(DEAD_AFTER, |_, beat| beat == Liveness::Dead).await;
            assert!(is_about(died, within + ROUND_TRIPS * RTT), "{died:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_not_acknowledged_is_late_and_then_unanswered_and_dead_only_from_elsewhere() {
        for (elsewhere, verdict) in [(false, Liveness::Silent), (true, Liveness::Dead)] {
            let mut given = Given::new();
            given.owed_since.set(Some(given.began));
            given.keepalive.doubt(elsewhere);
            let late = given.becomes(DEAD_AFTER, |keepalive, _| keepalive.is_late()).await;
            assert!(is_about(late, PROMPT_ACK_TIMEOUT + 2 * RTT), "{late:?}");
            let changed = given.becomes(DEAD_AFTER, |_, beat| beat != Liveness::Alive).await;
            assert!(is_about(changed, ACK_TIMEOUT + ROUND_TRIPS * RTT), "{changed:?}");
            assert!(given.becomes(ACK_POLL_INTERVAL, |_, beat| beat == verdict).await.is_some());
            // Any received byte clears the suspicion.
            given.heard = 1;
            assert!(
                given
                    .becomes(ACK_POLL_INTERVAL, |keepalive, beat| beat == Liveness::Alive && !keepalive.is_late())
                    .await
                    .is_some()
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_and_an_acknowledgement_are_no_reason_for_doubt() {
        for answers in [true, false] {
            let mut given = Given::new();
            given.keepalive.send_probe();
            given.answers.set(answers);
            let is_bad = |keepalive: &Keepalive, beat| keepalive.is_late() || beat != Liveness::Alive;
            let bad = given.becomes(SILENT_AFTER - ACK_POLL_INTERVAL, is_bad).await;
            assert_eq!(bad, None);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn who_is_heard_and_owes_nothing_is_not_looked_at_on_and_on_though_it_answers_no_ping() {
        let mut given = Given::new();
        given.keepalive.send_probe();
        assert_eq!(given.becomes(ACK_POLL_INTERVAL / 2, |_, _| false).await, None);
        for _ in 0..100 {
            given.heard += 1;
            assert_eq!(given.becomes(ACK_POLL_INTERVAL, |_, beat| beat != Liveness::Alive).await, None);
        }
        assert!(given.looks.get() <= 2, "{}", given.looks.get());
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_doubted_has_to_be_heard_soon() {
        for (heard, alive) in [(1, true), (0, false)] {
            let mut keepalive = Keepalive::new(None, None, USED_PROBE_INTERVAL);
            keepalive.doubt(true);
            let began = Instant::now();
            let mut heard_now = 0;
            let dies = std::future::poll_fn(|cx| {
                if began.elapsed() >= MOVED_ACK_TIMEOUT {
                    heard_now = heard;
                }
                if keepalive.poll(cx, heard_now) == Liveness::Dead {
                    Poll::Ready(began.elapsed())
                } else {
                    Poll::Pending
                }
            });
            let died = tokio::time::timeout(SILENT_AFTER, dies).await;
            assert_eq!(died.is_err(), alive, "{died:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn silence_is_noticed_by_time_alone_and_a_word_mends_it() {
        let mut keepalive = Keepalive::new(None, None, USED_PROBE_INTERVAL);
        let began = Instant::now();
        let mut beats = Vec::new();
        std::future::poll_fn(|cx| {
            let heard = u64::from(began.elapsed() >= Duration::from_secs(5));
            let beat = keepalive.poll(cx, heard);
            if beats.last().is_none_or(|(_, last)| *last != beat) {
                beats.push((began.elapsed().as_secs(), beat));
            }
            if beat == Liveness::Dead { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        let expected = [
            (0, Liveness::Alive),
            (2, Liveness::Silent),
            (5, Liveness::Alive),
            (7, Liveness::Silent),
            (15, Liveness::Dead),
        ];
        assert_eq!(beats, expected);
    }
}
