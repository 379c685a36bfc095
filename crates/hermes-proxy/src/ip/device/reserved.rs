//! Prefixes of a device whose owners are in the predecessor process, while it lives.
//!
//! In: the predecessor's list. Out: claims that only those owners may make; the same list for the successor. Never: a
//! prefix without a session; such leases belong to the node, and are handed over with it (`given`).

use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use ipnet::IpNet;

use super::{Device, Owner};

impl Device {
    /// The owners of client prefixes, for the successor: one line each. Once the successor owns the device, no more are
    /// added.
    pub(crate) fn owners(&self) -> String {
        let claims = self.claims.read().unwrap_or_else(PoisonError::into_inner);
        let ours = claims.iter().filter_map(|(prefix, claims)| Some((prefix, &claims.sessions.first()?.owner)));
        let given = ours.filter(|(_, owner)| owner.is_client());
        let reserved = self.reserved.read().unwrap_or_else(PoisonError::into_inner);
        given.chain(reserved.iter()).map(|(prefix, owner)| format!("{prefix} {owner}\n")).collect()
    }

    /// Reserves the prefixes in the predecessor's list.
    pub(crate) fn reserve(&self, owners: &str) {
        let mut reserved = self.reserved.write().unwrap_or_else(PoisonError::into_inner);
        for line in owners.lines() {
            let Some((prefix, owner)) = line.split_once(' ') else { continue };
            let (Ok(prefix), Some(owner)) = (prefix.parse(), Owner::parse(owner)) else { continue };
            // The lease is also recorded, so that no other device assigns the prefix.
            if reserved.get(prefix).is_none() && self.given.take(prefix, &owner) {
                reserved.insert(prefix, owner);
            }
        }
    }

    /// The substitute addresses, for the successor: one line each.
    pub(crate) fn wishes(&self) -> String {
        let claims = self.claims.read().unwrap_or_else(PoisonError::into_inner);
        let ours = claims.iter().filter_map(|(prefix, claims)| Some((*prefix, &claims.sessions.first()?.owner)));
        let line = |(prefix, owner): (IpNet, &Owner)| {
            let (wanted, asked) = self.given.wish(prefix)?;
            let asked = asked.map_or_else(|| "-".to_owned(), |asked| asked.to_string());
            Some(format!("{prefix} {wanted} {asked} {owner}\n"))
        };
        ours.filter_map(line).collect()
    }

    /// Stores the predecessor's substitute addresses, for clients that return.
    pub(crate) fn keep_wishes(&self, wishes: &str) {
        for line in wishes.lines() {
            let mut words = line.splitn(4, ' ');
            let mut next = || words.next();
            let (Some(prefix), Some(wanted), Some(asked), Some(owner)) = (next(), next(), next(), next()) else {
                continue;
            };
            let owner = Owner::parse(owner);
            if let (Ok(prefix), Ok(wanted), Some(owner)) = (prefix.parse(), wanted.parse(), owner) {
                self.given.keep_instead(prefix, &owner, (wanted, asked.parse().ok()));
            }
        }
    }

    /// Counts a worker that waits for the end of the predecessor.
    pub(super) fn awaits(&self) {
        self.waiting.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a worker that has seen the end. The last one sweeps, because only then have all workers of the
    /// predecessor exited, and one of them may have kept a route for a session. One sweep is enough.
    pub(super) fn outlived(&self) {
        if self.waiting.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.release_reserved();
        }
    }

    /// Releases the prefixes of a predecessor that has exited with its sessions. Clients that have not moved here may
    /// return; routes to them are removed.
    fn release_reserved(&self) {
        let reserved = std::mem::take(&mut *self.reserved.write().unwrap_or_else(PoisonError::into_inner));
        // A concurrent claim waits for the lock, and then adds its route again.
        let mut led = self.led();
        let claims = self.claims.read().unwrap_or_else(PoisonError::into_inner);
        let is_held = |prefix| claims.get(prefix).is_some_and(|claims| !claims.sessions.is_empty());
        for (prefix, _) in reserved.iter().filter(|(prefix, _)| self.net.is_ours() && !is_held(**prefix)) {
            led.remove(prefix);
            let _ = self.net.remove_route(*prefix);
        }
        drop(claims);
        // The predecessor reported no other routes of its sessions, so a sweep removes them.
        let swept = if self.net.is_ours() { self.net.sweep() } else { Ok(()) };
        if let Err(error) = swept {
            tracing::warn!(%error, "{}", error.remedy());
        }
        drop(led);
        for (prefix, _) in reserved.iter() {
            self.given.breaks(*prefix);
            self.given.give_back(*prefix);
        }
    }

    pub(super) fn is_reserved(&self, prefix: IpNet, owner: Option<&Owner>) -> bool {
        let reserved = self.reserved.read().unwrap_or_else(PoisonError::into_inner);
        reserved.overlapping(prefix).any(|holder| Some(holder) != owner)
    }
}
