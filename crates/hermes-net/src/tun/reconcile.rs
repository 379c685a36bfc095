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

use super::kept::{Item, devices, own};
use super::{Device, TunError, capture, nat, route};
use crate::netlink::{self, ADDRESSES, Announcements, LINKS, ROUTES, RULES, TableChange};
use crate::pace::Pace;

/// Pauses between two restorations while removals repeat. A flush is checked for completeness within the first.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Pending notifications are read before any action, since a flush removes one setting after the other. If
/// notifications do not end, the reconciler acts after this number of them.
const IN_A_ROW: usize = 64;
/// A full check may take long; it uses at most this share of the time.
const SHARE: u32 = 10;

/// Watches over all current and future devices of this process, in the network namespace and on the runtime of the
/// caller. Does not end, and may be dropped at any time.
///
/// # Errors
/// The kernel sends no notifications, or has closed their socket.
pub async fn guard() -> io::Result<Infallible> {
    let mut announcements = Announcements::of(LINKS | ADDRESSES | ROUTES | RULES)?;
    let mut tables = Tables::Unwanted;
    let mut work = Work::default();
    let mut in_a_row = 0;
    loop {
        tokio::select! {
            biased;
            () = work.due(), if in_a_row >= IN_A_ROW => {
                work.act().await;
                in_a_row = 0;
            }
            heard = next(&mut announcements, &mut tables) => {
                work.hear(heard?);
                in_a_row += 1;
                // Yields: other tasks share this thread.
                tokio::task::coop::consume_budget().await;
            }
            () = work.due() => {
                work.act().await;
                in_a_row = 0;
            }
        }
    }
}

/// Received notifications; `None` in either: some were lost, so anything may have changed.
enum Heard {
    Routes(Option<Vec<RouteNetlinkMessage>>),
    Tables(Option<Vec<TableChange>>),
}

/// Receives the next notification; neither source starves the other. Cancel safe.
async fn next(announcements: &mut Announcements, tables: &mut Tables) -> io::Result<Heard> {
    tokio::select! {
        heard = announcements.next() => heard.map(Heard::Routes),
        heard = tables.next() => heard.map(Heard::Tables),
    }
}

/// Notifications of nftables tables, from the time when this process creates one.
enum Tables {
    Unwanted,
    Heard(Announcements),
    Unheard,
}

impl Tables {
    async fn next(&mut self) -> io::Result<Option<Vec<TableChange>>> {
        match self {
            Tables::Heard(announcements) => announcements.next_tables().await,
            Tables::Unheard => std::future::pending().await,
            Tables::Unwanted => {
                nat::made().await;
                *self = match Announcements::of_tables() {
                    Ok(announcements) => Tables::Heard(announcements),
                    Err(error) => {
                        tracing::warn!(%error, "cannot watch nftables tables; source NAT that others remove is restored only at a reload");
                        Tables::Unheard
                    }
                };
                Ok(None)
            }
        }
    }
}

/// Pending work after notifications.
#[derive(Default)]
struct Work {
    /// Lost settings by interface index.
    losses: BTreeMap<u32, Loss>,
    /// Notifications were lost: anything may have changed.
    is_unheard: bool,
    /// A TUN device was removed, perhaps one of a killed process.
    is_any_gone: bool,
    next_look: Option<Instant>,
}

/// The settings that a device lacks, and the pauses between restorations.
struct Loss {
    items: BTreeSet<Item>,
    pace: Pace,
    /// The reason of the last failed restoration, as it was logged.
    told: Option<String>,
}

impl Default for Loss {
    fn default() -> Self {
        Self { items: BTreeSet::new(), pace: Pace::new(FIRST_PAUSE, LONGEST_PAUSE), told: None }
    }
}

impl Work {
    fn wants_look(&self) -> bool {
        self.is_unheard || self.is_any_gone
    }

    /// Waits until there is work to do and its pause has passed.
    async fn due(&self) {
        let look = async {
            if let Some(next) = self.next_look {
                tokio::time::sleep_until(next).await;
            }
        };
        let next = self.losses.values().filter(|loss| !loss.items.is_empty()).map(|loss| loss.pace.next()).min();
        let restoration = async {
            if let Some(Some(next)) = next {
                tokio::time::sleep_until(next).await;
            }
        };
        tokio::select! {
            () = look, if self.wants_look() => {}
            () = restoration, if next.is_some() => {}
            else => std::future::pending().await,
        }
    }

    /// Restores lost settings. Blocking work runs on another thread, except for a link that came up.
    async fn act(&mut self) {
        let began = Instant::now();
        if self.wants_look() && self.next_look.is_none_or(|next| began >= next) {
            if std::mem::take(&mut self.is_any_gone) {
                capture::remove_stale_rules();
                let _ = tokio::task::spawn_blocking(nat::remove_stale).await;
            }
            if std::mem::take(&mut self.is_unheard) {
                self.look_at_links();
                devices(|_| true).iter().for_each(|device| self.lose(device, device.items()));
            }
            self.next_look = Some(began);
        }
        {
            let own = own();
            self.losses.retain(|index, _| own.contains_key(index));
        }
        let due = self.losses.iter_mut().filter(|(_, loss)| !loss.items.is_empty() && loss.pace.is_due());
        let due: Vec<_> = due.map(|(index, loss)| (*index, std::mem::take(&mut loss.items))).collect();
        if !due.is_empty() {
            let all = move || due.into_iter().filter_map(|(index, items)| put_back(index, items)).collect();
            let restored: Vec<_> = tokio::task::spawn_blocking(all).await.unwrap_or_else(|_| {
                // The thread panicked with its settings: all are checked again.
                self.is_unheard = true;
                Vec::new()
            });
            for (device, result, left) in restored {
                self.losses.entry(device.index()).or_default().note(&device, result, left);
            }
        }
        if self.next_look == Some(began) {
            let now = Instant::now();
            self.next_look = Some(now + FIRST_PAUSE.max(SHARE * (now - began)));
        }
    }

