//! A response on its way from the origin, which several clients read while it arrives.
//!
//! In: chunks, from the task that fetches them. Out: the same chunks, to each reader at its own pace, and a signal that
//! the head has arrived, for requests that wait for it. While the whole response is retained for the store, a reader
//! may be at any offset. If it becomes too large, the flight retains only a window for its present readers, and accepts
//! no new ones.
//!
//! Never: takes a lock of the store while it holds its own.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http::HeaderMap;
use slab::Slab;
use tokio::sync::Notify;

use super::content::{ChargedBytes, Content, Run};
use super::head::Head;
use super::range::RequestedRanges;
use crate::error::FetchError;

/// Window of a response that is not stored, in bytes. The fetch pauses once the received bytes are this far ahead of
/// the slowest reader.
pub const WINDOW: u64 = 512 << 10;
/// Maximum distance, in bytes, from the newest received byte to the offset of a new reader. A request for a later
/// offset fetches itself, because it would wait too long.
const MAX_JOIN_DISTANCE: u64 = 1 << 20;

/// A fetch from the origin that other requests may join as readers.
pub struct Flight {
    /// The fields of the request that began the fetch, as they go to the origin.
    pub fields: HeaderMap,
    /// The ranges that this request asked for.
    pub asked: RequestedRanges,
    settled: Notify,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The head has arrived, or the fetch has ended, so that no request waits for the head any longer.
    is_settled: bool,
    /// The target was invalidated during the fetch, so that the response is not stored.
    is_forgotten: bool,
    open: Option<Open>,
}

struct Open {
    head: Arc<Head>,
    /// The total length; `None` until the end if the origin does not send it.
    total: Option<u64>,
    /// Runs that were stored before the fetch.
    base: Vec<Run>,
    run: Run,
    /// The buffer after `run` that is being filled; its bytes can be read already.
    tail: Option<ChargedBytes>,
    /// The offset at which the fetched range ends; `None` if it is unknown.
    until: Option<u64>,
    is_kept: bool,
    ended: Option<Result<(), FetchError>>,
    readers: Slab<Reader>,
    fetcher: Option<Waker>,
}

#[derive(Default)]
struct Reader {
    at: u64,
    waker: Option<Waker>,
    /// The reader was disconnected, because it was so slow that other readers waited for it.
    is_cut: bool,
}

/// The head of a fetched response, and the range that the fetch brings.
pub struct FlightHead {
    /// The head of the response.
    pub head: Arc<Head>,
    /// The length of the representation; `None` if it is unknown.
    pub total: Option<u64>,
    /// Stored bytes that the fetch completes.
    pub base: Option<Arc<Content>>,
    /// The offset of the first fetched byte.
    pub start: u64,
    /// The offset after the fetched range; `None` if it is unknown.
    pub until: Option<u64>,
}

