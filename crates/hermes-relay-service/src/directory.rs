//! The roots of channels, as the home of each channel knows them.
//!
//! In: roots that this node assigns, and roots that register themselves by asking for a copy. Out: the root of a channel, for
//! as long as its lease lasts. It is soft state: a root renews its lease, and registers anew at another home. Never: two roots of
//! one channel.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

/// The lease of a root that has been assigned, and has not registered yet.
const ASSIGNED: Duration = Duration::from_secs(10);
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
}

/// The roots of the channels of a route.
#[derive(Debug, Default)]
pub(crate) struct Directory {
    leases: Mutex<HashMap<Arc<str>, Lease>>,
    registered: Notify,
}

impl Directory {
    fn lock(&self) -> MutexGuard<'_, HashMap<Arc<str>, Lease>> {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The root of a channel.
    pub(crate) fn root(&self, channel: &str) -> Option<Root> {
        let leases = self.lock();
        leases.get(channel).filter(|lease| lease.until > Instant::now()).map(|lease| lease.root.clone())
    }

    /// Assigns a root to a channel. Returns false if there is no room.
    pub(crate) fn assign(&self, channel: &Arc<str>, root: Root) -> bool {
        self.insert(channel, Lease { root, until: Instant::now() + ASSIGNED, is_registered: false })
    }

    /// The root of a channel registers itself for some time.
    ///
    /// # Errors
    /// Another node has registered itself, whose name is the error.
    pub(crate) fn register(&self, channel: &Arc<str>, node: &Arc<str>, time: Duration) -> Result<(), Arc<str>> {
        let now = Instant::now();
        let other = self.lock().get(channel).and_then(|lease| {
            let is_live = lease.until > now && (lease.is_registered || lease.root.before.is_some());
            (is_live && lease.root.node != *node).then(|| lease.root.node.clone())
        });
        if let Some(other) = other {
            return Err(other);
        }
        let root = Root { node: node.clone(), before: None };
        self.insert(channel, Lease { root, until: now + time, is_registered: true });
        self.registered.notify_waiters();
        Ok(())
    }

    fn insert(&self, channel: &Arc<str>, lease: Lease) -> bool {
        let mut leases = self.lock();
        if leases.len() >= MAX_CHANNELS && !leases.contains_key(channel) {
            let now = Instant::now();
            leases.retain(|_, lease| lease.until > now);
        }
        let has_room = leases.len() < MAX_CHANNELS || leases.contains_key(channel);
        if has_room {
            leases.insert(channel.clone(), lease);
        }
        has_room
    }

    /// Forgets the root of a channel.
    pub(crate) fn forget(&self, channel: &str) {
        self.lock().remove(channel);
    }

    /// Waits until the root of a channel registers itself, at most until a time.
    pub(crate) async fn registers(&self, channel: &str, until: Instant) {
        loop {
            let registered = self.registered.notified();
            if self.root(channel).is_some() || tokio::time::timeout_at(until, registered).await.is_err() {
                return;
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_root_keeps_its_channel_while_it_registers() {
        let directory = Directory::default();
        let [channel, one, two] = ["host/a", "one", "two"].map(Arc::<str>::from);
        let root = |node: &Arc<str>| Root { node: node.clone(), before: None };
        assert!(directory.assign(&channel, root(&one)));
        assert_eq!(directory.root(&channel), Some(root(&one)));
        // One that has been assigned gives way to one that is the root already.
        assert_eq!(directory.register(&channel, &two, 60 * Duration::from_secs(1)), Ok(()));
        assert_eq!(directory.register(&channel, &one, Duration::from_secs(60)), Err(two.clone()));
        tokio::time::advance(Duration::from_secs(61)).await;
        assert_eq!(directory.root(&channel), None);
        assert_eq!(directory.register(&channel, &one, Duration::from_secs(60)), Ok(()));
        // A move stands until the new root registers.
        assert!(directory.assign(&channel, Root { node: two.clone(), before: Some(one.clone()) }));
        assert_eq!(directory.register(&channel, &one, Duration::from_secs(60)), Err(two.clone()));
        assert_eq!(directory.register(&channel, &two, Duration::from_secs(60)), Ok(()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_lookup_waits_for_a_root_that_registers() {
        let directory = Directory::default();
        let [channel, one] = ["host/a", "one"].map(Arc::<str>::from);
        let until = Instant::now() + Duration::from_secs(2);
        directory.registers(&channel, until).await;
        assert_eq!(Instant::now(), until);
        let ((), registered) = tokio::join!(directory.registers(&channel, until + Duration::from_secs(2)), async {
            directory.register(&channel, &one, Duration::from_secs(60))
        });
        assert_eq!((registered, Instant::now()), (Ok(()), until));
    }
}
