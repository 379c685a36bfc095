//! Accepts local connections at Unix sockets.
//!
//! In: connections. Out: a task for each, within the limits of the node, as for a client at the loopback address. Never:
//! TLS or a PROXY header. The permissions of the socket decide who may connect.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::rc::Rc;

use hermes_model::snapshot::ListenerProtocol;
use tokio::net::{UnixListener, UnixStream};

use super::{Accept, CurrentListener, count_connection, ndn, trust_by_address};
use crate::worker::Worker;
use hermes_transport::runtime::session::{ConnectionGuard, Stage};

/// The address that every client counts as. The limits that hold for an address hold for all of them together.
const CLIENT_ADDRESS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

impl Accept for UnixListener {
    type Stream = UnixStream;

    async fn accept(&self) -> io::Result<(UnixStream, SocketAddr)> {
        Ok((UnixListener::accept(self).await?.0, CLIENT_ADDRESS))
    }

    fn into_queue(self) -> io::Result<impl FnMut() -> io::Result<(UnixStream, SocketAddr)>> {
        let listener = self.into_std()?;
        Ok(move || {
            let (stream, _) = listener.accept()?;
            stream.set_nonblocking(true)?;
            Ok((UnixStream::from_std(stream)?, CLIENT_ADDRESS))
        })
    }
}

/// Begins to serve a connection.
pub(super) fn begin(worker: &Rc<Worker>, known: &mut CurrentListener, stream: UnixStream, source: SocketAddr) {
    let Some((state, is_configured)) = known.current(worker) else { return };
    let trust = trust_by_address(&state.listener, source);
    let Some(guard) = ConnectionGuard::take(worker, state.listener.clone(), source, &trust) else { return };
    if !is_configured {
        guard.connection.start_drain(worker);
    }
    count_connection(worker, &guard.connection);
    let worker = worker.clone();
    worker.clone().spawn(async move {
        let connection = guard.connection.clone();
        connection.set_stage(&worker, Stage::Idle);
        if let ListenerProtocol::Ndn(config) = &connection.listener.protocol
            && connection.is_of(&worker, &trust, source)
        {
            tokio::select! {
                biased;
                () = Box::pin(ndn::serve(&worker, &connection, config, stream, source, trust)) => {}
                reason = connection.kill.wait() => tracing::debug!(listener = %connection.listener.name, reason, "a connection was closed"),
            }
        }
        drop(guard);
    });
}
