//! The root of a channel with `root: first`.
//!
//! In: a channel, and the peer at which a client asks for it. Out: the root. The home of a channel is the first peer by
//! rendezvous hashing that can be reached. It assigns the root: the peer that the first client asks for, or the peer at which
//! that client is, or the one with the fewest channels. Never: a root that is no peer.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use hermes_model::snapshot::RootChoice;

use crate::directory::Root;
use crate::next_channel::ChannelRequests;
use crate::siblings::Siblings;

/// A peer that asks for the root of a channel.
pub(crate) struct Question<'q> {
    /// The name of the peer.
    pub(crate) peer: Option<Arc<str>>,
    /// The peer that the client asks for, as long as the channel has no root.
    pub(crate) wish: Option<&'q Arc<str>>,
}

/// The root of a channel. `None`: the peers have the order of rendezvous hashing.
pub(crate) async fn root(
    siblings: &Siblings,
    requests: &ChannelRequests,
    channel: &Arc<str>,
    wish: Option<&Arc<str>>,
) -> Option<Root> {
    if siblings.choice() != Some(RootChoice::First) {
        return None;
    }
    let ranking = siblings.ranking(channel, None);
    let feeds = &siblings.of_route.feeds;
    for upstream in ranking.above.iter().filter(|upstream| !feeds.is_away(upstream)) {
        match requests.at(upstream).locate(wish, None).await {
            Ok(root) => return Some(root),
            Err(refused) if refused.is_unreachable => feeds.set_away(upstream),
            // The next one stands in for it.
            Err(_) => {}
        }
    }
    let peer = siblings.own_name();
    if ranking.may_lead { Some(assigned(siblings, requests, channel, Question { peer, wish }).await) } else { None }
}

/// The root of a channel whose home this node is.
pub(crate) async fn assigned(
    siblings: &Siblings,
    requests: &ChannelRequests,
    channel: &Arc<str>,
    question: Question<'_>,
) -> Root {
    let directory = &siblings.of_route.directory;
    let own = siblings.node();
    let of = |node: Arc<str>| Root { node, before: None };
    let known = || directory.root(channel).or_else(|| siblings.leads(channel).then(|| of(own.clone())));
    if let Some(root) = known() {
        return root;
    }
    let is_stand_in = !siblings.ranking(channel, None).above.is_empty();
    let mut found = None;
    if is_stand_in || siblings.is_new() {
        found = siblings.root_elsewhere(requests).await;
        // It may have registered meanwhile.
        if let Some(root) = known() {
            return root;
        }
    }
    let reachable = |name: &&Arc<str>| **name == own || siblings.reaches(name);
    let wish = question.wish.filter(|wish| siblings.is_peer(wish)).filter(reachable).cloned();
    // The client is at no peer: at a node below them.
    let least_loaded = || {
        let peers = siblings.peers();
        let of_each_home = siblings.of_route.roots.load(Ordering::Relaxed) / peers.len().max(1);
        let others = peers.into_iter().filter(|peer| *peer != own && siblings.reaches(peer));
        directory.least_loaded((own.clone(), of_each_home), others)
    };
    let root = of(found.or(wish).or(question.peer).unwrap_or_else(least_loaded));
    if directory.assign(channel, root.clone()) { root } else { of(own) }
}
