//! Signatures of requests (RFC 9421).
//!
//! In: the parts of a request; to sign, a key, the time and a nonce. Out: the fields `signature-input` and `signature`; or
//! the key that signed, and when. Never: a signature that covers less than the request's method, authority, path, query and
//! digest; a second signature; or a component with parameters.

use http::{HeaderMap, HeaderName, HeaderValue, Method};
use sfv::{BareItem, Dictionary, FieldType as _, InnerList, Item, Key, ListEntry, Parameters, Parser};

use crate::fields::{CONTENT_DIGEST, SIGNATURE, SIGNATURE_INPUT, lines};
use crate::key::{PublicKey, SigningKey};

const LABEL: &str = "hermes";
const ALGORITHM: &str = "ed25519";
/// The components that a signature may cover; each of them that a request has must be covered.
const COMPONENTS: [&str; 5] = ["@method", "@authority", "@path", "@query", "content-digest"];

/// The parts of a request that are signed.
#[derive(Clone, Copy, Debug)]
pub struct SignedRequest<'a> {
    /// The method.
    pub method: &'a Method,
    /// The authority in lower case, without the default port.
    pub authority: &'a str,
    /// The path as it was sent.
    pub path: &'a str,
    /// The query as it was sent.
    pub query: Option<&'a str>,
    /// The fields. A signature covers `content-digest` alone.
    pub headers: &'a HeaderMap,
}

/// A signature that fits its request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signed {
    /// The key that signed.
    pub key: PublicKey,
    /// The time at which it signed, in seconds since 1970.
    pub created: u64,
    /// The time after which the signature no longer counts.
    pub expires: Option<u64>,
    /// The bytes of the signature, by which a repetition is noticed.
    pub signature: Vec<u8>,
}

/// The reason why a signature does not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SignatureError {
    /// One of the fields is absent.
    #[error("the request has no signature (RFC 9421)")]
    Absent,
    /// A field is no dictionary of the RFC, or has several signatures.
    #[error("signature-input and signature must have one signature, under the same label")]
    Malformed,
    /// A parameter is absent or has another type.
    #[error("a signature needs created, and keyid with an Ed25519 key in base64url; alg can only be ed25519")]
    Parameters,
    /// It covers too little, or something else.
    #[error(
        "a signature must cover @method, @authority, @path, @query and content-digest, as far as the request has them, and nothing else"
    )]
    Components,
    /// Another request, another key, or a forgery.
    #[error("the signature does not fit the request")]
    Forged,
}

impl SignedRequest<'_> {
    /// The value of a component (RFC 9421, sections 2.1 and 2.2). `None`: the request has none, or it is not one of
    /// [`COMPONENTS`].
    fn value(&self, component: &str) -> Option<String> {
        match component {
            "@method" => Some(self.method.as_str().to_owned()),
            "@authority" => Some(self.authority.to_owned()),
            "@path" => Some(self.path.to_owned()),
            "@query" => self.query.map(|query| format!("?{query}")),
            "content-digest" => lines(self.headers, &CONTENT_DIGEST),
            _ => None,
        }
    }

    /// The signature base (RFC 9421, section 2.5).
    fn base(&self, input: &InnerList) -> Option<String> {
        let mut base = String::new();
        for item in &input.items {
            let BareItem::String(component) = &item.bare_item else { return None };
            base += &format!("\"{}\": {}\n", component.as_str(), self.value(component.as_str())?);
        }
        Some(base + "\"@signature-params\": " + &serialized(input)?)
    }
}

fn serialized(input: &InnerList) -> Option<String> {
    vec![ListEntry::InnerList(input.clone())].serialize()
}

fn string(text: &str) -> Option<BareItem> {
    sfv::String::from_string(text.to_owned()).ok().map(BareItem::String)
}

fn key_of(name: &str) -> Option<Key> {
    Key::from_string(name.to_owned()).ok()
}

