//! The accepting side of reverse connections.
//!
//! In: a connection on which a node has authenticated by certificate and offered to serve requests. Out: an entry in
//! the node's connection pool until the connection closes, on the worker that needs a connection of the node most. Only
//! nodes that an upstream names are accepted.

use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use hermes_model::facts::Trust;
use hermes_model::snapshot::Listener;

use super::Outbound;
use super::pool::{PoolKey, ReverseConnection};
use crate::reverse::channels::{AcceptedUplink, Query};
use crate::reverse::{Call, ReversePeer, ReverseTransport, given_up};
use hermes_transport::error::Error;
use hermes_transport::runtime::session::{Connection, ConnectionGuard};

/// The timeout for starting HTTP on an accepted connection.
const HTTP_START_TIMEOUT: Duration = Duration::from_secs(5);

/// Accepts a reverse connection, and passes it to the worker that needs it most. A connection of any other client is
/// closed.
pub fn take(
    worker: &Rc<Outbound>,
    listener: &Arc<Listener>,
    trust: &Trust,
    source: SocketAddr,
    carrier: ReverseTransport,
) {
    let node = trust.peer().and_then(|peer| peer.node.clone());
    let reverse_peer = match named(worker, node.as_ref()) {
        Ok(reverse_peer) => reverse_peer,
        Err(reason) => {
            if let Some(more) = worker.shared.handshakes.happened(worker.now()) {
                let name = &listener.name;
                tracing::warn!(listener = %name, %source, more, "{reason}");
            }
            return;
        }
    };
    let slot = reverse_peer.assign(worker.number, worker.shared.workers);
    let to = slot.worker;
    let arrived = AcceptedUplink { carrier, source, trust: trust.clone(), listener: listener.clone(), slot };
    if to == worker.number {
        adopt(worker, arrived);
    } else if !worker.channels.pass_on(to, arrived) {
        // The connection is dropped here, and so closed. The node dials again.
        worker.shared.metrics.limit("reverse-connections");
    }
}

/// Returns the state of a node that an upstream of the running generation names. The error is the reason for a
/// rejection.
fn named(worker: &Outbound, node: Option<&Arc<str>>) -> Result<Arc<ReversePeer>, String> {
    let Some(node) = node else {
        return Err("reverse connection rejected: the client is not a node; its certificate has no URI .../node/NAME"
            .to_owned());
    };
    worker.generation().node(node).cloned().ok_or_else(|| {
        format!(
            "reverse connection rejected: no upstream names node {node}; add one with endpoints: [{{node: {node}}}]"
        )
    })
}

/// Runs a connection on this worker until it closes.
pub fn adopt(worker: &Rc<Outbound>, arrived: AcceptedUplink) {
    let taken = ConnectionGuard::take(worker, arrived.listener.clone(), arrived.source, &arrived.trust);
    let Some(guard) = taken else { return };
    let here = worker.clone();
    worker.spawn(async move {
        let reverse_peer = arrived.slot.reverse_peer.clone();
        let connection = guard.connection.clone();
        let _ = connection.trust.set(arrived.trust.clone());
        // Its number decides about its worker, so that it would come back.
        connection.is_kept.set(true);
        // Counting a session prevents the idle timeout, which applies only to connections of clients.
        connection.enter(&here);
        tokio::select! {
            biased;
            result = serve(&here, &connection, arrived) => {
                if let Err(error) = result {
                    tracing::info!(node = %reverse_peer.node, %error, "reverse connection failed");
                }
            }
            reason = connection.kill.wait() => tracing::debug!(node = %reverse_peer.node, reason, "a connection was closed"),
        }
        drop(guard);
    });
}

async fn serve(worker: &Rc<Outbound>, connection: &Rc<Connection>, arrived: AcceptedUplink) -> Result<(), Error> {
    let AcceptedUplink { carrier, source, listener, slot, .. } = arrived;
    let (reverse_peer, number) = (&slot.reverse_peer, slot.number);
    let pool = worker.pool(PoolKey::of_node(&reverse_peer.node));
    let (kept, drive, keepalive) = match carrier {
        ReverseTransport::Tcp(mut io) => {
            let fault = |error| Error::Connect { peer: reverse_peer.node.clone(), source: Arc::new(error) };
            // The socket may be registered with the reactor of another worker, which accepted it.
            io.rehome().map_err(fault)?;
            pool.keep_h2(worker, reverse_peer, &listener, io, HTTP_START_TIMEOUT).await?
        }
        // A QUIC connection is driven by its endpoint, which remains on the worker that accepted the connection.
        ReverseTransport::Quic(quic) => pool.keep_h3(worker, reverse_peer, &listener, quic, HTTP_START_TIMEOUT).await?,
    };
    tracing::info!(node = %reverse_peer.node, %source, listener = %listener.name, "reverse connection accepted");
    reverse_peer.is_newest(number, source.ip());
    let calls = async {
        if let Err(error) =
            send_call(&kept, Call::Begins { number: Some(number), wanted: Some(worker.shared.workers) }).await
        {
            // A peer that answers PING but no call would occupy this worker's slot forever and serve no session.
            return error;
        }
        tokio::select! {
            _ = connection.drain.wait() => {}
            // Another worker has no connection, so the node should dial a replacement, which is assigned to that
            // worker. Until then, this connection accepts requests.
            () = reverse_peer.leaving.has_told(number) => {}
        }
        // Sessions on this connection may last, and the node should dial the replacement before they end. The result is
        // ignored: if the call does not arrive, the node dials when the connection ends.
        let _ = send_call(&kept, Call::Leaving).await;
        connection.drain.wait().await;
        kept.retire();
        std::future::pending().await
    };
    tokio::select! {
        () = drive => {}
        () = kept.listen(keepalive, source.ip(), &slot) => {}
        error = calls => return Err(error),
        // The node has declared this connection dead. Its sessions end at once; those that can be retried use another
        // connection.
        () = reverse_peer.gone.has_told(number) => {}
    }
    tracing::info!(node = %reverse_peer.node, %source, "a reverse connection was closed");
    Ok(())
}

/// Spawns a task that performs a health check of a node. The check stops when the requester drops the reply channel.
pub fn query(worker: &Rc<Outbound>, query: Query) {
    let here = worker.clone();
    worker.spawn(async move {
        let Query { reverse_peer, path, mut reply } = query;
        let pool = here.pool(PoolKey::of_node(&reverse_peer.node));
        let answered = tokio::select! {
            answered = pool.get(&here, &reverse_peer.node, &path) => answered,
            () = reply.closed() => return,
        };
        let _ = reply.send(answered.map_err(|error| error.to_string()));
    });
}

/// Sends a call to the node, and records the connections that the node's answer declares dead.
async fn send_call(kept: &ReverseConnection, call: Call) -> Result<(), Error> {
    let node = &kept.reverse_peer.node;
    let request = call.request(node).ok_or_else(|| Error::Internal(format!("{node} is no authority to call")))?;
    let answer = kept.call(request).await?;
    kept.reverse_peer.gone.add(given_up(answer.headers()));
    Ok(())
}
