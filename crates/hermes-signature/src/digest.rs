//! The digest of a content (RFC 9530, section 2).
//!
//! In: the bytes of a content. Out: the field `content-digest`, or whether such a field fits the bytes. Never: a digest of
//! an algorithm that the RFC calls insecure.

use aws_lc_rs::digest::{SHA256, SHA512, digest};
use http::{HeaderMap, HeaderValue};
use sfv::{BareItem, Dictionary, Item, ListEntry, Parser};

use crate::fields::{CONTENT_DIGEST, lines};

/// The digest of a content as the value of `content-digest`.
pub fn content_digest(content: &[u8]) -> HeaderValue {
    use base64::Engine as _;
    let hash = base64::prelude::BASE64_STANDARD.encode(digest(&SHA256, content));
    HeaderValue::try_from(format!("sha-256=:{hash}:")).unwrap_or_else(|_| HeaderValue::from_static(""))
}

/// Whether `content-digest` has a digest of an algorithm that is known here, and all such digests fit the content.
pub fn is_content_of(headers: &HeaderMap, content: &[u8]) -> bool {
    let Some(text) = lines(headers, &CONTENT_DIGEST) else { return false };
    let Ok(digests) = Parser::new(&text).parse::<Dictionary>() else { return false };
    let mut is_known = false;
    for (algorithm, value) in &digests {
        let algorithm = match algorithm.as_str() {
            "sha-256" => &SHA256,
            "sha-512" => &SHA512,
            _ => continue,
        };
        let ListEntry::Item(Item { bare_item: BareItem::ByteSequence(hash), .. }) = value else { return false };
        if digest(algorithm, content).as_ref() != hash.as_slice() {
            return false;
        }
        is_known = true;
    }
    is_known
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 9530, appendix B.1, and its other algorithm.
    #[test]
    fn digests_of_the_rfc_fit() {
        let content = b"{\"hello\": \"world\"}\n";
        let sha256 = "sha-256=:RK/0qy18MlBSVnWgjwz6lZEWjP/lF5HF9bvEF8FabDg=:";
        assert_eq!(content_digest(content), sha256);
        let fits = |value: &str, content: &[u8]| {
            let mut headers = HeaderMap::new();
            headers.insert(CONTENT_DIGEST, value.parse().expect("a value"));
            is_content_of(&headers, content)
        };
        assert!(fits(sha256, content));
        assert!(fits(&format!("md5=:AAAA:, {sha256}"), content), "an algorithm that is not known here");
        for (value, content) in [
            (sha256, &b"{\"hello\": \"mars\"}\n"[..]),
            ("md5=:AAAA:", content),
            ("sha-256=1", content),
            ("sha-256=:AAAA:", content),
            ("", content),
            ("sha-256", content),
        ] {
            assert!(!fits(value, content), "{value}");
        }
        assert!(!is_content_of(&HeaderMap::new(), content));
    }
}
