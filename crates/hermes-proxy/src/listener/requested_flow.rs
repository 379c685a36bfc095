//! Serves a flow that was requested and not yet accepted: the far end decides first (fate sharing).
//!
//! In: a requested flow and the request for its session. Out: an accepted flow once the tunnel stands, or a refusal with
//! the reason of the last node. Never: a flow that is accepted for a tunnel that failed.

use std::net::SocketAddr;
use std::rc::Rc;

use hermes_architecture::flow_requests::{Refusal, RequestedFlow};
use hermes_model::authority::Authority;
use hermes_model::facts::Kind;
use http::HeaderValue;

use crate::request::{Origin, Rejected, Request, from_flow};
use crate::session::{self, DownstreamEnd, SessionOutcome, Tunnel, UpstreamEnd};
use crate::worker::Worker;
use hermes_transport::error::Error;
use hermes_transport::headers;
use hermes_transport::runtime::session::Connection;

/// Opens the session of a requested flow, answers the requester, and relays.
pub(super) async fn serve(
    worker: &Rc<Worker>,
    connection: &Rc<Connection>,
    request: Result<Request<'_>, Box<Rejected>>,
    flow: impl RequestedFlow,
) {
    let outcome = match request {
        Ok(mut request) => {
            request.connection = Some(connection.clone());
            tokio::select! {
                // Boxed, so that a tunnel does not keep the memory of its opening.
                outcome = Box::pin(session::serve(worker, request)) => outcome,
                // Dropping the session ends its attempt.
                () = flow.gone() => return,
            }
        }
        Err(rejected) => SessionOutcome::Response(session::reject(worker, *rejected)),
    };
    let tunnel = match outcome {
        SessionOutcome::Tunnel(tunnel) => tunnel,
        SessionOutcome::Response(response) => return flow.refuse(Refusal::of(response.headers())),
    };
    match flow.accept().await {
        Some(stream) => session::relay(DownstreamEnd::Stream(stream), *tunnel).await,
        None => abort(*tunnel),
    }
}

/// Ends a tunnel whose client no longer waits: the far end gets a reset.
fn abort(tunnel: Tunnel) {
    let error = Error::ClientGone("the client did not wait until its connection was accepted".to_owned());
    tunnel.session.entry.fail(&error);
    if let UpstreamEnd::Stream(mut far) = tunnel.far {
        far.abort();
    }
}

/// The request for a flow whose client has an address of its own: CONNECT or CONNECT-UDP to `authority`. It carries the
/// client's address and port, since the last node may connect with them.
pub(super) fn request<'a>(
    origin: &Origin<'_>,
    kind: Kind,
    authority: &Authority,
) -> Result<Request<'a>, Box<Rejected>> {
    let mut request = from_flow(origin, kind, authority, "")?;
    let source = SocketAddr::new(origin.source.ip().to_canonical(), origin.source.port());
    if let (Some(facts), Ok(value)) = (Rc::get_mut(&mut request.facts), HeaderValue::try_from(source.to_string())) {
        facts.headers.insert(headers::SOURCE, value);
    }
    Ok(request)
}
