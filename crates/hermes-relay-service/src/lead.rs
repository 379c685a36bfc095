//! The root of a channel among peers: takes over what another root has published, and has a peer keep a copy.
//!
//! In: the peers after this node, best first. Out: what the first one that can be reached has of the channel; from then on,
//! that peer keeps a copy, and is the next root. Never: the lead after another peer has taken over.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hermes_model::snapshot::{ChannelRanking, RootChoice};
use hermes_relay::Copies;
use hermes_transport::runtime::Shared;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::directory::Root;
use crate::feeder::Feeder;
use crate::feeds::{Progress, Refused};
use crate::next_channel::{ChannelRequests, HandedOver, NextDelivery, StandBy};
use crate::registry::RouteRelay;
use crate::siblings::Siblings;
use crate::upstream::{Better, FeedEnd, FeedTask, LINGER, asked};

/// The time for which a peer keeps a copy without being asked again, and the time after which it is asked again.
const STAND_BY: Duration = Duration::from_secs(60);
const STAND_BY_INTERVAL: Duration = Duration::from_secs(20);
/// The attempts to take over from a peer.
const ATTEMPTS: usize = 2;
/// The pause before another peer is asked for a copy.
const COPY_PAUSE: Duration = Duration::from_millis(200);
/// The time after which a root looks again for the peers before it, which could not be reached.
const SEARCH_PAUSE: Duration = Duration::from_secs(2);
/// The time after which the first of the peers after it is asked again, if another one keeps the copy.
const ASK_PAUSE: Duration = Duration::from_secs(1);
/// The time for which a peer may be silent while it hands over.
const MAX_SILENCE: Duration = Duration::from_secs(10);

impl FeedTask {
    /// Another peer is the root already.
    fn lost_to(&self, root: &Arc<str>) -> FeedEnd {
        let known = Root { node: root.clone(), before: None };
        // Counts if this node is the home of the channel.
        self.siblings.of_route.directory.assign(&self.channel, known);
        self.feeder.feed.follow();
        // Otherwise, the root may follow one that follows this node.
        self.siblings.of_route.relay.end_relays(&self.channel);
        FeedEnd::Broken(format!("{root} is the root of the channel"))
    }

    /// Takes the channel over, unless this node leads already. Returns the reason why it does not lead.
    async fn take_over(&self, lead: &Lead<'_>, before: Option<&Arc<str>>) -> Option<FeedEnd> {
        let (feed, now) = (&self.feeder.feed, || self.siblings.clock.now());
        if feed.leads() {
            return None;
        }
        let hand_overs = feed.hand_overs();
        let is_new = !self.has_followed && !self.has_led;
        let found = lead.take_over(before, is_new).await;
        if let Found::Root(root) = &found {
            return Some(self.lost_to(root));
        }
        // It has all whose publishers have a response if it has kept a copy.
        let has_copy = self.complete_until.take().is_some_and(|until| Instant::now() < until);
        let has_all = has_copy && feed.is_reliable();
        if matches!(found, Found::All | Found::Nothing) {
            feed.expect_copy(now());
        }
        if !feed.lead(rand::random(), found == Found::All || has_all, hand_overs, now()) {
            return Some(FeedEnd::Moved);
        }
        self.siblings.of_route.directory.forget(&self.channel);
        None
    }

