//! The rollout in waves: its progress, its early end, and its rollback.
//!
//! In: requests of operators. Out: the state of the rollout.

use axum::extract::{Extension, State};
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use serde_json::{Value, json};

use super::{ApiState, Arc, Caller, Event, Peer, Problem};
use crate::controller::{ApplyError, StateView};
use crate::state::owner_of;

/// Returns the rollout as JSON; `of` is null if no rollout is in progress.
pub(super) fn to_json(view: &StateView) -> Value {
    let failed = view.state.failed.as_ref().map(|(revision, why)| json!({ "revision": revision, "reason": why }));
    let (waved, rollout) = (view.state.rollout.as_ref(), view.rollout());
    json!({
        "of": waved.map(|waved| waved.of),
        "step": waved.map(|waved| waved.step),
        "remaining": rollout.map(|rollout| rollout.remaining()),
        "nodes": rollout.map(|rollout| rollout.current().keys().collect::<Vec<_>>()),
        "failed": failed,
    })
}

/// The detail with which a provider's request is refused.
const WHOSE: &str = "only operators of the whole overlay may manage rollouts";

pub(super) async fn show(
    State(api): State<ApiState>,
    Extension(peer): Extension<Arc<Peer>>,
) -> Result<Response, Problem> {
    api.operator(&peer, "rollout", WHOSE)?;
    Ok(axum::Json(to_json(&api.controller.view())).into_response())
}

/// Ends the waves, and sends the change to all remaining nodes at once.
pub(super) async fn finish(
    State(api): State<ApiState>,
    Extension(peer): Extension<Arc<Peer>>,
) -> Result<Response, Problem> {
    let (caller, of) = going(&api, &peer, "finish")?;
    let done = api.controller.finish(&caller.by, of).await;
    end(&api, (&caller, &peer), "finish", of, done)
}

/// Rolls the change back.
pub(super) async fn cancel(
    State(api): State<ApiState>,
    Extension(peer): Extension<Arc<Peer>>,
) -> Result<Response, Problem> {
    let caller = api.caller(&peer)?;
    let waved = api.controller.view().state.rollout.clone();
    let is_own = waved.as_ref().is_some_and(|waved| owner_of(&waved.by) == caller.provider);
    let (caller, of) = match waved {
        // A provider may cancel its own rollout.
        Some(waved) if is_own && caller.provider.is_some() => (caller, waved.of),
        _ => going(&api, &peer, "cancel")?,
    };
    let done = api.controller.roll_back(&caller.by, of, format!("canceled by {}", caller.by)).await;
    end(&api, (&caller, &peer), "cancel", of, done)
}

fn going(api: &ApiState, peer: &Peer, what: &str) -> Result<(Caller, u64), Problem> {
    let caller = api.operator(peer, what, WHOSE)?;
    let view = api.controller.view();
    let Some(waved) = &view.state.rollout else {
        let problem = Problem::new(StatusCode::NOT_FOUND, "no rollout in progress");
        return Err(api.refuse(what, &caller, peer, problem));
    };
    Ok((caller, waved.of))
}

fn end(
    api: &ApiState,
    (caller, peer): (&Caller, &Peer),
    what: &str,
    of: u64,
    done: Result<(), ApplyError>,
) -> Result<Response, Problem> {
    let about = Some(format!("revision {of}"));
    let event = Event { what, by: Some(&caller.by), from: peer.from, about, ..Event::default() };
    api.done(&event, done)?;
    api.audit.record(event);
    let answer = match caller.provider {
        None => to_json(&api.controller.view()),
        // A provider does not see the nodes, because they belong to the operator.
        Some(_) => {
            json!({ "of": null, "failed": { "revision": of, "reason": format!("canceled by {}", caller.by) } })
        }
    };
    Ok(axum::Json(answer).into_response())
}
