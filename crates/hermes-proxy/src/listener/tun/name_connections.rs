//! Connections to names through a device: a program resolved a name, and connects to the virtual address of the name.
//! Each TCP connection becomes CONNECT to the name, and each UDP flow becomes CONNECT-UDP.
//!
//! In: the packets of a prefix of virtual addresses. Out: the packets, translated (`ip::Translation`) so that the
//! kernel serves them at two sockets of the node. A client's SYN waits until the far end has accepted: the program sees
//! a refusal if the far end refuses, and "unreachable" if no route matches. A connection to port 80 is served as HTTP
//! and each request is decided separately, unless routes match only tunnels to the name. After a takeover, the old
//! process serves its connections until they end; UDP flows begin again in the new process. Limited: flows
//! (`name-sessions`), connections of the node, and the time until the kernel hands a connection over.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hermes_model::authority::Authority;
use hermes_model::decide::{Decision, decide};
use hermes_model::facts::{Facts, Kind, Trust};
use hermes_model::snapshot::{Listener, ListenerProtocol};
use hermes_net::udp::UdpSocket;
use hermes_net::{Io, tcp, udp};
use hermes_wire::ip::{self, IcmpError};
use hermes_wire::socks5::Reply;
use http::Method;
use ipnet::IpNet;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, oneshot, watch};

use super::source_for;
use crate::ip::{FlowKey, LocalDevice, Outcome, Owner, Translation, Transport, UnclaimedPackets, poll_send_into};
use crate::listener::socks5::reply_to;
use crate::listener::udp::{Targets, receive_all};
use crate::listener::{Ending, Ready, http as http_listener};
use crate::request::{Origin, Request, from_flow};
use crate::session::{self, DownstreamEnd, SessionOutcome};
use crate::worker::Worker;
use hermes_transport::oneshot::Oneshot;
use hermes_transport::runtime::session::{Connection, ConnectionGuard, Stage};
use hermes_transport::stream::ByteStream;

/// The port of HTTP without TLS.
const HTTP_PORT: u16 = 80;
/// Maximum time from the client's SYN until the kernel hands the connection over; afterwards the client has left.
const HANDOVER_TIMEOUT: Duration = Duration::from_secs(10);

/// The state shared by the tasks of one prefix.
struct Flows {
    worker: Rc<Worker>,
    listener: Arc<str>,
    local: Rc<LocalDevice>,
    translation: Rc<RefCell<Translation>>,
    /// The tasks that wait for a connection, by alias.
    expected: RefCell<HashMap<SocketAddr, oneshot::Sender<TcpStream>>>,
    /// The connections of TCP flows, by alias.
    connections: RefCell<HashMap<SocketAddr, Rc<Connection>>>,
    /// Notified when a connection ends.
    closed: Notify,
    /// Set when the prefix is no longer served.
    ended: watch::Sender<bool>,
}

