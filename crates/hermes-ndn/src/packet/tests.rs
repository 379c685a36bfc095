//! Tests of packets: round trips of every field, the evolvability rules, digests and signatures.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use bytes::BytesMut;
use proptest::prelude::*;

use super::*;
use crate::name::{Component, Name, PARAMETERS_DIGEST};
use crate::signature::{SigningKey, VerifyingKey};
use crate::tlv;

fn name(uri: &str) -> Name {
    uri.parse().unwrap()
}

/// An Interest for `/a` with these elements after the name.
fn interest(tail: &[u8]) -> Result<Interest, PacketError> {
    let mut value = vec![7, 3, 8, 1, b'a'];
    value.extend_from_slice(tail);
    let mut out = BytesMut::new();
    tlv::put(&mut out, types::INTEREST, &value);
    Interest::decode(out.freeze())
}

/// A Data for `/a` with these elements after the name.
fn data(tail: &[u8]) -> Result<Data, PacketError> {
    let mut value = vec![7, 3, 8, 1, b'a'];
    value.extend_from_slice(tail);
    let mut out = BytesMut::new();
    tlv::put(&mut out, types::DATA, &value);
    Data::decode(out.freeze())
}

fn full() -> InterestBuilder {
    InterestBuilder::new(name("/a/b"))
        .can_be_prefix(true)
        .must_be_fresh(true)
        .forwarding_hint(vec![name("/x"), name("/y/z")])
        .nonce([1, 2, 3, 4])
        .lifetime(Duration::from_millis(300))
        .hop_limit(2)
}

#[test]
fn interests_keep_every_field() {
    let interest = full().application_parameters("hello").build().unwrap();
    assert!(interest.can_be_prefix() && interest.must_be_fresh());
    assert_eq!(interest.forwarding_hint(), [name("/x"), name("/y/z")]);
    assert_eq!(interest.nonce(), Some([1, 2, 3, 4]));
    assert_eq!(interest.lifetime(), Some(Duration::from_millis(300)));
    assert_eq!(interest.hop_limit(), Some(2));
    assert_eq!(interest.application_parameters().unwrap(), "hello");
    assert_eq!(interest.name().prefix(2), name("/a/b"));
    assert_eq!(interest.name().last().unwrap().kind(), PARAMETERS_DIGEST);
    assert_eq!(Packet::decode(interest.wire().clone()), Ok(Packet::Interest(interest)));
}

#[test]
fn the_smallest_interest_has_defaults() {
    let interest = interest(&[]).unwrap();
    assert_eq!(interest, InterestBuilder::new(name("/a")).build().unwrap());
    assert_eq!(interest.lifetime_or_default(), Interest::DEFAULT_LIFETIME);
    assert_eq!((interest.nonce(), interest.hop_limit()), (None, None));
}

#[test]
fn malformed_interests_are_rejected() {
    let bad = |kind, length| PacketError::Tlv(TlvError::BadLength { kind, length });
    for (tail, error) in [
        (&[33, 1, 0][..], bad(33, 1)),
        (&[10, 3, 0, 0, 0], bad(10, 3)),
        (&[12, 3, 0, 0, 0], bad(12, 3)),
        (&[34, 2, 0, 0], bad(34, 2)),
        (&[30, 0], TlvError::Missing(types::NAME).into()),
        (&[30, 2, 31, 0], TlvError::Critical(31).into()),
        (&[18, 0, 33, 0], TlvError::Critical(33).into()),
        (&[10, 4, 0, 0, 0, 0, 10, 4, 0, 0, 0, 0], TlvError::Critical(10).into()),
        (&[9, 0], TlvError::Critical(9).into()),
        (&[36, 0], PacketError::ParametersDigest),
        (&[18], TlvError::Truncated.into()),
        (&[18, 253, 0, 0], TlvError::NotShortest.into()),
    ] {
        assert_eq!(interest(tail), Err(error), "{tail:?}");
    }
    let decode = |bytes: &'static [u8]| Packet::decode(Bytes::from_static(bytes));
    assert_eq!(decode(&[5, 2, 7, 0]), Err(PacketError::EmptyName));
    assert_eq!(decode(&[5, 0]), Err(TlvError::Missing(types::NAME).into()));
    assert_eq!(decode(&[5, 5, 7, 3, 8, 1, b'a', 0]), Err(TlvError::Trailing(1).into()));
    assert_eq!(decode(&[100, 0]), Err(PacketError::UnknownPacket(100)));
    assert_eq!(decode(&[]), Err(TlvError::Truncated.into()));
}

