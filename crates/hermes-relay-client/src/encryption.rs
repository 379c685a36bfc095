//! Encryption from client to client: the content coding `aes128gcm` (RFC 8188).
//!
//! In: content, and a secret that both clients have. Out: content that relays cannot read or change. Each publication has a
//! salt, and so a key of its own. Never: protection against a relay that repeats, reorders or leaves out publications.

use std::fmt;

use aws_lc_rs::aead::{AES_128_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use aws_lc_rs::hkdf::{HKDF_SHA256, KeyType, Prk, Salt};
use base64::Engine as _;
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig};
use bytes::{BufMut as _, Bytes, BytesMut};

/// The name of the coding in `content-encoding`.
pub(crate) const AES128GCM: &str = "aes128gcm";

const SALT_BYTES: usize = 16;
const TAG_BYTES: usize = 16;
/// The salt, the size of a record, and the length of the key's identifier.
const HEAD_BYTES: usize = SALT_BYTES + 4 + 1;
/// The byte after the content of a record that others follow, and of the last one.
const NOT_LAST: u8 = 1;
const LAST: u8 = 2;
/// The smallest record: the byte after the content, one byte of content, and the tag (RFC 8188, section 2).
const MIN_RECORD_BYTES: usize = TAG_BYTES + 2;
/// The shortest secret, in bytes: the strength of AES-128.
const MIN_SECRET_BYTES: usize = 16;

/// A secret of clients.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Vec<u8>);

/// The text is no secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SecretError {
    /// It is no base64.
    #[error("no base64; make a secret by `openssl rand -base64 32`")]
    NotBase64,
    /// It is too easy to guess.
    #[error("shorter than {MIN_SECRET_BYTES} bytes; make a secret by `openssl rand -base64 32`")]
    TooShort,
}

impl Secret {
    /// Reads base64 of at least 16 random bytes, of either alphabet.
    ///
    /// # Errors
    /// It is no base64, or too short.
    pub fn parse(text: &str) -> Result<Self, SecretError> {
        let config = GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
        let text = text.trim();
        let alphabet = if text.contains(['-', '_']) { base64::alphabet::URL_SAFE } else { base64::alphabet::STANDARD };
        let bytes = GeneralPurpose::new(&alphabet, config).decode(text).map_err(|_| SecretError::NotBase64)?;
        if bytes.len() < MIN_SECRET_BYTES { Err(SecretError::TooShort) } else { Ok(Self(bytes)) }
    }

    /// Encrypts content, as one record. `None`: the system has no random numbers.
    pub fn seal(&self, content: &[u8]) -> Option<Bytes> {
        let mut salt = [0; SALT_BYTES];
        aws_lc_rs::rand::fill(&mut salt).ok()?;
        let record = u32::try_from((content.len() + 1 + TAG_BYTES).max(MIN_RECORD_BYTES)).ok()?;
        let mut sealed = BytesMut::with_capacity(HEAD_BYTES + record as usize);
        sealed.put_slice(&salt);
        sealed.put_u32(record);
        sealed.put_u8(0);
        let mut text = Vec::with_capacity(record as usize);
        text.extend_from_slice(content);
        text.push(LAST);
        let keys = Keys::new(&salt, &self.0)?;
        keys.key.seal_in_place_append_tag(keys.nonce(0), Aad::empty(), &mut text).ok()?;
        sealed.put_slice(&text);
        Some(sealed.freeze())
    }

