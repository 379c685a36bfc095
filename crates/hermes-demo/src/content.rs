//! Content that both ends of a demo can generate, so that every byte is compared.
//!
//! In: a seed and a length. Out: the same pseudo-random bytes each time. Each seed selects another range of one pool;
//! the pool is generated once, so that generation does not distort the measured round trips.

use std::sync::OnceLock;

use bytes::Bytes;
use rand::rngs::SmallRng;
use rand::{RngCore, SeedableRng};

const POOL: usize = 16 << 20;
/// The longest content.
pub(crate) const MAX_BYTES: usize = 8 << 20;
/// A large size for content that is sent over loopback.
pub(crate) const LONG: usize = 2 << 20;
/// Odd, so that neighbouring seeds lie far apart and no two among millions share a stretch.
const STRIDE: u64 = 1_000_003;

/// The bytes of a seed; at most [`MAX_BYTES`].
pub(crate) fn content(seed: u64, length: usize) -> Bytes {
    static BYTES: OnceLock<Bytes> = OnceLock::new();
    let pool = BYTES.get_or_init(|| {
        let mut bytes = vec![0; POOL];
        SmallRng::seed_from_u64(1).fill_bytes(&mut bytes);
        bytes.into()
    });
    // The value is less than the pool's length, so it fits.
    let start = (seed.wrapping_mul(STRIDE) % (POOL - MAX_BYTES) as u64) as usize;
    pool.slice(start..start + length.min(MAX_BYTES))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_is_its_bytes() {
        assert_eq!(content(7, 100), content(7, 200).slice(..100));
        assert_ne!(content(7, 100), content(8, 100));
        assert_eq!(content(u64::MAX, MAX_BYTES).len(), MAX_BYTES);
    }
}
