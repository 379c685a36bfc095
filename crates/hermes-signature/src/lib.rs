//! HTTP Message Signatures (RFC 9421) with Ed25519, in one strict form, digests of contents (RFC 9530), and tokens in URLs.
//!
//! In: the parts of a request, and a key. Out: the fields that sign the request; or the key that signed it. The signature
//! names its key itself, so a verifier needs no list of keys: the name of a channel says which key counts. A request has
//! one signature, which covers its method, authority, path and query, and the digest of its content. Never: I/O, or a
//! clock.

mod digest;
mod fields;
mod key;
mod signature;
mod token;

pub use digest::{content_digest, is_content_of};
pub use fields::{CONTENT_DIGEST, SIGNATURE, SIGNATURE_INPUT};
pub use key::{KeyError, PublicKey, SigningKey};
pub use signature::{SignatureError, Signed, SignedRequest, sign, verify};
pub use token::{Grant, Right, TokenError};
