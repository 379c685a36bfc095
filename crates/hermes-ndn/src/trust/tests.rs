//! Tests of anchors and certificates, at given times.

#![allow(clippy::unwrap_used)]

use aws_lc_rs::encoding::AsDer;
use aws_lc_rs::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, KeyPair};
use proptest::prelude::*;

use super::*;
use crate::packet::DataBuilder;
use crate::signature::Signer;

const BEGIN: &str = "20260101T000000";
const END: &str = "20261231T235959";
/// 2026-06-01T00:00:00Z.
const NOW: Duration = Duration::from_secs(1_780_272_000);

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

/// A key of an identity, `/IDENTITY/KEY/1`.
pub(crate) struct Identity {
    pub(crate) key: Name,
    pub(crate) signer: Signer,
    pkcs8: Vec<u8>,
    pub(crate) public: Bytes,
}

impl Identity {
    pub(crate) fn new(text: &str) -> Self {
        Self::with_key(&format!("{text}/KEY/1"))
    }

    pub(crate) fn with_key(key: &str) -> Self {
        let pair = EcdsaKeyPair::generate(&ECDSA_P256_SHA256_ASN1_SIGNING).unwrap();
        let pkcs8 = pair.to_pkcs8v1().unwrap().as_ref().to_vec();
        let key = name(key);
        let public = Bytes::copy_from_slice(pair.public_key().as_der().unwrap().as_ref());
        Self { signer: Signer::from_pkcs8(&pkcs8, key.clone()).unwrap(), key, pkcs8, public }
    }

    /// A certificate for another key.
    pub(crate) fn certify(&self, other: &Self, begin: &str, end: &str) -> Data {
        let signer = Signer::from_pkcs8(&self.pkcs8, self.key.clone()).unwrap().for_certificates(begin, end);
        let name = other.key.join(&name("/issuer")).child(&Component::numbered(types::VERSION, 1));
        let builder = DataBuilder { name, content_type: CERTIFICATE, ..DataBuilder::default() };
        Data::decode(builder.sign(&other.public, &signer).unwrap()).unwrap()
    }

    pub(crate) fn sign(&self, text: &str) -> Data {
        let builder = DataBuilder { name: name(text), ..DataBuilder::default() };
        Data::decode(builder.sign(b"content", &self.signer).unwrap()).unwrap()
    }
}

impl Identity {
    /// Signs with its own key, under the name of another one.
    fn sign_as(&self, other: &Self, text: &str) -> Data {
        let signer = Signer::from_pkcs8(&self.pkcs8, other.key.clone()).unwrap();
        let builder = DataBuilder { name: name(text), ..DataBuilder::default() };
        Data::decode(builder.sign(b"content", &signer).unwrap()).unwrap()
    }
}

pub(crate) fn trusting(anchor: &Identity, prefix: &str) -> TrustSchema {
    TrustSchema::new(vec![(name(prefix), VerifyingKey::Public(anchor.public.clone()))], false)
}

#[test]
fn an_anchor_signs_names_under_its_prefix_alone() {
    let anchor = Identity::new("/org");
    let mut schema = trusting(&anchor, "/org");
    assert_eq!(schema.judge(&anchor.sign("/org/a"), NOW), Verdict::Trusted);
    assert!(matches!(schema.judge(&anchor.sign("/com/a"), NOW), Verdict::Untrusted(Distrust::NoAnchor(_))));
    let builder = DataBuilder { name: name("/org/a"), ..DataBuilder::default() };
    let digest = Data::decode(builder.sign(b"content", &Signer::digest()).unwrap()).unwrap();
    assert!(matches!(schema.judge(&digest, NOW), Verdict::Untrusted(_)));
    assert_eq!(TrustSchema::new(Vec::new(), true).judge(&digest, NOW), Verdict::Trusted);
}

#[test]
fn once_an_anchor_has_signed_a_wrong_signature_needs_no_certificate() {
    let (anchor, thief) = (Identity::new("/org"), Identity::new("/org"));
    let mut schema = trusting(&anchor, "/org");
    assert_eq!(schema.judge(&thief.sign("/org/a"), NOW), Verdict::NeedsCertificate(anchor.key.clone()));
    assert_eq!(schema.judge(&anchor.sign("/org/a"), NOW), Verdict::Trusted);
    assert!(matches!(schema.judge(&thief.sign("/org/a"), NOW), Verdict::Untrusted(Distrust::NoAnchor(_))));
    assert_eq!(schema.judge(&anchor.sign("/org/b"), NOW), Verdict::Trusted);
    // One key for two prefixes, whichever was used first.
    let anchors = ["/org", "/com"].map(|prefix| (name(prefix), VerifyingKey::Public(anchor.public.clone())));
    let mut schema = TrustSchema::new(anchors.to_vec(), false);
    for text in ["/org/a", "/com/a", "/org/b"] {
        assert_eq!(schema.judge(&anchor.sign(text), NOW), Verdict::Trusted, "{text}");
    }
    // An anchor that claims the name of another one's key gains nothing.
    let (alice, bob) = (Identity::new("/org/alice"), Identity::new("/org/bob"));
    let anchors = [&alice, &bob].map(|one| (identity(&one.key), VerifyingKey::Public(one.public.clone())));
    let mut schema = TrustSchema::new(anchors.to_vec(), false);
    assert_eq!(schema.judge(&alice.sign_as(&bob, "/org/alice/a"), NOW), Verdict::Trusted);
    assert_eq!(schema.judge(&bob.sign("/org/bob/a"), NOW), Verdict::Trusted);
    assert!(matches!(schema.judge(&alice.sign_as(&bob, "/org/bob/a"), NOW), Verdict::Untrusted(_)));
}

