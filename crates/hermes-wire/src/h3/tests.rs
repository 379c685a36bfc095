//! Tests of frames, whole and in pieces, settings and datagrams; and of forbidden frames.
#![allow(clippy::unwrap_used)]

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

const LIMIT: usize = 500;

/// All decoded frames, with the parts of one DATA frame joined, and the result of the end of the stream.
fn decode(pieces: impl IntoIterator<Item = Bytes>) -> (Vec<Frame>, Result<(), FrameError>) {
    let mut decoder = FrameDecoder::new(LIMIT);
    let mut frames = Vec::new();
    for piece in pieces {
        decoder.push(piece);
        loop {
            match decoder.next() {
                Ok(Some(frame)) => frames.push(frame),
                Ok(None) => break,
                Err(error) => {
                    assert_eq!((decoder.next(), decoder.finish()), (Err(error), Err(error)), "an error is final");
                    return (join(frames), Err(error));
                }
            }
        }
    }
    (join(frames), decoder.finish())
}

fn join(frames: Vec<Frame>) -> Vec<Frame> {
    let mut joined: Vec<Frame> = Vec::new();
    for frame in frames {
        match (joined.last_mut(), frame) {
            (Some(Frame::Data(last)), Frame::Data(more)) => *last = [&last[..], &more[..]].concat().into(),
            (_, frame) => joined.push(frame),
        }
    }
    joined
}

fn whole(bytes: &'static [u8]) -> (Vec<Frame>, Result<(), FrameError>) {
    decode([Bytes::from_static(bytes)])
}

#[test]
fn transcripts() {
    let data = |bytes: &'static [u8]| Frame::Data(Bytes::from_static(bytes));
    let headers = |bytes: &'static [u8]| Frame::Headers(Bytes::from_static(bytes));
    let control = |kind, bytes: &'static [u8]| Frame::Control { kind, payload: Bytes::from_static(bytes) };
    assert_eq!(whole(b""), (vec![], Ok(())));
    assert_eq!(whole(b"\x01\x02ab\x00\x03xyz"), (vec![headers(b"ab"), data(b"xyz")], Ok(())));
    assert_eq!(
        whole(b"\x01\x00\x00\x00\x04\x02\x33\x01"),
        (vec![headers(b""), control(SETTINGS, b"\x33\x01")], Ok(()))
    );
    // A greased frame, then GOAWAY, in longer forms than needed.
    assert_eq!(whole(b"\x21\x04junk\x40\x07\x40\x01\x08"), (vec![control(GOAWAY, b"\x08")], Ok(())));
    for cut in [&b"\x01"[..], b"\x01\x02a", b"\x00\x02a", b"\x21\x02a", b"\x40"] {
        assert_eq!(whole(cut).1, Err(FrameError::Truncated), "{cut:?}");
    }
    for kind in [2, 6, 8, 9] {
        let frame: Bytes = vec![kind, 0].into();
        assert_eq!(decode([frame]).1, Err(FrameError::Reserved(kind.into())));
    }
}

#[test]
fn what_is_collected_is_bounded_and_what_is_skipped_is_not_held() {
    let frame = |kind: u64, length: usize| {
        let mut out = BytesMut::new();
        put_header(kind, length, &mut out);
        out.put_bytes(7, length);
        out.freeze()
    };
    assert_eq!(decode([frame(HEADERS, LIMIT)]).0.len(), 1);
    let long = LIMIT + 1;
    let error = FrameError::TooLong { kind: HEADERS, length: long as u64, limit: LIMIT };
    assert_eq!(decode([frame(HEADERS, long)]), (vec![], Err(error)));
    assert_eq!(error.code(), Code::ExcessiveLoad);
    assert!(matches!(decode([frame(SETTINGS, MAX_CONTROL + 1)]).1, Err(FrameError::TooLong { .. })));
    let mut endless = BytesMut::new();
    varint::encode(0x21, &mut endless);
    varint::encode(varint::MAX, &mut endless);
    let mut decoder = FrameDecoder::new(LIMIT);
    decoder.push(endless.freeze());
    for _ in 0..64 {
        assert_eq!(decoder.next(), Ok(None));
        assert!(decoder.unread.is_empty());
        decoder.push(vec![0; 1 << 20].into());
    }
}

