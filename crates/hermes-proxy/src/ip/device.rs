//! A TUN device: who holds which addresses behind it. Its queues on each worker are in `local`.
//!
//! In: packets that the kernel sends into the device. Out: each to the session that holds its destination;
//! those of nobody are dropped and counted. Claims are settled here for all workers: an address has one
//! holder, and a newer session of the same holder takes over from an older one.
//! Never: what a packet may do; its session judges that.

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
use crate::worker::{Shared, Worker};
use hermes_ip::claims::{Claim, Claims, Refused, Scope};
use hermes_ip::leases::{Given, Wish};
use hermes_ip::mailbox::Mailbox;
use hermes_ip::owner::Owner;
use hermes_ip::table::Table;

/// A takeover waits so long for the far ends of what it captures: packets go the old way until then.
pub(crate) const FAR_ENDS: Duration = Duration::from_secs(5);

/// How packets are led into a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lead {
    /// For all programs of this machine, as long as somebody has the prefix.
    Everybody,
    /// For all but this one, as long as the document says so.
    Captured,
    /// The same, as long as somebody has the prefix.
    Passing,
}

/// Whose packets leave with this machine's address.
type Nat = (Vec<IpNet>, Masquerade);

/// Whoever has one needs the device: a document that names it, and each session. With the last one it goes, on all
/// workers together: the kernel chooses the queue of a packet, and one that is closed takes what is in it along.
#[derive(Debug)]
pub(crate) struct Hold {
    /// Its queues once more, for another process.
    pub(crate) queues: Vec<IdleQueue>,
    _until: watch::Sender<()>,
}

/// A device, as all workers see it.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) name: Arc<str>,
    net: tun::Device,
    /// Read once a batch, written where sessions begin and end. Searches of `given` ask it: what they lock is not taken
    /// while this is held.
    claims: RwLock<Table<Claims>>,
    numbers: AtomicU64,
    /// What clients of all devices were given.
    given: Arc<Given>,
    /// What sessions have led here. Held while that changes: who takes a prefix and who gives it back are on
    /// workers of their own.
    led: Mutex<HashSet<IpNet>>,
    /// What leaves by it has this machine's address, as long as this lives.
    nat: Mutex<Option<Nat>>,
    /// Whose prefixes are in the process before us, as long as that lives: nobody else's here.
    reserved: RwLock<Table<Owner>>,
    /// Workers that wait for the end of that process.
    waiting: AtomicUsize,
    /// Whether its queues are read here, and not in the process before us.
    pub(crate) reads: watch::Sender<bool>,
    /// Captures whose far ends have given their addresses, or cannot before this process has the devices.
    pub(crate) answered: watch::Sender<usize>,
    /// What it is held by, and the end of that.
    hold: OnceLock<(Weak<Hold>, watch::Receiver<()>)>,
}

impl Device {
    pub(crate) fn new(name: Arc<str>, net: tun::Device, given: Arc<Given>) -> Arc<Self> {
        let reads = watch::Sender::new(net.is_ours());
        let answered = watch::Sender::new(0);
        let (claims, reserved, waiting, led, nat, hold) = Default::default();
        let numbers = AtomicU64::new(1);
        Arc::new(Self { name, net, claims, numbers, given, led, nat, reserved, waiting, reads, answered, hold })
    }

    /// Begins to hold it. Once in its life.
    pub(crate) fn held(&self, queues: Vec<IdleQueue>) -> Arc<Hold> {
        let (until, end) = watch::channel(());
        let hold = Arc::new(Hold { queues, _until: until });
        let _ = self.hold.set((Arc::downgrade(&hold), end));
        hold
    }

    /// Holds it for one more. `None`: nobody has it any more.
    pub(crate) fn hold(&self) -> Option<Arc<Hold>> {
        self.hold.get()?.0.upgrade()
    }

    /// Waits until nobody holds it.
    async fn unheld(&self) {
        let end = self.hold.get().map(|(_, end)| end.clone());
        if let Some(mut end) = end {
            while end.changed().await.is_ok() {}
        }
    }

    /// Waits until the process before us has parted. False where it has not in time.
    pub(crate) async fn is_read_by(&self, by: Instant) -> bool {
        let mut reads = self.reads.subscribe();
        matches!(tokio::time::timeout_at(by, reads.wait_for(|reads| *reads)).await, Ok(Ok(_)))
    }

