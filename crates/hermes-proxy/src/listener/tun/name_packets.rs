//! Packets to names: a program resolved a name, and sends packets to the virtual address of the name.
//!
//! In: a captured prefix of virtual addresses. Out: one session for each address that receives packets, routed by its
//! name. Packets wait until the session is open. An idle session ends, and the next packet begins a new one. If no
//! session can open, senders receive ICMP unreachable and the log reports the reason. Limited: sessions of a prefix,
//! packets that wait for a session, and the rate of attempts.

use std::cell::{Cell, RefCell};
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
use crate::ip::{End, Link, Mailbox, Owner, UnclaimedPackets};
use crate::request::{Origin, from_capture};
use crate::session::{self, DownstreamEnd, SessionOutcome};
use crate::worker::Worker;
use hermes_outbound::virtual_ip::GRACE;
use hermes_transport::datagram::Port;
use hermes_transport::error::Error;
use hermes_transport::oneshot::Oneshot;
use hermes_transport::runtime::fair_shares::{self, Bound, Holder, Share, Shares};
use hermes_transport::runtime::session::SessionEntry;

/// Default idle timeout, if the route sets none. The value suits TCP, which the session may carry.
const IDLE: Duration = Duration::from_secs(60 * 60);

/// The state of an address.
enum Talk {
    /// A session is open or opening.
    Open { number: u64, mailbox: Arc<Mailbox>, pause: Duration, place: NameSlot },
    /// No session could open, and none is attempted before this time.
    Resting { until: u64, pause: Duration, reason: Option<String>, place: NameSlot },
}

/// An address's entry among the sessions of its prefix. It counts for the client whose packet began the session.
struct NameSlot {
    share: Share,
    session: Rc<NameSession>,
}

/// The session of one address, as seen by displacement.
struct NameSession {
    /// Set once the session is open.
    entry: RefCell<Option<Rc<SessionEntry>>>,
    /// The time when the session began, or failed.
    since: Cell<u64>,
    is_resting: Cell<bool>,
    displaced: Oneshot<()>,
}

impl NameSession {
    /// Waits until the session is displaced while opening. An open session ends like any other.
    async fn displaced_unopened(&self) {
        self.displaced.wait().await;
        if self.entry.borrow().is_some() {
            std::future::pending::<()>().await;
        }
    }
}

impl Holder for NameSession {
    fn is_idle(&self, now: u64) -> bool {
        self.is_resting.get() || self.entry.borrow().is_some() && self.used_at() + GRACE <= now
    }

    fn used_at(&self) -> u64 {
        self.entry.borrow().as_ref().map_or(self.since.get(), |entry| entry.touched_at())
    }

    fn is_ending(&self) -> bool {
        self.displaced.get().is_some()
    }

    fn displace(&self) {
        self.displaced.set(());
        if let Some(entry) = &*self.entry.borrow() {
            entry
                .end
                .set(Error::Limit("sessions for names, of which its client has most, or it was silent for longest"));
        }
    }
}

/// The end of one session.
struct Ended {
    address: IpAddr,
    number: u64,
    name: Arc<str>,
    over: Over,
}

/// The outcome of one session.
enum Over {
    /// The session was open for a while, or ended because it was idle.
    Used,
    /// The session did not open or ended early, with the reason if it must be reported.
    Lost(Option<Lost>),
}

/// The sessions of one prefix.
struct Names {
    worker: Rc<Worker>,
    listener: Arc<Listener>,
    unclaimed: UnclaimedPackets,
    owner: Owner,
    talks: HashMap<IpAddr, Talk>,
    shares: Arc<Shares>,
    /// Numbers the sessions.
    begun: u64,
    outage: Rc<Outage>,
    running: FuturesUnordered<Pin<Box<dyn Future<Output = Ended>>>>,
}

