//! An HTTP cache (RFC 9111): what routes with `cache` keep of their answers.
//!
//! In: a decided request, and how its origin is asked. Out: its response, from what is kept where that may be given. One
//! cache a route and node; all workers share it, and it outlives a reload that leaves its settings as they are.
//! `look`, `head`, `key`, `range`, `conditional` and `content` are pure; `store` holds, `flight` and `fetch` bring in,
//! `disk` keeps over a restart, `serve` and `take` are the session's side. Never: an answer that its origin has kept for one user to
//! another one; a field of a request that its origin does not name in `Vary` has no say in what is given.

mod answer;
pub(crate) mod body;
mod conditional;
mod content;
mod directives;
mod disk;
mod fetch;
mod flight;
mod head;
mod key;
mod look;
mod range;
mod serve;
mod store;
mod take;

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arc_swap::ArcSwap;
use aws_lc_rs::digest::{SHA256, digest};
use hermes_model::snapshot::{Action, Route, Snapshot};

pub(crate) use self::serve::{Source, serve};
pub(crate) use self::store::Cache;
use crate::metrics::Metrics;

/// The caches of a node, by route.
#[derive(Default)]
pub(crate) struct Caches(ArcSwap<HashMap<Arc<str>, Arc<Cache>>>);

impl Caches {
    /// The one of a route.
    pub(crate) fn of(&self, route: &Route) -> Option<Arc<Cache>> {
        route.cache.as_ref()?;
        self.0.load().get(&route.name).cloned()
    }

    /// Has those that the snapshot asks for, from now on.
    pub(crate) fn follow(&self, snapshot: &Snapshot, metrics: &Metrics) {
        let before = self.0.load();
        let root = snapshot.state.as_ref().map(|state| state.join("cache"));
        let mut used = HashSet::new();
        let caches = snapshot.routes.iter().filter_map(|route| {
            let settings = route.cache?;
            let of = identity(route);
            let directory = root.as_ref().map(|root| root.join(folder(route, &of)));
            used.extend(directory.clone());
            let kept = before
                .get(&route.name)
                .filter(|old| old.settings == settings && old.of == of && old.directory == directory);
            let cache =
                kept.cloned().unwrap_or_else(|| Cache::new(settings, of, metrics.cache(&route.name), directory));
            Some((route.name.clone(), cache))
        });
        let caches = caches.collect();
        if let Some(root) = root {
            forget_others(&root, used);
        }
        self.0.store(Arc::new(caches));
    }
}

/// Whose answers a route gives.
fn identity(route: &Route) -> String {
    match &route.action {
        Action::Upstream(upstream) => format!("upstream {}", upstream.name),
        _ => "origins".to_owned(),
    }
}

/// The folder of a route: readable, and no other one's.
fn folder(route: &Route, of: &str) -> String {
    let shared = route.cache.is_some_and(|cache| cache.shared);
    let mut name: String = route.name.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').take(40).collect();
    let whole = format!("{} {of} {shared}", route.name);
    for byte in &digest(&SHA256, whole.as_bytes()).as_ref()[..4] {
        let _ = write!(name, "{}{byte:02x}", if name.is_empty() { "" } else { "." });
    }
    name
}

/// What routes have kept that are there no more goes, at leisure.
fn forget_others(root: &Path, used: HashSet<PathBuf>) {
    let Ok(entries) = std::fs::read_dir(root) else { return };
    let others: Vec<PathBuf> =
        entries.flatten().map(|entry| entry.path()).filter(|path| !used.contains(path)).collect();
    if others.is_empty() {
        return;
    }
    let remove = move || {
        for path in others {
            if let Err(error) = std::fs::remove_dir_all(&path) {
                tracing::warn!(path = %path.display(), %error, "what a route that is gone has kept is still there");
            }
        }
    };
    if let Err(error) = std::thread::Builder::new().name("cache-sweep".to_owned()).spawn(remove) {
        tracing::warn!(%error, "what routes that are gone have kept stays for now: no thread is to be had");
    }
}
