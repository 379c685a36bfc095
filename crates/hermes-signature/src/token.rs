//! Tokens in URLs: JSON Web Tokens (RFC 7519) with Ed25519 (`EdDSA`, RFC 8037), in one strict form.
//!
//! In: a token and the keys that count. Out: its grant: which client may do what on which channels, and until when. Never: a
//! token without a client, an audience or an end. So a token that leaks is of no use to anybody else.

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use serde::{Deserialize, Serialize};

use crate::{PublicKey, SigningKey};

/// The longest token, in bytes.
const MAX_TOKEN_BYTES: usize = 4096;
/// The most paths of a grant.
const MAX_CHANNELS: usize = 64;
/// The longest time until `exp`, in seconds.
const MAX_LIFE: u64 = 30 * 86_400;

/// An action on a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Right {
    /// To subscribe.
    Subscribe,
    /// To publish.
    Publish,
}

/// The claims of a token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// The authority of the channels, as in `relay.example:8443`.
    pub aud: String,
    /// The client: `user/NAME` or `address/IP`.
    pub sub: String,
    /// Paths of channels. One that ends in `/*` stands for all below it.
    pub channels: Vec<String>,
    /// The actions.
    pub rights: Vec<Right>,
    /// The end, in seconds since 1970.
    pub exp: u64,
    /// The beginning, in seconds since 1970. `None` means that it is in the past.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nbf: Option<u64>,
}

/// The reason why a token does not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// It is no token of this form.
    #[error("malformed token; make a JSON Web Token with EdDSA and the claims aud, sub, channels, rights and exp")]
    Malformed,
    /// No key that counts has signed it.
    #[error("the token has no signature of a key in `tokens`")]
    NotSigned,
    /// Its time has passed, has not begun, or is too long.
    #[error("the token is not valid now, or is valid for more than 30 days; check exp, nbf and the clocks")]
    NotNow,
}

#[derive(Serialize, Deserialize)]
struct Head {
    alg: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    typ: Option<String>,
    /// Extensions that must be understood. This form has none.
    #[serde(default, skip_serializing)]
    crit: Option<serde_json::Value>,
}

impl Grant {
    /// The token of this grant.
    pub fn sign(&self, key: &SigningKey) -> String {
        let head = Head { alg: "EdDSA".to_owned(), typ: Some("JWT".to_owned()), crit: None };
        // Neither has a map whose keys could be unfit.
        let part = |json: Result<Vec<u8>, _>| BASE64_URL_SAFE_NO_PAD.encode(json.unwrap_or_default());
        let signed = format!("{}.{}", part(serde_json::to_vec(&head)), part(serde_json::to_vec(self)));
        let signature = BASE64_URL_SAFE_NO_PAD.encode(key.sign(signed.as_bytes()));
        format!("{signed}.{signature}")
    }

    /// Reads a token that one of these keys has signed. `now`: seconds since 1970.
    ///
    /// # Errors
    /// It is malformed, of another key or another time.
    pub fn verify(token: &str, keys: &[PublicKey], now: u64) -> Result<Self, TokenError> {
        if token.len() > MAX_TOKEN_BYTES {
            return Err(TokenError::Malformed);
        }
        let (signed, signature) = token.rsplit_once('.').ok_or(TokenError::Malformed)?;
        let (head, claims) = signed.split_once('.').ok_or(TokenError::Malformed)?;
        let decode = |part: &str| BASE64_URL_SAFE_NO_PAD.decode(part).map_err(|_| TokenError::Malformed);
        let (head, claims, signature) = (decode(head)?, decode(claims)?, decode(signature)?);
        // Nothing of the token counts before its signature does.
        if !keys.iter().any(|key| key.verifies(signed.as_bytes(), &signature)) {
            return Err(TokenError::NotSigned);
        }
        let head: Head = serde_json::from_slice(&head).map_err(|_| TokenError::Malformed)?;
        let grant: Self = serde_json::from_slice(&claims).map_err(|_| TokenError::Malformed)?;
        if head.alg != "EdDSA" || head.crit.is_some() || grant.channels.len() > MAX_CHANNELS {
            return Err(TokenError::Malformed);
        }
        let has_begun = grant.nbf.is_none_or(|begin| begin <= now);
        if !has_begun || grant.exp <= now || grant.exp - now > MAX_LIFE {
            return Err(TokenError::NotNow);
        }
        Ok(grant)
    }