/// Serves a prefix until its end. `before` ends once this capture takes over the packets.
pub(super) async fn capture(
    worker: Rc<Worker>,
    listener: Arc<Listener>,
    prefix: IpNet,
    ending: Rc<Oneshot<Ending>>,
    before: Option<Rc<Oneshot<Ending>>>,
) {
    let owner = Owner::Listener(listener.name.clone());
    let ListenerProtocol::Tun(tun) = &listener.protocol else { return };
    let unclaimed = worker.devices.get(&tun.device).and_then(|local| UnclaimedPackets::of(&local, &owner, prefix));
    before.inspect(|before| before.set(Ending::Close));
    let Some(unclaimed) = unclaimed else {
        return tracing::error!(listener = %listener.name, %prefix, "the packets for names are another's");
    };
    let (talks, shares, outage, running) = Default::default();
    let mut names = Names { worker, listener, unclaimed, owner, talks, shares, begun: 0, outage, running };
    loop {
        tokio::select! {
            biased;
            _ = ending.wait() => return,
            Some(ended) = names.running.next(), if !names.running.is_empty() => names.end(ended),
            packets = names.unclaimed.next() => {
                // The device was removed. A new capture begins when it is created again.
                let Some(packets) = packets else { return };
                packets.into_iter().for_each(|packet| names.take(packet));
                // Yields, so that a sender without pause does not starve other tasks.
                tokio::task::yield_now().await;
            }
        }
    }
}

impl Names {
    /// Handles a packet for an address that had no session a moment ago.
    fn take(&mut self, packet: Bytes) {
        let Some((client, address)) = ip::ends(&packet) else {
            return self.worker.shared.metrics.dropped("malformed-packet", 1);
        };
        let now = self.worker.now();
        let (pause, lacked) = match self.talks.get(&address) {
            Some(Talk::Open { mailbox, .. }) if !mailbox.is_closed() => return self.post(mailbox, packet),
            // The old session is ending because it was idle; a new one may begin at once.
            Some(Talk::Open { place, .. }) if fell_silent(&place.session) => (FIRST_PAUSE, None),
            Some(Talk::Open { .. }) => return self.refuse(&packet, "no-session"),
            Some(Talk::Resting { until, .. }) if *until > now => return self.refuse(&packet, "no-session"),
            Some(Talk::Resting { pause, reason, .. }) => (*pause, reason.clone()),
            None => (FIRST_PAUSE, None),
        };
        let Some(name) = self.worker.name_of(address) else { return self.refuse(&packet, "no-name") };
        let Some(place) = self.take_place(address, client, now) else {
            return self.refuse(&packet, "name-sessions");
        };
        self.begin(address, name, (pause, lacked), place, packet);
    }

    fn refuse(&self, packet: &[u8], reason: &'static str) {
        self.unclaimed.local.refuse(&self.worker, packet, reason);
    }

    fn post(&self, mailbox: &Mailbox, packet: Bytes) {
        let most = self.worker.generation().snapshot.limits.datagram_queue;
        let dropped = mailbox.post(&mut vec![packet], most);
        if dropped > 0 {
            self.worker.shared.metrics.dropped("queue-full", dropped);
        }
    }

    /// Takes an entry for an address that a client sends to, or reuses the address's entry.
    fn take_place(&mut self, address: IpAddr, client: IpAddr, now: u64) -> Option<NameSlot> {
        let of_address = match self.talks.remove(&address) {
            Some(Talk::Open { place, .. } | Talk::Resting { place, .. }) if !place.session.is_ending() => {
                Some(place.share)
            }
            _ => None,
        };
        let limit = self.worker.generation().snapshot.limits.name_sessions;
        if self.talks.len() >= limit {
            self.talks.retain(|_, talk| match talk {
                Talk::Resting { until, place, .. } => *until > now && !place.session.is_ending(),
                Talk::Open { .. } => true,
            });
        }
        let bound = Bound { name: "name-sessions", limit, reserve: 0, bounds_closing: false };
        let share = of_address
            .or_else(|| Share::take(&self.worker, &self.shares, fair_shares::Owner::stranger(client), bound))?;
        let (entry, is_resting, displaced) = Default::default();
        let session = Rc::new(NameSession { entry, since: Cell::new(now), is_resting, displaced });
        share.is_held_by(&session);
        Some(NameSlot { share, session })
    }