impl Flight {
    /// Creates a fetch whose head has not arrived yet.
    pub fn new(fields: HeaderMap, asked: RequestedRanges) -> Arc<Self> {
        Arc::new(Self { fields, asked, settled: Notify::new(), state: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the head has not arrived yet.
    pub fn is_asking(&self) -> bool {
        !self.lock().is_settled
    }

    /// Waits until the head has arrived, or the fetch has ended.
    pub async fn settled(&self) {
        loop {
            let notified = self.settled.notified();
            if !self.is_asking() {
                return;
            }
            notified.await;
        }
    }

    /// Wakes all requests that wait for the head.
    pub fn settle(&self) {
        self.lock().is_settled = true;
        self.settled.notify_waiters();
    }

    /// Records the head, and wakes all requests that wait for it.
    pub fn open(&self, opening: FlightHead) {
        let FlightHead { head, total, base, start, until } = opening;
        let base = base.map_or_else(Vec::new, |base| base.runs().to_vec());
        let mut state = self.lock();
        let open = Open {
            head,
            total,
            base,
            run: Run::at(start),
            tail: None,
            until,
            is_kept: !state.is_forgotten,
            ended: None,
            readers: Slab::new(),
            fetcher: None,
        };
        state.open = Some(open);
        drop(state);
        self.settle();
    }

    /// Returns the head and the length while other requests may join. A completed fetch accepts readers until the store
    /// has its content, so that each request finds the fetch or the stored content.
    pub fn view(&self) -> Option<(Arc<Head>, Option<u64>)> {
        let state = self.lock();
        let open = state.open.as_ref().filter(|open| open.may_be_joined())?;
        Some((open.head.clone(), open.total))
    }

    /// Adds a reader of `range`, or of the whole response. Returns `None` if the fetch does not bring that soon enough.
    pub fn join(self: &Arc<Self>, range: Option<&Range<u64>>) -> Option<FlightReader> {
        let mut state = self.lock();
        let open = state.open.as_mut().filter(|open| open.may_be_joined())?;
        let wanted = range.cloned().unwrap_or(0..open.total.unwrap_or(u64::MAX));
        let mut at = wanted.start;
        while let Some(run) = open.base.iter().find(|run| run.range().contains(&at)) {
            at = run.end();
        }
        let from_here = open.run.range().start <= at && at <= open.edge().saturating_add(MAX_JOIN_DISTANCE);
        let is_within = open.until.is_none_or(|until| {
            let behind = open.base.iter().find(|run| run.range().start == until).map_or(until, Run::end);
            wanted.end <= behind
        });
        if at < wanted.end && !(from_here && is_within) {
            return None;
        }
        let at = wanted.start;
        let number = open.readers.insert(Reader { at, waker: None, is_cut: false });
        Some(FlightReader { flight: self.clone(), number, end: range.map(|range| range.end) })
    }
}

impl Open {
    fn may_be_joined(&self) -> bool {
        self.is_kept && !matches!(self.ended, Some(Err(_)))
    }

    /// The offset of the next byte to arrive.
    fn edge(&self) -> u64 {
        self.run.end() + self.tail.as_ref().map_or(0, |tail| tail.bytes.len() as u64)
    }

    fn slice(&self, at: u64) -> Option<Bytes> {
        let known = || self.base.iter().find(|run| run.range().contains(&at))?.slice(at);
        let in_tail = || {
            let within = at.checked_sub(self.run.end())?;
            let bytes = self.tail.as_ref()?.bytes.get(within as usize..).filter(|bytes| !bytes.is_empty())?;
            Some(Bytes::copy_from_slice(bytes))
        };
        self.run.slice(at).or_else(in_tail).or_else(known)
    }

    fn freeze(&mut self) {
        if let Some(tail) = self.tail.take() {
            self.run.push(tail.into_chunk());
        }
    }

    /// Whether the fetch should end: it has no reader, and too many bytes are missing to fetch them only for later
    /// requests.
    fn is_deserted(&self) -> bool {
        let left = self.until.or(self.total).map(|end| end.saturating_sub(self.edge()));
        let is_worth_it = self.is_kept && left.is_some_and(|left| left <= WINDOW);
        self.readers.is_empty() && !is_worth_it
    }

    fn wake_readers(&mut self) {
        self.readers.iter_mut().filter_map(|(_, reader)| reader.waker.take()).for_each(Waker::wake);
    }

    /// Drops the bytes that all readers have read, if the response is not stored.
    fn forget(&mut self) {
        if !self.is_kept {
            let slowest = self.readers.iter().map(|(_, reader)| reader.at).min();
            self.run.forget(slowest.unwrap_or(u64::MAX).min(self.run.end()));
        }
    }
}

/// Methods that the fetching task calls.
impl Flight {
    /// Appends received bytes to the current buffer, which `room` replaces if it is given. Returns the bytes that do
    /// not fit; the caller calls again with another buffer. A response that is not stored needs no buffer.
    pub fn push(&self, mut data: Bytes, room: Option<ChargedBytes>) -> Bytes {
        let mut state = self.lock();
        let Some(open) = &mut state.open else { return Bytes::new() };
        if let Some(room) = room {
            open.freeze();
            open.tail = Some(room);
        }
        if !open.is_kept {
            open.freeze();
            open.run.push(std::mem::take(&mut data));
        } else if let Some(tail) = &mut open.tail {
            let most = (tail.bytes.capacity() - tail.bytes.len()).min(data.len());
            tail.bytes.extend_from_slice(&data.split_to(most));
        }
        open.wake_readers();
        data
    }

    /// Marks the fetch as outdated, because the target was invalidated; its response is not stored.
    pub fn forget(&self) {
        self.lock().is_forgotten = true;
        self.give_up();
    }

    /// Whether [`Flight::forget`] was called.
    pub fn is_forgotten(&self) -> bool {
        self.lock().is_forgotten
    }

    /// Stops retaining the response for the store, because it is outdated or too large, or memory is full. Returns
    /// whether it was retained until now.
    pub fn give_up(&self) -> bool {
        let mut state = self.lock();
        state.open.as_mut().is_some_and(|open| {
            let was_kept = std::mem::replace(&mut open.is_kept, false);
            open.forget();
            was_kept
        })
    }

    /// Waits until more bytes may be read from the origin. If the response is not stored, its slowest reader must be
    /// within [`WINDOW`]. Returns `Err` if the fetch has no reader and should end.
    pub fn poll_room(&self, cx: &Context<'_>) -> Poll<Result<(), ()>> {
        let mut state = self.lock();
        let Some(open) = &mut state.open else { return Poll::Ready(Err(())) };
        if open.is_deserted() {
            return Poll::Ready(Err(()));
        }
        open.forget();
        if open.is_kept || open.edge().saturating_sub(open.run.range().start) < WINDOW {
            return Poll::Ready(Ok(()));
        }
        open.fetcher = Some(cx.waker().clone());
        Poll::Pending
    }

    /// Waits until the fetch has no reader, and its missing bytes are not worth fetching.
    pub fn poll_deserted(&self, cx: &Context<'_>) -> Poll<()> {
        let mut state = self.lock();
        let Some(open) = state.open.as_mut().filter(|open| !open.is_deserted()) else { return Poll::Ready(()) };
        // The waker is set under the same lock as the check, because another thread may drop the last reader at any
        // moment.
        open.fetcher = Some(cx.waker().clone());
        Poll::Pending
    }

    /// Disconnects the readers in the first half of the window, if another reader has read all received bytes and waits
    /// for them. Returns the number of disconnected readers.
    pub fn cut_laggards(&self) -> usize {
        let mut state = self.lock();
        let Some(open) = &mut state.open else { return 0 };
        let edge = open.edge();
        let is_starved = |reader: &Reader| reader.at >= edge;
        if !open.readers.iter().any(|(_, reader)| is_starved(reader)) {
            return 0;
        }
        let start = open.run.range().start;
        let mut count = 0;
        for (_, reader) in open.readers.iter_mut().filter(|(_, reader)| reader.at < start + WINDOW / 2) {
            reader.is_cut = true;
            reader.at = u64::MAX;
            reader.waker.take().into_iter().for_each(Waker::wake);
            count += 1;
        }
        open.forget();
        count
    }

    /// Ends the fetch. Returns the content for the store, which may be incomplete. Returns `None` if the response is
    /// not stored, or its length is unknown.
    pub fn finish(&self, how: Result<(), FetchError>) -> Option<Content> {
        let mut state = self.lock();
        let open = state.open.as_mut()?;
        open.freeze();
        if how.is_ok() && open.total.is_none() {
            open.total = Some(open.run.end());
        }
        open.ended = Some(how);
        open.wake_readers();
        let total = open.total.filter(|_| open.is_kept)?;
        let runs = std::iter::once(open.run.clone()).chain(open.base.iter().cloned());
        Some(Content::new(runs, total))
    }
}

/// A reader of a flight.
pub struct FlightReader {
    flight: Arc<Flight>,
    number: usize,
    /// The end of the range; `None` for the end of the response.
    end: Option<u64>,
}

impl FlightReader {
    /// Returns the next bytes; `None` at the end of the range.
    pub fn poll(&self, cx: &Context<'_>) -> Poll<Option<Result<Bytes, FetchError>>> {
        let mut state = self.flight.lock();
        let Some(open) = &mut state.open else { return Poll::Ready(None) };
        let Reader { at, is_cut, .. } = open.readers[self.number];
        if is_cut {
            let error = FetchError::TooSlow;
            return Poll::Ready(Some(Err(error)));
        }
        let end = self.end.or(open.total);
        if end.is_some_and(|end| at >= end) {
            return Poll::Ready(None);
        }
        if let Some(mut bytes) = open.slice(at) {
            bytes.truncate(end.map_or(bytes.len(), |end| bytes.len().min((end - at) as usize)));
            open.readers[self.number].at += bytes.len() as u64;
            if !open.is_kept {
                open.fetcher.take().into_iter().for_each(Waker::wake);
            }
            return Poll::Ready(Some(Ok(bytes)));
        }
        match &open.ended {
            Some(Ok(())) => Poll::Ready(None),
            Some(Err(error)) => Poll::Ready(Some(Err(error.clone()))),
            None => {
                open.readers[self.number].waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl Drop for FlightReader {
    fn drop(&mut self) {
        if let Some(open) = &mut self.flight.lock().open {
            open.readers.remove(self.number);
            open.fetcher.take().into_iter().for_each(Waker::wake);
        }
    }
}
