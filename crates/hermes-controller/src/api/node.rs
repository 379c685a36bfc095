//! Nodes: their status, their tokens and their revocation.
//!
//! In: requests of operators of the whole overlay. Out: the status that the state and the nodes report, and tokens.
//! Never: an answer to a provider.

use axum::extract::{Extension, Path, Query, State};
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use serde::Deserialize;
use serde_json::json;

use super::{ApiState, Arc, Duration, Event, MAX_WAIT, Peer, Problem, StateView, hex, sha256};
use crate::document::{self, Name};
use crate::node_status::NodeStatus;

/// The default lifetime of a token, and the minimum.
const TOKEN_LIFE: Duration = Duration::from_secs(24 * 3600);
const MIN_TOKEN_LIFE: Duration = Duration::from_secs(1);
/// The detail with which a provider's request is refused.
const WHOSE: &str = "only operators of the whole overlay may manage nodes and tokens";

pub(super) async fn list(
    State(api): State<ApiState>,
    Extension(peer): Extension<Arc<Peer>>,
) -> Result<Response, Problem> {
    api.operator(&peer, "nodes", WHOSE)?;
    let view = api.controller.view();
    let node = |(name, document): (&Name, &document::Node)| standing(&view, name, document, &api.push.status_of(name));
    let all: Vec<_> = view.state.catalog.nodes().map(node).collect();
    Ok(axum::Json(json!({ "revision": view.state.revision, "nodes": all })).into_response())
}

/// The status of a node as JSON.
fn standing(view: &StateView, name: &Name, document: &document::Node, status: &NodeStatus) -> serde_json::Value {
    let wanted = view.document(name).map(|document| hex(&sha256(document)));
    json!({
        "name": name,
        "role": document.role,
        "enrolled": view.state.members.contains_key(name),
        "revoked": view.state.catalog.revoked().any(|revoked| revoked.node == *name),
        "connected": status.connections > 0,
        "current": wanted.as_ref() == Some(&status.running),
        "draining": document.is_draining(),
        "sessions": status.sessions,
        "unhealthy": status.unhealthy,
        "revision": view.watched(name).given.since,
        "refused": status.refused,
        "version": status.version,
        "program": status.program,
        "address": document.address.as_ref().map(ToString::to_string),
        "from": Some(&status.from).filter(|from| !from.is_empty()),
        "last-seen": Some(status.last_seen).filter(|seconds| *seconds > 0),
        "certificate-until": Some(status.certificate_until).filter(|seconds| *seconds > 0),
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct NodeOptions {
    /// The maximum time to wait until the number of sessions differs from `sessions`, in milliseconds.
    #[serde(default)]
    wait: u64,
    sessions: Option<u64>,
}

/// Revokes a node's key. The node's document remains, so that the node can enrol again with a token.
pub(super) async fn revoke(
    State(api): State<ApiState>,
    Extension(peer): Extension<Arc<Peer>>,
    Path(name): Path<Name>,
) -> Result<Response, Problem> {
    let caller = api.operator(&peer, "revoke", WHOSE)?;
    let about = Some(format!("node {name}"));
    let event = Event { what: "revoke", by: Some(&caller.by), from: peer.from, about, ..Event::default() };
    api.done(&event, api.controller.expel(&caller.by, &name).await)?;
    api.audit.record(event);
    Ok(axum::Json(json!({ "revision": api.controller.view().state.revision })).into_response())
}

/// Returns a node's status, its document, and the services that still need the node.
pub(super) async fn show(
    State(api): State<ApiState>,
    Extension(peer): Extension<Arc<Peer>>,
    Path(name): Path<Name>,
    Query(options): Query<NodeOptions>,
) -> Result<Response, Problem> {
    api.operator(&peer, "node", WHOSE)?;
    let deadline = tokio::time::Instant::now() + Duration::from_millis(options.wait).min(MAX_WAIT);
    let mut said = api.push.said();
    loop {
        said.borrow_and_update();
        let view = api.controller.view();
        let missing = || {
            Problem::new(StatusCode::NOT_FOUND, format!("node {name} not found; `hermes node list` shows all nodes"))
        };
        let document = view.state.catalog.node(&name).ok_or_else(missing)?;
        let status = api.push.status_of(&name);
        if options.sessions == Some(status.sessions)
            && status.connections > 0
            && let Ok(Ok(())) = tokio::time::timeout_at(deadline, said.changed()).await
        {
            continue;
        }
        let mut answer = standing(&view, &name, document, &status);
        answer["needed-by"] = json!(view.needing(&name).iter().map(ToString::to_string).collect::<Vec<_>>());
        let compiled = view.document(&name).map(|document| serde_json::from_slice::<serde_json::Value>(document));
        answer["document"] = compiled.and_then(Result::ok).unwrap_or_default();
        return Ok(axum::Json(answer).into_response());
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct TokenRequest {
    node: Name,
    /// The lifetime in seconds.
    life: Option<u64>,
}

pub(super) async fn token(
    State(api): State<ApiState>,
    Extension(peer): Extension<Arc<Peer>>,
    axum::Json(request): axum::Json<TokenRequest>,
) -> Result<Response, Problem> {
    let caller = api.operator(&peer, "token", WHOSE)?;
    let life = request.life.map_or(TOKEN_LIFE, Duration::from_secs);
    if life < MIN_TOKEN_LIFE {
        let problem = Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "token lifetime too short; expected at least 1s");
        return Err(api.refuse("token", &caller, &peer, problem));
    }
    let about = Some(format!("token of node {}", request.node));
    let event = Event { what: "token", by: Some(&caller.by), from: peer.from, about, ..Event::default() };
    let ticket = api.done(&event, api.controller.create_token(&caller.by, &request.node, life).await)?;
    let about = Some(format!("token {} of node {}", ticket.id, request.node));
    api.audit.record(Event { about, ..event });
    Ok(axum::Json(json!({ "token": ticket.reveal() })).into_response())
}
