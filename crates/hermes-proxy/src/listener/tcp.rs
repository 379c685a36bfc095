//! Raw TCP connections: each becomes a CONNECT request to the listener's authority.
//!
//! In: a connection. Out: its bytes, relayed through the tunnel that the route opens. If the route opens no tunnel, the
//! connection is reset: raw TCP has no other way to signal a refusal.

use std::rc::Rc;

use bytes::Bytes;
use hermes_model::authority::Authority;
use hermes_model::facts::Kind;

use super::{Ready, open};
use crate::request::{Origin, from_flow};
use crate::session::{self, DownstreamEnd, SessionOutcome};
use crate::worker::Worker;
use hermes_transport::runtime::session::Connection;
use hermes_transport::stream::ByteStream;

/// Serves one connection until it ends.
pub(crate) async fn serve(worker: &Rc<Worker>, connection: &Rc<Connection>, authority: &Authority, ready: Ready) {
    let origin = Origin {
        worker,
        listener: &connection.listener,
        source: ready.source,
        trust: &ready.trust,
        secure: ready.secure,
    };
    let mut near = ByteStream::io(ready.io, Bytes::new());
    let request = from_flow(&origin, Kind::Tcp, authority, "");
    match open(worker, Some(connection), &mut near, request).await {
        SessionOutcome::Tunnel(tunnel) => session::relay(DownstreamEnd::Stream(near), *tunnel).await,
        SessionOutcome::Response(_) => near.abort(),
    }
}
