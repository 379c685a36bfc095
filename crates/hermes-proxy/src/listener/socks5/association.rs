//! UDP ASSOCIATE: the datagrams of one client, each prefixed with its target (RFC 1928, 7).
//!
//! In: a control connection, and the datagrams of its client on a dedicated socket. Out: one flow for each target, with
//! responses prefixed by the target's address. The association and its flows end with the control connection. Datagrams
//! of other senders are dropped: by address, and by port once the client has used or announced one. Fragments are
//! dropped. Never: over TLS, since the datagrams would travel unencrypted beside it.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::stream::{FuturesUnordered, Stream};
use hermes_model::facts::Kind;
use hermes_net::udp::{self, UdpSocket};
use hermes_wire::socks5::{self, Host, Reply, Socks5Error, Target};

use super::{refuse, send_reply};
use crate::listener::flow_table::{self, FlowTable};
use crate::listener::http::Client;
use crate::listener::open;
use crate::request::{Origin, from_target};
use crate::session::{self, DownstreamEnd, SessionOutcome};
use crate::worker::Worker;
use hermes_transport::datagram::{CLOSE_TIMEOUT, Flow, FlowQueue, Port};
use hermes_transport::runtime::fair_shares::{Holder, Share};
use hermes_transport::runtime::session::{Connection, Stage};
use hermes_transport::runtime::yield_to_network;
use hermes_transport::stream::ByteStream;

/// Iterations before other tasks run.
const ROUNDS: usize = 16;

/// Serves an association until its connection ends.
pub(super) async fn serve(
    worker: &Rc<Worker>,
    connection: &Rc<Connection>,
    client: Client,
    target: &Target,
    mut near: ByteStream,
) {
    let socket = match relay_socket(&client, &near) {
        Ok(socket) => socket,
        Err((reply, error)) => {
            tracing::debug!(source = %client.source, %error, "no datagrams are relayed");
            return refuse(near, reply).await;
        }
    };
    let shares = worker.generation().listening(&connection.listener.name).map(|state| state.shares.flows.clone());
    let shares = shares.unwrap_or_default();
    // The association itself counts as a flow, since it holds a socket.
    let Some(share) = flow_table::take(worker, &shares, &client.trust, client.source.ip()) else {
        return refuse(near, Reply::Failed).await;
    };
    let place = Rc::new(AssociationSlot(connection.clone()));
    share.is_held_by(&place);
    let Ok(bound) = socket.local_addr() else { return };
    if send_reply(&mut near, Reply::Succeeded, bound).await.is_err() {
        return;
    }
    connection.is_shared.set(true);
    connection.set_stage(worker, Stage::Idle);
    let mut association = Association {
        source: expected_source(&client, target),
        table: FlowTable::new(worker, shares),
        worker: worker.clone(),
        connection: connection.clone(),
        client: Rc::new(client),
        socket: Rc::new(socket),
        flows: FuturesUnordered::new(),
    };
    std::future::poll_fn(|cx| association.poll(cx, &mut near)).await;
    association.end().await;
}

/// The association's entry among the flows of its listener.
struct AssociationSlot(Rc<Connection>);

/// An association is never idle: its client may use it at any time.
impl Holder for AssociationSlot {
    fn is_idle(&self, _: u64) -> bool {
        false
    }

    /// An association with flows is displaced after all single flows.
    fn used_at(&self) -> u64 {
        if matches!(self.0.stage(), Stage::Busy(_)) { u64::MAX } else { self.0.used_at() }
    }

    fn is_ending(&self) -> bool {
        self.0.is_ending()
    }

    fn displace(&self) {
        self.0.kill.set("displaced: limits.udp-flows reached, and this client has the most flows");
    }
}

/// Binds a socket at the address where the client reached this node.
fn relay_socket(client: &Client, near: &ByteStream) -> Result<UdpSocket, (Reply, io::Error)> {
    let ByteStream::Io { io, .. } = near else {
        return Err((Reply::Failed, io::ErrorKind::Unsupported.into()));
    };
    if client.secure {
        let error = io::Error::other("datagrams would be sent unencrypted beside the TLS connection");
        return Err((Reply::CommandUnsupported, error));
    }
    let open = || {
        let mut address = io.tcp().local_addr()?;
        address.set_port(0);
        UdpSocket::from_std(udp::bind(address)?)
    };
    open().map_err(|error| (Reply::Failed, error))
}

/// The source address of the client's datagrams; port 0 means unknown. The announced port counts only if the announced
/// address equals the address seen here: behind NAT they differ.
fn expected_source(client: &Client, target: &Target) -> SocketAddr {
    let seen = client.source.ip();
    let port = match target.host {
        Host::Ip(ip) if ip.is_unspecified() || ip.to_canonical() == seen.to_canonical() => target.port,
        _ => 0,
    };
    SocketAddr::new(seen, port)
}