/// Serves a prefix until its end. `before` ends once this task takes over the packets.
pub(super) async fn capture(
    worker: Rc<Worker>,
    listener: Arc<Listener>,
    prefix: IpNet,
    ending: Rc<Oneshot<Ending>>,
    before: Option<Rc<Oneshot<Ending>>>,
) {
    let owner = Owner::Listener(listener.name.clone());
    let ListenerProtocol::Tun(tun) = &listener.protocol else { return };
    let local = worker.devices.get(&tun.device);
    let pending = local.as_ref().and_then(|local| UnclaimedPackets::of(local, &owner, prefix));
    before.inspect(|before| before.set(Ending::Close));
    let (Some(local), Some(pending)) = (local, pending) else {
        return tracing::error!(listener = %listener.name, %prefix, "another session has the virtual addresses");
    };
    let opened = open_sockets(SocketAddr::new(source_for(tun, prefix), 0), &tun.device);
    let (accepting, receiving, translation) = match opened {
        Ok(opened) => opened,
        Err(error) => {
            return tracing::error!(
                listener = %listener.name, device = %tun.device, %error,
                "cannot open the sockets that serve names; connections to names fail"
            );
        }
    };
    let translation = Rc::new(RefCell::new(translation));
    let flows = Rc::new(Flows {
        worker: worker.clone(),
        listener: listener.name.clone(),
        local,
        translation: translation.clone(),
        expected: RefCell::default(),
        connections: RefCell::default(),
        closed: Notify::new(),
        ended: watch::Sender::new(false),
    });
    let udp_ending: Rc<Oneshot<Ending>> = Rc::default();
    let targets = Targets::Translated(translation);
    worker.spawn(receive_all(worker.clone(), receiving, listener.name.clone(), udp_ending.clone(), targets));
    tracing::info!(listener = %listener.name, %prefix, "connections to names are served");
    // True once another process serves new connections.
    let mut is_leaving = false;
    while !(is_leaving && flows.translation.borrow().has_no_connections()) {
        tokio::select! {
            biased;
            how = ending.wait(), if !is_leaving => match how {
                Ending::Close => break,
                Ending::HandOver => {
                    is_leaving = true;
                    tracing::info!(listener = %listener.name, %prefix, "another process serves new connections to names");
                    udp_ending.set(Ending::Close);
                }
            },
            () = flows.closed.notified() => {}
            accepted = accepting.accept() => flows.hand_over(accepted),
            packets = pending.next() => {
                // The device was removed. A new capture begins when it is created again.
                let Some(packets) = packets else { break };
                flows.take(packets).await;
                tokio::task::yield_now().await;
            }
        }
    }
    flows.ended.send_replace(true);
    udp_ending.set(Ending::Close);
}

type Sockets = (TcpListener, UdpSocket, Translation);

/// Opens the two sockets, bound to the device regardless of the routing table.
fn open_sockets(own: SocketAddr, device: &str) -> io::Result<Sockets> {
    let accepting = tcp::listen_on_device(own, device)?;
    let receiving = udp::listen_on_device(own, device)?;
    let translation = Translation::new(accepting.local_addr()?, receiving.local_addr()?);
    Ok((TcpListener::from_std(accepting)?, UdpSocket::from_std(receiving)?, translation))
}

impl Flows {
    /// Translates a batch of packets and begins new flows.
    async fn take(self: &Rc<Self>, packets: VecDeque<Bytes>) {
        let mut translated: VecDeque<Bytes> = packets.into_iter().filter_map(|packet| self.take_one(packet)).collect();
        let dropped = |reason, count| self.worker.shared.metrics.dropped(reason, count);
        let sent = std::future::poll_fn(|cx| poll_send_into(&self.local.queue, cx, &mut translated, &dropped)).await;
        if let Err(error) = sent {
            tracing::debug!(listener = %self.listener, %error, "translated packets could not be sent into the device");
        }
    }

    /// Translates one packet. `None` if the device receives no packet for it.
    fn take_one(self: &Rc<Self>, packet: Bytes) -> Option<Bytes> {
        let Ok(header) = ip::parse(&packet) else {
            self.worker.shared.metrics.dropped("malformed-packet", 1);
            return None;
        };
        let mut changed = packet.try_into_mut().unwrap_or_else(|packet| packet.as_ref().into());
        let now = self.worker.now();
        let outcome = self.translation.borrow_mut().translate(&mut changed, &header, now);
        match outcome {
            Outcome::Rewritten => return Some(changed.freeze()),
            Outcome::Begins(key) if self.begin(key, &changed, now) && key.transport == Transport::Udp => {
                let outcome = self.translation.borrow_mut().translate(&mut changed, &header, now);
                return (outcome == Outcome::Rewritten).then(|| changed.freeze());
            }
            Outcome::Begins(_) | Outcome::Waits => {}
            // The packet may belong to a connection of the previous process, which owned the device before the
            // takeover.
            Outcome::Unknown if header.protocol == ip::TCP => {
                let packet = changed.freeze();
                if self.local.pass_to_predecessor(&packet) {
                    return None;
                }
                self.worker.shared.metrics.dropped("no-session", 1);
                self.answer(ip::tcp_reset(&packet, &header));
            }
            Outcome::Unknown | Outcome::Untranslatable => self.local.refuse(&self.worker, &changed, "no-session"),
        }
        None
    }