#[test]
fn elements_that_are_not_critical_are_ignored() {
    // An unknown element, a hop limit out of order, and a signature without parameters.
    let interest = interest(&[200, 1, 0, 34, 1, 9, 34, 1, 1, 44, 3, 27, 1, 0]).unwrap();
    assert_eq!(interest.hop_limit(), Some(9));
    assert!(interest.signature_info().is_none());
    let data = data(&[200, 0, 22, 3, 27, 1, 0, 23, 0, 202, 0]).unwrap();
    assert_eq!(data.signed_portion(), [7, 3, 8, 1, b'a', 200, 0, 22, 3, 27, 1, 0]);
}

#[test]
fn an_unexpected_parameters_digest_is_rejected() {
    let digest = Component::parameters_digest([0; 32]);
    let plain = InterestBuilder::new(Name::from_components([&digest]).unwrap());
    assert_eq!(plain.build(), Err(PacketError::ParametersDigest));
    let twice = Name::from_components([&digest, &digest]).unwrap();
    let twice = InterestBuilder::new(twice).application_parameters("x");
    assert_eq!(twice.build(), Err(PacketError::ParametersDigest));
    // A digest in the middle keeps its place.
    let middle = Name::from_components([&digest, &Component::generic("a")]).unwrap();
    let interest = InterestBuilder::new(middle).application_parameters("x").build().unwrap();
    assert_eq!(interest.name().get(0).unwrap().kind(), PARAMETERS_DIGEST);
    let mut wire = interest.wire().to_vec();
    *wire.last_mut().unwrap() ^= 1;
    assert_eq!(Interest::decode(wire.into()), Err(PacketError::ParametersDigest));
}

#[test]
fn hop_by_hop_fields_change_alone() {
    let interest = full().build().unwrap();
    let one = interest.decremented().unwrap();
    assert_eq!(one, full().hop_limit(1).build().unwrap());
    assert_eq!(Interest::decode(one.wire().clone()).unwrap().hop_limit(), Some(1));
    let zero = one.decremented().unwrap();
    assert_eq!(zero.hop_limit(), Some(0));
    assert!(zero.decremented().is_none());
    assert_eq!(interest.with_nonce([9; 4]).unwrap(), full().nonce([9; 4]).build().unwrap());
    let bare = InterestBuilder::new(name("/a")).must_be_fresh(true).hop_limit(3);
    let expected = bare.clone().nonce([7; 4]).build().unwrap();
    assert_eq!(bare.build().unwrap().with_nonce([7; 4]).unwrap(), expected);
    let unlimited = InterestBuilder::new(name("/a")).build().unwrap();
    assert_eq!(unlimited.decremented(), Some(unlimited));
}

#[test]
fn data_keeps_every_field() {
    let data = DataBuilder::new(name("/a/v=1/seg=0"))
        .content_type(ContentType(1024))
        .freshness_period(Duration::from_secs(10))
        .final_block_id(Component::segment(3))
        .content("payload")
        .sign(&SigningKey::digest())
        .unwrap();
    assert_eq!(data.content_type(), ContentType(1024));
    assert_eq!(data.freshness_period(), Some(Duration::from_secs(10)));
    assert_eq!(data.final_block_id(), Some(&Component::segment(3)));
    assert_eq!(data.content(), "payload");
    data.verify(&VerifyingKey::digest()).unwrap();
    assert_eq!(Packet::decode(data.wire().clone()), Ok(Packet::Data(data)));
}

