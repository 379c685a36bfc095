//! The status of a node while it is connected, from its reports.
//!
//! In: the start and the end of a connection, and the reports on it. Out: the node's status.
//! Never: unlimited text from a node, or control characters.

use std::collections::BTreeSet;
use std::sync::Arc;

use bytes::Bytes;

use super::{Peer, Push};
use crate::audit::Event;
use crate::control::Report;
use crate::digest::hex;
use crate::document::Name;
use crate::node_status::NodeStatus;
use crate::store::Revision;

/// The maximum length of a node's reason, in bytes.
const MAX_REASON: usize = 16 << 10;
/// The maximum number of trusted CAs in a report.
const MAX_TRUSTED: usize = 16;

/// Marks a node as connected, until it is dropped.
pub(crate) struct ConnectedNode {
    pub(super) push: Arc<Push>,
    pub(super) node: Name,
    /// True if the peer is a program, such as `hermes envoy`, that only renews the node's certificate.
    pub(super) is_beside: bool,
}

impl ConnectedNode {
    pub(crate) fn begin(push: Arc<Push>, node: Name, peer: &Peer) -> Self {
        push.note(&node, |status| {
            status.connections += 1;
            connected(status, peer);
        });
        Self { push, node, is_beside: false }
    }

    pub(super) fn beside(push: Arc<Push>, node: Name, peer: &Peer) -> Self {
        push.note(&node, |status| {
            status.companions += 1;
            connected(status, peer);
        });
        Self { push, node, is_beside: true }
    }

    pub(crate) fn update(&self, report: &Report) {
        let Report { running, tried, refused, version, program, sessions, unhealthy, .. } = report;
        let said = Identity::of(report);
        self.push.note(&self.node, |status| {
            status.has_reported = !report.more;
            // An Envoy does not report CAs; `hermes envoy` does.
            if !said.authorities.is_empty() {
                (status.authorities, status.issuer) = (said.authorities, said.issuer);
            }
            if self.is_beside {
                return;
            }
            *status = NodeStatus {
                connections: status.connections,
                companions: status.companions,
                has_reported: status.has_reported,
                authorities: std::mem::take(&mut status.authorities),
                issuer: std::mem::take(&mut status.issuer),
                running: hex(&running[..running.len().min(64)]),
                tried: *tried,
                refused: shortened(refused),
                unhealthy: shortened(unhealthy),
                version: crate::audit::visible(&version.chars().take(64).collect::<String>()),
                program: hex(&program[..program.len().min(64)]),
                sessions: *sessions,
                last_seen: crate::controller::now() / 1000,
                certificate_until: status.certificate_until,
                from: std::mem::take(&mut status.from),
            };
        });
    }
}

/// Records the address and certificate of a connection.
fn connected(status: &mut NodeStatus, peer: &Peer) {
    (status.last_seen, status.certificate_until) = (crate::controller::now() / 1000, peer.until);
    status.from = peer.from.map(|from| from.ip().to_canonical().to_string()).unwrap_or_default();
}

/// The CAs that a node trusts and the issuer of its certificate, as it reports them.
#[derive(Debug, Default)]
pub(super) struct Identity {
    pub(super) authorities: BTreeSet<String>,
    pub(super) issuer: String,
}

impl Identity {
    pub(super) fn of(report: &Report) -> Self {
        let digest = |bytes: &Bytes| hex(&bytes[..bytes.len().min(64)]);
        let authorities = report.authorities.iter().take(MAX_TRUSTED).map(digest).collect();
        Self { authorities, issuer: digest(&report.issuer) }
    }
}

impl ConnectedNode {
    /// Records that the overlay does not list the node's program, so that the node keeps its document and receives no
    /// new one.
    pub(super) fn unlisted(&self, program: &str, revision: Revision, is_news: bool) {
        let refused = format!("program {program} is not in the overlay's `programs`");
        if is_news {
            let by = format!("node/{}", self.node);
            let event = Event { what: "follow", by: Some(&by), refused: Some(refused.clone()), ..Event::default() };
            self.push.audit.record(event);
        }
        let status = self.push.status_of(&self.node);
        if status.refused != refused || status.tried != revision {
            self.push.note(&self.node, |status| (status.refused, status.tried) = (refused, revision));
        }
    }
}

/// Limits the length of a node's text, and removes control characters.
fn shortened(text: &str) -> String {
    let end = text.floor_char_boundary(MAX_REASON);
    let text = if end < text.len() { format!("{} ...", &text[..end]) } else { text.to_owned() };
    crate::audit::visible(&text)
}

impl Drop for ConnectedNode {
    fn drop(&mut self) {
        self.push.note(&self.node, |status| {
            let count = if self.is_beside { &mut status.companions } else { &mut status.connections };
            *count = count.saturating_sub(1);
            status.last_seen = crate::controller::now() / 1000;
        });
    }
}
