//! Digest fields (RFC 9530) of representations and messages.
//!
//! In: `Repr-Digest`, `Content-Digest`, or a digest that a user typed. Out: digests of secure algorithms (sha-256,
//! sha-512), and running hashes to compare with them. Never: a comparison by a broken algorithm.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use aws_lc_rs::digest::{Context, SHA256, SHA512};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::{HeaderMap, HeaderName};
use serde::{Deserialize, Serialize};

/// The digest of the whole representation, even in a response with a part of it.
pub const REPR: HeaderName = HeaderName::from_static("repr-digest");
/// The digest of a message's content.
pub const CONTENT: HeaderName = HeaderName::from_static("content-digest");
/// The request for digests. It prefers SHA-256, which costs half as much as SHA-512 here and is as good.
pub const WANT: (&str, &str) = ("want-repr-digest", "sha-256=10, sha-512=3");

/// An algorithm of RFC 9530's registry that is not deprecated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Algorithm {
    /// `sha-256`
    #[serde(rename = "sha-256")]
    Sha256,
    /// `sha-512`
    #[serde(rename = "sha-512")]
    Sha512,
}

impl Algorithm {
    /// All algorithms, the cheaper one first.
    pub const ALL: [Self; 2] = [Self::Sha256, Self::Sha512];

    /// The name in fields.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sha256 => "sha-256",
            Self::Sha512 => "sha-512",
        }
    }

    fn length(self) -> usize {
        match self {
            Self::Sha256 => 32,
            Self::Sha512 => 64,
        }
    }

    /// Starts a hash.
    pub fn start(self) -> Context {
        Context::new(match self {
            Self::Sha256 => &SHA256,
            Self::Sha512 => &SHA512,
        })
    }
}

/// Digests of one content, by algorithm. The text form is the field's value.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digests(BTreeMap<Algorithm, Vec<u8>>);

impl Digests {
    /// Reads a field. Invalid members are ignored, because a broken field does not prove broken content.
    pub fn of(headers: &HeaderMap, field: &HeaderName) -> Self {
        let mut all = BTreeMap::new();
        for line in headers.get_all(field) {
            let members = line.to_str().unwrap_or_default().split(',');
            all.extend(members.filter_map(|member| pair(member).ok().flatten()));
        }
        Self(all)
    }

    /// Whether there are no digests.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All digests.
    pub fn iter(&self) -> impl Iterator<Item = (Algorithm, &[u8])> {
        self.0.iter().map(|(algorithm, value)| (*algorithm, &**value))
    }

    /// Whether both have a digest of the same algorithm with different values.
    pub fn contradicts(&self, other: &Self) -> bool {
        self.0.iter().any(|(algorithm, value)| other.0.get(algorithm).is_some_and(|theirs| theirs != value))
    }

    /// Adds the digests of algorithms that are missing here.
    pub fn join(&mut self, other: &Self) {
        for (algorithm, value) in &other.0 {
            self.0.entry(*algorithm).or_insert_with(|| value.clone());
        }
    }
}

/// Parses a member of the dictionary (RFC 9651): `sha-256=:BASE64:`, with parameters that are ignored. Returns `None`
/// for an unsupported algorithm.
fn pair(member: &str) -> Result<Option<(Algorithm, Vec<u8>)>, String> {
    let wrong = || format!("{:?} is no digest; write sha-256=:BASE64: or sha-256=HEX", member.trim());
    let (name, value) = member.trim().split_once('=').ok_or_else(wrong)?;
    let Some(algorithm) = Algorithm::ALL.into_iter().find(|algorithm| algorithm.name() == name) else {
        return Ok(None);
    };
    let value = value.split(';').next().unwrap_or_default().trim();
    let bytes = match value.strip_prefix(':').and_then(|value| value.strip_suffix(':')) {
        Some(text) => STANDARD.decode(text).map_err(|_| wrong())?,
        None => from_hex(value).ok_or_else(wrong)?,
    };
    if bytes.len() != algorithm.length() {
        let (name, length) = (algorithm.name(), algorithm.length());
        return Err(format!(
            "a {name} digest has {length} bytes, and this one {}; look for what is missing",
            bytes.len()
        ));
    }
    Ok(Some((algorithm, bytes)))
}

/// Parses hexadecimal digits, as `sha256sum` prints them.
fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digits: Option<Vec<u8>> = text.chars().map(|c| c.to_digit(16).and_then(|d| u8::try_from(d).ok())).collect();
    let digits = digits.filter(|digits| digits.len().is_multiple_of(2))?;
    Some(digits.chunks_exact(2).map(|two| two[0] << 4 | two[1]).collect())
}

