//! QUIC connections of an HTTP listener.
//!
//! In: a slot in a group of UDP sockets. Out: one task for each connection, within the limits of the node. Connections
//! of a closed listener finish on its socket. A listener that opens there again shares the socket with them.

use std::cell::Cell;
use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::Poll;

use hermes_model::facts::Trust;
use hermes_model::snapshot::{ClientAuth, Step};
use hermes_net::quic::{self, Group, Incoming, Server};
use hermes_wire::h3::Code;

use super::http::Client;
use super::{CurrentListener, Ending, h3, note_failed_handshake, trust_of};
use crate::worker::Worker;
use hermes_outbound::outbound::reverse_acceptor;
use hermes_outbound::reverse::{self, ReverseTransport};
use hermes_transport::h3::connection;
use hermes_transport::metrics::ListenerLabels;
use hermes_transport::oneshot::Oneshot;
use hermes_transport::runtime::session::{Connection, ConnectionGuard, QuicPath};

/// A QUIC endpoint of this worker. `reign` counts the acceptors that used it: while one listener replaces another, only
/// the latest acceptor accepts.
pub(crate) struct QuicAcceptor {
    server: Server,
    group: Arc<Group>,
    slot: u8,
    reign: Cell<u64>,
    changed: Oneshot<()>,
}

impl QuicAcceptor {
    /// Adds the events since the last call to the metrics.
    fn report_metrics(&self, worker: &Worker) {
        let (passed_on, lost) = self.server.passed_on();
        worker.shared.metrics.quic_forwarded.inc_by(passed_on);
        if lost > 0 {
            worker.shared.metrics.dropped("not-forwarded", lost);
        }
    }
}

/// The QUIC endpoints of a worker. An endpoint of a closed listener stays as long as it has connections.
#[derive(Default)]
pub(crate) struct QuicAcceptors(Vec<Weak<QuicAcceptor>>);

impl QuicAcceptors {
    /// Adds the events of all endpoints to the metrics.
    pub(crate) fn report_metrics(&self, worker: &Worker) {
        self.0.iter().filter_map(Weak::upgrade).for_each(|acceptor| acceptor.report_metrics(worker));
    }
}

/// The right of one acceptor to accept at an endpoint, until the next acceptor takes over.
pub(super) struct Turn {
    acceptor: Rc<QuicAcceptor>,
    reign: u64,
}

/// Opens the endpoint of a listener, or reuses the endpoint that already serves this socket.
pub(super) fn open(
    worker: &Worker,
    acceptors: &mut QuicAcceptors,
    group: &Arc<Group>,
    slot: u8,
    known: &CurrentListener,
) -> io::Result<Turn> {
    let quic = known.state.as_ref().and_then(|state| state.quic.clone());
    let (config, reset) = quic.map(|quic| (quic.config, quic.reset)).unzip();
    let acceptors = &mut acceptors.0;
    acceptors.retain(|acceptor| acceptor.strong_count() > 0);
    let there = acceptors.iter().filter_map(Weak::upgrade);
    let acceptor = match there.into_iter().find(|acceptor| Arc::ptr_eq(&acceptor.group, group) && acceptor.slot == slot)
    {
        Some(acceptor) => {
            acceptor.server.endpoint().set_server_config(config);
            acceptor
        }
        None => {
            let largest = worker.generation().snapshot.limits.quic_max_mtu;
            let server = Server::open(group, slot, config, reset.as_ref(), largest, &worker.quic)?;
            let acceptor = Rc::new(QuicAcceptor {
                server,
                group: group.clone(),
                slot,
                reign: Cell::new(0),
                changed: Oneshot::default(),
            });
            acceptors.push(Rc::downgrade(&acceptor));
            acceptor
        }
    };
    expect_strangers(&acceptor.server, known);
    let reign = acceptor.reign.get() + 1;
    acceptor.reign.set(reign);
    acceptor.changed.nudge();
    Ok(Turn { acceptor, reign })
}

/// Tells the endpoint to expect untrusted clients, unless the listener requires client certificates.
fn expect_strangers(server: &Server, known: &CurrentListener) {
    let tls = known.state.as_ref().and_then(|state| state.listener.tls.as_ref());
    if tls.is_some_and(|tls| tls.client != ClientAuth::Required) {
        server.expect_strangers();
    }
}

