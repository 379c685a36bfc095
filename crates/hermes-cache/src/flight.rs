//! A response on its way from the origin, which several clients read as it comes.
//!
//! In: chunks, from the task that fetches them (`fetch.rs`). Out: the same, to each reader at its own pace; and when the
//! head is there, so that who asked for the same meanwhile can look. While it is kept, readers are anywhere in it.
//! Where it gets too large to be kept, it holds a window for the readers it has, and takes no more of them.
//! Never: a lock of the store while its own is held.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http::HeaderMap;
use slab::Slab;
use tokio::sync::Notify;

use super::content::{Content, Paid, Run};
use super::head::Head;
use super::range::Asked;
use crate::error::FetchError;

/// What lies between the first and the last reader of what is not kept.
pub const WINDOW: u64 = 512 << 10;
/// A reader may join so far ahead of what has come: it waits for that long, instead of asking by itself.
const AHEAD: u64 = 1 << 20;

/// A fetch, as others see it.
pub struct Flight {
    /// Of the request that began it, as it goes on.
    pub fields: HeaderMap,
    /// The part that the request asked for.
    pub asked: Asked,
    settled: Notify,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Nobody has to wait for its head any more.
    is_settled: bool,
    /// Something was changed meanwhile.
    is_forgotten: bool,
    open: Option<Open>,
}

struct Open {
    head: Arc<Head>,
    /// `None` until it is through, where its origin does not say.
    total: Option<u64>,
    /// What was there before.
    base: Vec<Run>,
    run: Run,
    /// Behind the run; others may read what is in it.
    tail: Option<Paid>,
    /// Where it ends, if that is known: it may be a part.
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
    /// It was so slow that others starved.
    is_cut: bool,
}

/// What a fetch brings.
pub struct Opening {
    /// The head of the response.
    pub head: Arc<Head>,
    /// The length of the representation, if it is known.
    pub total: Option<u64>,
    /// Stored bytes that the fetch completes.
    pub base: Option<Arc<Content>>,
    /// From where, and to where if that is known.
    pub start: u64,
    /// The first byte after the fetched part, if that is known.
    pub until: Option<u64>,
}

impl Flight {
    /// Creates a fetch whose head has not come yet.
    pub fn new(fields: HeaderMap, asked: Asked) -> Arc<Self> {
        Arc::new(Self { fields, asked, settled: Notify::new(), state: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its head is not there yet.
    pub fn is_asking(&self) -> bool {
        !self.lock().is_settled
    }

    /// Waits until its head is there, or there is none.
    pub async fn settled(&self) {
        loop {
            let notified = self.settled.notified();
            if !self.is_asking() {
                return;
            }
            notified.await;
        }
    }

    /// Nobody has to wait for it.
    pub fn settle(&self) {
        self.lock().is_settled = true;
        self.settled.notify_waiters();
    }

    /// Its head is there.
    pub fn open(&self, opening: Opening) {
        let Opening { head, total, base, start, until } = opening;
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

    /// What others may know of it, while they may join: the head, and the length. So they may when all of it has come,
    /// until what it brought is found by itself: nobody is to find neither.
    pub fn view(&self) -> Option<(Arc<Head>, Option<u64>)> {
        let state = self.lock();
        let open = state.open.as_ref().filter(|open| open.may_be_joined())?;
        Some((open.head.clone(), open.total))
    }

    /// Begins to read this part of it, or all of it. `None` where it will not have that, or not soon.
    pub fn join(self: &Arc<Self>, range: Option<&Range<u64>>) -> Option<FlightReader> {
        let mut state = self.lock();
        let open = state.open.as_mut().filter(|open| open.may_be_joined())?;
        let wanted = range.cloned().unwrap_or(0..open.total.unwrap_or(u64::MAX));
        let mut at = wanted.start;
        while let Some(run) = open.base.iter().find(|run| run.range().contains(&at)) {
            at = run.end();
        }
        let from_here = open.run.range().start <= at && at <= open.edge().saturating_add(AHEAD);
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

    /// Where the next byte goes.
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

    /// Nobody reads it, and it is not nearly there for those who come.
    fn is_deserted(&self) -> bool {
        let left = self.until.or(self.total).map(|end| end.saturating_sub(self.edge()));
        let is_worth_it = self.is_kept && left.is_some_and(|left| left <= WINDOW);
        self.readers.is_empty() && !is_worth_it
    }

    fn wake_readers(&mut self) {
        self.readers.iter_mut().filter_map(|(_, reader)| reader.waker.take()).for_each(Waker::wake);
    }

    /// Of what is not kept, forgets what everybody has read.
    fn forget(&mut self) {
        if !self.is_kept {
            let slowest = self.readers.iter().map(|(_, reader)| reader.at).min();
            self.run.forget(slowest.unwrap_or(u64::MAX).min(self.run.end()));
        }
    }
}

/// For the task that fetches.
impl Flight {
    /// Puts in as much as there is room for, and returns the rest, for which a new tail is needed.
    pub fn push(&self, mut data: Bytes, room: Option<Paid>) -> Bytes {
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

    /// What it brings may be of before something was changed.
    pub fn forget(&self) {
        self.lock().is_forgotten = true;
        self.give_up();
    }

    /// See [`Flight::forget`].
    pub fn is_forgotten(&self) -> bool {
        self.lock().is_forgotten
    }

    /// It is too large to be kept, or there is no room for it. Returns whether it was kept until now.
    pub fn give_up(&self) -> bool {
        let mut state = self.lock();
        state.open.as_mut().is_some_and(|open| {
            let was_kept = std::mem::replace(&mut open.is_kept, false);
            open.forget();
            was_kept
        })
    }

    /// Ready where more may come: it is kept, or its readers are near. `Err` where nobody reads what nobody keeps.
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

    /// Ready when nobody reads any more and it is not worth going on.
    pub fn poll_deserted(&self, cx: &Context<'_>) -> Poll<()> {
        let mut state = self.lock();
        let Some(open) = state.open.as_mut().filter(|open| !open.is_deserted()) else { return Poll::Ready(()) };
        // Under one lock with the look: the last reader may go at any moment, on another thread.
        open.fetcher = Some(cx.waker().clone());
        Poll::Pending
    }

    /// Cuts the readers off that others wait for. Returns how many.
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

    /// It is over. What came is the content, where it is kept: some of it, where the length is known.
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

/// Somebody who reads it.
pub struct FlightReader {
    flight: Arc<Flight>,
    number: usize,
    /// `None`: to its end.
    end: Option<u64>,
}

impl FlightReader {
    /// The next bytes; `None` at the end.
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
