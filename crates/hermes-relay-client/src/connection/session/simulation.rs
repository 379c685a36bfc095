//! Two ends over a network that loses, repeats and reorders frames, in computed time.
//!
//! In: random streams, writes, reads and losses from a seed. Out: whether each end got exactly the other one's stream, and
//! whether both ends learned of it.

use std::collections::BTreeMap;

use rand::rngs::StdRng;
use rand::{Rng as _, RngCore as _, SeedableRng as _};

use super::*;

const WINDOW: usize = FIRST_LIMIT as usize;

/// An end and its application.
struct End {
    session: Session,
    text: Vec<u8>,
    written: usize,
    received: Vec<u8>,
    has_ended: bool,
    is_over: bool,
}

impl End {
    fn new(session: Session, length: usize, random: &mut StdRng) -> Self {
        let mut text = vec![0; length];
        random.fill_bytes(&mut text);
        Self { session, text, written: 0, received: Vec::new(), has_ended: false, is_over: false }
    }

    /// The application writes and reads a bit, or pauses.
    fn work(&mut self, random: &mut StdRng, now: Instant) {
        let room = self.session.outgoing().room().min(self.text.len() - self.written);
        if room > 0 {
            let size = random.random_range(1..=room.min(5000));
            self.session.outgoing().write(&self.text[self.written..self.written + size]);
            self.written += size;
        }
        if self.written == self.text.len() && !self.has_ended {
            self.session.outgoing().end();
            self.has_ended = true;
        }
        if random.random_bool(0.7)
            && let Some(data) = self.session.take(now)
        {
            self.received.extend_from_slice(&data);
        }
        if self.session.incoming().is_taken() {
            self.session.delivered();
        }
    }
}

/// The frames under way, by their time of arrival.
#[derive(Default)]
struct Network {
    frames: BTreeMap<(Instant, u64), (usize, Frame)>,
    sent: u64,
}

impl Network {
    fn send(&mut self, to: usize, frame: &Frame, at: Instant) {
        self.sent += 1;
        self.frames.insert((at, self.sent), (to, frame.clone()));
    }
}

/// Runs a connection of two streams of these lengths. `loss`: the share of the publications that fail or vanish.
fn run(seed: u64, lengths: [usize; 2], loss: f64) {
    let mut random = StdRng::seed_from_u64(seed);
    let begin = Instant::now();
    let mut now = begin;
    let call = Session::call(WINDOW, now);
    let mut ends = [Some(End::new(call, lengths[0], &mut random)), None];
    let mut network = Network::default();
    for _ in 0..200_000 {
        for (this, end) in ends.iter_mut().enumerate() {
            let Some(end) = end else { continue };
            end.work(&mut random, now);
            assert_eq!(end.session.check(now), Ok(()), "seed {seed}, end {this}, after {:?}", now - begin);
            while let Some(frame) = end.session.next_frame(now) {
                if random.random_bool(loss) {
                    // The application may write before the next call.
                    end.session.failed(&frame, now);
                    break;
                }
                let took = Duration::from_millis(random.random_range(0..2000));
                end.session.published(&frame, took, now);
                let copies = if random.random_bool(loss) { 0 } else { random.random_range(1..=2) };
                for _ in 0..copies {
                    network.send(1 - this, &frame, now + Duration::from_millis(random.random_range(1..400)));
                }
            }
            end.is_over = end.session.is_over(now) || end.session.has_lingered(now);
        }
        if ends.iter().all(|end| end.as_ref().is_some_and(|end| end.is_over)) {
            let [Some(caller), Some(listener)] = &ends else { continue };
            assert!(caller.received == listener.text, "seed {seed}: the caller received another stream");
            assert!(listener.received == caller.text, "seed {seed}: the listener received another stream");
            return;
        }
        while let Some(((at, _), _)) = network.frames.first_key_value()
            && *at <= now
            && let Some((_, (to, frame))) = network.frames.pop_first()
        {
            let is_opening = frame.to.is_none();
            if is_opening && ends[to].is_none() {
                let caller = frame.from.clone().into_iter().next().unwrap_or_else(EndId::random);
                let session = Session::accept(caller, WINDOW, now);
                ends[to] = Some(End::new(session, lengths[1], &mut random));
            } else if is_opening {
                // A listener remembers its callers.
                continue;
            }
            if let Some(end) = &mut ends[to]
                && !end.is_over
            {
                let received = end.session.receive(&frame, now);
                assert_eq!(received, Ok(()), "seed {seed}, end {to}");
            }
        }
        now += Duration::from_millis(random.random_range(1..50));
    }
    panic!("seed {seed}: the connection never ended");
}

