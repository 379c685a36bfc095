//! Reconciles the devices of this process with their desired state.
//!
//! In: notifications of the kernel for links, addresses, routes and rules (rtnetlink), and for nftables tables. Out:
//! settings that another program removed from a device are restored. The first restoration is immediate; repeated ones
//! are delayed by growing pauses, since the other program may do it on purpose. A captured route that another program
//! replaced is restored, too. Rules and tables of removed devices are removed. Never: a restoration of settings that
//! this process removed itself.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::io;
use std::time::Duration;

use netlink_packet_route::link::{InfoKind, LinkAttribute, LinkFlags, LinkInfo, LinkMessage};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use tokio::time::Instant;

use super::desired::{Setting, devices, registry};
use super::{Device, TunError, capture, nat, route};
use crate::backoff::Backoff;
use crate::netlink::{self, ADDRESSES, LINKS, Notifications, ROUTES, RULES, TableChange};

/// Shortest and longest pause between two restorations while removals repeat. A flush may remove further settings
/// during the first restoration; they are restored after the shortest pause.
const MIN_PAUSE: Duration = Duration::from_millis(100);
const MAX_PAUSE: Duration = Duration::from_secs(60);

/// Pending notifications are read before any action, since a flush removes one setting after the other. If
/// notifications do not end, the reconciler acts after this number of them.
const MAX_NOTIFICATIONS: usize = 64;
/// A full check may take long, so the pause after it is this many times as long as the check.
const CHECK_TIME_SHARE: u32 = 10;

/// Restores removed settings of all current and future devices of this process, in the network namespace and on the
/// runtime of the caller. The future never ends, and may be dropped at any time.
///
/// # Errors
/// The kernel sends no notifications, or has closed their socket.
pub async fn reconcile() -> io::Result<Infallible> {
    let mut notifications = Notifications::of(LINKS | ADDRESSES | ROUTES | RULES)?;
    let mut tables = Tables::Idle;
    let mut reconciler = Reconciler::default();
    let mut in_a_row = 0;
    loop {
        tokio::select! {
            biased;
            () = reconciler.due(), if in_a_row >= MAX_NOTIFICATIONS => {
                reconciler.act().await;
                in_a_row = 0;
            }
            heard = next(&mut notifications, &mut tables) => {
                reconciler.handle(heard?);
                in_a_row += 1;
                // Yields: other tasks share this thread.
                tokio::task::coop::consume_budget().await;
            }
            () = reconciler.due() => {
                reconciler.act().await;
                in_a_row = 0;
            }
        }
    }
}

/// Received notifications. `None` in a variant: the kernel dropped some, so anything may have changed.
enum Notification {
    Routes(Option<Vec<RouteNetlinkMessage>>),
    Tables(Option<Vec<TableChange>>),
}

/// Receives the next notification; neither source starves the other. Cancel safe.
async fn next(notifications: &mut Notifications, tables: &mut Tables) -> io::Result<Notification> {
    tokio::select! {
        heard = notifications.next() => heard.map(Notification::Routes),
        heard = tables.next() => heard.map(Notification::Tables),
    }
}

/// The subscription to changes of nftables tables, which begins when this process creates a table.
enum Tables {
    Idle,
    Subscribed(Notifications),
    Failed,
}

impl Tables {
    async fn next(&mut self) -> io::Result<Option<Vec<TableChange>>> {
        match self {
            Tables::Subscribed(notifications) => notifications.next_tables().await,
            Tables::Failed => std::future::pending().await,
            Tables::Idle => {
                nat::table_created().await;
                *self = match Notifications::of_tables() {
                    Ok(notifications) => Tables::Subscribed(notifications),
                    Err(error) => {
                        tracing::warn!(%error, "cannot watch nftables tables; source NAT that others remove is restored only at a reload");
                        Tables::Failed
                    }
                };
                Ok(None)
            }
        }
    }
}

/// The state of the reconciler: settings and checks that notifications made necessary.
#[derive(Default)]
struct Reconciler {
    /// Lost settings by interface index.
    lost: BTreeMap<u32, LostSettings>,
    /// True if notifications were lost, so that any setting may have changed.
    has_missed: bool,
    /// True if a TUN device was removed, perhaps one of a killed process.
    is_any_removed: bool,
    next_check: Option<Instant>,
}

/// The settings that a device lacks, and the pauses between restorations.
struct LostSettings {
    items: BTreeSet<Setting>,
    backoff: Backoff,
    /// The error text of the last failed restoration, as it was logged.
    logged: Option<String>,
}

impl Default for LostSettings {
    fn default() -> Self {
        Self { items: BTreeSet::new(), backoff: Backoff::new(MIN_PAUSE, MAX_PAUSE), logged: None }
    }
}

