//! A property of signed requests.
//!
//! In: bytes as the fields of a signature and a path. Out: nothing, or a panic.

use std::sync::LazyLock;

use hermes_signature::{SIGNATURE, SIGNATURE_INPUT, SignedRequest, SigningKey, sign, verify};
use http::{HeaderMap, HeaderValue, Method};

static KEY: LazyLock<SigningKey> = LazyLock::new(|| SigningKey::generate().expect("a key").0);

/// The lines are `signature-input`, `signature` and a path. A signature that fits has all its parameters, and a request
/// with this path verifies after it is signed.
pub fn signature(data: &[u8]) {
    let mut lines = data.splitn(3, |byte| *byte == b'\n');
    let mut headers = HeaderMap::new();
    for name in [SIGNATURE_INPUT, SIGNATURE] {
        let Some(Ok(value)) = lines.next().map(HeaderValue::from_bytes) else { return };
        headers.insert(name, value);
    }
    let Some(path) = lines.next().and_then(|path| std::str::from_utf8(path).ok()) else { return };
    let method = Method::GET;
    let request = |headers| SignedRequest { method: &method, authority: "relay.example", path, query: None, headers };
    if let Ok(signed) = verify(&request(&headers)) {
        assert_eq!(signed.signature.len(), 64);
    }
    let mut headers = HeaderMap::new();
    if let Some(fields) = sign(&KEY, &request(&headers.clone()), 1, path.get(..8).unwrap_or("n")) {
        headers.extend(fields);
        let signed = verify(&request(&headers)).expect("its own signature fits");
        assert_eq!(signed.key, *KEY.public());
    }
}