    /// Begins a session. `lacked`: the reason why the previous attempt failed.
    fn begin(
        &mut self,
        address: IpAddr,
        name: Arc<str>,
        (pause, lacked): (Duration, Option<String>),
        place: NameSlot,
        packet: Bytes,
    ) {
        let ListenerProtocol::Tun(tun) = &self.listener.protocol else { return };
        let network = IpNet::from(address);
        let (mailbox, session) = (Arc::<Mailbox>::default(), place.session.clone());
        let link = Link::by(&self.unclaimed.local, mailbox.clone());
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
        self.talks.insert(address, Talk::Open { number, mailbox, pause, place });
        let (worker, listener, outage) = (self.worker.clone(), self.listener.clone(), self.outage.clone());
        self.running.push(Box::pin(async move {
            let settled = || {
                if let Some(lacked) = &lacked {
                    outage.ends(&listener, &name, Some(lacked));
                }
            };
            let over = tokio::select! {
                biased;
                () = session.displaced_unopened() => Over::Used,
                over = serve(&worker, &listener, network, &name, end, &session, settled) => over,
            };
            Ended { address, number, name, over }
        }));
    }

    fn end(&mut self, Ended { address, number, name, over }: Ended) {
        if let Over::Lost(Some(lost)) = &over {
            self.outage.goes_on(&self.worker, &self.listener, &name, lost);
        }
        // A newer session may already own the entry, which then stays.
        let is_current = |talk: &Talk| matches!(talk, Talk::Open { number: current, .. } if *current == number);
        if !self.talks.get(&address).is_some_and(is_current) {
            return;
        }
        let (Some(Talk::Open { pause, place, .. }), Over::Lost(lost)) = (self.talks.remove(&address), over) else {
            return;
        };
        if place.session.is_ending() {
            return;
        }
        let now = self.worker.now();
        let until = now + pause.as_millis() as u64;
        place.session.entry.take();
        place.session.since.set(now);
        place.session.is_resting.set(true);
        let (pause, reason) = ((2 * pause).min(LAST_PAUSE), lost.map(|lost| lost.reason().to_owned()));
        self.talks.insert(address, Talk::Resting { until, pause, reason, place });
    }
}

fn fell_silent(session: &NameSession) -> bool {
    session.is_ending()
        || session.entry.borrow().as_ref().is_some_and(|entry| matches!(entry.end.get(), Some(Error::Idle(_))))
}

/// Runs one session. The session holds the name, so no other name receives its address. `settled` is called once the
/// session is established.
async fn serve(
    worker: &Rc<Worker>,
    listener: &Arc<Listener>,
    network: IpNet,
    name: &Arc<str>,
    mut end: End,
    known: &NameSession,
    settled: impl FnOnce(),
) -> Over {
    let ListenerProtocol::Tun(tun) = &listener.protocol else { return Over::Lost(None) };
    let Some(capture) = of(tun, network) else { return Over::Lost(None) };
    let source = (source_for(tun, network), 0).into();
    let origin = Origin { worker, listener, source, trust: &Trust::Anonymous, secure: false };
    let served = match from_capture(&origin, network, Some(name), &capture.set_headers) {
        Ok(request) => session::serve(worker, request).await,
        Err(rejected) => SessionOutcome::Response(session::reject(worker, *rejected)),
    };
    let tunnel = match served {
        SessionOutcome::Tunnel(tunnel) => tunnel,
        SessionOutcome::Response(response) => {
            end.refuse_all(worker);
            return Over::Lost(Lost::answered(&response));
        }
    };
    let opened = worker.now();
    tunnel.session.entry.set_idle(IDLE);
    known.entry.replace(Some(tunnel.session.entry.clone()));
    let (of_session, end) = (tunnel.session.entry.clone(), end.answered_by(&tunnel.session.entry));
    let mut relayed = pin!(session::relay(DownstreamEnd::Datagrams(Port::Device(Box::new(end))), *tunnel));
    if tokio::time::timeout(SETTLED, &mut relayed).await.is_err() {
        settled();
        relayed.await;
    }
    if fell_silent(known) || worker.now().saturating_sub(opened) >= LAST_PAUSE.as_millis() as u64 {
        return Over::Used;
    }
    Over::Lost(Lost::over(&of_session))
}
