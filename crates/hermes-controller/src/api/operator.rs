//! Operators and administrators of providers: list, create, renew and dismiss.
//!
//! In: requests of operators, and of administrators of providers. Out: certificates, and a list.
//! Never: rights beyond the caller's. An administrator only manages administrators of the same provider.

use axum::extract::{Extension, Path, Query, State};
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use http::StatusCode;
use serde::Deserialize;
use serde_json::json;

use super::{ApiState, Arc, BASE64, Caller, Duration, Event, Peer, Problem};
use crate::controller::{RequestKey, now};
use crate::document::Name;

/// The subject's name in the audit log.
fn called(name: &Name, provider: Option<&Name>) -> String {
    match provider {
        Some(provider) => format!("provider/{provider}/{name}"),
        None => format!("operator/{name}"),
    }
}

fn asking<'a>(caller: &'a Caller, peer: &'a Peer) -> RequestKey<'a> {
    RequestKey { key: &peer.key, name: &caller.name, provider: caller.provider.as_ref() }
}

/// The remaining lifetime of the caller's certificate.
fn left(peer: &Peer) -> Duration {
    let left = peer.until.saturating_sub(i64::try_from(now() / 1000).unwrap_or(i64::MAX));
    Duration::from_secs(u64::try_from(left).unwrap_or_default())
}

fn decoded(request: &str) -> Result<Vec<u8>, Problem> {
    BASE64.decode(request).map_err(|_| Problem::new(StatusCode::BAD_REQUEST, "request is not valid base64"))
}

/// Lists the operators and administrators whose rights do not exceed the caller's.
pub(super) async fn list(
    State(api): State<ApiState>,
    Extension(peer): Extension<Arc<Peer>>,
) -> Result<Response, Problem> {
    let caller = api.caller(&peer)?;
    let view = api.controller.view();
    let one = |operator: &crate::state::Operator| {
        json!({
            "name": operator.name,
            "provider": operator.provider,
            "key": operator.key,
            "until": operator.until / 1000,
        })
    };
    let all: Vec<_> = view.operators(caller.provider.as_ref()).map(one).collect();
    Ok(axum::Json(json!({ "operators": all })).into_response())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct ProviderOption {
    /// The provider of the administrator to dismiss. If it is absent, an operator dismisses an operator of the whole
    /// overlay, and an administrator one of the same provider.
    provider: Option<Name>,
}

/// Revokes all certificates of a name.
pub(super) async fn dismiss(
    State(api): State<ApiState>,
    Extension(peer): Extension<Arc<Peer>>,
    Path(name): Path<Name>,
    Query(ProviderOption { provider }): Query<ProviderOption>,
) -> Result<Response, Problem> {
    let caller = api.caller(&peer)?;
    let provider = provider.or_else(|| caller.provider.clone());
    let about = called(&name, provider.as_ref());
    if caller.provider.is_some() && caller.provider != provider {
        let problem = Problem::new(StatusCode::FORBIDDEN, format!("{} may not dismiss {about}", caller.by));
        return Err(api.refuse("dismiss", &caller, &peer, problem));
    }
    let dismissed = api.controller.dismiss(&caller.by, asking(&caller, &peer), (&name, provider.as_ref())).await;
    let event =
        Event { what: "dismiss", by: Some(&caller.by), from: peer.from, about: Some(about), ..Event::default() };
    match dismissed {
        Ok(certificates) => {
            api.audit.record(event);
            Ok(axum::Json(json!({ "certificates": certificates })).into_response())
        }
        Err(refused) => {
            api.audit.record(event.failed(&refused));
            Err(refused.into())
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct OperatorRequest {
    name: Name,
    /// The provider whose documents the new administrator may change. Absent for an operator, who may change all
    /// documents.
    provider: Option<Name>,
    /// PKCS #10 (DER), in base64.
    request: String,
    /// The lifetime in seconds.
    life: u64,
}

/// Issues a certificate for another operator or administrator. An administrator can only add one of the same provider.
pub(super) async fn make(
    State(api): State<ApiState>,
    Extension(peer): Extension<Arc<Peer>>,
    axum::Json(request): axum::Json<OperatorRequest>,
) -> Result<Response, Problem> {
    let caller = api.caller(&peer)?;
    let OperatorRequest { name, provider, request, life } = request;
    let about = called(&name, provider.as_ref());
    if caller.provider.is_some() && caller.provider != provider {
        let problem = Problem::new(StatusCode::FORBIDDEN, format!("{} may not create {about}", caller.by));
        return Err(api.refuse("operator", &caller, &peer, problem));
    }
    let view = api.controller.view();
    let providers = view.state.catalog.overlay().map(|(_, overlay)| &overlay.providers);
    if let Some(provider) = provider.as_ref().filter(|name| !providers.is_some_and(|all| all.contains_key(*name))) {
        let detail =
            format!("the overlay has no provider {provider}; name it in `providers` of the Overlay document first");
        return Err(api.refuse("operator", &caller, &peer, Problem::new(StatusCode::NOT_FOUND, detail)));
    }
    let request = decoded(&request).map_err(|problem| api.refuse("operator", &caller, &peer, problem))?;
    // The new certificate must not outlive the caller's certificate.
    let who = (&name, provider.as_ref());
    let life = Duration::from_secs(life).min(left(&peer));
    let made = api.controller.make_operator((&caller.by, Some(asking(&caller, &peer))), &request, who, life).await;
    let about = Some(about);
    let event = Event { what: "operator", by: Some(&caller.by), from: peer.from, about, ..Event::default() };
    let issued = api.done(&event, made)?;
    api.audit.record(event);
    let mut answer = json!({ "certificate": issued.certificate, "authorities": issued.authorities });
    if let Some(public) = api.controller.public() {
        answer["controller"] = public.into();
    }
    Ok(axum::Json(answer).into_response())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct RenewalRequest {
    /// PKCS #10 (DER), in base64.
    request: String,
}

/// Renews the caller's certificate with the CA that currently signs. The new certificate expires at the same time as
/// the earlier one.
pub(super) async fn renew(
    State(api): State<ApiState>,
    Extension(peer): Extension<Arc<Peer>>,
    axum::Json(RenewalRequest { request }): axum::Json<RenewalRequest>,
) -> Result<Response, Problem> {
    let caller = api.caller(&peer)?;
    let request = decoded(&request).map_err(|problem| api.refuse("operator-renew", &caller, &peer, problem))?;
    let life = left(&peer);
    let event = Event { what: "operator-renew", by: Some(&caller.by), from: peer.from, ..Event::default() };
    let renewed = api.controller.renew_operator(&caller.by, &request, asking(&caller, &peer), life).await;
    let issued = api.done(&event, renewed)?;
    api.audit.record(event);
    Ok(axum::Json(json!({ "certificate": issued.certificate, "authorities": issued.authorities })).into_response())
}
