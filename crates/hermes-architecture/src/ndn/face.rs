//! Hands the NDN packets of a session to a face of a forwarder.
//!
//! In: a session that an `ndn` listener began, here or at an earlier node. Out: the stream of its packets, connected to
//! the forwarder by UDP, TCP or a Unix socket. Each session is a face of its own. Never: a packet that is parsed beyond
//! its frame.

use std::cell::RefCell;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;
use hermes_model::facts::{Facts, Kind};
use hermes_model::snapshot::{Face as FaceConfig, FaceUri, HostPort, Route};
use hermes_ndn::MAX_PACKET;
use hermes_net::udp::{self, UdpSocket};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;
use tokio::sync::mpsc;

use super::link::{DatagramLink, count_lost, next_frames, read_packets, write_packets};
use super::packet_stream::{PacketStream, QUEUE_PACKETS};
use crate::{Architecture, Opening};
use hermes_outbound::outbound::Outbound;
use hermes_outbound::outbound::connect::{Destination, addresses, connect};
use hermes_transport::error::{Error, NO_CONNECTION};
use hermes_transport::runtime::session::SessionEntry;
use hermes_transport::stream::ByteStream;

/// A face: queues of packets in both directions. It closes when both are dropped.
pub(crate) struct Face {
    pub(crate) to_face: mpsc::Sender<Bytes>,
    pub(crate) from_face: mpsc::Receiver<Bytes>,
}

/// NDN, as a route with `terminate: {ndn: ...}` uses it for sessions of packets.
pub(crate) struct Ndn<'a> {
    pub(crate) outbound: &'a Rc<Outbound>,
    pub(crate) config: &'a FaceConfig,
    pub(crate) route: &'a Route,
}

impl Architecture for Ndn<'_> {
    fn keyword(&self) -> &'static str {
        "ndn"
    }

    /// The names are in the packets.
    fn reaches(&self, facts: &Facts) -> bool {
        facts.kind == Kind::Tcp
    }

    /// Connects to the forwarder. The errors are those of [`connect_face`].
    fn open<'a>(&'a self, entry: &'a SessionEntry) -> Opening<'a> {
        Box::pin(async move {
            let face = connect_face(self.outbound, entry, self.config, self.route).await?;
            *entry.peer.borrow_mut() = Some(label(&self.config.uri, self.route));
            Ok(ByteStream::Boxed(Box::new(PacketStream::new(face.from_face, face.to_face))))
        })
    }
}

/// Connects to a forwarder.
///
/// # Errors
/// The forwarder does not resolve, or refuses the connection.
pub(crate) async fn connect_face(
    worker: &Rc<Outbound>,
    entry: &SessionEntry,
    config: &FaceConfig,
    route: &Route,
) -> Result<Face, Error> {
    let label = label(&config.uri, route);
    *entry.peer.borrow_mut() = Some(label.clone());
    let within = route.timeout.connect;
    let failed = |source| Error::no_connection(&worker.shared.metrics, &label, source);
    let late = |missing| Error::ConnectTimeout { peer: label.clone(), missing, after: within };
    match &config.uri {
        FaceUri::Tcp(target) => {
            let io = connect(worker, &destination(target, &label), within).await?;
            Ok(over_stream(worker, io))
        }
        FaceUri::Udp(target) => {
            let found = tokio::time::timeout(within, addresses(worker, &target.host, None)).await;
            let found = found.map_err(|_| late("get an address"))??;
            let address =
                found.now().first().ok_or_else(|| Error::Resolve(format!("{} has no address", target.host)))?;
            over_datagrams(worker, (*address, target.port).into(), config.reliable).map_err(failed)
        }
        FaceUri::Unix(path) => {
            let connected = tokio::time::timeout(within, UnixStream::connect(&**path)).await;
            Ok(over_stream(worker, connected.map_err(|_| late(NO_CONNECTION))?.map_err(failed)?))
        }
    }
}

pub(super) fn label(uri: &FaceUri, route: &Route) -> Arc<str> {
    Arc::from(format!("{}/{uri}", route.name))
}

