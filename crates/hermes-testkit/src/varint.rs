//! Variable-length integers of QUIC (RFC 9000, section 16), which HTTP/3 and capsules use too.

use bytes::BytesMut;

/// RFC 9000, section 16: the two highest bits of the first byte say how long it is.
pub fn put_varint(out: &mut BytesMut, value: u64) {
    let (length, mark) = match value {
        0..0x40 => (1, 0x00),
        0x40..0x4000 => (2, 0x40),
        0x4000..0x4000_0000 => (4, 0x80),
        _ => (8, 0xc0),
    };
    let mut bytes = value.to_be_bytes();
    let from = bytes.len() - length;
    bytes[from] |= mark;
    out.extend_from_slice(&bytes[from..]);
}

/// The number at the beginning, and its length (RFC 9000, section 16); `None` if it is incomplete.
pub fn varint(bytes: &[u8]) -> Option<(u64, usize)> {
    let first = *bytes.first()?;
    let length = 1 << (first >> 6);
    let rest = bytes.get(1..length)?;
    Some((rest.iter().fold(u64::from(first & 0x3f), |value, byte| value << 8 | u64::from(*byte)), length))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn varints_are_those_of_rfc_9000() {
        // The examples of RFC 9000, appendix A.1.
        for (value, bytes) in [
            (151_288_809_941_952_652, &[0xc2, 0x19, 0x7c, 0x5e, 0xff, 0x14, 0xe8, 0x8c][..]),
            (494_878_333, &[0x9d, 0x7f, 0x3e, 0x7d]),
            (15_293, &[0x7b, 0xbd]),
            (37, &[0x25]),
        ] {
            let mut out = BytesMut::new();
            put_varint(&mut out, value);
            assert_eq!(out, bytes);
            assert_eq!(varint(bytes), Some((value, bytes.len())));
        }
    }
}
