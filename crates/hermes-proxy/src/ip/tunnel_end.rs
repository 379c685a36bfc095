//! An end of a CONNECT-IP tunnel, at a device or at a peer that sends packets as UDP datagrams.
//!
//! In: packets of the link for this session, packets and capsules of its tunnel. Out: the permitted packets; address
//! requests or assignments, and routes. Dropped packets are counted by reason. Dropping the end releases its addresses.

mod addresses;
mod packets;

use std::collections::VecDeque;
use std::future::Future as _;
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use hermes_model::snapshot::Gateway;
use hermes_net::tun;
use hermes_wire::connect_ip::{self, Address, Prefix, Route};
use hermes_wire::{capsule, ip};
use ipnet::IpNet;
use tokio::time::Sleep;

use super::device::{LocalDevice, RouteScope};
use super::link::Link;
use hermes_ip::address_owner::Owner;
use hermes_ip::address_translation::AddressTranslation;
use hermes_ip::claims::{ClaimError, Scope};
use hermes_ip::packet_filter::Rules;
use hermes_transport::datagram::{Batch, DevicePort, MAX_WORK_PER_TURN, Other};
use hermes_transport::log_throttle::LogThrottle;
use hermes_transport::runtime::session::SessionEntry;
use hermes_transport::runtime::{WorkerContext, yield_to_network};
use hermes_transport::token_bucket::TokenBucket;

/// The minimum time between changes of the device's routes for a new MTU.
const CHANGES_APART: Duration = Duration::from_millis(100);

/// The pauses between requests for addresses that were refused: the first and the longest.
const FIRST_ASK: Duration = Duration::from_secs(2);
const LAST_ASK: Duration = Duration::from_secs(60);

/// The role of this end.
enum Side {
    /// Requests the link's own addresses, to send to this prefix. A `passing` end captures the
    /// prefix only while it lives; otherwise a listener captures it, with or without a tunnel.
    Asks { network: IpNet, wanted: Vec<Address>, answered: bool, passing: bool },
    /// Assigns addresses, as a route's document specifies.
    Gives { gateway: Gateway, route: Arc<str>, owner: Owner, scope: Scope },
}

impl Side {
    fn lead(&self) -> RouteScope {
        match self {
            Side::Gives { .. } => RouteScope::Everybody,
            Side::Asks { passing: true, .. } => RouteScope::Passing,
            Side::Asks { passing: false, .. } => RouteScope::Captured,
        }
    }
}

/// A prefix that is routed to this session.
struct Claimed {
    prefix: IpNet,
    number: u64,
}

/// An end of a tunnel.
pub(crate) struct End {
    link: Link,
    side: Side,
    rules: Rules,
    claims: Vec<Claimed>,
    /// Assigned addresses of the peer, by request ID.
    assigned: Vec<Address>,
    /// Refused requests that the peer has not been told yet.
    refused: Vec<Address>,
    /// 1:1 address translations between the tunnel's side and the link's side.
    inner: Vec<AddressTranslation>,
    /// The MTU of the tunnel.
    mtu: usize,
    /// The MTU in the device's routes; `pause` is the time until it may change again.
    led_mtu: usize,
    pause: Option<Pin<Box<Sleep>>>,
    /// The timeout for the peer's addresses, and its timer.
    patience: Option<(Duration, Pin<Box<Sleep>>)>,
    /// The session whose peer assigns the addresses.
    session: Option<Rc<SessionEntry>>,
    /// The log throttle for refusals, which a peer may repeat without end.
    unassigned: LogThrottle,
    /// The timer of the next request after a refusal, and the pause after it. The address may become free.
    asks_again: Option<(Duration, Pin<Box<Sleep>>)>,
    /// Capsules for the tunnel, sent before anything else.
    capsules: VecDeque<Other>,
    answers: VecDeque<Bytes>,
    /// The rate limit of ICMP errors.
    told: TokenBucket,
    came: VecDeque<Bytes>,
    /// Packets of the tunnel that arrived before the addresses.
    ahead: VecDeque<Bytes>,
}

