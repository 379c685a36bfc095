//! The channels at which ends of connections receive. They have random names below a base URL.
//!
//! In: the URL of the listener, and the URLs that the other end claims. Out: own channels, and those of the other end at which
//! this one may publish. Never: a URL outside of the allowed bases, so that nobody can direct this end at a third party.

use std::net::IpAddr;

use hermes_signature::PublicKey;
use http::Uri;

/// A base of channels at which an end receives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReceiveBase {
    /// Channels are one segment below this URL.
    pub url: Uri,
    /// The local address of the subscription; `None` lets the system choose.
    pub source: Option<IpAddr>,
}

impl std::str::FromStr for ReceiveBase {
    type Err = String;

    // `URL` or `ADDRESS@URL`.
    fn from_str(text: &str) -> Result<Self, String> {
        let (source, base) = match text.split_once('@') {
            Some((source, base)) => {
                (Some(source.parse().map_err(|_| format!("{source} is no IP address; write ADDRESS@URL"))?), base)
            }
            None => (None, text),
        };
        Ok(Self { url: base.parse().map_err(|error| format!("{base}: {error}"))?, source })
    }
}

/// The URL of a new channel below this one.
pub(super) fn channel_below(base: &Uri) -> String {
    format!("{}/{:032x}", stem(base), rand::random::<u128>())
}

/// The base of the channels of a key's holder, if `listen` is a self-certifying URL to call somebody.
pub(super) fn base_of_key(listen: &Uri, key: &PublicKey) -> Option<Uri> {
    rest_after_key(listen.path())?;
    format!("{}://{}/pk/{}/to", listen.scheme_str()?, listen.authority()?, key.name()).parse().ok()
}

/// Whether this is a self-certifying URL to call somebody.
pub(super) fn is_of_key(listen: &Uri) -> bool {
    rest_after_key(listen.path()).is_some()
}

/// The rule for the channels of other ends.
#[derive(Clone, Debug)]
pub(super) struct AllowedChannels {
    bases: Vec<Uri>,
    /// Channels of any key at the same relay are allowed, too.
    keys_at: Option<Uri>,
}

impl AllowedChannels {
    /// Allows channels below `bases`, and below `listen`.
    pub(super) fn new(listen: &Uri, mut bases: Vec<Uri>) -> Self {
        bases.push(listen.clone());
        Self { bases, keys_at: Some(listen.clone()).filter(is_of_key) }
    }

    /// The URL, if this end may publish to it.
    pub(super) fn url(&self, text: &str) -> Option<Uri> {
        let url: Uri = text.parse().ok().filter(|url: &Uri| url.query().is_none())?;
        let (stem_of_url, name) = text.rsplit_once('/')?;
        let is_name = name.len() == 32 && name.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        let is_below = |base: &Uri| stem_of_url == stem(base);
        let is_of_any_key = |listen: &Uri| {
            let is_same_relay = url.scheme() == listen.scheme() && url.authority() == listen.authority();
            is_same_relay && rest_after_key(url.path()).is_some_and(|rest| rest == name)
        };
        (is_name && (self.bases.iter().any(is_below) || self.keys_at.as_ref().is_some_and(is_of_any_key)))
            .then_some(url)
    }
}

/// The URL without a query and a final slash.
fn stem(base: &Uri) -> String {
    let scheme = base.scheme_str().unwrap_or_default();
    let authority = base.authority().map_or("", |authority| authority.as_str());
    format!("{scheme}://{authority}{}", base.path().trim_end_matches('/'))
}

/// The part after `/pk/NAME/to/`.
fn rest_after_key(path: &str) -> Option<&str> {
    let (name, rest) = path.strip_prefix("/pk/")?.split_once("/to/")?;
    PublicKey::parse(name).map(|_| rest)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use hermes_signature::SigningKey;

    use super::*;

    const HEX: &str = "0123456789abcdef0123456789abcdef";

    fn uri(text: &str) -> Uri {
        text.parse().unwrap()
    }

    #[test]
    fn only_channels_below_a_base_are_allowed() {
        let allowed = AllowedChannels::new(&uri("http://relay/x/shell/"), vec![uri("https://other:444/y")]);
        for good in [format!("http://relay/x/shell/{HEX}"), format!("https://other:444/y/{HEX}")] {
            assert_eq!(allowed.url(&good).map(|url| url.to_string()), Some(good));
        }
        for bad in [
            format!("http://relay/x/{HEX}"),
            format!("http://relay/x/shell/{HEX}?a=1"),
            format!("http://relay/x/shell/more/{HEX}"),
            format!("http://relay/x/shell/../{HEX}"),
            format!("https://relay/x/shell/{HEX}"),
            format!("http://other:444/y/{HEX}"),
            format!("http://relay@evil/x/shell/{HEX}"),
            format!("http://relay.evil/x/shell/{HEX}"),
            format!("http://relay/x/shell/{}", &HEX[1..]),
            "http://relay/x/shell/".to_owned(),
            format!("/x/shell/{HEX}"),
            String::new(),
        ] {
            assert_eq!(allowed.url(&bad), None, "{bad}");
        }
    }

    #[test]
    fn a_self_certifying_listener_allows_the_channels_of_any_key() {
        let [callee, caller] = [(); 2].map(|()| *SigningKey::generate().unwrap().0.public());
        let listen = uri(&format!("http://relay/pk/{}/to/shell", callee.name()));
        let allowed = AllowedChannels::new(&listen, Vec::new());
        let base = base_of_key(&listen, &caller).unwrap();
        assert!(allowed.url(&channel_below(&base)).is_some());
        assert_eq!(allowed.url(&format!("http://relay/pk/{}/to/a/{HEX}", caller.name())), None);
        assert_eq!(allowed.url(&format!("http://evil/pk/{}/to/{HEX}", caller.name())), None);
        assert_eq!(base_of_key(&uri("http://relay/x"), &caller), None);
    }

    #[test]
    fn a_base_may_name_a_local_address() {
        let base: ReceiveBase = "192.0.2.1@http://relay/x".parse().unwrap();
        assert_eq!((base.source, base.url), ("192.0.2.1".parse().ok(), uri("http://relay/x")));
        assert!("relay@http://relay/x".parse::<ReceiveBase>().is_err());
    }
}
