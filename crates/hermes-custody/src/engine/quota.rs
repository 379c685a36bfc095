//! Storage quota of an account, and its fair distribution.
//!
//! In: the usage of each direction, before and now. Out: whether more bytes of a direction are accepted, and whether to
//! request more. Never: the owner of the account.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use hermes_wire::custody::{Direction, ExchangeId};

use super::index::Indexed;
use super::{Durability, Exchange, Limits, PARTS};

/// Guaranteed share of one direction of an exchange, in bytes, if the account has room at all: one record and its index
/// entry.
const LEAST: u64 = 32 << 10;
/// The limit divided by this number must become free before a refused caller retries.
const LEVELS: u64 = 32;
const MEMORY: usize = 0;
const DISK: usize = 1;

/// Usage and limits of one account.
#[derive(Debug)]
pub(super) struct Account {
    pub(super) limits: Limits,
    /// Available disk space in bytes, whatever the account's own limit is.
    pub(super) disk_there: u64,
    /// Whether the disk is full. Then bytes that are not needed are not stored, and nothing waits to be stored.
    pub(super) is_stuck: bool,
    pub(super) exchanges: usize,
    /// Number of exchanges by owner: a neighbour or a user.
    owners: HashMap<Arc<str>, usize>,
    pub(super) memory: u64,
    pub(super) disk: u64,
    /// Usage of memory and of disk by direction, in the order of `PARTS`.
    of_part: [[u64; 2]; 2],
    /// Bytes on disk that are kept only while there is room. The set `spares` lists them by size, the largest last.
    pub(super) spare: u64,
    /// Bytes of memory for the positions of written chunks.
    pub(super) places: u64,
    pub(super) spares: BTreeSet<(u64, ExchangeId, Direction)>,
    /// Maximum usage since refused callers last retried.
    peak: Used,
    /// Whether a refused caller waits for room.
    pub(super) has_refused: bool,
    /// Exchanges for which data of a neighbour was refused.
    pub(super) lacking: BTreeSet<ExchangeId>,
}

impl Default for Account {
    fn default() -> Self {
        let limits = Limits { exchanges: 0, memory: 0, disk: 0, survives: Durability::Nothing };
        Self {
            limits,
            disk_there: u64::MAX,
            is_stuck: false,
            exchanges: 0,
            owners: HashMap::new(),
            memory: 0,
            disk: 0,
            of_part: [[0; 2]; 2],
            spare: 0,
            places: 0,
            spares: BTreeSet::new(),
            peak: Used::default(),
            has_refused: false,
            lacking: BTreeSet::new(),
        }
    }
}

impl Account {
    /// Whether the account stores its bytes on disk.
    pub(super) fn is_on_disk(&self) -> bool {
        self.limits.survives != Durability::Nothing
    }

    /// Bytes that the account may store on disk.
    pub(super) fn disk_limit(&self) -> u64 {
        self.limits.disk.min(self.disk_there)
    }

    /// Whether an owner may have one more exchange. An owner may have as many as remain free: a single owner can take
    /// half of the slots, and leaves the other half; a second one leaves a quarter, and so on.
    pub(super) fn takes_exchange(&self, owner: &str) -> bool {
        let free = self.limits.exchanges.saturating_sub(self.exchanges);
        free > 0 && self.owners.get(owner).copied().unwrap_or_default() <= free
    }

    pub(super) fn add_exchange(&mut self, owner: &Arc<str>) {
        self.exchanges += 1;
        *self.owners.entry(owner.clone()).or_default() += 1;
    }

    pub(super) fn remove_exchange(&mut self, owner: &str) {
        self.exchanges -= 1;
        if let Some(exchanges) = self.owners.get_mut(owner) {
            *exchanges -= 1;
            if *exchanges == 0 {
                self.owners.remove(owner);
            }
        }
    }

    /// Whether the account has room for these bytes, regardless of fairness.
    pub(super) fn takes_at_all(&self, bytes: usize) -> bool {
        let fits = |kept: u64, limit: u64| kept + bytes as u64 <= limit;
        fits(self.memory, self.limits.memory) && (!self.is_on_disk() || fits(self.disk, self.disk_limit()))
    }

    /// Whether the account accepts more bytes of a direction with this usage.
    ///
    /// A direction may use three quarters of the limit, so that requests and responses do not block each other; small
    /// streams may use seven eighths. One stream may use as much as remains free of that: a stalled stream leaves half
    /// of it to others, two leave a quarter, and so on.
    pub(super) fn takes(&self, bytes: usize, part: Direction, used: &Indexed) -> bool {
        let fits = |tier: usize, kept: u64, of_half: u64, limit: u64| {
            let (bytes, free) = (bytes as u64, limit.saturating_sub(kept));
            let of_part = self.of_part[part.index()][tier] + bytes;
            let is_small = of_half + bytes <= LEAST;
            let left = of_direction(limit, is_small).saturating_sub(of_part).min(free - bytes.min(free));
            bytes <= free && of_part <= of_direction(limit, is_small) && (is_small || of_half <= left)
        };
        fits(MEMORY, self.memory, used.memory, self.limits.memory)
            && (!self.is_on_disk() || fits(DISK, self.disk, used.disk, self.disk_limit()))
    }