impl End {
    /// Creates the requesting end: it captures packets to a prefix, and has these addresses.
    ///
    /// # Errors
    /// Another session owns the prefix.
    pub(crate) fn asking(
        link: Link,
        owner: &Owner,
        network: IpNet,
        addresses: impl Iterator<Item = IpNet>,
        protocol: Option<u8>,
    ) -> Result<Self, String> {
        let rules = Rules { here: Vec::new(), there: vec![Route::to(prefix_of(network))], protocol };
        let wanted = addresses.filter(|address| address.addr().is_ipv4() == network.addr().is_ipv4());
        let wanted: Vec<Address> = wanted.map(|address| Address { request: 0, prefix: prefix_of(address) }).collect();
        let mut this = Self::new(link, Side::Asks { network, wanted, answered: false, passing: false }, rules);
        if matches!(this.link, Link::Device { .. }) && this.claim(network, owner, true).is_err() {
            return Err(format!("another session receives the packets for {network}"));
        }
        this.request_addresses();
        Ok(this)
    }

    /// Creates the assigning end: it assigns addresses by the route and its gateway, for packets to a prefix (`None`:
    /// to any). With `inner`, all packets go to that address.
    ///
    /// # Errors
    /// The route leads to one address, and the session's scope has more than one.
    pub(crate) fn giving(
        local: &Rc<LocalDevice>,
        owner: Owner,
        (route, gateway): (&Arc<str>, &Gateway),
        network: Option<IpNet>,
        inner: Option<IpAddr>,
        protocol: Option<u8>,
    ) -> Result<Self, String> {
        let inner = inner.map(|inner| AddressTranslation::of(inner, network)).transpose()?;
        // The device sees the translated address.
        let here = network.map(|network| inner.map_or(network, |inner| inner.inner.into()));
        let scope = Scope { asked: network, here };
        let everything = || [IpAddr::from([0; 4]), IpAddr::from([0; 16])].map(|any| IpNet::new_assert(any, 0)).to_vec();
        let networks = network.map_or_else(everything, |network| vec![network]);
        let here: Vec<Route> = networks.into_iter().map(|network| Route::to(prefix_of(network))).collect();
        let mut payload = BytesMut::new();
        let told: Vec<Route> =
            here.iter().map(|route| Route { protocol: protocol.unwrap_or_default(), ..*route }).collect();
        connect_ip::put_routes(&told, &mut payload);
        let rules = Rules { here, there: Vec::new(), protocol };
        let side = Side::Gives { gateway: gateway.clone(), route: route.clone(), owner, scope };
        let mut this = Self::new(Link::device(local), side, rules);
        this.inner.extend(inner);
        this.send_capsule(connect_ip::ROUTE_ADVERTISEMENT, payload);
        Ok(this)
    }

    fn new(link: Link, side: Side, rules: Rules) -> Self {
        Self {
            link,
            side,
            rules,
            claims: Vec::new(),
            assigned: Vec::new(),
            refused: Vec::new(),
            inner: Vec::new(),
            mtu: capsule::MAX_PACKET,
            led_mtu: capsule::MAX_PACKET,
            pause: None,
            patience: None,
            session: None,
            unassigned: LogThrottle::default(),
            asks_again: None,
            capsules: VecDeque::new(),
            answers: VecDeque::new(),
            told: TokenBucket::default(),
            came: VecDeque::new(),
            ahead: VecDeque::new(),
        }
    }

    /// Makes it a temporary capture of an address within a listener's prefix.
    pub(crate) fn passing(mut self) -> Self {
        if let Side::Asks { passing, .. } = &mut self.side {
            *passing = true;
        }
        self
    }

    /// Rejects the queued packets because there is no tunnel.
    pub(crate) fn refuse_all(&mut self, worker: &WorkerContext) {
        self.release();
        if let Link::Device { local, mailbox, .. } = &self.link {
            mailbox.close().iter().for_each(|packet| local.refuse(worker, packet, "no-session"));
        }
    }

    /// Releases its addresses.
    fn release(&mut self) {
        self.release_where(|_| true);
    }

