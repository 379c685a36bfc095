//! Names through a device: a program asked DNS, and sends packets to an address that stands for a name.
//!
//! In: a captured prefix whose addresses stand for names. Out: for each that is sent something a session for its name,
//! decided by the routes like any; its packets wait until that is open. A session ends when it is silent for long, and
//! begins again with the next packet. Where none is to be had, senders are told that no way leads there, and the log why.
//! Bounded: sessions of a prefix, packets that wait for one, tries in a time.

use std::cell::RefCell;
use std::collections::HashMap;
use std::net::IpAddr;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use hermes_model::facts::Trust;
use hermes_model::snapshot::{Listener, ListenerProtocol};
use hermes_wire::ip;
use ipnet::IpNet;

use super::Ending;
use super::outage::{Lost, Outage, SETTLED};
use super::{FIRST_PAUSE, LAST_PAUSE, of, source_for};
use crate::datagram::Port;
use crate::error::Error;
use crate::ip::{End, Link, Mailbox, Newcomers, Owner};
use crate::live::Entry;
use crate::names::GRACE;
use crate::request::{Origin, from_capture};
use crate::session::{self, Near, Served};
use crate::signal::Signal;
use crate::worker::Worker;

/// A session that is silent for so long ends, where its route does not say: as one of TCP, which it may carry.
const IDLE: Duration = Duration::from_secs(60 * 60);

/// What is known of an address.
enum Talk {
    /// A session is open, or on its way.
    Open { number: u64, mailbox: Arc<Mailbox>, entry: Rc<RefCell<Option<Rc<Entry>>>>, pause: Duration },
    /// None could be opened, and none is tried before this time.
    Resting { until: u64, pause: Duration, reason: Option<String> },
}

/// How one ended.
struct Ended {
    address: IpAddr,
    number: u64,
    name: Arc<str>,
    over: Over,
}

/// Of one session.
enum Over {
    /// It was open for a while, or ended since nobody used it.
    Used,
    /// There was none, or not for long: why, where somebody has to know.
    Lost(Option<Lost>),
}

/// The sessions of one prefix.
struct Names {
    worker: Rc<Worker>,
    listener: Arc<Listener>,
    newcomers: Newcomers,
    owner: Owner,
    talks: HashMap<IpAddr, Talk>,
    /// Counts them.
    begun: u64,
    outage: Rc<Outage>,
    running: FuturesUnordered<Pin<Box<dyn Future<Output = Ended>>>>,
}

/// Serves a prefix until its end; `before` is told to end when this one takes the packets.
pub(super) async fn capture(
    worker: Rc<Worker>,
    listener: Arc<Listener>,
    prefix: IpNet,
    ending: Rc<Signal<Ending>>,
    before: Option<Rc<Signal<Ending>>>,
) {
    let owner = Owner::Listener(listener.name.clone());
    let ListenerProtocol::Tun(tun) = &listener.protocol else { return };
    let newcomers = worker.devices.get(&tun.device).and_then(|local| Newcomers::of(&local, &owner, prefix));
    before.inspect(|before| before.set(Ending::Close));
    let Some(newcomers) = newcomers else {
        return tracing::error!(listener = %listener.name, %prefix, "the packets for names are another's");
    };
    let (talks, outage, running) = Default::default();
    let mut names = Names { worker, listener, newcomers, owner, talks, begun: 0, outage, running };
    loop {
        tokio::select! {
            biased;
            _ = ending.wait() => return,
            Some(ended) = names.running.next(), if !names.running.is_empty() => names.end(ended),
            packets = names.newcomers.next() => {
                // Where the device is gone, whoever makes it again captures again.
                let Some(packets) = packets else { return };
                packets.into_iter().for_each(|packet| names.take(packet));
                // Whoever sends without end is not the only one here.
                tokio::task::yield_now().await;
            }
        }
    }
}

impl Names {
    /// A packet for an address that no session has, or had none a moment ago.
    fn take(&mut self, packet: Bytes) {
        let Some((_, address)) = ip::ends(&packet) else {
            return self.worker.shared.metrics.dropped("malformed-packet", 1);
        };
        let now = self.worker.now();
        let (pause, lacked) = match self.talks.get(&address) {
            Some(Talk::Open { mailbox, .. }) if !mailbox.is_closed() => return self.post(mailbox, packet),
            // The old one is on its way out, and nothing was wrong with it.
            Some(Talk::Open { entry, .. }) if fell_silent(entry) => (FIRST_PAUSE, None),
            Some(Talk::Open { .. }) => return self.refuse(&packet, "no-session"),
            Some(Talk::Resting { until, .. }) if *until > now => return self.refuse(&packet, "no-session"),
            Some(Talk::Resting { pause, reason, .. }) => (*pause, reason.clone()),
            None => (FIRST_PAUSE, None),
        };
        let Some(name) = self.worker.name_of(address) else { return self.refuse(&packet, "no-name") };
        if !self.talks.contains_key(&address) && !self.has_room(now) {
            self.worker.shared.metrics.limit("name-sessions");
            return self.refuse(&packet, "name-sessions");
        }
        self.begin(address, name, (pause, lacked), packet);
    }

    fn refuse(&self, packet: &[u8], reason: &'static str) {
        self.newcomers.local.refuse(&self.worker, packet, reason);
    }

