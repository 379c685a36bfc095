//! The end of a CONNECT-IP tunnel at a device, or at a peer that brings its packets in datagrams.
//!
//! In: packets of the link for this session, packets and capsules of its tunnel. Out: those that may pass;
//! requests for addresses, or their assignment, and the routes. What may not pass is counted by its reason.
//! Its claims on addresses end with it.

use std::collections::{HashSet, VecDeque};
use std::future::Future as _;
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use hermes_model::snapshot::Gateway;
use hermes_net::tun;
use hermes_wire::connect_ip::{self, Address, Prefix, Route};
use hermes_wire::{capsule, ip};
use ipnet::IpNet;
use tokio::time::Sleep;

use super::claims::{Refused, Scope};
use super::device::{Lead, LocalDevice};
use super::given::gives;
use super::inner::Inner;
use super::judge::{Rules, Verdict, Way};
use super::link::Link;
use super::owner::Owner;
use crate::budget::Budget;
use crate::datagram::{Batch, Other};
use crate::worker::Worker;

/// Addresses that one session may hold.
const MOST_ADDRESSES: usize = 64;
/// Packets that came before their addresses.
const MOST_AHEAD: usize = 64;
/// Answers to packets that wait for the tunnel.
const MOST_ANSWERS: usize = 64;
/// Changes of a device's routes, since the tunnel's packets may be of another length.
const CHANGES_APART: Duration = Duration::from_millis(100);
/// Answers of one session in a second.
const MOST_TOLD: u32 = 50;

/// What this end does about addresses.
enum Side {
    /// It asks for those that its link has, to send to this prefix. One that is `passing` leaves the device with
    /// what it was before; else a listener captures the prefix, tunnel or not.
    Asks { network: IpNet, wanted: Vec<Address>, answered: bool, passing: bool },
    /// It gives them, as a route's document says.
    Gives { gateway: Gateway, owner: Owner, scope: Scope },
}

impl Side {
    fn lead(&self) -> Lead {
        match self {
            Side::Gives { .. } => Lead::Everybody,
            Side::Asks { passing: true, .. } => Lead::Passing,
            Side::Asks { passing: false, .. } => Lead::Captured,
        }
    }
}

/// A prefix that the device leads to us.
struct Claimed {
    prefix: IpNet,
    number: u64,
}

/// One end of a tunnel.
pub(crate) struct End {
    link: Link,
    side: Side,
    rules: Rules,
    claims: Vec<Claimed>,
    /// What the peer was assigned, by what it asked.
    assigned: Vec<Address>,
    /// Packets for an address that the tunnel's side knows go to another one on the link's.
    inner: Vec<Inner>,
    /// The longest packet that the tunnel takes.
    mtu: usize,
    /// What the device's routes say of that, and when they may say something else.
    led_mtu: usize,
    pause: Option<Pin<Box<Sleep>>>,
    /// How long, and until when, the far end's addresses are waited for.
    patience: Option<(Duration, Pin<Box<Sleep>>)>,
    /// For the tunnel, before anything else.
    capsules: VecDeque<Other>,
    answers: VecDeque<Bytes>,
    /// How many there were in this second.
    told: Budget,
    came: VecDeque<Bytes>,
    /// Of the tunnel, before the far end has given addresses.
    ahead: VecDeque<Bytes>,
}

impl End {
    /// The end that takes packets for a prefix, and has these addresses.
    ///
    /// # Errors
    /// Another session takes them.
    pub(crate) fn asking(
        link: Link,
        owner: &Owner,
        network: IpNet,
        addresses: impl Iterator<Item = IpNet>,
        protocol: Option<u8>,
    ) -> Result<Self, String> {
        let rules = Rules { here: Vec::new(), there: vec![Route::to(prefix_of(network))], protocol };
        let wanted = addresses.filter(|address| address.addr().is_ipv4() == network.addr().is_ipv4());
        let wanted: Vec<Address> =
            (1..).zip(wanted).map(|(request, address)| Address { request, prefix: prefix_of(address) }).collect();
        let mut payload = BytesMut::new();
        connect_ip::put_addresses(&wanted, &mut payload);
        let mut this = Self::new(link, Side::Asks { network, wanted, answered: false, passing: false }, rules);
        if matches!(this.link, Link::Device { .. }) && this.claim(network, owner, true).is_err() {
            return Err(format!("another session takes packets for {network}"));
        }
        this.say(connect_ip::ADDRESS_REQUEST, payload);
        Ok(this)
    }

