//! Documents of the overlay: apply, delete, list and show.
//!
//! In: requests of operators and of administrators of providers. Out: the changed documents, and the status of each
//! node.
//! Never: a document of another provider.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::{Extension, Path, Query, State};
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::change_status::{ChangeStatus, await_nodes};
use super::problem::{Problem, fault_to_json};
use super::{ApiState, Caller, MAX_WAIT, rollout};
use crate::audit::{Audit, Event};
use crate::controller::{ApplyError, HELD, Outcome, Request, at_length};
use crate::document::{self, Key, Kind, Resource};
use crate::push::Peer;
use crate::store::Revision;

/// The maximum number of documents of a change that the audit log names.
const MAX_NAMED: usize = 100;
/// The maximum number of warnings in an answer.
const MAX_WARNINGS: usize = 100;

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct ApplyOptions {
    /// A dry run: only reports the effect.
    #[serde(default)]
    dry_run: bool,
    /// Fails if a document of the request changed after this revision.
    since: Option<Revision>,
    /// The maximum time to wait for nodes, in milliseconds.
    #[serde(default)]
    wait: u64,
    /// Sends the change to all nodes at once instead of in waves.
    #[serde(default)]
    now: bool,
    /// Deletes the caller's documents that are not in the request.
    #[serde(default)]
    prune: bool,
}

pub(super) async fn apply(
    State(api): State<ApiState>,
    Extension(peer): Extension<Arc<Peer>>,
    Query(options): Query<ApplyOptions>,
    body: Bytes,
) -> Result<Response, Problem> {
    let caller = api.caller(&peer)?;
    let text = std::str::from_utf8(&body).map_err(|_| {
        Problem::new(
            StatusCode::BAD_REQUEST,
            "the documents are not valid \
                                                                                      UTF-8",
        )
    })?;
    let put = at_length(|| document::read(text)).map_err(|faults| Problem::of_faults(&faults))?;
    for resource in &put {
        caller.must_own(&resource.key).map_err(|problem| api.refuse("apply", &caller, &peer, problem))?;
    }
    let ApplyOptions { dry_run: is_dry, now: is_now, since, .. } = options;
    let delete = if options.prune { pruned(&api, &caller, &put)? } else { Vec::new() };
    if is_now && caller.provider.is_some() {
        let problem = Problem::new(StatusCode::FORBIDDEN, "only operators may use --now; leave it out");
        return Err(api.refuse("apply", &caller, &peer, problem));
    }
    let request = Request { by: caller.by.clone(), put, delete, since, is_dry, is_now, ..Request::default() };
    change(&api, (&caller, &peer), request, options.wait).await
}

