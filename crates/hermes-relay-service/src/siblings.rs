//! The other relays of a route, as a request or a task of this node sees them.
//!
//! In: a channel, and the configuration that the worker runs. Out: the relays before and after this one for the channel, and
//! the one that is next towards the root now. Never: a subscription or a publication.

use std::rc::Rc;
use std::sync::Arc;

use hermes_model::facts::{Facts, PathAndQuery};
use hermes_model::snapshot::{ChannelRanking, RelayTree};
use hermes_transport::runtime::WorkerContext;

use crate::RelayRequest;
use crate::feeds::Progress;
use crate::next_channel::ChannelRequests;
use crate::next_relay::NextRelay;
use crate::registry::{RelayClock, RouteRelay};

/// The relays of a route beside this node.
#[derive(Clone)]
pub(crate) struct Siblings {
    pub(crate) worker: Rc<WorkerContext>,
    pub(crate) route: Arc<str>,
    pub(crate) of_route: Arc<RouteRelay>,
    pub(crate) next: Rc<dyn NextRelay>,
    pub(crate) clock: RelayClock,
    /// Larger publications of other relays count as missed.
    pub(crate) max_bytes: usize,
}

impl Siblings {
    pub(crate) fn of(request: &RelayRequest<'_>) -> Self {
        Self {
            worker: request.worker.clone(),
            route: request.route.name.clone(),
            of_route: request.relays.of(&request.route.name, request.settings),
            next: request.next.clone(),
            clock: request.relays.clock(),
            max_bytes: usize::try_from(request.settings.unit).unwrap_or(usize::MAX),
        }
    }

    /// Whether other relays may have the root of a channel.
    pub(crate) fn exist(&self) -> bool {
        *self.of_route.tree.borrow() != RelayTree::Root
    }

    /// Whether nodes share the channels, so that another one may take over.
    pub(crate) fn are_peers(&self) -> bool {
        matches!(*self.of_route.tree.borrow(), RelayTree::Peers(_))
    }

    /// The order of the relays for a channel.
    pub(crate) fn ranking(&self, channel: &str) -> ChannelRanking {
        self.of_route.tree.borrow().ranking(channel)
    }

    /// The upstream of the next relay towards the root of a channel. `None`: this node is the root, or becomes it.
    pub(crate) fn next_of(&self, channel: &str) -> Option<Arc<str>> {
        match self.of_route.feeds.progress(channel) {
            Some(Progress::Following(upstream)) => Some(upstream),
            Some(Progress::Leading) => None,
            _ => {
                let ranking = self.ranking(channel);
                let reachable = ranking.above.iter().find(|upstream| !self.of_route.feeds.is_away(upstream));
                // Without any, one that was away may have returned.
                reachable.or(ranking.above.first().filter(|_| !ranking.may_lead)).cloned()
            }
        }
    }

    /// The requests to other relays that a client causes.
    pub(crate) fn requests(&self, of: &Facts, path: &PathAndQuery) -> ChannelRequests {
        // Peers ask each other in both directions; their order excludes loops.
        ChannelRequests::new(self.next.clone(), of, path, !self.are_peers())
    }
}
