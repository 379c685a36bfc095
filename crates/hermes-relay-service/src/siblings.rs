//! The other relays of a route, as a request or a task of this node sees them.
//!
//! In: a channel, and the configuration that the worker runs. Out: the relays before and after this one for the channel, and
//! the one that is next towards the root now. Never: a subscription or a publication.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use hermes_model::facts::{Facts, PathAndQuery, Trust};
use hermes_model::snapshot::{ChannelRanking, RelayPeer, RelayTree, RootChoice};
use hermes_model::trust::PEER;
use hermes_transport::runtime::WorkerContext;

use crate::RelayRequest;
use crate::feeds::Progress;
use crate::next_channel::ChannelRequests;
use crate::next_relay::NextRelay;
use crate::registry::{RelayClock, RouteRelay};

/// The time within which a root has registered at a home that has begun.
const REGISTERS_WITHIN: Duration = Duration::from_secs(60);
/// The time for which a peer may be silent about a root.
const MAX_SILENCE: Duration = Duration::from_secs(2);

/// The relays of a route beside this node.
#[derive(Clone)]
pub(crate) struct Siblings {
    pub(crate) worker: Rc<WorkerContext>,
    pub(crate) route: Arc<str>,
    pub(crate) of_route: Arc<RouteRelay>,
    pub(crate) next: Rc<dyn NextRelay>,
    pub(crate) clock: RelayClock,
    /// The user of the node's own requests.
    user: Option<Arc<str>>,
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
            user: request.settings.user.clone(),
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

    /// Whether clients are redirected to any peer.
    pub(crate) fn have_urls(&self) -> bool {
        self.of_route.tree.borrow().peers().is_some_and(|peers| peers.all.iter().any(|peer| peer.url.is_some()))
    }

    /// The choice of roots among peers. `None`: there are no peers.
    pub(crate) fn choice(&self) -> Option<RootChoice> {
        self.of_route.tree.borrow().peers().map(|peers| peers.root)
    }

    /// The name of this node.
    pub(crate) fn node(&self) -> Arc<str> {
        self.worker.snapshot().node.clone()
    }

    /// The name of this node, if it is a peer.
    pub(crate) fn own_name(&self) -> Option<Arc<str>> {
        Some(self.node()).filter(|node| self.is_peer(node))
    }

    /// The names of all peers.
    pub(crate) fn peers(&self) -> Vec<Arc<str>> {
        let tree = self.of_route.tree.borrow();
        tree.peers().map(|peers| peers.all.iter().map(|peer| peer.node.clone()).collect()).unwrap_or_default()
    }

    /// Whether a node is a peer.
    pub(crate) fn is_peer(&self, node: &str) -> bool {
        let tree = self.of_route.tree.borrow();
        tree.peers().is_some_and(|peers| peers.all.iter().any(|peer| *peer.node == *node))
    }

    /// The upstream of another peer.
    pub(crate) fn upstream_of(&self, node: &str) -> Option<Arc<str>> {
        let tree = self.of_route.tree.borrow();
        let peer = tree.peers()?.all.iter().find(|peer| *peer.node == *node)?;
        peer.upstream.as_ref().map(|upstream| upstream.name.clone())
    }

    /// The origin to which clients of the peer behind an upstream are redirected.
    pub(crate) fn url_of(&self, upstream: &str) -> Option<Box<str>> {
        let tree = self.of_route.tree.borrow();
        let is_it = |peer: &&RelayPeer| peer.upstream.as_ref().is_some_and(|other| *other.name == *upstream);
        tree.peers()?.all.iter().find(is_it)?.url.clone()
    }

    /// Whether another peer could be reached a moment ago.
    pub(crate) fn reaches(&self, node: &str) -> bool {
        self.upstream_of(node).is_some_and(|upstream| !self.of_route.feeds.is_away(&upstream))
    }