    /// Waits until somebody deletes it. A reader is not woken by that: to epoll it is an error, and nothing to be read.
    async fn deleted(&self, shared: &Shared) {
        let mut network = shared.network.subscribe();
        while self.net.is_there() {
            if network.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// The kernel's side of it.
    pub(crate) fn net(&self) -> &tun::Device {
        &self.net
    }

    /// Gives a prefix to a session: its packets from the scope go there from now on. One that `may_cross` gets it
    /// though another one's scope crosses its own.
    ///
    /// # Errors
    /// `Refused`: why it does not get it.
    pub(super) fn claim(
        &self,
        prefix: IpNet,
        owner: &Owner,
        mailbox: &Arc<Mailbox>,
        scope: Scope,
        may_cross: bool,
    ) -> Result<u64, Refused> {
        let is_given = owner.is_client();
        if is_given && (self.is_reserved(prefix, Some(owner)) || !self.given.take(prefix, owner)) {
            return Err(Refused::Others);
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
    ) -> Result<u64, Refused> {
        let mut table = self.claims.write().unwrap_or_else(PoisonError::into_inner);
        let is_others = |claims: &Claims| claims.is_anothers(owner);
        // What is captured may lie within, or around, what is captured as well: the narrower counts. What is given
        // to clients may not: whoever had a part of another's prefix would get its packets, and speak from it.
        if owner.is_client() && table.overlapping(prefix).any(is_others) {
            return Err(Refused::Others);
        }
        // Another process gives them, which was told whose each is. Looked at under the lock: it was told of this one,
        // or this one is not given.
        if owner.is_client() && !self.net.is_ours() {
            return Err(Refused::Others);
        }
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        let claim = Claim { owner: owner.clone(), mailbox: mailbox.clone(), number, scope };
        table.get_or_default(prefix).enter(claim, may_cross).map(|()| number)
    }

    /// It is given in the place of what its owner wanted.
    pub(super) fn give_instead(&self, prefix: IpNet, wish: Wish) {
        self.given.give_instead(prefix, wish);
    }

    /// What was given in the place of what is wanted, and is the owner's yet.
    pub(super) fn instead(&self, owner: &Owner, wish: Wish) -> Option<IpNet> {
        self.given.instead(owner, wish)
    }

    /// The session that is about to give it back was broken off, and may come again.
    pub(super) fn breaks(&self, prefix: IpNet) {
        self.given.breaks(prefix);
    }

    /// An address of these pools that nobody has, or that its owner had in the process before us, or that somebody had
    /// a while ago. `own` are the device's.
    pub(super) fn find_free(&self, pools: &[IpNet], own: &[IpAddr], owner: &Owner, now: u64) -> Option<IpNet> {
        let taken = |address: IpAddr| if own.contains(&address) { Some(address.into()) } else { self.taken(address) };
        self.given.find_free(&self.name, pools, owner, now, taken).or_else(|| {
            let reserved = self.reserved.read().unwrap_or_else(PoisonError::into_inner);
            let owns = reserved.iter().filter(|(_, holder)| *holder == owner).map(|(prefix, _)| *prefix);
            let mut fit = owns.filter(|net| net.prefix_len() == net.max_prefix_len());
            fit.find(|net| pools.iter().any(|pool| pool.contains(net)))
        })
    }

    /// Gives it back. Where nobody holds it now, of this process or another one that has the device, it is led here
    /// no more.
    pub(super) fn release(&self, prefix: IpNet, number: u64, lead: Lead) {
        let mut led = self.led();
        if !self.leave(prefix, number) {
            return;
        }
        if !self.net.is_ours() {
            led.remove(&prefix);
            // Nor is it put back where that process removes it.
            return self.net.forget_route(prefix);
        }
        if self.reserved.read().unwrap_or_else(PoisonError::into_inner).get(prefix).is_some() {
            return;
        }
        led.remove(&prefix);
        let changed = match lead {
            Lead::Everybody => self.net.remove_route(prefix),
            Lead::Passing => self.net.release(prefix),
            Lead::Captured => Ok(()),
        };
        if let Err(error) = changed {
            tracing::warn!(%error, "{}", error.remedy());
        }
    }

    /// True where nobody holds it now.
    fn leave(&self, prefix: IpNet, number: u64) -> bool {
        let mut table = self.claims.write().unwrap_or_else(PoisonError::into_inner);
        let Some(claims) = table.get_mut(prefix) else { return true };
        let Some(at) = claims.sessions.iter().position(|claim| claim.number == number) else { return false };
        let was_given = claims.sessions.remove(at).owner.is_client();
        let is_over = claims.sessions.is_empty();
        if is_over && !claims.is_captured {
            table.remove(prefix);
        }
        // Whoever searches has the locks the other way round.
        drop(table);
        if was_given {
            self.given.give_back(prefix);
        }
        is_over
    }

    /// Leads a prefix here that a session holds, or changes how. False where the kernel, or whoever has such a
    /// route, is against it.
    pub(super) fn lead(&self, prefix: IpNet, route: tun::Route, lead: Lead) -> bool {
        let mut led = self.led();
        let is_new = led.insert(prefix);
        let changed = match lead {
            Lead::Everybody if is_new => self.net.set_route(prefix, route),
            Lead::Everybody => self.net.change_route(prefix, route),
            Lead::Passing if is_new => self.net.capture(prefix, route),
            Lead::Passing | Lead::Captured => self.net.change_capture(prefix, route),
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

    /// Leads the packets of a prefix here, whether or not a session is for them.
    ///
    /// # Errors
    /// `TunError`: as of [`tun::Device::capture`].
    pub(crate) fn capture(&self, prefix: IpNet) -> Result<(), TunError> {
        self.set_captured(prefix, true);
        self.net.capture(prefix, tun::Route::default()).inspect_err(|_| self.set_captured(prefix, false))
    }

    /// Ends that.
    ///
    /// # Errors
    /// `TunError`: the kernel refuses.
    pub(crate) fn let_go(&self, prefix: IpNet) -> Result<(), TunError> {
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

    /// From now on what comes from these addresses (`None`: from none) leaves with this machine's; where that is so
    /// already, what somebody removed of it is there again. Where it fails nothing changes. Waits for nft on the calling
    /// thread, the main one, whose next step needs it: workers serve meanwhile.
    ///
    /// # Errors
    /// `TunError`: as of [`nat::masquerade`].
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

    /// Another process was to have it, and does not get it: it has again what this one gave it, and nothing else of ours.
    ///
    /// # Errors
    /// `TunError`: the first thing that cannot be undone. All else is.
    pub(crate) fn take_back(&self) -> Result<(), TunError> {
        let undone = self.net.take_back();
        let nat = self.nat.lock().unwrap_or_else(PoisonError::into_inner);
        undone.and(match &*nat {
            Some((clients, masquerade)) => masquerade.replace(clients),
            None => {
                nat::sweep(&self.net);
                Ok(())
            }
        })
    }

    /// Whose packets leave with this machine's address now.
    pub(crate) fn nat(&self) -> Option<Vec<IpNet>> {
        let nat = self.nat.lock().unwrap_or_else(PoisonError::into_inner);
        nat.as_ref().map(|(clients, _)| clients.clone())
    }

    /// Whether clients that are one owner's have as many prefixes as they may.
    pub(super) fn gives_no_more(&self, owner: &Owner) -> bool {
        self.given.is_full(owner)
    }

    /// Nothing comes from it any more.
    fn finish_sessions(&self) {
        let claims = self.claims.read().unwrap_or_else(PoisonError::into_inner);
        claims.iter().flat_map(|(_, claims)| &claims.sessions).for_each(|claim| claim.mailbox.finish());
    }

    /// What holds an address that somebody has; `None`: nobody has it.
    fn taken(&self, address: IpAddr) -> Option<IpNet> {
        let reserved = || self.reserved.read().unwrap_or_else(PoisonError::into_inner).around(address);
        let claimed = || self.claims.read().unwrap_or_else(PoisonError::into_inner).around(address);
        reserved().or_else(|| self.given.around(address)).or_else(claimed)
    }

    /// Posts packets to the sessions that hold their destinations. `elsewhere` is the way to those of another process,
    /// which alone knows whose the others are.
    fn deliver(&self, worker: &Worker, elsewhere: &Elsewhere, packets: &mut VecDeque<Bytes>, run: &mut Vec<Bytes>) {
        let most = worker.generation().snapshot.limits.datagram_queue;
        let metrics = &worker.shared.metrics;
        let claims = self.claims.read().unwrap_or_else(PoisonError::into_inner);
        while let Some(first) = packets.front() {
            let ends = ip::ends(first);
            // Most come in runs of one conversation.
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
                    let reason = if elsewhere.queue().is_some() { "passing-on" } else { "no-session" };
                    if passed < run.len() {
                        metrics.dropped(reason, (run.len() - passed) as u64);
                    }
                    run.clear();
                }
            }
        }
    }
}