/// Signs a request. `created` is in seconds since 1970; `nonce` makes the signatures of two equal requests differ. `None`:
/// the nonce or a part of the request is not printable ASCII.
pub fn sign(
    key: &SigningKey,
    request: &SignedRequest<'_>,
    created: u64,
    nonce: &str,
) -> Option<[(HeaderName, HeaderValue); 2]> {
    let mut input = InnerList::default();
    for component in COMPONENTS.into_iter().filter(|component| request.value(component).is_some()) {
        input.items.push(Item::new(string(component)?));
    }
    let created = BareItem::Integer(i64::try_from(created).ok()?.try_into().ok()?);
    let mut params = Parameters::new();
    params.insert(key_of("created")?, created);
    params.insert(key_of("nonce")?, string(nonce)?);
    params.insert(key_of("alg")?, string(ALGORITHM)?);
    params.insert(key_of("keyid")?, string(&key.public().to_string())?);
    input.params = params;
    let signature = key.sign(request.base(&input)?.as_bytes());
    let field = |entry: ListEntry| -> Option<HeaderValue> {
        let mut dictionary = Dictionary::new();
        dictionary.insert(key_of(LABEL)?, entry);
        HeaderValue::try_from(dictionary.serialize()?).ok()
    };
    let signature = field(ListEntry::Item(Item::new(BareItem::ByteSequence(signature))))?;
    Some([(SIGNATURE_INPUT, field(ListEntry::InnerList(input))?), (SIGNATURE, signature)])
}

/// Verifies the signature of a request. The caller judges the key and the time, and the digest of the content.
///
/// # Errors
/// The request has no signature of this form, or another request was signed.
pub fn verify(request: &SignedRequest<'_>) -> Result<Signed, SignatureError> {
    let field = |name: &HeaderName| {
        let text = lines(request.headers, name).ok_or(SignatureError::Absent)?;
        let dictionary: Dictionary = Parser::new(&text).parse().map_err(|_| SignatureError::Malformed)?;
        let mut entries = dictionary.into_iter();
        match (entries.next(), entries.next()) {
            (Some(only), None) => Ok(only),
            _ => Err(SignatureError::Malformed),
        }
    };
    let ((label, input), (same_label, signature)) = (field(&SIGNATURE_INPUT)?, field(&SIGNATURE)?);
    let (ListEntry::InnerList(input), ListEntry::Item(Item { bare_item: BareItem::ByteSequence(signature), .. })) =
        (input, signature)
    else {
        return Err(SignatureError::Malformed);
    };
    if label != same_label {
        return Err(SignatureError::Malformed);
    }
    check_components(request, &input)?;
    let integer = |name: &str| match input.params.get(name) {
        Some(BareItem::Integer(number)) => Ok(u64::try_from(i64::from(*number)).ok()),
        Some(_) => Err(SignatureError::Parameters),
        None => Ok(None),
    };
    let text = |name: &str| match input.params.get(name) {
        Some(BareItem::String(text)) => Ok(Some(text.as_str())),
        Some(_) => Err(SignatureError::Parameters),
        None => Ok(None),
    };
    if text("alg")?.is_some_and(|algorithm| algorithm != ALGORITHM) {
        return Err(SignatureError::Parameters);
    }
    let created = integer("created")?.ok_or(SignatureError::Parameters)?;
    let key = text("keyid")?.and_then(PublicKey::parse).ok_or(SignatureError::Parameters)?;
    let base = request.base(&input).ok_or(SignatureError::Components)?;
    if !key.verifies(base.as_bytes(), &signature) {
        return Err(SignatureError::Forged);
    }
    Ok(Signed { key, created, expires: integer("expires")?, signature })
}

