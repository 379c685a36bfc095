//! The fields of signed requests.
//!
//! In: a head. Out: a field as one value. Their forms are those of RFC 9421 and RFC 9530.

use http::HeaderMap;
use http::header::HeaderName;

/// The field with the digest of a content.
pub const CONTENT_DIGEST: HeaderName = HeaderName::from_static("content-digest");
/// The field that names what a signature covers.
pub const SIGNATURE_INPUT: HeaderName = HeaderName::from_static("signature-input");
/// The field with the signature.
pub const SIGNATURE: HeaderName = HeaderName::from_static("signature");

/// The lines of a field as one value. `None`: it is absent, or no text.
pub(crate) fn lines(headers: &HeaderMap, name: &HeaderName) -> Option<String> {
    let lines: Option<Vec<&str>> = headers.get_all(name).iter().map(|line| line.to_str().ok().map(str::trim)).collect();
    lines.filter(|lines| !lines.is_empty()).map(|lines| lines.join(", "))
}
