//! A property of tokens in URLs.
//!
//! In: bytes as a token, and as its claims. Out: nothing, or a panic.

use std::sync::LazyLock;

use hermes_signature::{Grant, SigningKey};

static KEYS: LazyLock<[SigningKey; 2]> = LazyLock::new(|| [(); 2].map(|()| SigningKey::generate().expect("a key").0));

/// A time at which tokens of the corpus are valid, in seconds since 1970.
const NOW: u64 = 1_800_000_000;

/// A token that our key has not signed is refused. A grant that the key signs is the same for its reader, at its time, and is
/// refused by readers that know another key alone.
pub fn url_token(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let [ours, other] = &*KEYS;
    let known = [*ours.public()];
    assert!(Grant::verify(text, &known, NOW).is_err());
    let Ok(grant) = serde_json::from_str::<Grant>(text) else { return };
    let token = grant.sign(ours);
    assert!(Grant::verify(&token, &[*other.public()], NOW).is_err());
    if let Ok(read) = Grant::verify(&token, &known, NOW) {
        assert_eq!(read, grant);
        assert!(read.exp > NOW && read.nbf.is_none_or(|begin| begin <= NOW));
        for channel in &read.channels {
            assert!(channel.ends_with('*') || read.has_channel(channel));
        }
        // The last characters may have bits that stand for nothing.
        let cut = &token[..token.len() - 2];
        assert!(Grant::verify(cut, &known, NOW).is_err());
    }
}
