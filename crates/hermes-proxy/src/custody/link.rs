//! A link of QUIC under a channel: what may be sent over it now.
//!
//! In: what is heard, and what QUIC knows. Out: how much may be under way; whether a word is due. Into the dark no data goes:
//! it would be lost, and be found to be lost a round trip after the link is back. Where the link comes back in some order, it
//! is believed to be back in time, before anything could be heard.

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

use crate::h3::Datagrams;
use crate::stream::ByteStream;
use hermes_custody::contact_plan::{Contact, since_1970};

/// Whoever dials says a word so often, as long as it wants anything.
const WORD: Duration = Duration::from_millis(20);
/// A link that is believed to be back is believed so long, and so many round trips.
const BELIEVED: Duration = Duration::from_millis(60);
const BELIEVED_TRIPS: u32 = 3;
/// Of a link that is not known yet QUIC itself bounds what is under way.
const AT_FIRST: u64 = 256 << 10;
/// Behind the last of the data so many words show at once whether it was lost, where a round trip is as long as that.
const TAIL: u32 = 3;
const FAR: Duration = Duration::from_millis(10);
/// Of a round trip, the pause between them.
const TAIL_SHARE: u32 = 8;

/// The link of a channel.
pub(super) struct Link {
    pub(super) known: Arc<PathMonitor>,
    words: Option<Datagrams>,
    /// The far end says words unasked.
    is_spoken_to: bool,
    /// When it comes: as the document says, or as was found out.
    plan: Option<Plan>,
    contact: Rc<RefCell<Contact>>,
    /// It is believed to be back then.
    expected: Option<Pin<Box<Sleep>>>,
    believed_until: Option<Instant>,
    /// Words that are owed behind what was sent last, and when the next one is due.
    tail: u32,
    due: Pin<Box<Sleep>>,
}

impl Link {
    /// Of a channel that this node has dialled, for whom `contact` goes on; `None` where it is not QUIC's.
    pub(super) fn dialled(stream: &mut ByteStream, plan: Option<Plan>, contact: Rc<RefCell<Contact>>) -> Option<Self> {
        Self::new(stream, false, plan, contact)
    }

    /// Of a channel that was accepted.
    pub(super) fn accepted(stream: &mut ByteStream, plan: Option<Plan>) -> Option<Self> {
        Self::new(stream, true, plan, Rc::default())
    }

    fn new(
        stream: &mut ByteStream,
        is_spoken_to: bool,
        plan: Option<Plan>,
        contact: Rc<RefCell<Contact>>,
    ) -> Option<Self> {
        let (known, words) = (stream.is_dark_at_times()?, stream.take_datagrams());
        let due = Box::pin(tokio::time::sleep(Duration::ZERO));
        Some(Self { known, words, is_spoken_to, plan, contact, expected: None, believed_until: None, tail: 0, due })
    }

    /// Whether words of the far end have come.
    pub(super) fn poll_words(&mut self, cx: &Context<'_>) -> bool {
        let mut batch = VecDeque::new();
        self.words.as_ref().is_some_and(|words| words.poll_take(cx, &mut batch).is_ready())
    }

    /// Says a word: an empty datagram. In the stream all that follows one that was lost would wait for it. False where the
    /// far end takes none.
    pub(super) fn say_word(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(words) = &mut self.words else { return false };
        if words.holds_unsent() && words.poll_flush(cx).is_pending() {
            return true;
        }
        if words.most().is_none() {
            return false;
        }
        // If it broke the stream tells.
        let _ = words.poll_send(cx, &[], &[]);
        self.known.asked(std::time::Instant::now());
        true
    }

    /// The far end has said something.
    pub(super) fn heard(&mut self, now: Instant) {
        self.known.heard(now.into_std());
        if self.is_spoken_to {
            // Its next word is due by then.
            self.known.asked((now + WORD).into_std());
        }
        self.believed_until = None;
        self.expected = None;
        if let Some(rose) = self.known.take_rise() {
            // What is heard unasked was sent half a round trip before; an answer, to what was sent a whole one before.
            let ago = if self.is_spoken_to { self.known.trip() / 2 } else { self.known.trip() };
            let came = Instant::from_std(rose).checked_sub(ago);
            came.inspect(|came| self.contact.borrow_mut().came(*came));
        }
    }

    /// So many bytes may be under way.
    pub(super) fn window(&mut self, cx: &mut Context<'_>) -> Option<u64> {
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

    /// Something is sent.
    pub(super) fn sends(&mut self) {
        if self.known.trip() >= FAR {
            self.tail = TAIL;
            self.due.as_mut().reset(Instant::now() + self.known.trip() / TAIL_SHARE);
        }
    }

    /// Whether a word is due behind what was sent last.
    pub(super) fn poll_tail(&mut self, cx: &mut Context<'_>) -> bool {
        if self.tail == 0 || self.due.as_mut().poll(cx).is_pending() {
            return false;
        }
        self.tail -= 1;
        self.due.as_mut().reset(Instant::now() + self.known.trip() / TAIL_SHARE);
        true
    }
}
