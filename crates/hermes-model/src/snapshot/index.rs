//! Route index: finds the first route that matches without testing all of them.
//!
//! In: routes in document order. Out: for the attributes of a request, the position of the first route that matches.
//! Never: a decision of its own. The index only skips routes that cannot match; it tests each candidate in full.
//!
//! Every route is filed under one field of its match, in one bucket for each value of that field. The builder picks the
//! field whose fullest bucket holds the fewest routes. A lookup opens one bucket for each value of a request (each
//! suffix of the host, each prefix of the path, ...). A bucket with many routes is an index over the remaining fields.
//! Routes without a usable field are always tested.

mod buckets;
mod build;

use std::sync::Arc;

use crate::facts::Facts;
use crate::snapshot::Route;
use buckets::Buckets;

/// Finds the routes that may match.
#[derive(Debug)]
pub struct RouteIndex {
    root: Buckets,
}

impl RouteIndex {
    /// Indexes all routes.
    pub fn build(routes: &[Arc<Route>]) -> Self {
        Self { root: build::buckets(routes) }
    }

    /// Position of the first route that matches; `path` is one reading of the request's path.
    pub(crate) fn first_match(&self, routes: &[Arc<Route>], facts: &Facts, path: &str) -> Option<usize> {
        let search = self.search(routes, facts, path);
        (search.best < routes.len()).then_some(search.best)
    }

    fn search<'a>(&self, routes: &'a [Arc<Route>], facts: &'a Facts, path: &'a str) -> Search<'a> {
        let mut search = Search {
            routes,
            facts,
            path,
            best: routes.len(),
            #[cfg(test)]
            tested: 0,
        };
        self.root.search(&mut search);
        search
    }
}

/// A search in progress.
struct Search<'a> {
    routes: &'a [Arc<Route>],
    facts: &'a Facts,
    path: &'a str,
    /// Position of the first match so far; the number of routes if nothing matched.
    best: usize,
    /// Number of candidates tested in full.
    #[cfg(test)]
    tested: usize,
}

impl Search<'_> {
    /// Tests candidates in order, up to the best match so far.
    fn test(&mut self, candidates: &[u32]) {
        for &at in candidates {
            let at = at as usize;
            if at >= self.best {
                return;
            }
            #[cfg(test)]
            {
                self.tested += 1;
            }
            if self.routes[at].matcher.matches(self.facts, self.path) {
                self.best = at;
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests;