    /// The end that gives addresses to whoever asks, for packets to a prefix (`None`: to anywhere); all of them go to
    /// `inner`, if that is said.
    ///
    /// # Errors
    /// The route leads to one address, and the session is for more than one.
    pub(crate) fn giving(
        local: &Rc<LocalDevice>,
        owner: Owner,
        gateway: &Gateway,
        network: Option<IpNet>,
        inner: Option<IpAddr>,
        protocol: Option<u8>,
    ) -> Result<Self, String> {
        let inner = inner.map(|inner| Inner::of(inner, network)).transpose()?;
        // With the device another one speaks.
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
        let mut this = Self::new(Link::device(local), Side::Gives { gateway: gateway.clone(), owner, scope }, rules);
        this.inner.extend(inner);
        this.say(connect_ip::ROUTE_ADVERTISEMENT, payload);
        Ok(this)
    }

    fn new(link: Link, side: Side, rules: Rules) -> Self {
        Self {
            link,
            side,
            rules,
            claims: Vec::new(),
            assigned: Vec::new(),
            inner: Vec::new(),
            mtu: capsule::MAX_PACKET,
            led_mtu: capsule::MAX_PACKET,
            pause: None,
            patience: None,
            capsules: VecDeque::new(),
            answers: VecDeque::new(),
            told: Budget::default(),
            came: VecDeque::new(),
            ahead: VecDeque::new(),
        }
    }

    /// The same for an address within what a listener captures, for as long as there is something to say to it.
    pub(crate) fn passing(mut self) -> Self {
        if let Side::Asks { passing, .. } = &mut self.side {
            *passing = true;
        }
        self
    }

    /// There is no tunnel for what waits.
    pub(crate) fn refuse_all(&mut self, worker: &Worker) {
        self.release();
        if let Link::Device { local, mailbox } = &self.link {
            mailbox.close().iter().for_each(|packet| local.refuse(worker, packet, "no-session"));
        }
    }

    /// The session has ended in order. What still waits is whoever's has its addresses now.
    pub(crate) fn close(&mut self, worker: &Worker) {
        self.release();
        match &self.link {
            Link::Device { local, mailbox } => local.deliver(worker, &mut mailbox.close(), &mut Vec::new()),
            Link::Peer { flow, .. } => flow.queue.close_in_order(),
        }
    }

    /// Gives its addresses back.
    fn release(&mut self) {
        self.release_where(|_| true);
    }

    fn release_where(&mut self, is_it: impl Fn(&Claimed) -> bool) {
        let Link::Device { local, .. } = &self.link else { return };
        let lead = self.side.lead();
        let released = self.claims.extract_if(.., |claim| is_it(claim));
        released.for_each(|claim| local.device.release(claim.prefix, claim.number, lead));
    }

    /// Says all of something, in the place of what was said of it before and nobody has heard yet: who asks and does
    /// not listen would have us keep any number of answers.
    fn say(&mut self, kind: u64, payload: BytesMut) {
        self.capsules.retain(|other| !matches!(other, Other::Whole { kind: said, .. } if *said == kind));
        self.capsules.push_back(Other::Whole { kind, payload: payload.freeze() });
    }

    fn claim(&mut self, prefix: IpNet, owner: &Owner, may_cross: bool) -> Result<(), Refused> {
        let scope = match self.side {
            Side::Gives { scope, .. } => scope,
            Side::Asks { .. } => Scope::default(),
        };
        let Link::Device { local, mailbox } = &self.link else { return Err(Refused::Others) };
        let number = local.device.claim(prefix, owner, mailbox, scope, may_cross)?;
        self.claims.push(Claimed { prefix, number });
        Ok(())
    }

