//! The REST API: what people and programs do with an overlay's documents.
//!
//! In: HTTP requests, and who sends them. Out: JSON; whatever is wrong, as problem details (RFC 9457).
//! Never: more than whose documents they are may see: an operator all, a provider its own.

mod authority;
mod fate;
mod history;
mod node;
mod operator;
mod rollout;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Extension, Path, Query, State};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use base64::prelude::BASE64_STANDARD as BASE64;
use http::{HeaderValue, StatusCode, header};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinSet;

use self::fate::{Fate, await_nodes};
use crate::audit::{Audit, Event};
use crate::ca::Office;
use crate::controller::{Controller, HELD, Known, Outcome, Refused, Request, at_length};
use crate::digest::{hex, sha256};
use crate::document::{self, Key, Kind, Name, Resource};
use crate::push::{Peer, Push};
use crate::store::Revision;

/// The largest request.
const MAX_BODY: usize = 64 << 20;
/// Requests up to this are read as they come; so many larger ones at once, and others after them.
const SMALL_BODY: u64 = 1 << 20;
const LARGE_AT_ONCE: usize = 2;
/// The maximum number of changes that are made at once, of the operator and of providers; further ones wait.
const MAX_CHANGES: usize = 64;
/// So many documents that a change touched are named in the audit log.
const MOST_NAMED: usize = 100;
/// The maximum number of warnings in an answer.
const MAX_WARNINGS: usize = 100;
/// Nobody waits longer for nodes.
const MAX_WAIT: Duration = Duration::from_secs(60);

#[derive(Clone)]
struct Desk {
    controller: Arc<Controller>,
    push: Arc<Push>,
    audit: Arc<Audit>,
    /// Turns of large requests: of the operator's, and of providers'.
    large: Arc<[Semaphore; 2]>,
    /// Permits for changes: of the operator, and of providers.
    changes: Arc<[Arc<Semaphore>; 2]>,
    /// The tasks of changes that are being made.
    tasks: Arc<Mutex<JoinSet<()>>>,
}

/// All of its paths.
pub(crate) fn router(controller: Arc<Controller>, push: Arc<Push>, audit: Arc<Audit>) -> Router {
    let desk = Desk {
        controller,
        push,
        audit,
        large: Arc::new([Semaphore::new(LARGE_AT_ONCE), Semaphore::new(LARGE_AT_ONCE)]),
        changes: Arc::new([MAX_CHANGES; 2].map(|permits| Arc::new(Semaphore::new(permits)))),
        tasks: Arc::default(),
    };
    // Changes of documents wait for nodes, and are therefore made by tasks of their own.
    let documents = Router::new()
        .route("/v1/apply", post(apply))
        .route("/v1/documents", get(list))
        .route("/v1/documents/{*key}", get(one).delete(remove));
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
        .route("/v1/authority", get(authority::show).post(authority::rotate).delete(authority::cancel))
        .route("/v1/authority/finish", post(authority::finish))
        .route_layer(middleware::from_fn_with_state(desk.clone(), finish))
        .merge(documents)
        .fallback(async || Problem::new(StatusCode::NOT_FOUND, "there is nothing at this path"))
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .layer(middleware::from_fn_with_state(desk.clone(), gate))
        .with_state(desk)
}

/// The header of answers that tells whom the overlay trusts: where that is another one than the last time, who asks has
/// something to get.
pub const TRUST: &str = "hermes-trust";
/// No request takes longer to come.
const ARRIVAL: Duration = Duration::from_secs(60);