#[test]
fn both_streams_arrive_whole_over_any_network() {
    for seed in 0..100 {
        let mut random = StdRng::seed_from_u64(seed);
        let lengths = [(); 2].map(|()| [0, 1, 100, 30_000, 400_000][random.random_range(0..5)]);
        let loss = [0.0, 0.02, 0.2][random.random_range(0..3)];
        run(seed, lengths, loss);
    }
}

#[test]
fn an_end_without_answers_gives_up() {
    let begin = Instant::now();
    let mut session = Session::call(WINDOW, begin);
    session.outgoing().write(b"hello");
    let frame = session.next_frame(begin).map(|frame| (frame.to, frame.offset, frame.data));
    assert_eq!(frame, Some((None, Some(0), Bytes::from_static(b"hello"))));
    assert_eq!(session.next_frame(begin + OPEN_INTERVAL / 2), None);
    let again = session.next_frame(begin + OPEN_INTERVAL).map(|frame| (frame.offset, frame.data));
    assert_eq!(again, Some((Some(0), Bytes::from_static(b"hello"))), "the first bytes are repeated with the call");
    assert_eq!(session.check(begin + OPEN_TIMEOUT), Err(Failure::NoAnswer));
}

#[test]
fn an_idle_end_is_heard_and_a_silent_one_is_given_up() {
    let begin = Instant::now();
    let mut caller = Session::call(WINDOW, begin);
    let opening = caller.next_frame(begin).unwrap_or_default();
    let mut listener = Session::accept(opening.from.clone().unwrap_or_else(EndId::random), WINDOW, begin);
    assert_eq!(listener.receive(&opening, begin), Ok(()));
    let answer = listener.next_frame(begin).unwrap_or_default();
    assert_eq!(caller.receive(&answer, begin), Ok(()));
    let thanks = caller.next_frame(begin).unwrap_or_default();
    assert_eq!(listener.receive(&thanks, begin), Ok(()));
    assert_eq!((caller.next_frame(begin), listener.next_frame(begin)), (None, None));
    let later = begin + KEEPALIVE_INTERVAL;
    assert_eq!(caller.deadline(), later);
    assert!(caller.next_frame(later).is_some_and(|frame| frame.offset.is_none()));
    assert_eq!(listener.check(begin + MAX_SILENCE), Err(Failure::Silent));
}

#[test]
fn a_reset_says_why() {
    let now = Instant::now();
    let mut session = Session::call(WINDOW, now);
    let frame = Frame::reset(EndId::random(), session.own().clone(), "no such host");
    assert_eq!(session.receive(&frame, now), Err(Failure::Reset("no such host".to_owned())));
}

#[test]
fn nothing_fails_after_both_ends_have_everything() {
    let begin = Instant::now();
    let mut caller = Session::call(WINDOW, begin);
    caller.outgoing().end();
    let opening = caller.next_frame(begin).unwrap_or_default();
    let mut listener = Session::accept(opening.from.clone().unwrap_or_else(EndId::random), WINDOW, begin);
    listener.outgoing().write(b"hello");
    listener.outgoing().end();
    assert_eq!(listener.receive(&opening, begin), Ok(()));
    let answer = listener.next_frame(begin).unwrap_or_default();
    assert_eq!(caller.receive(&answer, begin), Ok(()));
    // The application has not read yet. Its other end leaves, or is stopped.
    let reset = Frame::reset(listener.own().clone(), caller.own().clone(), "stopped");
    assert!(caller.is_transferred());
    assert_eq!((caller.receive(&reset, begin), caller.check(begin + 2 * MAX_SILENCE)), (Ok(()), Ok(())));
    assert_eq!(caller.take(begin).as_deref(), Some(&b"hello"[..]));
}