    /// Is the root of the channel, until a peer before this one takes over.
    pub(crate) async fn lead(&mut self, ranking: &ChannelRanking, before: Option<&Arc<str>>) -> FeedEnd {
        let (mut idle_at, clock) = (self.idle_at, self.siblings.clock);
        let feeder = &self.feeder;
        let lead = Lead { siblings: &self.siblings, below: &ranking.below, requests: &self.requests, feeder };
        if let Some(end) = self.take_over(&lead, before).await {
            return end;
        }
        self.progress.send_replace(Progress::Leading);
        let _counted = CountedRoot::new(&self.siblings.worker.shared, &self.siblings.of_route);
        let mut tree = self.tree.clone();
        // The home of the channel has to know of a move.
        let mut keep_at = Instant::now() + if before.is_some() { Duration::ZERO } else { STAND_BY_INTERVAL };
        let mut keeping: Option<Pin<Box<dyn Future<Output = Kept> + '_>>> = None;
        let mut has_lost = false;
        let mut copies = CopyWatch { copies: self.siblings.of_route.relay.copies(&self.channel), before: 0 };
        // The home of a channel has to know that its root is there.
        let registers = feeder.feed.keeps_history() || self.siblings.choice() == Some(RootChoice::First);
        // With `root: first`, the home of the channel decides, and not the order alone.
        let looks = !ranking.above.is_empty() && self.siblings.choice() == Some(RootChoice::Hash);
        let mut look_at = Instant::now() + SEARCH_PAUSE;
        let mut looking: Option<Looking<'_>> = None;
        let mut audience = self.audience.clone();
        let end = loop {
            let is_unused = self.is_unused();
            if !is_unused {
                idle_at = Instant::now() + LINGER;
            }
            tokio::select! {
                () = self.duties.asked() => break FeedEnd::Moved,
                () = self.duties.moved() => break FeedEnd::Moved,
                _ = tree.changed() => break FeedEnd::Moved,
                () = tokio::time::sleep_until(look_at), if looking.is_none() && looks => {
                    looking = Some(Box::pin(self.find(&ranking.above, true)));
                }
                found = asked(&mut looking), if looking.is_some() => {
                    looking = None;
                    look_at = Instant::now() + SEARCH_PAUSE;
                    if let Ok(better) = found {
                        break FeedEnd::Found(Box::new(better));
                    }
                }
                () = tokio::time::sleep_until(keep_at), if keeping.is_none() && registers && !(is_unused && feeder.feed.is_crowded()) => {
                    has_lost = false;
                    keeping = Some(Box::pin(lead.keep_copy()));
                }
                kept = asked(&mut keeping), if keeping.is_some() => {
                    keeping = None;
                    match kept {
                        Kept::Until(_) if has_lost => keep_at = Instant::now() + COPY_PAUSE,
                        Kept::Until(until) => keep_at = until,
                        Kept::Root(root) => break self.lost_to(&root),
                    }
                }
                changed = audience.changed() => {
                    if changed.is_err() {
                        break FeedEnd::Idle;
                    }
                }
                // Another peer has to keep the copy, and may be the home of the channel now.
                () = copies.lost() => {
                    has_lost = true;
                    keep_at = keep_at.min(Instant::now() + COPY_PAUSE);
                }
                () = tokio::time::sleep_until(idle_at), if is_unused => {
                    // Without room for other channels, an unused one goes with its history.
                    let is_over = match feeder.feed.is_crowded() {
                        true => self.retire_root(),
                        false => feeder.feed.is_idle(clock.now()) && self.retire(),
                    };
                    if is_over {
                        break FeedEnd::Idle;
                    }
                    idle_at = Instant::now() + LINGER;
                }
            }
        };
        drop((keeping, looking));
        self.has_led = true;
        self.idle_at = idle_at;
        end
    }
}

/// The result of a request to take a channel over.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Found {
    /// A peer has handed over all that it has.
    All,
    /// The first peer that can be reached does not know the channel, or not what this node has of it.
    Nothing,
    /// No peer can be reached, or it broke off.
    Nobody,
    /// Another peer is the root.
    Root(Arc<str>),
}

/// A root that asks the peers after it, best first.
struct Lead<'l> {
    siblings: &'l Siblings,
    below: &'l [Arc<str>],
    requests: &'l ChannelRequests,
    feeder: &'l Feeder,
}

