//! The REST API for people and programs: documents, nodes, operators, rollouts and the CA.
//!
//! In: authenticated HTTP requests. Out: JSON; errors as problem details (RFC 9457).
//! Never: data of another owner. An operator sees all documents, an administrator of a provider only the provider's.

mod ca;
mod change_status;
mod documents;
mod history;
mod node;
mod operator;
mod problem;
mod rollout;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Extension, State};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use base64::prelude::BASE64_STANDARD as BASE64;
use http::{HeaderValue, StatusCode, header};
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinSet;

use self::problem::Problem;
use crate::audit::{Audit, Event};
use crate::ca::CertificateRole;
use crate::controller::{ApplyError, Controller, StateView};
use crate::digest::{hex, sha256};
use crate::document::{self, Key, Name};
use crate::push::{Peer, Push};

/// The maximum size of a request, in bytes.
const MAX_BODY: usize = 64 << 20;
/// Requests of at most `SMALL_BODY` bytes are read without a permit. At most `LARGE_AT_ONCE` larger ones are read at
/// the same time, counted separately for operators and for providers.
const SMALL_BODY: u64 = 1 << 20;
const LARGE_AT_ONCE: usize = 2;
/// The maximum number of concurrent changes, counted separately for operators and for providers. Further changes wait.
const MAX_CHANGES: usize = 64;
/// The maximum time that a request may wait for nodes.
const MAX_WAIT: Duration = Duration::from_secs(60);

#[derive(Clone)]
struct ApiState {
    controller: Arc<Controller>,
    push: Arc<Push>,
    audit: Arc<Audit>,
    /// Permits for large requests of the operator, and for those of providers.
    large: Arc<[Semaphore; 2]>,
    /// Permits for changes by the operator, and for those by providers.
    changes: Arc<[Arc<Semaphore>; 2]>,
    /// The tasks of changes that are being made.
    tasks: Arc<Mutex<JoinSet<()>>>,
}

/// The router with all paths.
pub(crate) fn router(controller: Arc<Controller>, push: Arc<Push>, audit: Arc<Audit>) -> Router {
    let api = ApiState {
        controller,
        push,
        audit,
        large: Arc::new([Semaphore::new(LARGE_AT_ONCE), Semaphore::new(LARGE_AT_ONCE)]),
        changes: Arc::new([MAX_CHANGES; 2].map(|permits| Arc::new(Semaphore::new(permits)))),
        tasks: Arc::default(),
    };
    // The layer `finish` does not apply to these routes. Their responses wait for nodes, but only the change itself
    // needs a task that completes.
    let documents = Router::new()
        .route("/v1/apply", post(documents::apply))
        .route("/v1/documents", get(documents::list))
        .route("/v1/documents/{*key}", get(documents::one).delete(documents::remove));
    Router::new()
        .route("/v1/nodes", get(node::list))
        .route("/v1/rollout", get(rollout::show).post(rollout::finish).delete(rollout::cancel))
        .route("/v1/nodes/{name}", get(node::show).delete(node::revoke))
        .route("/v1/backup", get(backup))
        .route("/v1/restored", get(history::show).post(history::confirm))
        .route("/v1/tokens", post(node::token))
        .route("/v1/operators", get(operator::list).post(operator::make))
        .route("/v1/operators/{name}", delete(operator::dismiss))
        .route("/v1/certificate", post(operator::renew))
        .route("/v1/authority", get(ca::show).post(ca::rotate).delete(ca::cancel))
        .route("/v1/authority/finish", post(ca::finish))
        .route_layer(middleware::from_fn_with_state(api.clone(), finish))
        .merge(documents)
        .fallback(async || Problem::new(StatusCode::NOT_FOUND, "no such path"))
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .layer(middleware::from_fn_with_state(api.clone(), gate))
        .with_state(api)
}

/// The response header with the digest of the trusted CAs. A client that sees a new value fetches the new CA
/// certificates.
pub const TRUST: &str = "hermes-trust";
/// The maximum time for a request to arrive.
const ARRIVAL_TIMEOUT: Duration = Duration::from_secs(60);

