//! What is held on somebody's behalf, and who may have how much of the room.
//!
//! In: what halves use, before and now. Out: whether more may be taken of one, and whether it is worth to ask for more.
//! Never: whose it is.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use hermes_wire::custody::{ExchangeId, Part};

use super::index::Indexed;
use super::{Exchange, Limits, PARTS, Survives};

/// A half may have so much, where that is there at all: a record, and where it stands.
const LEAST: u64 = 32 << 10;
/// Whoever was refused looks again where such a part of the room has become free.
const LEVELS: u64 = 32;
const MEMORY: usize = 0;
const DISK: usize = 1;

/// What is held on somebody's behalf.
#[derive(Debug)]
pub(super) struct Account {
    pub(super) limits: Limits,
    /// What there is of the disk, whatever it may have.
    pub(super) disk_there: u64,
    /// The disk takes nothing: nothing is kept there that is not needed, nor waits to be.
    pub(super) is_stuck: bool,
    pub(super) exchanges: usize,
    /// The exchanges of each owner: a neighbour or a user.
    owners: HashMap<Arc<str>, usize>,
    pub(super) memory: u64,
    pub(super) disk: u64,
    /// Of both, by direction, in the order of `PARTS`.
    of_part: [[u64; 2]; 2],
    /// Bytes on disk that are kept while there is room, and whose, the most first at the end.
    pub(super) spare: u64,
    /// Bytes of memory for where pieces stand on disk.
    pub(super) places: u64,
    pub(super) spares: BTreeSet<(u64, ExchangeId, Part)>,
    /// What was used most of it since whoever was refused looked last.
    peak: Used,
    /// Who was refused is to be told of room.
    pub(super) has_refused: bool,
    /// Halves whose neighbour was refused.
    pub(super) lacking: BTreeSet<ExchangeId>,
}

impl Default for Account {
    fn default() -> Self {
        let limits = Limits { exchanges: 0, memory: 0, disk: 0, survives: Survives::Nothing };
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
    /// What it holds is written.
    pub(super) fn is_on_disk(&self) -> bool {
        self.limits.survives != Survives::Nothing
    }

    /// Bytes that it may have on disk.
    pub(super) fn disk_limit(&self) -> u64 {
        self.limits.disk.min(self.disk_there)
    }

    /// True if an owner may have one more exchange. An owner may have as many as remain free: one that takes all that
    /// it may leaves half, two of them leave a quarter, and so on.
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

    /// So many bytes more of anybody.
    pub(super) fn takes_at_all(&self, bytes: usize) -> bool {
        let fits = |kept: u64, limit: u64| kept + bytes as u64 <= limit;
        fits(self.memory, self.limits.memory) && (!self.is_on_disk() || fits(self.disk, self.disk_limit()))
    }

    /// So many bytes more of a half that uses so much. A direction may have three quarters, so that neither waits for the
    /// other, and with what is small seven eighths; a half as much as is left of that, so that one that does not move
    /// leaves half of it to others, two of them a quarter, and so on.
    pub(super) fn takes(&self, bytes: usize, part: Part, used: &Indexed) -> bool {
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

    /// With some to spare, or who is told to send again would be refused again. `now`: what the half uses, of which
    /// `counted` is counted here.
    pub(super) fn has_room(&self, part: Part, counted: &Indexed, now: &Indexed) -> bool {
        let has = |tier: usize, kept: u64, of_half: u64, limit: u64, change: [u64; 2]| {
            let changed = |sum: u64| sum + change[1] - change[0];
            let free = limit.saturating_sub(changed(kept));
            let is_small = of_half <= LEAST / 2;
            let of_part = changed(self.of_part[part.index()][tier]);
            let left = of_direction(limit, is_small).saturating_sub(of_part).min(free);
            // However little there is in all: a record has to fit, or it would be sent and refused again and again.
            let spare = if is_small { LEAST / 2 } else { (limit / 16).min(left / 4).max(1) };
            spare <= left && (is_small || of_half + spare <= left - spare)
        };
        let (memory, disk) = ([counted.memory, now.memory], [counted.disk, now.disk]);
        has(MEMORY, self.memory, now.memory, self.limits.memory, memory)
            && (!self.is_on_disk() || has(DISK, self.disk, now.disk, self.disk_limit(), disk))
    }

    /// Somebody waits for room.
    fn is_waited_for(&self) -> bool {
        self.has_refused || !self.lacking.is_empty()
    }

    fn used(&self) -> Used {
        let of_part = |tier: usize| [self.of_part[0][tier], self.of_part[1][tier]];
        let [[a, b], [c, d]] = [of_part(MEMORY), of_part(DISK)];
        [[self.memory, a, b], [self.disk, c, d]]
    }

    /// So much has become free that who waits for room had better look again, or anything at all. Who was refused may wait
    /// for the whole of it, or for one direction's part.
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

    /// What can be on disk alone had better be: before a half has all the memory that it may.
    pub(super) fn is_tight(&self) -> bool {
        self.is_on_disk() && self.memory > self.limits.memory / 4
    }

    pub(super) fn count(&mut self, part: Part, before: &Indexed, now: &Indexed) {
        self.memory = self.memory + now.memory - before.memory;
        self.disk = self.disk + now.disk - before.disk;
        self.places = self.places + now.places - before.places;
        let of_part = &mut self.of_part[part.index()];
        of_part[MEMORY] = of_part[MEMORY] + now.memory - before.memory;
        of_part[DISK] = of_part[DISK] + now.disk - before.disk;
    }
}

/// Bytes of memory and of disk: in all, and of each direction.
type Used = [[u64; 3]; 2];

/// So much of the room is one direction's; with what is small, which shall not wait for what is not.
fn of_direction(limit: u64, is_small: bool) -> u64 {
    if is_small { limit - limit / 8 } else { limit / 4 * 3 }
}

/// An exchange is another account's now.
pub(super) fn move_account(accounts: &mut HashMap<Arc<str>, Account>, exchange: &Exchange, before: &Arc<str>) {
    let none = Indexed::default();
    if let Some(old) = accounts.get_mut(before) {
        old.remove_exchange(&exchange.owner);
        PARTS.into_iter().for_each(|part| old.count(part, &exchange.indexed[part.index()], &none));
    }
    // Nothing was read of what goes nowhere yet, and so nothing is to spare.
    let new = accounts.entry(exchange.account.clone()).or_default();
    new.add_exchange(&exchange.owner);
    PARTS.into_iter().for_each(|part| new.count(part, &none, &exchange.indexed[part.index()]));
}