impl Reconciler {
    fn needs_check(&self) -> bool {
        self.has_missed || self.is_any_removed
    }

    /// Waits until there is work to do, and until the pause before that work has passed.
    async fn due(&self) {
        let look = async {
            if let Some(next) = self.next_check {
                tokio::time::sleep_until(next).await;
            }
        };
        let next = self.lost.values().filter(|loss| !loss.items.is_empty()).map(|loss| loss.backoff.next()).min();
        let restoration = async {
            if let Some(Some(next)) = next {
                tokio::time::sleep_until(next).await;
            }
        };
        tokio::select! {
            () = look, if self.needs_check() => {}
            () = restoration, if next.is_some() => {}
            else => std::future::pending().await,
        }
    }

    /// Restores lost settings. Blocking work runs on another thread, except for a link that came up.
    async fn act(&mut self) {
        let began = Instant::now();
        if self.needs_check() && self.next_check.is_none_or(|next| began >= next) {
            if std::mem::take(&mut self.is_any_removed) {
                capture::remove_stale_rules();
                let _ = tokio::task::spawn_blocking(nat::remove_stale).await;
            }
            if std::mem::take(&mut self.has_missed) {
                self.check_links();
                devices(|_| true).iter().for_each(|device| self.lose(device, device.items()));
            }
            self.next_check = Some(began);
        }
        {
            let own = registry();
            self.lost.retain(|index, _| own.contains_key(index));
        }
        let due = self.lost.iter_mut().filter(|(_, loss)| !loss.items.is_empty() && loss.backoff.is_due());
        let due: Vec<_> = due.map(|(index, loss)| (*index, std::mem::take(&mut loss.items))).collect();
        if !due.is_empty() {
            let all = move || due.into_iter().filter_map(|(index, items)| restore(index, items)).collect();
            let restored: Vec<_> = tokio::task::spawn_blocking(all).await.unwrap_or_else(|_| {
                // The thread panicked, and its list of settings is lost, so all settings are checked again.
                self.has_missed = true;
                Vec::new()
            });
            for (device, result, left) in restored {
                self.lost.entry(device.index()).or_default().note(&device, result, left);
            }
        }
        if self.next_check == Some(began) {
            let now = Instant::now();
            self.next_check = Some(now + MIN_PAUSE.max(CHECK_TIME_SHARE * (now - began)));
        }
    }

    fn handle(&mut self, heard: Notification) {
        match heard {
            Notification::Routes(Some(messages)) => messages.iter().for_each(|message| self.note(message)),
            Notification::Routes(None) => self.has_missed = true,
            Notification::Tables(Some(changes)) => changes.iter().for_each(|change| self.note_table(change)),
            Notification::Tables(None) => devices(|_| true).iter().for_each(|device| self.lose(device, [Setting::Nat])),
        }
    }

    /// Records a removed setting if it is still desired.
    fn note(&mut self, message: &RouteNetlinkMessage) {
        let (index, item) = match message {
            RouteNetlinkMessage::NewLink(link) => return self.follow(link),
            // With another family, the message reports that a port left a bridge, and the link itself still exists.
            RouteNetlinkMessage::DelLink(link) if link.header.interface_family != AddressFamily::Unspec => return,
            RouteNetlinkMessage::DelLink(link) => return self.is_any_removed |= is_tun(link),
            RouteNetlinkMessage::DelAddress(address) => {
                let Some((index, address)) = route::address_of(address) else { return };
                (index, Setting::Address(address))
            }
            RouteNetlinkMessage::DelRoute(route) => {
                let Some(found) = route::found(route) else { return };
                found
            }
            RouteNetlinkMessage::NewRoute(route) => {
                let Some(item) = route::in_the_way(route) else { return };
                let Some(device) = devices(|_| true).into_iter().find(|device| device.desired().has(item)) else {
                    return;
                };
                (device.index(), item)
            }
            RouteNetlinkMessage::DelRule(rule) => {
                let Some(found) = capture::found(rule) else { return };
                found
            }
            _ => return,
        };
        for device in devices(|own| own == index || matches!(item, Setting::Rule(..)) && capture::is_of(own, index)) {
            // A successor process may remove its own settings.
            if device.desired().has(item) && device.may_have(item) {
                match item {
                    // The kernel also removes the routes with this source address, without a notification.
                    Setting::Address(_) => self.lose(&device, device.items()),
                    item => self.lose(&device, [item]),
                }
            }
        }
    }