/// Returns the caller's documents that are not in the request. The Overlay document is excluded, and for an operator
/// the documents of providers. If the request has no nodes, all nodes are excluded, because deleting a node revokes its
/// key.
fn pruned(api: &ApiState, caller: &Caller, put: &[Resource]) -> Result<Vec<Key>, Problem> {
    if put.is_empty() {
        let detail = "no documents: prune would delete all of them; name at least one";
        return Err(Problem::new(StatusCode::UNPROCESSABLE_ENTITY, detail));
    }
    let put: std::collections::HashSet<_> = put.iter().map(|resource| &resource.key).collect();
    let view = api.controller.view();
    let all = view.state.catalog.iter().map(|resource| &resource.key);
    let has_nodes = put.iter().any(|key| key.kind == Kind::Node);
    let is_meant = |key: &&Key| {
        key.kind != Kind::Overlay
            && (key.kind != Kind::Node || has_nodes)
            && key.provider == caller.provider
            && !put.contains(key)
            && caller.must_own(key).is_ok()
    };
    Ok(all.filter(is_meant).cloned().collect())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct DeleteOptions {
    #[serde(default)]
    dry_run: bool,
    since: Option<Revision>,
    #[serde(default)]
    wait: u64,
}

pub(super) async fn remove(
    State(api): State<ApiState>,
    Extension(peer): Extension<Arc<Peer>>,
    Path(key): Path<String>,
    Query(options): Query<DeleteOptions>,
) -> Result<Response, Problem> {
    let caller = api.caller(&peer)?;
    let key: Key = key.parse().map_err(|error: String| Problem::new(StatusCode::BAD_REQUEST, error))?;
    caller.must_own(&key).map_err(|problem| api.refuse("delete", &caller, &peer, problem))?;
    let request = Request {
        by: caller.by.clone(),
        delete: vec![key],
        since: options.since,
        is_dry: options.dry_run,
        ..Request::default()
    };
    change(&api, (&caller, &peer), request, options.wait).await
}

/// Writes the outcome of a change to the audit log.
fn record(audit: &Audit, from: Option<SocketAddr>, request: &Request, done: &Result<Outcome, ApplyError>) {
    let what = if request.put.is_empty() && !request.delete.is_empty() { "delete" } else { "apply" };
    let event = Event { what, by: Some(&request.by), from, ..Event::default() };
    let outcome = match done {
        Ok(outcome) => outcome,
        Err(refused) => return audit.record(event.failed(refused)),
    };
    let touched = outcome.created.iter().chain(&outcome.changed).chain(&outcome.deleted);
    let more = touched.clone().count().saturating_sub(MAX_NAMED);
    let mut documents: Vec<_> = touched.take(MAX_NAMED).map(ToString::to_string).collect();
    if more > 0 {
        documents.push(format!("and {more} more"));
    }
    if !(request.is_dry || documents.is_empty()) {
        audit.record(Event { revision: Some(outcome.revision), documents, ..event });
    }
}

async fn change(
    api: &ApiState,
    (caller, peer): (&Caller, &Peer),
    request: Request,
    wait: u64,
) -> Result<Response, Problem> {
    let is_dry = request.is_dry;
    let (controller, audit, from) = (api.controller.clone(), api.audit.clone(), peer.from);
    let made = async move {
        let done = controller.apply(&request).await;
        record(&audit, from, &request, &done);
        done
    };
    let outcome = api.owned(caller, made).await?.map_err(|refused| caller.problem(refused))?;
    let wait = Duration::from_millis(wait).min(MAX_WAIT);
    let nodes = if is_dry {
        let planned =
            |document: &Option<Bytes>| document.as_ref().map_or(ChangeStatus::Gone, |_| ChangeStatus::Planned);
        outcome.nodes.iter().map(|(node, document)| (node.clone(), planned(document))).collect()
    } else {
        await_nodes(api, &outcome, wait).await
    };
    let keys = |keys: &[Key]| keys.iter().map(ToString::to_string).collect::<Vec<_>>();
    let mut answer = json!({
        "revision": outcome.revision,
        "created": keys(&outcome.created),
        "changed": keys(&outcome.changed),
        "deleted": keys(&outcome.deleted),
    });
    if !outcome.still_draining.is_empty() {
        answer["still-draining"] = json!(outcome.still_draining);
    }
    let is_seen = |fault: &&document::Fault| fault.key.as_ref().is_some_and(|key| caller.may_see(key));
    let mut warnings: Vec<_> = outcome.warnings.iter().filter(is_seen).take(MAX_WARNINGS).map(fault_to_json).collect();
    if api.controller.view().is_held() {
        let problem = hermes_model::Problem { path: String::new(), message: HELD.to_owned() };
        warnings.push(fault_to_json(&document::Fault { key: None, number: None, problem }));
    }
    if !warnings.is_empty() {
        answer["warnings"] = warnings.into();
    }
    let view = api.controller.view();
    match (&view.state.failed, &view.state.rollout) {
        (Some((of, why)), _) if *of == outcome.revision => {
            // Only the operator sees which node failed.
            let why = if caller.provider.is_none() { why } else { "nodes failed after the change; ask the operator" };
            answer["rolled-back"] = why.into();
        }
        (_, Some(waved)) if waved.of == outcome.revision && caller.provider.is_none() => {
            answer["rollout"] = rollout::to_json(&view);
        }
        _ => {}
    }
    // Nodes belong to the operator. A provider receives only their number.
    if caller.provider.is_none() {
        answer["nodes"] = json!(nodes);
    } else {
        answer["nodes-touched"] = nodes.len().into();
    }
    Ok(axum::Json(answer).into_response())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct ListOptions {
    kind: Option<String>,
}

#[derive(Serialize)]
struct Listed<'a> {
    revision: Revision,
    document: &'a Resource,
}

pub(super) async fn list(
    State(api): State<ApiState>,
    Extension(peer): Extension<Arc<Peer>>,
    Query(options): Query<ListOptions>,
) -> Result<Response, Problem> {
    let caller = api.caller(&peer)?;
    let kind = options.kind.map(|kind| kind.parse::<Kind>()).transpose();
    let kind = kind.map_err(|error| Problem::new(StatusCode::BAD_REQUEST, error))?;
    let view = api.controller.view();
    let state = &view.state;
    let wanted = state
        .catalog
        .iter()
        .filter(|resource| caller.may_see(&resource.key) && kind.is_none_or(|kind| kind == resource.key.kind));
    let listed = wanted.map(|resource| Listed {
        revision: state.changed.get(&resource.key).copied().unwrap_or_default(),
        document: resource,
    });
    Ok(axum::Json(json!({ "revision": state.revision, "documents": listed.collect::<Vec<_>>() })).into_response())
}

pub(super) async fn one(
    State(api): State<ApiState>,
    Extension(peer): Extension<Arc<Peer>>,
    Path(key): Path<String>,
) -> Result<Response, Problem> {
    let caller = api.caller(&peer)?;
    let key: Key = key.parse().map_err(|error: String| Problem::new(StatusCode::BAD_REQUEST, error))?;
    let view = api.controller.view();
    let found = view.state.catalog.get(&key).filter(|_| caller.may_see(&key));
    let document = found.ok_or_else(|| {
        Problem::new(StatusCode::NOT_FOUND, format!("{key} not found; `hermes overlay export` prints all documents"))
    })?;
    let revision = view.state.changed.get(&key).copied().unwrap_or_default();
    Ok(axum::Json(Listed { revision, document }).into_response())
}