/// Authenticates the caller before the body of the request is read.
async fn gate(State(api): State<ApiState>, request: axum::extract::Request, next: Next) -> Result<Response, Problem> {
    let peer = request.extensions().get::<Arc<Peer>>().cloned().unwrap_or_default();
    let may_ask = |caller: &Caller| caller.is_known(&api.controller.view(), &peer);
    if Caller::of(&peer).is_ok_and(|caller| !may_ask(&caller)) {
        // Another controller may have added this operator just now.
        api.controller.catch_up().await.map_err(ApplyError::from)?;
    }
    let caller = api.caller(&peer)?;
    let (parts, body) = request.into_parts();
    // Many large requests at once would exhaust the memory.
    let is_small = axum::body::HttpBody::size_hint(&body).upper().is_some_and(|bytes| bytes <= SMALL_BODY);
    let turn = match is_small {
        true => None,
        false => {
            // Providers have permits of their own, so that they cannot block the operator.
            let turns = &api.large[usize::from(caller.provider.is_some())];
            let busy = || Problem::new(StatusCode::SERVICE_UNAVAILABLE, "too many large requests; try again");
            Some(
                tokio::time::timeout(ARRIVAL_TIMEOUT, turns.acquire())
                    .await
                    .map_err(|_| busy())?
                    .map_err(|_| busy())?,
            )
        }
    };
    // The body is read completely before the response: otherwise a reset for unread data could overtake the response.
    let read = tokio::time::timeout(ARRIVAL_TIMEOUT, axum::body::to_bytes(body, MAX_BODY)).await;
    let late = |_| Problem::new(StatusCode::REQUEST_TIMEOUT, format!("request timeout after {ARRIVAL_TIMEOUT:?}"));
    let large = |_| {
        let detail = format!("request larger than {MAX_BODY} bytes, or incomplete; apply fewer documents at once");
        Problem::new(StatusCode::PAYLOAD_TOO_LARGE, detail)
    };
    let body = read.map_err(late)?.map_err(large)?;
    drop(turn);
    let mut response = next.run(axum::extract::Request::from_parts(parts, body.into())).await;
    let mark = api.controller.trust().borrow().mark();
    response.headers_mut().insert(TRUST, HeaderValue::from_str(&mark).unwrap_or(HeaderValue::from_static("")));
    Ok(response)
}

/// Runs each request except GET in a task of its own, so that its change completes even if the client resets its
/// stream.
async fn finish(State(api): State<ApiState>, request: axum::extract::Request, next: Next) -> Result<Response, Problem> {
    if request.method() == http::Method::GET {
        return Ok(next.run(request).await);
    }
    let peer = request.extensions().get::<Arc<Peer>>().cloned().unwrap_or_default();
    let caller = api.caller(&peer)?;
    api.owned(&caller, next.run(request)).await
}

impl ApiState {
    fn caller(&self, peer: &Peer) -> Result<Caller, Problem> {
        let caller = Caller::of(peer).and_then(|caller| {
            if caller.is_known(&self.controller.view(), peer) {
                return Ok(caller);
            }
            let detail = "unknown operator certificate: it was revoked, or belongs to another overlay; ask another \
                          operator for a new file (`hermes operator create`), or restart the controller, which \
                          writes `operator.json` anew";
            Err(Problem::new(StatusCode::UNAUTHORIZED, detail))
        });
        caller.inspect_err(|problem| {
            self.audit.record(Event {
                what: "ask",
                from: peer.from,
                about: peer.uris.first().cloned(),
                refused: Some(problem.detail.clone()),
                ..Event::default()
            });
        })
    }

    /// Returns the caller if it is an operator of the whole overlay. Refuses a provider with the detail `why`, and
    /// writes that to the audit log.
    fn operator(&self, peer: &Peer, what: &str, why: &str) -> Result<Caller, Problem> {
        let caller = self.caller(peer)?;
        if caller.provider.is_none() {
            return Ok(caller);
        }
        Err(self.refuse(what, &caller, peer, Problem::new(StatusCode::FORBIDDEN, why)))
    }

