//! A custody channel: records on a stream between two nodes.
//!
//! In: a stream that one node has opened to the other. Out: the neighbour's records go to the custody service, and the
//! service's records for it go out. Exchanges that a neighbour begins are sessions of the channel's worker; they
//! outlive the channel.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use hermes_wire::capsule::{Capsule, CapsuleDecoder};
use hermes_wire::custody::{self as wire, ExchangeId, Record};
use http::HeaderName;
use tokio::time::Instant;

use super::link::Link;
use hermes_custody::service::CustodyService;
use hermes_transport::stream::ByteStream;

/// The header that names the path of a neighbour, which may have several.
pub(crate) const PATH_NAME: HeaderName = HeaderName::from_static("hermes-custody-path");
/// Records are coalesced up to this size.
const GATHER: usize = 32 << 10;
/// A silence after which the path may have had an outage.
const SILENCE: Duration = Duration::from_millis(60);
/// The maximum number of rounds in one poll, after which other tasks of the worker run.
const MAX_ROUNDS_PER_TURN: usize = 16;

/// A channel to a neighbour.
pub(crate) struct Channel {
    office: Arc<CustodyService>,
    peer: Arc<str>,
    number: u64,
    decoder: CapsuleDecoder,
    out: Bytes,
    /// The link, if it is QUIC.
    link: Option<Link>,
    /// A counter of reads, and the time of the last one.
    pub(crate) heard: u64,
    heard_at: Instant,
    /// True if a ping must be sent although no record waits.
    pub(crate) owes_ping: bool,
}

impl Drop for Channel {
    fn drop(&mut self) {
        self.office.close(&self.peer, self.number);
    }
}

impl Channel {
    /// Opens a channel. Also returns the neighbour's exchanges from before this process started.
    pub(crate) fn begin(office: Arc<CustodyService>, peer: Arc<str>, link: Option<Link>) -> (Self, Vec<ExchangeId>) {
        let (number, resumed) = office.open(&peer);
        let decoder = wire::decoder();
        (
            Self {
                office,
                peer,
                number,
                decoder,
                out: Bytes::new(),
                link,
                heard: 0,
                heard_at: Instant::now(),
                owes_ping: false,
            },
            resumed,
        )
    }

    /// Reads and writes as much as possible. Ready with a reason when the channel ends.
    pub(crate) fn poll(
        &mut self,
        cx: &mut Context<'_>,
        stream: &mut ByteStream,
        mut begun: impl FnMut(ExchangeId),
    ) -> Poll<&'static str> {
        for _ in 0..MAX_ROUNDS_PER_TURN {
            let has_word = self.link.as_mut().is_some_and(|link| link.poll_words(cx));
            if has_word {
                self.hears();
            }
            let has_read = match stream.poll_read(cx) {
                Poll::Ready(Ok(Some(bytes))) => {
                    self.hears();
                    self.decoder.push(bytes);
                    if !self.receive(&mut begun) {
                        return Poll::Ready("invalid custody record");
                    }
                    true
                }
                Poll::Ready(Ok(None)) => return Poll::Ready("the channel was closed"),
                Poll::Ready(Err(_)) => return Poll::Ready("it broke"),
                Poll::Pending => has_word,
            };
            if self.out.is_empty() && self.gather(cx) {
                return Poll::Ready("a newer channel has replaced it");
            }
            if self.out.is_empty() {
                if stream.poll_flush(cx).is_ready() && !has_read {
                    return Poll::Pending;
                }
                continue;
            }
            match stream.poll_write(cx, &mut self.out) {
                Poll::Ready(Ok(())) => {
                    if let Some(link) = &self.link {
                        link.known.asked(std::time::Instant::now());
                    }
                }
                Poll::Ready(Err(_)) => return Poll::Ready("it broke"),
                Poll::Pending if has_read => {}
                Poll::Pending => return Poll::Pending,
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Notes that bytes came.
    fn hears(&mut self) {
        self.heard += 1;
        // Any acknowledged packet shows earlier losses at once, instead of after a timer.
        let now = Instant::now();
        // A ping that answers a ping does not count as silence.
        let silence = self.link.as_ref().map_or(SILENCE, |link| SILENCE.max(2 * link.known.trip()));
        self.owes_ping |= now - self.heard_at >= silence;
        self.heard_at = now;
        if let Some(link) = &mut self.link {
            link.heard(now);
        }
    }

    /// Handles received records. False: a record is invalid.
    fn receive(&mut self, begun: &mut impl FnMut(ExchangeId)) -> bool {
        loop {
            match self.decoder.next() {
                Ok(Some(Capsule::Kept { kind, payload })) => match Record::parse(kind, payload) {
                    Ok(record) => {
                        self.office.receive(&self.peer, self.number, record).into_iter().for_each(&mut *begun);
                    }
                    Err(error) => {
                        tracing::warn!(peer = %self.peer, %error, "a channel of custody is ended");
                        return false;
                    }
                },
                Ok(Some(_)) => {}
                Ok(None) => return true,
                Err(error) => {
                    tracing::warn!(peer = %self.peer, %error, "a channel of custody is ended");
                    return false;
                }
            }
        }
    }

    /// Collects outgoing records. True if another channel has replaced this one.
    fn gather(&mut self, cx: &mut Context<'_>) -> bool {
        let mut out = BytesMut::new();
        let window = self.link.as_mut().and_then(|link| link.window(cx));
        while out.len() < GATHER {
            match self.office.poll_record(cx, &self.peer, self.number, window) {
                Poll::Ready(Some(record)) => record.put(&mut out),
                Poll::Ready(None) => return true,
                Poll::Pending => break,
            }
        }
        let owes_ping = std::mem::take(&mut self.owes_ping);
        if out.is_empty() && (owes_ping || self.link.as_mut().is_some_and(|link| link.poll_tail(cx))) {
            if !self.link.as_mut().is_some_and(|link| link.say_word(cx)) {
                wire::put_ping(&mut out);
            }
        } else if let Some(link) = self.link.as_mut().filter(|_| !out.is_empty()) {
            link.sends();
        }
        self.out = out.freeze();
        false
    }
}
