//! The roots of channels, as far as this node knows them.
//!
//! In: roots that this node assigns as the home of a channel, roots that register themselves by asking for a copy, and answers
//! of other homes. Out: the root of a channel, for as long as its lease lasts. It is soft state: a root renews its lease, and
//! registers anew at another home. Never: more than a bounded number of channels.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// The lease of a root that has been assigned, and has not registered yet; and the time for which an answer of another home
/// counts.
const ASSIGNED: Duration = Duration::from_secs(10);
/// The time in which the root of a channel moves once.
const MOVE_INTERVAL: Duration = Duration::from_secs(1);
/// Channels whose roots are known at once.
const MAX_CHANNELS: usize = 100_000;

/// The root of a channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Root {
    /// The name of its node.
    pub(crate) node: Arc<str>,
    /// The node that was the root before, and has the channel.
    pub(crate) before: Option<Arc<str>>,
}

#[derive(Debug)]
struct Lease {
    root: Root,
    until: Instant,
    /// The root has registered.
    is_registered: bool,
    moved: Option<Instant>,
}

#[derive(Debug, Default)]
struct Leases {
    by_channel: HashMap<Arc<str>, Lease>,
    /// The number of leases of each node.
    by_node: HashMap<Arc<str>, usize>,
    /// The time of the latest search for outdated ones.
    swept: Option<Instant>,
}

/// The reason why a root is not registered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NotRegistered {
    /// Another node is the root.
    Root(Arc<str>),
    /// There is no room.
    Full,
}

/// The roots of the channels of a route.
#[derive(Debug, Default)]
pub(crate) struct Directory(Mutex<Leases>);

impl Directory {
    fn lock(&self) -> MutexGuard<'_, Leases> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The root of a channel.
    pub(crate) fn root(&self, channel: &str) -> Option<Root> {
        self.lock().live(channel).map(|lease| lease.root.clone())
    }

    /// Assigns a root to a channel without one. Returns false if there is no room.
    pub(crate) fn assign(&self, channel: &Arc<str>, root: Root) -> bool {
        let mut leases = self.lock();
        let lease = Lease { root, until: Instant::now() + ASSIGNED, is_registered: false, moved: None };
        leases.live(channel).is_some() || leases.insert(channel, lease)
    }

    /// The root of a channel does not move to a node, unless that has registered.
    pub(crate) fn move_back(&self, channel: &Arc<str>, from: &Arc<str>, to: Root, time: Duration) {
        let mut leases = self.lock();
        let moves = |lease: &&Lease| !lease.is_registered && lease.root.node == *from;
        if let Some(moved) = leases.live(channel).filter(moves).map(|lease| lease.moved) {
            leases.insert(channel, Lease { root: to, until: Instant::now() + time, is_registered: true, moved });
        }
    }

    /// Moves the root of a channel. Returns false if it has just moved, or there is no room.
    pub(crate) fn move_to(&self, channel: &Arc<str>, root: Root) -> bool {
        let (mut leases, now) = (self.lock(), Instant::now());
        let moved = leases.live(channel).and_then(|lease| lease.moved);
        if moved.is_some_and(|moved| now < moved + MOVE_INTERVAL) {
            return false;
        }
        leases.insert(channel, Lease { root, until: now + ASSIGNED, is_registered: false, moved: Some(now) })
    }

    /// The root of a channel registers itself for some time.
    ///
    /// # Errors
    /// Another node is the root, or there is no room.
    pub(crate) fn register(&self, channel: &Arc<str>, node: &Arc<str>, time: Duration) -> Result<(), NotRegistered> {
        let mut leases = self.lock();
        let lease = leases.live(channel);
        let moved = lease.and_then(|lease| lease.moved);
        // One that has been assigned gives way to one that is the root already. A move stands.
        let is_firm = |lease: &&Lease| lease.is_registered || lease.root.before.is_some();
        if let Some(other) = lease.filter(is_firm).filter(|lease| lease.root.node != *node) {
            return Err(NotRegistered::Root(other.root.node.clone()));
        }
        let root = Root { node: node.clone(), before: None };
        let lease = Lease { root, until: Instant::now() + time, is_registered: true, moved };
        if leases.insert(channel, lease) { Ok(()) } else { Err(NotRegistered::Full) }
    }

    /// The node that is the root of the fewest channels: this one, with its count for each home, or another one. A home knows
    /// its own channels, which are a sample of all.
    pub(crate) fn least_loaded(
        &self,
        (own, channels): (Arc<str>, usize),
        others: impl Iterator<Item = Arc<str>>,
    ) -> Arc<str> {
        let mut leases = self.lock();
        leases.sweep();
        let of_other = |node: Arc<str>| (leases.by_node.get(&node).copied().unwrap_or_default(), node);
        let least = others.map(of_other).min_by_key(|(count, _)| *count);
        least.filter(|(count, _)| *count < channels).map_or(own, |(_, node)| node)
    }

