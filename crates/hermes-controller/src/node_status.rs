//! The status of nodes, whichever controller they are connected to.
//!
//! In: reports of nodes to this controller, and entries of other controllers. Out: the latest status of each node.
//! Never: more nodes than the limit.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::document::Name;
use crate::store::{Revision, StatusEntry, StatusEvent, StatusUpdate};

/// The maximum number of nodes whose status is remembered.
const MAX_NODES: usize = 100_000;

/// The status that a node reports.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct NodeStatus {
    /// The number of streams that the node has with a controller; 0 if it is disconnected.
    pub connections: usize,
    /// SHA-256 of the document that the node runs, in hex; empty if it runs none.
    pub running: String,
    /// The revision of the document that the node tried last.
    pub tried: Revision,
    /// The reason why the node does not run the document of the revision `tried`; empty if it does.
    pub refused: String,
    /// The node's version of Hermes.
    pub version: String,
    /// SHA-256 of the node's program, in hex, as it reports it.
    pub program: String,
    /// The number of sessions.
    pub sessions: u64,
    /// The reason why the node reports itself unhealthy; empty if it is healthy.
    pub unhealthy: String,
    /// The number of streams of a program, such as `hermes envoy`, that only renews the node's certificate.
    pub companions: usize,
    /// SHA-256 of each trusted CA certificate, in hex.
    pub authorities: BTreeSet<String>,
    /// The key identifier of the issuer of the node's certificate, in hex.
    pub issuer: String,
    /// When the node was last connected, in seconds since 1970; 0 if never.
    pub last_seen: u64,
    /// When the node's certificate expires, in seconds since 1970; 0 if unknown.
    pub certificate_until: i64,
    /// The address from which the node connects; empty if unknown.
    pub from: String,
    /// True if the node has reported all revoked keys that it stores.
    pub has_reported: bool,
}

impl NodeStatus {
    /// True if the node, or the program that renews its certificate, is connected.
    pub fn is_there(&self) -> bool {
        self.connections > 0 || self.companions > 0
    }

    /// True if the node is connected and has reported all revocations that it stores.
    pub(crate) fn is_back(&self) -> bool {
        self.is_there() && self.has_reported
    }
}

#[derive(Debug, Default)]
struct Entry {
    own: NodeStatus,
    /// The status that each other controller published, with a number that orders all entries by time.
    others: BTreeMap<String, (i64, NodeStatus)>,
}

/// The status of all nodes.
#[derive(Debug, Default)]
pub struct NodeStatuses {
    entries: BTreeMap<Name, Entry>,
    /// Nodes whose latest status has not been published to other controllers yet.
    unsaid: BTreeSet<Name>,
}

impl NodeStatuses {
    /// Returns the status of a node from the controller to which it is connected. If the node is disconnected, returns
    /// the status at this controller.
    pub fn get(&self, node: &Name) -> Option<&NodeStatus> {
        let Entry { own, others } = self.entries.get(node)?;
        let there = others.values().filter(|(_, status)| status.connections > 0).max_by_key(|(at, _)| *at);
        match there {
            Some((_, status)) if own.connections == 0 => Some(status),
            _ => Some(own),
        }
    }

    /// Returns the status that contains the node's trusted CAs, from a controller to which the node or the program that
    /// renews its certificate is connected.
    pub fn trusting(&self, node: &Name) -> Option<&NodeStatus> {
        let Entry { own, others } = self.entries.get(node)?;
        let all = std::iter::once(own).chain(others.values().map(|(_, status)| status));
        let says = all.filter(|status| status.is_there() && !status.authorities.is_empty());
        says.max_by_key(|status| status.connections).or_else(|| self.get(node))
    }

    /// Records a report to this controller.
    pub(crate) fn note(&mut self, node: &Name, change: impl FnOnce(&mut NodeStatus)) {
        if self.entries.len() < MAX_NODES || self.entries.contains_key(node) {
            change(&mut self.entries.entry(node.clone()).or_default().own);
            self.unsaid.insert(node.clone());
        }
    }

    /// Removes and returns the updates that have not been published to other controllers yet.
    pub(crate) fn unsaid(&mut self) -> Vec<StatusUpdate> {
        let nodes = std::mem::take(&mut self.unsaid).into_iter();
        let words = |node: &Name| {
            let own = self.entries.get(node).map(|entry| &entry.own).filter(|own| own.is_there())?;
            serde_json::to_vec(own).ok().map(Into::into)
        };
        nodes.map(|node| (node.to_string(), words(&node))).collect()
    }