    /// The longest packet that the link takes well.
    pub(crate) fn capacity(&self) -> usize {
        self.link.capacity()
    }

    /// The tunnel takes packets of this length now.
    pub(crate) fn set_mtu(&mut self, mtu: usize) {
        self.mtu = mtu;
    }

    /// Has the device's routes say how long packets may be. A peer may change that as often as it likes, the routes
    /// not.
    pub(crate) fn poll_routes(&mut self, cx: &mut Context<'_>) {
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

    /// Leads a prefix into the device; false where that cannot be.
    fn lead(&self, prefix: IpNet) -> bool {
        let least = if prefix.addr().is_ipv6() { ip::MIN_MTU_V6 } else { ip::MIN_MTU_V4 };
        let route = tun::Route { mtu: u32::try_from(self.mtu.max(least)).ok(), ..tun::Route::default() };
        let Link::Device { local, .. } = &self.link else { return false };
        local.device.lead(prefix, route, self.side.lead())
    }

    /// The far end is to give its addresses within this time: who never says a word would be waited for without end.
    pub(crate) fn answered_within(mut self, within: Duration) -> Self {
        self.patience = Some((within, Box::pin(tokio::time::sleep(within))));
        self
    }

    /// Before the far end has said which addresses it gives there are none to send from: packets wait where they are.
    /// Its word comes by `poll_send`, after which the relay looks here again.
    fn poll_answer(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<bool>> {
        if let Some((within, timer)) = &mut self.patience
            && timer.as_mut().poll(cx).is_ready()
        {
            let reason = format!("it assigned no address within {within:?}");
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, reason)));
        }
        self.link.poll_finished(cx).map(|()| Ok(false))
    }

    /// Packets and capsules for the tunnel. False where none will come any more.
    pub(crate) fn poll_receive(
        &mut self,
        cx: &mut Context<'_>,
        worker: &Worker,
        batch: &mut Batch,
    ) -> Poll<io::Result<bool>> {
        batch.capsules.append(&mut self.capsules);
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
                // All of them were dropped: nothing would wake us for what lies behind.
                cx.waker().wake_by_ref();
            }
        }
        self.came = came;
        match taken {
            Poll::Ready(false) => Poll::Ready(Ok(!batch.is_empty())),
            _ if batch.is_empty() => Poll::Pending,
            _ => Poll::Ready(Ok(true)),
        }
    }

    fn send_out(&self, worker: &Worker, packet: Bytes, batch: &mut Batch) {
        let Ok(header) = ip::parse(&packet) else {
            return worker.shared.metrics.dropped("malformed-packet", 1);
        };
        let (packet, header) = match self.inner.iter().find(|inner| header.source == inner.inner) {
            Some(inner) => inner.outwards(packet, header),
            None => (self.cited_outwards(packet, &header), header),
        };
        match self.rules.judge(Way::Out, &packet, &header, self.mtu) {
            Verdict::Pass => batch.datagrams.push_back(clamped(packet, &header, self.mtu)),
            Verdict::Cut(mtu) => {
                let fragments = ip::fragment(&packet, &header, mtu);
                if fragments.is_empty() {
                    worker.shared.metrics.dropped("malformed-packet", 1);
                }
                batch.datagrams.extend(fragments.into_iter().map(Bytes::from));
            }
            Verdict::Drop(reason, trouble) => {
                worker.shared.metrics.dropped(reason, 1);
                let answer = trouble.and_then(|trouble| self.answer(worker, &packet, &header, trouble));
                answer.into_iter().for_each(|answer| self.link.answer(answer));
            }
        }
    }

    /// A router behind the device speaks of a packet to the inner address: its sender knows another one.
    fn cited_outwards(&self, packet: Bytes, header: &ip::Header) -> Bytes {
        if self.inner.is_empty() {
            return packet;
        }
        let about = ip::cited(&packet, header).map(|(_, to)| to);
        match self.inner.iter().find(|inner| Some(inner.inner) == about) {
            Some(inner) => inner.cited_outwards(&packet, header),
            None => packet,
        }
    }

    /// What a packet's sender is told, at a bounded rate.
    fn answer(&self, worker: &Worker, packet: &[u8], header: &ip::Header, trouble: ip::Trouble) -> Option<Bytes> {
        let own = self.own_address(header);
        let error = ip::icmp_error(packet, header, trouble, own)?;
        // Each session has its own share: whoever floods is told of little, and takes nothing from others.
        (self.told.takes(worker.now(), MOST_TOLD) && worker.takes_answer()).then(|| error.into())
    }

    /// An address of ours on the packet's way: of the device, else the one that it was sent to.
    fn own_address(&self, header: &ip::Header) -> IpAddr {
        let of_device = match &self.side {
            Side::Gives { gateway, .. } => gateway.addresses.as_slice(),
            Side::Asks { .. } => &[],
        };
        let fits = |address: &&IpAddr| address.is_ipv4() == header.source.is_ipv4();
        of_device.iter().find(fits).copied().unwrap_or(header.destination)
    }

    /// Takes packets and capsules of the tunnel. Ready when the batch is empty.
    pub(crate) fn poll_send(
        &mut self,
        cx: &mut Context<'_>,
        worker: &Worker,
        batch: &mut Batch,
    ) -> Poll<io::Result<()>> {
        for other in std::mem::take(&mut batch.capsules) {
            if let Other::Whole { kind, payload } = other {
                self.hear(kind, payload).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
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

    /// A datagram of QUIC may overtake the capsule with the addresses, by which it is judged.
    fn order_ahead(&mut self, worker: &Worker, packets: &mut VecDeque<Bytes>) {
        if !matches!(self.side, Side::Asks { answered: false, .. }) {
            if !self.ahead.is_empty() {
                self.ahead.append(packets);
                std::mem::swap(&mut self.ahead, packets);
            }
            return;
        }
        self.ahead.append(packets);
        let excess = self.ahead.len().saturating_sub(MOST_AHEAD);
        if excess > 0 {
            self.ahead.drain(..excess);
            worker.shared.metrics.dropped("queue-full", excess as u64);
        }
    }

    fn let_in(&mut self, worker: &Worker, packet: &Bytes) -> bool {
        let Ok(header) = ip::parse(packet) else {
            worker.shared.metrics.dropped("malformed-packet", 1);
            return false;
        };
        let Verdict::Drop(reason, trouble) = self.rules.judge(Way::In, packet, &header, capsule::MAX_PACKET) else {
            return true;
        };
        worker.shared.metrics.dropped(reason, 1);
        let answer = trouble.and_then(|trouble| self.answer(worker, packet, &header, trouble));
        if self.answers.len() < MOST_ANSWERS {
            self.answers.extend(answer);
        }
        false
    }

    /// What the peer says of addresses and routes.
    fn hear(&mut self, kind: u64, payload: Bytes) -> Result<(), connect_ip::ConnectIpError> {
        match kind {
            connect_ip::ADDRESS_REQUEST => {
                let wanted = connect_ip::parse_address_request(payload)?;
                self.assign(&wanted);
            }
            connect_ip::ADDRESS_ASSIGN => {
                let assigned = connect_ip::parse_address_assign(payload)?;
                self.take_assigned(&assigned);
            }
            connect_ip::ROUTE_ADVERTISEMENT => {
                let routes = connect_ip::parse_route_advertisement(payload)?;
                if let Side::Asks { network, .. } = self.side {
                    self.rules.there = narrowed(&routes, network);
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// What the far end lets packets come from, which need not be what the link's come from.
    fn take_assigned(&mut self, assigned: &[Address]) {
        let Side::Asks { wanted, answered, .. } = &mut self.side else { return };
        let is_first = !std::mem::replace(answered, true);
        if let Link::Device { local, .. } = &self.link
            && is_first
        {
            local.device.answered.send_modify(|count| *count += 1);
        }
        let given: Vec<&Address> =
            assigned.iter().filter(|address| !address.prefix.address().is_unspecified()).collect();
        self.inner = given.iter().filter_map(|given| Inner::instead(given, wanted)).collect();
        let within = given.iter().flat_map(|given| wanted.iter().filter_map(|own| narrower(own.prefix, given.prefix)));
        let others = self.inner.iter().map(|inner| Prefix::of(inner.asked));
        self.rules.here = within.chain(others).map(Route::to).collect();
        if self.rules.here.is_empty() {
            tracing::warn!(link = self.link.name(), "the far end assigns no address that was asked for");
        }
    }

    /// Answers a request for addresses; those of before stay. What is refused is said once, and takes no place.
    fn assign(&mut self, wanted: &[Address]) {
        let mut refused = Vec::new();
        for Address { request, prefix } in wanted {
            let before = self.assigned.iter().position(|before| before.request == *request);
            let before = before.map(|at| self.assigned.remove(at));
            let is_any = |prefix: &Prefix| prefix.address().is_unspecified();
            let same_version = |other: &Prefix| other.address().is_ipv4() == prefix.address().is_ipv4();
            if let Some(before) = before.filter(|before| is_any(prefix) && same_version(&before.prefix)) {
                // It has one.
                self.assigned.push(before);
                continue;
            }
            // Nobody may have us look at more than anybody can get.
            let has_room = self.assigned.len() < MOST_ADDRESSES && refused.len() < MOST_ADDRESSES;
            match if has_room { self.give(*prefix) } else { None } {
                Some(prefix) => self.assigned.push(Address { request: *request, prefix }),
                None => refused.push(Address { request: *request, prefix: nothing(*prefix) }),
            }
        }
        // Asked again for something else: the first is nobody's.
        let told: HashSet<Prefix> = self.assigned.iter().map(|address| address.prefix).collect();
        self.release_where(|claim| !told.contains(&prefix_of(claim.prefix)));
        self.rules.there = self.assigned.iter().map(|address| Route::to(address.prefix)).collect();
        let mut payload = BytesMut::new();
        connect_ip::put_addresses(&self.assigned, &mut payload);
        connect_ip::put_addresses(&refused, &mut payload);
        self.say(connect_ip::ADDRESS_ASSIGN, payload);
    }

    /// The prefix that is given for the one that is wanted; `None`: none is.
    fn give(&mut self, wanted: Prefix) -> Option<Prefix> {
        let Side::Gives { gateway, owner, .. } = &self.side else { return None };
        let (gateway, owner) = (gateway.clone(), owner.clone());
        let net = IpNet::new(wanted.address(), wanted.length()).ok()?;
        let net = if wanted.address().is_unspecified() { self.free(&gateway, &owner, net)? } else { net };
        let net = self.take(&gateway, &owner, net)?;
        if !self.lead(net) {
            self.release_where(|claim| claim.prefix == net);
            return None;
        }
        Some(prefix_of(net))
    }

    /// Claims what is wanted; where answers could not be told from those of another session of the same owner, a free
    /// address in its place, and the same one again for whoever wants that again.
    fn take(&mut self, gateway: &Gateway, owner: &Owner, net: IpNet) -> Option<IpNet> {
        let Side::Gives { scope, .. } = self.side else { return None };
        let wish = (net, scope.asked);
        let before = match &self.link {
            Link::Device { local, .. } => local.device.instead(owner, wish),
            Link::Peer { .. } => None,
        };
        for net in before.into_iter().chain([net]) {
            if self.claims.iter().any(|claim| claim.prefix == net) {
                return Some(net);
            }
        }
        if self.claims.len() >= MOST_ADDRESSES || !self.may_be_given(gateway, net) {
            return None;
        }
        if let Some(before) = before.filter(|before| self.may_be_given(gateway, *before))
            && self.claim(before, owner, false).is_ok()
        {
            return Some(before);
        }
        let mut claimed = self.claim(net, owner, false);
        if claimed == Err(Refused::Crosses) {
            let is_one = net.prefix_len() == net.max_prefix_len();
            let free = if is_one { self.free(gateway, owner, net) } else { None };
            if let Some(free) = free.filter(|free| self.claim(*free, owner, false).is_ok()) {
                if let Link::Device { local, .. } = &self.link {
                    local.device.give_instead(free, wish);
                }
                return Some(free);
            }
            // The last that came has the answers.
            claimed = self.claim(net, owner, true);
        }
        if claimed.is_err() {
            self.tell_refusal(gateway, owner, net);
        }
        claimed.ok().map(|()| net)
    }

    /// What is refused is said now and then, since a client may ask without end.
    fn tell_refusal(&self, gateway: &Gateway, owner: &Owner, address: IpNet) {
        let Link::Device { local, .. } = &self.link else { return };
        let device = &gateway.device;
        if local.device.gives_no_more(owner) {
            local.shared.metrics.limit("addresses");
        } else if let Some(more) = local.shared.refused_addresses.happened(local.shared.now()) {
            tracing::info!(%address, %device, more, "an address that another holds was asked for");
        }
    }

    /// Whether a client may have it: what the document gives, and, where it does not say what, nothing that leads
    /// elsewhere from here, since what is given is led to the client for all programs of this machine.
    fn may_be_given(&self, gateway: &Gateway, net: IpNet) -> bool {
        let Link::Device { local, .. } = &self.link else { return false };
        gives(gateway, net) && !(gateway.assign.is_empty() && local.device.net().leads_elsewhere(net.addr()))
    }

    /// An address that nobody holds, for whom may have one more.
    fn free(&self, gateway: &Gateway, owner: &Owner, like: IpNet) -> Option<IpNet> {
        let Link::Device { local, .. } = &self.link else { return None };
        if local.device.gives_no_more(owner) {
            local.shared.metrics.limit("addresses");
            return None;
        }
        let fits = |pool: &&IpNet| pool.addr().is_ipv4() == like.addr().is_ipv4();
        let pools: Vec<IpNet> = gateway.assign.iter().filter(fits).copied().collect();
        local.device.find_free(&pools, &gateway.addresses, owner, local.shared.now())
    }
}

impl Drop for End {
    fn drop(&mut self) {
        let Link::Device { local, mailbox } = &self.link else { return };
        self.claims.iter().for_each(|claim| local.device.breaks(claim.prefix));
        let (local, mailbox) = (local.clone(), mailbox.clone());
        self.release();
        let left = mailbox.close().len();
        if left > 0 {
            local.shared.metrics.dropped("no-session", left as u64);
        }
    }
}

/// What an answer has in the place of an address that is not given (RFC 9484, section 4.7.1).
fn nothing(wanted: Prefix) -> Prefix {
    match wanted.address() {
        IpAddr::V4(_) => Prefix::of(IpAddr::from([0; 4])),
        IpAddr::V6(_) => Prefix::of(IpAddr::from([0; 16])),
    }
}

/// As the wire has it. An `IpNet` that is truncated is always a prefix.
pub(super) fn prefix_of(net: IpNet) -> Prefix {
    Prefix::new(net.trunc().addr(), net.prefix_len()).unwrap_or_else(|_| Prefix::of(net.addr()))
}

/// Of two prefixes the one that lies within the other.
fn narrower(one: Prefix, other: Prefix) -> Option<Prefix> {
    let (one, other) = if one.length() >= other.length() { (one, other) } else { (other, one) };
    other.contains(one.address()).then_some(one)
}

/// Of the routes what lies within the network.
fn narrowed(routes: &[Route], network: IpNet) -> Vec<Route> {
    let whole = Route::to(prefix_of(network));
    let within = routes.iter().filter(|route| route.start.is_ipv4() == whole.start.is_ipv4());
    within
        .map(|route| Route { start: route.start.max(whole.start), end: route.end.min(whole.end), ..*route })
        .filter(|route| route.start <= route.end)
        .collect()
}

/// A TCP connection that begins through here learns at once how long its segments may be.
fn clamped(packet: Bytes, header: &ip::Header, mtu: usize) -> Bytes {
    let is_syn = header.protocol == ip::TCP
        && !header.is_later_fragment
        && packet.get(header.transport + 13).is_some_and(|flags| flags & 0x02 != 0);
    if !is_syn || mtu >= capsule::MAX_PACKET {
        return packet;
    }
    let mut changed = packet.to_vec();
    if ip::clamp_mss(&mut changed, header, mtu) { changed.into() } else { packet }
}