    /// Forgets the root of a channel.
    pub(crate) fn forget(&self, channel: &str) {
        self.lock().remove(channel);
    }
}

impl Leases {
    fn live(&self, channel: &str) -> Option<&Lease> {
        self.by_channel.get(channel).filter(|lease| lease.until > Instant::now())
    }

    fn insert(&mut self, channel: &Arc<str>, lease: Lease) -> bool {
        let is_full =
            |leases: &Self| leases.by_channel.len() >= MAX_CHANNELS && !leases.by_channel.contains_key(channel);
        if is_full(self) {
            self.sweep();
        }
        let has_room = !is_full(self);
        if has_room {
            self.remove(channel);
            *self.by_node.entry(lease.root.node.clone()).or_default() += 1;
            self.by_channel.insert(channel.clone(), lease);
        }
        has_room
    }

    fn remove(&mut self, channel: &str) {
        let Some(lease) = self.by_channel.remove(channel) else { return };
        if let Some(count) = self.by_node.get_mut(&lease.root.node) {
            *count -= 1;
            if *count == 0 {
                self.by_node.remove(&lease.root.node);
            }
        }
    }

    /// Removes outdated leases. The search costs as much as the table is large, so there is one in a while.
    fn sweep(&mut self) {
        let now = Instant::now();
        if self.swept.is_some_and(|swept| now <= swept + ASSIGNED) {
            return;
        }
        self.swept = Some(now);
        let outdated: Vec<Arc<str>> =
            self.by_channel.iter().filter(|(_, lease)| lease.until <= now).map(|(name, _)| name.clone()).collect();
        outdated.iter().for_each(|channel| self.remove(channel));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_root_keeps_its_channel_while_it_registers() {
        let (directory, time) = (Directory::default(), Duration::from_secs(60));
        let [channel, one, two] = ["host/a", "one", "two"].map(Arc::<str>::from);
        let root = |node: &Arc<str>| Root { node: node.clone(), before: None };
        assert!(directory.assign(&channel, root(&one)));
        assert_eq!(directory.root(&channel), Some(root(&one)));
        // One that has been assigned gives way to one that is the root already.
        assert_eq!(directory.register(&channel, &two, time), Ok(()));
        assert_eq!(directory.register(&channel, &one, time), Err(NotRegistered::Root(two.clone())));
        assert!(directory.assign(&channel, root(&one)));
        assert_eq!(directory.root(&channel), Some(root(&two)), "it has one");
        tokio::time::advance(Duration::from_secs(61)).await;
        assert_eq!(directory.root(&channel), None);
        assert_eq!(directory.register(&channel, &one, time), Ok(()));
        // A move stands until the new root registers.
        assert!(directory.move_to(&channel, Root { node: two.clone(), before: Some(one.clone()) }));
        assert_eq!(directory.register(&channel, &one, time), Err(NotRegistered::Root(two.clone())));
        assert_eq!(directory.register(&channel, &two, time), Ok(()));
        assert!(!directory.move_to(&channel, root(&one)), "it has just moved");
        tokio::time::advance(MOVE_INTERVAL).await;
        assert!(directory.move_to(&channel, root(&one)));
    }

    #[tokio::test(start_paused = true)]
    async fn the_node_with_the_fewest_channels_is_the_least_loaded() {
        let directory = Directory::default();
        let [one, two, three] = ["one", "two", "three"].map(Arc::<str>::from);
        let least = |own: usize| directory.least_loaded(("own".into(), own), [&one, &two, &three].into_iter().cloned());
        let assign = |channel: &str, node: &Arc<str>| {
            assert!(directory.assign(&channel.into(), Root { node: node.clone(), before: None }));
        };
        assert_eq!(least(0), "own".into());
        assert_eq!(least(1), one, "the first of equal ones");
        for (channel, node) in [("a", &one), ("b", &one), ("c", &two), ("d", &two), ("e", &three)] {
            assign(channel, node);
        }
        assert_eq!((least(1), least(2)), ("own".into(), three.clone()));
        directory.move_to(&"b".into(), Root { node: three.clone(), before: None });
        directory.forget("a");
        assert_eq!(least(1), one);
        tokio::time::advance(2 * ASSIGNED).await;
        assign("f", &one);
        assert_eq!(least(1), two, "the others are outdated");
        assert_eq!(directory.lock().by_node.len(), 1);
    }
}