    /// Whether to request refused data from a neighbour again. The margin is larger than in [`Account::takes`], so that
    /// the data is not refused a second time. `now` is the usage of the direction; `counted` is the part of it that
    /// this account includes already.
    pub(super) fn has_room(&self, part: Direction, counted: &Indexed, now: &Indexed) -> bool {
        let has = |tier: usize, kept: u64, of_half: u64, limit: u64, change: [u64; 2]| {
            let changed = |sum: u64| sum + change[1] - change[0];
            let free = limit.saturating_sub(changed(kept));
            let is_small = of_half <= LEAST / 2;
            let of_part = changed(self.of_part[part.index()][tier]);
            let left = of_direction(limit, is_small).saturating_sub(of_part).min(free);
            // The margin fits one record even in a tiny account, or the record would be sent and refused forever.
            let spare = if is_small { LEAST / 2 } else { (limit / 16).min(left / 4).max(1) };
            spare <= left && (is_small || of_half + spare <= left - spare)
        };
        let (memory, disk) = ([counted.memory, now.memory], [counted.disk, now.disk]);
        has(MEMORY, self.memory, now.memory, self.limits.memory, memory)
            && (!self.is_on_disk() || has(DISK, self.disk, now.disk, self.disk_limit(), disk))
    }

    /// Whether a caller or a neighbour waits for room.
    fn is_waited_for(&self) -> bool {
        self.has_refused || !self.lacking.is_empty()
    }

    fn used(&self) -> Used {
        let of_part = |tier: usize| [self.of_part[0][tier], self.of_part[1][tier]];
        let [[a, b], [c, d]] = [of_part(MEMORY), of_part(DISK)];
        [[self.memory, a, b], [self.disk, c, d]]
    }

    /// Whether enough room has become free for a retry, or any room if `at_all` is set. A refused caller may wait for
    /// the total or for the share of one direction.
    pub(super) fn is_freed(&mut self, at_all: bool) -> bool {
        let used = self.used();
        if !self.is_waited_for() {
            self.peak = used;
            return false;
        }
        let mut is_freed = false;
        for (tier, limit) in [(MEMORY, self.limits.memory), (DISK, self.disk_limit())] {
            let least = if at_all { 1 } else { (limit / LEVELS).max(1) };
            for (peak, used) in self.peak[tier].iter_mut().zip(used[tier]) {
                *peak = (*peak).max(used);
                is_freed |= *peak - used >= least;
            }
        }
        if is_freed {
            self.peak = used;
        }
        is_freed
    }

    /// Whether to move durable bytes out of memory. The threshold is below what one stream may use of memory.
    pub(super) fn is_tight(&self) -> bool {
        self.is_on_disk() && self.memory > self.limits.memory / 4
    }

    pub(super) fn count(&mut self, part: Direction, before: &Indexed, now: &Indexed) {
        self.memory = self.memory + now.memory - before.memory;
        self.disk = self.disk + now.disk - before.disk;
        self.places = self.places + now.places - before.places;
        let of_part = &mut self.of_part[part.index()];
        of_part[MEMORY] = of_part[MEMORY] + now.memory - before.memory;
        of_part[DISK] = of_part[DISK] + now.disk - before.disk;
    }
}

/// Bytes of memory and of disk: the total, and each direction.
type Used = [[u64; 3]; 2];

/// Returns the share of one direction. Small streams get more, so that they do not wait for large ones.
fn of_direction(limit: u64, is_small: bool) -> u64 {
    if is_small { limit - limit / 8 } else { limit / 4 * 3 }
}

/// Moves an exchange to another account.
pub(super) fn move_account(accounts: &mut HashMap<Arc<str>, Account>, exchange: &Exchange, before: &Arc<str>) {
    let none = Indexed::default();
    if let Some(old) = accounts.get_mut(before) {
        old.remove_exchange(&exchange.owner);
        PARTS.into_iter().for_each(|part| old.count(part, &exchange.indexed[part.index()], &none));
    }
    // An unassigned exchange has no spare bytes, because nothing was read of it.
    let new = accounts.entry(exchange.account.clone()).or_default();
    new.add_exchange(&exchange.owner);
    PARTS.into_iter().for_each(|part| new.count(part, &none, &exchange.indexed[part.index()]));
}
