//! Which cache a route has, while documents change.
//!
//! In: snapshots. Out: the cache of a route; it outlives a reload that leaves its settings and its origin as they are.
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
use crate::store::disk::{Ended, Place};

/// The caches of a node, by route.
#[derive(Default)]
pub struct CacheRegistry(ArcSwap<Routes>);

#[derive(Default)]
struct Routes {
    by_route: HashMap<Arc<str>, OfRoute>,
    /// Where they have their directories.
    root: Option<Arc<Root>>,
}

struct OfRoute {
    cache: Arc<Cache>,
    /// As the latest document has it.
    route: Arc<Route>,
}

impl CacheRegistry {
    /// The one of a route. A session may go by a route of an earlier document, or of one that is about to hold: it has
    /// the cache only where both mean the same, or its answer would be given to those who are led elsewhere.
    pub fn of(&self, route: &Route) -> Option<Arc<Cache>> {
        route.cache.as_ref()?;
        let routes = self.0.load();
        let OfRoute { cache, route: current } = routes.by_route.get(&route.name)?;
        let is_same = std::ptr::eq(&**current, route) || cache.of == identity(route);
        is_same.then(|| cache.clone())
    }

    /// Has those that the snapshot asks for, from now on.
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
        // Two caches at once in one directory would each write what the other one does not know of.
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

    /// Another process has what is on disk from now on.
    pub fn hand_over(&self) {
        for of_route in self.0.load().by_route.values() {
            drop(of_route.cache.retire());
        }
    }
}

/// A cache that a document asks for.
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
            Place { root: root.clone(), directory, former }
        });
        Cache::new(self.settings, self.of.clone(), metrics(&self.route.name), place)
    }
}

/// On what the answers of a route hang beside the requests, as a digest: who is let in, what its origin is asked, and
/// who that is. An upstream is known by its name: its endpoints come and go.
fn identity(route: &Route) -> String {
    let action = match &route.action {
        Action::Upstream(upstream) => format!("upstream {}", upstream.name),
        other => format!("{other:?}"),
    };
    // What is changed of responses is changed behind the cache.
    let Rewrite { authority, path, query, headers, response: _ } = route.rewrite.clone().unwrap_or_default();
    let asked = format!("{authority:?} {path:?} {query:?} {headers:?}");
    let shared = route.cache.is_some_and(|cache| cache.shared);
    hex(&format!("{:?}\n{action}\n{asked}\n{shared}", route.matcher), 16)
}

/// Whether both routes have one cache: what either's origin says holds for what is kept of the other.
pub fn is_one(one: &Route, other: &Route) -> bool {
    let are_alike = || one.name == other.name && one.cache == other.cache && identity(one) == identity(other);
    std::ptr::eq(one, other) || are_alike()
}

/// The folder of a route: readable, and no other one's.
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
