//! The overlay's CA, and its rotation.
//!
//! In: requests of operators. Out: the CAs, and the progress of each node.

use axum::body::Bytes;
use axum::extract::{Extension, Query, State};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{ApiState, Arc, Caller, Event, Peer, Problem};
use crate::ca::{CertificateInfo, facts};
use crate::controller::{ApplyError, StateView, now};
use crate::push::{Blocker, Progress};

/// The maximum size of an imported CA, in bytes.
const MAX_IMPORT_BYTES: usize = 256 << 10;
/// The maximum number of nodes named in one message.
const MAX_NAMED: usize = 10;

/// The detail with which a provider's request is refused.
const WHOSE: &str = "only operators of the whole overlay may manage the CA";

/// A CA as JSON.
fn one(authority: &crate::ca::Ca) -> Value {
    let view = facts(&authority.certificate);
    let root = facts(&authority.root()).map(|root| root.fingerprint).unwrap_or_default();
    match view {
        Ok(CertificateInfo { fingerprint, subject, until, .. }) => json!({
            "subject": subject,
            "fingerprint": fingerprint,
            "root": root,
            "until": until,
            "sealed": authority.is_sealed(),
        }),
        Err(_) => Value::Null,
    }
}

fn to_json(api: &ApiState, view: &StateView) -> Value {
    let state = &view.state;
    let rotation = state.rotation.as_deref();
    let (stage, next, leaving) = match rotation {
        None => ("steady", Value::Null, Value::Null),
        Some(rotation) if rotation.is_leaving => ("leaving", Value::Null, one(&rotation.other)),
        Some(rotation) => ("announced", one(&rotation.other), Value::Null),
    };
    let former = state.retired.iter().filter(|retired| retired.until > now());
    let former = former.filter_map(|retired| {
        let CertificateInfo { subject, fingerprint, .. } = facts(&retired.certificate).ok()?;
        Some(json!({ "subject": subject, "fingerprint": fingerprint, "until": retired.until / 1000 }))
    });
    json!({
        "revision": state.revision,
        "stage": stage,
        "signs": state.authority.as_ref().map_or(Value::Null, one),
        "next": next,
        "leaving": leaving,
        "former": former.collect::<Vec<_>>(),
        "nodes": api.push.progress(view),
    })
}

pub(super) async fn show(
    State(api): State<ApiState>,
    Extension(peer): Extension<Arc<Peer>>,
) -> Result<Response, Problem> {
    api.operator(&peer, "ca-show", WHOSE)?;
    Ok(axum::Json(to_json(&api, &api.controller.view())).into_response())
}

/// An imported CA.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Imported {
    /// PEM: the CA's certificate, then the certificates of its issuers up to the root.
    certificates: String,
    /// The CA's private key (PEM).
    key: String,
}

/// Begins a rotation to a new or an imported CA.
pub(super) async fn rotate(
    State(api): State<ApiState>,
    Extension(peer): Extension<Arc<Peer>>,
    body: Bytes,
) -> Result<Response, Problem> {
    let what = if body.is_empty() { "ca-rotate" } else { "ca-import" };
    let caller = api.operator(&peer, what, WHOSE)?;
    let done = async {
        let made = if body.is_empty() {
            crate::ca::Ca::generate(std::time::SystemTime::now())
        } else {
            let imported =
                (body.len() <= MAX_IMPORT_BYTES).then(|| serde_json::from_slice::<Imported>(&body).ok()).flatten();
            let imported = imported.ok_or_else(|| {
                ApplyError::Unusable(
                    "invalid request: expected {\"certificates\": PEM, \"key\": PEM}, or too large".to_owned(),
                )
            })?;
            crate::ca::Ca::import(&imported.certificates, &imported.key, std::time::SystemTime::now())
        };
        let next = made.map_err(|error| ApplyError::Unusable(error.to_string()))?;
        let about = facts(&next.certificate).map(|facts| format!("{} {}", facts.subject, facts.fingerprint)).ok();
        Ok((api.controller.rotate(&caller.by, next).await?, about))
    };
    end(&api, (&caller, &peer), what, done.await)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct FinishOptions {
    /// Proceeds although some nodes are not ready.
    #[serde(default)]
    force: bool,
}

/// Ends the rotation: the old CA is no longer trusted.
pub(super) async fn finish(
    State(api): State<ApiState>,
    Extension(peer): Extension<Arc<Peer>>,
    Query(options): Query<FinishOptions>,
) -> Result<Response, Problem> {
    let caller = api.operator(&peer, "ca-finish", WHOSE)?;
    let done = async {
        let view = api.controller.view();
        let since = view.state.rotation.as_ref().map_or(0, |rotation| rotation.since);
        let lacking = lacking(&api.push.progress(&view));
        if let Some(lacking) = lacking.filter(|_| !options.force) {
            return Err(ApplyError::NotReady(format!(
                "not all nodes are ready: {lacking}. Wait, or proceed with --force: other nodes then accept such a \
                 node only once it has connected to a controller again, while its certificate is valid"
            )));
        }
        Ok((api.controller.retire(&caller.by, since, options.force).await?, None))
    };
    end(&api, (&caller, &peer), "ca-finish", done.await)
}

/// Returns a message that names the nodes that are not ready to finish the rotation; `None` if all are ready.
fn lacking(progress: &[Progress]) -> Option<String> {
    let all: Vec<_> = progress.iter().filter(|node| !node.lacks.0.is_empty()).collect();
    let named = all.iter().take(MAX_NAMED).map(|node| {
        let Blocker(why) = &node.lacks;
        format!("node {} {why}", node.name)
    });
    let mut text = named.collect::<Vec<_>>().join("; ");
    if all.len() > MAX_NAMED {
        text += &format!("; and {} more", all.len() - MAX_NAMED);
    }
    (!all.is_empty()).then_some(text)
}

/// Cancels the rotation: the old CA signs again.
pub(super) async fn cancel(
    State(api): State<ApiState>,
    Extension(peer): Extension<Arc<Peer>>,
) -> Result<Response, Problem> {
    let caller = api.operator(&peer, "ca-cancel", WHOSE)?;
    let done = api.controller.cancel_rotation(&caller.by).await.map(|revision| (revision, None));
    end(&api, (&caller, &peer), "ca-cancel", done)
}

fn end(
    api: &ApiState,
    (caller, peer): (&Caller, &Peer),
    what: &str,
    done: Result<(u64, Option<String>), ApplyError>,
) -> Result<Response, Problem> {
    let event = Event { what, by: Some(&caller.by), from: peer.from, ..Event::default() };
    match done {
        Ok((revision, about)) => {
            api.audit.record(Event { revision: Some(revision), about, ..event });
            Ok(axum::Json(to_json(api, &api.controller.view())).into_response())
        }
        Err(refused) => {
            api.audit.record(event.failed(&refused));
            Err(refused.into())
        }
    }
}
