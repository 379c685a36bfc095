//! Bytes that both ends of a demo can tell for themselves, so that every one is compared.
//!
//! In: a seed and a length. Out: the same pseudo-random bytes each time, another stretch of one
//! pool for each seed: made once, they cost nothing while round trips are timed.

use std::sync::OnceLock;

use bytes::Bytes;
use rand::rngs::SmallRng;
use rand::{RngCore, SeedableRng};

const POOL: usize = 16 << 20;
/// The longest content.
pub(crate) const MOST: usize = 8 << 20;
/// What is long for one that comes over loopback.
pub(crate) const LONG: usize = 2 << 20;
/// Odd, so that neighbouring seeds lie far apart and no two among millions share a stretch.
const STRIDE: u64 = 1_000_003;

/// The bytes of a seed; no more than [`MOST`].
pub(crate) fn content(seed: u64, length: usize) -> Bytes {
    static BYTES: OnceLock<Bytes> = OnceLock::new();
    let pool = BYTES.get_or_init(|| {
        let mut bytes = vec![0; POOL];
        SmallRng::seed_from_u64(1).fill_bytes(&mut bytes);
        bytes.into()
    });
    // Less than the pool's length: fits.
    let start = (seed.wrapping_mul(STRIDE) % (POOL - MOST) as u64) as usize;
    pool.slice(start..start + length.min(MOST))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_is_its_bytes() {
        assert_eq!(content(7, 100), content(7, 200).slice(..100));
        assert_ne!(content(7, 100), content(8, 100));
        assert_eq!(content(u64::MAX, MOST).len(), MOST);
    }
}