/// Nobody's body is read who may ask nothing.
async fn gate(State(desk): State<Desk>, request: axum::extract::Request, next: Next) -> Result<Response, Problem> {
    let peer = request.extensions().get::<Arc<Peer>>().cloned().unwrap_or_default();
    let may_ask = |asker: &Asker| asker.is_known(&desk.controller.known(), &peer);
    if Asker::of(&peer).is_ok_and(|asker| !may_ask(&asker)) {
        // Another controller may have made this one just now.
        desk.controller.catch_up().await.map_err(Refused::from)?;
    }
    let asker = desk.asker(&peer)?;
    let (parts, body) = request.into_parts();
    // Many large ones at once would be more than there is memory for.
    let is_small = axum::body::HttpBody::size_hint(&body).upper().is_some_and(|bytes| bytes <= SMALL_BODY);
    let turn = match is_small {
        true => None,
        false => {
            // Nobody waits for what providers send but they.
            let turns = &desk.large[usize::from(asker.provider.is_some())];
            let busy = || Problem::new(StatusCode::SERVICE_UNAVAILABLE, "other large requests are read; try again");
            Some(tokio::time::timeout(ARRIVAL, turns.acquire()).await.map_err(|_| busy())?.map_err(|_| busy())?)
        }
    };
    // All of it before anything is answered: a reset for what was not read could overtake the answer.
    let read = tokio::time::timeout(ARRIVAL, axum::body::to_bytes(body, MAX_BODY)).await;
    let late = |_| Problem::new(StatusCode::REQUEST_TIMEOUT, format!("the request has not come within {ARRIVAL:?}"));
    let large = |_| {
        let detail = format!("the request is larger than {MAX_BODY} bytes, or was broken off; apply less at once");
        Problem::new(StatusCode::PAYLOAD_TOO_LARGE, detail)
    };
    let body = read.map_err(late)?.map_err(large)?;
    drop(turn);
    let mut response = next.run(axum::extract::Request::from_parts(parts, body.into())).await;
    let mark = desk.controller.trust().borrow().mark();
    response.headers_mut().insert(TRUST, HeaderValue::from_str(&mark).unwrap_or(HeaderValue::from_static("")));
    Ok(response)
}

/// Finishes a request that changes something, even if the client resets its stream meanwhile.
async fn finish(State(desk): State<Desk>, request: axum::extract::Request, next: Next) -> Result<Response, Problem> {
    if request.method() == http::Method::GET {
        return Ok(next.run(request).await);
    }
    let peer = request.extensions().get::<Arc<Peer>>().cloned().unwrap_or_default();
    let asker = desk.asker(&peer)?;
    desk.owned(&asker, next.run(request)).await
}

/// What is wrong, as RFC 9457 says it.
struct Problem {
    status: StatusCode,
    detail: String,
    faults: Vec<serde_json::Value>,
}

impl Problem {
    fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        Self { status, detail: detail.into(), faults: Vec::new() }
    }
}

impl From<Refused> for Problem {
    fn from(refused: Refused) -> Self {
        let status = match &refused {
            Refused::Faults(_) => StatusCode::UNPROCESSABLE_ENTITY,
            Refused::Unusable(_) => StatusCode::UNPROCESSABLE_ENTITY,
            Refused::Conflict { .. } | Refused::Busy(_) | Refused::Turn | Refused::Unready(_) => StatusCode::CONFLICT,
            Refused::Denied(_) => StatusCode::FORBIDDEN,
            Refused::Absent(_) | Refused::Unknown(_) => StatusCode::NOT_FOUND,
            // The store has not answered: the change is neither made nor refused.
            refused if refused.is_unknown() => StatusCode::GATEWAY_TIMEOUT,
            Refused::Store(_) => StatusCode::SERVICE_UNAVAILABLE,
        };
        match refused {
            Refused::Faults(faults) => Self::of_faults(&faults),
            refused => Self::new(status, refused.to_string()),
        }
    }
}

impl Problem {
    fn of_faults(faults: &[document::Fault]) -> Self {
        let detail = format!("nothing was changed: {} problems", faults.len());
        Self { status: StatusCode::UNPROCESSABLE_ENTITY, detail, faults: faults.iter().map(told).collect() }
    }
}

/// A fault as the API returns it.
fn told(fault: &document::Fault) -> serde_json::Value {
    json!({
        "document": fault.key.as_ref().map(ToString::to_string),
        "number": fault.number,
        "path": fault.problem.path,
        "message": fault.problem.message,
    })
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let Self { status, detail, faults } = self;
        let mut body = json!({ "title": status.canonical_reason(), "status": status.as_u16(), "detail": detail });
        if !faults.is_empty() {
            body["problems"] = faults.into();
        }
        let mut response = (status, axum::Json(body)).into_response();
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        response
    }
}