struct Association {
    worker: Rc<Worker>,
    connection: Rc<Connection>,
    client: Rc<Client>,
    socket: Rc<UdpSocket>,
    source: SocketAddr,
    /// The flows, keyed by the datagram header, which names the target.
    table: FlowTable<Bytes>,
    flows: FuturesUnordered<Pin<Box<dyn Future<Output = ()>>>>,
}

impl Association {
    /// Ready when the connection has ended.
    fn poll(&mut self, cx: &mut Context<'_>, near: &mut ByteStream) -> Poll<()> {
        for _ in 0..ROUNDS {
            // The control connection carries no further messages; incoming bytes are discarded.
            let heard = match near.poll_read(cx) {
                Poll::Ready(Ok(Some(_))) => true,
                Poll::Ready(Ok(None) | Err(_)) => return Poll::Ready(()),
                Poll::Pending => false,
            };
            let received = match self.poll_receive(cx) {
                Poll::Ready(Ok(_)) => true,
                Poll::Ready(Err(error)) => {
                    tracing::debug!(source = %self.client.source, %error, "an association could not receive");
                    return Poll::Ready(());
                }
                Poll::Pending => false,
            };
            while let Poll::Ready(Some(())) = Pin::new(&mut self.flows).poll_next(cx) {}
            if !heard && !received {
                return Poll::Pending;
            }
        }
        yield_to_network(cx);
        Poll::Pending
    }

    fn poll_receive(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let (worker, socket) = (self.worker.clone(), self.socket.clone());
        let received = {
            let mut buffer = worker.udp_buffer.borrow_mut();
            socket.poll_receive(cx, &mut buffer, |source, datagram| self.deliver(source, datagram))
        };
        if received.is_ready() {
            self.table.wake();
            self.table.forget_closed();
        }
        received
    }

    fn deliver(&mut self, source: SocketAddr, datagram: Bytes) {
        let metrics = &self.worker.shared.metrics;
        if !self.is_client(source) {
            return metrics.dropped("not-the-client", 1);
        }
        let (header, payload) = match socks5::split_datagram(datagram) {
            Ok(parts) => parts,
            Err(Socks5Error::Fragment) => return metrics.dropped("fragment", 1),
            Err(_) => return metrics.dropped("malformed", 1),
        };
        self.source = source;
        let Some(payload) = self.table.offer(&header[..], payload) else { return };
        if self.connection.takes_no_more(&self.worker) {
            return self.worker.shared.metrics.dropped("listener-removed", 1);
        }
        // Copied: a slice would keep the whole datagram alive as long as the flow.
        let header = Bytes::copy_from_slice(&header);
        let begun = self.table.begin(header.clone(), (&self.client.trust, source.ip()), &self.socket, payload);
        let Some((queue, share)) = begun else { return };
        let flow = Flow::with_header(queue, source, header.clone());
        let served = serve_flow(self.worker.clone(), self.connection.clone(), self.client.clone(), header, flow, share);
        self.flows.push(Box::pin(served));
    }

    fn is_client(&self, source: SocketAddr) -> bool {
        let same = |a: IpAddr, b: IpAddr| a.to_canonical() == b.to_canonical();
        same(source.ip(), self.source.ip()) && (self.source.port() == 0 || self.source.port() == source.port())
    }

    /// The control connection has ended, so its flows end too, gracefully if possible.
    async fn end(mut self) {
        let queues: Vec<Rc<FlowQueue>> = self.table.known.values().map(|known| known.queue.clone()).collect();
        queues.iter().for_each(|queue| queue.finish());
        let ended = std::future::poll_fn(|cx| {
            while std::task::ready!(Pin::new(&mut self.flows).poll_next(cx)).is_some() {}
            Poll::Ready(())
        });
        let _ = tokio::time::timeout(CLOSE_TIMEOUT, ended).await;
    }
}

async fn serve_flow(
    worker: Rc<Worker>,
    connection: Rc<Connection>,
    client: Rc<Client>,
    header: Bytes,
    flow: Flow,
    share: Share,
) {
    let queue = flow.queue.clone();
    let listener = connection.current_listener(&worker);
    let (source, trust) = (flow.peer, &client.trust);
    let origin = Origin { worker: &worker, listener: &listener, source, trust, secure: false };
    // The header parses: it was split from a valid datagram.
    let Ok(target) = socks5::datagram_target(&header) else { return };
    let request = from_target(&origin, Kind::Udp, &target.to_string());
    let mut near = Port::Flow(flow);
    let opened = flow_table::unless_displaced(&queue, open(&worker, Some(&connection), &mut near, request)).await;
    if let Some(SessionOutcome::Tunnel(tunnel)) = opened {
        session::relay(DownstreamEnd::Datagrams(near), *tunnel).await;
    }
    queue.close();
    drop(share);
}
