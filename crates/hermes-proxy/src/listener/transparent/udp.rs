//! UDP flows to other hosts, intercepted on their way: each becomes CONNECT-UDP to the address that the client used.
//!
//! In: the first datagrams of each pair of source and destination. Out: a session for each pair, with a socket of its own
//! that has the destination's address. The kernel delivers later datagrams to that socket. Never: a datagram of a flow
//! beyond `limits.udp-flows`.

use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;
use hermes_model::facts::{Kind, Trust};
use hermes_net::transparent;
use hermes_net::udp::UdpSocket;

use super::super::flow_table::{FlowTable, unless_displaced};
use super::super::{Ending, open, udp::feed};
use super::request;
use crate::request::Origin;
use crate::session::{self, DownstreamEnd, SessionOutcome};
use crate::worker::Worker;
use hermes_transport::datagram::{Flow, FlowQueue, Port};
use hermes_transport::oneshot::Oneshot;
use hermes_transport::runtime::fair_shares::Share;

/// Begins flows until the listener ends. Live flows continue on their own sockets.
pub(in super::super) async fn receive_all(
    worker: Rc<Worker>,
    socket: tokio::net::UdpSocket,
    name: Arc<str>,
    ending: Rc<Oneshot<Ending>>,
) {
    let shares = worker.generation().listening(&name).map(|state| state.shares.flows.clone()).unwrap_or_default();
    let mut flows = FlowTable::new(&worker, shares);
    loop {
        tokio::select! {
            biased;
            _ = ending.wait() => return,
            received = transparent::receive(&socket) => match received {
                Ok(received) => begin(&worker, &name, &mut flows, received),
                Err(error) => tracing::debug!(listener = %name, %error, "a datagram was not received"),
            },
        }
        flows.wake();
        flows.forget_closed();
    }
}

fn begin(
    worker: &Rc<Worker>,
    name: &Arc<str>,
    flows: &mut FlowTable<(SocketAddr, SocketAddr)>,
    (datagram, source, destination): (Bytes, SocketAddr, SocketAddr),
) {
    let key = (source, destination);
    let Some(datagram) = flows.offer(&key, datagram) else { return };
    let own = transparent::udp_at(destination, source).and_then(UdpSocket::from_std);
    let own = match own {
        Ok(own) => Rc::new(own),
        Err(error) => {
            worker.shared.metrics.dropped("flow-failed", 1);
            tracing::debug!(%source, %destination, %error, "a flow has no socket");
            return;
        }
    };
    let Some((queue, share)) = flows.begin(key, (&Trust::Anonymous, source.ip()), &own, datagram) else { return };
    worker.spawn(feed(worker.clone(), own, source, queue.clone()));
    worker.spawn(serve(worker.clone(), name.clone(), destination, source, queue, share));
}

async fn serve(
    worker: Rc<Worker>,
    name: Arc<str>,
    destination: SocketAddr,
    source: SocketAddr,
    queue: Rc<FlowQueue>,
    share: Share,
) {
    serve_flow(&worker, &name, destination, Flow::new(queue.clone(), source)).await;
    queue.close();
    drop(share);
}

async fn serve_flow(worker: &Rc<Worker>, name: &Arc<str>, destination: SocketAddr, flow: Flow) {
    let Some(listener) = worker.generation().listener(name).cloned() else { return };
    let trust = Trust::Anonymous;
    let origin = Origin { worker, listener: &listener, source: flow.peer, trust: &trust, secure: false };
    let queue = flow.queue.clone();
    let mut near = Port::Flow(flow);
    let opened = open(worker, None, &mut near, request(&origin, Kind::Udp, destination));
    if let Some(SessionOutcome::Tunnel(tunnel)) = unless_displaced(&queue, opened).await {
        session::relay(DownstreamEnd::Datagrams(near), *tunnel).await;
    }
}
