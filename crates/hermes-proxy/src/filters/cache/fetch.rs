//! The task that fetches a response for the cache. No reader owns it, so a reader that leaves does not affect the
//! others.
//!
//! In: a body. Out: its bytes in a flight, and finally the stored content. The task ends when nobody reads and
//! finishing is not worthwhile, when the origin is silent for longer than the route allows, or with its worker.

use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use hermes_model::snapshot::Route;
use http_body::Body as _;

use hermes_cache::content::{CHUNK_COST, ChargedBytes, Content};
use hermes_cache::error::FetchError;
use hermes_cache::flight::Flight;
use hermes_cache::head::Head;
use hermes_cache::registry::is_one;
use hermes_cache::store::Cache;
use hermes_transport::body::Body;
use hermes_transport::error::Error;
use hermes_transport::runtime::session::SessionEntry;

/// Size of stored chunks. A shorter body has one chunk of its own length.
const CHUNK: usize = 64 << 10;
/// Size of the first chunk of a body with unknown length: most of them are small.
const FIRST: usize = 4 << 10;
/// A reader may delay the others for this time.
const READER_TIMEOUT: Duration = Duration::from_secs(2);

/// A fetch. Its drop ends it.
pub(crate) struct Fetch {
    pub(crate) cache: Arc<Cache>,
    pub(crate) key: Arc<str>,
    pub(crate) flight: Arc<Flight>,
    pub(crate) head: Arc<Head>,
    pub(crate) body: Body,
    /// The session of the fetch, independent of those of its readers.
    pub(crate) entry: Rc<SessionEntry>,
    /// For a resumable body: the session that requests its rest, and the route of the latest part.
    pub(crate) resumed: Option<(Rc<SessionEntry>, Arc<Route>)>,
    /// The expected number of bytes, if known.
    pub(crate) owed: Option<u64>,
    /// The idle timeout for the origin, as in any session.
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
            match tokio::time::timeout(READER_TIMEOUT, room).await {
                Ok(room) => room?,
                Err(_) => {
                    for _ in 0..self.flight.cut_laggards() {
                        self.cache.hit_limit("cache-slow-clients");
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
                    // Only the current readers receive the rest. Its tag proves that the content is the same, but the
                    // other route may serve other clients.
                    self.flight.give_up();
                }
                self.put(data, came);
            }
        }
        match self.owed {
            Some(owed) if owed != came => {
                let peer = Arc::from("the origin");
                let reason = format!("the body has {came} bytes instead of {owed}");
                Err(Error::Broken { peer, reason, unprocessed: false })
            }
            _ => Ok(()),
        }
    }

    /// True if the body now arrives by a route with another cache, since the document changed.
    fn goes_elsewhere(&mut self) -> bool {
        let Some((entry, led)) = &mut self.resumed else { return false };
        match &*entry.route.borrow() {
            Some(now) if !Arc::ptr_eq(now, led) => {
                // Compared once for each change, since this function runs for each frame.
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
            let room = self
                .cache
                .room(wanted + CHUNK_COST)
                .map(|charge| ChargedBytes { bytes: Vec::with_capacity(wanted), charge });
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
        // The rest of a partial response can be requested later, if a strong tag identifies the representation.
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
    Error::ClientGone("no client reads the response any more".to_owned())
}