    fn post(&self, mailbox: &Mailbox, packet: Bytes) {
        let most = self.worker.generation().snapshot.limits.datagram_queue;
        let dropped = mailbox.post(&mut vec![packet], most);
        if dropped > 0 {
            self.worker.shared.metrics.dropped("queue-full", dropped);
        }
    }

    /// Whether there may be one more. Where there may not, the session that was silent for longest is told to go: its
    /// place is free for who asks again.
    fn has_room(&mut self, now: u64) -> bool {
        let most = self.worker.generation().snapshot.limits.name_sessions;
        if self.talks.len() < most {
            return true;
        }
        self.talks.retain(|_, talk| !matches!(talk, Talk::Resting { until, .. } if *until <= now));
        if self.talks.len() < most {
            return true;
        }
        let entries = self.talks.values().filter_map(|talk| match talk {
            Talk::Open { entry, .. } => entry.borrow().clone(),
            Talk::Resting { .. } => None,
        });
        let silent = entries.max_by_key(|entry| entry.silence(&self.worker));
        if let Some(entry) = silent.filter(|entry| entry.silence(&self.worker) >= GRACE) {
            entry.end.set(Error::Idle(Duration::from_millis(entry.silence(&self.worker))));
        }
        false
    }

    /// `lacked`: why it had none when it was last tried.
    fn begin(&mut self, address: IpAddr, name: Arc<str>, (pause, lacked): (Duration, Option<String>), packet: Bytes) {
        let ListenerProtocol::Tun(tun) = &self.listener.protocol else { return };
        let network = IpNet::from(address);
        let (mailbox, entry) = (Arc::<Mailbox>::default(), Rc::default());
        let link = Link::by(&self.newcomers.local, mailbox.clone());
        let addresses = tun.addresses.iter().map(|address| IpNet::from(*address));
        let end = match End::asking(link, &self.owner, network, addresses, None) {
            Ok(end) => end.passing(),
            Err(reason) => {
                tracing::error!(listener = %self.listener.name, reason, "packets for a name are not carried");
                return self.refuse(&packet, "no-session");
            }
        };
        self.post(&mailbox, packet);
        self.begun += 1;
        let number = self.begun;
        self.talks.insert(address, Talk::Open { number, mailbox, entry: Rc::clone(&entry), pause });
        let (worker, listener, outage) = (self.worker.clone(), self.listener.clone(), self.outage.clone());
        self.running.push(Box::pin(async move {
            let settled = || {
                if let Some(lacked) = &lacked {
                    outage.ends(&listener, &name, Some(lacked));
                }
            };
            let over = serve(&worker, &listener, network, &name, end, &entry, settled).await;
            Ended { address, number, name, over }
        }));
    }

    fn end(&mut self, Ended { address, number, name, over }: Ended) {
        if let Over::Lost(Some(lost)) = &over {
            self.outage.goes_on(&self.worker, &self.listener, &name, lost);
        }
        // Another one may have its place already.
        let Some(Talk::Open { number: current, pause, .. }) = self.talks.get(&address) else { return };
        if *current != number {
            return;
        }
        let Over::Lost(lost) = over else { return drop(self.talks.remove(&address)) };
        let until = self.worker.now() + pause.as_millis() as u64;
        let pause = (2 * *pause).min(LAST_PAUSE);
        let reason = lost.map(|lost| lost.reason().to_owned());
        self.talks.insert(address, Talk::Resting { until, pause, reason });
    }
}

fn fell_silent(entry: &RefCell<Option<Rc<Entry>>>) -> bool {
    entry.borrow().as_ref().is_some_and(|entry| matches!(entry.end.get(), Some(Error::Idle(_))))
}

/// One session. The name is held as long: nobody else gets its address. `settled` is called when it has lasted.
async fn serve(
    worker: &Rc<Worker>,
    listener: &Arc<Listener>,
    network: IpNet,
    name: &Arc<str>,
    mut end: End,
    entry: &RefCell<Option<Rc<Entry>>>,
    settled: impl FnOnce(),
) -> Over {
    let ListenerProtocol::Tun(tun) = &listener.protocol else { return Over::Lost(None) };
    let Some(capture) = of(tun, network) else { return Over::Lost(None) };
    let source = (source_for(tun, network), 0).into();
    let origin = Origin { worker, listener, source, trust: &Trust::Anonymous, secure: false };
    let served = match from_capture(&origin, network, Some(name), &capture.set_headers) {
        Ok(request) => session::serve(worker, request).await,
        Err(rejected) => Served::Response(session::reject(worker, *rejected)),
    };
    let tunnel = match served {
        Served::Tunnel(tunnel) => tunnel,
        Served::Response(response) => {
            end.refuse_all(worker);
            return Over::Lost(Lost::answered(&response));
        }
    };
    let opened = worker.now();
    tunnel.session.entry.set_idle(IDLE);
    entry.replace(Some(tunnel.session.entry.clone()));
    let (of_session, end) = (tunnel.session.entry.clone(), end.answered_by(&tunnel.session.entry));
    let mut relayed = pin!(session::relay(Near::Datagrams(Port::Device(Box::new(end))), *tunnel));
    if tokio::time::timeout(SETTLED, &mut relayed).await.is_err() {
        settled();
        relayed.await;
    }
    if fell_silent(entry) || worker.now().saturating_sub(opened) >= LAST_PAUSE.as_millis() as u64 {
        return Over::Used;
    }
    Over::Lost(Lost::over(&of_session))
}
