//! A TUN device, and the sessions that own the addresses behind it. Its queues on each worker are in `local`.
//!
//! In: packets that the kernel sends into the device. Out: each to the session that owns its destination; packets
//! without a session are dropped and counted. Claims of addresses are decided here for all workers: an address has one
//! owner, and a newer session of that owner takes over from an older one. Never: filtering; the session does that.

mod local;
mod reserved;

use std::collections::{HashSet, VecDeque};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, Weak};
use std::time::Duration;

use bytes::Bytes;
use hermes_net::tun::nat::{self, Masquerade};
use hermes_net::tun::{self, IdleQueue, TunError};
use hermes_wire::ip;
use ipnet::IpNet;
use tokio::sync::watch;
use tokio::time::Instant;

use self::local::Elsewhere;
pub(crate) use self::local::{Devices, LocalDevice, Share};
use hermes_ip::address_owner::Owner;
use hermes_ip::claims::{Claim, ClaimError, Claims, Scope};
use hermes_ip::leases::{AddressLeases, AddressRequest};
use hermes_ip::mailbox::Mailbox;
use hermes_ip::table::Table;
use hermes_transport::runtime::{Shared, WorkerContext};

/// The time that a takeover waits for the peers of captured prefixes; until then packets take the old path.
pub(crate) const FAR_ENDS: Duration = Duration::from_secs(5);

/// The kind of route that leads a prefix into a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RouteScope {
    /// For all programs of this host, while a session owns the prefix.
    Everybody,
    /// A route for all programs except this one, as long as the document captures the prefix.
    Captured,
    /// A route for all programs except this one, as long as a session owns the prefix.
    Passing,
}

/// The source prefixes that are masqueraded with this host's address.
type Nat = (Vec<IpNet>, Masquerade);

/// A reference that keeps the device open, for a document that names it and for each session. When the last one is
/// dropped, the device closes on all workers together: the kernel chooses the queue of a packet, and closing one queue
/// alone would lose its packets.
#[derive(Debug)]
pub(crate) struct DeviceGuard {
    /// Duplicates of its queues, for a successor process.
    pub(crate) queues: Vec<IdleQueue>,
    _until: watch::Sender<()>,
}

/// A device, as shared by all workers.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) name: Arc<str>,
    net: tun::Device,
    /// The owners of prefixes. Read once a batch, written when sessions begin and end. A search in `given` reads it
    /// while holding its own lock, so `given` must not be locked while this is held.
    claims: RwLock<Table<Claims>>,
    numbers: AtomicU64,
    /// The address leases of clients, for all devices.
    given: Arc<AddressLeases>,
    /// The prefixes that sessions have routed here. Locked during a change, because claims and releases run on
    /// different workers.
    led: Mutex<HashSet<IpNet>>,
    /// The masquerading of packets that leave through it, until dropped.
    nat: Mutex<Option<Nat>>,
    /// Prefixes of sessions in the predecessor process, reserved for their owners while that process lives.
    reserved: RwLock<Table<Owner>>,
    /// The number of workers that wait for the predecessor to exit.
    waiting: AtomicUsize,
    /// True if this process reads the queues, rather than the predecessor.
    pub(crate) reads: watch::Sender<bool>,
    /// The number of captures whose peers have assigned addresses, or cannot before this process has the devices.
    pub(crate) answered: watch::Sender<usize>,
    /// The reference count of the device, and the signal of its end.
    hold: OnceLock<(Weak<DeviceGuard>, watch::Receiver<()>)>,
}

impl Device {
    pub(crate) fn new(name: Arc<str>, net: tun::Device, given: Arc<AddressLeases>) -> Arc<Self> {
        let reads = watch::Sender::new(net.is_ours());
        let answered = watch::Sender::new(0);
        let (claims, reserved, waiting, led, nat, hold) = Default::default();
        let numbers = AtomicU64::new(1);
        Arc::new(Self { name, net, claims, numbers, given, led, nat, reserved, waiting, reads, answered, hold })
    }

