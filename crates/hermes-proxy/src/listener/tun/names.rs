//! Names through a device: a program asked DNS, and sends packets to an address that stands for a name.
//!
//! In: a captured prefix whose addresses stand for names. Out: for each that is sent something a session for its name,
//! decided by the routes like any; its packets wait until that is open. A session ends when it is silent for long, and
//! begins again with the next packet. Where none is to be had, senders are told that no way leads there.
//! Bounded: sessions of a prefix, packets that wait for one, tries in a time.

use std::cell::RefCell;
use std::collections::HashMap;
use std::net::IpAddr;
use std::pin::Pin;
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
    Resting { until: u64, pause: Duration },
}

/// How one ended.
struct Ended {
    address: IpAddr,
    number: u64,
    /// It was open for a while, or ended since nobody used it.
    was_useful: bool,
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
    running: FuturesUnordered<Pin<Box<dyn Future<Output = Ended>>>>,
}

/// Serves a prefix until its end; `before` is told to end when this one takes the packets.
pub(super) async fn capture(
    worker: Rc<Worker>,
    listener: Arc<Listener>,
    prefix: IpNet,
    ending: Rc<Signal<()>>,
    before: Option<Rc<Signal<()>>>,
) {
    let owner = Owner::Listener(listener.name.clone());
    let ListenerProtocol::Tun(tun) = &listener.protocol else { return };
    let newcomers = worker.devices.get(&tun.device).and_then(|local| Newcomers::of(&local, &owner, prefix));
    before.inspect(|before| before.set(()));
    let Some(newcomers) = newcomers else {
        return tracing::error!(listener = %listener.name, %prefix, "the packets for names are another's");
    };
    let (talks, running) = (HashMap::new(), FuturesUnordered::new());
    let mut names = Names { worker, listener, newcomers, owner, talks, begun: 0, running };
    loop {
        tokio::select! {
            biased;
            () = ending.wait() => return,
            Some(ended) = names.running.next(), if !names.running.is_empty() => names.end(&ended),
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
        let pause = match self.talks.get(&address) {
            Some(Talk::Open { mailbox, .. }) if !mailbox.is_closed() => return self.post(mailbox, packet),
            // The old one is on its way out, and nothing was wrong with it.
            Some(Talk::Open { entry, .. }) if fell_silent(entry) => FIRST_PAUSE,
            Some(Talk::Open { .. }) => return self.refuse(&packet, "no-session"),
            Some(Talk::Resting { until, .. }) if *until > now => return self.refuse(&packet, "no-session"),
            Some(Talk::Resting { pause, .. }) => *pause,
            None => FIRST_PAUSE,
        };
        let Some(name) = self.worker.name_of(address) else { return self.refuse(&packet, "no-name") };
        if !self.talks.contains_key(&address) && !self.has_room(now) {
            self.worker.shared.metrics.limit("name-sessions");
            return self.refuse(&packet, "name-sessions");
        }
        self.begin(address, name, pause, packet);
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

    fn begin(&mut self, address: IpAddr, name: Arc<str>, pause: Duration, packet: Bytes) {
        let ListenerProtocol::Tun(tun) = &self.listener.protocol else { return };
        let network = IpNet::from(address);
        let (mailbox, entry) = (Arc::<Mailbox>::default(), Rc::default());
        let link = Link::Device { local: self.newcomers.local.clone(), mailbox: mailbox.clone() };
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
        let (worker, listener) = (self.worker.clone(), self.listener.clone());
        self.running.push(Box::pin(async move {
            let was_useful = serve(&worker, &listener, network, name, end, &entry).await;
            Ended { address, number, was_useful }
        }));
    }

    fn end(&mut self, ended: &Ended) {
        // Another one may have its place already.
        let Some(Talk::Open { number, pause, .. }) = self.talks.get(&ended.address) else { return };
        if *number != ended.number {
            return;
        }
        if ended.was_useful {
            self.talks.remove(&ended.address);
        } else {
            let until = self.worker.now() + pause.as_millis() as u64;
            let pause = (2 * *pause).min(LAST_PAUSE);
            self.talks.insert(ended.address, Talk::Resting { until, pause });
        }
    }
}

fn fell_silent(entry: &RefCell<Option<Rc<Entry>>>) -> bool {
    entry.borrow().as_ref().is_some_and(|entry| matches!(entry.end.get(), Some(Error::Idle(_))))
}

/// One session. The name is held as long: nobody else gets its address. True where it was open for a while,
/// or ended since nobody used it.
async fn serve(
    worker: &Rc<Worker>,
    listener: &Arc<Listener>,
    network: IpNet,
    name: Arc<str>,
    mut end: End,
    entry: &RefCell<Option<Rc<Entry>>>,
) -> bool {
    let ListenerProtocol::Tun(tun) = &listener.protocol else { return false };
    let Some(capture) = of(tun, network) else { return false };
    let source = (source_for(tun, network), 0).into();
    let origin = Origin { worker, listener, source, trust: &Trust::Anonymous, secure: false };
    let served = match from_capture(&origin, network, Some(&name), &capture.set_headers) {
        Ok(request) => session::serve(worker, request).await,
        Err(rejected) => Served::Response(session::reject(worker, *rejected)),
    };
    let Served::Tunnel(tunnel) = served else {
        end.refuse_all(worker);
        return false;
    };
    let opened = worker.now();
    tunnel.session.entry.set_idle(IDLE);
    entry.replace(Some(tunnel.session.entry.clone()));
    let end = end.answered_within(tunnel.session.entry.connect_within());
    session::relay(Near::Datagrams(Port::Device(Box::new(end))), *tunnel).await;
    fell_silent(entry) || worker.now().saturating_sub(opened) >= LAST_PAUSE.as_millis() as u64
}