#[test]
fn a_certificate_lets_its_key_sign_under_its_identity_within_its_period() {
    let (anchor, site) = (Identity::new("/org"), Identity::new("/org/site"));
    let mut schema = trusting(&anchor, "/org");
    let data = site.sign("/org/site/page");
    assert_eq!(schema.judge(&data, NOW), Verdict::NeedsCertificate(site.key.clone()));
    assert_eq!(schema.take_certificate(&anchor.certify(&site, BEGIN, END), NOW), Verdict::Trusted);
    assert_eq!(schema.judge(&data, NOW), Verdict::Trusted);
    // Another name, although its anchor would be the same.
    let elsewhere = site.sign("/org/other/page");
    assert!(matches!(schema.judge(&elsewhere, NOW), Verdict::Untrusted(Distrust::Signature(..))));
    // Another key that claims the name of this one.
    let thief = Identity::new("/org/site");
    assert!(matches!(schema.judge(&thief.sign("/org/site/page"), NOW), Verdict::Untrusted(Distrust::Signature(..))));
    // After its period, a successor is needed.
    let later = NOW + Duration::from_secs(365 * 86_400);
    assert_eq!(schema.judge(&data, later), Verdict::NeedsCertificate(site.key.clone()));
}

#[test]
fn a_certificate_outside_its_period_or_of_a_stranger_is_refused() {
    let (anchor, site) = (Identity::new("/org"), Identity::new("/org/site"));
    let mut schema = trusting(&anchor, "/org");
    for (begin, end) in [("20250101T000000", "20260531T235959"), ("20260601T000001", END), (END, BEGIN), ("", "")] {
        let verdict = schema.take_certificate(&anchor.certify(&site, begin, end), NOW);
        assert!(matches!(verdict, Verdict::Untrusted(Distrust::OutsideValidity(..))), "{begin} to {end}: {verdict:?}");
    }
    // The first and the last second belong to the period.
    for (begin, end) in [("20260601T000000", END), (BEGIN, "20260601T000000")] {
        assert_eq!(schema.take_certificate(&anchor.certify(&site, begin, end), NOW), Verdict::Trusted);
    }
    let mut schema = trusting(&anchor, "/org");
    let own = schema.take_certificate(&site.certify(&site, BEGIN, END), NOW);
    assert!(matches!(own, Verdict::Untrusted(Distrust::NoAnchor(_))), "{own:?}");
    let stranger = Identity::new("/com");
    let verdict = schema.take_certificate(&stranger.certify(&site, BEGIN, END), NOW);
    assert!(matches!(verdict, Verdict::Untrusted(_)), "{verdict:?}");
    let no_certificate = schema.take_certificate(&anchor.sign("/org/site/KEY/1/issuer/v"), NOW);
    assert!(matches!(no_certificate, Verdict::Untrusted(Distrust::NoCertificate(..))), "{no_certificate:?}");
}

#[test]
fn a_certificate_counts_no_longer_than_the_one_that_vouches_for_it() {
    let (anchor, site, page) = (Identity::new("/org"), Identity::new("/org/site"), Identity::new("/org/site/page"));
    let mut schema = trusting(&anchor, "/org");
    let of_page = site.certify(&page, BEGIN, END);
    assert_eq!(schema.take_certificate(&of_page, NOW), Verdict::NeedsCertificate(site.key.clone()));
    let until = "20260601T000100";
    assert_eq!(schema.take_certificate(&anchor.certify(&site, BEGIN, until), NOW), Verdict::Trusted);
    assert_eq!(schema.take_certificate(&of_page, NOW), Verdict::Trusted);
    let data = page.sign("/org/site/page/1");
    assert_eq!(schema.judge(&data, NOW + Duration::from_secs(60)), Verdict::Trusted);
    assert_eq!(schema.judge(&data, NOW + Duration::from_secs(61)), Verdict::NeedsCertificate(page.key.clone()));
}

proptest! {
    #[test]
    fn a_timestamp_reads_as_it_was_written(seconds in 0u64..253_402_300_800, beyond: u64) {
        let time = Duration::from_secs(seconds);
        prop_assert_eq!(instant(&timestamp(time)), Some(time));
        prop_assert_eq!(timestamp(Duration::from_secs(beyond)).len(), 15);
    }

    #[test]
    fn any_validity_and_locator_gets_a_verdict(begin in "[ -~]{0,16}", end in "[ -~]{0,16}", locator in "(/[a-z]{1,3}|/KEY){0,5}") {
        let anchor = Identity::new("/org");
        let mut schema = trusting(&anchor, "/");
        let locator: Name = locator.parse().unwrap_or_default();
        let signer = Signer::from_pkcs8(&anchor.pkcs8, locator.clone()).unwrap().for_certificates(&begin, &end);
        let builder = DataBuilder { name: locator.join(&name("/a/b")), content_type: CERTIFICATE, ..DataBuilder::default() };
        let data = Data::decode(builder.sign(&anchor.public, &signer).unwrap()).unwrap();
        let _ = schema.take_certificate(&data, NOW);
        let verdict = schema.judge(&data, NOW);
        prop_assert_ne!(verdict, Verdict::NeedsCertificate(locator));
    }
}