impl Lead<'_> {
    /// Takes over what the peers after this node have, or the node that was the root before. The first peer that can be
    /// reached keeps a copy from now on.
    ///
    /// `is_new`: this node has no publication of the channel, and accepts any. Otherwise it accepts only those that follow its
    /// own without a gap, since the peer may have fallen behind.
    async fn take_over(&self, before: Option<&Arc<str>>, is_new: bool) -> Found {
        let upstream = before.and_then(|before| self.siblings.upstream_of(before));
        let from_before = match &upstream {
            Some(upstream) => self.take_from(std::slice::from_ref(upstream), before, is_new).await,
            None => Found::Nobody,
        };
        match from_before {
            Found::Nobody => match self.take_from(self.below, None, is_new).await {
                found @ (Found::Nobody | Found::Nothing) if is_new => self.take_from_root(found).await,
                found => found,
            },
            found => found,
        }
    }

    /// Finds a peer that is the root already, if this node has begun a moment ago.
    async fn take_from_root(&self, found: Found) -> Found {
        if !self.siblings.is_new() {
            return found;
        }
        let root = self.siblings.root_elsewhere(self.requests).await;
        match root.and_then(|root| self.siblings.upstream_of(&root)) {
            Some(upstream) => self.take_from(std::slice::from_ref(&upstream), None, true).await,
            None => found,
        }
    }

    async fn take_from(&self, peers: &[Arc<str>], before: Option<&Arc<str>>, is_new: bool) -> Found {
        let mut found = Found::Nobody;
        for _ in 0..ATTEMPTS {
            found = match self.ask(peers, before).await {
                // It has handed over already, so it is asked again if it broke off.
                Some((_, StandBy::HandsOver(handed_over))) => import(handed_over, self.feeder, is_new).await,
                Some((_, StandBy::KnowsNothing)) => return Found::Nothing,
                Some((_, StandBy::Root(root))) => return Found::Root(root),
                None => return Found::Nobody,
            };
            if found != Found::Nobody {
                break;
            }
        }
        found
    }

    /// Asks the first peer that can be reached to keep a copy, or to keep it for longer. Its publications are ignored: they are
    /// from this node.
    async fn keep_copy(&self) -> Kept {
        match self.ask(self.below, None).await {
            Some((_, StandBy::Root(root))) => Kept::Root(root),
            // It is the home of the channel, too.
            Some((0, _)) => Kept::Until(Instant::now() + STAND_BY_INTERVAL),
            Some(_) | None => Kept::Until(Instant::now() + ASK_PAUSE),
        }
    }

    /// Asks the first peer that can be reached, and returns its place among them and its answer.
    async fn ask(&self, peers: &[Arc<str>], before: Option<&Arc<str>>) -> Option<(usize, StandBy)> {
        let of_route = &self.siblings.of_route;
        for (index, upstream) in peers.iter().enumerate() {
            if of_route.feeds.is_away(upstream) {
                continue;
            }
            let (asked, position) = (self.requests.at(upstream), self.feeder.feed.position());
            match asked.stand_by(STAND_BY, position, before, &of_route.relay, self.siblings.max_bytes).await {
                Ok(answer) => return Some((index, answer)),
                Err(Refused { reason, is_unreachable, .. }) => {
                    if is_unreachable {
                        of_route.feeds.set_away(upstream);
                    }
                    tracing::debug!(upstream = &**upstream, %reason, "a peer keeps no copy of a channel");
                }
            }
        }
        None
    }
}

/// A search for a peer before this node.
type Looking<'l> = Pin<Box<dyn Future<Output = Result<Better, Option<Refused>>> + 'l>>;

/// A copy at another peer.
enum Kept {
    /// The time at which to ask again.
    Until(Instant),
    /// Another peer is the root.
    Root(Arc<str>),
}

async fn import(HandedOver { mut deliveries, epochs }: HandedOver, feeder: &Feeder, is_new: bool) -> Found {
    loop {
        let next = std::future::poll_fn(|cx| deliveries.poll_next(cx));
        let Ok(next) = tokio::time::timeout(MAX_SILENCE, next).await else { return Found::Nobody };
        match next {
            Ok(NextDelivery::Gap { missed, .. }) if !is_new && missed != Some(0) => return Found::Nothing,
            Ok(delivery) => {
                let publication = feeder.take(delivery);
                if feeder.publish(publication.as_ref()).await.is_err() {
                    return Found::Nobody;
                }
            }
            Err(_) if deliveries.has_ended() => {
                feeder.feed.learn(&epochs);
                return Found::All;
            }
            Err(_) => return Found::Nobody,
        }
    }
}

/// The copies of a channel, as its root watches them.
struct CopyWatch {
    copies: Option<watch::Receiver<Copies>>,
    /// Their number when it was looked at last.
    before: usize,
}

impl CopyWatch {
    /// Waits until a peer no longer keeps a copy. Cancelled, it loses no change.
    async fn lost(&mut self) {
        let Some(copies) = &mut self.copies else { return std::future::pending().await };
        loop {
            let now = copies.borrow_and_update().stand_bys;
            if std::mem::replace(&mut self.before, now) > now {
                return;
            }
            if copies.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }
}

/// A channel of which this node is the root.
struct CountedRoot(Arc<Shared>, Arc<RouteRelay>);

impl CountedRoot {
    fn new(shared: &Arc<Shared>, of_route: &Arc<RouteRelay>) -> Self {
        shared.metrics.relay_roots.inc();
        of_route.roots.fetch_add(1, Ordering::Relaxed);
        Self(shared.clone(), of_route.clone())
    }
}

impl Drop for CountedRoot {
    fn drop(&mut self) {
        self.0.metrics.relay_roots.dec();
        self.1.roots.fetch_sub(1, Ordering::Relaxed);
    }
}