#[test]
fn settings_are_read_and_their_mistakes_named() {
    let ours = Settings { max_field_section: Some(65_536), extended_connect: true, datagrams: true };
    let mut out = BytesMut::new();
    ours.put(&mut out);
    let (frames, end) = decode([out.freeze()]);
    let [Frame::Control { kind: SETTINGS, payload }] = &frames[..] else { panic!("{frames:?}") };
    assert_eq!((Settings::parse(payload), end), (Ok(ours), Ok(())));
    let none = Settings { max_field_section: None, extended_connect: false, datagrams: false };
    assert_eq!(Settings::parse(b""), Ok(none));
    // A setting of QPACK, and a greased one.
    assert_eq!(Settings::parse(b"\x01\x10\x07\x10\x21\x05"), Ok(none));
    assert_eq!(Settings::parse(b"\x06"), Err(SettingsError::Truncated));
    assert_eq!(Settings::parse(b"\x04\x01"), Err(SettingsError::Reserved(4)));
    assert_eq!(Settings::parse(b"\x21\x01\x21\x01"), Err(SettingsError::Twice(0x21)));
    assert_eq!(Settings::parse(b"\x33\x02"), Err(SettingsError::NoSwitch(0x33)));
}

#[test]
fn datagrams_name_their_stream() {
    let mut out = BytesMut::new();
    put_datagram_stream(400, &mut out);
    out.put_slice(b"\0payload");
    assert_eq!(parse_datagram(out.freeze()), Some((400, Bytes::from_static(b"\0payload"))));
    assert_eq!(parse_datagram(Bytes::from_static(b"\0")), Some((0, Bytes::new())));
    assert_eq!(parse_datagram(Bytes::from_static(b"")), None);
    assert_eq!(parse_datagram(Bytes::from_static(b"\x40")), None);
    assert_eq!(parse_datagram(Bytes::from_static(b"\xff\xff\xff\xff\xff\xff\xff\xff")), None);
    assert_eq!((parse_id(b"\x08"), parse_id(b""), parse_id(b"\x08\x08")), (Some(8), None, None));
}

proptest! {
    #[test]
    fn the_same_frames_wherever_the_stream_is_cut(
        frames in vec((prop_oneof![Just(DATA), Just(HEADERS), Just(GOAWAY), Just(0x21_u64)], vec(any::<u8>(), 0..300)), 0..10),
        sizes in vec(1..200_usize, 1..8),
    ) {
        let mut bytes = BytesMut::new();
        for (kind, payload) in &frames {
            put_header(*kind, payload.len(), &mut bytes);
            bytes.put_slice(payload);
        }
        let mut rest = bytes.freeze();
        let expected = decode([rest.clone()]);
        prop_assert!(expected.1.is_ok());
        let count = frames.iter().filter(|(kind, _)| *kind == HEADERS || *kind == GOAWAY).count();
        let seen = expected.0.iter().filter(|frame| !matches!(frame, Frame::Data(_))).count();
        prop_assert_eq!(count, seen);
        let mut pieces = Vec::new();
        for size in sizes.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            pieces.push(rest.split_to((*size).min(rest.len())));
        }
        prop_assert_eq!(decode(pieces), expected);
    }

    #[test]
    fn any_bytes(bytes in vec(any::<u8>(), 0..200), at in any::<prop::sample::Index>()) {
        let bytes = Bytes::from(bytes);
        let at = at.index(bytes.len() + 1);
        prop_assert_eq!(decode([bytes.clone()]), decode([bytes.slice(..at), bytes.slice(at..)]));
        let _ = (Settings::parse(&bytes), parse_id(&bytes), parse_datagram(bytes));
    }
}

#[test]
fn unknown_frames_are_skipped_and_remembered() {
    let mut decoder = FrameDecoder::new(10);
    decoder.push(Bytes::from_static(&[0x04, 0x00]));
    assert!(matches!(decoder.next(), Ok(Some(Frame::Control { kind: SETTINGS, .. }))) && !decoder.has_skipped());
    decoder.push(Bytes::from_static(&[0x21, 0x01, 0xff]));
    assert_eq!((decoder.next(), decoder.has_skipped()), (Ok(None), true));
}

#[test]
fn without_a_dynamic_table_qpack_has_little_to_say() {
    let encoder = |bytes: &[u8]| Instructions::of(stream::QPACK_ENCODER).read(bytes);
    assert_eq!(encoder(&[0x20, 0x20]), Ok(()));
    // A capacity of 1, and an insertion.
    assert_eq!(encoder(&[0x21]), Err(Code::EncoderStreamError));
    assert_eq!(encoder(&[0xc0, 0x01, b'a']), Err(Code::EncoderStreamError));
    let decoder = |bytes: &[u8]| Instructions::of(stream::QPACK_DECODER).read(bytes);
    // Cancellations of streams 1, 63 and 4, one of them across three bytes.
    assert_eq!(decoder(&[0x41, 0x7f, 0x80, 0x00, 0x44]), Ok(()));
    assert_eq!(decoder(&[0x01]), Err(Code::DecoderStreamError));
    assert_eq!(decoder(&[0x84]), Err(Code::DecoderStreamError));
}
