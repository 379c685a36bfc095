//! Properties of the codecs in `hermes-wire`.
//!
//! In: bytes as a peer may send them; for capsules with the places to cut them in front. Out:
//! nothing, or a panic.

use std::net::SocketAddr;

use bytes::{Bytes, BytesMut};
use hermes_wire::capsule::{self, Capsule, CapsuleDecoder, CapsuleError};
use hermes_wire::connect_udp;
use hermes_wire::proxy_protocol::{self, Parsed};
use hermes_wire::traceparent::Traceparent;

/// The first byte chooses the limit, the next four the sizes of the pieces; the rest is the
/// stream. Whole or in pieces, it must decode to the same capsules and the same end.
pub fn capsule(data: &[u8]) {
    let Some(([limit, sizes @ ..], stream)) = data.split_first_chunk::<5>() else {
        return;
    };
    let limit = usize::from(*limit) * 8;
    let stream = Bytes::copy_from_slice(stream);
    let whole = decode(limit, std::slice::from_ref(&stream));
    let pieces = cut(stream, sizes);
    assert_eq!(whole, decode(limit, &pieces), "whole, and in pieces of {sizes:?}");
    for capsule in whole.0 {
        if let Capsule::Datagram(datagram) = capsule {
            assert!(datagram.len() <= limit, "{} bytes got past the limit", datagram.len());
            udp_payload(datagram);
        }
    }
}

fn decode(limit: usize, pieces: &[Bytes]) -> (Vec<Capsule>, Result<(), CapsuleError>) {
    let mut decoder = CapsuleDecoder::new(limit);
    let mut capsules = Vec::new();
    for piece in pieces {
        decoder.push(piece.clone());
        loop {
            match decoder.next() {
                Ok(Some(capsule)) => capsules.push(capsule),
                Ok(None) => break,
                Err(error) => {
                    assert_eq!(decoder.finish(), Err(error));
                    return (capsules, Err(error));
                }
            }
        }
    }
    (capsules, decoder.finish())
}

/// Pieces of these sizes, over and over; a size of 0 is an empty piece.
fn cut(mut stream: Bytes, sizes: &[u8]) -> Vec<Bytes> {
    let mut pieces = Vec::new();
    // One added to the last keeps four zeros from going on for ever.
    let steps = sizes.iter().enumerate();
    for (index, size) in steps.cycle() {
        if stream.is_empty() {
            break;
        }
        let size = usize::from(*size) + usize::from(index + 1 == sizes.len());
        pieces.push(stream.split_to(size.min(stream.len())));
    }
    pieces
}

/// A UDP payload that was accepted can be sent on, and arrives as it was.
fn udp_payload(datagram: Bytes) {
    let Ok(Some(payload)) = capsule::udp_payload(datagram) else {
        return;
    };
    let mut out = BytesMut::new();
    capsule::put_datagram(&mut out, &payload);
    assert!(out.len() <= payload.len() + capsule::MAX_DATAGRAM_OVERHEAD);
    let (capsules, end) = decode(capsule::MAX_HTTP_DATAGRAM, &[out.freeze()]);
    assert_eq!(end, Ok(()));
    let [Capsule::Datagram(again)] = &capsules[..] else { panic!("{capsules:?}") };
    assert_eq!(capsule::udp_payload(again.clone()), Ok(Some(payload)));
}

/// The bytes are tried as a whole path, as what follows the template's prefix, and as a host.
/// What is accepted is fit for a log line and a resolver, and survives another hop.
pub fn connect_udp_path(data: &[u8]) {
    let Ok(text) = str::from_utf8(data) else {
        return;
    };
    for path in [text.to_owned(), format!("{}{text}", connect_udp::PREFIX), connect_udp::path(text, 443)] {
        let Ok(Some((host, port))) = connect_udp::parse_path(&path) else {
            continue;
        };
        assert!(!host.is_empty() && host.len() <= connect_udp::MAX_HOST && port != 0);
        assert!(host.bytes().all(|byte| byte.is_ascii_graphic() && !b"/\\?#@%[]\"<>".contains(&byte)));
        let again = connect_udp::parse_path(&connect_udp::path(&host, port));
        assert_eq!(again, Ok(Some((host, port))));
    }
}

/// More bytes never change a verdict; `Incomplete` asks for more than is there, within the
/// bound; and what was read can be written and read again. The bytes are tried as they are, and
/// as what follows the signature.
pub fn proxy_protocol(data: &[u8]) {
    grows(data);
    grows(&[&proxy_protocol::LOCAL[..12], data].concat());
}

fn grows(bytes: &[u8]) {
    let verdict = proxy_protocol::parse(bytes);
    for cut in 0..bytes.len() {
        match proxy_protocol::parse(&bytes[..cut]) {
            Ok(Parsed::Incomplete(needed)) => {
                assert!(cut < needed && needed <= proxy_protocol::MAX_HEADER);
            }
            early => assert_eq!(early, verdict, "decided after {cut} bytes"),
        }
    }
    if let Ok(Parsed::Done { len, source: Some((from, to)) }) = verdict {
        assert!(len <= bytes.len());
        encodes(from, to);
    }
}

fn encodes(from: SocketAddr, to: SocketAddr) {
    let bytes = proxy_protocol::encode(from, to);
    assert!(bytes.len() <= proxy_protocol::MAX_ENCODED);
    let expected = Parsed::Done { len: bytes.len(), source: Some((from, to)) };
    assert_eq!(proxy_protocol::parse(&bytes), Ok(expected));
}

/// What is accepted names a trace and a span, and reads the same once rendered.
pub fn traceparent(data: &[u8]) {
    let Ok(parent) = Traceparent::parse(data) else {
        return;
    };
    assert!(parent.trace_id() != 0 && parent.span_id() != 0);
    let rendered = parent.render();
    assert_eq!(rendered[3..52], data[3..52], "identifiers are passed on as they came");
    assert_eq!(parent.to_string().as_bytes(), rendered);
    // Of a later version only the flag `sampled` survives, and once it is ours nothing changes.
    assert_eq!(Traceparent::parse(&rendered), Ok(parent));
}