    /// Runs a change and its audit event in a task of their own. Otherwise, a client that resets its stream could
    /// cancel the audit event after the change. A client that resets its stream while it waits for a permit changes
    /// nothing.
    async fn owned<T: Send + 'static>(
        &self,
        caller: &Caller,
        change: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, Problem> {
        let failed = |why| Problem::new(StatusCode::INTERNAL_SERVER_ERROR, format!("the change failed: {why}"));
        let permits = self.changes[usize::from(caller.provider.is_some())].clone();
        let permit = permits.acquire_owned().await.map_err(|_| failed("the controller is shutting down"))?;
        let (tell, told) = oneshot::channel();
        {
            let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
            while tasks.try_join_next().is_some() {}
            tasks.spawn(async move {
                let done = change.await;
                drop(permit);
                let _ = tell.send(done);
            });
        }
        told.await.map_err(|_| failed("its task ended; see the log"))
    }

    /// Writes a failed change to the audit log, whether it was refused or its outcome is unknown.
    fn done<T>(&self, event: &Event<'_>, done: Result<T, ApplyError>) -> Result<T, Problem> {
        done.map_err(|refused| {
            self.audit.record(event.clone().failed(&refused));
            refused.into()
        })
    }

    /// Writes a refused request to the audit log.
    fn refuse(&self, what: &str, caller: &Caller, peer: &Peer, problem: Problem) -> Problem {
        let refused = Some(problem.detail.clone());
        self.audit.record(Event { what, by: Some(&caller.by), from: peer.from, refused, ..Event::default() });
        problem
    }
}

/// The caller of a request.
#[derive(Clone)]
struct Caller {
    /// The provider whose documents the caller may change; `None` if the caller may change all documents.
    provider: Option<Name>,
    name: Name,
    /// The caller's name in the audit log.
    by: String,
}

impl Caller {
    fn of(peer: &Peer) -> Result<Self, Problem> {
        match CertificateRole::of(peer.uris.iter().map(String::as_str)) {
            Some(CertificateRole::Operator { provider: None, name }) => {
                Ok(Self { by: format!("operator/{name}"), provider: None, name })
            }
            Some(CertificateRole::Operator { provider: Some(provider), name }) => {
                Ok(Self { by: format!("provider/{provider}/{name}"), provider: Some(provider), name })
            }
            _ => {
                let detail = "operator certificate required, such as the one in the controller's directory";
                Err(Problem::new(StatusCode::UNAUTHORIZED, detail))
            }
        }
    }

    /// Whether the caller's key is valid. The certificate alone does not prove that, because it can be revoked.
    fn is_known(&self, view: &StateView, peer: &Peer) -> bool {
        view.is_operator(&peer.key, &self.name, self.provider.as_ref())
    }

    /// Converts an error to a problem. For a provider, it leaves out faults in documents of other owners.
    fn problem(&self, refused: ApplyError) -> Problem {
        match refused {
            ApplyError::Faults(mut faults) if self.provider.is_some() => {
                let is_own =
                    |fault: &document::Fault| fault.key.as_ref().is_none_or(|key| self.provider == key.provider);
                let all = faults.len();
                faults.retain(is_own);
                if faults.len() < all {
                    let message = "the change conflicts with other documents at a node; ask the operator, who sees \
                                   the reason with `hermes diff`";
                    let problem = hermes_model::Problem { path: String::new(), message: message.to_owned() };
                    faults.push(document::Fault { key: None, number: None, problem });
                }
                Problem::of_faults(&faults)
            }
            refused => refused.into(),
        }
    }

    fn may_see(&self, key: &Key) -> bool {
        self.provider.is_none() || self.provider == key.provider
    }

    fn must_own(&self, key: &Key) -> Result<(), Problem> {
        let is_own = self.may_see(key);
        if is_own && (self.provider.is_none() || key.kind.is_for_providers_to_write()) {
            return Ok(());
        }
        let detail = if is_own {
            format!("only the operator may write {key}: its packets use a machine's own routes")
        } else {
            format!("{key} belongs to another owner: {} may only change documents of its own provider", self.by)
        };
        Err(Problem::new(StatusCode::FORBIDDEN, detail))
    }
}

/// Returns the complete state. It is only for operators, because it contains the CA's key.
async fn backup(State(api): State<ApiState>, Extension(peer): Extension<Arc<Peer>>) -> Result<Response, Problem> {
    let caller = api.operator(&peer, "backup", "only operators of the whole overlay may make backups")?;
    api.audit.record(Event { what: "backup", by: Some(&caller.by), from: peer.from, ..Event::default() });
    Ok(([(header::CONTENT_TYPE, "application/json")], api.controller.backup()).into_response())
}

#[cfg(test)]
mod tests;
