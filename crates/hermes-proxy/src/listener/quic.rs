//! QUIC connections of an HTTP listener.
//!
//! In: a place in a group of UDP sockets. Out: a task a connection, within the limits of the node. A
//! listener that closes lets its connections finish at their socket; one that opens there again shares it
//! with them.

use std::cell::Cell;
use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::Poll;

use hermes_model::facts::Trust;
use hermes_model::snapshot::ClientAuth;
use hermes_net::quic::{self, Group, Incoming, Server};
use hermes_wire::h3::Code;

use super::http::Client;
use super::{Ending, Known, h3, note_failed_handshake, trust_of};
use crate::h3::link;
use crate::live::{Connection, ConnectionGuard, Path};
use crate::metrics::ListenerLabels;
use crate::reverse::{self, Carrier, arrival};
use crate::signal::Signal;
use crate::worker::Worker;

/// An endpoint of this worker, and which of those who accepted there did so last: two would accept for
/// two listeners while one replaces the other.
pub(crate) struct Door {
    server: Server,
    group: Arc<Group>,
    slot: u8,
    reign: Cell<u64>,
    changed: Signal<()>,
}

impl Door {
    /// Tells the metrics what happened since the last time.
    pub(crate) fn tell(&self, worker: &Worker) {
        let (passed_on, lost) = self.server.passed_on();
        worker.shared.metrics.quic_passed_on.inc_by(passed_on);
        if lost > 0 {
            worker.shared.metrics.dropped("passing-on", lost);
        }
    }
}

/// The endpoints of a worker, those of closed listeners too, for as long as they have connections.
pub(crate) type Doors = Vec<Weak<Door>>;

/// A turn at a door.
pub(super) struct Turn {
    door: Rc<Door>,
    reign: u64,
}

/// Opens the endpoint of a listener, or finds the one that is at its socket already.
pub(super) fn open(worker: &Worker, group: &Arc<Group>, slot: u8, known: &Known) -> io::Result<Turn> {
    let quic = known.state.as_ref().and_then(|state| state.quic.clone());
    let (config, reset) = quic.map(|quic| (quic.config, quic.reset)).unzip();
    let mut doors = worker.quic_doors.borrow_mut();
    doors.retain(|door| door.strong_count() > 0);
    let there = doors.iter().filter_map(Weak::upgrade);
    let door = match there.into_iter().find(|door| Arc::ptr_eq(&door.group, group) && door.slot == slot) {
        Some(door) => {
            door.server.endpoint().set_server_config(config);
            door
        }
        None => {
            let largest = worker.generation().snapshot.limits.quic_largest_mtu;
            let server = Server::open(group, slot, config, reset.as_ref(), largest, &worker.quic)?;
            let door =
                Rc::new(Door { server, group: group.clone(), slot, reign: Cell::new(0), changed: Signal::default() });
            doors.push(Rc::downgrade(&door));
            door
        }
    };
    expect_strangers(&door.server, known);
    let reign = door.reign.get() + 1;
    door.reign.set(reign);
    door.changed.nudge();
    Ok(Turn { door, reign })
}

/// Where a client needs no certificate anybody may be one.
fn expect_strangers(server: &Server, known: &Known) {
    let tls = known.state.as_ref().and_then(|state| state.listener.tls.as_ref());
    if tls.is_some_and(|tls| tls.client != ClientAuth::Required) {
        server.expect_strangers();
    }
}

/// Accepts until the listener ends, and stays for its connections.
pub(super) async fn accept_all(worker: Rc<Worker>, turn: Turn, mut known: Known, ending: Rc<Signal<Ending>>) {
    let Turn { door, reign } = turn;
    let endpoint = door.server.endpoint();
    let how = loop {
        tokio::select! {
            incoming = endpoint.accept() => match incoming {
                Some(incoming) => {
                    begin(&worker, &mut known, incoming);
                    // A reload may have changed who is one.
                    expect_strangers(&door.server, &known);
                }
                None => return,
            },
            how = ending.wait() => break how,
        }
    };
    match how {
        Ending::Close => drop(worker.spawn(refuse_all(door, reign))),
        Ending::HandOver => {
            door.server.part();
            worker.spawn(finish(worker.clone(), door, known));
        }
    }
}

