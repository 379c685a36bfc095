//! The index: finds the first route that matches without walking all of them.
//!
//! In: routes in their order. Out: for facts, the position of the first route whose match holds.
//! Never: decides by itself. It only leaves out routes that cannot match; each candidate is
//! tested in full.
//!
//! Every route is filed under one field of its match, under each value that the field has there:
//! the field whose fullest bucket holds the fewest routes. Facts open one bucket a value that they
//! have (each suffix of the host, each beginning of the path ...). A bucket with many routes is an
//! index itself, over the fields that are left. Routes without a usable field are always tested.

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
    /// Files every route.
    pub fn build(routes: &[Arc<Route>]) -> Self {
        Self { root: build::buckets(routes) }
    }

    /// The position of the first route that matches the facts with this reading of their path.
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

/// A search under way.
struct Search<'a> {
    routes: &'a [Arc<Route>],
    facts: &'a Facts,
    path: &'a str,
    /// The first match so far; the number of routes where there is none.
    best: usize,
    /// How many candidates were tested in full.
    #[cfg(test)]
    tested: usize,
}

impl Search<'_> {
    /// Tests candidates in their order, as far as they could come before the best so far.
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
