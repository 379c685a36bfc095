//! Variable-length integers of RFC 9000, section 16.
//!
//! In: a `u64` below 2^62, or the front of a byte slice. Out: one, two, four or eight bytes, or the value and its
//! length. Encoding always selects the shortest form; decoding accepts longer ones, too, as the RFC requires. Never
//! allocates.

use bytes::BufMut;

/// The largest value that can be encoded: 2^62 - 1.
pub const MAX: u64 = (1 << 62) - 1;

/// The longest encoding, in bytes.
pub const MAX_LEN: usize = 8;

/// The number of bytes that [`encode`] writes for `value`.
///
/// # Panics
/// If `value` exceeds [`MAX`]; see [`encode`].
#[inline]
pub const fn len(value: u64) -> usize {
    match value {
        0..=0x3f => 1,
        0x40..=0x3fff => 2,
        0x4000..=0x3fff_ffff => 4,
        0x4000_0000..=MAX => 8,
        _ => panic!("a variable-length integer holds at most 62 bits"),
    }
}

/// Encodes `value` in its shortest form.
///
/// # Panics
/// If `value` exceeds [`MAX`]. Values come from [`decode`] or from lengths of data in memory, and neither can be so
/// large. A larger one is an error of the caller, and truncating it would desynchronise the peer.
#[inline]
pub fn encode(value: u64, out: &mut impl BufMut) {
    // The two top bits of the first byte encode the length.
    match len(value) {
        1 => out.put_u8(value as u8),
        2 => out.put_u16(value as u16 | 0x4000),
        4 => out.put_u32(value as u32 | 0x8000_0000),
        _ => out.put_u64(value | 0xc000_0000_0000_0000),
    }
}

/// Decodes the integer at the front of `bytes`: its value and its length in bytes.
///
/// `None`: more bytes are needed. Decoding cannot fail, because every byte sequence is the beginning of some integer.
#[inline]
pub fn decode(bytes: &[u8]) -> Option<(u64, usize)> {
    let first = *bytes.first()?;
    let len = 1usize << (first >> 6);
    let rest = bytes.get(1..len)?;
    let value = rest.iter().fold(u64::from(first & 0x3f), |value, byte| value << 8 | u64::from(*byte));
    Some((value, len))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use proptest::prelude::*;

    fn encoded(value: u64) -> Vec<u8> {
        let mut out = Vec::new();
        encode(value, &mut out);
        out
    }

    /// The examples of RFC 9000, appendix A.1.
    #[test]
    fn examples_of_the_rfc() {
        let table: [(&[u8], u64); 5] = [
            (&[0xc2, 0x19, 0x7c, 0x5e, 0xff, 0x14, 0xe8, 0x8c], 151_288_809_941_952_652),
            (&[0x9d, 0x7f, 0x3e, 0x7d], 494_878_333),
            (&[0x7b, 0xbd], 15_293),
            (&[0x25], 37),
            (&[0x40, 0x25], 37),
        ];
        for (bytes, value) in table {
            assert_eq!(decode(bytes), Some((value, bytes.len())));
        }
        for (bytes, value) in &table[..4] {
            assert_eq!(&encoded(*value), bytes);
        }
    }

    #[test]
    fn length_changes_where_the_rfc_says() {
        for (value, expected) in
            [(0, 1), (63, 1), (64, 2), (16_383, 2), (16_384, 4), ((1 << 30) - 1, 4), (1 << 30, 8), (MAX, 8)]
        {
            assert_eq!(len(value), expected, "{value}");
            assert_eq!(encoded(value).len(), expected, "{value}");
        }
    }

    #[test]
    fn a_cut_integer_asks_for_more() {
        for value in [0, 64, 16_384, MAX] {
            let bytes = encoded(value);
            for cut in 0..bytes.len() {
                assert_eq!(decode(&bytes[..cut]), None, "{value} cut at {cut}");
            }
        }
    }

    #[test]
    #[should_panic(expected = "62 bits")]
    fn too_large_a_value_is_the_callers_mistake() {
        encoded(MAX + 1);
    }

    proptest! {
        #[test]
        fn round_trip(value in 0..=MAX, tail: Vec<u8>) {
            let mut bytes = encoded(value);
            let used = bytes.len();
            prop_assert_eq!(used, len(value));
            bytes.extend(tail);
            prop_assert_eq!(decode(&bytes), Some((value, used)));
        }
    }
}
