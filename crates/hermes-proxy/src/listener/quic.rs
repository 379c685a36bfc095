//! QUIC connections of an HTTP listener.
//!
//! In: a bound UDP socket of this worker. Out: a task a connection, within the limits of the node. A
//! listener that closes lets its connections finish.

use std::io;
use std::rc::Rc;

use hermes_net::quic::{self, Endpoint, Incoming};

use super::http::Client;
use super::{Ending, Known, h3, trust_of};
use crate::live::{Connection, ConnectionGuard};
use crate::metrics::ListenerLabels;
use crate::signal::Signal;
use crate::worker::Worker;

/// Handshakes under way on a worker beyond which a client has to show first that it has its address.
const UNPROVEN: usize = 64;

/// Opens the endpoint of a listener.
pub(super) fn open(worker: &Worker, socket: std::net::UdpSocket, known: &Known) -> io::Result<Endpoint> {
    socket.set_nonblocking(true)?;
    let config = known.state.as_ref().and_then(|state| state.quic.clone());
    quic::endpoint(socket, config, worker.number, &worker.quic)
}

/// Accepts until the listener ends, and stays for its connections.
pub(super) async fn accept_all(worker: Rc<Worker>, endpoint: Endpoint, mut known: Known, ending: Rc<Signal<Ending>>) {
    let mut generation = known.generation;
    loop {
        tokio::select! {
            incoming = endpoint.accept() => match incoming {
                Some(incoming) => {
                    let Some((state, _)) = known.current(&worker) else { return };
                    let config = state.quic.clone();
                    if std::mem::replace(&mut generation, known.generation) != generation {
                        endpoint.set_server_config(config);
                    }
                    begin(&worker, &mut known, incoming, endpoint.open_connections());
                }
                None => return,
            },
            _ = ending.wait() => break,
        }
    }
    endpoint.set_server_config(None);
    // Its connections have been told to finish; the socket is theirs until then.
    worker.spawn(async move { endpoint.wait_idle().await });
}

fn begin(worker: &Rc<Worker>, known: &mut Known, incoming: Incoming, open: usize) {
    let Some((state, is_there)) = known.current(worker) else { return };
    if open > UNPROVEN && !incoming.remote_address_validated() && incoming.may_retry() {
        let _ = incoming.retry();
        return;
    }
    let Some(guard) = ConnectionGuard::take(worker, state.listener.clone(), incoming.remote_address()) else {
        incoming.refuse();
        return;
    };
    if !is_there {
        guard.connection.part(worker);
    }
    let labels = ListenerLabels { listener: state.listener.name.clone() };
    worker.shared.metrics.connections.get_or_create(&labels).inc();
    worker.spawn(serve(worker.clone(), guard, incoming));
}

async fn serve(worker: Rc<Worker>, guard: ConnectionGuard, incoming: Incoming) {
    let connection = guard.connection.clone();
    tokio::select! {
        biased;
        () = serve_connection(&worker, &connection, incoming) => {}
        reason = connection.kill.wait() => tracing::debug!(source = %connection.source, reason, "a connection was closed"),
    }
    drop(guard);
}

async fn serve_connection(worker: &Rc<Worker>, connection: &Rc<Connection>, incoming: Incoming) {
    let listener = connection.listener.clone();
    let ready = async {
        let quic = incoming.await.map_err(io::Error::other)?;
        let trust = trust_of(worker, &listener, quic::peer_uris(&quic), connection.source)?;
        Ok::<_, io::Error>((quic, trust))
    };
    match ready.await {
        Ok((quic, trust)) => {
            let client = Client { source: connection.source, trust, secure: true };
            Box::pin(h3::serve(worker, connection, quic, client)).await;
        }
        Err(error) => {
            let labels = ListenerLabels { listener: listener.name.clone() };
            worker.shared.metrics.handshake_failures.get_or_create(&labels).inc();
            if let Some(more) = worker.shared.handshakes.happened(worker.now()) {
                tracing::info!(listener = %listener.name, source = %connection.source, %error, more, "handshake failed");
            }
        }
    }
}
