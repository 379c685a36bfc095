//! Tests of the capsule codec: transcripts of bytes, limits, and random streams cut anywhere.

#![allow(clippy::unwrap_used)]

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

const LIMIT: usize = 1_500;

/// All capsules decoded from `pieces`, and the result of the end of the stream.
fn decode(limit: usize, pieces: impl IntoIterator<Item = Bytes>) -> (Vec<Capsule>, Result<(), CapsuleError>) {
    let mut decoder = CapsuleDecoder::new(limit);
    let mut capsules = Vec::new();
    for piece in pieces {
        decoder.push(piece);
        loop {
            match decoder.next() {
                Ok(Some(capsule)) => capsules.push(capsule),
                Ok(None) => break,
                Err(error) => {
                    assert_eq!(decoder.finish(), Err(error), "an error is final");
                    return (capsules, Err(error));
                }
            }
        }
    }
    (capsules, decoder.finish())
}

fn whole(bytes: &'static [u8]) -> (Vec<Capsule>, Result<(), CapsuleError>) {
    decode(LIMIT, [Bytes::from_static(bytes)])
}

fn datagram(bytes: &'static [u8]) -> Capsule {
    Capsule::Datagram(Bytes::from_static(bytes))
}

#[test]
fn transcripts() {
    use CapsuleError::{TruncatedHeader, TruncatedPayload};
    let unknown = |kind, length| Capsule::Unknown { kind, length };
    let ok = |capsules: Vec<Capsule>| (capsules, Ok(()));
    assert_eq!(whole(b""), ok(vec![]));
    assert_eq!(whole(b"\x00\x03\x00hi"), ok(vec![datagram(b"\0hi")]));
    assert_eq!(whole(b"\x00\x00"), ok(vec![datagram(b"")]));
    // Type and length in longer forms than needed: RFC 9000 allows them.
    assert_eq!(whole(b"\x40\x00\x80\x00\x00\x03\x00hi"), ok(vec![datagram(b"\0hi")]));
    // ADDRESS_ASSIGN of CONNECT-IP, then a datagram.
    assert_eq!(whole(b"\x01\x02xx\x00\x02\x00y"), ok(vec![unknown(1, 2), datagram(b"\0y")]));
    // A greased type (RFC 9297, section 5.4: 41 * N + 23) with an empty payload.
    assert_eq!(whole(b"\x17\x00\x00\x00"), ok(vec![unknown(23, 0), datagram(b"")]));
    assert_eq!(whole(b"\x40"), (vec![], Err(TruncatedHeader)));
    assert_eq!(whole(b"\x00"), (vec![], Err(TruncatedHeader)));
    assert_eq!(whole(b"\x00\x40"), (vec![], Err(TruncatedHeader)));
    assert_eq!(whole(b"\x00\x05\x00hi"), (vec![], Err(TruncatedPayload { missing: 2 })));
    assert_eq!(whole(b"\x01\x05hi"), (vec![unknown(1, 5)], Err(TruncatedPayload { missing: 3 })));
}

#[test]
fn a_capsule_as_long_as_the_limit_passes_and_a_byte_more_fails() {
    let stream = |length: usize| {
        let mut bytes = BytesMut::new();
        varint::encode(DATAGRAM, &mut bytes);
        varint::encode(length as u64, &mut bytes);
        bytes.put_bytes(7, length);
        bytes.freeze()
    };
    let (capsules, end) = decode(LIMIT, [stream(LIMIT)]);
    assert_eq!((capsules.len(), end), (1, Ok(())));
    let error = CapsuleError::TooLong { kind: DATAGRAM, length: LIMIT as u64 + 1, limit: LIMIT };
    assert_eq!(decode(LIMIT, [stream(LIMIT + 1)]), (vec![], Err(error)));
    assert_eq!(error.to_string(), "capsule of type 0 with 1501 bytes exceeds the limit of 1500 bytes");
}

#[test]
fn an_error_is_repeated_and_later_input_is_dropped() {
    let mut decoder = CapsuleDecoder::new(1);
    decoder.push(Bytes::from_static(b"\x00\x02xx\x00\x00"));
    let error = CapsuleError::TooLong { kind: DATAGRAM, length: 2, limit: 1 };
    for _ in 0..2 {
        assert_eq!(decoder.next(), Err(error));
        decoder.push(Bytes::from_static(b"\x00\x00"));
        assert!(decoder.unread.is_empty(), "nothing is held after an error");
    }
}

#[test]
fn an_unknown_capsule_of_any_length_is_skipped_without_being_held() {
    let mut header = BytesMut::new();
    varint::encode(0x2575_ffff, &mut header);
    varint::encode(varint::MAX, &mut header);
    let mut decoder = CapsuleDecoder::new(LIMIT);
    decoder.push(header.freeze());
    let unknown = Capsule::Unknown { kind: 0x2575_ffff, length: varint::MAX };
    assert_eq!(decoder.next(), Ok(Some(unknown)));
    let piece = Bytes::from(vec![0; 1 << 20]);
    for _ in 0..64 {
        decoder.push(piece.clone());
        assert_eq!(decoder.next(), Ok(None));
        assert!(decoder.unread.is_empty());
    }
    let missing = varint::MAX - (64 << 20);
    assert_eq!(decoder.finish(), Err(CapsuleError::TruncatedPayload { missing }));
}