/// A signature covers each component that the request has, once and without parameters, and no other.
fn check_components(request: &SignedRequest<'_>, input: &InnerList) -> Result<(), SignatureError> {
    let covered: Option<Vec<&str>> = input
        .items
        .iter()
        .map(|item| match &item.bare_item {
            BareItem::String(component) if item.params.is_empty() => Some(component.as_str()),
            _ => None,
        })
        .collect();
    let mut covered = covered.ok_or(SignatureError::Components)?;
    let mut wanted: Vec<&str> = COMPONENTS.into_iter().filter(|component| request.value(component).is_some()).collect();
    covered.sort_unstable();
    wanted.sort_unstable();
    if covered == wanted { Ok(()) } else { Err(SignatureError::Components) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn signed(method: &Method, path: &str, headers: &HeaderMap) -> (HeaderMap, PublicKey) {
        let (key, _) = SigningKey::generate().expect("a key");
        let request = SignedRequest { method, authority: "relay.example", path, query: None, headers };
        let mut headers = headers.clone();
        headers.extend(sign(&key, &request, 1_700_000_000, "n").expect("a signature"));
        (headers, *key.public())
    }

    fn verified(method: &Method, authority: &str, path: &str, headers: &HeaderMap) -> Result<Signed, SignatureError> {
        verify(&SignedRequest { method, authority, path, query: None, headers })
    }

    #[test]
    fn a_signature_fits_its_request_alone() {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_DIGEST, crate::content_digest(b"x"));
        let (headers, key) = signed(&Method::PUT, "/pk/a", &headers);
        let signed = verified(&Method::PUT, "relay.example", "/pk/a", &headers).expect("a signature");
        assert_eq!((signed.key, signed.created, signed.expires), (key, 1_700_000_000, None));
        let forged = Err(SignatureError::Forged);
        assert_eq!(verified(&Method::POST, "relay.example", "/pk/a", &headers), forged);
        assert_eq!(verified(&Method::PUT, "other.example", "/pk/a", &headers), forged);
        assert_eq!(verified(&Method::PUT, "relay.example", "/pk/b", &headers), forged);
        let mut other = headers.clone();
        other.insert(CONTENT_DIGEST, crate::content_digest(b"y"));
        assert_eq!(verified(&Method::PUT, "relay.example", "/pk/a", &other), forged);
        // Without the digest, and with a query.
        other.remove(CONTENT_DIGEST);
        let too_little = Err(SignatureError::Components);
        assert_eq!(verified(&Method::PUT, "relay.example", "/pk/a", &other), too_little);
        let with_query = SignedRequest {
            method: &Method::PUT,
            authority: "relay.example",
            path: "/pk/a",
            query: Some("x"),
            headers: &headers,
        };
        assert_eq!(verify(&with_query), too_little);
    }

    #[test]
    fn other_forms_are_refused() {
        let (headers, _) = signed(&Method::GET, "/pk/a", &HeaderMap::new());
        let input = headers[SIGNATURE_INPUT].to_str().expect("text").to_owned();
        let signature = headers[SIGNATURE].to_str().expect("text").to_owned();
        let with = |input: &str, signature: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(SIGNATURE_INPUT, input.parse().expect("a value"));
            headers.insert(SIGNATURE, signature.parse().expect("a value"));
            verified(&Method::GET, "relay.example", "/pk/a", &headers).map(drop)
        };
        assert_eq!(with(&input, &signature), Ok(()));
        use SignatureError::{Absent, Components, Forged, Malformed, Parameters};
        let replaced = |from: &str, to: &str| {
            assert!(input.contains(from), "{input}");
            input.replace(from, to)
        };
        for (input, signature, error) in [
            (replaced("hermes=", "other="), signature.clone(), Malformed),
            (format!("{input}, b=()"), signature.clone(), Malformed),
            (input.clone(), format!("{signature}, b=:AA==:"), Malformed),
            (input.clone(), "hermes=1".to_owned(), Malformed),
            ("hermes=1".to_owned(), signature.clone(), Malformed),
            ("(".to_owned(), signature.clone(), Malformed),
            (replaced("\"@method\" ", ""), signature.clone(), Components),
            (replaced("\"@method\"", "\"@method\" \"@method\""), signature.clone(), Components),
            (replaced("\"@method\"", "\"@method\" \"accept\""), signature.clone(), Components),
            (replaced("\"@method\"", "\"@method\";req"), signature.clone(), Components),
            (replaced("created=1700000000", "created=-1"), signature.clone(), Parameters),
            (replaced(";created=1700000000", ""), signature.clone(), Parameters),
            (replaced("ed25519", "hmac-sha256"), signature.clone(), Parameters),
            (replaced("keyid=\"", "keyid=\"A"), signature.clone(), Parameters),
            (replaced("nonce=\"n\"", "nonce=\"m\""), signature.clone(), Forged),
            (input.clone(), "hermes=:AAAA:".to_owned(), Forged),
        ] {
            assert_eq!(with(&input, &signature), Err(error), "{input} {signature}");
        }
        assert_eq!(verified(&Method::GET, "relay.example", "/pk/a", &HeaderMap::new()), Err(Absent));
    }

    /// The key of the RFC (appendix B.1.4), and a signature of this form that another program made with it.
    #[test]
    fn a_signature_of_another_program_fits() {
        let headers: HeaderMap =
            [(SIGNATURE_INPUT, HeaderValue::from_static(INPUT)), (SIGNATURE, HeaderValue::from_static(VALUE))]
                .into_iter()
                .collect();
        let signed = verified(&Method::GET, "relay.example", "/pk/a", &headers).expect("a signature");
        assert_eq!(signed.key.to_string(), "JrQLj5P_89iXES9-vFgrIy29clF9CC_oPPsw3c5D0bs");
    }

    const INPUT: &str = "sig1=(\"@method\" \"@authority\" \"@path\");created=1618884473;\
                         keyid=\"JrQLj5P_89iXES9-vFgrIy29clF9CC_oPPsw3c5D0bs\"";
    const VALUE: &str =
        "sig1=:GUiKAW7R3+p89EKvpmYuwgEmS98ypxAIluplI8YTenCyGmQxtD92+cRYnlQtcZY6sXBGCwdmdCuQmd8hzwoLAw==:";
}
