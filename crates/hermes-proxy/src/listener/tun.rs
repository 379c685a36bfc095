//! The packets of a device: every captured prefix is a session, and becomes CONNECT-IP (RFC 9484).
//!
//! In: the document's captures, each on one worker. Out: a tunnel that is opened at once, and again whenever it
//! ends, with growing pauses. What the device is sent meanwhile is dropped: it never goes another way.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use hermes_model::facts::Trust;
use hermes_model::snapshot::{Capture, Listener, ListenerProtocol, Tun};
use ipnet::IpNet;

use crate::datagram::Port;
use crate::ip::{End, Link, Owner};
use crate::request::{Origin, from_capture};
use crate::session::{self, Near, Served};
use crate::signal::Signal;
use crate::worker::Worker;

/// The first pause before a tunnel is opened again; doubles.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// The longest.
const LAST_PAUSE: Duration = Duration::from_secs(5);

/// What one worker captures.
#[derive(Default)]
pub(crate) struct Captures(HashMap<(Arc<str>, IpNet), Running>);

struct Running {
    listener: Arc<Listener>,
    ending: Rc<Signal<()>>,
}

impl Captures {
    /// Captures what the document says now, as far as it is this worker's share.
    pub(crate) fn follow(&mut self, worker: &Rc<Worker>) {
        let generation = worker.generation();
        let (mine, all) = (worker.number, worker.shared.workers.max(1));
        let mut wanted = HashMap::new();
        for listener in &generation.snapshot.listeners {
            let ListenerProtocol::Tun(tun) = &listener.protocol else { continue };
            let share = tun.captures.iter().enumerate().filter(|(index, _)| index % all == mine);
            wanted.extend(share.map(|(_, capture)| ((listener.name.clone(), capture.network), listener.clone())));
        }
        self.0.retain(|place, running| {
            let stays = wanted.contains_key(place);
            if !stays {
                running.ending.set(());
            }
            stays
        });
        for (place, listener) in wanted {
            let same = |running: &Running| asks_alike(&running.listener, &listener, place.1);
            if self.0.get(&place).is_some_and(same) {
                continue;
            }
            // The old one goes on until the new one is open: it takes the packets over.
            let ending: Rc<Signal<()>> = Rc::default();
            let before = self.0.insert(place.clone(), Running { listener: listener.clone(), ending: ending.clone() });
            let capturing = capture(worker.clone(), listener, place.1, ending, before.map(|running| running.ending));
            worker.spawn(capturing);
        }
    }

    /// Ends all.
    pub(crate) fn end(&mut self) {
        self.0.drain().for_each(|(_, running)| running.ending.set(()));
    }
}

/// The session of a prefix would be asked for in the same way.
fn asks_alike(one: &Listener, other: &Listener, network: IpNet) -> bool {
    let parts = |listener: &Listener| match &listener.protocol {
        ListenerProtocol::Tun(tun) => Some((tun.device.clone(), tun.addresses.clone(), of(tun, network).cloned())),
        _ => None,
    };
    one.set_headers == other.set_headers && parts(one) == parts(other)
}

fn of(tun: &Tun, network: IpNet) -> Option<&Capture> {
    tun.captures.iter().find(|capture| capture.network == network)
}

async fn capture(
    worker: Rc<Worker>,
    listener: Arc<Listener>,
    network: IpNet,
    ending: Rc<Signal<()>>,
    before: Option<Rc<Signal<()>>>,
) {
    let mut pause = FIRST_PAUSE;
    loop {
        let began = worker.now();
        tokio::select! {
            biased;
            () = ending.wait() => break,
            () = serve(&worker, &listener, network, &before) => {}
        }
        let lasted = Duration::from_millis(worker.now().saturating_sub(began));
        pause = if lasted > LAST_PAUSE { FIRST_PAUSE } else { (2 * pause).min(LAST_PAUSE) };
        let jitter = Duration::from_millis(worker.random().1 % FIRST_PAUSE.as_millis() as u64);
        tokio::select! {
            biased;
            () = ending.wait() => break,
            () = tokio::time::sleep(pause + jitter) => {}
        }
    }
    before.inspect(|before| before.set(()));
}

async fn serve(worker: &Rc<Worker>, listener: &Arc<Listener>, network: IpNet, before: &Option<Rc<Signal<()>>>) {
    let ListenerProtocol::Tun(tun) = &listener.protocol else { return };
    let (Some(local), Some(capture)) = (worker.devices.get(&tun.device), of(tun, network)) else { return };
    let source = SocketAddr::new(source_for(tun, network), 0);
    let origin = Origin { worker, listener, source, trust: &Trust::Anonymous, secure: false };
    let request = match from_capture(&origin, network, &capture.set_headers) {
        Ok(request) => request,
        Err(rejected) => return drop(session::reject(worker, *rejected)),
    };
    let protocol = request.facts.protocol;
    let Served::Tunnel(tunnel) = session::serve(worker, request).await else { return };
    let owner = Owner::Listener(listener.name.clone());
    let addresses = tun.addresses.iter().copied().map(IpNet::from);
    let end = match End::asking(Link::device(&local), &owner, network, addresses, protocol) {
        Ok(end) => end,
        Err(reason) => return tracing::error!(listener = %listener.name, reason, "a capture is not served"),
    };
    before.as_ref().inspect(|before| before.set(()));
    tracing::info!(listener = %listener.name, %network, "packets are captured");
    session::relay(Near::Datagrams(Port::Device(Box::new(end))), *tunnel).await;
}

fn source_for(tun: &Tun, network: IpNet) -> IpAddr {
    let fits = |address: &&IpAddr| address.is_ipv4() == network.addr().is_ipv4();
    tun.addresses.iter().find(fits).copied().unwrap_or(IpAddr::from([0; 4]))
}
