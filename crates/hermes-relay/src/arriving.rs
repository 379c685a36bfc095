//! Content that subscribers get while it arrives.
//!
//! In: the bytes of a publication, whose length is announced. Out: the same bytes for each reader, in parts; or all of them
//! at the end. If the publisher breaks off, readers learn of that, and the bytes are forgotten. Never: more bytes than were
//! announced.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use bytes::{Bytes, BytesMut};

/// A part has at least this many bytes, but for the last one. So their number is bounded.
const MIN_PART_BYTES: usize = 16 << 10;

/// The content of a publication that arrives, or has arrived.
#[derive(Debug)]
pub struct Arriving {
    length: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    parts: Vec<Bytes>,
    end: Option<End>,
    readers: Vec<Waker>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Whole,
    Aborted,
}

/// The next bytes of arriving content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NextPart {
    /// They have arrived.
    Bytes(Bytes),
    /// The reader has had all of them.
    End,
    /// The publisher has broken off.
    Aborted,
}

impl Arriving {
    /// The announced number of bytes.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Returns the part with this number.
    pub fn poll_part(&self, number: usize, cx: &mut Context<'_>) -> Poll<NextPart> {
        let mut state = self.lock();
        match (state.end, state.parts.get(number)) {
            (Some(End::Aborted), _) => Poll::Ready(NextPart::Aborted),
            (_, Some(part)) => Poll::Ready(NextPart::Bytes(part.clone())),
            (Some(End::Whole), None) => Poll::Ready(NextPart::End),
            (None, None) => {
                state.wait(cx);
                Poll::Pending
            }
        }
    }

    /// Waits until all bytes have arrived, or the publisher has broken off.
    pub fn poll_end(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut state = self.lock();
        if state.end.is_some() {
            return Poll::Ready(());
        }
        state.wait(cx);
        Poll::Pending
    }

    /// Whether all bytes have arrived.
    pub fn is_whole(&self) -> bool {
        self.lock().end == Some(End::Whole)
    }

    /// Whether bytes are still to arrive.
    pub fn is_arriving(&self) -> bool {
        self.lock().end.is_none()
    }

    /// Forgets the bytes unless all have arrived. The publisher learns of it.
    pub fn abort(&self) {
        self.change(|state| {
            if state.end.is_none() {
                state.end = Some(End::Aborted);
                state.parts = Vec::new();
            }
        });
    }

    /// All bytes. Empty: they have not arrived.
    pub fn whole(&self) -> Bytes {
        let state = self.lock();
        match (state.end, &state.parts[..]) {
            (Some(End::Whole), [part]) => part.clone(),
            (Some(End::Whole), parts) => parts.concat().into(),
            (Some(End::Aborted) | None, _) => Bytes::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let readers = {
            let mut state = self.lock();
            change(&mut state);
            std::mem::take(&mut state.readers)
        };
        readers.into_iter().for_each(Waker::wake);
    }
}

impl State {
    fn wait(&mut self, cx: &Context<'_>) {
        if !self.readers.iter().any(|reader| reader.will_wake(cx.waker())) {
            self.readers.push(cx.waker().clone());
        }
    }
}

/// The end at which the bytes arrive. If it is dropped early, the publisher has broken off.
#[derive(Debug)]
pub struct ContentWriter {
    content: Arc<Arriving>,
    /// Bytes that are not yet a part. It has room for all bytes from the beginning, so that they are copied once.
    next: BytesMut,
    arrived: usize,
}

/// The reason why content does not arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotArrived {
    /// The publisher sends another number of bytes than it has announced.
    #[error("the content has another length than the {0} bytes that were announced")]
    WrongLength(usize),
    /// [`Arriving::abort`] was called.
    #[error("another relay became the root of the channel while the content arrived; publish it again")]
    Aborted,
}

impl ContentWriter {
    /// Content of `length` bytes, of which none has arrived.
    pub fn new(length: usize) -> Self {
        let content = Arc::new(Arriving { length, state: Mutex::default() });
        Self { content, next: BytesMut::with_capacity(length), arrived: 0 }
    }

    /// What the readers read.
    pub fn content(&self) -> Arc<Arriving> {
        self.content.clone()
    }

    /// Adds bytes.
    ///
    /// # Errors
    /// There are more than were announced.
    pub fn push(&mut self, bytes: &[u8]) -> Result<(), NotArrived> {
        self.arrived += bytes.len();
        if self.arrived > self.content.length {
            return Err(NotArrived::WrongLength(self.content.length));
        }
        self.next.extend_from_slice(bytes);
        if self.next.len() >= MIN_PART_BYTES {
            self.pass_on();
        }
        Ok(())
    }

    /// All bytes have arrived.
    ///
    /// # Errors
    /// There are fewer than were announced, or the content was aborted.
    pub fn finish(mut self) -> Result<(), NotArrived> {
        if self.arrived != self.content.length {
            return Err(NotArrived::WrongLength(self.content.length));
        }
        self.pass_on();
        let mut is_whole = false;
        self.content.change(|state| is_whole = *state.end.get_or_insert(End::Whole) == End::Whole);
        if is_whole { Ok(()) } else { Err(NotArrived::Aborted) }
    }

    fn pass_on(&mut self) {
        let part = self.next.split().freeze();
        if !part.is_empty() {
            self.content.change(|state| {
                if state.end.is_none() {
                    state.parts.push(part);
                }
            });
        }
    }
}

impl Drop for ContentWriter {
    fn drop(&mut self) {
        self.content.abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(content: &Arriving, number: usize) -> Option<NextPart> {
        match content.poll_part(number, &mut Context::from_waker(Waker::noop())) {
            Poll::Ready(part) => Some(part),
            Poll::Pending => None,
        }
    }

    #[test]
    fn readers_get_the_bytes_as_they_arrive() {
        let mut writer = ContentWriter::new(MIN_PART_BYTES + 3);
        let content = writer.content();
        writer.push(&[1; 10]).unwrap();
        assert_eq!(part(&content, 0), None);
        writer.push(&[1; MIN_PART_BYTES - 10]).unwrap();
        assert_eq!(part(&content, 0), Some(NextPart::Bytes(vec![1; MIN_PART_BYTES].into())));
        writer.push(&[2; 3]).unwrap();
        assert_eq!((part(&content, 1), content.whole().len()), (None, 0));
        writer.finish().unwrap();
        assert_eq!(part(&content, 1), Some(NextPart::Bytes(vec![2; 3].into())));
        assert_eq!(part(&content, 2), Some(NextPart::End));
        assert_eq!(content.whole().len(), MIN_PART_BYTES + 3);
    }

    #[test]
    fn a_wrong_length_or_an_early_end_aborts_the_content() {
        let mut writer = ContentWriter::new(2);
        assert_eq!(writer.push(&[0; 3]), Err(NotArrived::WrongLength(2)));
        let short = ContentWriter::new(2);
        let content = short.content();
        assert_eq!(short.finish(), Err(NotArrived::WrongLength(2)));
        assert_eq!(part(&content, 0), Some(NextPart::Aborted));
        let early = ContentWriter::new(MIN_PART_BYTES * 2);
        let content = early.content();
        drop(early);
        assert_eq!((part(&content, 0), content.is_whole(), content.whole().len()), (Some(NextPart::Aborted), false, 0));
    }
}