#[test]
fn malformed_data_is_rejected() {
    for (tail, error) in [
        (&[][..], TlvError::Missing(types::SIGNATURE_INFO)),
        (&[22, 3, 27, 1, 0], TlvError::Missing(types::SIGNATURE_VALUE)),
        (&[23, 0, 22, 3, 27, 1, 0], TlvError::Critical(23)),
        (&[21, 0, 20, 0, 22, 3, 27, 1, 0, 23, 0], TlvError::Critical(20)),
        (&[20, 0, 20, 0, 22, 3, 27, 1, 0, 23, 0], TlvError::Critical(20)),
        (&[20, 2, 26, 0, 22, 3, 27, 1, 0, 23, 0], TlvError::Missing(types::GENERIC_COMPONENT)),
        (&[20, 6, 25, 1, 0, 24, 1, 0], TlvError::Critical(24)),
        (&[22, 3, 27, 1, 0, 23, 0, 23, 0], TlvError::Critical(23)),
    ] {
        let error = match error {
            TlvError::Missing(types::GENERIC_COMPONENT) => PacketError::Name(NameError::Tlv(error)),
            error => error.into(),
        };
        assert_eq!(data(tail), Err(error), "{tail:?}");
    }
}

#[test]
fn packets_stay_below_the_maximum() {
    let data = |length: usize| DataBuilder::new(name("/a")).content(vec![0; length]).sign(&SigningKey::digest());
    let overhead = data(8000).unwrap().wire().len() - 8000;
    assert_eq!(data(tlv::MAX_PACKET - overhead).unwrap().wire().len(), tlv::MAX_PACKET);
    assert_eq!(data(tlv::MAX_PACKET - overhead + 1), Err(PacketError::TooLong(tlv::MAX_PACKET + 1)));
}

#[test]
fn interests_match_data_by_name_and_digest() {
    let data = DataBuilder::new(name("/a/b")).sign(&SigningKey::digest()).unwrap();
    let matches = |interest: &InterestBuilder| interest.build().unwrap().matches(&data);
    let exact = |name: Name| InterestBuilder::new(name);
    assert!(matches(&exact(name("/a/b"))));
    assert!(!matches(&exact(name("/a"))));
    assert!(matches(&exact(name("/a")).can_be_prefix(true)));
    assert!(!matches(&exact(name("/a/b/c")).can_be_prefix(true)));
    assert!(matches(&exact(data.full_name().unwrap())));
    let other = name("/a/b").push(&Component::implicit_digest([0; 32])).unwrap();
    assert!(!matches(&exact(other).can_be_prefix(true)));
}

#[test]
fn signed_interests_verify_until_they_change() {
    let key = SigningKey::hmac(b"secret");
    let interest = full().signature_nonce("12345678").signature_time(5).signature_sequence(6).sign(&key).unwrap();
    let info = interest.signature_info().unwrap();
    assert_eq!((info.time, info.sequence), (Some(5), Some(6)));
    interest.verify(&VerifyingKey::hmac(b"secret")).unwrap();
    assert_eq!(interest.verify(&VerifyingKey::hmac(b"other")), Err(SignatureError::Invalid));
    let mismatch = SignatureError::Mismatch { signature: 4, key: 0 };
    assert_eq!(interest.verify(&VerifyingKey::digest()), Err(mismatch));
    // Hop-by-hop fields are not signed.
    interest.decremented().unwrap().verify(&key.verifying_key().unwrap()).unwrap();
    assert_eq!(full().build().unwrap().verify(&VerifyingKey::digest()), Err(SignatureError::Unsigned));
}

#[test]
fn asymmetric_signatures_verify_until_the_data_changes() {
    let pkcs8 = SigningKey::generate_p256().unwrap();
    let key = SigningKey::from_pkcs8(&pkcs8).unwrap();
    let data = DataBuilder::new(name("/a")).content("x").sign(&key).unwrap();
    let verifying = VerifyingKey::from_spki(&key.public_key().unwrap()).unwrap();
    data.verify(&verifying).unwrap();
    let mut wire = data.wire().to_vec();
    wire[6] ^= 1;
    assert_eq!(Data::decode(wire.into()).unwrap().verify(&verifying), Err(SignatureError::Invalid));
    assert_eq!(SigningKey::from_pkcs8(b"").unwrap_err(), KeyError::Algorithm);
    assert_eq!(SigningKey::from_pkcs8(&pkcs8[..60]).unwrap_err(), KeyError::Invalid);
}

proptest! {
    #[test]
    fn any_bytes_are_decoded_without_a_panic(bytes: Vec<u8>, kind in 5..7u8) {
        let mut packet = vec![kind, bytes.len().min(250) as u8];
        packet.extend_from_slice(&bytes[..bytes.len().min(250)]);
        let _ = Packet::decode(packet.into());
        let _ = Packet::decode(bytes.into());
    }
}