    /// Begins a flow with its first packet. False if the flow was refused.
    fn begin(self: &Rc<Self>, key: FlowKey, packet: &[u8], now: u64) -> bool {
        let Some(name) = self.worker.name_of(key.target.ip()) else {
            self.local.refuse(&self.worker, packet, "no-name");
            return false;
        };
        let limit = self.worker.generation().snapshot.limits.name_sessions;
        let begun = self.translation.borrow_mut().begin(key, limit, now);
        let has_displaced = self.end_displaced();
        if has_displaced || begun.is_none() {
            self.worker.shared.metrics.limit("name-sessions");
        }
        let Some(alias) = begun else {
            self.local.refuse(&self.worker, packet, "name-sessions");
            return false;
        };
        if key.transport == Transport::Tcp && !self.begin_connection(key, alias, packet, name) {
            self.translation.borrow_mut().forget(&key);
            self.local.refuse(&self.worker, packet, "connections");
            return false;
        }
        true
    }

    /// Ends the connections of displaced flows. False if no flow was displaced.
    fn end_displaced(&self) -> bool {
        let displaced = self.translation.borrow_mut().take_displaced();
        let connections = self.connections.borrow();
        let is_tcp = displaced.iter().filter(|(transport, _)| *transport == Transport::Tcp);
        for connection in is_tcp.filter_map(|(_, alias)| connections.get(alias)) {
            connection.kill.set("displaced: limits.name-sessions reached, and this session was idle for longest");
        }
        !displaced.is_empty()
    }

    /// Begins a TCP connection. False if the node's connection table is full.
    fn begin_connection(self: &Rc<Self>, key: FlowKey, alias: SocketAddr, syn: &[u8], name: Arc<str>) -> bool {
        let Some(listener) = self.worker.generation().listener(&self.listener).cloned() else { return false };
        let Some(guard) = ConnectionGuard::take(&self.worker, listener, key.client, &Trust::Anonymous) else {
            return false;
        };
        self.connections.borrow_mut().insert(alias, guard.connection.clone());
        let (flows, syn) = (self.clone(), Bytes::copy_from_slice(syn));
        self.worker.spawn(async move {
            let (killed, mut ended) = (guard.connection.kill.wait(), flows.ended.subscribe());
            tokio::select! {
                biased;
                _ = ended.wait_for(|ended| *ended) => {}
                reason = killed => tracing::debug!(source = %key.client, reason, "a connection was closed"),
                () = flows.serve(&guard, key, &syn) => {}
            }
            flows.expected.borrow_mut().retain(|_, waiting| !waiting.is_closed());
            flows.connections.borrow_mut().remove(&alias);
            flows.translation.borrow_mut().close(Transport::Tcp, alias, flows.worker.now());
            flows.closed.notify_one();
            // The name keeps its address as long as a connection uses it.
            drop(name);
        });
        true
    }

    /// Opens the far end, then delivers the client's SYN to the node's socket, and relays.
    async fn serve(&self, guard: &ConnectionGuard, key: FlowKey, syn: &Bytes) {
        let (worker, connection) = (&self.worker, &guard.connection);
        connection.set_stage(worker, Stage::Idle);
        let _ = connection.trust.set(Trust::Anonymous);
        let listener = &connection.listener;
        let origin = Origin { worker, listener, source: key.client, trust: &Trust::Anonymous, secure: false };
        let Ok(authority) = Authority::parse(&key.target.to_string(), None) else { return };
        let served = match from_flow(&origin, Kind::Tcp, &authority, "") {
            Ok(request) if is_http(worker, &request, key) => {
                if let Some(tcp) = self.accept(key, syn).await {
                    connection.set_stage(worker, Stage::Handshake);
                    let ready =
                        Ready { io: Io::Plain(tcp), source: key.client, trust: Trust::Anonymous, secure: false };
                    http_listener::serve(worker, connection, ready).await;
                }
                return;
            }
            Ok(mut request) => {
                request.connection = Some(connection.clone());
                session::serve(worker, request).await
            }
            Err(rejected) => SessionOutcome::Response(session::reject(worker, *rejected)),
        };
        match served {
            SessionOutcome::Tunnel(tunnel) => match self.accept(key, syn).await {
                Some(tcp) => {
                    let near = ByteStream::io(Io::Plain(tcp), Bytes::new());
                    session::relay(DownstreamEnd::Stream(near), *tunnel).await;
                }
                None => {
                    let gone = hermes_transport::error::Error::ClientGone("TCP handshake incomplete".to_owned());
                    tunnel.session.entry.fail(&gone);
                }
            },
            SessionOutcome::Response(response) => {
                self.translation.borrow_mut().forget(&key);
                self.refuse(syn, reply_to(response.status(), response.headers()));
            }
        }
    }

