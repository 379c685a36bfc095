//! Whose prefixes of a device are in the process before us, as long as that lives.
//!
//! In: the word of that process. Out: claims that only their owners may make; the same word for the process after us.
//! Never: a prefix that rests already: those are the node's, and handed over with it (`given`).

use std::sync::PoisonError;

use ipnet::IpNet;

use super::{Device, Owner};

impl Device {
    /// Whose each prefix is, for another process: a line each.
    pub(crate) fn owners(&self) -> String {
        let claims = self.claims.read().unwrap_or_else(PoisonError::into_inner);
        let ours = claims.iter().filter_map(|(prefix, claims)| Some((*prefix, &claims.sessions.first()?.owner)));
        let reserved = self.reserved.read().unwrap_or_else(PoisonError::into_inner);
        let before = reserved.iter().map(|(prefix, owner)| (*prefix, owner));
        ours.chain(before).map(|(prefix, owner)| format!("{prefix} {owner}\n")).collect()
    }

    /// Takes the word of the process before us for whose each prefix is.
    pub(crate) fn reserve(&self, owners: &str) {
        let read = |line: &str| {
            let (prefix, owner) = line.split_once(' ')?;
            Some((prefix.parse().ok()?, Owner::parse(owner)?))
        };
        let mut reserved = self.reserved.write().unwrap_or_else(PoisonError::into_inner);
        for (prefix, owner) in owners.lines().filter_map(read) {
            // As if a session of ours had it, so that it is nobody's on another device either.
            let is_given = !matches!(owner, Owner::Listener(_));
            if !reserved.contains_key(&prefix) && (!is_given || self.given.take(prefix, &owner)) {
                reserved.insert(prefix, owner);
            }
        }
    }

    /// The process before us is gone, and its sessions with it. Those that are not here now may come again; routes to
    /// them go.
    pub(super) fn release_reserved(&self) {
        let reserved = std::mem::take(&mut *self.reserved.write().unwrap_or_else(PoisonError::into_inner));
        // Whoever claims one of them waits until it is gone, and then leads it here anew.
        let _led = self.led();
        let claims = self.claims.read().unwrap_or_else(PoisonError::into_inner);
        let is_held = |prefix| claims.get(prefix).is_some_and(|claims| !claims.sessions.is_empty());
        for prefix in reserved.keys().filter(|prefix| self.net.is_ours() && !is_held(**prefix)) {
            let _ = self.net.remove_route(*prefix);
        }
        drop(claims);
        for (prefix, _) in reserved.into_iter().filter(|(_, owner)| !matches!(owner, Owner::Listener(_))) {
            self.given.breaks(prefix);
            self.given.give_back(prefix);
        }
    }

    pub(super) fn is_reserved(&self, prefix: IpNet, owner: Option<&Owner>) -> bool {
        let reserved = self.reserved.read().unwrap_or_else(PoisonError::into_inner);
        let overlap = |other: &IpNet| other.contains(&prefix) || prefix.contains(other);
        reserved.iter().any(|(other, holder)| Some(holder) != owner && overlap(other))
    }
}
