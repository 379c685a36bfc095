//! Tests of packets: fields there and back, signatures, and what is refused.

#![allow(clippy::unwrap_used)]

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, Ed25519KeyPair, KeyPair as _};
use proptest::prelude::*;

use super::*;
use crate::signature::{VerifyingKey, digest_matches};

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

#[test]
fn an_interest_is_read_as_it_was_written() {
    let interest = Interest {
        can_be_prefix: true,
        must_be_fresh: true,
        forwarding_hint: vec![name("/hint/a"), name("/hint/b")],
        nonce: Some([1, 2, 3, 4]),
        lifetime: Some(Duration::from_millis(4321)),
        hop_limit: Some(9),
        ..Interest::new(name("/org/dev/file"))
    };
    assert_eq!(Packet::decode(interest.encode()), Ok(Packet::Interest(interest.clone())));
    let Packet::Interest(read) = Packet::decode(interest.encode_parameters(b"x=1")).unwrap() else { panic!() };
    assert_eq!(read.parameters.as_deref(), Some(&b"x=1"[..]));
    assert_eq!(read.name.parent(), interest.name);
}

#[test]
fn changed_parameters_are_refused() {
    let packet = Interest::new(name("/a")).encode_parameters(b"parameters");
    let mut bytes = packet.to_vec();
    *bytes.last_mut().unwrap() ^= 1;
    assert_eq!(Packet::decode(bytes.into()), Err(NdnError::Invalid("digest of the parameters")));
    let digest = format!("/a/params-sha256={}", "00".repeat(32));
    let without = Interest::new(name(&digest)).encode();
    assert_eq!(Packet::decode(without), Err(NdnError::Missing("parameters of the digest in the name")));
}

fn signers() -> Vec<(Signer, Option<VerifyingKey>)> {
    let key = || name("/alice/KEY/1");
    let random = SystemRandom::new();
    let ecdsa = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, &random).unwrap();
    let ecdsa_pair = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, ecdsa.as_ref()).unwrap();
    let ed25519 = Ed25519KeyPair::generate_pkcs8(&random).unwrap();
    let ed25519_pair = Ed25519KeyPair::from_pkcs8(ed25519.as_ref()).unwrap();
    let public = |bytes: &[u8]| Some(VerifyingKey::Public(Bytes::copy_from_slice(bytes)));
    vec![
        (Signer::digest(), None),
        (Signer::hmac(b"secret", key()), Some(VerifyingKey::Secret(Bytes::from_static(b"secret")))),
        (Signer::from_pkcs8(ecdsa.as_ref(), key()).unwrap(), public(ecdsa_pair.public_key().as_ref())),
        (Signer::from_pkcs8(ed25519.as_ref(), key()).unwrap(), public(ed25519_pair.public_key().as_ref())),
    ]
}

#[test]
fn signatures_verify_until_a_byte_changes() {
    for (signer, key) in signers() {
        let is_valid = |signature: &Signature| match &key {
            Some(key) => key.verifies(signature),
            None => digest_matches(signature),
        };
        let builder = DataBuilder {
            name: name("/org/dev/file/v=1/seg=0"),
            freshness: Some(Duration::from_secs(10)),
            final_block: Some(Component::numbered(types::SEGMENT, 7)),
            content_type: 0,
        };
        let packet = builder.sign(b"content", &signer).unwrap();
        let data = Data::decode(packet.clone()).unwrap();
        assert_eq!(
            (&data.name, &data.freshness, &data.final_block),
            (&builder.name, &builder.freshness, &builder.final_block)
        );
        assert_eq!((&data.content[..], &data.packet), (&b"content"[..], &packet));
        assert!(is_valid(&data.signature), "{signer:?}");
        let at = packet.windows(7).position(|window| window == b"content").unwrap();
        let mut changed = packet.to_vec();
        changed[at] ^= 1;
        assert!(!is_valid(&Data::decode(changed.into()).unwrap().signature), "{signer:?}");
        let signed = Interest::new(name("/cmd")).encode_signed(b"do", &signer).unwrap();
        let Packet::Interest(signed) = Packet::decode(signed).unwrap() else { panic!() };
        assert!(is_valid(&signed.signature.unwrap()), "{signer:?}");
    }
}

#[test]
fn data_answers_by_name_prefix_or_digest() {
    let packet = DataBuilder { name: name("/a/b"), ..DataBuilder::default() }.sign(b"", &Signer::digest()).unwrap();
    let data = Data::decode(packet).unwrap();
    let by = |text: &str, can_be_prefix| data.answers(&Interest { can_be_prefix, ..Interest::new(name(text)) });
    assert!(by("/a/b", false) && by("/a", true) && !by("/a", false) && !by("/a/b/c", true));
    let digest = data.name.child(&Component::new(types::IMPLICIT_DIGEST, &data.digest()));
    assert!(data.answers(&Interest::new(digest)));
    let other = data.name.child(&Component::new(types::IMPLICIT_DIGEST, &[0; 32]));
    assert!(!data.answers(&Interest::new(other)));
}

proptest! {
    #[test]
    fn garbage_is_an_error_and_never_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = Packet::decode(bytes.clone().into());
        let _ = name_of(bytes.into());
    }

    /// A changed byte may hit anything, but never the decoder.
    #[test]
    fn a_changed_packet_is_read_or_refused(at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let interest = Interest { nonce: Some([1; 4]), ..Interest::new(name("/a/b/seg=1")) };
        for packet in [interest.encode_parameters(b"parameters"), interest.encode()] {
            let mut bytes = packet.to_vec();
            let at = at.index(bytes.len());
            bytes[at] = byte;
            let _ = Packet::decode(bytes.into());
        }
    }
}
