//! Properties of the formats in `hermes-ndn`: packets, names and link frames.
//!
//! In: bytes of a peer; for link frames preceded by the bounds of the reassembler. Out: nothing, or a panic.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use hermes_ndn::lp::{Reassembler, ReassemblerConfig, Reliability, ReliabilityConfig};
use hermes_ndn::signature::SigningKey;
use hermes_ndn::tlv::{self, MAX_PACKET};
use hermes_ndn::{Certificate, Data, DataBuilder, Interest, InterestBuilder, LpPacket, Name, Packet};

/// The bytes are read as a packet, as the value of a Name, and as a URI. An accepted packet ends exactly where its header says, and a new packet
/// of its fields decodes to the same fields.
pub fn packets(data: &[u8]) {
    let wire = Bytes::copy_from_slice(data);
    if let Ok(packet) = Packet::decode(wire.clone()) {
        assert_eq!(tlv::packet_length(data, usize::MAX), Ok(Some(data.len())));
        assert!(Packet::decode(wire.slice(..data.len() - 1)).is_err(), "a truncated packet was accepted");
        match packet {
            Packet::Interest(packet) => interest(&packet),
            Packet::Data(packet) => content(packet),
        }
    }
    if let Ok(name) = Name::from_value(wire) {
        check_name(&name);
    }
    if let Some(name) = str::from_utf8(data).ok().and_then(|text| text.parse::<Name>().ok()) {
        check_name(&name);
    }
}

/// A name prints as a URI of the same name, has a unique encoding, and follows its prefixes in the canonical order.
fn check_name(name: &Name) {
    assert!(name.len() <= Name::MAX_COMPONENTS && name.as_bytes().len() <= Name::MAX_LEN);
    assert_eq!(name.to_string().parse().as_ref(), Ok(name));
    let components: Vec<_> = name.components().collect();
    assert_eq!(Name::from_components(&components).as_ref(), Ok(name));
    for count in 0..name.len() {
        let prefix = name.prefix(count);
        assert!(prefix.is_prefix_of(name) && !name.is_prefix_of(&prefix) && prefix < *name);
        assert_eq!(prefix.as_bytes(), name.prefix_bytes(count));
    }
}

fn interest(interest: &Interest) {
    check_name(interest.name());
    if let Some(next) = interest.decremented() {
        assert_eq!(Interest::decode(next.wire().clone()).as_ref(), Ok(&next));
        assert_eq!(next.hop_limit(), interest.hop_limit().map(|limit| limit - 1));
    }
    if interest.wire().len() + 6 <= MAX_PACKET {
        let nonce = interest.with_nonce([1; 4]).expect("six more bytes fit");
        assert_eq!(nonce.nonce(), Some([1; 4]));
        assert_eq!(fields(&nonce), fields(interest));
    }
    let builder = InterestBuilder::new(interest.name().clone())
        .can_be_prefix(interest.can_be_prefix())
        .must_be_fresh(interest.must_be_fresh())
        .forwarding_hint(interest.forwarding_hint().to_vec());
    let builder = interest.nonce().into_iter().fold(builder, InterestBuilder::nonce);
    let builder = interest.lifetime().into_iter().fold(builder, InterestBuilder::lifetime);
    let builder = interest.hop_limit().into_iter().fold(builder, InterestBuilder::hop_limit);
    let parameters = interest.application_parameters().cloned();
    let builder = parameters.into_iter().fold(builder, InterestBuilder::application_parameters);
    if let Ok(built) = builder.build() {
        assert_eq!(fields(&built), fields(interest));
        assert_eq!((built.nonce(), built.hop_limit()), (interest.nonce(), interest.hop_limit()));
    }
}

/// The fields that a forwarder must not change, except the parameters digest, which also covers unknown elements.
fn fields(interest: &Interest) -> (bool, bool, Vec<Name>, Option<Duration>, Option<Bytes>) {
    (
        interest.can_be_prefix(),
        interest.must_be_fresh(),
        interest.forwarding_hint().to_vec(),
        interest.lifetime(),
        interest.application_parameters().cloned(),
    )
}

