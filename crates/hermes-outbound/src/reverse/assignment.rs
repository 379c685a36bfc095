//! The assignment of a node's reverse connections to workers.
//!
//! In: the numbers of connections that open and close. Out: the worker that needs a new connection most. If the last
//! connection of a worker closes while another worker has several, also the connection that should be replaced by one
//! on the former worker. Never: a connection itself.

/// The assignment of connection numbers to workers.
#[derive(Default)]
pub(super) struct WorkerAssignment {
    /// The number of the last connection.
    last: u64,
    /// The numbers of the connections of each worker, the oldest first.
    held: Vec<Vec<u64>>,
}

impl WorkerAssignment {
    pub(super) fn numbering_from(last: u64) -> Self {
        Self { last, ..Self::default() }
    }

    /// Assigns a new connection to a worker without one, or otherwise to the worker whose newest connection is the
    /// oldest. If several workers qualify equally, worker `here` is preferred. Returns the worker and the connection's
    /// number.
    pub(super) fn assign(&mut self, here: usize, workers: usize) -> (usize, u64) {
        self.held.resize_with(workers, Vec::new);
        self.last += 1;
        let newest = |held: &[u64]| held.last().copied().unwrap_or_default();
        let poorest = self.held.iter().enumerate().min_by_key(|(worker, held)| (newest(held), *worker != here));
        let worker = poorest.map_or(here, |(worker, _)| worker);
        if let Some(held) = self.held.get_mut(worker) {
            held.push(self.last);
        }
        (worker, self.last)
    }

    /// Releases a connection that has closed or accepts no further request. If its worker then has none, returns the
    /// oldest connection of a worker that has several, and releases it too. That connection should be replaced: the
    /// replacement is then assigned to the worker without one.
    pub(super) fn release(&mut self, worker: usize, number: u64) -> Option<u64> {
        let held = self.held.get_mut(worker)?;
        let before = held.len();
        held.retain(|other| *other != number);
        if held.len() == before || !held.is_empty() {
            return None;
        }
        let surplus = self.held.iter_mut().filter(|held| held.len() > 1).min_by_key(|held| held[0])?;
        Some(surplus.remove(0))
    }

    /// Returns the number of the worker to which the newest assigned connection belongs, or `None` if none is assigned.
    pub(super) fn latest(&self) -> Option<usize> {
        let newest = self.held.iter().enumerate().filter_map(|(worker, held)| Some((*held.last()?, worker)));
        newest.max().map(|(_, worker)| worker)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_worker_gets_a_connection_before_one_gets_a_second() {
        let mut dealt = WorkerAssignment::default();
        assert_eq!(dealt.assign(2, 4), (2, 1), "who accepted it keeps it");
        assert_eq!(dealt.assign(2, 4), (0, 2));
        assert_eq!(dealt.assign(3, 4), (3, 3));
        assert_eq!(dealt.assign(2, 4), (1, 4));
        assert_eq!(dealt.assign(0, 4), (2, 5), "the oldest is the likeliest to be dead");
    }

    #[test]
    fn a_worker_whose_connection_is_gone_is_the_next() {
        let mut dealt = WorkerAssignment::default();
        (0..4).for_each(|_| _ = dealt.assign(0, 2));
        assert_eq!(dealt.latest(), Some(1));
        assert_eq!(dealt.release(1, 2), None);
        assert_eq!(dealt.assign(0, 2), (0, 5), "the newest of worker 1 is still there");
        assert_eq!(dealt.latest(), Some(0));
    }

    /// A connection that is dialled again may be assigned to another worker, so that its previous worker has none.
    #[test]
    fn a_worker_that_is_left_with_none_gets_one_of_another_that_has_several() {
        let mut dealt = WorkerAssignment::default();
        assert_eq!([dealt.assign(0, 2), dealt.assign(0, 2)], [(0, 1), (1, 2)]);
        assert_eq!(dealt.assign(0, 2), (0, 3));
        assert_eq!(dealt.release(0, 1), None);
        assert_eq!(dealt.assign(0, 2), (1, 4));
        assert_eq!(dealt.release(0, 3), Some(2), "the oldest of the two");
        assert_eq!(dealt.release(0, 3), None, "once");
        assert_eq!(dealt.assign(1, 2), (0, 5), "its successor");
        assert_eq!(dealt.release(1, 2), None, "it had gone over");
        assert_eq!(dealt.release(1, 4), None, "nobody has one to spare");
        assert_eq!(dealt.assign(0, 2), (1, 6));
    }
}
