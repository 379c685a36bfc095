//! A set of sequence numbers as sorted, disjoint ranges.
//!
//! In: ranges. Out: the parts of a range that are new, and the ranges themselves. Never: a bound of its own; callers
//! check [`RangeSet::len`] first.

use std::collections::VecDeque;
use std::ops::Range;

/// A set of numbers.
#[derive(Debug, Default)]
pub(crate) struct RangeSet {
    /// Sorted; two ranges neither overlap nor touch.
    ranges: VecDeque<Range<u64>>,
}

impl RangeSet {
    /// Returns the number of ranges.
    pub(crate) fn len(&self) -> usize {
        self.ranges.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = &Range<u64>> {
        self.ranges.iter()
    }

    /// Whether inserting this range adds no further range to the set.
    pub(crate) fn joins(&self, range: &Range<u64>) -> bool {
        let at = self.ranges.partition_point(|one| one.end < range.start);
        self.ranges.get(at).is_some_and(|one| one.start <= range.end)
    }

    /// Whether the set contains at least one number of the range.
    pub(crate) fn intersects(&self, range: &Range<u64>) -> bool {
        let at = self.ranges.partition_point(|one| one.end <= range.start);
        !range.is_empty() && self.ranges.get(at).is_some_and(|one| one.start < range.end)
    }

    /// Inserts a range and passes each part that was missing to `added`, in order.
    pub(crate) fn insert(&mut self, range: Range<u64>, mut added: impl FnMut(Range<u64>)) {
        if range.is_empty() {
            return;
        }
        let first = self.ranges.partition_point(|one| one.end < range.start);
        let mut merged = range.clone();
        let mut missing = range.start;
        let mut last = first;
        while let Some(one) = self.ranges.get(last).filter(|one| one.start <= range.end) {
            if missing < one.start {
                added(missing..one.start);
            }
            missing = missing.max(one.end);
            merged = merged.start.min(one.start)..merged.end.max(one.end);
            last += 1;
        }
        if missing < range.end {
            added(missing..range.end);
        }
        if let (true, Some(one)) = (last == first + 1, self.ranges.get_mut(first)) {
            *one = merged;
        } else if first == last {
            self.ranges.insert(first, merged);
        } else {
            self.ranges.drain(first + 1..last);
            if let Some(one) = self.ranges.get_mut(first) {
                *one = merged;
            }
        }
    }

    /// Removes all numbers below `end`.
    pub(crate) fn remove_below(&mut self, end: u64) {
        while let Some(first) = self.ranges.front_mut().filter(|first| first.start < end) {
            if first.end > end {
                first.start = end;
                return;
            }
            self.ranges.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn behaves_like_a_set(steps in proptest::collection::vec((0u64..60, 0u64..12, any::<bool>()), 0..40)) {
            let (mut set, mut model) = (RangeSet::default(), BTreeSet::new());
            for (start, length, is_removal) in steps {
                let range = start..start + length;
                if is_removal {
                    set.remove_below(start);
                    model.retain(|number| *number >= start);
                    continue;
                }
                prop_assert_eq!(set.intersects(&range), range.clone().any(|number| model.contains(&number)));
                let before = set.len();
                let joins = set.joins(&range);
                let mut added = Vec::new();
                set.insert(range.clone(), |part| added.extend(part));
                let expected: Vec<u64> = range.filter(|number| model.insert(*number)).collect();
                prop_assert_eq!(added, expected);
                if length > 0 {
                    prop_assert_eq!(joins, set.len() <= before);
                }
                let all: Vec<u64> = set.iter().cloned().flatten().collect();
                prop_assert_eq!(all, model.iter().copied().collect::<Vec<_>>());
            }
        }
    }
}
