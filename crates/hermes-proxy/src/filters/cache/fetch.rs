//! The task that brings a response in: it belongs to nobody who reads it, so that one who leaves takes nothing from the
//! others.
//!
//! In: a body. Out: its bytes in a flight, and at the end what is kept of them. It ends when nobody reads and little
//! would be won by going on, when the origin brings nothing for as long as the route allows, and with its worker.

use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use hermes_model::snapshot::Route;
use http_body::Body as _;

use crate::body::Body;
use crate::error::Error;
use crate::live::Entry;
use hermes_cache::content::{CHUNK_COST, Content, Paid};
use hermes_cache::error::FetchError;
use hermes_cache::flight::Flight;
use hermes_cache::head::Head;
use hermes_cache::registry::is_one;
use hermes_cache::store::Cache;

/// Chunks that are kept. A body that is shorter has one of its own length.
const CHUNK: usize = 64 << 10;
/// The first one where the length is not known: most bodies without one are small.
const FIRST: usize = 4 << 10;
/// For so long a reader may hold others up.
const PATIENCE: Duration = Duration::from_secs(2);

/// A fetch. Its drop is its end.
pub(crate) struct Fetch {
    pub(crate) cache: Arc<Cache>,
    pub(crate) key: Arc<str>,
    pub(crate) flight: Arc<Flight>,
    pub(crate) head: Arc<Head>,
    pub(crate) body: Body,
    /// Whose the body is: nobody's who reads it.
    pub(crate) entry: Rc<Entry>,
    /// Of a body that is gone on with: whose session asks for its rest, and the route that led to what came last.
    pub(crate) retrieved: Option<(Rc<Entry>, Arc<Route>)>,
    /// Bytes that are owed, if that is known.
    pub(crate) owed: Option<u64>,
    /// So long the origin may be silent, as in any session.
    pub(crate) idle: Duration,
    pub(crate) is_done: bool,
}

impl Fetch {
    pub(crate) async fn run(mut self) {
        let how = self.bring().await;
        self.end(how);
    }

    async fn bring(&mut self) -> Result<(), Error> {
        let mut came = 0;
        loop {
            let room = poll_fn(|cx| match self.entry.end.poll(cx) {
                Poll::Ready(error) => Poll::Ready(Err(error)),
                Poll::Pending => self.flight.poll_room(cx).map_err(|()| deserted()),
            });
            match tokio::time::timeout(PATIENCE, room).await {
                Ok(room) => room?,
                Err(_) => {
                    for _ in 0..self.flight.cut_laggards() {
                        self.cache.hit_limit("cache-laggards");
                    }
                    continue;
                }
            }
            let (flight, body, entry) = (&self.flight, &mut self.body, &self.entry);
            let frame = poll_fn(|cx| match (Pin::new(&mut *body).poll_frame(cx), entry.end.poll(cx)) {
                (Poll::Ready(frame), _) => Poll::Ready(Ok(frame)),
                (Poll::Pending, Poll::Ready(error)) => Poll::Ready(Err(error)),
                (Poll::Pending, Poll::Pending) => flight.poll_deserted(cx).map(|()| Err(deserted())),
            });
            let frame = tokio::time::timeout(self.idle, frame).await;
            let Some(frame) = frame.map_err(|_| Error::Idle(self.idle))?? else { break };
            if let Ok(data) = frame?.into_data() {
                came += data.len() as u64;
                if self.goes_elsewhere() {
                    // It is for those who read it already: its tag says that it is the same, but not for whom.
                    self.flight.give_up();
                }
                self.put(data, came);
            }
        }
        match self.owed {
            Some(owed) if owed != came => {
                let peer = Arc::from("the origin");
                let reason = format!("its body has {came} bytes instead of {owed}");
                Err(Error::Broken { peer, reason, unprocessed: false })
            }
            _ => Ok(()),
        }
    }

    /// What comes from now on comes by a route with another cache, since the document changed.
    fn goes_elsewhere(&mut self) -> bool {
        let Some((entry, led)) = &mut self.retrieved else { return false };
        match &*entry.route.borrow() {
            Some(now) if !Arc::ptr_eq(now, led) => {
                // They are compared once: it is asked with each frame.
                let before = std::mem::replace(led, now.clone());
                !is_one(now, &before)
            }
            _ => false,
        }
    }

    fn put(&self, data: bytes::Bytes, came: u64) {
        if came > self.cache.largest() && self.flight.give_up() {
            self.cache.hit_limit("cache-object");
        }
        let mut rest = self.flight.push(data, None);
        while !rest.is_empty() {
            let before = came - rest.len() as u64;
            let wanted = match self.owed {
                Some(owed) => owed.saturating_sub(before).clamp(1, CHUNK as u64) as usize,
                None if before == 0 => FIRST.max(rest.len().min(CHUNK)),
                None => CHUNK,
            };
            let room =
                self.cache.room(wanted + CHUNK_COST).map(|charge| Paid { bytes: Vec::with_capacity(wanted), charge });
            if room.is_none() && self.flight.give_up() {
                self.cache.hit_limit("cache-memory");
            }
            rest = self.flight.push(rest, room);
        }
    }

    fn end(&mut self, how: Result<(), Error>) {
        self.is_done = true;
        let is_whole = how.is_ok();
        let content = self.flight.finish(how.map_err(FetchError::origin));
        // Of what broke off the rest can be asked for, where it is sure to be of the same.
        let is_of_use =
            |content: &Content| is_whole || (self.head.strong_etag().is_some() && content.shape().stored_bytes() > 0);
        match content.filter(is_of_use) {
            Some(content) => self.cache.keep(&self.key, &self.head, content, Some(&self.flight)),
            None => self.cache.land(&self.key, &self.flight),
        }
    }
}

impl Drop for Fetch {
    fn drop(&mut self) {
        if !self.is_done {
            self.end(Err(Error::Draining));
        }
    }
}

fn deserted() -> Error {
    Error::ClientGone("nobody reads the answer any more".to_owned())
}
