//! Packets that other codecs made (`vectors/`): python-ndn 0.5.2 and @ndn/packet. They decode to what they contain,
//! verify, and encode to the same bytes where the field order is fixed.

#![allow(clippy::unwrap_used)]

use std::time::Duration;

use bytes::Bytes;
use hermes_ndn::name::types;
use hermes_ndn::signature::{Signature, SignatureType, VerifyingKey, digest_matches};
use hermes_ndn::{Interest, Name, Packet};
use serde_json::Value;

fn bytes(text: &str) -> Bytes {
    let digit = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
    (0..text.len()).step_by(2).map(digit).collect()
}

fn is_valid(signature: &Signature, vector: &Value) -> bool {
    let key = vector["key"].as_str().map(bytes);
    match (vector["signature"].as_str().unwrap(), key) {
        ("digest", None) => digest_matches(signature),
        ("hmac", Some(secret)) => VerifyingKey::Secret(secret).verifies(signature),
        (_, Some(spki)) => VerifyingKey::Public(spki).verifies(signature),
        other => panic!("{other:?}"),
    }
}

fn check(vector: &Value) {
    let packet = bytes(vector["packet"].as_str().unwrap());
    let name: Name = vector["name"].as_str().unwrap().parse().unwrap();
    match Packet::decode(packet.clone()).unwrap() {
        Packet::Data(data) => {
            assert_eq!((&data.name, data.content.len() as u64), (&name, vector["content"].as_u64().unwrap()));
            let last = data.final_block.as_ref().map(|last| format!("/{last}"));
            assert_eq!(last.as_deref(), vector["final"].as_str());
            assert_eq!(data.freshness, last.map(|_| Duration::from_secs(10)));
            assert!(is_valid(&data.signature, vector), "{vector}");
            // Each changed byte of the signed part is noticed.
            for at in (0..data.signature.covered[0].len()).step_by(97) {
                let mut covered = data.signature.covered[0].to_vec();
                covered[at] ^= 1;
                let changed = Signature { covered: vec![covered.into()], ..data.signature.clone() };
                assert!(!is_valid(&changed, vector), "{vector}");
            }
            assert!(!matches!(data.signature.info.kind, SignatureType::Other(_)));
        }
        Packet::Interest(interest) => {
            let own: Name = interest.name.components().filter(|part| part.kind() != types::PARAMETERS_DIGEST).collect();
            assert_eq!(own, name);
            let parameters = interest.parameters.as_ref().map(|parameters| parameters.len() as u64);
            assert_eq!(parameters, vector["parameters"].as_u64());
            match &interest.signature {
                Some(signature) => assert!(is_valid(signature, vector), "{vector}"),
                None => {
                    let plain = Interest {
                        can_be_prefix: true,
                        must_be_fresh: true,
                        nonce: Some([1, 2, 3, 4]),
                        lifetime: Some(Duration::from_secs(6)),
                        hop_limit: Some(5),
                        forwarding_hint: vec!["/h".parse().unwrap()],
                        ..Interest::new(name)
                    };
                    assert_eq!((&interest, plain.encode()), (&plain, packet));
                }
            }
        }
    }
}

#[test]
fn packets_of_python_ndn() {
    let vectors: Vec<Value> = serde_json::from_str(include_str!("vectors/python-ndn.json")).unwrap();
    assert_eq!(vectors.len(), 22);
    vectors.iter().for_each(check);
}

#[test]
fn packets_of_ndnts() {
    let vectors: Vec<Value> = serde_json::from_str(include_str!("vectors/ndnts.json")).unwrap();
    assert_eq!(vectors.len(), 5);
    vectors.iter().for_each(check);
}
