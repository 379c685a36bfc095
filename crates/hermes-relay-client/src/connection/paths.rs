//! The paths to the other end: its receive channels, and publications to them that are under way.
//!
//! In: frames. Out: the outcome of each publication. Several publications of a path are under way at once, each on a
//! connection of its own, so that a slow answer does not hold up the others. Never: more than [`MAX_UNDER_WAY`] on a path.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use http::{StatusCode, Uri};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::frame::{EndId, Frame};
use crate::{Acceptance, Client, ClientError, ClientOptions, PublishOptions, Publisher};

/// The most publications of a path that are under way.
const MAX_UNDER_WAY: usize = 4;
/// The wait for a relay's answer. Chunks have a size that a relay takes in much less.
const PUBLISH_TIMEOUT: Duration = Duration::from_secs(10);
/// The wait for relays when the connection fails.
const RESET_TIMEOUT: Duration = Duration::from_secs(3);
/// The pauses of a path after a failure.
const MIN_PATH_PAUSE: Duration = Duration::from_millis(250);
const MAX_PATH_PAUSE: Duration = Duration::from_secs(4);

/// A channel to which this end publishes.
struct Path {
    client: Arc<Client>,
    is_for_one: bool,
    idle: Vec<Publisher>,
    under_way: usize,
    /// After a failure, the path has a pause until then; the next one will be this long.
    paused_until: Instant,
    pause: Duration,
    /// The relay refused for good.
    is_dead: bool,
}

/// A publication that has ended.
pub(super) struct Outcome {
    pub frame: Arc<Frame>,
    pub took: Duration,
    pub result: Result<Acceptance, ClientError>,
}

/// All paths of a connection.
#[derive(Default)]
pub(super) struct Paths {
    paths: Vec<Path>,
    publications: JoinSet<(usize, Publisher, Outcome)>,
}

impl Paths {
    /// A path to this channel. `is_for_one`: the channel is that of listeners, of which one gets each publication.
    pub(super) fn add(
        &mut self,
        url: Uri,
        source: Option<IpAddr>,
        is_for_one: bool,
        options: &ClientOptions,
    ) -> Result<(), ClientError> {
        let options = ClientOptions { source, ..options.clone() };
        self.paths.push(Path {
            client: Client::new(url, options)?,
            is_for_one,
            idle: Vec::new(),
            under_way: 0,
            paused_until: Instant::now(),
            pause: MIN_PATH_PAUSE,
            is_dead: false,
        });
        Ok(())
    }

    /// Uses the paths no more.
    pub(super) fn retire(&mut self) {
        self.paths.iter_mut().for_each(|path| path.is_dead = true);
    }

    /// No path is left.
    pub(super) fn are_dead(&self) -> bool {
        self.paths.iter().all(|path| path.is_dead)
    }

    /// No publication is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.publications.is_empty()
    }

    /// The best of the paths that may take a frame now: the one with the fewest publications under way.
    pub(super) fn free(&self) -> Option<usize> {
        let now = Instant::now();
        let free = self.paths.iter().enumerate().filter(|(_, path)| path.is_free(now));
        free.min_by_key(|(_, path)| path.under_way).map(|(at, _)| at)
    }

    /// All paths that may take a frame now.
    pub(super) fn all_free(&self) -> Vec<usize> {
        let now = Instant::now();
        (0..self.paths.len()).filter(|at| self.paths[*at].is_free(now)).collect()
    }

    /// The end of the first pause. `None`: no path has one.
    pub(super) fn free_at(&self) -> Option<Instant> {
        let now = Instant::now();
        self.paths.iter().filter(|path| !path.is_dead).map(|path| path.paused_until).filter(|until| *until > now).min()
    }

    /// Publishes a frame on this path.
    pub(super) fn publish(&mut self, at: usize, frame: Arc<Frame>) {
        let Some(path) = self.paths.get_mut(at) else { return };
        path.under_way += 1;
        let options = PublishOptions { is_reliable: Some(true), is_for_one: path.is_for_one, content_type: None };
        let mut publisher = path.idle.pop().unwrap_or_else(|| path.client.publisher(options));
        self.publications.spawn(async move {
            let began = Instant::now();
            let published = tokio::time::timeout(PUBLISH_TIMEOUT, publisher.publish(frame.encode())).await;
            let late = || ClientError::Broken(format!("no answer within {} s", PUBLISH_TIMEOUT.as_secs()));
            let result = published.unwrap_or_else(|_| Err(late()));
            (at, publisher, Outcome { frame, took: began.elapsed(), result })
        });
    }

    /// Publishes a frame on a path that takes no other one.
    pub(super) fn publish_once(
        &mut self,
        url: Uri,
        frame: Arc<Frame>,
        options: &ClientOptions,
    ) -> Result<(), ClientError> {
        self.add(url, options.source, false, options)?;
        let last = self.paths.len() - 1;
        self.paths[last].is_dead = true;
        self.publish(last, frame);
        Ok(())
    }

    /// Tells the other end that the connection has failed. Does not wait for a slow relay.
    pub(super) async fn reset(&mut self, peer: EndId, reason: &str) {
        let frame = Arc::new(Frame::reset(peer, reason));
        for path in self.all_free() {
            self.publish(path, frame.clone());
        }
        let all = async {
            while !self.is_idle() {
                self.outcome().await;
            }
        };
        drop(tokio::time::timeout(RESET_TIMEOUT, all).await);
    }

    /// Waits for the end of a publication; never ready if none is under way.
    pub(super) async fn outcome(&mut self) -> Outcome {
        loop {
            match self.publications.join_next().await {
                Some(Ok((at, publisher, outcome))) => {
                    if let Some(path) = self.paths.get_mut(at) {
                        path.settle(publisher, &outcome);
                    }
                    return outcome;
                }
                // Nobody aborts publications.
                Some(Err(_)) => {}
                None => std::future::pending().await,
            }
        }
    }
}

impl Path {
    fn is_free(&self, now: Instant) -> bool {
        !self.is_dead && self.under_way < MAX_UNDER_WAY && self.paused_until <= now
    }

    fn settle(&mut self, publisher: Publisher, outcome: &Outcome) {
        self.under_way -= 1;
        match &outcome.result {
            Ok(acceptance) if acceptance.delivered > 0 => {
                self.pause = MIN_PATH_PAUSE;
                self.idle.push(publisher);
                return;
            }
            // The other end is not there now, or relays are busy.
            Ok(_) => self.idle.push(publisher),
            Err(error) if error.is_transient() || outcome.is_too_large() => {}
            Err(_) => self.is_dead = true,
        }
        if !outcome.is_too_large() {
            self.paused_until = Instant::now() + self.pause;
            self.pause = (self.pause * 2).min(MAX_PATH_PAUSE);
        }
    }
}

impl Outcome {
    /// The relay refuses publications of this size.
    pub(super) fn is_too_large(&self) -> bool {
        matches!(self.result, Err(ClientError::Refused { status: StatusCode::PAYLOAD_TOO_LARGE, .. }))
    }
}
