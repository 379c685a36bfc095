//! `hermes explain --controller`: the decision of each node on a path, by the controller's documents.
//!
//! In: the first node of a session, and its facts there. Out: each node's explanation, up to the node that ends or
//! denies the session. Never: the live state of nodes. The first of several next nodes is followed, and the others are
//! listed.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use hermes_controller::document::Name;
use hermes_model::Trust;
use hermes_model::check::check_json;
use hermes_model::document::Document;
use hermes_model::document::scalar::OneOrMany;
use hermes_model::document::upstream::Endpoint;
use hermes_model::explain::Explanation;
use hermes_model::facts::Peer;
use hermes_model::snapshot::{Listener, Role, Snapshot};
use hermes_model::trust::settle;
use http::Method;
use serde::Serialize;
use serde_json::Value;

use super::Explain;
use crate::operator::{Access, block_on};

/// Maximum number of nodes on a path; a longer path is a loop.
const MAX_HOPS: usize = 32;

/// The explanation of one node.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Hop {
    node: String,
    #[serde(flatten)]
    pub(super) explanation: Explanation,
    /// Next nodes, the first of which is followed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    next: Vec<String>,
    /// Next nodes while none of `next` is up.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    backup: Vec<String>,
}

/// A node's document, and its snapshot.
struct Place {
    document: Document,
    snapshot: Snapshot,
}

impl Place {
    fn of(access: &Access, node: &str) -> anyhow::Result<Self> {
        let node: Name = node.parse().map_err(anyhow::Error::msg)?;
        let answer = block_on(access.get(Method::GET, &format!("/v1/nodes/{node}"), Vec::new()))?;
        let document: Document = serde_json::from_value(answer["document"].clone())
            .with_context(|| format!("the controller has no document of node {node} that this program can read"))?;
        let checked = check_json(answer["document"].to_string().as_bytes(), Path::new("."));
        let snapshot = checked.map_err(|problems| {
            let said: Vec<_> = problems.iter().map(ToString::to_string).collect();
            anyhow::anyhow!("the document of node {node} cannot run here: {}", said.join("; "))
        })?;
        Ok(Self { document, snapshot: snapshot.snapshot })
    }

    /// Returns the nodes of an upstream, and its backup nodes.
    fn next(&self, upstream: &str) -> (Vec<String>, Vec<String>) {
        let Some(upstream) = self.document.upstreams.iter().find(|one| one.name == upstream) else {
            return Default::default();
        };
        let kept = |endpoints: &OneOrMany<Endpoint>| -> Vec<String> {
            let node = |endpoint: &Endpoint| match endpoint {
                Endpoint::Node(node) => Some(node.clone()),
                Endpoint::Address(_) => None,
            };
            endpoints.iter().filter_map(node).collect()
        };
        match &upstream.tls {
            // An upstream with TLS lists the names of its nodes in the order of its endpoints.
            Some(tls) => {
                let (next, backup) = tls.node.0.split_at(tls.node.0.len().saturating_sub(upstream.backup.0.len()));
                (next.to_vec(), backup.to_vec())
            }
            None => ([kept(&upstream.endpoints), upstream.node.0.clone()].concat(), kept(&upstream.backup)),
        }
    }

    /// Returns the identity that this node's certificate proves.
    fn peer(&self, overlay: &Arc<str>) -> Peer {
        Peer {
            overlay: overlay.clone(),
            node: Some(Arc::from(&*self.document.node)),
            standalone: self.document.role == Role::Standalone,
            ..Peer::default()
        }
    }

    /// Returns the listener for other nodes.
    fn overlay_listener(&self) -> anyhow::Result<&Listener> {
        let mut listeners = self.snapshot.listeners.iter();
        let found = listeners.find(|listener| &*listener.name == hermes_controller::compile::OVERLAY);
        // A node with reverse connections is reached over those.
        let found = found.or_else(|| self.snapshot.listeners.iter().find(|listener| listener.dial.is_some()));
        found
            .map(|listener| &**listener)
            .with_context(|| format!("node {} accepts no sessions of other nodes", self.document.node))
    }
}

