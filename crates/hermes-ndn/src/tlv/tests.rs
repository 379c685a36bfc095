//! Tests of the TLV encoding: numbers, integers, stream boundaries, and the critical rule.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;

#[test]
fn numbers_need_their_shortest_form() {
    for bytes in [&[253, 0, 252][..], &[254, 0, 0, 255, 255], &[255, 0, 0, 0, 0, 255, 255, 255, 255]] {
        assert_eq!(decode_number(bytes), Err(TlvError::NotShortest));
    }
    assert_eq!(decode_number(&[253, 0, 253]), Ok(Some((253, 3))));
    assert_eq!(decode_number(&[254, 0, 1, 0, 0]), Ok(Some((65_536, 5))));
    assert_eq!(decode_number(&[253, 0]), Ok(None));
}

#[test]
fn packet_length_waits_for_the_header_and_enforces_the_limit() {
    assert_eq!(packet_length(&[], MAX_PACKET), Ok(None));
    assert_eq!(packet_length(&[6], MAX_PACKET), Ok(None));
    assert_eq!(packet_length(&[6, 253, 1], MAX_PACKET), Ok(None));
    assert_eq!(packet_length(&[6, 5, 0], MAX_PACKET), Ok(Some(7)));
    let longest = [6, 253, 0x22, 0x5c];
    assert_eq!(packet_length(&longest, MAX_PACKET), Ok(Some(MAX_PACKET)));
    let error = TlvError::TooLong { length: 8801, limit: MAX_PACKET };
    assert_eq!(packet_length(&[6, 253, 0x22, 0x5d], MAX_PACKET), Err(error));
    assert!(packet_length(&[6, 255, 255, 255, 255, 255, 255, 255, 255, 255], usize::MAX).is_err());
    assert_eq!(packet_length(&[0, 0], MAX_PACKET), Err(TlvError::TypeOutOfRange(0)));
}

#[test]
fn low_and_odd_types_are_critical() {
    let critical: Vec<u32> = (1..40).filter(|kind| is_critical(*kind)).collect();
    let expected: Vec<u32> = (1..32).chain([33, 35, 37, 39]).collect();
    assert_eq!(critical, expected);
}

#[test]
fn an_element_stays_within_its_parent() {
    let buffer = Bytes::from_static(&[7, 3, 8, 2, 1, 9, 9]);
    let element = Reader::new(&buffer).next().unwrap().unwrap();
    assert_eq!(element.reader().next().unwrap_err(), TlvError::Truncated);
}

proptest! {
    #[test]
    fn numbers_round_trip(number: u64) {
        let mut out = BytesMut::new();
        put_number(&mut out, number);
        prop_assert_eq!(decode_number(&out), Ok(Some((number, out.len()))));
        for end in 0..out.len() {
            prop_assert_eq!(decode_number(&out[..end]), Ok(None));
        }
    }

    #[test]
    fn integers_round_trip(number: u64, shift in 0..64u32) {
        let number = number >> shift;
        prop_assert_eq!(decode_integer(shortest(&number.to_be_bytes())), Some(number));
    }
}
