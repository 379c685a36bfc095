//! The deliveries of a subscription, with its position, its heartbeats and its end, for any form of response.
//!
//! In: a subscription, and the configurations that the worker runs. Out: one delivery after the other; or, while nothing
//! waits, a heartbeat. The subscription ends if the client may not read one of its channels any more. Never: bytes.

use std::collections::VecDeque;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hermes_model::decide::{Decision, decide};
use hermes_model::facts::{Facts, PathAndQuery};
use hermes_model::snapshot::{Action, Snapshot};
use hermes_relay::{Content, ContentReader, Delivery, End, EventId, Publication, Subscription};
use hermes_transport::runtime::WorkerContext;
use hermes_transport::runtime::session::SessionEntry;
use tokio::time::{Instant, Sleep};

use crate::backfill::Backfill;
use crate::registry::RelayClock;
use crate::{authority, authority_of_channels, url_token};

/// The reason why the deliveries end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Ended {
    /// The subscription has ended.
    #[error("{0}")]
    ByRelay(#[from] End),
    /// A new configuration denies a channel to the client.
    #[error("a channel of the subscription is no longer one of its route for this client")]
    Denied,
}

pub(crate) struct Deliveries {
    pub(crate) subscription: Subscription,
    /// The publications that the subscriber lacks of its channels. They come before its other deliveries.
    backfills: VecDeque<Backfill>,
    /// The next publication, whose content is still to arrive.
    arriving: Option<(Arc<Publication>, ContentReader)>,
    /// Publications are delivered before all of their content has arrived.
    cuts_through: bool,
    /// For each channel, the latest publication that was taken, or that the subscriber knows it lacks.
    position: Vec<EventId>,
    route: Arc<str>,
    /// The paths of all channels, about which each new configuration decides again.
    paths: Vec<PathAndQuery>,
    /// The configuration that has decided about them. It must not stay in memory after a reload.
    decided_by: Weak<Snapshot>,
    heartbeat: Duration,
    /// The next heartbeat, or the end of the subscription.
    timer: Pin<Box<Sleep>>,
    clock: RelayClock,
    worker: Rc<WorkerContext>,
    entry: Rc<SessionEntry>,
}

/// The session of a subscription.
pub(crate) struct DeliveryScope {
    pub(crate) route: Arc<str>,
    pub(crate) paths: Vec<PathAndQuery>,
    pub(crate) heartbeat: Duration,
    pub(crate) clock: RelayClock,
    pub(crate) worker: Rc<WorkerContext>,
    pub(crate) entry: Rc<SessionEntry>,
}

impl Deliveries {
    pub(crate) fn new(subscription: Subscription, backfills: VecDeque<Backfill>, scope: DeliveryScope) -> Self {
        let DeliveryScope { route, paths, heartbeat, clock, worker, entry } = scope;
        // Heartbeats keep the connection open, so no timeout of the route applies.
        entry.set_held(true);
        entry.release_stream(&worker);
        // A client over HTTP/1.1 that closes its direction has no more to ask, and leaves.
        entry.set_ends_half_closed(true);
        Self {
            position: subscription.channels().map(|(_, start)| start).collect(),
            decided_by: Arc::downgrade(&worker.snapshot()),
            timer: Box::pin(tokio::time::sleep(heartbeat)),
            subscription,
            backfills,
            arriving: None,
            cuts_through: false,
            route,
            paths,
            heartbeat,
            clock,
            worker,
            entry,
        }
    }

    /// Delivers publications before all of their content has arrived.
    pub(crate) fn cut_through(&mut self) {
        self.cuts_through = true;
    }

    pub(crate) fn has_several_channels(&self) -> bool {
        self.position.len() > 1
    }

    /// The position after the latest delivery: the identifiers of all channels, with commas.
    pub(crate) fn position(&self) -> String {
        self.position.iter().map(EventId::to_string).collect::<Vec<_>>().join(",")
    }

    /// Takes the next delivery.
    pub(crate) fn poll_delivery(&mut self, cx: &mut Context<'_>) -> Poll<Result<Delivery, Ended>> {
        if !self.is_allowed() {
            return Poll::Ready(Err(Ended::Denied));
        }
        let next = self.poll_whole(cx);
        if let Poll::Ready(Ok(delivery)) = &next {
            let (channel, id) = match delivery {
                Delivery::Publication(publication) => (&publication.channel, publication.id),
                Delivery::Gap { channel, until, .. } => (channel, Some(*until)),
            };
            if let Some(at) = self.subscription.channels().position(|(name, _)| name == channel)
                && let Some(id) = id
            {
                self.position[at] = id;
            }
        }
        next.map_err(Ended::from)
    }

