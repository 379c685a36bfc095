//! Sets of byte ranges.

/// A range: the first byte, and the one after the last.
pub(super) type Range = (u64, u64);

/// The parts of `range` that none of `others` covers. `others` are in their order and do not overlap.
pub(super) fn without(range: Range, others: impl IntoIterator<Item = Range>) -> Vec<Range> {
    let (mut from, to) = range;
    let mut rest = Vec::new();
    for (begin, end) in others {
        if end <= from {
            continue;
        }
        if begin >= to {
            break;
        }
        if begin > from {
            rest.push((from, begin));
        }
        from = from.max(end);
    }
    if from < to {
        rest.push((from, to));
    }
    rest
}

#[cfg(test)]
mod tests {
    use super::without;

    #[test]
    fn what_others_cover_is_left_out() {
        assert_eq!(without((2, 10), []), [(2, 10)]);
        assert_eq!(without((2, 10), [(0, 2), (10, 12)]), [(2, 10)]);
        assert_eq!(without((2, 10), [(0, 3), (5, 6), (9, 20)]), [(3, 5), (6, 9)]);
        assert_eq!(without((2, 10), [(0, 20)]), []);
    }
}