    /// Records a change of a device's table. A table that was created right after its removal needs no restoration: it
    /// is complete, or another program's.
    fn note_table(&mut self, change: &TableChange) {
        let (TableChange::Created(table) | TableChange::Removed(table)) = change;
        let Some(name) = nat::device_of(table) else { return };
        for device in devices(|_| true).iter().filter(|device| device.name() == name) {
            if matches!(change, TableChange::Removed(_)) && device.desired().has(Setting::Nat) {
                self.lose(device, [Setting::Nat]);
            } else if let Some(loss) = self.lost.get_mut(&device.index()) {
                loss.items.remove(&Setting::Nat);
            }
        }
    }

    fn lose(&mut self, device: &Device, items: impl IntoIterator<Item = Setting>) {
        self.lost.entry(device.index()).or_default().items.extend(items);
    }
}

impl LostSettings {
    /// Logs the result of a restoration. Settings that could not be restored are tried again, with the same growing
    /// pauses.
    fn note(&mut self, device: &Device, result: Result<bool, TunError>, left: BTreeSet<Setting>) {
        let name = device.name();
        match result {
            Ok(false) => self.logged = None,
            Ok(true) => {
                self.logged = None;
                let pause = self.backoff.begin();
                tracing::warn!(
                    device = name,
                    next_restoration_in_secs = pause.as_secs_f64(),
                    "restored addresses, routes, rules or NAT of a device that another program removed. If a program does \
                     so repeatedly (`ip monitor`, `nft monitor`), configure it to ignore `proto 72` and tables \
                     `hermes-...`"
                );
            }
            Err(error) => {
                self.backoff.begin();
                self.items.extend(left);
                let logged = self.logged.replace(error.to_string());
                if logged != self.logged {
                    tracing::warn!(
                        device = name, %error,
                        "cannot restore all addresses, routes, rules or NAT of a device that another program removed; \
                         retrying. {}", error.remedy()
                    );
                }
            }
        }
    }
}

/// Whether a link is a TUN device; true if its kind is unknown.
fn is_tun(link: &LinkMessage) -> bool {
    let info = link.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::LinkInfo(info) => Some(info),
        _ => None,
    });
    let kind = info.and_then(|info| info.iter().find(|info| matches!(info, LinkInfo::Kind(_))));
    kind.is_none_or(|kind| *kind == LinkInfo::Kind(InfoKind::Tun))
}

/// Restores a device. Returns the device with the result and the settings that could not be restored. `None`: the
/// device was removed or is down.
fn restore(index: u32, mut items: BTreeSet<Setting>) -> Option<(Device, Result<bool, TunError>, BTreeSet<Setting>)> {
    // A device that is down is restored when it comes up.
    let device = devices(|own| own == index).into_iter().find(|device| !device.desired().is_down)?;
    let result = device.restore(&mut items);
    Some((device, result, items))
}

impl Reconciler {
    /// Handles a link that was set up or down.
    fn follow(&mut self, link: &LinkMessage) {
        // For a new interface, the kernel reports that all flags changed.
        let mask = link.header.change_mask;
        if mask.contains(LinkFlags::Up) && mask.bits() != u32::MAX {
            let is_up = link.header.flags.contains(LinkFlags::Up);
            devices(|index| index == link.header.index).iter().for_each(|device| self.follow_link(device, is_up));
        }
    }

    /// Checks all links after lost notifications.
    fn check_links(&mut self) {
        let links = netlink::list(RouteNetlinkMessage::GetLink(LinkMessage::default())).unwrap_or_default();
        for link in links {
            let RouteNetlinkMessage::NewLink(link) = link else { continue };
            let is_up = link.header.flags.contains(LinkFlags::Up);
            let changed = |device: &&Device| device.desired().is_down == is_up;
            devices(|index| index == link.header.index)
                .iter()
                .filter(changed)
                .for_each(|device| self.follow_link(device, is_up));
        }
    }

    /// Restores a device whose link came up again. The kernel removes addresses and routes of a link that goes down,
    /// and reports few of them. (A link rarely comes up, so this thread may wait for the kernel and for nft.)
    fn follow_link(&mut self, device: &Device, is_up: bool) {
        let name = device.name();
        // The link of a new device comes up, too, although it was not down before.
        let was_down = std::mem::replace(&mut device.desired().is_down, !is_up);
        if !is_up {
            tracing::warn!(
                device = name,
                "link down: captured packets take other routes until it is up (`ip link set NAME up`)"
            );
        } else if was_down {
            let mut items = device.items();
            match device.restore(&mut items) {
                Ok(_) => tracing::info!(device = name, "link up: restored its addresses and routes"),
                Err(error) => {
                    tracing::warn!(device = name, %error, "link up, but cannot restore all of its settings; \
                                   retrying. {}", error.remedy());
                    self.lose(device, items);
                }
            }
        }
    }
}