/// Returns the first node: the named one, or the only one of the user.
fn first(explain: &Explain) -> anyhow::Result<String> {
    if let Some(node) = &explain.node {
        return Ok(node.clone());
    }
    let Some(user) = &explain.user else {
        bail!("missing start of the session: add --node NAME, or --user NAME of a user with one node");
    };
    let found = block_on(explain.access()?.get(Method::GET, &format!("/v1/documents/User/{user}"), Vec::new()))?;
    match &found["document"]["nodes"] {
        Value::String(node) => Ok(node.clone()),
        Value::Array(nodes) if nodes.len() == 1 => Ok(nodes[0].as_str().unwrap_or_default().to_owned()),
        _ => bail!("user {user} has several nodes; choose one with --node NAME"),
    }
}

/// Follows a session from its first node.
///
/// # Errors
/// The node does not exist, or the session cannot start there.
pub(super) fn follow(explain: &Explain) -> anyhow::Result<Vec<Hop>> {
    let wanted = explain.wanted(None)?;
    let mut node = first(explain)?;
    let access = explain.access()?;
    let mut place = Place::of(&access, &node)?;
    let mut listener = explain.listener(&place.snapshot, wanted)?.clone();
    let mut facts = explain.facts(&place.snapshot, &listener, None)?;
    let overlays = block_on(access.get(Method::GET, "/v1/documents?kind=Overlay", Vec::new()))?;
    let overlay: Arc<str> = Arc::from(overlays["documents"][0]["document"]["name"].as_str().unwrap_or_default());
    let mut hops: Vec<Hop> = Vec::new();
    loop {
        let mut explanation = hermes_model::explain_arrival(facts.clone(), &listener, &place.snapshot, &|_| false);
        explanation.capture = wanted.and_then(|wanted| super::captured(&place.snapshot, &listener, wanted));
        let taken = explanation.route.as_deref().filter(|_| explanation.decision == "act");
        let route = taken.and_then(|name| place.snapshot.routes.iter().find(|route| &*route.name == name));
        let upstream = route.and_then(|route| Some(route.action.upstreams().next()?.name.to_string()));
        let (next, backup) = upstream.map(|upstream| place.next(&upstream)).unwrap_or_default();
        let followed = next.iter().find(|next| hops.iter().all(|hop| hop.node != **next) && **next != node).cloned();
        hops.push(Hop { node: node.clone(), explanation, next, backup });
        let Some(followed) = followed else { return Ok(hops) };
        if hops.len() == MAX_HOPS {
            bail!("the path has more than {MAX_HOPS} nodes; run `hermes check` on your overlay documents");
        }
        // Rewrites apply at the end of a session, not between nodes.
        settle(&mut facts, &listener, &place.snapshot).map_err(|refusal| anyhow::anyhow!("{refusal}"))?;
        facts.user = None;
        facts.trust = Trust::Certified(Arc::new(place.peer(&overlay)));
        node = followed;
        place = Place::of(&access, &node)?;
        listener = place.overlay_listener()?.clone();
        facts.listener = listener.name.clone();
    }
}

/// Formats the hops as text.
pub(super) fn render(hops: &[Hop]) -> String {
    let one = |hop: &Hop| {
        let lines: String = hop.explanation.to_string().lines().map(|line| format!("  {line}\n")).collect();
        let next = match &hop.next[..] {
            [] => String::new(),
            [next] => format!("  next      {next}\n"),
            [next, others @ ..] => format!("  next      {next} (or {})\n", others.join(", ")),
        };
        let backup = match &hop.backup[..] {
            [] => String::new(),
            backup => format!("  else      {}\n", backup.join(", ")),
        };
        format!("{}\n{lines}{next}{backup}", hop.node)
    };
    hops.iter().map(one).collect()
}