    /// Decrypts content. `None`: it was not encrypted with this secret, or was changed or cut.
    pub fn open(&self, sealed: &[u8]) -> Option<Bytes> {
        let (salt, rest) = sealed.split_at_checked(SALT_BYTES)?;
        let (record, rest) = rest.split_first_chunk::<4>()?;
        let (key_id, rest) = rest.split_first()?;
        let records = rest.get(usize::from(*key_id)..)?;
        let size = usize::try_from(u32::from_be_bytes(*record)).ok().filter(|size| *size >= MIN_RECORD_BYTES)?;
        let keys = Keys::new(salt, &self.0)?;
        let mut content = Vec::with_capacity(records.len());
        let count = records.len().div_ceil(size);
        for (number, record) in records.chunks(size).enumerate() {
            let mut record = record.to_vec();
            let text = keys.key.open_in_place(keys.nonce(number as u64), Aad::empty(), &mut record).ok()?;
            // Zeros may follow the delimiter.
            let end = text.iter().rposition(|byte| *byte != 0)?;
            let expected = if number + 1 == count { LAST } else { NOT_LAST };
            if text[end] != expected {
                return None;
            }
            content.extend_from_slice(&text[..end]);
        }
        (count > 0).then(|| content.into())
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// The keys of one publication.
struct Keys {
    key: LessSafeKey,
    nonce: [u8; NONCE_LEN],
}

/// The length of what HKDF yields.
struct Length(usize);

impl KeyType for Length {
    fn len(&self) -> usize {
        self.0
    }
}

impl Keys {
    fn new(salt: &[u8], secret: &[u8]) -> Option<Self> {
        let prk = Salt::new(HKDF_SHA256, salt).extract(secret);
        let key = derived::<16>(&prk, b"Content-Encoding: aes128gcm\0")?;
        let key = LessSafeKey::new(UnboundKey::new(&AES_128_GCM, &key).ok()?);
        Some(Self { key, nonce: derived(&prk, b"Content-Encoding: nonce\0")? })
    }

    fn nonce(&self, number: u64) -> Nonce {
        let mut nonce = self.nonce;
        for (byte, of_number) in nonce[NONCE_LEN - 8..].iter_mut().zip(number.to_be_bytes()) {
            *byte ^= of_number;
        }
        Nonce::assume_unique_for_key(nonce)
    }
}

fn derived<const N: usize>(prk: &Prk, info: &[u8]) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    prk.expand(&[info], Length(N)).ok()?.fill(&mut bytes).ok()?;
    Some(bytes)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use base64::prelude::BASE64_URL_SAFE_NO_PAD;

    use super::*;

    const TEXT: &[u8] = b"I am the walrus";

    fn open(secret: &str, sealed: &str) -> Option<Bytes> {
        Secret::parse(secret).unwrap().open(&BASE64_URL_SAFE_NO_PAD.decode(sealed).unwrap())
    }

    #[test]
    fn the_examples_of_the_rfc_are_read() {
        // RFC 8188, sections 3.1 and 3.2. The second one has two records, and names its key.
        let sealed = "I1BsxtFttlv3u_Oo94xnmwAAEAAA-NAVub2qFgBEuQKRapoZu-IxkIva3MEB1PD-ly8Thjg";
        assert_eq!(open("yqdlZ-tYemfogSmv7Ws5PQ", sealed).as_deref(), Some(TEXT));
        let sealed =
            "uNCkWiNYzKTnBN9ji3-qWAAAABkCYTHOG8chz_gnvgOqdGYovxyjuqRyJFjEDyoF1Fvkj6hQPdPHI51OEUKEpgz3SsLWIqS_uA";
        assert_eq!(open("BO3ZVPxUlnLORbVGMpbT1Q", sealed).as_deref(), Some(TEXT));
        // Without the second record, it is cut.
        let cut = &BASE64_URL_SAFE_NO_PAD.decode(sealed).unwrap()[..SALT_BYTES + 5 + 2 + 25];
        assert_eq!(Secret::parse("BO3ZVPxUlnLORbVGMpbT1Q").unwrap().open(cut), None);
    }

    #[test]
    fn what_is_sealed_is_opened_with_the_same_secret_alone() {
        let [secret, other] = ["A".repeat(22), "B".repeat(32)].map(|text| Secret::parse(&text).unwrap());
        for content in [&b""[..], b"\0\0", TEXT, &[7; 100_000]] {
            let sealed = secret.seal(content).unwrap();
            assert_eq!(secret.open(&sealed).as_deref(), Some(content));
            assert_eq!(other.open(&sealed), None);
            assert_ne!(secret.seal(content).unwrap(), sealed, "each one has a salt of its own");
            // The size of records alone is not authenticated: it says where they end.
            for at in [0, HEAD_BYTES - 1, HEAD_BYTES, sealed.len() - 1] {
                let mut changed = sealed.to_vec();
                changed[at] ^= 1;
                assert_eq!(secret.open(&changed), None, "byte {at}");
            }
            for end in 0..sealed.len().min(60) {
                assert_eq!(secret.open(&sealed[..end]), None, "cut at {end}");
            }
        }
    }

    #[test]
    fn a_secret_is_base64_of_16_bytes_or_more() {
        assert!(Secret::parse("AAAAAAAAAAAAAAAAAAAAAA==\n").is_ok());
        assert_eq!(Secret::parse("hello"), Err(SecretError::NotBase64));
        assert_eq!(Secret::parse("c2hvcnQ="), Err(SecretError::TooShort));
        assert_eq!(format!("{:?}", Secret::parse(&"A".repeat(22)).unwrap()), "Secret(..)");
    }
}