    fn release_where(&mut self, is_it: impl Fn(&Claimed) -> bool) {
        let Link::Device { local, .. } = &self.link else { return };
        let lead = self.side.lead();
        let released = self.claims.extract_if(.., |claim| is_it(claim));
        released.for_each(|claim| local.device.release(claim.prefix, claim.number, lead));
    }

    /// Queues a capsule, which replaces an unsent one of its type. A peer that sends requests and reads no answers must
    /// not fill memory.
    fn send_capsule(&mut self, kind: u64, payload: BytesMut) {
        self.capsules.retain(|other| !matches!(other, Other::Whole { kind: said, .. } if *said == kind));
        self.capsules.push_back(Other::Whole { kind, payload: payload.freeze() });
    }

    fn claim(&mut self, prefix: IpNet, owner: &Owner, may_cross: bool) -> Result<(), ClaimError> {
        let scope = match self.side {
            Side::Gives { scope, .. } => scope,
            Side::Asks { .. } => Scope::default(),
        };
        let Link::Device { local, mailbox, .. } = &self.link else { return Err(ClaimError::Others) };
        let number = local.device.claim(prefix, owner, mailbox, scope, may_cross)?;
        self.claims.push(Claimed { prefix, number });
        Ok(())
    }

    /// Routes a prefix into the device; false if that fails.
    fn lead(&self, prefix: IpNet) -> bool {
        let least = if prefix.addr().is_ipv6() { ip::MIN_MTU_V6 } else { ip::MIN_MTU_V4 };
        let route = tun::Route { mtu: u32::try_from(self.mtu.max(least)).ok(), ..tun::Route::default() };
        let Link::Device { local, .. } = &self.link else { return false };
        local.device.lead(prefix, route, self.side.lead())
    }

    /// Sets the session whose peer must assign addresses, with the connect timeout as the limit. Otherwise a silent
    /// peer would be awaited forever.
    pub(crate) fn answered_by(mut self, session: &Rc<SessionEntry>) -> Self {
        let within = session.connect_within();
        self.patience = Some((within, Box::pin(tokio::time::sleep(within))));
        self.session = Some(session.clone());
        self
    }

    /// Waits for the peer's addresses, without which no packet may be sent; packets stay in their queue. The answer
    /// comes through `poll_send`, after which the relay polls again.
    fn poll_answer(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<bool>> {
        if let Some((within, timer)) = &mut self.patience
            && timer.as_mut().poll(cx).is_ready()
        {
            let reason = format!("the peer assigned no address within {within:?}");
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, reason)));
        }
        self.link.poll_finished(cx).map(|()| Ok(false))
    }

    /// Requests the link's addresses, under unused request IDs (RFC 9484, section 4.7.2).
    fn request_addresses(&mut self) {
        // Schedules the next request, in case of another refusal.
        if let Some((pause, timer)) = &mut self.asks_again {
            timer.as_mut().reset(tokio::time::Instant::now() + *pause);
            *pause = (2 * *pause).min(LAST_ASK);
        }
        let Side::Asks { wanted, .. } = &mut self.side else { return };
        let used = wanted.iter().map(|address| address.request).max().unwrap_or_default();
        for (request, address) in (used + 1..).zip(&mut *wanted) {
            address.request = request;
        }
        let mut payload = BytesMut::new();
        connect_ip::put_addresses(wanted, &mut payload);
        self.send_capsule(connect_ip::ADDRESS_REQUEST, payload);
    }
}

impl DevicePort for End {
    /// Ends the session cleanly. Queued packets go to the current owner of its addresses.
    fn close(&mut self, worker: &WorkerContext) {
        self.release();
        match &self.link {
            Link::Device { local, mailbox, .. } => local.deliver(worker, &mut mailbox.close(), &mut Vec::new()),
            Link::Peer { flow, .. } => flow.queue.close_in_order(),
        }
    }

    /// The name of its device, if that was deleted.
    fn lost_device(&self) -> Option<Arc<str>> {
        match &self.link {
            Link::Device { local, .. } if !local.device.net().is_there() => Some(local.device.name.clone()),
            _ => None,
        }
    }

    /// The longest packet that the link carries without fragmentation, in bytes.
    fn capacity(&self) -> usize {
        self.link.capacity()
    }

