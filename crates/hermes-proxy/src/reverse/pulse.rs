//! Whether the far end of a connection is still there.
//!
//! In: how much was heard on it, and time. Out: a verdict; over HTTP/2 PING where it is quiet. A path
//! that a NAT has forgotten, or an address that is gone, says nothing at all: silence is all there is
//! to see. Never: an end; that is the caller's.

use std::task::{Context, Poll};
use std::time::Duration;

use h2::{Ping, PingPong};
use tokio::time::{Instant, Interval, MissedTickBehavior, interval};

/// So often is looked, and asked where nothing was heard since the last look.
const LOOK: Duration = Duration::from_millis(500);
/// Silence after which nothing new is entrusted to it: an answer takes no such time.
const SILENT: Duration = Duration::from_secs(2);
/// Silence after which it is over. Until then what is on it may recover.
pub(super) const DEAD: Duration = Duration::from_secs(10);

/// What the silence says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Beat {
    Strong,
    Silent,
    Dead,
}

/// Listens to one connection.
pub(crate) struct Pulse {
    /// `None` where another layer asks: QUIC.
    ping: Option<PingPong>,
    is_asked: bool,
    look: Interval,
    heard: u64,
    heard_at: Instant,
    /// It is in doubt: until then it has to be heard.
    doubted_until: Option<Instant>,
}

impl Pulse {
    pub(crate) fn new(ping: Option<PingPong>) -> Self {
        let mut look = interval(LOOK);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { ping, is_asked: false, look, heard: 0, heard_at: Instant::now(), doubted_until: None }
    }

    /// Nothing was heard for too long, as far as was looked.
    pub(crate) fn is_silent(&self) -> bool {
        self.heard_at.elapsed() >= SILENT
    }

    /// There is another one that may have taken its place: it has to show soon that it is alive.
    pub(crate) fn doubt(&mut self) {
        // QUIC asks of itself, once a second; the far end that has moved says so at once.
        let within = if self.ping.is_some() { LOOK } else { 3 * LOOK };
        self.doubted_until.get_or_insert_with(|| Instant::now() + within);
        self.look.reset_immediately();
    }

    /// What is known now; wakes when there is something to look at. `heard` counts up with whatever is heard.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>, heard: u64) -> Beat {
        if std::mem::replace(&mut self.heard, heard) != heard {
            self.heard_at = Instant::now();
            self.doubted_until = None;
        }
        if let Some(ping) = &mut self.ping
            && self.is_asked
            && ping.poll_pong(cx).is_ready()
        {
            self.is_asked = false;
        }
        while self.look.poll_tick(cx).is_ready() {
            let is_quiet = self.heard_at.elapsed() >= LOOK || self.doubted_until.is_some();
            if let Some(ping) = self.ping.as_mut().filter(|_| is_quiet && !self.is_asked) {
                // Only a connection that is over takes none, and that is seen elsewhere.
                self.is_asked = ping.send_ping(Ping::opaque()).is_ok();
                // Wakes when it is answered.
                let _: Poll<_> = ping.poll_pong(cx);
            }
        }
        if self.doubted_until.is_some_and(|until| Instant::now() >= until) {
            return Beat::Dead;
        }
        match self.heard_at.elapsed() {
            silence if silence >= DEAD => Beat::Dead,
            silence if silence >= SILENT => Beat::Silent,
            _ => Beat::Strong,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_is_doubted_has_to_be_heard_soon() {
        for (heard, alive) in [(1, true), (0, false)] {
            let mut pulse = Pulse::new(None);
            pulse.doubt();
            let began = Instant::now();
            let mut heard_now = 0;
            let dies = std::future::poll_fn(|cx| {
                if began.elapsed() >= LOOK {
                    heard_now = heard;
                }
                if pulse.poll(cx, heard_now) == Beat::Dead { Poll::Ready(began.elapsed()) } else { Poll::Pending }
            });
            let died = tokio::time::timeout(SILENT, dies).await;
            assert_eq!(died.is_err(), alive, "{died:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn silence_is_noticed_by_time_alone_and_a_word_mends_it() {
        let mut pulse = Pulse::new(None);
        let began = Instant::now();
        let mut beats = Vec::new();
        std::future::poll_fn(|cx| {
            let heard = u64::from(began.elapsed() >= Duration::from_secs(5));
            let beat = pulse.poll(cx, heard);
            if beats.last().is_none_or(|(_, last)| *last != beat) {
                beats.push((began.elapsed().as_secs(), beat));
            }
            if beat == Beat::Dead { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        let expected = [(0, Beat::Strong), (2, Beat::Silent), (5, Beat::Strong), (7, Beat::Silent), (15, Beat::Dead)];
        assert_eq!(beats, expected);
    }
}
