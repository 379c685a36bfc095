//! Content that subscribers get while it arrives.
//!
//! In: the bytes of a publication, whose length is announced. Out: the same bytes for each reader, in parts; or all of them
//! at the end. If the publisher breaks off, readers learn of that, and the bytes are forgotten. Never: more bytes than were
//! announced.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use bytes::{Bytes, BytesMut};

use crate::reserved::Reserved;

/// A part has at least this many bytes, but for the last one and those between received pieces of [`MIN_OWN_BYTES`]. So their
/// number is bounded.
const MIN_PART_BYTES: usize = 16 << 10;
/// Bytes that wait for more, so that readers are not woken for each part.
const WAITING_BYTES: usize = 128 << 10;
/// Bytes that were received at once become a part of their own, without a copy.
const MIN_OWN_BYTES: usize = 48 << 10;
/// The longest buffer of a connection that parts may keep: a third longer than they are, at most.
const MAX_KEPT_BUFFER: usize = 64 << 10;

/// The content of a publication that arrives, or has arrived.
#[derive(Debug)]
pub struct ArrivingContent {
    length: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    parts: Vec<Bytes>,
    /// All bytes in one piece, once somebody needs them so. It replaces the parts, so that nothing is held twice.
    whole: Option<Bytes>,
    /// The memory that the bytes count, until they are aborted. `None`: whoever publishes them counts them.
    reserved: Option<Reserved>,
    end: Option<End>,
    next_reader: u64,
    /// Readers that wait for the next part or the end, and those that wait for the end alone. Each has one place, however often it
    /// polls.
    part_wakers: HashMap<u64, Waker>,
    end_wakers: HashMap<u64, Waker>,
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

/// A reader of arriving content.
#[derive(Debug)]
pub struct ContentReader {
    content: Arc<ArrivingContent>,
    number: u64,
    /// The parts that it has had, and their bytes.
    parts: usize,
    bytes: usize,
}

impl ContentReader {
    /// A reader that has had nothing.
    pub fn new(content: &Arc<ArrivingContent>) -> Self {
        let mut state = content.lock();
        state.next_reader += 1;
        Self { content: content.clone(), number: state.next_reader, parts: 0, bytes: 0 }
    }

    /// Returns the next part.
    pub fn poll_part(&mut self, cx: &mut Context<'_>) -> Poll<NextPart> {
        let mut state = self.content.lock();
        if let Some(whole) = &state.whole {
            let rest = whole.slice(self.bytes.min(whole.len())..);
            self.bytes = whole.len();
            return Poll::Ready(if rest.is_empty() { NextPart::End } else { NextPart::Bytes(rest) });
        }
        match (state.end, state.parts.get(self.parts)) {
            (Some(End::Aborted), _) => Poll::Ready(NextPart::Aborted),
            (_, Some(part)) => {
                self.parts += 1;
                self.bytes += part.len();
                Poll::Ready(NextPart::Bytes(part.clone()))
            }
            (Some(End::Whole), None) => Poll::Ready(NextPart::End),
            (None, None) => {
                state.part_wakers.insert(self.number, cx.waker().clone());
                Poll::Pending
            }
        }
    }

    /// Waits until all bytes have arrived, or the publisher has broken off.
    pub fn poll_end(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let mut state = self.content.lock();
        if state.end.is_some() {
            return Poll::Ready(());
        }
        state.end_wakers.insert(self.number, cx.waker().clone());
        Poll::Pending
    }
}

impl Drop for ContentReader {
    fn drop(&mut self) {
        let mut state = self.content.lock();
        state.part_wakers.remove(&self.number);
        state.end_wakers.remove(&self.number);
    }
}

impl ArrivingContent {
    /// The announced number of bytes.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Whether the publisher has broken off.
    pub fn is_aborted(&self) -> bool {
        self.lock().end == Some(End::Aborted)
    }

    /// Whether bytes are still to arrive.
    pub fn is_arriving(&self) -> bool {
        self.lock().end.is_none()
    }

    /// Forgets the bytes unless all have arrived. The publisher learns of it with the next bytes that it sends.
    pub fn abort(&self) {
        self.end(End::Aborted);
    }