/// Accepts until the listener ends; afterwards its connections continue.
pub(super) async fn accept_all(
    worker: Rc<Worker>,
    turn: Turn,
    mut known: CurrentListener,
    ending: Rc<Oneshot<Ending>>,
) {
    let Turn { acceptor, reign } = turn;
    let endpoint = acceptor.server.endpoint();
    let how = loop {
        tokio::select! {
            incoming = endpoint.accept() => match incoming {
                Some(incoming) => {
                    begin(&worker, &mut known, incoming);
                    // A reload may have changed the listener's client authentication.
                    expect_strangers(&acceptor.server, &known);
                }
                None => return,
            },
            how = ending.wait() => break how,
        }
    };
    match how {
        Ending::Close => drop(worker.spawn(refuse_all(acceptor, reign))),
        Ending::HandOver => {
            acceptor.server.stop_reading();
            worker.spawn(finish(worker.clone(), acceptor, known));
        }
    }
}

/// Lets connections of a closed listener finish on its socket, and meanwhile refuses new connections at once.
async fn refuse_all(acceptor: Rc<QuicAcceptor>, reign: u64) {
    let endpoint = acceptor.server.endpoint();
    let succeeded = std::future::poll_fn(|cx| match acceptor.reign.get() {
        now if now == reign => acceptor.changed.poll(cx),
        _ => Poll::Ready(()),
    });
    let mut succeeded = pin!(succeeded);
    loop {
        tokio::select! {
            biased;
            () = &mut succeeded => return,
            incoming = endpoint.accept() => match incoming {
                Some(incoming) => incoming.refuse(),
                None => return,
            },
            () = endpoint.wait_idle() => return,
        }
    }
}

/// Serves the rest after a takeover: the new process accepts, and forwards datagrams of this process's connections and
/// of handshakes that had begun.
async fn finish(worker: Rc<Worker>, acceptor: Rc<QuicAcceptor>, mut known: CurrentListener) {
    let endpoint = acceptor.server.endpoint();
    while let Some(incoming) = endpoint.accept().await {
        begin(&worker, &mut known, incoming);
    }
}

fn begin(worker: &Rc<Worker>, known: &mut CurrentListener, incoming: Incoming) {
    let Some((state, is_there)) = known.current(worker) else { return incoming.ignore() };
    let Some(quic) = &state.quic else { return incoming.refuse() };
    if worker.overload.takes(Step::Stop) {
        // The client repeats the packet, and finds the node eased or goes elsewhere.
        worker.shared.metrics.limit("overload");
        return incoming.ignore();
    }
    let is_confined_elsewhere = worker.is_confined_elsewhere(&state.listener.name);
    if is_confined_elsewhere && !incoming.remote_address_validated() {
        // The client may have chosen this worker by an id. One that answers a Retry of this worker had no choice.
        incoming.refuse();
        return;
    }
    let has_many = worker.quic_handshakes.get() >= worker.generation().snapshot.limits.handshakes;
    if has_many && !incoming.remote_address_validated() && incoming.may_retry() {
        worker.shared.metrics.limit("handshakes");
        let _ = incoming.retry();
        return;
    }
    let source = incoming.remote_address();
    let Some(guard) = ConnectionGuard::take(worker, state.listener.clone(), source, &Trust::Anonymous) else {
        incoming.refuse();
        return;
    };
    if !is_there || is_confined_elsewhere {
        guard.connection.start_drain(worker);
    }
    let labels = ListenerLabels { listener: state.listener.name.clone() };
    worker.shared.metrics.connections.get_or_create(&labels).inc();
    // The connection counts from here on, since many can arrive before the first one runs. The configuration is the
    // current one, not the one that was active at the client's first packet.
    let config = quic::for_one(&quic.config, quic.bounds);
    let handshake = Handshake::begin(worker, incoming, config);
    worker.spawn_for(&state.listener, serve(worker.clone(), guard, handshake));
}

/// A connection from which streams can be read, perhaps before its handshake is complete.
pub(super) struct Begun {
    pub(super) quic: quic::Connection,
    /// Resolves at the end of a pending handshake: true on success, false on failure.
    pub(super) confirming: Option<Pin<Box<dyn Future<Output = bool>>>>,
    /// The control stream of this node, if it is already open.
    pub(super) control: Option<quic::SendStream>,
}

impl Begun {
    /// A connection whose handshake is complete.
    pub(super) fn whole(quic: quic::Connection) -> Self {
        Self { quic, confirming: None, control: None }
    }

    /// The URIs of the client's certificate. A resumed client presented it in an earlier connection; another client may
    /// present it at the end of its handshake.
    async fn uris(&mut self, may_be_shown: bool) -> io::Result<Option<Vec<String>>> {
        let known = quic::peer_uris(&self.quic);
        if known.is_some() || !may_be_shown {
            return Ok(known);
        }
        self.end().await?;
        Ok(quic::peer_uris(&self.quic))
    }