    /// The name of the peer that a request is from. `None`: it is not from a node that may pass on assertions of others. A
    /// certificate must have the name; an address that is trusted may say any. It may be a peer that this node does not know yet.
    pub(crate) fn peer_of(&self, facts: &Facts) -> Option<Arc<str>> {
        let name = facts.headers.get(PEER)?.to_str().ok().filter(|_| facts.trust.is_proxy())?;
        let is_proven = match &facts.trust {
            Trust::Certified(peer) => peer.node.as_deref() == Some(name),
            _ => true,
        };
        is_proven.then(|| Arc::from(name))
    }

    /// Forgets the root of a channel if it is the relay of an upstream.
    pub(crate) fn forget_root(&self, channel: &str, upstream: &Arc<str>) {
        let directory = &self.of_route.directory;
        let is_it = |node: &Arc<str>| self.upstream_of(node).as_ref() == Some(upstream);
        if directory.root(channel).is_some_and(|root| is_it(&root.node)) {
            directory.forget(channel);
        }
    }

    /// Whether this node is the root of a channel.
    pub(crate) fn leads(&self, channel: &str) -> bool {
        matches!(self.of_route.feeds.progress(channel), Some(Progress::Leading))
    }

    /// A peer that is the root of a channel already. To be asked by one that has begun a moment ago, or stands in for another
    /// one, and so may not know it.
    pub(crate) async fn root_elsewhere(&self, requests: &ChannelRequests) -> Option<Arc<str>> {
        let others: Vec<(Arc<str>, Arc<str>)> = {
            let tree = self.of_route.tree.borrow();
            let named = |peer: &RelayPeer| Some((peer.node.clone(), peer.upstream.as_ref()?.name.clone()));
            tree.peers()?.all.iter().filter_map(named).collect()
        };
        let near = others.iter().filter(|(_, upstream)| !self.of_route.feeds.is_away(upstream));
        let asked = near.map(async |(node, upstream)| {
            let next = requests.at(upstream);
            let leads = tokio::time::timeout(MAX_SILENCE, next.leads()).await;
            matches!(leads, Ok(Ok(true))).then(|| node.clone())
        });
        futures_util::future::join_all(asked).await.into_iter().flatten().next()
    }

    /// Whether this node has begun so recently that roots may not have registered.
    pub(crate) fn is_new(&self) -> bool {
        self.clock.now() < REGISTERS_WITHIN
    }

    /// Whether this node is the home of a channel: the first peer by rendezvous hashing that can be reached.
    pub(crate) fn is_home(&self, channel: &str) -> bool {
        let ranking = self.ranking(channel, None);
        ranking.may_lead && ranking.above.iter().all(|upstream| self.of_route.feeds.is_away(upstream))
    }

    /// The order of the relays for a channel, whose root may be known.
    pub(crate) fn ranking(&self, channel: &str, root: Option<&str>) -> ChannelRanking {
        self.of_route.tree.borrow().ranking(channel, root)
    }

    /// The upstream of the next relay towards the root of a channel. `None`: this node is the root, or becomes it.
    pub(crate) fn next_of(&self, channel: &str) -> Option<Arc<str>> {
        match self.of_route.feeds.progress(channel) {
            Some(Progress::Following(upstream)) => Some(upstream),
            Some(Progress::Leading) => None,
            _ => {
                // The home of a channel passes on what is for the root.
                let root = self.of_route.directory.root(channel).map(|root| root.node);
                let ranking = self.ranking(channel, root.as_deref());
                let reachable = ranking.above.iter().find(|upstream| !self.of_route.feeds.is_away(upstream));
                // Without any, one that was away may have returned.
                reachable.or(ranking.above.first().filter(|_| !ranking.may_lead)).cloned()
            }
        }
    }

    /// The requests to other relays that a client causes.
    pub(crate) fn requests(&self, of: &Facts, path: &PathAndQuery) -> ChannelRequests {
        // Peers ask each other in both directions; their order excludes loops.
        let peer = self.are_peers().then(|| self.node());
        ChannelRequests::new(self.next.clone(), of, path, self.user.clone(), peer)
    }
}