    /// Marks all entries for publication again, after a failed one.
    pub(crate) fn say_all(&mut self) {
        self.unsaid =
            self.entries.iter().filter(|(_, entry)| entry.own.is_there()).map(|(node, _)| node.clone()).collect();
    }

    /// Records the status that other controllers publish.
    pub(crate) fn apply(&mut self, heard: StatusEvent) {
        match heard {
            StatusEvent::Snapshot(words) => {
                self.entries.values_mut().for_each(|entry| entry.others.clear());
                words.into_iter().for_each(|word| self.word(word));
            }
            StatusEvent::Update(word) => self.word(word),
        }
    }

    fn word(&mut self, StatusEntry { by, subject, words, at }: StatusEntry) {
        let Ok(node) = subject.parse::<Name>() else { return };
        let is_known = self.entries.contains_key(&node);
        // An entry of another version that this version cannot parse counts as removed.
        match words.and_then(|words| serde_json::from_slice(&words).ok()) {
            Some(status) if is_known || self.entries.len() < MAX_NODES => {
                self.entries.entry(node).or_default().others.insert(by, (at, status));
            }
            Some(_) => {}
            None => {
                if let Some(entry) = self.entries.get_mut(&node)
                    && let Some((_, status)) = entry.others.remove(&by)
                    && status.last_seen > entry.own.last_seen
                {
                    let own = &mut entry.own;
                    (own.last_seen, own.certificate_until) = (status.last_seen, status.certificate_until);
                    (own.version, own.from) = (status.version, status.from);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::{NodeStatuses, StatusEntry, StatusEvent};
    use crate::document::Name;

    fn word(by: &str, at: i64, words: Option<&str>) -> StatusEntry {
        let words = words.map(|running| format!("{{\"connections\": 1, \"running\": \"{running}\"}}").into());
        StatusEntry { by: by.to_owned(), subject: "a".to_owned(), words, at }
    }

    /// A restored store must not confirm itself while revocations are on their way.
    #[test]
    fn a_node_is_back_once_it_has_reported_all_that_it_keeps() {
        let (node, mut statuses) = ("a".parse::<Name>().unwrap(), NodeStatuses::default());
        statuses.note(&node, |status| status.connections = 1);
        assert!(!statuses.get(&node).unwrap().is_back());
        statuses.note(&node, |status| status.has_reported = true);
        assert!(statuses.get(&node).unwrap().is_back());
        statuses.note(&node, |status| status.connections = 0);
        assert!(!statuses.get(&node).unwrap().is_back());
        // That controller may be of an earlier version, which does not report this.
        statuses.apply(StatusEvent::Snapshot(vec![word("x", 1, Some("one"))]));
        assert!(!statuses.get(&node).unwrap().is_back());
    }

    #[test]
    fn a_node_is_what_it_said_last_where_it_is_connected() {
        let (node, mut statuses) = ("a".parse::<Name>().unwrap(), NodeStatuses::default());
        statuses.apply(StatusEvent::Snapshot(vec![word("x", 1, Some("one"))]));
        assert_eq!(statuses.get(&node).unwrap().running, "one");
        // The node moved from x to y, and x has not noticed yet.
        statuses.apply(StatusEvent::Update(word("y", 3, Some("two"))));
        assert_eq!(statuses.get(&node).unwrap().running, "two");
        statuses.apply(StatusEvent::Update(word("x", 4, None)));
        assert_eq!(statuses.get(&node).unwrap().running, "two");
        // The node connects to this controller.
        statuses.note(&node, |status| (status.connections, status.running) = (1, "three".to_owned()));
        assert_eq!(statuses.get(&node).unwrap().running, "three");
        let said = statuses.unsaid();
        assert!(said.len() == 1 && said[0].1.is_some() && statuses.unsaid().is_empty());
        // The store has lost all entries.
        statuses.say_all();
        assert_eq!(statuses.unsaid(), said);
        statuses.note(&node, |status| status.connections = 0);
        assert_eq!(statuses.get(&node).unwrap().running, "two", "the other one thinks that it is there");
        assert_eq!(statuses.unsaid(), [("a".to_owned(), None)]);
        statuses.apply(StatusEvent::Snapshot(Vec::new()));
        assert_eq!(statuses.get(&node).unwrap().connections, 0);
    }
}
