//! Vectors of two other implementations: python-ndn (`vectors/make.py`) and NDNts (`vectors/make.mjs`).
//!
//! In: packets, certificates and frames of these libraries, with their fields and keys. Out: a failure that names the
//! vector. Each packet must decode to the same fields, verify, and encode to the same bytes again. ECDSA signatures are
//! random, so that those packets are compared up to the signature.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use hermes_ndn::lp::{NackReason, Reassembler, ReassemblerConfig};
use hermes_ndn::packet::ContentType;
use hermes_ndn::signature::SignatureType;
use hermes_ndn::{
    Certificate, Component, Data, DataBuilder, Interest, InterestBuilder, KeyLocator, LpPacket, Name, Packet,
    SigningKey, VerifyingKey,
};
use serde_json::Value;

fn read(file: &str) -> Value {
    let path = format!("{}/tests/vectors/{file}.json", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// The entries of a section of both files.
fn entries(section: &str) -> Vec<Value> {
    let all: Vec<Value> = ["python", "javascript"]
        .iter()
        .flat_map(|file| read(file)[section].as_array().cloned().unwrap_or_default())
        .collect();
    assert!(all.len() > 3, "{section} is nearly empty");
    all
}

fn hex(value: &Value) -> Bytes {
    let text = value.as_str().unwrap();
    (0..text.len() / 2).map(|index| u8::from_str_radix(&text[2 * index..2 * index + 2], 16).unwrap()).collect()
}

fn optional_hex(value: &Value) -> Option<Bytes> {
    value.is_string().then(|| hex(value))
}

fn uri(value: &Value) -> Name {
    value.as_str().unwrap().parse().unwrap()
}

/// The name of an entry, as a URI or as an encoded name.
fn name(entry: &Value) -> Name {
    match optional_hex(&entry["name_wire"]) {
        Some(wire) => decode_name(wire),
        None => uri(&entry["name"]),
    }
}

fn decode_name(wire: Bytes) -> Name {
    Name::from_value(hermes_ndn::tlv::Reader::new(&wire).only(7).unwrap().value_bytes()).unwrap()
}

fn locator(entry: &Value) -> Option<KeyLocator> {
    entry["locator"].is_string().then(|| KeyLocator::Name(uri(&entry["locator"])))
}

fn signing_key(entry: &Value) -> Option<SigningKey> {
    let keys = read("keys");
    let kind = entry["key"].as_str()?;
    let key = match kind {
        "digest" => SigningKey::digest(),
        "hmac" => SigningKey::hmac(&hex(&keys["hmac"]["secret"])),
        _ => SigningKey::from_pkcs8(&hex(&keys[kind]["pkcs8"])).unwrap(),
    };
    Some(locator(entry).into_iter().fold(key, SigningKey::with_locator))
}

fn verifying_key(kind: &str) -> VerifyingKey {
    let keys = read("keys");
    match kind {
        "digest" => VerifyingKey::digest(),
        "hmac" => VerifyingKey::hmac(&hex(&keys["hmac"]["secret"])),
        _ => VerifyingKey::from_spki(&hex(&keys[kind]["spki"])).unwrap(),
    }
}

#[test]
fn names_match_their_uris() {
    for entry in entries("names") {
        let name = uri(&entry["uri"]);
        let mut out = BytesMut::new();
        name.encode(&mut out);
        assert_eq!(out, hex(&entry["wire"]), "{name}");
        assert_eq!(decode_name(out.freeze()), name);
        assert_eq!(name.to_string(), entry["uri"].as_str().unwrap());
    }
}

#[test]
fn interests_match() {
    for entry in entries("interests") {
        let interest = Interest::decode(hex(&entry["wire"])).unwrap();
        assert_eq!(interest.name(), &name(&entry), "{entry}");
        assert_eq!(interest.can_be_prefix(), entry["can_be_prefix"].as_bool().unwrap());
        assert_eq!(interest.must_be_fresh(), entry["must_be_fresh"].as_bool().unwrap());
        let hint: Vec<Name> = entry["forwarding_hint"].as_array().unwrap().iter().map(uri).collect();
        assert_eq!(interest.forwarding_hint(), hint);
        assert_eq!(interest.nonce().map(|nonce| nonce.to_vec().into()), optional_hex(&entry["nonce"]));
        assert_eq!(interest.lifetime(), entry["lifetime"].as_u64().map(Duration::from_millis));
        assert_eq!(interest.hop_limit().map(u64::from), entry["hop_limit"].as_u64());
        if !entry["key"].is_string() {
            assert_eq!(interest.application_parameters().cloned(), optional_hex(&entry["parameters"]));
        }
        if let Some(key) = entry["key"].as_str() {
            interest.verify(&verifying_key(key)).unwrap_or_else(|error| panic!("{key}: {error}"));
            let info = interest.signature_info().unwrap();
            assert_eq!(info.key_locator, locator(&entry));
            if !entry["signature_time"].is_null() {
                assert_eq!(info.time, entry["signature_time"].as_u64());
                assert_eq!(info.sequence, entry["signature_sequence"].as_u64());
                assert_eq!(info.nonce, optional_hex(&entry["signature_nonce"]));
            }
        }
        same_interest(&interest, signing_key(&entry));
    }
}

/// Builds the Interest from its decoded fields.
fn same_interest(interest: &Interest, key: Option<SigningKey>) {
    let builder = InterestBuilder::new(interest.name().clone())
        .can_be_prefix(interest.can_be_prefix())
        .must_be_fresh(interest.must_be_fresh())
        .forwarding_hint(interest.forwarding_hint().to_vec());
    let builder = interest.nonce().into_iter().fold(builder, InterestBuilder::nonce);
    let builder = interest.lifetime().into_iter().fold(builder, InterestBuilder::lifetime);
    let builder = interest.hop_limit().into_iter().fold(builder, InterestBuilder::hop_limit);
    let parameters = interest.application_parameters().cloned();
    let builder = parameters.into_iter().fold(builder, InterestBuilder::application_parameters);
    let Some(key) = key else {
        assert_eq!(&builder.build().unwrap(), interest);
        return;
    };
    let info = interest.signature_info().unwrap();
    let builder = info.nonce.clone().into_iter().fold(builder, InterestBuilder::signature_nonce);
    let builder = info.time.into_iter().fold(builder, InterestBuilder::signature_time);
    let builder = info.sequence.into_iter().fold(builder, InterestBuilder::signature_sequence);
    let built = builder.sign(&key).unwrap();
    if key.signature_type() == SignatureType::SHA256_WITH_ECDSA {
        assert_eq!(built.signed_portion(), interest.signed_portion());
    } else {
        assert_eq!(&built, interest);
    }
}

#[test]
fn data_matches() {
    for entry in entries("data") {
        let data = Data::decode(hex(&entry["wire"])).unwrap();
        let kind = entry["key"].as_str().unwrap();
        assert_eq!(data.name(), &name(&entry));
        assert_eq!(data.content_type().0, entry["content_type"].as_u64().unwrap());
        assert_eq!(data.freshness_period(), entry["freshness"].as_u64().map(Duration::from_millis));
        let last: Option<Component> = entry["final"].as_str().map(|component| component.parse().unwrap());
        assert_eq!(data.final_block_id(), last.as_ref());
        assert_eq!(data.content(), &hex(&entry["content"]));
        assert_eq!(data.signature_info().key_locator, locator(&entry));
        assert_eq!(data.digest()[..], hex(&entry["digest"])[..]);
        data.verify(&verifying_key(kind)).unwrap_or_else(|error| panic!("{kind}: {error}"));
        assert_eq!(Packet::decode(data.wire().clone()), Ok(Packet::Data(data.clone())));
        same_data(&data, &signing_key(&entry).unwrap());
    }
}

/// Builds the Data from its decoded fields. An empty content may be absent or an empty element.
fn same_data(data: &Data, key: &SigningKey) {
    let builder = DataBuilder::new(data.name().clone()).content_type(data.content_type());
    let builder = data.freshness_period().into_iter().fold(builder, DataBuilder::freshness_period);
    let builder = data.final_block_id().cloned().into_iter().fold(builder, DataBuilder::final_block_id);
    let absent = builder.sign(key).unwrap();
    let present = builder.content(data.content().clone()).sign(key).unwrap();
    let candidates = if data.content().is_empty() { vec![absent, present] } else { vec![present] };
    if key.signature_type() == SignatureType::SHA256_WITH_ECDSA {
        assert!(candidates.iter().any(|built| built.signed_portion() == data.signed_portion()), "{}", data.name());
    } else {
        assert!(candidates.contains(data), "{}", data.name());
    }
}

#[test]
fn certificates_parse_and_check() {
    for entry in entries("certificates") {
        let data = Data::decode(hex(&entry["wire"])).unwrap();
        let certificate = Certificate::parse(data).unwrap();
        assert_eq!(certificate.name(), &name(&entry));
        assert_eq!(certificate.identity(), uri(&entry["identity"]));
        assert_eq!(certificate.data().content_type(), ContentType::KEY);
        let validity = certificate.validity();
        let (start, end) = (entry["not_before"].as_u64().unwrap(), entry["not_after"].as_u64().unwrap());
        assert_eq!((validity.not_before, validity.not_after), (start, end));
        assert_eq!(certificate.is_self_signed(), entry["self_signed"].as_bool().unwrap());
        let expected = verifying_key(entry["key"].as_str().unwrap());
        assert_eq!(certificate.key().signature_type(), expected.signature_type());
        let issuer = verifying_key(entry["issuer"].as_str().unwrap());
        certificate.check(&issuer, start).unwrap();
        certificate.check(&issuer, end + 1).unwrap_err();
    }
}

#[test]
fn frames_match_and_reassemble() {
    for entry in entries("frames") {
        let mut reassembler = Reassembler::new(ReassemblerConfig::default());
        let mut whole = None;
        for wire in entry["frames"].as_array().unwrap() {
            let frame = LpPacket::decode(hex(wire)).unwrap();
            assert_eq!(frame.encode(), hex(wire));
            assert_eq!(whole, None, "a fragment follows the last one");
            whole = reassembler.push(frame, Duration::ZERO);
        }
        let whole = whole.unwrap();
        assert_eq!(whole.payload, Some(hex(&entry["packet"])));
        assert_eq!(whole.nack, entry["nack"].as_u64().map(NackReason));
        assert_eq!(whole.pit_token, optional_hex(&entry["pit_token"]));
        assert_eq!(whole.congestion_mark, entry["congestion_mark"].as_u64());
        Packet::decode(hex(&entry["packet"])).unwrap();
    }
}

#[test]
fn malformed_packets_are_rejected() {
    for entry in entries("malformed") {
        assert!(Packet::decode(hex(&entry["wire"])).is_err(), "{entry}");
    }
}

#[test]
fn every_truncation_and_every_changed_byte_is_noticed() {
    for entry in entries("data").iter().filter(|entry| entry["wire"].as_str().unwrap().len() < 1000) {
        let wire = hex(&entry["wire"]);
        let key = verifying_key(entry["key"].as_str().unwrap());
        for index in 0..wire.len() {
            assert!(Packet::decode(wire.slice(..index)).is_err(), "{index} bytes of {entry}");
            let mut changed = wire.to_vec();
            changed[index] ^= 1;
            // An ignorable element may change outside the signed portion; these packets have none.
            let accepted = Data::decode(changed.into()).is_ok_and(|data| data.verify(&key).is_ok());
            assert!(!accepted, "byte {index} of {entry}");
        }
    }
}
