//! The QUIC link under a channel: how much may be sent over it now.
//!
//! In: received bytes, and the state of QUIC. Out: the window of bytes in flight; whether a ping is due. During an
//! outage no data is sent: it would be lost, and its loss noticed only a round trip after the link returns. If the link
//! returns on a schedule, sending starts at the expected time, before anything was received.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Context;
use std::time::Duration;

use hermes_model::snapshot::Contact as Plan;
use hermes_net::quic::path_monitor::PathMonitor;
use tokio::time::{Instant, Sleep};

use hermes_custody::contact_plan::{ContactPlan, since_1970};
use hermes_transport::h3::Datagrams;
use hermes_transport::stream::ByteStream;

/// The interval at which the dialling side sends pings while the channel is wanted.
const WORD: Duration = Duration::from_millis(20);
/// The time for which the link is assumed to be up at an expected return, or this many round trips if longer.
const BELIEVED: Duration = Duration::from_millis(60);
const BELIEVED_TRIPS: u32 = 3;
/// The window of a link that is not yet measured; QUIC itself bounds the bytes in flight.
const AT_FIRST: u64 = 256 << 10;
/// The number of pings after the last data that reveal its loss at once, on links with round trips of at least `FAR`.
const TAIL: u32 = 3;
const FAR: Duration = Duration::from_millis(10);
/// The pause between them, as a fraction of a round trip.
const TAIL_SHARE: u32 = 8;

/// The link of a channel.
pub(crate) struct Link {
    pub(crate) known: Arc<PathMonitor>,
    words: Option<Datagrams>,
    /// The peer sends pings unasked.
    is_spoken_to: bool,
    /// The contact plan of the document, or the learnt contact times.
    plan: Option<Plan>,
    contact: Rc<RefCell<ContactPlan>>,
    /// The time at which the link is expected to be up.
    expected: Option<Pin<Box<Sleep>>>,
    believed_until: Option<Instant>,
    /// Pings that are due after the last data, and the time of the next one.
    tail: u32,
    due: Pin<Box<Sleep>>,
}

impl Link {
    /// The link of a channel that this node dialled, which continues `contact`; `None` without QUIC.
    pub(crate) fn dialled(
        stream: &mut ByteStream,
        plan: Option<Plan>,
        contact: Rc<RefCell<ContactPlan>>,
    ) -> Option<Self> {
        Self::new(stream, false, plan, contact)
    }

    /// The link of an accepted channel.
    pub(crate) fn accepted(stream: &mut ByteStream, plan: Option<Plan>) -> Option<Self> {
        Self::new(stream, true, plan, Rc::default())
    }

    fn new(
        stream: &mut ByteStream,
        is_spoken_to: bool,
        plan: Option<Plan>,
        contact: Rc<RefCell<ContactPlan>>,
    ) -> Option<Self> {
        let (known, words) = (stream.is_dark_at_times()?, stream.take_datagrams());
        let due = Box::pin(tokio::time::sleep(Duration::ZERO));
        Some(Self { known, words, is_spoken_to, plan, contact, expected: None, believed_until: None, tail: 0, due })
    }

    /// True if pings of the peer have come.
    pub(crate) fn poll_words(&mut self, cx: &Context<'_>) -> bool {
        let mut batch = VecDeque::new();
        self.words.as_ref().is_some_and(|words| words.poll_take(cx, &mut batch).is_ready())
    }

    /// Sends a ping: an empty datagram. In the stream, a lost ping would delay everything after it. False if the peer
    /// accepts no datagrams.
    pub(crate) fn say_word(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(words) = &mut self.words else { return false };
        if words.holds_unsent() && words.poll_flush(cx).is_pending() {
            return true;
        }
        if words.most().is_none() {
            return false;
        }
        // A failure also shows on the stream.
        let _ = words.poll_send(cx, &[], &[]);
        self.known.asked(std::time::Instant::now());
        true
    }

    /// Notes that bytes came.
    pub(crate) fn heard(&mut self, now: Instant) {
        self.known.heard(now.into_std());
        if self.is_spoken_to {
            // The peer's next ping should arrive by then.
            self.known.asked((now + WORD).into_std());
        }
        self.believed_until = None;
        self.expected = None;
        if let Some(rose) = self.known.take_rise() {
            // Bytes that answer no ping left the peer half a round trip ago. An answer belongs to a ping that this node
            // sent one round trip ago.
            let ago = if self.is_spoken_to { self.known.trip() / 2 } else { self.known.trip() };
            let came = Instant::from_std(rose).checked_sub(ago);
            came.inspect(|came| self.contact.borrow_mut().came(*came));
        }
    }

    /// The limit of bytes in flight; `None` without a limit.
    pub(crate) fn window(&mut self, cx: &mut Context<'_>) -> Option<u64> {
        let now = Instant::now();
        if self.known.is_dark(now.into_std()) && !self.is_believed(cx, now) {
            return Some(0);
        }
        Some(self.known.in_order().unwrap_or(AT_FIRST))
    }

    fn is_believed(&mut self, cx: &mut Context<'_>, now: Instant) -> bool {
        if self.believed_until.is_some_and(|until| now < until) {
            return true;
        }
        if self.expected.is_none() {
            let next = match self.plan {
                Some(plan) => Some(now + plan.wait(since_1970())),
                None => self.contact.borrow().next(now),
            };
            self.expected = next.map(|next| Box::pin(tokio::time::sleep_until(next)));
        }
        let is_due = self.expected.as_mut().is_some_and(|sleep| sleep.as_mut().poll(cx).is_ready());
        if is_due {
            self.expected = None;
            self.believed_until = Some(now + BELIEVED.max(BELIEVED_TRIPS * self.known.trip()));
        }
        is_due
    }

    /// Notes that data is sent.
    pub(crate) fn sends(&mut self) {
        if self.known.trip() >= FAR {
            self.tail = TAIL;
            self.due.as_mut().reset(Instant::now() + self.known.trip() / TAIL_SHARE);
        }
    }

    /// True if a ping is due after the last data.
    pub(crate) fn poll_tail(&mut self, cx: &mut Context<'_>) -> bool {
        if self.tail == 0 || self.due.as_mut().poll(cx).is_pending() {
            return false;
        }
        self.tail -= 1;
        self.due.as_mut().reset(Instant::now() + self.known.trip() / TAIL_SHARE);
        true
    }
}
