//! The controller's health and metrics, for probes and scrapers.
//!
//! In: the controller's state, and reports of nodes. Out: a status with one line of text, and OpenMetrics text.
//! Never: a name of a node, a user or a service.

use std::convert::Infallible;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use crate::document::Kind;
use crate::push::Push;

/// The maximum number of simultaneous connections. A scraper needs one.
const MAX_CONNECTIONS: usize = 64;
/// The maximum time for a request and its response.
const VISIT_TIMEOUT: Duration = Duration::from_secs(10);

/// Returns 200 if the store is reachable, and otherwise 503 and the reason.
pub(crate) fn health(push: &Push) -> (StatusCode, String) {
    match &*push.controller().trouble().borrow() {
        None => (StatusCode::OK, "ok\n".to_owned()),
        Some(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
    }
}

/// All metrics, as OpenMetrics text.
fn metrics(push: &Push) -> String {
    let view = push.controller().view();
    let mut text = String::new();
    let mut gauge = |name: &str, help: &str, values: &[(String, u64)]| {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} gauge");
        for (labels, value) in values {
            let _ = writeln!(text, "{name}{labels} {value}");
        }
    };
    let one = |value: usize| [(String::new(), value as u64)];
    let is_followed = push.controller().trouble().borrow().is_none();
    gauge("hermes_controller_store_up", "Whether the store is reachable.", &one(usize::from(is_followed)));
    gauge(
        "hermes_controller_revision",
        "The last revision that this controller has read.",
        &[(String::new(), view.state.revision)],
    );
    let is_held = usize::from(view.is_held());
    gauge("hermes_controller_unconfirmed", "Whether a restored store waits for confirmation.", &one(is_held));
    let kinds = Kind::ALL.map(|kind| {
        let count = view.state.catalog.iter().filter(|resource| resource.key.kind == kind).count();
        (format!("{{kind=\"{}\"}}", kind.word().to_lowercase()), count as u64)
    });
    gauge("hermes_controller_documents", "Overlay documents.", &kinds);
    let nodes = || view.state.catalog.nodes().map(|(name, _)| name);
    let status = |holds: &dyn Fn(&crate::node_status::NodeStatus) -> bool| {
        nodes().filter(|node| holds(&push.status_of(node))).count()
    };
    let enrolled = nodes().filter(|node| view.state.members.contains_key(*node)).count();
    let states = [
        ("enrolled", enrolled),
        ("connected", status(&|status| status.connections > 0)),
        ("refusing", status(&|status| status.connections > 0 && !status.refused.is_empty())),
        ("unhealthy", status(&|status| status.connections > 0 && !status.unhealthy.is_empty())),
    ];
    let states = states.map(|(state, count)| (format!("{{state=\"{state}\"}}"), count as u64));
    gauge("hermes_controller_nodes", "Nodes of the overlay.", &states);
    let is_rolling = usize::from(view.state.rollout.is_some());
    gauge("hermes_controller_rollout", "Whether a rollout in waves is in progress.", &one(is_rolling));
    let revoked = view.state.catalog.revoked().count();
    gauge("hermes_controller_revoked_keys", "Keys that are revoked, until their certificates expire.", &one(revoked));
    let lines = push.audit_left_out();
    let _ = writeln!(
        text,
        "# HELP hermes_controller_audit_suppressed Events beyond a subject's rate.\n\
         # TYPE hermes_controller_audit_suppressed counter\nhermes_controller_audit_suppressed_total {lines}\n# EOF"
    );
    text
}

/// Serves health and metrics without TLS, for as long as it is polled.
pub(crate) async fn serve(listener: TcpListener, push: Arc<Push>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept(), if connections.len() < MAX_CONNECTIONS => match accepted {
                Ok((tcp, _)) => {
                    let push = push.clone();
                    let service = service_fn(move |request| {
                        let push = push.clone();
                        async move { Ok::<_, Infallible>(answer(&request, &push)) }
                    });
                    connections.spawn(async move {
                        let mut http = hyper::server::conn::http1::Builder::new();
                        http.timer(TokioTimer::new()).keep_alive(false);
                        let _ = tokio::time::timeout(VISIT_TIMEOUT, http.serve_connection(TokioIo::new(tcp), service)).await;
                    });
                }
                Err(error) => {
                    tracing::warn!("admin endpoint: cannot accept a connection: {error}");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            },
            Some(_) = connections.join_next() => {}
        }
    }
}

fn answer(request: &Request<Incoming>, push: &Push) -> Response<Full<Bytes>> {
    let (status, kind, body) = match request.uri().path() {
        _ if !matches!(*request.method(), Method::GET | Method::HEAD) => {
            (StatusCode::METHOD_NOT_ALLOWED, TEXT, "only GET\n".to_owned())
        }
        "/healthz" => {
            let (status, word) = health(push);
            (status, TEXT, word)
        }
        "/metrics" => (StatusCode::OK, OPEN_METRICS, metrics(push)),
        _ => (StatusCode::NOT_FOUND, TEXT, "try /healthz /metrics\n".to_owned()),
    };
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

const TEXT: &str = "text/plain; charset=utf-8";
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
