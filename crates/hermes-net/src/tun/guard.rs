//! Keeps what the devices of this process were given where it is, as long as it is wanted.
//!
//! In: the kernel's announcements of links, addresses, routes and rules (rtnetlink), and of tables of nftables. Out: what
//! somebody took from a device is there again: at once, but with growing pauses where it is taken time after time, since
//! somebody may mean it. So is a captured route whose place somebody has given to another one. Rules and tables of devices that are gone go too. Never: what this process has taken away itself.

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

/// Between two restorations, where there is no end of them. A flush looks again, within less, whether all is gone.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// All that is known comes first, since who flushes takes one thing after the other; but where there is no end of changes
/// it is acted on after so many announcements.
const IN_A_ROW: usize = 64;
/// A look at everything takes long where there is much: then it has this share of the time, at most.
const SHARE: u32 = 10;

/// Watches over the devices of this process, those that are yet to come too, in the network namespace and on the runtime
/// of the caller. Does not end, and may be dropped at any time.
///
/// # Errors
/// The kernel tells nothing, or no more.
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
                // There is more to do on this thread.
                tokio::task::coop::consume_budget().await;
            }
            () = work.due() => {
                work.act().await;
                in_a_row = 0;
            }
        }
    }
}

/// What was announced; of each, `None`: anything may have happened.
enum Heard {
    Routes(Option<Vec<RouteNetlinkMessage>>),
    Tables(Option<Vec<TableChange>>),
}

/// What is announced next: neither keeps the other from being heard. Dropping the future loses nothing.
async fn next(announcements: &mut Announcements, tables: &mut Tables) -> io::Result<Heard> {
    tokio::select! {
        heard = announcements.next() => heard.map(Heard::Routes),
        heard = tables.next() => heard.map(Heard::Tables),
    }
}

/// Announcements of tables of nftables, from when this process has one.
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
                        tracing::warn!(%error, "what others remove of NAT is there again only with a reload");
                        Tables::Unheard
                    }
                };
                Ok(None)
            }
        }
    }
}

/// What was heard, and is to be acted on.
#[derive(Default)]
struct Work {
    /// By the numbers of devices.
    losses: BTreeMap<u32, Loss>,
    /// Anything may have happened.
    is_unheard: bool,
    /// A TUN device is gone, perhaps of a process that was killed.
    is_any_gone: bool,
    next_look: Option<Instant>,
}

/// What a device lacks, and how often it did.
struct Loss {
    items: BTreeSet<Item>,
    pace: Pace,
    /// Why it lacks them yet, as was told.
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

    /// Waits until there is something to do, and time for it.
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

    /// Puts back what was lost. What may take a program, or a while, is not this thread's (but for a link that came up).
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
                // What was due went with the thread: all is looked at again.
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

    /// Remembers what somebody took that is still wanted.
    fn note(&mut self, message: &RouteNetlinkMessage) {
        let (index, item) = match message {
            RouteNetlinkMessage::NewLink(link) => return self.follow(link),
            // Others tell of bridges.
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
            // What a successor takes away is that one's.
            if device.kept().has(item) && device.may_have(item) {
                match item {
                    // The kernel takes routes with it that have it as their source, and tells nobody.
                    Item::Address(_) => self.lose(&device, device.items()),
                    item => self.lose(&device, [item]),
                }
            }
        }
    }

    /// Remembers that a table of a device is not as it was. One that is made anew at once is whole, or somebody's.
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
    /// Tells what became of it. What could not be put back is tried again, in the same growing pauses.
    fn note(&mut self, device: &Device, result: Result<bool, TunError>, left: BTreeSet<Item>) {
        let name = device.name();
        match result {
            Ok(false) => self.told = None,
            Ok(true) => {
                self.told = None;
                let pause = self.pace.begin();
                tracing::warn!(
                    device = name,
                    watching_again_in = ?pause,
                    "somebody has removed addresses, routes, rules or NAT of a device: they are there again. Where a \
                     program does so time after time (`ip monitor`, `nft monitor`), have it leave `proto 72`, and tables \
                     `hermes-...`, alone"
                );
            }
            Err(error) => {
                self.pace.begin();
                self.items.extend(left);
                let told = self.told.replace(error.to_string());
                if told != self.told {
                    tracing::warn!(
                        device = name, %error,
                        "somebody has removed addresses, routes, rules or NAT of a device, and not all of them are there \
                         again: they are tried again. {}", error.remedy()
                    );
                }
            }
        }
    }
}

/// Of a kind that is not told it may be.
fn is_tun(link: &LinkMessage) -> bool {
    let info = link.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::LinkInfo(info) => Some(info),
        _ => None,
    });
    let kind = info.and_then(|info| info.iter().find(|info| matches!(info, LinkInfo::Kind(_))));
    kind.is_none_or(|kind| *kind == LinkInfo::Kind(InfoKind::Tun))
}

/// Returns a device that may lack something, what became of it, and what could not be put back.
fn put_back(index: u32, mut items: BTreeSet<Item>) -> Option<(Device, Result<bool, TunError>, BTreeSet<Item>)> {
    // What is down gets it when it is up.
    let device = devices(|own| own == index).into_iter().find(|device| !device.kept().is_down)?;
    let result = device.restore(&mut items);
    Some((device, result, items))
}

impl Work {
    /// Somebody has taken a link up or down.
    fn follow(&mut self, link: &LinkMessage) {
        // Of an interface that is new the kernel says that all has changed.
        let mask = link.header.change_mask;
        if mask.contains(LinkFlags::Up) && mask.bits() != u32::MAX {
            let is_up = link.header.flags.contains(LinkFlags::Up);
            devices(|index| index == link.header.index).iter().for_each(|device| self.follow_link(device, is_up));
        }
    }

    /// What was not heard of links.
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

    /// The kernel drops addresses and routes with a link that goes down, and says so of few. (It is up once in a while: that
    /// this thread waits for it, and for nft, is nobody's loss.)
    fn follow_link(&mut self, device: &Device, is_up: bool) {
        let name = device.name();
        // Whoever made it has taken it up, too.
        let was_down = std::mem::replace(&mut device.kept().is_down, !is_up);
        if !is_up {
            tracing::warn!(
                device = name,
                "somebody has taken its link down: what it captures goes other ways until it is up (`ip link set NAME up`)"
            );
        } else if was_down {
            let mut items = device.items();
            match device.restore(&mut items) {
                Ok(_) => tracing::info!(device = name, "its link is up: its addresses and routes are there again"),
                Err(error) => {
                    tracing::warn!(device = name, %error, "its link is up, but not all of its routes are there again: they \
                                   are tried again. {}", error.remedy());
                    self.lose(device, items);
                }
            }
        }
    }
}