    /// Waits for the content of the next publication, if that is asked for.
    fn poll_whole(&mut self, cx: &mut Context<'_>) -> Poll<Result<Delivery, End>> {
        if self.arriving.is_none() {
            match ready!(self.poll_next(cx)) {
                Ok(Delivery::Publication(publication)) if !self.cuts_through => match &publication.content.body {
                    Content::Arriving(content) if content.is_arriving() => {
                        let reader = ContentReader::new(content);
                        self.arriving = Some((publication, reader));
                    }
                    _ => return Poll::Ready(Ok(Delivery::Publication(publication))),
                },
                next => return Poll::Ready(next),
            }
        }
        let is_pending = self.arriving.as_mut().is_some_and(|(_, reader)| reader.poll_end(cx).is_pending());
        match self.arriving.take_if(|_| !is_pending) {
            Some((publication, _)) => Poll::Ready(Ok(Delivery::Publication(publication))),
            None if self.is_live() => Poll::Pending,
            None => Poll::Ready(Err(End::Expired)),
        }
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Delivery, End>> {
        while let Some(backfill) = self.backfills.front_mut() {
            match backfill.poll_next(cx, &self.subscription) {
                Poll::Ready(Some(delivery)) => return Poll::Ready(Ok(delivery)),
                Poll::Ready(None) => drop(self.backfills.pop_front()),
                Poll::Pending if self.is_live() => return Poll::Pending,
                // The deliveries in the queue come after those that are still lacking.
                Poll::Pending => return Poll::Ready(Err(End::Expired)),
            }
        }
        self.subscription.poll_next(cx, self.clock.now())
    }

    /// Whether the time of the subscription has not passed.
    pub(crate) fn is_live(&self) -> bool {
        self.subscription.deadline() > self.clock.now()
    }

    /// Gives the subscription another timeout from now on, unless it has ended.
    pub(crate) fn refresh(&self, timeout: Duration) {
        self.subscription.refresh(timeout, self.clock.now());
    }

    /// Delays the next heartbeat, since something was sent.
    pub(crate) fn delay_heartbeat(&mut self) {
        self.timer.as_mut().reset(Instant::now() + self.heartbeat);
    }

    /// Waits while no delivery is queued. Ready when a heartbeat is due, or the subscription ends.
    pub(crate) fn poll_idle(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let until_end = self.subscription.deadline().saturating_sub(self.clock.now());
        let at = (Instant::now() + until_end).min(self.timer.deadline());
        if at < self.timer.deadline() {
            self.timer.as_mut().reset(at);
        }
        ready!(self.timer.as_mut().poll(cx));
        self.delay_heartbeat();
        self.entry.touch(&self.worker);
        Poll::Ready(())
    }

    /// Whether the client may still read all channels of this route. A reload ends the session itself only if its path is denied,
    /// and not if the path leads to another relay.
    fn is_allowed(&mut self) -> bool {
        let snapshot = self.worker.snapshot();
        if self.decided_by.as_ptr() == Arc::as_ptr(&snapshot) {
            return true;
        }
        self.decided_by = Arc::downgrade(&snapshot);
        self.paths.iter().all(|path| leads_to(&self.route, &self.entry, path, &snapshot)) && self.has_token(&snapshot)
    }

    /// Whether the client's token counts for the present keys of the route.
    fn has_token(&self, snapshot: &Snapshot) -> bool {
        let settings =
            snapshot.routes.iter().find(|route| route.name == self.route).and_then(|route| match &route.action {
                Action::Relay(settings) => Some(settings),
                _ => None,
            });
        settings.is_some_and(|settings| match url_token::check_subscriber(&self.entry.facts, settings) {
            Ok(None) => true,
            Ok(Some(grant)) => self.paths.iter().all(|path| url_token::check_channel(&grant, path.path()).is_ok()),
            Err(_) => false,
        })
    }
}

/// Whether the request would have this route at another path. A subscription to several channels must not bypass the
/// routes for each of them.
pub(crate) fn leads_to(route: &Arc<str>, entry: &SessionEntry, path: &PathAndQuery, snapshot: &Snapshot) -> bool {
    would_lead_to(route, entry, snapshot, |facts| facts.path = path.clone())
}

/// Whether the request would have this route after a change, also by the authority that its channels have.
pub(crate) fn would_lead_to(
    route: &Arc<str>,
    entry: &SessionEntry,
    snapshot: &Snapshot,
    change: impl FnOnce(&mut Facts),
) -> bool {
    let mut facts = (*entry.facts).clone();
    change(&mut facts);
    let leads = |facts: &Facts| match decide(facts, snapshot) {
        Decision::Act(other) if other.name == *route => Some(other),
        _ => None,
    };
    let Some(found) = leads(&facts) else { return false };
    let Action::Relay(settings) = &found.action else { return false };
    let asked = authority(&facts);
    let meant = authority_of_channels(settings, &asked);
    if meant == asked {
        return true;
    }
    // A route that denies the channel by its own authority denies it by that of a peer, too.
    facts.authority.beside(meant).is_ok_and(|meant| leads(&Facts { authority: meant, ..facts }).is_some())
}