    /// All bytes. Empty: they have not arrived.
    pub fn whole(&self) -> Bytes {
        let parts = {
            let state = self.lock();
            match (state.end, &state.whole, &state.parts[..]) {
                (Some(End::Whole), Some(whole), _) => return whole.clone(),
                (Some(End::Whole), None, [part]) => return part.clone(),
                (Some(End::Whole), None, parts) => parts.to_vec(),
                (Some(End::Aborted) | None, ..) => return Bytes::new(),
            }
        };
        // Readers of parts do not wait for the copy.
        let joined = Bytes::from(parts.concat());
        let mut state = self.lock();
        state.parts = Vec::new();
        state.whole.get_or_insert(joined).clone()
    }

    /// Has the content itself count its bytes, for as long as it has them.
    pub fn count(&self, reserved: Reserved) {
        let mut state = self.lock();
        if state.end != Some(End::Aborted) {
            state.reserved = Some(reserved);
        }
    }

    /// Whether the content counts its bytes.
    pub(crate) fn is_counted(&self) -> bool {
        let state = self.lock();
        state.reserved.is_some() || state.end == Some(End::Aborted)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds parts. Returns false if the content has been aborted.
    fn add(&self, parts: Vec<Bytes>) -> bool {
        let readers = {
            let mut state = self.lock();
            if state.end.is_some() {
                return false;
            }
            state.parts.extend(parts);
            std::mem::take(&mut state.part_wakers)
        };
        readers.into_values().for_each(Waker::wake);
        true
    }

    /// Returns false if it has another end.
    fn end(&self, end: End) -> bool {
        let (ended, readers) = {
            let mut state = self.lock();
            let ended = *state.end.get_or_insert(end);
            if ended == End::Aborted {
                state.parts = Vec::new();
                state.reserved = None;
            }
            (ended, [std::mem::take(&mut state.part_wakers), std::mem::take(&mut state.end_wakers)])
        };
        readers.into_iter().flat_map(HashMap::into_values).for_each(Waker::wake);
        ended == end
    }
}

/// The end at which the bytes arrive. If it is dropped early, the publisher has broken off.
#[derive(Debug)]
pub struct ContentWriter {
    content: Arc<ArrivingContent>,
    /// Parts that readers do not have yet.
    waiting: Vec<Bytes>,
    /// Bytes that are no part yet.
    next: BytesMut,
    /// The bytes of both.
    buffered: usize,
    arrived: usize,
    /// Whether all bytes are copied.
    copies: bool,
}

/// The reason why content does not arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ContentError {
    /// The publisher sends another number of bytes than it has announced.
    #[error("the content has another length than the {0} bytes that were announced")]
    WrongLength(usize),
    /// [`ArrivingContent::abort`] was called.
    #[error("another relay became the root of the channel while the content arrived; publish it again")]
    Aborted,
}

impl ContentWriter {
    /// Content of `length` bytes, of which none has arrived.
    pub fn new(length: usize) -> Self {
        let content = Arc::new(ArrivingContent { length, state: Mutex::default() });
        Self { content, waiting: Vec::new(), next: BytesMut::new(), buffered: 0, arrived: 0, copies: false }
    }

    /// Tells how long the buffers are in which bytes arrive.
    pub fn with_buffers_of(mut self, length: usize) -> Self {
        self.copies = length > MAX_KEPT_BUFFER;
        self
    }

    /// The content for readers.
    pub fn content(&self) -> Arc<ArrivingContent> {
        self.content.clone()
    }

    /// Adds bytes. Readers get them with later ones, or after [`Self::flush`].
    ///
    /// # Errors
    /// There are more than were announced, or the content was aborted.
    pub fn push(&mut self, bytes: Bytes) -> Result<(), ContentError> {
        self.arrived += bytes.len();
        self.buffered += bytes.len();
        if self.arrived > self.content.length {
            return Err(ContentError::WrongLength(self.content.length));
        }
        if bytes.len() >= MIN_OWN_BYTES && !self.copies {
            self.end_part();
            self.waiting.push(bytes);
        } else {
            // A copy: it must not keep a buffer of the connection that is hardly used.
            if self.next.is_empty() && self.next.capacity() < MIN_PART_BYTES {
                let rest = self.content.length - (self.arrived - bytes.len());
                self.next.reserve(WAITING_BYTES.min(rest));
            }
            self.next.extend_from_slice(&bytes);
        }
        if self.buffered >= WAITING_BYTES && !self.pass_on() {
            return Err(ContentError::Aborted);
        }
        Ok(())
    }

    /// Passes on what has arrived, if it is enough for a part: more may take a while.
    pub fn flush(&mut self) {
        if self.buffered >= MIN_PART_BYTES {
            self.pass_on();
        }
    }

