//! The paths to the other end: its receive channels, and publications to them that are under way.
//!
//! In: frames. Out: the outcome of each publication. Several publications of a path are under way at once, each on a
//! connection of its own, so that a slow answer does not hold up the others. Never: more than [`MAX_UNDER_WAY`] on a path, but
//! for a reset.

use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::frame::{EndId, Frame};
use crate::{Acceptance, Client, ClientError, PublishOptions, Publisher};

/// The most publications of a path that are under way.
const MAX_UNDER_WAY: usize = 4;
/// The wait for a relay's answer. Chunks have a size that a relay takes in much less.
const PUBLISH_TIMEOUT: Duration = Duration::from_secs(10);
/// Connections to relays are used again for this long.
const MAX_IDLE: Duration = Duration::from_secs(30);
/// The wait for relays when the connection fails.
const RESET_TIMEOUT: Duration = Duration::from_secs(3);
/// The pauses of a path after a failure.
const MIN_PATH_PAUSE: Duration = Duration::from_millis(250);
const MAX_PATH_PAUSE: Duration = Duration::from_secs(4);

/// A channel to which this end publishes.
struct Path {
    client: Arc<Client>,
    is_for_one: bool,
    /// Publishers with a connection, and when they were used.
    idle: Vec<(Publisher, Instant)>,
    under_way: usize,
    /// After a failure, the path has a pause until then; the next one will be this long.
    paused_until: Instant,
    pause: Duration,
    /// The latest publication failed. Until one succeeds, the path gets copies alone, if there is another path.
    is_on_trial: bool,
    /// The other end did not receive there the latest time.
    is_deserted: bool,
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
    pub(super) fn add(&mut self, client: Arc<Client>, is_for_one: bool) {
        self.paths.push(Path {
            client,
            is_for_one,
            idle: Vec::new(),
            under_way: 0,
            paused_until: Instant::now(),
            pause: MIN_PATH_PAUSE,
            is_on_trial: false,
            is_deserted: false,
            is_dead: false,
        });
    }

    /// Uses the paths no more.
    pub(super) fn retire(&mut self) {
        self.paths.iter_mut().for_each(|path| path.is_dead = true);
    }

    /// No path is left.
    pub(super) fn are_dead(&self) -> bool {
        self.paths.iter().all(|path| path.is_dead)
    }

    /// The other end does not receive anywhere.
    pub(super) fn are_deserted(&self) -> bool {
        self.paths.iter().all(|path| path.is_dead || path.is_deserted)
    }

    /// No publication is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.publications.is_empty()
    }

    /// The best of the paths that may take a frame now: the one with the fewest publications under way.
    pub(super) fn free(&self) -> Option<usize> {
        let now = Instant::now();
        let are_all_on_trial = self.paths.iter().all(|path| path.is_dead || path.is_on_trial);
        let is_usable = |path: &Path| path.is_free(now) && (!path.is_on_trial || are_all_on_trial);
        let free = self.paths.iter().enumerate().filter(|(_, path)| is_usable(path));
        free.min_by_key(|(_, path)| path.under_way).map(|(at, _)| at)
    }

    /// The paths that may take a copy of a frame, to see whether they work again.
    pub(super) fn on_trial(&self) -> Vec<usize> {
        let now = Instant::now();
        let is_usable = |path: &Path| path.is_on_trial && path.under_way == 0 && path.is_free(now);
        (0..self.paths.len()).filter(|at| is_usable(&self.paths[*at])).collect()
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
        let now = Instant::now();
        // A NAT may have forgotten a connection that was not used for long.
        path.idle.retain(|(_, used)| now < *used + MAX_IDLE);
        let idle = path.idle.pop().map(|(publisher, _)| publisher);
        let mut publisher = idle.unwrap_or_else(|| path.client.publisher(options));
        self.publications.spawn(async move {
            let began = Instant::now();
            let published = tokio::time::timeout(PUBLISH_TIMEOUT, publisher.publish(frame.encode())).await;
            let late = || ClientError::Broken(format!("no answer within {} s", PUBLISH_TIMEOUT.as_secs()));
            let result = published.unwrap_or_else(|_| Err(late()));
            (at, publisher, Outcome { frame, took: began.elapsed(), result })
        });
    }

    /// Publishes a frame on a path that takes no other one.
    pub(super) fn publish_once(&mut self, client: Arc<Client>, frame: Arc<Frame>) {
        self.add(client, false);
        let last = self.paths.len() - 1;
        self.paths[last].is_dead = true;
        self.publish(last, frame);
    }

    /// Tells the other end that the connection has failed. Does not wait long for a slow relay.
    pub(super) async fn reset(&mut self, own: &EndId, peer: EndId, reason: &str) {
        let frame = Arc::new(Frame::reset(own.clone(), peer, reason));
        let alive: Vec<_> = (0..self.paths.len()).filter(|at| !self.paths[*at].is_dead).collect();
        for at in alive {
            self.publish(at, frame.clone());
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
        self.is_deserted = matches!(&outcome.result, Ok(acceptance) if acceptance.delivered == 0);
        match &outcome.result {
            Ok(_) => self.idle.push((publisher, Instant::now())),
            Err(error) if error.is_transient() => self.idle.clear(),
            Err(_) => self.is_dead |= !outcome.is_too_large(),
        }
        self.is_on_trial = !outcome.is_too_large() && (outcome.result.is_err() || self.is_deserted);
        if outcome.result.is_ok() && !self.is_deserted {
            self.pause = MIN_PATH_PAUSE;
        } else if !outcome.is_too_large() {
            self.paused_until = Instant::now() + self.pause;
            self.pause = (self.pause * 2).min(MAX_PATH_PAUSE);
        }
    }
}

impl Outcome {
    /// The network is slow, or gone.
    pub(super) fn is_late(&self) -> bool {
        self.took >= PUBLISH_TIMEOUT
    }

    /// The relay refuses publications of this size.
    pub(super) fn is_too_large(&self) -> bool {
        matches!(self.result, Err(ClientError::Refused { status: StatusCode::PAYLOAD_TOO_LARGE, .. }))
    }
}