#[test]
fn capsules_that_were_asked_for_come_whole_and_no_longer_than_they_may_be() {
    let keeping = || CapsuleDecoder::new(LIMIT).keeping(&[1, 3], 4);
    let mut decoder = keeping();
    for byte in b"\x01\x02ab\x02\x05abcde\x00\x02\x00y\x03\x00" {
        decoder.push(Bytes::copy_from_slice(&[*byte]));
    }
    let kept = |kind, payload: &'static [u8]| Capsule::Kept { kind, payload: Bytes::from_static(payload) };
    for wanted in [kept(1, b"ab"), Capsule::Unknown { kind: 2, length: 5 }, datagram(b"\0y"), kept(3, b"")] {
        assert_eq!(decoder.next(), Ok(Some(wanted)));
    }
    assert_eq!((decoder.next(), decoder.finish()), (Ok(None), Ok(())));
    let mut decoder = keeping();
    decoder.push(Bytes::from_static(b"\x03\x05"));
    assert_eq!(decoder.next(), Err(CapsuleError::TooLong { kind: 3, length: 5, limit: 4 }));
}

#[test]
fn a_capsule_within_one_piece_is_not_copied() {
    let mut bytes = BytesMut::new();
    put_datagram(&mut bytes, b"first");
    put_datagram(&mut bytes, b"second");
    let piece = bytes.freeze();
    let range = piece.as_ptr_range();
    let (capsules, end) = decode(LIMIT, [piece.clone()]);
    assert_eq!((capsules.len(), end), (2, Ok(())));
    for capsule in capsules {
        let Capsule::Datagram(datagram) = capsule else { panic!("{capsule:?}") };
        assert!(range.contains(&datagram.as_ptr()));
        assert!(range.contains(&udp_payload(datagram).unwrap().unwrap().as_ptr()));
    }
}

#[test]
fn a_started_datagram_lets_go_of_the_piece_it_began_in() {
    // A byte of a datagram must not keep a large read buffer alive.
    let mut bytes = BytesMut::new();
    put_datagram(&mut bytes, &[1; 1_000]);
    let piece = bytes.split_to(500).freeze();
    let mut decoder = CapsuleDecoder::new(LIMIT);
    decoder.push(piece.clone());
    assert_eq!(decoder.next(), Ok(None));
    drop(bytes);
    assert!(piece.is_unique(), "the decoder still holds the piece");
}

#[test]
fn pushing_before_the_last_piece_is_used_up_loses_nothing() {
    let mut decoder = CapsuleDecoder::new(LIMIT);
    for byte in b"\x00\x03\x00hi\x00\x02\x00y" {
        decoder.push(Bytes::copy_from_slice(&[*byte]));
    }
    assert_eq!(decoder.next(), Ok(Some(datagram(b"\0hi"))));
    assert_eq!(decoder.next(), Ok(Some(datagram(b"\0y"))));
    assert_eq!(decoder.next(), Ok(None));
    assert_eq!(decoder.finish(), Ok(()));
}

#[test]
fn payloads_of_connect_udp() {
    let payload = |bytes: &'static [u8]| udp_payload(Bytes::from_static(bytes));
    assert_eq!(payload(b"\0hi"), Ok(Some(Bytes::from_static(b"hi"))));
    // An empty UDP datagram is a datagram.
    assert_eq!(payload(b"\0"), Ok(Some(Bytes::new())));
    // The context identifier in a longer form.
    assert_eq!(payload(b"\x40\x00hi"), Ok(Some(Bytes::from_static(b"hi"))));
    assert_eq!(payload(b"\x02hi"), Ok(None));
    assert_eq!(payload(b""), Err(CapsuleError::NoContext { length: 0 }));
    assert_eq!(payload(b"\xc0\0"), Err(CapsuleError::NoContext { length: 2 }));
}

#[test]
fn the_longest_udp_payload_goes_through_and_a_byte_more_does_not() {
    let mut bytes = BytesMut::new();
    put_datagram(&mut bytes, &[9; MAX_UDP_PAYLOAD]);
    assert_eq!(bytes.len(), MAX_UDP_PAYLOAD + MAX_DATAGRAM_OVERHEAD);
    let (capsules, end) = decode(MAX_HTTP_DATAGRAM, [bytes.freeze()]);
    assert_eq!(end, Ok(()));
    let [Capsule::Datagram(datagram)] = &capsules[..] else { panic!("{}", capsules.len()) };
    let payload = udp_payload(datagram.clone()).unwrap().unwrap();
    assert_eq!(payload.len(), MAX_UDP_PAYLOAD);
    let longer = Bytes::from(vec![0; 1 + MAX_UDP_PAYLOAD + 1]);
    let error = CapsuleError::PayloadTooLong { length: MAX_UDP_PAYLOAD + 1 };
    assert_eq!(udp_payload(longer), Err(error));
}

