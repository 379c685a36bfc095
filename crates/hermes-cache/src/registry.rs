//! The cache of each route, across configuration changes.
//!
//! In: snapshots. Out: the cache of a route, which survives a reload that changes neither its settings nor its origin.
//! Never: a cache that two routes share, or two caches in one directory.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::Arc;

use arc_swap::ArcSwap;
use aws_lc_rs::digest::{SHA256, digest};
use hermes_model::rewrite::Rewrite;
use hermes_model::snapshot::{Action, Route, Snapshot};

use crate::metrics::CacheMetrics;
use crate::store::Cache;
use crate::store::disk::root::Root;
use crate::store::disk::{CacheDir, Ended};

/// The caches of a node, by route.
#[derive(Default)]
pub struct CacheRegistry(ArcSwap<Routes>);

#[derive(Default)]
struct Routes {
    by_route: HashMap<Arc<str>, OfRoute>,
    /// The parent directory of the caches.
    root: Option<Arc<Root>>,
}

struct OfRoute {
    cache: Arc<Cache>,
    /// The route in the latest configuration.
    route: Arc<Route>,
}

impl CacheRegistry {
    /// Returns the cache of a route; `None` if it has none. A session may use a route of an earlier configuration, or
    /// of one about to take effect. It receives the cache only if that route and the current one have the same
    /// identity. Otherwise, its response could be served to clients that are now routed elsewhere.
    pub fn of(&self, route: &Route) -> Option<Arc<Cache>> {
        route.cache.as_ref()?;
        let routes = self.0.load();
        let OfRoute { cache, route: current } = routes.by_route.get(&route.name)?;
        let is_same = std::ptr::eq(&**current, route) || cache.of == identity(route);
        is_same.then(|| cache.clone())
    }

    /// Creates and retires caches, so that each route of the snapshot with `cache:` has one.
    pub fn follow(&self, snapshot: &Snapshot, metrics: &dyn Fn(&Arc<str>) -> CacheMetrics) {
        let before = self.0.load_full();
        let path = snapshot.state.as_ref().map(|state| state.join("cache"));
        let root = path.map(|path| match &before.root {
            Some(root) if root.path() == path => root.clone(),
            _ => Root::new(path),
        });
        let wanted: Vec<Wanted> =
            snapshot.routes.iter().filter_map(|route| Wanted::of(route, root.as_deref())).collect();
        if let Some(root) = &root {
            root.uses(wanted.iter().filter_map(|wanted| wanted.directory.clone()).collect());
        }
        // A changed cache retires before its successor starts, because two caches in one directory would each write
        // files that the other does not index.
        let stays = |name: &str, cache: &Cache| {
            wanted.iter().any(|wanted| *wanted.route.name == *name && wanted.is_met_by(cache))
        };
        let leaving = before.by_route.iter().filter(|(name, of_route)| !stays(name, &of_route.cache));
        let mut former: HashMap<PathBuf, Ended> = leaving.filter_map(|(_, of_route)| of_route.cache.retire()).collect();
        let caches = wanted.into_iter().map(|wanted| {
            let kept = before.by_route.get(&wanted.route.name).map(|of_route| &of_route.cache);
            let cache = match kept.filter(|cache| wanted.is_met_by(cache)) {
                Some(cache) => cache.clone(),
                None => wanted.begin(root.as_ref(), metrics, &mut former),
            };
            (wanted.route.name.clone(), OfRoute { cache, route: wanted.route })
        });
        let by_route = caches.collect();
        if let Some(root) = &root {
            root.sweep(former.into_values().collect());
        }
        self.0.store(Arc::new(Routes { by_route, root }));
    }

    /// Releases the directories of all caches to the process that takes over.
    pub fn hand_over(&self) {
        for of_route in self.0.load().by_route.values() {
            drop(of_route.cache.retire());
        }
    }
}

/// A cache that the configuration requires.
struct Wanted {
    route: Arc<Route>,
    settings: hermes_model::snapshot::Cache,
    of: String,
    directory: Option<PathBuf>,
}

impl Wanted {
    fn of(route: &Arc<Route>, root: Option<&Root>) -> Option<Self> {
        let settings = route.cache?;
        let of = identity(route);
        let directory = root.map(|root| root.path().join(folder(&route.name, &of)));
        Some(Self { route: route.clone(), settings, of, directory })
    }

    fn is_met_by(&self, cache: &Cache) -> bool {
        cache.settings == self.settings && cache.of == self.of && cache.directory == self.directory
    }

    fn begin(
        &self,
        root: Option<&Arc<Root>>,
        metrics: &dyn Fn(&Arc<str>) -> CacheMetrics,
        former: &mut HashMap<PathBuf, Ended>,
    ) -> Arc<Cache> {
        let place = root.zip(self.directory.clone()).map(|(root, directory)| {
            let former = former.remove(&directory);
            CacheDir { root: root.clone(), directory, former }
        });
        Cache::new(self.settings, self.of.clone(), metrics(&self.route.name), place)
    }
}

/// Returns a digest of everything besides the request that a response depends on: the matcher, the request rewrite, and
/// the action. An upstream counts by its name only, because its endpoints change.
fn identity(route: &Route) -> String {
    let action = match &route.action {
        Action::Upstream(upstream) => format!("upstream {}", upstream.name),
        other => format!("{other:?}"),
    };
    // Response rewrites are left out, because they happen after the cache.
    let Rewrite { authority, path, query, headers, response: _ } = route.rewrite.clone().unwrap_or_default();
    let asked = format!("{authority:?} {path:?} {query:?} {headers:?}");
    let shared = route.cache.is_some_and(|cache| cache.shared);
    hex(&format!("{:?}\n{action}\n{asked}\n{shared}", route.matcher), 16)
}

/// Whether both routes use the same cache. Only then do validators and responses of one route apply to the other.
pub fn is_one(one: &Route, other: &Route) -> bool {
    let are_alike = || one.name == other.name && one.cache == other.cache && identity(one) == identity(other);
    std::ptr::eq(one, other) || are_alike()
}

/// Returns the folder name of a route's cache: readable and unique.
fn folder(route: &str, of: &str) -> String {
    let readable: String = route.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').take(40).collect();
    format!("{readable}.{}", hex(&format!("{route} {of}"), 8))
}

fn hex(text: &str, bytes: usize) -> String {
    let mut hex = String::new();
    for byte in &digest(&SHA256, text.as_bytes()).as_ref()[..bytes] {
        let _ = write!(hex, "{byte:02x}");
    }
    hex
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
