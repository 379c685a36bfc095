//! Whose prefixes of a device are in the process before us, as long as that lives.
//!
//! In: the word of that process. Out: claims that only their owners may make; the same word for the process after us.
//! Never: a prefix that rests already: those are the node's, and handed over with it (`given`).

use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use ipnet::IpNet;

use super::{Device, Owner};

impl Device {
    /// Whose each prefix is that clients were given, for another process: a line each. Once the device is another's no
    /// more of them are.
    pub(crate) fn owners(&self) -> String {
        let claims = self.claims.read().unwrap_or_else(PoisonError::into_inner);
        let ours = claims.iter().filter_map(|(prefix, claims)| Some((prefix, &claims.sessions.first()?.owner)));
        let given = ours.filter(|(_, owner)| owner.is_client());
        let reserved = self.reserved.read().unwrap_or_else(PoisonError::into_inner);
        given.chain(reserved.iter()).map(|(prefix, owner)| format!("{prefix} {owner}\n")).collect()
    }

    /// Takes the word of the process before us for whose each prefix is.
    pub(crate) fn reserve(&self, owners: &str) {
        let mut reserved = self.reserved.write().unwrap_or_else(PoisonError::into_inner);
        for line in owners.lines() {
            let Some((prefix, owner)) = line.split_once(' ') else { continue };
            let (Ok(prefix), Some(owner)) = (prefix.parse(), Owner::parse(owner)) else { continue };
            // As if a session of ours had it, so that it is nobody's on another device either.
            if reserved.get(prefix).is_none() && self.given.take(prefix, &owner) {
                reserved.insert(prefix, owner);
            }
        }
    }

    /// What was given in the place of something else, for another process: a line each.
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

    /// Takes the word of the process before us for that. Whoever comes again finds it here.
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

    /// One more worker waits for the end of the process before us.
    pub(super) fn awaits(&self) {
        self.waiting.fetch_add(1, Ordering::Relaxed);
    }

    /// That worker has seen it. With the last one all its workers are gone: an earlier one may have had a session that
    /// led something here yet. Nor does it take more than one of ours to sweep.
    pub(super) fn outlived(&self) {
        if self.waiting.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.release_reserved();
        }
    }

    /// The process before us is gone, and its sessions with it. Those that are not here now may come again; routes to
    /// them go.
    fn release_reserved(&self) {
        let reserved = std::mem::take(&mut *self.reserved.write().unwrap_or_else(PoisonError::into_inner));
        // Whoever claims one of them waits until it is gone, and then leads it here anew.
        let mut led = self.led();
        let claims = self.claims.read().unwrap_or_else(PoisonError::into_inner);
        let is_held = |prefix| claims.get(prefix).is_some_and(|claims| !claims.sessions.is_empty());
        for (prefix, _) in reserved.iter().filter(|(prefix, _)| self.net.is_ours() && !is_held(**prefix)) {
            led.remove(prefix);
            let _ = self.net.remove_route(*prefix);
        }
        drop(claims);
        // Of all else that its sessions led here nobody told us.
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