    /// Creates the first reference. Called once.
    pub(crate) fn held(&self, queues: Vec<IdleQueue>) -> Arc<DeviceGuard> {
        let (until, end) = watch::channel(());
        let hold = Arc::new(DeviceGuard { queues, _until: until });
        let _ = self.hold.set((Arc::downgrade(&hold), end));
        hold
    }

    /// Adds a reference. `None` if the last one was dropped.
    pub(crate) fn hold(&self) -> Option<Arc<DeviceGuard>> {
        self.hold.get()?.0.upgrade()
    }

    /// Waits until the last reference is dropped.
    async fn unheld(&self) {
        let end = self.hold.get().map(|(_, end)| end.clone());
        if let Some(mut end) = end {
            while end.changed().await.is_ok() {}
        }
    }

    /// Waits until the predecessor has handed over the device. False after the deadline.
    pub(crate) async fn is_read_by(&self, by: Instant) -> bool {
        let mut reads = self.reads.subscribe();
        matches!(tokio::time::timeout_at(by, reads.wait_for(|reads| *reads)).await, Ok(Ok(_)))
    }

    /// Waits until the device is deleted. That wakes no reader: epoll reports an error and no data.
    async fn deleted(&self, shared: &Shared) {
        let mut network = shared.network.subscribe();
        while self.net.is_there() {
            if network.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// The device in the kernel.
    pub(crate) fn net(&self) -> &tun::Device {
        &self.net
    }

    /// Claims a prefix for a session: packets from its scope go to the session from now on. With `may_cross`, the claim
    /// succeeds even if another session's scope overlaps.
    ///
    /// # Errors
    /// `ClaimError`: the reason for the refusal.
    pub(super) fn claim(
        &self,
        prefix: IpNet,
        owner: &Owner,
        mailbox: &Arc<Mailbox>,
        scope: Scope,
        may_cross: bool,
    ) -> Result<u64, ClaimError> {
        let is_given = owner.is_client();
        if is_given && (self.is_reserved(prefix, Some(owner)) || !self.given.take(prefix, owner)) {
            return Err(ClaimError::Others);
        }
        let number = self.enter(prefix, owner, mailbox, scope, may_cross);
        if number.is_err() && is_given {
            self.given.give_back(prefix);
        }
        number
    }

    fn enter(
        &self,
        prefix: IpNet,
        owner: &Owner,
        mailbox: &Arc<Mailbox>,
        scope: Scope,
        may_cross: bool,
    ) -> Result<u64, ClaimError> {
        let mut table = self.claims.write().unwrap_or_else(PoisonError::into_inner);
        let is_others = |claims: &Claims| claims.is_anothers(owner);
        // Captured prefixes may nest: the more specific one wins. Client prefixes must not overlap: the owner of a part
        // would receive packets of the whole, and could send from it.
        if owner.is_client() && table.overlapping(prefix).any(is_others) {
            return Err(ClaimError::Others);
        }
        // Another process assigns addresses now, and has a list of their owners. This check runs under the lock: either
        // the list contains this address, or the address is not assigned.
        if owner.is_client() && !self.net.is_ours() {
            return Err(ClaimError::Others);
        }
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        let claim = Claim { owner: owner.clone(), mailbox: mailbox.clone(), number, scope };
        table.get_or_default(prefix).enter(claim, may_cross).map(|()| number)
    }

    /// Records that the prefix was assigned as a substitute for the requested one.
    pub(super) fn give_instead(&self, prefix: IpNet, wish: AddressRequest) {
        self.given.give_instead(prefix, wish);
    }

    /// The prefix that the owner has as a substitute for the requested one.
    pub(super) fn instead(&self, owner: &Owner, wish: AddressRequest) -> Option<IpNet> {
        self.given.instead(owner, wish)
    }

    /// Marks a lease whose session broke off, so that its client may return to it.
    pub(super) fn breaks(&self, prefix: IpNet) {
        self.given.breaks(prefix);
    }

    /// An address of these pools for the owner: a free one, a lease that rests (see [`AddressLeases::find_free`]), or the
    /// owner's own in the predecessor process. `own` are those of the device.
    pub(super) fn find_free(&self, pools: &[IpNet], own: &[IpAddr], owner: &Owner, now: u64) -> Option<IpNet> {
        let taken = |address: IpAddr| if own.contains(&address) { Some(address.into()) } else { self.taken(address) };
        self.given.find_free(&self.name, pools, owner, now, taken).or_else(|| {
            let reserved = self.reserved.read().unwrap_or_else(PoisonError::into_inner);
            let owns = reserved.iter().filter(|(_, holder)| *holder == owner).map(|(prefix, _)| *prefix);
            let mut fit = owns.filter(|net| net.prefix_len() == net.max_prefix_len());
            fit.find(|net| pools.iter().any(|pool| pool.contains(net)))
        })
    }

    /// Releases a prefix. Removes its route unless another session still owns it, in this process or in one that shares
    /// the device.
    pub(super) fn release(&self, prefix: IpNet, number: u64, lead: RouteScope) {
        let mut led = self.led();
        if !self.leave(prefix, number) {
            return;
        }
        if !self.net.is_ours() {
            led.remove(&prefix);
            // The route is also not restored if the successor removes it.
            return self.net.forget_route(prefix);
        }
        if self.reserved.read().unwrap_or_else(PoisonError::into_inner).get(prefix).is_some() {
            return;
        }
        led.remove(&prefix);
        let changed = match lead {
            RouteScope::Everybody => self.net.remove_route(prefix),
            RouteScope::Passing => self.net.release(prefix),
            RouteScope::Captured => Ok(()),
        };
        if let Err(error) = changed {
            tracing::warn!(%error, "{}", error.remedy());
        }
    }

    /// Removes a claim. True if no session owns the prefix now.
    fn leave(&self, prefix: IpNet, number: u64) -> bool {
        let mut table = self.claims.write().unwrap_or_else(PoisonError::into_inner);
        let Some(claims) = table.get_mut(prefix) else { return true };
        let Some(at) = claims.sessions.iter().position(|claim| claim.number == number) else { return false };
        let was_given = claims.sessions.remove(at).owner.is_client();
        let is_over = claims.sessions.is_empty();
        if is_over && !claims.is_captured {
            table.remove(prefix);
        }
        // Searches lock `given` first, so the table is unlocked before.
        drop(table);
        if was_given {
            self.given.give_back(prefix);
        }
        is_over
    }

    /// Routes a session's prefix here, or changes the route. False if the kernel refuses, or another program has such a
    /// route.
    pub(super) fn lead(&self, prefix: IpNet, route: tun::Route, lead: RouteScope) -> bool {
        let mut led = self.led();
        let is_new = led.insert(prefix);
        let changed = match lead {
            RouteScope::Everybody if is_new => self.net.set_route(prefix, route),
            RouteScope::Everybody => self.net.change_route(prefix, route),
            RouteScope::Passing if is_new => self.net.capture(prefix, route),
            RouteScope::Passing | RouteScope::Captured => self.net.change_capture(prefix, route),
        };
        if let Err(error) = &changed {
            led.remove(&prefix);
            tracing::warn!(%error, "{}", error.remedy());
        }
        changed.is_ok()
    }

    fn led(&self) -> MutexGuard<'_, HashSet<IpNet>> {
        self.led.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Captures the packets of a prefix, with or without a session for them.
    ///
    /// # Errors
    /// `TunError`: errors of [`tun::Device::capture`].
    pub(crate) fn capture(&self, prefix: IpNet) -> Result<(), TunError> {
        self.set_captured(prefix, true);
        self.net.capture(prefix, tun::Route::default()).inspect_err(|_| self.set_captured(prefix, false))
    }

    /// Ends the capture of a prefix.
    ///
    /// # Errors
    /// `TunError`: the kernel refuses.
    pub(crate) fn release_capture(&self, prefix: IpNet) -> Result<(), TunError> {
        self.set_captured(prefix, false);
        self.net.release(prefix)
    }

    fn set_captured(&self, prefix: IpNet, is_captured: bool) {
        let mut table = self.claims.write().unwrap_or_else(PoisonError::into_inner);
        let claims = table.get_or_default(prefix);
        claims.is_captured = is_captured;
        if !is_captured && claims.sessions.is_empty() {
            table.remove(prefix);
        }
    }

    /// Sets the source prefixes that are masqueraded (`None`: none). If they are unchanged, rules that another program
    /// removed are restored. A failure changes nothing. Blocks on nft in the calling thread: the main thread, whose
    /// next step needs the result. Workers continue meanwhile.
    ///
    /// # Errors
    /// `TunError`: errors of [`nat::masquerade`].
    pub(crate) fn set_nat(&self, clients: Option<&Vec<IpNet>>) -> Result<(), TunError> {
        let mut nat = self.nat.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(clients) = clients else {
            *nat = None;
            return Ok(());
        };
        match &mut *nat {
            Some((running, masquerade)) if running == clients => masquerade.restore(clients)?,
            Some((running, masquerade)) => {
                masquerade.replace(clients)?;
                running.clone_from(clients);
            }
            None => *nat = Some((clients.clone(), nat::masquerade(&self.net, clients)?)),
        }
        Ok(())
    }

    /// Undoes a failed takeover: the device gets back what this process had set, and everything else of Hermes is
    /// removed.
    ///
    /// # Errors
    /// `TunError`: the first step that failed. All other steps are done.
    pub(crate) fn roll_back(&self) -> Result<(), TunError> {
        let undone = self.net.roll_back();
        let nat = self.nat.lock().unwrap_or_else(PoisonError::into_inner);
        undone.and(match &*nat {
            Some((clients, masquerade)) => masquerade.replace(clients),
            None => {
                nat::sweep(&self.net);
                Ok(())
            }
        })
    }

    /// The prefixes that are masqueraded now.
    pub(crate) fn nat(&self) -> Option<Vec<IpNet>> {
        let nat = self.nat.lock().unwrap_or_else(PoisonError::into_inner);
        nat.as_ref().map(|(clients, _)| clients.clone())
    }

    /// True if the owner has as many addresses as it may have.
    pub(super) fn gives_no_more(&self, owner: &Owner) -> bool {
        self.given.is_full(owner)
    }

    /// Ends the sessions of a device that delivers no more packets.
    fn finish_sessions(&self) {
        let claims = self.claims.read().unwrap_or_else(PoisonError::into_inner);
        claims.iter().flat_map(|(_, claims)| &claims.sessions).for_each(|claim| claim.mailbox.finish());
    }

    /// The prefix that covers an address in use; `None` if it is free.
    fn taken(&self, address: IpAddr) -> Option<IpNet> {
        let reserved = || self.reserved.read().unwrap_or_else(PoisonError::into_inner).around(address);
        let claimed = || self.claims.read().unwrap_or_else(PoisonError::into_inner).around(address);
        reserved().or_else(|| self.given.around(address)).or_else(claimed)
    }

    /// Delivers packets to the sessions that own their destinations. `elsewhere` leads to another process, which may
    /// have sessions for the rest.
    fn deliver(
        &self,
        worker: &WorkerContext,
        elsewhere: &Elsewhere,
        packets: &mut VecDeque<Bytes>,
        run: &mut Vec<Bytes>,
    ) {
        let most = worker.snapshot().limits.datagram_queue;
        let metrics = &worker.shared.metrics;
        let claims = self.claims.read().unwrap_or_else(PoisonError::into_inner);
        while let Some(first) = packets.front() {
            let ends = ip::ends(first);
            // Consecutive packets usually belong to one flow, so packets with the same ends are delivered together.
            while packets.front().is_some_and(|next| ip::ends(next) == ends) {
                run.extend(packets.pop_front());
            }
            match ends.and_then(|(from, to)| claims.find(to)?.holder(from, !elsewhere.is_before())) {
                Some(claim) => {
                    let dropped = claim.mailbox.post(run, most);
                    if dropped > 0 {
                        metrics.dropped("queue-full", dropped);
                    }
                }
                None => {
                    let passed =
                        elsewhere.queue().and_then(|way| way.try_send(run).ok()).map_or(0, |moved| moved.taken());
                    let reason = if elsewhere.queue().is_some() { "not-forwarded" } else { "no-session" };
                    if passed < run.len() {
                        metrics.dropped(reason, (run.len() - passed) as u64);
                    }
                    run.clear();
                }
            }
        }
    }
}
