//! What goes out to nodes in waves: how far it is, and its end before its time.

use axum::extract::{Extension, State};
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use serde_json::{Value, json};

use super::{Arc, Asker, Desk, Event, Peer, Problem};
use crate::controller::{ApplyError, StateView};
use crate::state::owner_of;

/// What is told of it; `of` is null where there is nothing.
pub(super) fn told(view: &StateView) -> Value {
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

/// What a provider is told.
const WHOSE: &str = "what goes out to nodes is the operator's";

pub(super) async fn show(State(desk): State<Desk>, Extension(peer): Extension<Arc<Peer>>) -> Result<Response, Problem> {
    desk.operator(&peer, "rollout", WHOSE)?;
    Ok(axum::Json(told(&desk.controller.view())).into_response())
}

/// All nodes have it at once.
pub(super) async fn finish(
    State(desk): State<Desk>,
    Extension(peer): Extension<Arc<Peer>>,
) -> Result<Response, Problem> {
    let (asker, of) = going(&desk, &peer, "finish")?;
    let done = desk.controller.finish(&asker.by, of).await;
    end(&desk, (&asker, &peer), "finish", of, done)
}

/// It is taken back.
pub(super) async fn cancel(
    State(desk): State<Desk>,
    Extension(peer): Extension<Arc<Peer>>,
) -> Result<Response, Problem> {
    let asker = desk.asker(&peer)?;
    let waved = desk.controller.view().state.rollout.clone();
    let is_own = waved.as_ref().is_some_and(|waved| owner_of(&waved.by) == asker.provider);
    let (asker, of) = match waved {
        // A provider may cancel its own rollout.
        Some(waved) if is_own && asker.provider.is_some() => (asker, waved.of),
        _ => going(&desk, &peer, "cancel")?,
    };
    let done = desk.controller.take_back(&asker.by, of, format!("{} has canceled it", asker.by)).await;
    end(&desk, (&asker, &peer), "cancel", of, done)
}

fn going(desk: &Desk, peer: &Peer, what: &str) -> Result<(Asker, u64), Problem> {
    let asker = desk.operator(peer, what, WHOSE)?;
    let view = desk.controller.view();
    let Some(waved) = &view.state.rollout else {
        let problem = Problem::new(StatusCode::NOT_FOUND, "nothing goes out in waves now");
        return Err(desk.refuse(what, &asker, peer, problem));
    };
    Ok((asker, waved.of))
}

fn end(
    desk: &Desk,
    (asker, peer): (&Asker, &Peer),
    what: &str,
    of: u64,
    done: Result<(), ApplyError>,
) -> Result<Response, Problem> {
    let about = Some(format!("revision {of}"));
    let event = Event { what, by: Some(&asker.by), from: peer.from, about, ..Event::default() };
    desk.done(&event, done)?;
    desk.audit.tell(event);
    let answer = match asker.provider {
        None => told(&desk.controller.view()),
        // Node documents belong to the operator.
        Some(_) => {
            json!({ "of": null, "failed": { "revision": of, "reason": format!("{} has canceled it", asker.by) } })
        }
    };
    Ok(axum::Json(answer).into_response())
}