fn destination<'a>(target: &'a HostPort, label: &'a Arc<str>) -> Destination<'a> {
    Destination {
        host: &target.host,
        port: target.port,
        label,
        reach: None,
        guarded: false,
        tls: None,
        proxy_source: None,
        source: None,
        congestion: None,
        urgent: false,
    }
}

fn over_stream(worker: &Rc<Outbound>, stream: impl AsyncRead + AsyncWrite + Unpin + 'static) -> Face {
    let (to_tunnel, from_face) = mpsc::channel(QUEUE_PACKETS);
    let (to_face, mut packets) = mpsc::channel(QUEUE_PACKETS);
    worker.spawn(async move {
        let (mut read, mut write) = tokio::io::split(stream);
        let reading = read_packets(&mut read, async |packet| drop(to_tunnel.send(packet).await));
        let ended = tokio::select! {
            ended = reading => ended,
            ended = write_packets(&mut write, &mut packets) => ended,
            () = to_tunnel.closed() => Ok(()),
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "the face of a forwarder has ended");
        }
    });
    Face { to_face, from_face }
}

fn over_datagrams(worker: &Rc<Outbound>, forwarder: SocketAddr, is_reliable: bool) -> io::Result<Face> {
    let socket = udp::connect(forwarder)?;
    hermes_net::host::spare(&socket)?;
    let peer = socket.peer_addr()?;
    let socket = Rc::new(UdpSocket::from_std(socket)?);
    let mtu = udp::whole_payload(forwarder).unwrap_or(MAX_PACKET);
    let (to_tunnel, from_face) = mpsc::channel(QUEUE_PACKETS);
    let (to_face, packets) = mpsc::channel(QUEUE_PACKETS);
    let link = Rc::new(RefCell::new(DatagramLink::new(mtu, is_reliable, worker.random().1)));
    worker.spawn(receive(worker.clone(), socket.clone(), link.clone(), to_tunnel, to_face.downgrade()));
    worker.spawn(send(worker.clone(), socket, link, peer, packets));
    Ok(Face { to_face, from_face })
}

/// Receives packets of the forwarder. While the tunnel has no room, datagrams wait in the kernel.
async fn receive(
    worker: Rc<Outbound>,
    socket: Rc<UdpSocket>,
    link: Rc<RefCell<DatagramLink>>,
    to_tunnel: mpsc::Sender<Bytes>,
    to_face: mpsc::WeakSender<Bytes>,
) {
    let mut datagrams = Vec::new();
    loop {
        let receiving = std::future::poll_fn(|cx| {
            let mut buffer = worker.udp_buffer.borrow_mut();
            socket.poll_receive(cx, &mut buffer, |_, datagram| datagrams.push(datagram))
        });
        let received = tokio::select! {
            received = receiving => received,
            () = to_tunnel.closed() => return,
        };
        // The forwarder may be restarting, which the kernel reports as a refused datagram.
        if received.is_err() {
            worker.shared.metrics.dropped("send-failed", 1);
        }
        for datagram in datagrams.drain(..) {
            let Ok(received) = link.borrow_mut().take(datagram) else {
                worker.shared.metrics.dropped("ndn-malformed", 1);
                continue;
            };
            if let Some(to_face) = to_face.upgrade() {
                received.answers.into_iter().for_each(|answer| drop(to_face.try_send(answer)));
            }
            if let Some(packet) = received.packet
                && to_tunnel.send(packet.encode()).await.is_err()
            {
                return;
            }
        }
    }
}

/// Sends packets to the forwarder until the tunnel has ended.
async fn send(
    worker: Rc<Outbound>,
    socket: Rc<UdpSocket>,
    link: Rc<RefCell<DatagramLink>>,
    peer: SocketAddr,
    mut packets: mpsc::Receiver<Bytes>,
) {
    while let Some(frames) = next_frames(&link, &mut packets, |packet| packet).await {
        count_lost(&worker, &link);
        for frame in frames {
            if socket.send(peer, &frame).await.is_err() {
                worker.shared.metrics.dropped("send-failed", 1);
            }
        }
    }
}