    /// Delivers the client's SYN to the node's socket. `None`: the client has left.
    async fn accept(&self, key: FlowKey, syn: &Bytes) -> Option<TcpStream> {
        let (tell, told) = oneshot::channel();
        let header = ip::parse(syn).ok()?;
        let mut changed = syn.to_vec();
        {
            let mut translation = self.translation.borrow_mut();
            translation.open(&key);
            let outcome = translation.translate(&mut changed, &header, self.worker.now());
            if outcome != Outcome::Rewritten {
                return None;
            }
        }
        let (header, (port, _)) = (ip::parse(&changed).ok()?, ip::ports(&changed, &header)?);
        self.expected.borrow_mut().insert(SocketAddr::new(header.source, port), tell);
        // If the queue drops the SYN, the client retransmits it, and it is translated like any segment.
        let _ = self.local.queue.try_send(&[changed.into()]);
        tokio::time::timeout(HANDOVER_TIMEOUT, told).await.ok()?.ok()
    }

    /// Hands a connection to the task that waits for it, or closes it if no task waits.
    fn hand_over(&self, accepted: io::Result<(TcpStream, SocketAddr)>) {
        match accepted {
            Ok((tcp, alias)) => {
                if let Some(waiting) = self.expected.borrow_mut().remove(&alias) {
                    let _ = waiting.send(tcp);
                }
            }
            Err(error) => {
                self.worker.shared.metrics.limit("accept");
                tracing::debug!(listener = %self.listener, %error, "a connection to a name could not be accepted");
            }
        }
    }

    /// Answers a SYN as the far end would: refused, prohibited, or unreachable.
    fn refuse(&self, syn: &[u8], reply: Reply) {
        let Ok(header) = ip::parse(syn) else { return };
        let error = |trouble| ip::icmp_error(syn, &header, trouble, header.destination);
        self.worker.shared.metrics.dropped("no-session", 1);
        self.answer(match reply {
            Reply::Refused | Reply::Failed => ip::tcp_reset(syn, &header),
            Reply::NotAllowed => error(IcmpError::Prohibited),
            _ => error(IcmpError::NoRoute),
        });
    }

    fn answer(&self, packet: Option<Vec<u8>>) {
        if let Some(packet) = packet.filter(|_| self.worker.may_send_icmp_error()) {
            // The queue may drop the answer, like any packet.
            let _ = self.local.queue.try_send(&[packet.into()]);
        }
    }
}

/// True if a connection is served as HTTP: it targets port 80, and routes accept more than tunnels to the name.
fn is_http(worker: &Worker, tunnel: &Request<'_>, key: FlowKey) -> bool {
    let snapshot = &worker.generation().snapshot;
    let acts = |facts: &Facts| matches!(decide(facts, snapshot), Decision::Act(_));
    if key.target.port() != HTTP_PORT {
        return false;
    }
    let Ok(authority) = Authority::parse(tunnel.facts.authority.host(), Some(HTTP_PORT)) else { return false };
    let request = Facts { kind: Kind::Http, method: Method::GET, authority, ..(*tunnel.facts).clone() };
    acts(&request) || !acts(&tunnel.facts)
}
