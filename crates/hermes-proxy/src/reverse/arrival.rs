//! A node's connection arrives: its neighbour's side.
//!
//! In: a connection over which a node has shown its certificate and offered to serve. Out: a connection
//! in the pool of the node's name, on the worker that needs one most, for as long as it lives. Only
//! nodes that an upstream names are taken.

use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use hermes_model::facts::Trust;
use hermes_model::snapshot::Listener;
use http::StatusCode;
use tokio::sync::oneshot;

use super::{Call, Carrier, Place, Presence, given_up};
use crate::error::Error;
use crate::live::{Connection, ConnectionGuard};
use crate::upstream::pool::{Kept, PoolKey};
use crate::worker::Worker;

/// From TLS to HTTP: the far end has dialled, and is in no doubt what to say.
const BEGIN: Duration = Duration::from_secs(5);

/// A connection that has arrived, on its way to its worker.
pub(crate) struct Arrived {
    carrier: Carrier,
    source: SocketAddr,
    trust: Trust,
    listener: Arc<Listener>,
    place: Place,
}

/// Takes a connection that a node offers to serve on.
pub(crate) fn take(worker: &Rc<Worker>, listener: &Arc<Listener>, trust: &Trust, source: SocketAddr, carrier: Carrier) {
    let node = trust.peer().and_then(|peer| peer.node.clone());
    let presence = match named(worker, node.as_ref()) {
        Ok(presence) => presence,
        Err(reason) => {
            if let Some(more) = worker.shared.handshakes.happened(worker.now()) {
                let name = &listener.name;
                tracing::warn!(listener = %name, %source, more, "{reason}");
            }
            return;
        }
    };
    let place = presence.deal(worker.number, worker.shared.workers);
    let to = place.worker;
    let arrived = Arrived { carrier, source, trust: trust.clone(), listener: listener.clone(), place };
    if to == worker.number {
        adopt(worker, arrived);
    } else if !worker.shared.pass_on(to, arrived) {
        // Closed: the node dials again.
        worker.shared.metrics.limit("reverse-connections");
    }
}

/// The node, where this node's document has a use for it.
fn named(worker: &Worker, node: Option<&Arc<str>>) -> Result<Arc<Presence>, String> {
    let Some(node) = node else {
        return Err("a client that is no node offers to serve; its certificate has no URI .../node/NAME".to_owned());
    };
    worker.generation().node(node).cloned().ok_or_else(|| {
        format!("node {node} offers to serve, and no upstream names it; add one with endpoints: [{{node: {node}}}]")
    })
}

/// Has a connection, from now to its end.
pub(crate) fn adopt(worker: &Rc<Worker>, arrived: Arrived) {
    let taken = ConnectionGuard::take(worker, arrived.listener.clone(), arrived.source, &arrived.trust);
    let Some(guard) = taken else { return };
    let here = worker.clone();
    worker.spawn(async move {
        let presence = arrived.place.presence.clone();
        let connection = guard.connection.clone();
        let _ = connection.trust.set(arrived.trust.clone());
        // It is nobody's request, and waits for none.
        connection.enter(&here);
        tokio::select! {
            biased;
            result = serve(&here, &connection, arrived) => {
                if let Err(error) = result {
                    tracing::info!(node = %presence.node, %error, "a connection that the node kept did not begin");
                }
            }
            reason = connection.kill.wait() => tracing::debug!(node = %presence.node, reason, "a connection was closed"),
        }
        drop(guard);
    });
}

async fn serve(worker: &Rc<Worker>, connection: &Rc<Connection>, arrived: Arrived) -> Result<(), Error> {
    let Arrived { carrier, source, listener, place, .. } = arrived;
    let (presence, number) = (&place.presence, place.number);
    let pool = worker.pool(PoolKey::of_node(&presence.node));
    let (kept, drive, pulse) = match carrier {
        Carrier::Tcp(mut io) => {
            let fault = |error| Error::Connect { peer: presence.node.clone(), source: Arc::new(error) };
            // It may have been accepted on another thread.
            io.rehome().map_err(fault)?;
            pool.keep_h2(worker, presence, &listener, io, BEGIN).await?
        }
        // QUIC's own part stays with the socket, on the worker that accepted it.
        Carrier::Quic(quic) => pool.keep_h3(worker, presence, &listener, quic, BEGIN).await?,
    };
    tracing::info!(node = %presence.node, %source, listener = %listener.name, "a node keeps a connection to us");
    presence.is_newest(number, source.ip());
    let calls = async {
        if let Err(error) = say(&kept, Call::Begins { number: Some(number), wanted: Some(worker.shared.workers) }).await
        {
            // Whoever answers PING and no call would have its place for good, and no session be served there.
            return error;
        }
        tokio::select! {
            _ = connection.drain.wait() => {}
            // It takes requests until its successor is there, which will be on the worker that has none.
            () = presence.leaving.has_told(number) => {}
        }
        // What runs on it may last: the node shall not wait for its end to dial whoever comes after us. That it is not
        // heard the connection's end tells.
        let _ = say(&kept, Call::Leaving).await;
        connection.drain.wait().await;
        kept.retire();
        std::future::pending().await
    };
    tokio::select! {
        () = drive => {}
        () = kept.listen(pulse, source.ip(), &place) => {}
        error = calls => return Err(error),
        // Its sessions are told at once, and those that may begin again do so on another one.
        () = presence.gone.has_told(number) => {}
    }
    tracing::info!(node = %presence.node, %source, "a connection that a node kept is over");
    Ok(())
}

/// What the health of a node is asked for, by way of its connection.
pub(crate) struct Question {
    pub(crate) presence: Arc<Presence>,
    pub(crate) path: String,
    pub(crate) reply: oneshot::Sender<Result<StatusCode, String>>,
}

/// Asks. Ends with whoever asks.
pub(crate) fn ask(worker: &Rc<Worker>, question: Question) {
    let here = worker.clone();
    worker.spawn(async move {
        let Question { presence, path, mut reply } = question;
        let pool = here.pool(PoolKey::of_node(&presence.node));
        let answered = tokio::select! {
            answered = pool.get(&here, &presence.node, &path) => answered,
            () = reply.closed() => return,
        };
        let _ = reply.send(answered.map_err(|error| error.to_string()));
    });
}

/// Calls the node.
async fn say(kept: &Kept, call: Call) -> Result<(), Error> {
    let node = &kept.presence.node;
    let request = call.request(node).ok_or_else(|| Error::Internal(format!("{node} is no authority to call")))?;
    let answer = kept.call(request).await?;
    kept.presence.gone.tell(given_up(answer.headers()));
    Ok(())
}
