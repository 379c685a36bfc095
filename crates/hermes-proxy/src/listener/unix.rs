//! Listeners at Unix sockets: programs of this machine connect by a path.
//!
//! In: connections. Out: a task for each, within the limits of the node, as for a client at the loopback address. Never:
//! TLS or a PROXY header. The permissions of the socket decide who may connect.

use std::net::{Ipv4Addr, SocketAddr};
use std::rc::Rc;

use hermes_model::snapshot::ListenerProtocol;
use tokio::net::{UnixListener, UnixStream};

use super::{CurrentListener, Ending, MAX_ACCEPT_BACKLOG, count_connection, ndn, pause_after, trust_by_address};
use crate::worker::Worker;
use hermes_transport::oneshot::Oneshot;
use hermes_transport::runtime::session::{ConnectionGuard, Stage};

/// The address of every client. The limits that hold for an address hold for all of them together.
const CLIENT: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// Accepts until the listener ends.
pub(super) async fn accept_all(
    worker: Rc<Worker>,
    listener: UnixListener,
    mut known: CurrentListener,
    ending: Rc<Oneshot<Ending>>,
) {
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    begin(&worker, &mut known, stream);
                    tokio::task::yield_now().await;
                }
                Err(error) => pause_after(&worker, &known.name, &error).await,
            },
            _ = ending.wait() => {
                drain_queue(&worker, listener, &mut known);
                return;
            }
        }
    }
}

/// Serves connections that the kernel has accepted, which a close would reset.
fn drain_queue(worker: &Rc<Worker>, listener: UnixListener, known: &mut CurrentListener) {
    let Ok(listener) = listener.into_std() else { return };
    for _ in 0..MAX_ACCEPT_BACKLOG {
        let accepted = listener.accept().and_then(|(stream, _)| {
            stream.set_nonblocking(true)?;
            UnixStream::from_std(stream)
        });
        let Ok(stream) = accepted else { return };
        begin(worker, known, stream);
    }
}

fn begin(worker: &Rc<Worker>, known: &mut CurrentListener, stream: UnixStream) {
    let Some((state, is_there)) = known.current(worker) else { return };
    let trust = trust_by_address(&state.listener, CLIENT);
    let Some(guard) = ConnectionGuard::take(worker, state.listener.clone(), CLIENT, &trust) else { return };
    if !is_there {
        guard.connection.start_drain(worker);
    }
    count_connection(worker, &guard.connection);
    let worker = worker.clone();
    worker.clone().spawn(async move {
        let connection = guard.connection.clone();
        connection.set_stage(&worker, Stage::Idle);
        if let ListenerProtocol::Ndn(config) = &connection.listener.protocol
            && connection.is_of(&worker, &trust, CLIENT)
        {
            tokio::select! {
                biased;
                () = Box::pin(ndn::serve(&worker, &connection, config, stream, (CLIENT, trust))) => {}
                reason = connection.kill.wait() => tracing::debug!(reason, "a face was closed"),
            }
        }
        drop(guard);
    });
}