    /// Whether the grant is for this path, which has no needless escapes.
    pub fn has_channel(&self, path: &str) -> bool {
        self.channels.iter().any(|channel| match channel.strip_suffix('*') {
            Some(base) => base.ends_with('/') && path.starts_with(base),
            None => path == channel,
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const NOW: u64 = 1_800_000_000;

    fn grant() -> Grant {
        Grant {
            aud: "relay.example".to_owned(),
            sub: "user/alice".to_owned(),
            channels: vec!["/rooms/*".to_owned(), "/news".to_owned()],
            rights: vec![Right::Subscribe],
            exp: NOW + 60,
            nbf: None,
        }
    }

    #[test]
    fn a_token_counts_for_its_key_and_time() {
        let [key, other] = [(); 2].map(|()| SigningKey::generate().unwrap().0);
        let keys = [*other.public(), *key.public()];
        let token = grant().sign(&key);
        assert_eq!(Grant::verify(&token, &keys, NOW), Ok(grant()));
        assert_eq!(Grant::verify(&token, &keys[..1], NOW), Err(TokenError::NotSigned));
        assert_eq!(Grant::verify(&token, &keys, NOW + 60), Err(TokenError::NotNow));
        let later = Grant { nbf: Some(NOW + 1), ..grant() }.sign(&key);
        assert_eq!(Grant::verify(&later, &keys, NOW), Err(TokenError::NotNow));
        let endless = Grant { exp: u64::MAX, ..grant() }.sign(&key);
        assert_eq!(Grant::verify(&endless, &keys, NOW), Err(TokenError::NotNow));
        for at in 0..token.len() {
            let mut changed = token.clone().into_bytes();
            changed[at] = if changed[at] == b'A' { b'B' } else { b'A' };
            let changed = String::from_utf8(changed).unwrap();
            assert!(Grant::verify(&changed, &keys, NOW).is_err(), "byte {at}");
        }
    }

    #[test]
    fn other_forms_of_tokens_are_refused() {
        let (key, _) = SigningKey::generate().unwrap();
        let keys = [*key.public()];
        let signed = |head: &str, claims: &str| {
            let part = |text: &str| BASE64_URL_SAFE_NO_PAD.encode(text);
            let signed = format!("{}.{}", part(head), part(claims));
            let signature = BASE64_URL_SAFE_NO_PAD.encode(key.sign(signed.as_bytes()));
            Grant::verify(&format!("{signed}.{signature}"), &keys, NOW)
        };
        let claims = serde_json::to_string(&grant()).unwrap();
        assert_eq!(signed("{\"alg\":\"EdDSA\"}", &claims), Ok(grant()));
        for head in ["{\"alg\":\"none\"}", "{\"alg\":\"HS256\"}", "{\"alg\":\"EdDSA\",\"crit\":[\"x\"]}", "{}"] {
            assert_eq!(signed(head, &claims), Err(TokenError::Malformed), "{head}");
        }
        for claim in ["aud", "sub", "channels", "rights", "exp"] {
            let mut claims = serde_json::to_value(grant()).unwrap();
            claims.as_object_mut().unwrap().remove(claim);
            assert_eq!(signed("{\"alg\":\"EdDSA\"}", &claims.to_string()), Err(TokenError::Malformed), "{claim}");
        }
        let unsigned = format!("{}.", grant().sign(&key).rsplit_once('.').unwrap().0);
        assert_eq!(Grant::verify(&unsigned, &keys, NOW), Err(TokenError::NotSigned));
        for text in ["", ".", "..", "a.b.c", "a"] {
            assert!(Grant::verify(text, &keys, NOW).is_err(), "{text}");
        }
    }

    #[test]
    fn a_star_stands_for_what_is_below() {
        let grant = grant();
        let granted = ["/rooms/a", "/rooms/a/b", "/rooms/", "/news"];
        assert!(granted.iter().all(|path| grant.has_channel(path)));
        let others = ["/rooms", "/roomsa", "/news/a", "/", "/new"];
        assert!(!others.iter().any(|path| grant.has_channel(path)));
        let odd = Grant { channels: vec!["*".to_owned(), "/a*".to_owned()], ..grant };
        assert!(!odd.has_channel("/ab") && !odd.has_channel("/"));
    }
}
