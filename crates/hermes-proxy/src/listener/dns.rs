//! DNS for programs without proxy support: answers some names locally and forwards all other queries.
//!
//! In: queries over UDP, or over TCP (`stream`). Out: for overlay names, an address of a reserved prefix, which
//! sessions to it map back to the name (`names`). For other names, the unmodified answer of another server (`forward`).
//! Queries for other names are always forwarded; queries for overlay names never leave this machine. The number of
//! pending queries is limited for each listener and client; a query beyond the limit fails.

mod forward;
pub(super) mod stream;

use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::stream::{FuturesUnordered, Stream};
use hermes_model::authority::Authority;
use hermes_model::snapshot::{Dns, ListenerProtocol};
use hermes_net::udp::UdpSocket;
use hermes_wire::dns::{Answer, Kind, Question, Refusal};

use self::forward::DnsTransport;
use super::{CurrentListener, Ending};
use crate::worker::Worker;
use hermes_outbound::generation::ListenerState;
use hermes_outbound::virtual_ip::{TTL, VirtualIpPool};
use hermes_transport::metrics::QuestionLabels;
use hermes_transport::oneshot::Oneshot;
use hermes_transport::runtime::fair_shares::{Bound, Holder, Owner, Share};
use hermes_transport::runtime::yield_to_network;

/// Receive calls before other tasks run.
const ROUNDS: usize = 16;

/// The outcome of a message.
enum QueryOutcome {
    /// The node answers with this message.
    Answered(Bytes),
    /// The query must be forwarded to another server.
    Forwarded(Box<Forwarded>),
    /// The message receives no response.
    Dropped,
}

/// A query for another server.
struct Forwarded {
    question: Question,
    message: Bytes,
    listener: Arc<str>,
    servers: Vec<SocketAddr>,
    pending: Rc<Pending>,
    /// The query's entry among the pending queries.
    _share: Share,
}

/// A query that waits for another server's answer.
struct Pending {
    asked_at: u64,
    displaced: Oneshot<()>,
}

impl Holder for Pending {
    fn is_idle(&self, _: u64) -> bool {
        false
    }

    fn is_answered(&self) -> bool {
        false
    }

    fn used_at(&self) -> u64 {
        self.asked_at
    }

    fn is_ending(&self) -> bool {
        self.displaced.get().is_some()
    }

    fn displace(&self) {
        self.displaced.set(());
    }
}

impl Forwarded {
    /// Forwards the query. The result is always an answer, if necessary a failure.
    async fn query(self, worker: &Worker, carrier: DnsTransport) -> Bytes {
        let answer = tokio::select! {
            biased;
            () = self.pending.displaced.wait() => None,
            answer = forward::query(worker, &self.question, &self.message, &self.servers, carrier) => answer,
        };
        count(worker, &self.listener, if answer.is_some() { "forwarded" } else { "failed" });
        if answer.is_none()
            && !self.pending.is_ending()
            && let Some(more) = worker.shared.unanswered.happened(worker.now())
        {
            let (listener, servers) = (&self.listener, &self.servers);
            if servers.is_empty() {
                tracing::warn!(%listener, more, "no DNS server other than this node is configured; name one in `forward`");
            } else {
                tracing::warn!(%listener, ?servers, more, "no DNS server responds");
            }
        }
        answer.unwrap_or_else(|| self.question.answer(&Answer::Failed, 0))
    }
}

/// Decides the outcome of a message.
fn consider(worker: &Rc<Worker>, state: &ListenerState, source: IpAddr, message: Bytes) -> QueryOutcome {
    let ListenerProtocol::Dns(dns) = &state.listener.protocol else { return QueryOutcome::Dropped };
    let listener = &state.listener.name;
    let question = match Question::parse(&message) {
        Ok(question) => question,
        Err(Refusal(answer)) => {
            count(worker, listener, "refused");
            return answer.map_or(QueryOutcome::Dropped, QueryOutcome::Answered);
        }
    };
    if let Some(answer) = own_answer(worker, dns, &question) {
        count(worker, listener, "answered");
        return QueryOutcome::Answered(answer);
    }
    if !dns.ipv6 && question.is_internet() && question.kind() == Kind::Aaaa {
        // NXDOMAIN would be wrong: the name may exist, and the client also queries its IPv4 address.
        count(worker, listener, "answered");
        return QueryOutcome::Answered(question.answer(&Answer::Addresses(&[]), TTL));
    }
    let limit = worker.generation().snapshot.limits.dns_questions;
    let bound = Bound { name: "dns-questions", limit, reserve: 0, bounds_closing: false };
    match Share::take(worker, &state.shares.flows, Owner::stranger(source), bound) {
        Some(share) => {
            let servers = servers(worker, dns);
            let pending = Rc::new(Pending { asked_at: worker.now(), displaced: Oneshot::default() });
            share.is_held_by(&pending);
            QueryOutcome::Forwarded(Box::new(Forwarded {
                question,
                message,
                listener: listener.clone(),
                servers,
                pending,
                _share: share,
            }))
        }
        None => {
            count(worker, listener, "failed");
            QueryOutcome::Answered(question.answer(&Answer::Failed, 0))
        }
    }
}

fn count(worker: &Worker, listener: &Arc<str>, outcome: &'static str) {
    let labels = QuestionLabels { listener: listener.clone(), outcome };
    worker.shared.metrics.dns_questions.get_or_create(&labels).inc();
}