#[test]
fn room_for_the_stated_overhead_is_enough() {
    for length in [0, 62, 63, 16_382, 16_383, MAX_UDP_PAYLOAD] {
        let mut out = BytesMut::with_capacity(2 * (length + MAX_DATAGRAM_OVERHEAD));
        let place = out.as_ptr();
        put_datagram(&mut out, &vec![0; length]);
        put_datagram(&mut out, &vec![0; length]);
        assert_eq!(out.as_ptr(), place, "{length}: moved for want of room");
    }
}

/// An encoded capsule: type, payload, and one of the four forms for its length.
fn any_capsule() -> impl Strategy<Value = (u64, Vec<u8>)> {
    let kind = prop_oneof![3 => Just(DATAGRAM), 1 => 1..=varint::MAX];
    (kind, vec(any::<u8>(), 0..400))
}

fn on_the_wire(capsules: &[(u64, Vec<u8>)]) -> (Bytes, Vec<Capsule>) {
    let mut bytes = BytesMut::new();
    for (kind, payload) in capsules {
        varint::encode(*kind, &mut bytes);
        varint::encode(payload.len() as u64, &mut bytes);
        bytes.put_slice(payload);
    }
    let expected = capsules.iter().map(|(kind, payload)| match *kind {
        DATAGRAM => Capsule::Datagram(Bytes::copy_from_slice(payload)),
        kind => Capsule::Unknown { kind, length: payload.len() as u64 },
    });
    (bytes.freeze(), expected.collect())
}

/// Cuts `bytes` into pieces of these sizes, repeatedly.
fn cut(mut bytes: Bytes, sizes: &[usize]) -> Vec<Bytes> {
    let mut pieces = Vec::new();
    for size in sizes.iter().cycle() {
        if bytes.is_empty() {
            break;
        }
        pieces.push(bytes.split_to((*size).min(bytes.len())));
    }
    pieces
}

proptest! {
    #[test]
    fn the_same_capsules_wherever_the_stream_is_cut(
        capsules in vec(any_capsule(), 0..12),
        sizes in vec(1..300_usize, 1..8),
    ) {
        let (bytes, expected) = on_the_wire(&capsules);
        prop_assert_eq!(decode(LIMIT, cut(bytes, &sizes)), (expected, Ok(())));
    }

    #[test]
    fn the_same_result_for_any_bytes_wherever_they_are_cut(
        bytes in vec(any::<u8>(), 0..200),
        sizes in vec(1..20_usize, 1..8),
    ) {
        let bytes = Bytes::from(bytes);
        prop_assert_eq!(decode(64, [bytes.clone()]), decode(64, cut(bytes, &sizes)));
    }

    /// An intermediary forwards all bytes unchanged except datagrams, and keeps the order.
    #[test]
    fn others_are_passed_on_as_they_came(
        capsules in vec(any_capsule(), 0..12),
        sizes in vec(1..300_usize, 1..8),
    ) {
        let (bytes, _) = on_the_wire(&capsules);
        let mut decoder = CapsuleDecoder::new(LIMIT).passing();
        let mut again = BytesMut::new();
        for piece in cut(bytes.clone(), &sizes) {
            decoder.push(piece);
            while let Some(capsule) = decoder.next().unwrap() {
                match capsule {
                    Capsule::Datagram(datagram) => put(&mut again, DATAGRAM, &datagram),
                    Capsule::Piece(piece) => again.put_slice(&piece),
                    other => prop_assert!(false, "{:?}", other),
                }
                let has_ended = decode(LIMIT, [again.clone().freeze()]).1.is_ok();
                prop_assert_eq!(decoder.is_between(), has_ended);
            }
        }
        prop_assert_eq!((again.freeze(), decoder.finish()), (bytes, Ok(())));
    }

    #[test]
    fn a_stream_cut_within_a_capsule_is_malformed(
        payload in vec(any::<u8>(), 0..100),
        at in any::<prop::sample::Index>(),
    ) {
        let (bytes, _) = on_the_wire(&[(DATAGRAM, payload)]);
        let at = 1 + at.index(bytes.len() - 1);
        let (capsules, end) = decode(LIMIT, [bytes.slice(..at)]);
        prop_assert!(capsules.is_empty());
        prop_assert!(end.is_err());
    }

    #[test]
    fn payloads_come_back_as_they_went(payloads in vec(vec(any::<u8>(), 0..1_400), 0..6)) {
        let mut bytes = BytesMut::new();
        for payload in &payloads {
            let before = bytes.len();
            put_datagram(&mut bytes, payload);
            prop_assert!(bytes.len() - before <= payload.len() + MAX_DATAGRAM_OVERHEAD);
        }
        let (capsules, end) = decode(LIMIT, [bytes.freeze()]);
        prop_assert_eq!(end, Ok(()));
        let mut back = Vec::new();
        for capsule in capsules {
            let Capsule::Datagram(datagram) = capsule else { panic!("{capsule:?}") };
            back.push(udp_payload(datagram).unwrap().unwrap().to_vec());
        }
        prop_assert_eq!(back, payloads);
    }
}
