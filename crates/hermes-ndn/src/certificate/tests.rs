//! Tests of certificates: issue, parse, check, and what is not a certificate.
#![allow(clippy::unwrap_used)]

use super::*;

const VALIDITY: ValidityPeriod = ValidityPeriod { not_before: 1000, not_after: 2000 };

fn request(key: &SigningKey) -> CertificateRequest {
    let identity: Name = "/net/router".parse().unwrap();
    CertificateRequest {
        key_name: key_name(&identity, &Component::generic("k1")).unwrap(),
        public_key: key.public_key().unwrap(),
        issuer: Component::generic("self"),
        version: 7,
        validity: VALIDITY,
        freshness_period: Duration::from_secs(3600),
    }
}

fn new_key() -> SigningKey {
    SigningKey::from_pkcs8(&SigningKey::generate_p256().unwrap()).unwrap()
}

#[test]
fn an_issued_certificate_parses_and_checks() {
    let key = new_key();
    let request = request(&key);
    let key = key.with_locator(KeyLocator::Name(request.key_name.clone()));
    let certificate = Certificate::parse(Certificate::issue(&request, &key).unwrap()).unwrap();
    assert_eq!(certificate.name().to_string(), "/net/router/KEY/k1/self/v=7");
    assert_eq!(certificate.identity().to_string(), "/net/router");
    assert_eq!(certificate.key_name(), &request.key_name);
    assert_eq!(certificate.validity(), VALIDITY);
    assert!(certificate.is_self_signed());
    certificate.check(certificate.key(), 1000).unwrap();
    certificate.check(certificate.key(), 2000).unwrap();
    for outside in [999, 2001] {
        assert_eq!(certificate.check(certificate.key(), outside), Err(CertificateError::OutsideValidity));
    }
    let other = new_key().verifying_key().unwrap();
    assert_eq!(certificate.check(&other, 1500), Err(CertificateError::Signature(SignatureError::Invalid)));
}

#[test]
fn other_data_is_not_a_certificate() {
    let key = new_key();
    let public_key = key.public_key().unwrap();
    let parse = |uri: &str, kind: ContentType, content: Bytes, validity: Option<ValidityPeriod>| {
        let builder = DataBuilder::new(uri.parse().unwrap()).content_type(kind).content(content);
        let builder = validity.into_iter().fold(builder, DataBuilder::validity);
        Certificate::parse(builder.sign(&key).unwrap()).map(|_| ()).unwrap_err()
    };
    let (uri, all) = ("/a/KEY/k/self/v=1", Some(VALIDITY));
    assert_eq!(parse("/KEY/k/self", ContentType::KEY, public_key.clone(), all), CertificateError::Name);
    assert_eq!(parse("/a/b/c/d/e", ContentType::KEY, public_key.clone(), all), CertificateError::Name);
    assert_eq!(parse(uri, ContentType::BLOB, public_key.clone(), all), CertificateError::ContentType(0));
    assert_eq!(parse(uri, ContentType::KEY, public_key, None), CertificateError::NoValidity);
    assert_eq!(parse(uri, ContentType::KEY, Bytes::new(), all), CertificateError::Key(KeyError::Algorithm));
}
