//! Shares of what one worker has for all: so much a second, so many at a time for each client.
//!
//! In: somebody wants one more. Out: whether that is within bounds. Never: a wait.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::net::IpAddr;
use std::rc::Rc;

/// So much in each second.
#[derive(Default)]
pub(crate) struct Budget {
    second: Cell<u64>,
    spent: Cell<u32>,
}

impl Budget {
    /// One more, at this time in milliseconds, of `most` in a second.
    pub(crate) fn takes(&self, now: u64, most: u32) -> bool {
        let second = now / 1000;
        if self.second.replace(second) != second {
            self.spent.set(0);
        }
        let is_left = self.spent.get() < most;
        if is_left {
            self.spent.set(self.spent.get() + 1);
        }
        is_left
    }
}

/// How many things of each client are under way.
#[derive(Clone, Default)]
pub(crate) struct Shares(Rc<RefCell<HashMap<IpAddr, usize>>>);

/// One of them. Over when it is dropped.
pub(crate) struct Share {
    all: Shares,
    client: IpAddr,
}

impl Shares {
    /// One more of this client; `None` where it has `most` of them.
    pub(crate) fn take(&self, client: IpAddr, most: usize) -> Option<Share> {
        let mut all = self.0.borrow_mut();
        let taken = all.entry(client).or_default();
        if *taken >= most {
            return None;
        }
        *taken += 1;
        Some(Share { all: self.clone(), client })
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut all = self.all.0.borrow_mut();
        let Some(taken) = all.get_mut(&self.client) else { return };
        *taken -= 1;
        if *taken == 0 {
            all.remove(&self.client);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_second_has_so_much_and_the_next_as_much_again() {
        let budget = Budget::default();
        let takes = |now| (0..5).filter(|_| budget.takes(now, 3)).count();
        assert_eq!([takes(0), takes(999), takes(1000), takes(5000)], [3, 0, 3, 3]);
    }

    #[test]
    fn each_client_has_its_own_share_and_nothing_is_left_of_it() {
        let shares = Shares::default();
        let [one, other] = ["192.0.2.1", "192.0.2.2"].map(|text| text.parse().unwrap());
        let taken: Vec<_> = (0..5).filter_map(|_| shares.take(one, 2)).collect();
        assert_eq!(taken.len(), 2);
        assert!(shares.take(other, 2).is_some() && shares.take(one, 2).is_none());
        drop(taken);
        assert!(shares.0.borrow().is_empty());
        assert!(shares.take(one, 2).is_some());
    }
}