    fn hear(&mut self, heard: Heard) {
        match heard {
            Heard::Routes(Some(messages)) => messages.iter().for_each(|message| self.note(message)),
            Heard::Routes(None) => self.is_unheard = true,
            Heard::Tables(Some(changes)) => changes.iter().for_each(|change| self.note_table(change)),
            Heard::Tables(None) => devices(|_| true).iter().for_each(|device| self.lose(device, [Item::Nat])),
        }
    }

    /// Records removed settings that are still wanted.
    fn note(&mut self, message: &RouteNetlinkMessage) {
        let (index, item) = match message {
            RouteNetlinkMessage::NewLink(link) => return self.follow(link),
            // Other address families report bridge ports.
            RouteNetlinkMessage::DelLink(link) if link.header.interface_family != AddressFamily::Unspec => return,
            RouteNetlinkMessage::DelLink(link) => return self.is_any_gone |= is_tun(link),
            RouteNetlinkMessage::DelAddress(address) => {
                let Some((index, address)) = route::address_of(address) else { return };
                (index, Item::Address(address))
            }
            RouteNetlinkMessage::DelRoute(route) => {
                let Some(found) = route::found(route) else { return };
                found
            }
            RouteNetlinkMessage::NewRoute(route) => {
                let Some(item) = route::in_the_way(route) else { return };
                let Some(device) = devices(|_| true).into_iter().find(|device| device.kept().has(item)) else { return };
                (device.index(), item)
            }
            RouteNetlinkMessage::DelRule(rule) => {
                let Some(found) = capture::found(rule) else { return };
                found
            }
            _ => return,
        };
        for device in devices(|own| own == index || matches!(item, Item::Rule(..)) && capture::is_of(own, index)) {
            // A successor process may remove its own settings.
            if device.kept().has(item) && device.may_have(item) {
                match item {
                    // The kernel also removes the routes with this source address, without a notification.
                    Item::Address(_) => self.lose(&device, device.items()),
                    item => self.lose(&device, [item]),
                }
            }
        }
    }

    /// Records a change of a device's table. A table that was created again at once is complete, or another program's.
    fn note_table(&mut self, change: &TableChange) {
        let (TableChange::Made(table) | TableChange::Gone(table)) = change;
        let Some(name) = nat::device_of(table) else { return };
        for device in devices(|_| true).iter().filter(|device| device.name() == name) {
            if matches!(change, TableChange::Gone(_)) && device.kept().has(Item::Nat) {
                self.lose(device, [Item::Nat]);
            } else if let Some(loss) = self.losses.get_mut(&device.index()) {
                loss.items.remove(&Item::Nat);
            }
        }
    }

    fn lose(&mut self, device: &Device, items: impl IntoIterator<Item = Item>) {
        self.losses.entry(device.index()).or_default().items.extend(items);
    }
}

impl Loss {
    /// Logs the result. Settings that could not be restored are tried again, with the same growing pauses.
    fn note(&mut self, device: &Device, result: Result<bool, TunError>, left: BTreeSet<Item>) {
        let name = device.name();
        match result {
            Ok(false) => self.told = None,
            Ok(true) => {
                self.told = None;
                let pause = self.pace.begin();
                tracing::warn!(
                    device = name,
                    next_restoration_in_secs = pause.as_secs_f64(),
                    "restored addresses, routes, rules or NAT of a device that another program removed. If a program does \
                     so repeatedly (`ip monitor`, `nft monitor`), configure it to ignore `proto 72` and tables \
                     `hermes-...`"
                );
            }
            Err(error) => {
                self.pace.begin();
                self.items.extend(left);
                let told = self.told.replace(error.to_string());
                if told != self.told {
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

/// Restores a device. Returns it with the result and the settings that could not be restored.
fn put_back(index: u32, mut items: BTreeSet<Item>) -> Option<(Device, Result<bool, TunError>, BTreeSet<Item>)> {
    // A device that is down is restored when it comes up.
    let device = devices(|own| own == index).into_iter().find(|device| !device.kept().is_down)?;
    let result = device.restore(&mut items);
    Some((device, result, items))
}

impl Work {
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
    fn look_at_links(&mut self) {
        let links = netlink::list(RouteNetlinkMessage::GetLink(LinkMessage::default())).unwrap_or_default();
        for link in links {
            let RouteNetlinkMessage::NewLink(link) = link else { continue };
            let is_up = link.header.flags.contains(LinkFlags::Up);
            let changed = |device: &&Device| device.kept().is_down == is_up;
            devices(|index| index == link.header.index)
                .iter()
                .filter(changed)
                .for_each(|device| self.follow_link(device, is_up));
        }
    }

    /// The kernel removes addresses and routes of a link that goes down, and reports few of them. (A link rarely comes
    /// up, so this thread may wait for the kernel and for nft.)
    fn follow_link(&mut self, device: &Device, is_up: bool) {
        let name = device.name();
        // The creator of a device sets it up, too.
        let was_down = std::mem::replace(&mut device.kept().is_down, !is_up);
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
