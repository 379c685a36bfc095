//! What must be so, whatever was killed: the changes that were acknowledged, and what they come to at each node.
//!
//! In: each attempt to change something, and what became of it as far as anybody knows. Out: whether what a controller says, what
//! a node keeps, and what an application gets can be.
//! Never: a word from a controller that is believed. What a change comes to is compiled here.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard};

use bytes::Bytes;
use hermes_controller::catalog::Catalog;
use hermes_controller::compile::Plan;
use hermes_controller::document::{Name, read};

/// One half of the overlay: nodes in a row, the services at their end, and one who changes these. Halves share their controllers
/// and nothing else, so that the nodes of one half must not notice what is killed of the other.
pub(crate) struct Half {
    /// `a` or `b`: its names begin with it.
    pub(crate) letter: char,
    pub(crate) nodes: Vec<String>,
    /// Where its two services live.
    pub(crate) origin: std::net::SocketAddr,
    base: Catalog,
    state: Mutex<State>,
}

/// The marks of changes, which count up: each is in two services, and by their timeouts in the document of each node.
#[derive(Debug, Default)]
struct State {
    /// The last one that was acknowledged.
    acked: u64,
    /// Attempts since then of which nobody knows what became.
    open: BTreeSet<u64>,
    /// All that may have been applied at some time, with what each comes to at each node.
    legal: BTreeMap<u64, BTreeMap<Name, Bytes>>,
}

impl Half {
    pub(crate) fn new(letter: char, nodes: &[&str], origin: std::net::SocketAddr, base: &str) -> Self {
        let mut catalog = Catalog::default();
        read(base).unwrap().into_iter().for_each(|one| drop(catalog.put(one)));
        let nodes = nodes.iter().map(|node| format!("{letter}-{node}")).collect();
        Self { letter, nodes, origin, base: catalog, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// The documents of a change.
    pub(crate) fn documents(&self, mark: u64) -> String {
        let (letter, origin, idle) = (self.letter, self.origin, 100_000 + mark);
        let service = |name: &str| {
            format!(
                "{{kind: Service, name: {letter}-{name}, at: {{node: {letter}-server, http: \"{origin}\"}}, \
                 for: {{users: {letter}-user}}, timeout: {{idle: {idle}ms}}, \
                 rewrite: {{response: {{set-headers: {{x-mark: \"{mark}\"}}}}}}}}\n"
            )
        };
        service("app") + "---\n" + &service("twin")
    }

    /// Somebody is about to ask for it.
    pub(crate) fn attempt(&self, mark: u64) {
        let mut catalog = self.base.clone();
        read(&self.documents(mark)).unwrap().into_iter().for_each(|one| drop(catalog.put(one)));
        let all = catalog.iter().map(|one| one.key.clone()).collect();
        let (plan, _) = Plan::default().update(&catalog, &all).unwrap();
        let documents = plan.documents().map(|(node, document)| (node.clone(), document.clone())).collect();
        let mut state = self.state();
        state.open.insert(mark);
        state.legal.insert(mark, documents);
    }

    /// It was acknowledged. What was open before was decided by then: each attempt names the revision that it follows.
    pub(crate) fn acknowledged(&self, mark: u64) {
        let mut state = self.state();
        state.acked = mark;
        state.open.clear();
    }

    /// It was refused, which is as sure.
    pub(crate) fn refused(&self, mark: u64) {
        let mut state = self.state();
        state.open.remove(&mark);
        state.legal.remove(&mark);
    }

    pub(crate) fn acked(&self) -> u64 {
        self.state().acked
    }

    /// What a controller has, once it knows as much as `floor`.
    pub(crate) fn is_possible(&self, mark: u64, floor: u64) -> Result<(), String> {
        let state = self.state();
        if mark >= floor && state.legal.contains_key(&mark) {
            return Ok(());
        }
        let State { acked, open, .. } = &*state;
        Err(format!("{mark} is there, where {floor} was acknowledged (by now {acked}, perhaps {open:?})"))
    }

    /// An answer had this mark: it must have been applied, or may have been.
    pub(crate) fn was_applied(&self, mark: u64) -> bool {
        self.state().legal.contains_key(&mark)
    }

    /// Which change a node's document is of. `None`: it is none that was ever applied.
    pub(crate) fn mark_of(&self, node: &str, document: &[u8]) -> Option<u64> {
        let node: Name = node.parse().unwrap();
        let state = self.state();
        state
            .legal
            .iter()
            .rev()
            .find(|(_, nodes)| nodes.get(&node).is_some_and(|one| *one == document))
            .map(|one| *one.0)
    }
}