    /// All bytes have arrived.
    ///
    /// # Errors
    /// There are fewer than were announced, or the content was aborted.
    pub fn finish(mut self) -> Result<(), ContentError> {
        if self.arrived != self.content.length {
            return Err(ContentError::WrongLength(self.content.length));
        }
        self.pass_on();
        if self.content.end(End::Whole) { Ok(()) } else { Err(ContentError::Aborted) }
    }

    fn end_part(&mut self) {
        let part = self.next.split().freeze();
        if !part.is_empty() {
            self.waiting.push(part);
        }
    }

    /// Returns false if the content has been aborted.
    fn pass_on(&mut self) -> bool {
        self.end_part();
        self.buffered = 0;
        self.content.add(std::mem::take(&mut self.waiting))
    }

    /// The bytes that have arrived.
    pub fn arrived(&self) -> usize {
        self.arrived
    }
}

impl Drop for ContentWriter {
    fn drop(&mut self) {
        self.content.abort();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// The part with this number.
    fn part(content: &Arc<ArrivingContent>, number: usize) -> Option<NextPart> {
        let mut reader = ContentReader::new(content);
        reader.parts = number;
        match reader.poll_part(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(part) => Some(part),
            Poll::Pending => None,
        }
    }

    #[test]
    fn readers_get_the_bytes_as_they_arrive() {
        let bytes = |byte, count| Bytes::from(vec![byte; count]);
        let mut writer = ContentWriter::new(WAITING_BYTES + MIN_PART_BYTES + 13);
        let content = writer.content();
        writer.push(bytes(1, 10)).unwrap();
        writer.flush();
        assert_eq!(part(&content, 0), None);
        writer.push(bytes(1, MIN_PART_BYTES)).unwrap();
        assert_eq!(part(&content, 0), None);
        writer.flush();
        assert_eq!(part(&content, 0), Some(NextPart::Bytes(bytes(1, MIN_PART_BYTES + 10))));
        let own = bytes(2, WAITING_BYTES);
        writer.push(own.clone()).unwrap();
        let Some(NextPart::Bytes(second)) = part(&content, 1) else { panic!("no part") };
        assert_eq!((second.as_ptr(), second.len()), (own.as_ptr(), own.len()), "not a copy");
        writer.push(bytes(3, 3)).unwrap();
        assert_eq!((part(&content, 2), content.whole().len()), (None, 0));
        writer.finish().unwrap();
        assert_eq!(part(&content, 2), Some(NextPart::Bytes(bytes(3, 3))));
        assert_eq!(part(&content, 3), Some(NextPart::End));
        assert_eq!(content.whole().len(), WAITING_BYTES + MIN_PART_BYTES + 13);
    }

    #[test]
    fn a_wrong_length_or_an_early_end_aborts_the_content() {
        let mut writer = ContentWriter::new(2);
        assert_eq!(writer.push(Bytes::from_static(&[0; 3])), Err(ContentError::WrongLength(2)));
        let short = ContentWriter::new(2);
        let content = short.content();
        assert_eq!(short.finish(), Err(ContentError::WrongLength(2)));
        assert_eq!(part(&content, 0), Some(NextPart::Aborted));
        let early = ContentWriter::new(MIN_PART_BYTES * 2);
        let content = early.content();
        drop(early);
        assert_eq!(
            (part(&content, 0), content.is_aborted(), content.whole().len()),
            (Some(NextPart::Aborted), true, 0)
        );
    }

    #[test]
    fn a_reader_of_parts_goes_on_in_the_joined_bytes() {
        let mut writer = ContentWriter::new(2 * WAITING_BYTES);
        let content = writer.content();
        writer.push(Bytes::from(vec![1; WAITING_BYTES])).unwrap();
        writer.push(Bytes::from(vec![2; WAITING_BYTES])).unwrap();
        writer.finish().unwrap();
        let mut reader = ContentReader::new(&content);
        let mut next = || reader.poll_part(&mut Context::from_waker(Waker::noop()));
        assert_eq!(next(), Poll::Ready(NextPart::Bytes(vec![1; WAITING_BYTES].into())));
        let whole = content.whole();
        assert_eq!(whole.len(), 2 * WAITING_BYTES);
        assert_eq!(whole.as_ptr(), content.whole().as_ptr(), "one copy");
        let rest = next();
        assert_eq!(rest, Poll::Ready(NextPart::Bytes(whole.slice(WAITING_BYTES..))));
        assert_eq!(next(), Poll::Ready(NextPart::End));
        assert!(content.lock().parts.is_empty(), "nothing is held twice");
    }
}