impl Desk {
    fn asker(&self, peer: &Peer) -> Result<Asker, Problem> {
        let asker = Asker::of(peer).and_then(|asker| {
            if asker.is_known(&self.controller.known(), peer) {
                return Ok(asker);
            }
            let detail = "nobody has this certificate now: it was taken back, or this overlay never gave it; have another operator \
                          make a file with `hermes operator create`; a controller that is started writes its `operator.json` anew";
            Err(Problem::new(StatusCode::UNAUTHORIZED, detail))
        });
        asker.inspect_err(|problem| {
            self.audit.tell(Event {
                what: "ask",
                from: peer.from,
                about: peer.uris.first().cloned(),
                refused: Some(problem.detail.clone()),
                ..Event::default()
            });
        })
    }

    /// Who asks, where that is an operator of the whole overlay. `why`: whose it is, for who is not.
    fn operator(&self, peer: &Peer, what: &str, why: &str) -> Result<Asker, Problem> {
        let asker = self.asker(peer)?;
        if asker.provider.is_none() {
            return Ok(asker);
        }
        Err(self.refuse(what, &asker, peer, Problem::new(StatusCode::FORBIDDEN, why)))
    }

    /// Runs a change, with its line in the audit log, in a task that ends only when it is done: a client that resets its
    /// stream would otherwise end it between the two. A client that leaves before its turn changes nothing.
    async fn owned<T: Send + 'static>(
        &self,
        asker: &Asker,
        change: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, Problem> {
        let failed = |why| Problem::new(StatusCode::INTERNAL_SERVER_ERROR, format!("the change failed: {why}"));
        let permits = self.changes[usize::from(asker.provider.is_some())].clone();
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
    fn done<T>(&self, event: &Event<'_>, done: Result<T, Refused>) -> Result<T, Problem> {
        done.map_err(|refused| {
            self.audit.tell(event.clone().failed(&refused));
            refused.into()
        })
    }

    /// What somebody must not do is told.
    fn refuse(&self, what: &str, asker: &Asker, peer: &Peer, problem: Problem) -> Problem {
        let refused = Some(problem.detail.clone());
        self.audit.tell(Event { what, by: Some(&asker.by), from: peer.from, refused, ..Event::default() });
        problem
    }
}

/// Who asks.
#[derive(Clone)]
struct Asker {
    /// Whose documents are theirs. `None`: all.
    provider: Option<Name>,
    name: Name,
    /// As it stands in the log.
    by: String,
}

impl Asker {
    fn of(peer: &Peer) -> Result<Self, Problem> {
        match Office::of(peer.uris.iter().map(String::as_str)) {
            Some(Office::Operator { provider: None, name }) => {
                Ok(Self { by: format!("operator/{name}"), provider: None, name })
            }
            Some(Office::Operator { provider: Some(provider), name }) => {
                Ok(Self { by: format!("provider/{provider}/{name}"), provider: Some(provider), name })
            }
            _ => {
                let detail = "only operators may ask this: show an operator's certificate, such as that in the controller's directory";
                Err(Problem::new(StatusCode::UNAUTHORIZED, detail))
            }
        }
    }

    /// Its certificate is not all: it can be taken back.
    fn is_known(&self, known: &Known, peer: &Peer) -> bool {
        known.is_operator(&peer.key, &self.name, self.provider.as_ref())
    }