fn content(data: Data) {
    check_name(data.name());
    let builder =
        DataBuilder::new(data.name().clone()).content_type(data.content_type()).content(data.content().clone());
    let builder = data.freshness_period().into_iter().fold(builder, DataBuilder::freshness_period);
    let builder = data.final_block_id().cloned().into_iter().fold(builder, DataBuilder::final_block_id);
    if let Ok(built) = builder.sign(&SigningKey::digest()) {
        assert_eq!(built.name(), data.name());
        assert_eq!(built.content(), data.content());
        assert_eq!(built.content_type(), data.content_type());
        assert_eq!(built.freshness_period(), data.freshness_period());
        assert_eq!(built.final_block_id(), data.final_block_id());
    }
    let mut info = BytesMut::new();
    data.signature_info().encode(tlv::types::SIGNATURE_INFO, &mut info);
    let info = info.freeze();
    let element = tlv::Reader::new(&info).only(tlv::types::SIGNATURE_INFO).expect("just encoded");
    assert_eq!(hermes_ndn::SignatureInfo::decode(&element).as_ref(), Ok(data.signature_info()));
    if let Ok(certificate) = Certificate::parse(data) {
        assert!(certificate.identity().is_prefix_of(certificate.name()));
    }
}

/// The first two bytes are the bounds of the reassembler, and each frame follows a byte with its length. An accepted
/// frame encodes to a frame with the same meaning. The state of the receiver stays within its bounds.
pub fn frames(data: &[u8]) {
    let Some(([partials, kilobytes], mut rest)) = data.split_first_chunk::<2>() else {
        return;
    };
    let config = ReassemblerConfig {
        max_partials: usize::from(*partials % 8),
        max_bytes: usize::from(*kilobytes) * 16,
        timeout: Duration::from_millis(20),
        ..ReassemblerConfig::default()
    };
    let mut reassembler = Reassembler::new(config);
    let settings = ReliabilityConfig { max_unacked: 8, max_received: 8, ..ReliabilityConfig::default() };
    let mut reliability = Reliability::new(settings, 0);
    let mut now = Duration::ZERO;
    while let Some((length, tail)) = rest.split_first() {
        let (frame, tail) = tail.split_at(tail.len().min(usize::from(*length)));
        rest = tail;
        now += Duration::from_millis(3);
        let Ok(frame) = LpPacket::decode(Bytes::copy_from_slice(frame)) else {
            continue;
        };
        let wire = frame.encode();
        assert_eq!(wire.len(), frame.encoded_len());
        assert_eq!(LpPacket::decode(wire).as_ref(), Ok(&frame));
        if frame.tx_sequence.is_none() {
            reliability.send(vec![frame.clone()], 1200, now);
        }
        if reliability.receive(&frame, now)
            && let Some(packet) = reassembler.push(frame, now)
        {
            assert_eq!(packet.frag_count, 1);
            assert!(packet.payload.is_some());
        }
        let (count, bytes) = reassembler.held();
        assert!(count <= config.max_partials && bytes <= config.max_bytes, "{count} packets, {bytes} bytes");
        assert!(reliability.outstanding() <= settings.max_unacked);
    }
    drain(&mut reassembler, &mut reliability);
}

/// All state expires if the peer is silent.
fn drain(reassembler: &mut Reassembler, reliability: &mut Reliability) {
    for _ in 0..1000 {
        let Some(next) = reliability.next_timeout().into_iter().chain(reassembler.next_timeout()).min() else {
            break;
        };
        reassembler.expire(next);
        while reliability.poll(1200, next).is_some() {}
    }
    assert_eq!(reassembler.held(), (0, 0));
    assert_eq!((reliability.outstanding(), reliability.next_timeout()), (0, None));
}