/// The answer to a query about an overlay name or a reserved address.
fn own_answer(worker: &Worker, dns: &Dns, question: &Question) -> Option<Bytes> {
    if !question.is_internet() {
        return None;
    }
    let generation = worker.generation();
    let table = generation.name_table(&dns.addresses)?;
    if let Some(address) = question.address().filter(|address| dns.addresses.contains(*address)) {
        let name = table.name_of(address, worker.now());
        let answer = match (&name, question.kind()) {
            (Some(name), Kind::Ptr | Kind::Any) => Answer::Name(name),
            (Some(_), _) => Answer::Addresses(&[]),
            (None, _) => Answer::NoSuchName,
        };
        return Some(question.answer(&answer, TTL));
    }
    let name = question.name();
    if !dns.names.iter().any(|pattern| pattern.matches(&name)) {
        return None;
    }
    // Patterns such as `*.corp` also match names that are not valid hosts. A connection to such a name would be
    // refused.
    if Authority::parse(&name, None).is_err() {
        return Some(question.answer(&Answer::NoSuchName, TTL));
    }
    let found = addresses(worker, table, &name, question.kind(), generation.snapshot.limits.dns_names);
    Some(question.answer(&found.as_deref().map_or(Answer::Failed, Answer::Addresses), TTL))
}

/// The addresses of the queried type. `None` if the name cannot get an address at the moment.
fn addresses(worker: &Worker, table: &VirtualIpPool, name: &str, kind: Kind, most: usize) -> Option<Vec<IpAddr>> {
    let (wants_v4, wants_v6) = match kind {
        Kind::A => (true, false),
        Kind::Aaaa => (false, true),
        Kind::Any => (true, true),
        Kind::Ptr | Kind::Other => return Some(Vec::new()),
    };
    let Some(found) = table.addresses_of(name, most, worker.now()) else {
        worker.shared.metrics.limit("dns-names");
        return None;
    };
    let v4 = found.v4.filter(|_| wants_v4).map(IpAddr::from);
    let v6 = found.v6.filter(|_| wants_v6).map(IpAddr::from);
    Some(v4.into_iter().chain(v6).collect())
}

/// The servers for other names. This node is excluded, since the query would loop.
fn servers(worker: &Worker, dns: &Dns) -> Vec<SocketAddr> {
    let generation = worker.generation();
    let mut servers = if dns.forward.is_empty() { worker.resolver.servers() } else { dns.forward.clone() };
    servers.retain(|server| {
        let is_own = |bind: SocketAddr| bind.ip().to_canonical() == server.ip().to_canonical();
        let mut own = generation.snapshot.listeners.iter().filter(|listener| {
            matches!(listener.protocol, ListenerProtocol::Dns(_))
                && listener.bind.is_some_and(|bind| is_own(bind) && bind.port() == server.port())
        });
        own.next().is_none()
    });
    servers
}

/// Answers questions by UDP, until the listener closes.
pub(super) async fn receive_all(
    worker: Rc<Worker>,
    socket: UdpSocket,
    known: CurrentListener,
    ending: Rc<Oneshot<Ending>>,
) {
    let mut server = Server { worker, socket: Rc::new(socket), known, under_way: FuturesUnordered::new() };
    std::future::poll_fn(|cx| {
        if ending.poll(cx).is_ready() {
            return Poll::Ready(());
        }
        server.poll(cx)
    })
    .await;
    // Pending queries are still answered, while another process may already own the port.
    let Server { worker, mut under_way, .. } = server;
    worker.spawn(async move {
        std::future::poll_fn(|cx| {
            while std::task::ready!(Pin::new(&mut under_way).poll_next(cx)).is_some() {}
            Poll::Ready(())
        })
        .await;
    });
}

/// The pending queries of one UDP socket.
struct Server {
    worker: Rc<Worker>,
    socket: Rc<UdpSocket>,
    known: CurrentListener,
    under_way: FuturesUnordered<Pin<Box<dyn Future<Output = ()>>>>,
}

impl Server {
    /// Never ready.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        for _ in 0..ROUNDS {
            let (worker, socket) = (self.worker.clone(), self.socket.clone());
            let received = {
                let mut buffer = worker.udp_buffer.borrow_mut();
                socket.poll_receive(cx, &mut buffer, |source, message| self.serve(source, message))
            };
            if let Poll::Ready(Err(error)) = &received {
                tracing::debug!(listener = %self.known.name, %error, "a DNS listener could not receive");
            }
            while let Poll::Ready(Some(())) = Pin::new(&mut self.under_way).poll_next(cx) {}
            if received.is_pending() {
                return Poll::Pending;
            }
        }
        yield_to_network(cx);
        Poll::Pending
    }

    fn serve(&mut self, source: SocketAddr, message: Bytes) {
        let Some((state, _)) = self.known.current(&self.worker) else { return };
        match consider(&self.worker, state, source.ip(), message) {
            QueryOutcome::Answered(answer) => send(&self.worker, &self.socket, source, &answer),
            QueryOutcome::Dropped => {}
            QueryOutcome::Forwarded(forwarded) => {
                let (worker, socket) = (self.worker.clone(), self.socket.clone());
                self.under_way.push(Box::pin(async move {
                    let answer = forwarded.query(&worker, DnsTransport::Udp).await;
                    send(&worker, &socket, source, &answer);
                }));
            }
        }
    }
}

/// Sends an answer. A lost answer makes the client retry, as with any datagram.
fn send(worker: &Worker, socket: &UdpSocket, to: SocketAddr, answer: &Bytes) {
    if let Err(error) = socket.try_send(to, answer, answer.len().max(1)) {
        tracing::debug!(%to, %error, "cannot send a DNS response");
        worker.shared.metrics.dropped("send-failed", 1);
    }
}
