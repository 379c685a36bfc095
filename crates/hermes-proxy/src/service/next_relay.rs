//! Sends requests of a relay to the other relays of its route.
//!
//! In: the facts of a request of this node, or of a client that publishes through a WebSocket. Out: the response of an
//! endpoint of an upstream that `relay` names. The request has no session of its own in the tables of the
//! worker: the subscriptions that it serves have theirs. Never: a decision.

use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;
use hermes_model::facts::Facts;
use hermes_relay_service::{NextRelay, NextResponse};
use hermes_transport::body::{Body, RequestBody};
use hermes_transport::error::Error;
use hermes_transport::headers;
use hermes_transport::runtime::session::SessionEntry;
use http::uri::Scheme;
use http::{Method, Response};

use super::forward::Forward;
use crate::request::{Request, UpgradeKind};
use crate::worker::Worker;

/// The way to the other relays of a route.
pub(crate) struct ToNextRelay {
    pub(crate) worker: Rc<Worker>,
    pub(crate) route: Arc<str>,
}

impl NextRelay for ToNextRelay {
    fn send(&self, upstream: Arc<str>, facts: Facts, body: Bytes) -> NextResponse {
        let (worker, route) = (self.worker.clone(), self.route.clone());
        Box::pin(async move { forward(&worker, &route, &upstream, facts, body).await })
    }
}

async fn forward(
    worker: &Rc<Worker>,
    route: &Arc<str>,
    upstream: &Arc<str>,
    facts: Facts,
    body: Bytes,
) -> Result<Response<Body>, Error> {
    let generation = worker.generation();
    let no_next = || Error::Reconfigured(format!("route {route} no longer has the relay of upstream {upstream}"));
    let route = generation.snapshot.routes.iter().find(|other| other.name == *route).ok_or_else(no_next)?;
    let named = route.action.upstreams().find(|other| other.name == *upstream);
    let upstream = generation.state_of(named.ok_or_else(no_next)?)?;
    let trace = headers::trace(&facts.headers, worker.random());
    let scheme = if facts.scheme() == "https" { Scheme::HTTPS } else { Scheme::HTTP };
    let entry = SessionEntry::unlisted(worker, Rc::new(facts), trace);
    *entry.route.borrow_mut() = Some(route.clone());
    let body = RequestBody::new(worker, Body::Full(body));
    let request = Request { body, scheme, upgrade: UpgradeKind::None, ..Request::again(&entry) };
    let forward = Forward::new(worker, &generation, &entry, route, &request, None);
    let within = route.timeout.progress;
    if forward.entry.facts.method != Method::GET {
        // A publication waits for slow subscribers, for as long as its relay does.
        return forward.to_upstream(upstream).await;
    }
    match tokio::time::timeout(within, forward.to_upstream(upstream)).await {
        Ok(response) => response,
        Err(_elapsed) => Err(Error::NoProgress(within)),
    }
}
