//! The API for a store that has lost changes: whether documents are withheld from nodes, and an operator's
//! confirmation.
//!
//! In: requests of operators of the whole overlay. Out: the state, and the nodes that have not connected yet.
//! Never: an answer to a provider.

use axum::extract::{Extension, State};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::{ApiState, Arc, Event, Peer, Problem, StateView};
use crate::document::Name;

/// The detail with which a provider's request is refused.
const WHOSE: &str = "only operators of the whole overlay may see or confirm the store";
/// The maximum number of nodes in an answer.
const MAX_NAMED: usize = 100;

fn to_json(api: &ApiState, view: &StateView) -> Value {
    let is_back = |node: &Name| api.push.status_of(node).is_back();
    let missing = view.missing(is_back).take(MAX_NAMED).map(ToString::to_string);
    let missing: Vec<_> = if view.is_held() { missing.collect() } else { Vec::new() };
    json!({
        "revision": view.state.revision,
        "unconfirmed": view.is_held(),
        "behind": view.state.behind,
        "missing": missing,
    })
}

pub(super) async fn show(
    State(api): State<ApiState>,
    Extension(peer): Extension<Arc<Peer>>,
) -> Result<Response, Problem> {
    api.operator(&peer, "restored", WHOSE)?;
    Ok(axum::Json(to_json(&api, &api.controller.view())).into_response())
}

/// Confirms the content of the store, so that nodes receive documents again.
pub(super) async fn confirm(
    State(api): State<ApiState>,
    Extension(peer): Extension<Arc<Peer>>,
) -> Result<Response, Problem> {
    let caller = api.operator(&peer, "confirm", WHOSE)?;
    let event = Event { what: "confirm", by: Some(&caller.by), from: peer.from, ..Event::default() };
    match api.controller.confirm(&caller.by).await {
        Ok(revision) => {
            api.audit.record(Event { revision: Some(revision), ..event });
            Ok(axum::Json(to_json(&api, &api.controller.view())).into_response())
        }
        Err(refused) => {
            api.audit.record(event.failed(&refused));
            Err(refused.into())
        }
    }
}
