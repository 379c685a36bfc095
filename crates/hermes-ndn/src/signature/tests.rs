//! Tests of SignatureInfo, of validity periods, and of every signature type.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;

fn decode(bytes: &[u8]) -> Result<SignatureInfo, SignatureError> {
    let bytes = Bytes::copy_from_slice(bytes);
    let element = tlv::Reader::new(&bytes).only(types::SIGNATURE_INFO)?;
    SignatureInfo::decode(&element)
}

#[test]
fn timestamps_are_dates() {
    for (text, seconds) in [
        (b"19700101T000000", 0),
        (b"20000229T235959", 951_868_799),
        (b"20150114T032400", 1_421_205_840),
        (b"20380119T031408", 2_147_483_648),
        (b"99991231T235959", 253_402_300_799),
    ] {
        assert_eq!(time::parse(text), Some(seconds));
        assert_eq!(time::format(seconds), *text);
    }
    assert_eq!(time::parse(b"19691231T235959"), Some(0));
    assert_eq!(time::parse(b"00000101T000000"), Some(0));
    assert_eq!(time::format(u64::MAX), *b"99991231T235959");
    for bad in ["20230229T000000", "20231301T000000", "20230100T000000", "20230101T240000", "2023-101T000000", ""] {
        assert_eq!(time::parse(bad.as_bytes()), None, "{bad}");
    }
}

#[test]
fn malformed_infos_are_rejected() {
    for (bytes, error) in [
        (&[22, 0][..], TlvError::Missing(types::SIGNATURE_TYPE)),
        (&[22, 2, 27, 0], TlvError::BadLength { kind: 27, length: 0 }),
        (&[22, 6, 27, 1, 0, 27, 1, 0], TlvError::Critical(27)),
        (&[22, 5, 27, 1, 0, 28, 0], TlvError::Missing(types::NAME)),
        (&[22, 5, 27, 1, 0, 39, 0], TlvError::Critical(39)),
        (&[22, 5, 27, 1, 0, 38, 0], TlvError::BadLength { kind: 38, length: 0 }),
        (&[22, 7, 27, 1, 0, 253, 0, 253, 0], TlvError::Missing(types::NOT_BEFORE)),
    ] {
        assert_eq!(decode(bytes), Err(SignatureError::Tlv(error)));
    }
}

#[test]
fn unknown_elements_and_types_are_kept_apart() {
    let info = decode(&[22, 8, 27, 1, 200, 100, 0, 40, 1, 7]).unwrap();
    assert_eq!(info, SignatureInfo { time: Some(7), ..SignatureInfo::new(SignatureType(200)) });
}

proptest! {
    #[test]
    fn infos_round_trip(kind: u64, time: Option<u64>, sequence: Option<u64>, digest: Option<[u8; 32]>, end in 0..1u64 << 37) {
        let info = SignatureInfo {
            key_locator: digest.map(|digest| KeyLocator::Digest(digest.to_vec().into())),
            nonce: digest.map(|digest| digest[..8].to_vec().into()),
            time,
            sequence,
            validity: Some(ValidityPeriod { not_before: end / 2, not_after: end }),
            ..SignatureInfo::new(SignatureType(kind))
        };
        let mut out = BytesMut::new();
        info.encode(types::SIGNATURE_INFO, &mut out);
        prop_assert_eq!(decode(&out).unwrap(), info);
    }
}