    /// Waits for the end of the handshake.
    async fn end(&mut self) -> io::Result<()> {
        let Some(confirming) = self.confirming.take() else { return Ok(()) };
        if confirming.await { Ok(()) } else { Err(io::Error::other("the handshake broke off")) }
    }
}

/// A handshake in progress, which counts towards the limit.
struct Handshake {
    incoming: Option<Incoming>,
    config: Arc<quic::ServerConfig>,
    worker: Rc<Worker>,
}

impl Handshake {
    fn begin(worker: &Rc<Worker>, incoming: Incoming, config: quic::ServerConfig) -> Self {
        worker.quic_handshakes.set(worker.quic_handshakes.get() + 1);
        Self { incoming: Some(incoming), config: Arc::new(config), worker: worker.clone() }
    }

    /// Waits for the end of the handshake, or with `early`, only until early data can be read. Early data of a client
    /// with an unvalidated address must wait: the source address may be forged, and routing depends on it.
    async fn finish(mut self, early: bool) -> io::Result<Begun> {
        let incoming = self.incoming.take().ok_or(io::ErrorKind::NotConnected)?;
        let may_be_early = early && incoming.remote_address_validated();
        let mut handshake = incoming.accept_with(self.config.clone()).map_err(io::Error::other)?;
        handshake.handshake_data().await.map_err(io::Error::other)?;
        let (quic, confirmed) = match handshake.into_0rtt() {
            Ok(readable) => readable,
            Err(whole) => return whole.await.map(Begun::whole).map_err(io::Error::other),
        };
        if may_be_early {
            let shaken = quic.clone();
            let confirming = async move {
                // On a server, quinn's future does not report whether the handshake succeeded.
                confirmed.await;
                drop(self);
                shaken.close_reason().is_none()
            };
            return Ok(Begun { quic, confirming: Some(Box::pin(confirming)), control: None });
        }
        let settings = h3::ours(&self.worker.generation().snapshot.limits);
        let greeting = async {
            // A reverse connection exchanges other messages first.
            let is_line = quic::alpn(&quic).as_deref() == Some(reverse::ALPN_H3);
            if is_line { Ok(None) } else { connection::greet(&quic, settings).await.map(Some) }
        };
        // Data of the client is not read before its handshake is complete.
        let (greeted, _) = tokio::join!(greeting, confirmed);
        match quic.close_reason() {
            None => Ok(Begun { control: greeted?, ..Begun::whole(quic) }),
            Some(reason) => Err(io::Error::other(reason)),
        }
    }
}

impl Drop for Handshake {
    fn drop(&mut self) {
        self.worker.quic_handshakes.set(self.worker.quic_handshakes.get() - 1);
    }
}

async fn serve(worker: Rc<Worker>, guard: ConnectionGuard, handshake: Handshake) {
    let connection = guard.connection.clone();
    tokio::select! {
        biased;
        () = serve_connection(&worker, &connection, handshake) => {}
        reason = connection.kill.wait() => {
            tracing::debug!(source = %connection.source.get(), reason, "a connection was closed");
            connection.path.get().into_iter().for_each(|path| path.close(reason));
        }
    }
    drop(guard);
}

async fn serve_connection(worker: &Rc<Worker>, connection: &Rc<Connection>, handshake: Handshake) {
    let source = connection.source.get();
    let listener = connection.current_listener(worker);
    let asks = listener.tls.as_ref().is_some_and(|tls| tls.client != ClientAuth::None);
    let ready = async {
        let mut begun = handshake.finish(listener.early_data).await?;
        let is_line = quic::alpn(&begun.quic).as_deref() == Some(reverse::ALPN_H3);
        if is_line {
            begun.end().await?;
        }
        let uris = begun.uris(asks).await?;
        let trust = trust_of(worker, &connection.listener, uris, source)?;
        Ok::<_, io::Error>((begun, trust, is_line))
    };
    match ready.await {
        Ok((begun, trust, true)) => {
            reverse_acceptor::take(worker, &connection.listener, &trust, source, ReverseTransport::Quic(begun.quic));
        }
        Ok((begun, trust, false)) => {
            let _ = connection.path.set(QuicPath::new(begun.quic.clone()));
            if !connection.is_of(worker, &trust, source) {
                let reason = b"the bound of connections of this node or listener is reached";
                return begun.quic.close(connection::number(Code::ExcessiveLoad), reason);
            }
            let client = Client { source, trust, secure: true, uplink: None };
            Box::pin(h3::serve_begun(worker, connection, begun, client)).await;
        }
        Err(error) => note_failed_handshake(worker, connection, &error),
    }
}