impl FromStr for Digests {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut all = BTreeMap::new();
        for member in text.split(',') {
            let Some((algorithm, value)) = pair(member)? else {
                return Err(format!("{:?} is no algorithm that we verify; take sha-256 or sha-512", member.trim()));
            };
            all.insert(algorithm, value);
        }
        Ok(Self(all))
    }
}

impl fmt::Display for Digests {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, (algorithm, value)) in self.iter().enumerate() {
            let comma = if number == 0 { "" } else { ", " };
            write!(f, "{comma}{}=:{}:", algorithm.name(), STANDARD.encode(value))?;
        }
        Ok(())
    }
}

impl TryFrom<String> for Digests {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        if text.is_empty() { Ok(Self::default()) } else { text.parse() }
    }
}

impl From<Digests> for String {
    fn from(digests: Digests) -> Self {
        digests.to_string()
    }
}

/// Running hashes of a content.
#[derive(Clone)]
pub struct Hashes(Vec<(Algorithm, Context)>);

impl Hashes {
    /// Starts hashes of these algorithms.
    pub fn start(algorithms: impl IntoIterator<Item = Algorithm>) -> Self {
        Self(algorithms.into_iter().map(|algorithm| (algorithm, algorithm.start())).collect())
    }

    /// Adds the next bytes.
    pub fn update(&mut self, data: &[u8]) {
        self.0.iter_mut().for_each(|(_, context)| context.update(data));
    }

    /// Whether the algorithm is among them.
    pub fn has(&self, algorithm: Algorithm) -> bool {
        self.0.iter().any(|(running, _)| *running == algorithm)
    }

    /// The digests of all bytes so far.
    pub fn so_far(&self) -> Digests {
        let finished = |context: &Context| context.clone().finish().as_ref().to_vec();
        Digests(self.0.iter().map(|(algorithm, context)| (*algorithm, finished(context))).collect())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// The digest of `{"hello": "world"}` and a newline (RFC 9530, B.1).
    const HELLO: &str = "sha-256=:RK/0qy18MlBSVnWgjwz6lZEWjP/lF5HF9bvEF8FabDg=:";

    #[test]
    fn the_rfcs_example_is_what_we_hash() {
        let mut hashes = Hashes::start(Algorithm::ALL);
        hashes.update(b"{\"hello\": ");
        hashes.update(b"\"world\"}\n");
        let wanted: Digests = HELLO.parse().unwrap();
        assert!(!wanted.contradicts(&hashes.so_far()));
        hashes.update(b" ");
        assert!(wanted.contradicts(&hashes.so_far()));
    }

    #[test]
    fn a_field_is_read_as_far_as_it_means_something_to_us() {
        let mut headers = HeaderMap::new();
        headers.append(REPR, format!("md5=:AAAA:, {HELLO};q=1").parse().unwrap());
        headers.append(REPR, "sha-512=:AAAA:".parse().unwrap());
        assert_eq!(Digests::of(&headers, &REPR).to_string(), HELLO);
        assert!(Digests::of(&headers, &CONTENT).is_empty());
        headers.insert(REPR, "nonsense".parse().unwrap());
        assert!(Digests::of(&headers, &REPR).is_empty());
    }

    #[test]
    fn what_is_typed_must_be_right() {
        let hex = "44aff4ab2d7c3250525675a08f0cfa9591168cffe51791c5f5bbc417c15a6c38";
        assert_eq!(format!("sha-256={hex}").parse::<Digests>().unwrap(), HELLO.parse().unwrap());
        for (bad, says) in [
            ("sha-256", "is no digest"),
            ("md5=:AAAA:", "no algorithm that we verify"),
            ("sha-256=:AAAA:", "has 32 bytes, and this one 3"),
            ("sha-256=xyz", "is no digest"),
        ] {
            assert!(bad.parse::<Digests>().unwrap_err().contains(says), "{bad}");
        }
    }

    #[test]
    fn digests_contradict_each_other_only_by_one_algorithm() {
        let (a, b): (Digests, Digests) =
            (HELLO.parse().unwrap(), format!("sha-256={}", "0".repeat(64)).parse().unwrap());
        let c: Digests = format!("sha-512={}", "0".repeat(128)).parse().unwrap();
        assert!(a.contradicts(&b) && !a.contradicts(&c) && !a.contradicts(&a));
        let mut joined = a.clone();
        joined.join(&c);
        assert!(joined.contradicts(&b) && joined.iter().count() == 2);
        let again: Digests = joined.to_string().parse().unwrap();
        assert_eq!(again, joined);
    }
}
