//! Bytes that can be verified without being stored: a stream whose every position follows from a seed.
//!
//! In: a seed and an offset. Out: the bytes there, or the first position at which given bytes differ. Both ends of a
//! transfer generate the same stream, so a missing, duplicated or moved byte is detected at once. The stream is not
//! cryptographically secure.

/// A reproducible stream of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pattern {
    seed: u64,
}

/// Running 64-bit FNV-1a digest, for streams whose content the receiver cannot know beforehand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Digest(u64);

const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
const FNV_PRIME: u64 = 0x0000_0100_0000_01b3;

impl Pattern {
    /// The stream of this seed.
    pub const fn new(seed: u64) -> Self {
        Self { seed }
    }

    /// Fills `out` with the bytes that start at `offset`.
    pub fn fill(self, offset: u64, out: &mut [u8]) {
        let mut at = offset;
        let mut rest = out;
        while !rest.is_empty() {
            let word = self.word(at / 8).to_le_bytes();
            let skip = (at % 8) as usize;
            let take = (8 - skip).min(rest.len());
            let (head, tail) = rest.split_at_mut(take);
            head.copy_from_slice(&word[skip..skip + take]);
            at += take as u64;
            rest = tail;
        }
    }

    /// `length` bytes from the beginning.
    pub fn bytes(self, length: usize) -> Vec<u8> {
        let mut out = vec![0; length];
        self.fill(0, &mut out);
        out
    }

    /// The position at which `data`, which should begin at `offset`, first differs from the stream; `None` if it does not.
    pub fn mismatch(self, offset: u64, data: &[u8]) -> Option<u64> {
        let mut expected = [0; 4096];
        let mut at = offset;
        for chunk in data.chunks(expected.len()) {
            let expected = &mut expected[..chunk.len()];
            self.fill(at, expected);
            if let Some(i) = chunk.iter().zip(expected.iter()).position(|(a, b)| a != b) {
                return Some(at + i as u64);
            }
            at += chunk.len() as u64;
        }
        None
    }

    /// splitmix64 of the word's index: random access, and no two words alike for 2^64 of them.
    fn word(self, index: u64) -> u64 {
        let mut z = self.seed.wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

impl Default for Digest {
    fn default() -> Self {
        Self(FNV_OFFSET)
    }
}

impl Digest {
    /// Takes in further bytes.
    pub fn update(&mut self, data: &[u8]) {
        self.0 = data.iter().fold(self.0, |h, b| (h ^ u64::from(*b)).wrapping_mul(FNV_PRIME));
    }

    /// The digest so far, as 16 hexadecimal digits.
    pub fn hex(self) -> String {
        format!("{:016x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_cut_of_the_stream_is_the_same_stream() {
        let pattern = Pattern::new(7);
        let whole = pattern.bytes(100_000);
        for (start, end) in [(0, 1), (3, 4), (5, 8190), (4093, 12_289), (99_999, 100_000)] {
            let mut part = vec![0; end - start];
            pattern.fill(start as u64, &mut part);
            assert_eq!(part, whole[start..end]);
            assert_eq!(pattern.mismatch(start as u64, &part), None);
        }
    }

    #[test]
    fn a_changed_byte_and_a_shift_are_found_where_they_are() {
        let pattern = Pattern::new(7);
        let mut data = pattern.bytes(20_000);
        data[12_345] ^= 1;
        assert_eq!(pattern.mismatch(0, &data), Some(12_345));
        assert!(pattern.mismatch(1, &pattern.bytes(64)).is_some());
        assert_ne!(Pattern::new(8).bytes(64), pattern.bytes(64));
    }

    #[test]
    fn digest_is_fnv_1a() {
        let mut digest = Digest::default();
        digest.update(b"foo");
        digest.update(b"bar");
        assert_eq!(digest.hex(), "85944171f73967e8", "published test vector for `foobar`");
    }
}
