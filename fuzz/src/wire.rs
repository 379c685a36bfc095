//! Properties of the codecs in `hermes-wire`.
//!
//! In: bytes of a peer; for capsules preceded by the positions at which to cut them. Out: nothing, or a panic.

use std::net::SocketAddr;

use bytes::{Bytes, BytesMut};
use hermes_wire::binary_http::{self, BinaryHttpError, Control, Part};
use hermes_wire::capsule::{self, Capsule, CapsuleDecoder, CapsuleError};
use hermes_wire::custody::{self, Record};
use hermes_wire::dns::{self, Answer, Question};
use hermes_wire::h3::{Frame, FrameDecoder, FrameError, Settings};
use hermes_wire::ip::{self, IcmpError};
use hermes_wire::proxy_protocol::{self, Parsed};
use hermes_wire::socks5::{self, Greeting, Request};
use hermes_wire::traceparent::Traceparent;
use hermes_wire::{connect_ip, connect_udp};

/// The first byte selects the limit, the next four the sizes of the pieces; the rest is the stream. It must decode to
/// the same capsules and the same end, whole or in pieces.
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

/// Pieces of these sizes, repeatedly; a size of 0 is an empty piece.
fn cut(mut stream: Bytes, sizes: &[u8]) -> Vec<Bytes> {
    let mut pieces = Vec::new();
    // The last size is at least one, so that four zeros do not loop forever.
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

/// An accepted UDP payload can be encoded, and decodes to the same.
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

/// The bytes are parsed as a whole path, as the rest after the template's prefix, and as a host. An accepted host is
/// safe for a log line and a resolver, and survives another hop.
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

/// The bytes are parsed as the rest after the template's prefix, and as the payload of each capsule. An accepted value
/// can be encoded, and decodes to the same.
pub fn connect_ip(data: &[u8]) {
    if let Ok(text) = str::from_utf8(data)
        && let Ok(Some(scope)) = connect_ip::parse_path(&format!("{}{text}", connect_ip::PREFIX))
    {
        assert_eq!(connect_ip::parse_path(&connect_ip::path(&scope)), Ok(Some(scope)));
    }
    let payload = Bytes::copy_from_slice(data);
    if let Ok(addresses) = connect_ip::parse_address_assign(payload.clone()) {
        assert!(addresses.len() <= connect_ip::MAX_ENTRIES);
        let mut out = Vec::new();
        connect_ip::put_addresses(&addresses, &mut out);
        assert_eq!(connect_ip::parse_address_assign(out.clone().into()).as_ref(), Ok(&addresses));
        assert!(
            connect_ip::parse_address_request(out.into()).is_ok_and(|same| same == addresses) || {
                addresses.is_empty() || addresses.iter().any(|address| address.request == 0)
            }
        );
    }
    if let Ok(mut routes) = connect_ip::parse_route_advertisement(payload) {
        let mut out = Vec::new();
        connect_ip::put_routes(&routes, &mut out);
        assert_eq!(connect_ip::parse_route_advertisement(out.into()).as_ref(), Ok(&routes));
        connect_ip::normalise(&mut routes);
        let mut out = Vec::new();
        connect_ip::put_routes(&routes, &mut out);
        assert_eq!(connect_ip::parse_route_advertisement(out.into()), Ok(routes));
    }
}

/// The first byte selects the record type of the payload in the rest. An accepted record can be encoded, and decodes to
/// the same from a stream.
pub fn custody(data: &[u8]) {
    let Some((kind, payload)) = data.split_first() else { return };
    let kind = custody::KINDS.get(usize::from(*kind)).copied().unwrap_or_default();
    let Ok(record) = Record::parse(kind, Bytes::copy_from_slice(payload)) else { return };
    let mut out = BytesMut::new();
    record.put(&mut out);
    let mut decoder = custody::decoder();
    decoder.push(out.freeze());
    let Ok(Some(Capsule::Kept { kind, payload })) = decoder.next() else { panic!("{record:?} is no capsule") };
    assert_eq!(Record::parse(kind, payload).as_ref(), Ok(&record));
    assert!(decoder.finish().is_ok());
}

/// The bytes are decoded at once, and byte by byte: to the same parts, or the same error. An accepted message can be
/// encoded, and decodes to the same.
pub fn binary_http(data: &[u8]) {
    let whole = parts(data, data.len().max(1));
    assert_eq!(whole, parts(data, 1));
    let Ok(parts_of_it) = whole else { return };
    let mut out = BytesMut::new();
    for part in &parts_of_it {
        match part {
            // Interim responses are not encoded.
            Part::Head(Control::Response { status: ..200 }, _) => return,
            Part::Head(control, fields) => {
                binary_http::put_head(control, fields.iter().map(|(name, value)| (&name[..], &value[..])), &mut out);
            }
            Part::Content(bytes) => {
                binary_http::put_chunk_head(bytes.len(), &mut out);
                out.extend_from_slice(bytes);
            }
            Part::End(fields) => {
                binary_http::put_end(fields.iter().map(|(name, value)| (&name[..], &value[..])), &mut out);
            }
        }
    }
    assert_eq!(parts(&out, out.len()), Ok(parts_of_it));
}

/// Joins the parts of the content.
fn parts(data: &[u8], size: usize) -> Result<Vec<Part>, BinaryHttpError> {
    let (mut decoder, mut parts) = (binary_http::Decoder::new(1 << 16), Vec::<Part>::new());
    for piece in data.chunks(size) {
        decoder.push(Bytes::copy_from_slice(piece));
        while let Some(part) = decoder.next()? {
            match (parts.last_mut(), part) {
                (Some(Part::Content(before)), Part::Content(more)) => *before = [&before[..], &more].concat().into(),
                (_, part) => parts.push(part),
            }
        }
    }
    decoder.finish().map(|()| parts)
}

/// The first two bytes select the MTU; the rest is a packet, tested also with corrected lengths and checksum. Every
/// transformation of a packet yields valid packets.
pub fn ip(data: &[u8]) {
    let Some(([high, low], packet)) = data.split_first_chunk::<2>() else {
        return;
    };
    let mtu = usize::from(u16::from_be_bytes([*high, *low]));
    forward(packet.to_vec(), mtu);
    forward(repaired(packet), mtu);
}

fn repaired(packet: &[u8]) -> Vec<u8> {
    let mut packet = packet.to_vec();
    let length = packet.len().min(usize::from(u16::MAX));
    packet.truncate(length);
    match packet.first().map(|byte| byte >> 4) {
        Some(4) if length >= 20 => {
            packet[2..4].copy_from_slice(&(length as u16).to_be_bytes());
            packet[10..12].fill(0);
            let header = (usize::from(packet[0] & 0xf) * 4).min(length);
            let mut sum: u32 = packet[..header]
                .chunks(2)
                .map(|word| u32::from(word[0]) << 8 | u32::from(*word.get(1).unwrap_or(&0)))
                .sum();
            while sum > 0xffff {
                sum = (sum & 0xffff) + (sum >> 16);
            }
            packet[10..12].copy_from_slice(&(!(sum as u16)).to_be_bytes());
        }
        Some(6) if length >= 40 => packet[4..6].copy_from_slice(&((length - 40) as u16).to_be_bytes()),
        _ => {}
    }
    packet
}

/// A changed port can be restored with all other bytes; a reset is a valid packet that is never answered by a reset.
fn translate(packet: &[u8], header: &ip::Header, port: u16) {
    let ports = ip::ports(packet, header);
    for side in [ip::Side::Source, ip::Side::Destination] {
        let mut changed = packet.to_vec();
        assert_eq!(ip::set_port(&mut changed, header, side, port), ports.is_some());
        let Some((source, destination)) = ports else { continue };
        let (now, before) = match side {
            ip::Side::Source => ((port, destination), source),
            ip::Side::Destination => ((source, port), destination),
        };
        assert_eq!(ip::ports(&changed, header), Some(now));
        assert!(ip::set_port(&mut changed, header, side, before));
        assert_eq!(ip::ports(&changed, header), ports);
    }
    if let Some(reset) = ip::tcp_reset(packet, header) {
        let answer = ip::parse(&reset).expect("a reset is a packet");
        assert_eq!((answer.source, answer.destination), (header.destination, header.source));
        assert_eq!(ip::tcp_reset(&reset, &answer), None);
    }
}

fn forward(mut packet: Vec<u8>, mtu: usize) {
    let Ok(header) = ip::parse(&packet) else {
        return;
    };
    assert_eq!(header.length, packet.len());
    assert!(header.transport <= packet.len());
    translate(&packet, &header, mtu as u16);
    let own = if header.source.is_ipv4() { [10, 0, 0, 1].into() } else { std::net::Ipv6Addr::LOCALHOST.into() };
    for cause in [IcmpError::TooBig(mtu), IcmpError::NoRoute, IcmpError::Prohibited] {
        let Some(error) = ip::icmp_error(&packet, &header, cause, own) else { continue };
        let told = ip::parse(&error).expect("an ICMP error is a packet");
        assert_eq!((told.source, told.destination), (own, header.source));
        assert!(error.len() <= ip::MIN_MTU_V6);
        assert_eq!(ip::icmp_error(&error, &told, cause, own), None, "no error about an error");
    }
    if header.may_be_cut {
        for fragment in ip::fragment(&packet, &header, mtu) {
            let part = ip::parse(&fragment).expect("a fragment is a packet");
            assert!(fragment.len() <= mtu.max(ip::MIN_MTU_V4));
            assert_eq!(
                (part.source, part.destination, part.protocol),
                (header.source, header.destination, header.protocol)
            );
        }
    }
    ip::clamp_mss(&mut packet, &header, mtu);
    assert!(!ip::clamp_mss(&mut packet, &header, mtu), "once is enough");
}

/// The first byte selects the limit, the next four the sizes of the pieces; the rest is the stream. It must decode to
/// the same frames and the same end, whole or in pieces.
pub fn h3(data: &[u8]) {
    let Some(([limit, sizes @ ..], stream)) = data.split_first_chunk::<5>() else {
        return;
    };
    let limit = usize::from(*limit) * 8;
    let stream = Bytes::copy_from_slice(stream);
    let whole = frames(limit, std::slice::from_ref(&stream));
    assert_eq!(whole, frames(limit, &cut(stream, sizes)), "whole, and in pieces of {sizes:?}");
    for frame in whole.0 {
        match frame {
            Frame::Headers(block) => assert!(block.len() <= limit),
            Frame::Control { payload, .. } => {
                if let Ok(settings) = Settings::parse(&payload) {
                    let mut out = Vec::new();
                    settings.put(&mut out);
                    let (again, end) = frames(0, &[out.into()]);
                    assert_eq!(end, Ok(()));
                    let [Frame::Control { payload, .. }] = &again[..] else { panic!("{again:?}") };
                    assert_eq!(Settings::parse(payload), Ok(settings));
                }
            }
            Frame::Data(data) => assert!(!data.is_empty()),
        }
    }
}

/// Joins the parts of DATA.
fn frames(limit: usize, pieces: &[Bytes]) -> (Vec<Frame>, Result<(), FrameError>) {
    let mut decoder = FrameDecoder::new(limit);
    let mut frames: Vec<Frame> = Vec::new();
    for piece in pieces {
        decoder.push(piece.clone());
        loop {
            match decoder.next() {
                Ok(Some(Frame::Data(more))) if matches!(frames.last(), Some(Frame::Data(_))) => {
                    let Some(Frame::Data(last)) = frames.last_mut() else { continue };
                    *last = [&last[..], &more[..]].concat().into();
                }
                Ok(Some(frame)) => frames.push(frame),
                Ok(None) => break,
                Err(error) => return (frames, Err(error)),
            }
        }
    }
    (frames, decoder.finish())
}

/// More bytes never change a result; `Incomplete` requests more bytes than the input has, within the limit. A parsed
/// header can be encoded and parsed again. The bytes are parsed as they are, and after the signature.
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

/// An accepted value names a trace and a span, and parses the same once rendered.
pub fn traceparent(data: &[u8]) {
    let Ok(parent) = Traceparent::parse(data) else {
        return;
    };
    assert!(parent.trace_id() != 0 && parent.span_id() != 0);
    let rendered = parent.render();
    assert_eq!(rendered[3..52], data[3..52], "identifiers are passed on as they came");
    assert_eq!(parent.to_string().as_bytes(), rendered);
    // For a later version only the flag `sampled` survives; once rendered by us, the value is stable.
    assert_eq!(Traceparent::parse(&rendered), Ok(parent));
}

/// A message that was read means the same whatever follows it and nothing while any of it is
/// missing, and a datagram's header is all that it takes to know where it goes.
pub fn socks5(data: &[u8]) {
    let greeting = Greeting::parse(data);
    if let Ok(Some((greeting, length))) = greeting {
        assert_eq!(Greeting::parse(&data[..length]), Ok(Some((greeting, length))));
        assert_eq!(Greeting::parse(&data[..length - 1]), Ok(None));
    }
    let request = Request::parse(data);
    if let Ok(Some((request, length))) = &request {
        assert_eq!(Request::parse(&data[..*length]), Ok(Some((request.clone(), *length))));
        assert_eq!(Request::parse(&data[..length - 1]), Ok(None));
    }
    if data.len() >= socks5::MAX_MESSAGE {
        assert!(!matches!(greeting, Ok(None)) && !matches!(request, Ok(None)), "it waits for ever");
    }
    if let Ok((header, payload)) = socks5::split_datagram(Bytes::copy_from_slice(data)) {
        assert!(header.len() <= socks5::MAX_DATAGRAM_HEADER);
        assert_eq!([&header[..], &payload].concat(), data);
        assert_eq!(socks5::split_datagram(header.clone()), Ok((header.clone(), Bytes::new())));
        assert!(socks5::datagram_target(&header).is_ok());
    }
}

/// The answers to a parsed question match it and no other id, and no answer parses as a question. The same bytes are also
/// evaluated as another server's answer, and truncated without growing.
pub fn dns(data: &[u8]) {
    let asked = Question::parse(b"\0\x07\x01\0\0\x01\0\0\0\0\0\0\x01a\0\0\x01\0\x01");
    let Ok(asked) = asked else { panic!("a plain question must parse: {asked:?}") };
    if let [high, low, ..] = *data {
        let _ = (asked.is_answered_by(u16::from_be_bytes([high, low]), data), dns::is_failure(data));
        assert!(asked.pass(data.to_vec(), 512).len() <= data.len().clamp(512, 4096));
    }
    let Ok(question) = Question::parse(data) else { return };
    let id = u16::from_be_bytes([data[0], data[1]]);
    let name = question.name();
    for answer in [Answer::Addresses(&[]), Answer::Name("a.b"), Answer::NoSuchName, Answer::Failed] {
        let answer = question.answer(&answer, 1);
        assert!(question.is_answered_by(id, &answer), "{name}: {answer:?}");
        assert!(!question.is_answered_by(!id, &answer));
        assert!(Question::parse(&answer).is_err(), "an answer must not parse as a question");
    }
    let _ = (question.kind(), question.address(), question.room());
}