    /// What is wrong, without what is somebody else's.
    fn told(&self, refused: Refused) -> Problem {
        match refused {
            Refused::Faults(mut faults) if self.provider.is_some() => {
                let is_own =
                    |fault: &document::Fault| fault.key.as_ref().is_none_or(|key| self.provider == key.provider);
                let all = faults.len();
                faults.retain(is_own);
                if faults.len() < all {
                    let message = "what this comes to at a node is not possible there beside what it has; ask the operator, \
                                   whom `hermes diff` tells why";
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
            format!("{key} is for the operator to write: packets come out by a machine's own routes")
        } else {
            format!("{key} is not yours: an administrator of {} changes what is that provider's", self.by)
        };
        Err(Problem::new(StatusCode::FORBIDDEN, detail))
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct ApplyOptions {
    /// Only says what it would change.
    #[serde(default)]
    dry_run: bool,
    /// Nothing that is changed may have been changed after this.
    since: Option<Revision>,
    /// Milliseconds to wait for nodes.
    #[serde(default)]
    wait: u64,
    /// To all nodes at once.
    #[serde(default)]
    now: bool,
    /// Deletes the documents that are not among these.
    #[serde(default)]
    prune: bool,
}

async fn apply(
    State(desk): State<Desk>,
    Extension(peer): Extension<Arc<Peer>>,
    Query(options): Query<ApplyOptions>,
    body: Bytes,
) -> Result<Response, Problem> {
    let asker = desk.asker(&peer)?;
    let text =
        std::str::from_utf8(&body).map_err(|_| Problem::new(StatusCode::BAD_REQUEST, "the documents are no UTF-8"))?;
    let put = at_length(|| document::read(text)).map_err(|faults| Problem::of_faults(&faults))?;
    for resource in &put {
        asker.must_own(&resource.key).map_err(|problem| desk.refuse("apply", &asker, &peer, problem))?;
    }
    let ApplyOptions { dry_run: is_dry, now: is_now, since, .. } = options;
    let delete = if options.prune { pruned(&desk, &asker, &put)? } else { Vec::new() };
    if is_now && asker.provider.is_some() {
        let problem =
            Problem::new(StatusCode::FORBIDDEN, "when nodes take a change is the operator's; leave --now out");
        return Err(desk.refuse("apply", &asker, &peer, problem));
    }
    let request = Request { by: asker.by.clone(), put, delete, since, is_dry, is_now, ..Request::default() };
    change(&desk, (&asker, &peer), request, options.wait).await
}

/// The documents of whoever asks that are not among these. The overlay's own document stays, so does what is a provider's where
/// the operator asks, and so do nodes where none is among these: to delete one revokes its key.
fn pruned(desk: &Desk, asker: &Asker, put: &[Resource]) -> Result<Vec<Key>, Problem> {
    if put.is_empty() {
        let detail = "no documents, so that prune would delete all of them; name at least one";
        return Err(Problem::new(StatusCode::UNPROCESSABLE_ENTITY, detail));
    }
    let put: std::collections::HashSet<_> = put.iter().map(|resource| &resource.key).collect();
    let known = desk.controller.known();
    let all = known.state.catalog.iter().map(|resource| &resource.key);
    let has_nodes = put.iter().any(|key| key.kind == Kind::Node);
    let is_meant = |key: &&Key| {
        key.kind != Kind::Overlay
            && (key.kind != Kind::Node || has_nodes)
            && key.provider == asker.provider
            && !put.contains(key)
            && asker.must_own(key).is_ok()
    };
    Ok(all.filter(is_meant).cloned().collect())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct DeleteOptions {
    #[serde(default)]
    dry_run: bool,
    since: Option<Revision>,
    #[serde(default)]
    wait: u64,
}

async fn remove(
    State(desk): State<Desk>,
    Extension(peer): Extension<Arc<Peer>>,
    Path(key): Path<String>,
    Query(options): Query<DeleteOptions>,
) -> Result<Response, Problem> {
    let asker = desk.asker(&peer)?;
    let key: Key = key.parse().map_err(|error: String| Problem::new(StatusCode::BAD_REQUEST, error))?;
    asker.must_own(&key).map_err(|problem| desk.refuse("delete", &asker, &peer, problem))?;
    let request = Request {
        by: asker.by.clone(),
        delete: vec![key],
        since: options.since,
        is_dry: options.dry_run,
        ..Request::default()
    };
    change(&desk, (&asker, &peer), request, options.wait).await
}

/// Writes to the audit log what became of a change of documents.
fn tell(audit: &Audit, from: Option<SocketAddr>, request: &Request, done: &Result<Outcome, Refused>) {
    let what = if request.put.is_empty() && !request.delete.is_empty() { "delete" } else { "apply" };
    let event = Event { what, by: Some(&request.by), from, ..Event::default() };
    let outcome = match done {
        Ok(outcome) => outcome,
        Err(refused) => return audit.tell(event.failed(refused)),
    };
    let touched = outcome.created.iter().chain(&outcome.changed).chain(&outcome.deleted);
    let more = touched.clone().count().saturating_sub(MOST_NAMED);
    let mut documents: Vec<_> = touched.take(MOST_NAMED).map(ToString::to_string).collect();
    if more > 0 {
        documents.push(format!("and {more} more"));
    }
    if !(request.is_dry || documents.is_empty()) {
        audit.tell(Event { revision: Some(outcome.revision), documents, ..event });
    }
}

async fn change(desk: &Desk, (asker, peer): (&Asker, &Peer), request: Request, wait: u64) -> Result<Response, Problem> {
    let is_dry = request.is_dry;
    let (controller, audit, from) = (desk.controller.clone(), desk.audit.clone(), peer.from);
    let made = async move {
        let done = controller.apply(&request).await;
        tell(&audit, from, &request, &done);
        done
    };
    let outcome = desk.owned(asker, made).await?.map_err(|refused| asker.told(refused))?;
    let wait = Duration::from_millis(wait).min(MAX_WAIT);
    let nodes = if is_dry {
        let planned = |document: &Option<Bytes>| document.as_ref().map_or(Fate::Gone, |_| Fate::Planned);
        outcome.nodes.iter().map(|(node, document)| (node.clone(), planned(document))).collect()
    } else {
        await_nodes(desk, &outcome, wait).await
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
    let is_seen = |fault: &&document::Fault| fault.key.as_ref().is_some_and(|key| asker.may_see(key));
    let mut warnings: Vec<_> = outcome.warnings.iter().filter(is_seen).take(MAX_WARNINGS).map(told).collect();
    if desk.controller.known().is_held() {
        let problem = hermes_model::Problem { path: String::new(), message: HELD.to_owned() };
        warnings.push(told(&document::Fault { key: None, number: None, problem }));
    }
    if !warnings.is_empty() {
        answer["warnings"] = warnings.into();
    }
    let known = desk.controller.known();
    match (&known.state.failed, &known.state.rollout) {
        (Some((of, why)), _) if *of == outcome.revision => {
            // Which node would not have it is the operator's.
            let why = if asker.provider.is_none() { why } else { "nodes did not go on well with it; ask the operator" };
            answer["taken-back"] = why.into();
        }
        (_, Some(waved)) if waved.of == outcome.revision && asker.provider.is_none() => {
            answer["rollout"] = rollout::told(&known);
        }
        _ => {}
    }
    // Nodes are the operator's: a provider hears how many of them took it.
    if asker.provider.is_none() {
        answer["nodes"] = json!(nodes);
    } else {
        answer["nodes-touched"] = nodes.len().into();
    }
    Ok(axum::Json(answer).into_response())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct ListOptions {
    kind: Option<String>,
}

#[derive(Serialize)]
struct Listed<'a> {
    revision: Revision,
    document: &'a Resource,
}

async fn list(
    State(desk): State<Desk>,
    Extension(peer): Extension<Arc<Peer>>,
    Query(options): Query<ListOptions>,
) -> Result<Response, Problem> {
    let asker = desk.asker(&peer)?;
    let kind = options.kind.map(|kind| kind.parse::<Kind>()).transpose();
    let kind = kind.map_err(|error| Problem::new(StatusCode::BAD_REQUEST, error))?;
    let known = desk.controller.known();
    let state = &known.state;
    let wanted = state
        .catalog
        .iter()
        .filter(|resource| asker.may_see(&resource.key) && kind.is_none_or(|kind| kind == resource.key.kind));
    let listed = wanted.map(|resource| Listed {
        revision: state.changed.get(&resource.key).copied().unwrap_or_default(),
        document: resource,
    });
    Ok(axum::Json(json!({ "revision": state.revision, "documents": listed.collect::<Vec<_>>() })).into_response())
}

async fn one(
    State(desk): State<Desk>,
    Extension(peer): Extension<Arc<Peer>>,
    Path(key): Path<String>,
) -> Result<Response, Problem> {
    let asker = desk.asker(&peer)?;
    let key: Key = key.parse().map_err(|error: String| Problem::new(StatusCode::BAD_REQUEST, error))?;
    let known = desk.controller.known();
    let found = known.state.catalog.get(&key).filter(|_| asker.may_see(&key));
    let document = found.ok_or_else(|| Problem::new(StatusCode::NOT_FOUND, format!("there is no {key}")))?;
    let revision = known.state.changed.get(&key).copied().unwrap_or_default();
    Ok(axum::Json(Listed { revision, document }).into_response())
}

/// All of the state: who has it is the overlay.
async fn backup(State(desk): State<Desk>, Extension(peer): Extension<Arc<Peer>>) -> Result<Response, Problem> {
    let asker = desk.operator(&peer, "backup", "a backup has what is everybody's: it is the operator's")?;
    desk.audit.tell(Event { what: "backup", by: Some(&asker.by), from: peer.from, ..Event::default() });
    Ok(([(header::CONTENT_TYPE, "application/json")], desk.controller.backup()).into_response())
}

#[cfg(test)]
mod tests;