/// The connections of a closed listener finish, at its socket. Who comes anew is told at once, for as long.
async fn refuse_all(door: Rc<Door>, reign: u64) {
    let endpoint = door.server.endpoint();
    let succeeded = std::future::poll_fn(|cx| match door.reign.get() {
        now if now == reign => door.changed.poll(cx),
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

/// Another process accepts now, and passes on to us what is ours: connections, and those that had begun.
async fn finish(worker: Rc<Worker>, door: Rc<Door>, mut known: Known) {
    let endpoint = door.server.endpoint();
    while let Some(incoming) = endpoint.accept().await {
        begin(&worker, &mut known, incoming);
    }
}

fn begin(worker: &Rc<Worker>, known: &mut Known, incoming: Incoming) {
    let Some((state, is_there)) = known.current(worker) else { return incoming.ignore() };
    let Some(quic) = &state.quic else { return incoming.refuse() };
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
    if !is_there {
        guard.connection.part(worker);
    }
    let labels = ListenerLabels { listener: state.listener.name.clone() };
    worker.shared.metrics.connections.get_or_create(&labels).inc();
    // Counted from here: many may come before the first of them runs. Not the configuration that the endpoint had when
    // the client's first packet came.
    let config = quic::for_one(&quic.config, quic.bounds);
    let handshake = Handshake::begin(worker, incoming, config);
    worker.spawn(serve(worker.clone(), guard, handshake));
}

/// A connection that can be read.
pub(super) struct Begun {
    pub(super) quic: quic::Connection,
    /// Ready with true at the end of the handshake, where that is to come; with false where it fails.
    pub(super) confirming: Option<Pin<Box<dyn Future<Output = bool>>>>,
    /// Our control stream, where it is open already.
    pub(super) control: Option<quic::SendStream>,
}

impl Begun {
    /// One whose handshake is over.
    pub(super) fn whole(quic: quic::Connection) -> Self {
        Self { quic, confirming: None, control: None }
    }

    /// The URIs of the client's certificate. A client that was known before showed it then; another one may show
    /// it at the end of its handshake.
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

/// A handshake under way, counted.
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

    /// Waits for its end; where `early` data are taken, only until they could be read. Not those of a client that
    /// may have written somebody else's address on its packets: what it asks is decided by that too.
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
                // Of a server quinn does not tell by it how the handshake ended.
                confirmed.await;
                drop(self);
                shaken.close_reason().is_none()
            };
            return Ok(Begun { quic, confirming: Some(Box::pin(confirming)), control: None });
        }
        let settings = h3::ours(&self.worker.generation().snapshot.limits);
        let greeting = async {
            // A neighbour that is called has other things to say first.
            let is_line = quic::alpn(&quic).as_deref() == Some(reverse::ALPN_H3);
            if is_line { Ok(None) } else { link::greet(&quic, settings).await.map(Some) }
        };
        // Nothing of the client's is read before its handshake is over.
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
            arrival::take(worker, &connection.listener, &trust, source, Carrier::Quic(begun.quic));
        }
        Ok((begun, trust, false)) => {
            let _ = connection.path.set(Path::new(begun.quic.clone()));
            if !connection.is_of(worker, &trust, source) {
                let reason = b"limits.connections of this node is reached";
                return begun.quic.close(link::number(Code::ExcessiveLoad), reason);
            }
            let client = Client { source, trust, secure: true, line: None };
            Box::pin(h3::serve_begun(worker, connection, begun, client)).await;
        }
        Err(error) => note_failed_handshake(worker, connection, &error),
    }
}
