//! IP packets in UDP datagrams, one packet each. The packets of a peer become CONNECT-IP (RFC 9484) to the listener's
//! network.
//!
//! In: a flow of the listener's socket, from an address in `peers`. Out: a session that lasts as long as the peer
//! sends; an empty datagram is a keepalive. Packets wait in the flow's queue until the far end has assigned addresses.
//! Never: a packet whose source is not an address of the peer. The source address of a datagram is a claim, not
//! proof.

use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use hermes_model::facts::Trust;
use hermes_model::snapshot::{IpListener, Listener, ListenerProtocol};

use super::flow_table::unless_displaced;
use crate::ip::{End, Link, Owner};
use crate::request::{Origin, from_capture};
use crate::session::{self, DownstreamEnd, SessionOutcome};
use crate::worker::Worker;
use hermes_transport::datagram::{Flow, FlowQueue, Port};

/// A peer that is silent for this long has left.
const SILENCE: Duration = Duration::from_secs(120);

/// True if a session may begin with datagrams of this source. Rejected datagrams are counted and logged, rate-limited.
pub(super) fn admits(worker: &Worker, listener: &Listener, source: SocketAddr) -> bool {
    let ListenerProtocol::Ip(carried) = &listener.protocol else { return true };
    let admitted = carried.peer(source.ip()).is_some();
    if !admitted {
        worker.shared.metrics.dropped("not-a-peer", 1);
        if let Some(more) = worker.shared.strangers.happened(worker.now()) {
            let listener = &listener.name;
            tracing::info!(%listener, %source, more, "packets are dropped: add their source to `peers`, if it is one");
        }
    }
    admitted
}

/// Serves a peer until it falls silent or its session ends.
pub(super) async fn serve(worker: &Rc<Worker>, listener: &Arc<Listener>, carried: &IpListener, flow: Flow) {
    let Some(peer) = carried.peer(flow.peer.ip()) else { return };
    let (source, queue) = (flow.peer, flow.queue.clone());
    let origin = Origin { worker, listener, source, trust: &Trust::Anonymous, secure: false };
    let request = match from_capture(&origin, carried.network, None, &[]) {
        Ok(request) => request,
        Err(rejected) => return drop(session::reject(worker, *rejected)),
    };
    let protocol = request.facts.protocol;
    let opened = unless_displaced(&queue, session::serve(worker, request)).await;
    let Some(SessionOutcome::Tunnel(tunnel)) = opened else { return };
    let owner = Owner::Listener(listener.name.clone());
    let addresses = peer.addresses.iter().copied();
    let end = match End::asking(Link::peer(flow), &owner, carried.network, addresses, protocol) {
        Ok(end) => end.answered_by(&tunnel.session.entry),
        Err(reason) => return tracing::error!(listener = %listener.name, reason, "a peer is not served"),
    };
    tracing::info!(listener = %listener.name, %source, network = %carried.network, "a peer brings packets");
    let relay = session::relay(DownstreamEnd::Datagrams(Port::Device(Box::new(end))), *tunnel);
    tokio::select! {
        biased;
        () = relay => {}
        () = end_with_silence(worker, &queue) => {}
    }
}

/// Tells the relay that no further datagram will arrive, so that it ends gracefully.
async fn end_with_silence(worker: &Worker, queue: &FlowQueue) {
    loop {
        let silent = Duration::from_millis(worker.now().saturating_sub(queue.heard_at()));
        match SILENCE.checked_sub(silent) {
            Some(left) if !left.is_zero() => tokio::time::sleep(left).await,
            _ => break,
        }
    }
    queue.finish();
    std::future::pending().await
}