    /// Sets the MTU of the tunnel.
    fn set_mtu(&mut self, mtu: usize) {
        self.mtu = mtu;
    }

    /// Updates the MTU in the device's routes. A peer may change it at any rate, so changes of the routes are
    /// rate-limited.
    fn poll_routes(&mut self, cx: &mut Context<'_>) {
        if self.mtu == self.led_mtu || self.claims.is_empty() {
            return;
        }
        if self.pause.as_mut().is_some_and(|pause| pause.as_mut().poll(cx).is_pending()) {
            return;
        }
        self.led_mtu = self.mtu;
        for claim in &self.claims {
            self.lead(claim.prefix);
        }
        self.pause = Some(Box::pin(tokio::time::sleep(CHANGES_APART)));
    }

    /// Receives packets and capsules for the tunnel. False after the last one.
    fn poll_receive(
        &mut self,
        cx: &mut Context<'_>,
        worker: &WorkerContext,
        batch: &mut Batch,
    ) -> Poll<io::Result<bool>> {
        if self.asks_again.as_mut().is_some_and(|(_, timer)| timer.as_mut().poll(cx).is_ready()) {
            self.request_addresses();
        }
        batch.capsules.append(&mut self.capsules);
        self.refused.clear();
        batch.datagrams.append(&mut self.answers);
        if matches!(self.side, Side::Asks { answered: false, .. }) {
            return if batch.is_empty() { self.poll_answer(cx) } else { Poll::Ready(Ok(true)) };
        }
        let mut came = std::mem::take(&mut self.came);
        let taken = self.link.poll_take(cx, &mut came);
        if taken.is_ready() {
            for packet in came.drain(..) {
                self.send_out(worker, packet, batch);
            }
            if batch.is_empty() {
                // All packets of the batch were dropped: nothing would wake the task for the rest.
                yield_to_network(cx);
            }
        }
        self.came = came;
        match taken {
            Poll::Ready(false) => Poll::Ready(Ok(!batch.is_empty())),
            _ if batch.is_empty() => Poll::Pending,
            _ => Poll::Ready(Ok(true)),
        }
    }

    /// Accepts packets and capsules of the tunnel. Ready when the batch is empty.
    fn poll_send(&mut self, cx: &mut Context<'_>, worker: &WorkerContext, batch: &mut Batch) -> Poll<io::Result<()>> {
        let mut work = 0;
        while let Some(other) = batch.capsules.pop_front() {
            work += other.work();
            let is_whole = !matches!(other, Other::Piece { ends: false, .. });
            if let Other::Whole { kind, payload } = other {
                self.receive(worker, kind, payload)
                    .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
            }
            // After a move, another port may take the rest, but not half a capsule.
            if work >= MAX_WORK_PER_TURN && is_whole && !batch.is_empty() {
                yield_to_network(cx);
                return Poll::Pending;
            }
        }
        self.order_ahead(worker, &mut batch.datagrams);
        let judged = std::mem::take(&mut batch.judged);
        if !judged {
            let mut kept = std::mem::take(&mut batch.datagrams);
            kept.retain(|packet| self.let_in(worker, packet));
            for inner in &self.inner {
                kept.iter_mut().for_each(|packet| inner.inwards(packet));
            }
            batch.datagrams = kept;
        }
        let sent = self.link.poll_send(cx, worker, &mut batch.datagrams);
        batch.judged = sent.is_pending();
        sent
    }
}

impl Drop for End {
    fn drop(&mut self) {
        let Link::Device { local, mailbox, .. } = &self.link else { return };
        self.claims.iter().for_each(|claim| local.device.breaks(claim.prefix));
        let (local, mailbox) = (local.clone(), mailbox.clone());
        self.release();
        let left = mailbox.close().len();
        if left > 0 {
            local.shared.metrics.dropped("no-session", left as u64);
        }
    }
}

/// Converts a prefix for the wire. A truncated `IpNet` is always a valid prefix.
pub(super) fn prefix_of(net: IpNet) -> Prefix {
    Prefix::new(net.trunc().addr(), net.prefix_len()).unwrap_or_else(|_| Prefix::of(net.addr()))
}
