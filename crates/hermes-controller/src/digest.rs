//! Digests of documents and keys, and hexadecimal text.
//!
//! In: bytes. Out: their SHA-256, as bytes, as hexadecimal digits, or as a name (RFC 6920).

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use aws_lc_rs::digest::{Context, SHA256, digest};
use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD as BASE64_URL;
use bytes::Bytes;
use hermes_model::trust::KEY;

/// Bytes of a file that are read at once.
const CHUNK: usize = 256 << 10;

/// SHA-256 of some bytes.
pub fn sha256(bytes: &[u8]) -> Bytes {
    Bytes::copy_from_slice(digest(&SHA256, bytes).as_ref())
}

/// SHA-256 of a file, whose content is never in memory as a whole.
///
/// # Errors
/// The file cannot be read.
pub fn sha256_of_file(path: &Path) -> io::Result<Bytes> {
    let (mut file, mut context) = (File::open(path)?, Context::new(&SHA256));
    let mut chunk = vec![0; CHUNK];
    loop {
        match file.read(&mut chunk)? {
            0 => return Ok(Bytes::copy_from_slice(context.finish().as_ref())),
            length => context.update(&chunk[..length]),
        }
    }
}

/// The digest of a public key: SHA-256 of its SubjectPublicKeyInfo, in hex.
pub fn key_digest(public_key_info: &[u8]) -> String {
    hex(&sha256(public_key_info))
}

/// The name of a public key in node documents (RFC 6920), from its digest in hex.
pub fn key_name(digest: &str) -> String {
    format!("{KEY}{}", BASE64_URL.encode(from_hex(digest)))
}

/// Returns bytes as hexadecimal text, with two digits for each byte.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The bytes of hexadecimal text. Other characters are skipped.
pub(crate) fn from_hex(digest: &str) -> Vec<u8> {
    let digits: Vec<u8> = digest.chars().filter_map(|digit| Some(digit.to_digit(16)? as u8)).collect();
    digits.chunks_exact(2).map(|two| (two[0] << 4) | two[1]).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_file_has_the_digest_of_its_content() {
        let path = std::env::temp_dir().join(format!("hermes-digest-{}", std::process::id()));
        for length in [0, 1, CHUNK, 2 * CHUNK + 1] {
            let content: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
            std::fs::write(&path, &content).unwrap();
            assert_eq!(sha256_of_file(&path).unwrap(), sha256(&content));
        }
        std::fs::remove_file(&path).unwrap();
        assert!(sha256_of_file(&path).is_err());
    }
}
