//! Cache keys: the target, and the fields that `Vary` names (RFC 9111, sections 2 and 4.1).
//!
//! In: the head of a request after its route's rewrite. The origin's response depends on exactly that head, so nothing
//! else of the request counts. Out: keys, and whether a stored response matches a request.

use std::fmt::Write as _;
use std::sync::Arc;

use hermes_model::authority::Authority;
use http::header::{ACCEPT_ENCODING, ACCEPT_LANGUAGE, HeaderName, VARY};
use http::uri::{PathAndQuery, Scheme};
use http::{HeaderMap, Uri};

/// Maximum number of fields in `Vary`. A response with more would hardly match a second request.
const MAX_FIELDS: usize = 16;

/// The target of a request: its URI, and in a private cache its user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The user of a private cache; `None` in a shared cache, or if the user is unknown.
    user: Option<Arc<str>>,
    scheme: Scheme,
    authority: Authority,
    path: PathAndQuery,
}

impl Target {
    /// Creates a target. `user` is `None` in a shared cache.
    pub fn new(scheme: Scheme, authority: Authority, path: PathAndQuery, user: Option<Arc<str>>) -> Self {
        Self { user, scheme, authority, path }
    }

    /// Returns a unique key. The length of the user name precedes it, because the name may contain any character.
    pub fn key(&self) -> Arc<str> {
        let mut key = String::with_capacity(64);
        if let Some(user) = &self.user {
            let _ = write!(key, "{}:{user} ", user.len());
        }
        let _ = write!(key, "{}://{}{}", self.scheme, self.authority, self.path);
        key.into()
    }

    /// Resolves a URI reference in a response, such as `Location`, to a target. Returns `None` for another origin,
    /// because a response must not invalidate targets of other origins (RFC 9111, section 4.4).
    pub fn named(&self, reference: &str) -> Option<Self> {
        let reference = reference.split('#').next().unwrap_or_default();
        let path = if let Some(rest) = reference.strip_prefix("//") {
            return self.named(&format!("{}://{rest}", self.scheme));
        } else if reference.contains("://") {
            let uri: Uri = reference.parse().ok()?;
            let authority = Authority::parse(uri.authority()?.as_str(), None).ok()?;
            if uri.scheme() != Some(&self.scheme) || !self.is_at(&authority) {
                return None;
            }
            uri.path_and_query()?.clone()
        } else if reference.starts_with('/') {
            reference.parse().ok()?
        } else if reference.is_empty() || reference.starts_with('?') {
            format!("{}{reference}", self.path.path()).parse().ok()?
        } else {
            let folder = self.path.path().rsplit_once('/').map_or("", |(folder, _)| folder);
            format!("{folder}/{reference}").parse().ok()?
        };
        Some(Self { path, ..self.clone() })
    }

    fn is_at(&self, authority: &Authority) -> bool {
        let default = if self.scheme == Scheme::HTTPS { 443 } else { 80 };
        let port = |authority: &Authority| authority.port().unwrap_or(default);
        self.authority.host().eq_ignore_ascii_case(authority.host()) && port(&self.authority) == port(authority)
    }
}

/// The request fields that selected a response, with their values; `None` if the request lacks a field.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Vary(pub Vec<(HeaderName, Option<String>)>);

impl Vary {
    /// Reads the fields that `Vary` names from `request`. Returns `None` for `*`, an invalid name, or too many fields.
    pub fn of(response: &HeaderMap, request: &HeaderMap) -> Option<Self> {
        let mut names = Vec::new();
        for line in response.get_all(VARY) {
            for name in line.as_bytes().split(|byte| *byte == b',').map(<[u8]>::trim_ascii) {
                if name == b"*" {
                    return None;
                }
                if !name.is_empty() {
                    names.push(HeaderName::from_bytes(name).ok()?);
                }
            }
        }
        names.sort_by(|a, b| a.as_str().cmp(b.as_str()));
        names.dedup();
        if names.len() > MAX_FIELDS {
            return None;
        }
        Some(Self(names.into_iter().map(|name| (name.clone(), said(request, &name))).collect()))
    }

    /// Whether a response with these headers varies on the same fields.
    pub fn is_of(&self, headers: &HeaderMap) -> bool {
        Self::of(headers, &HeaderMap::new()).is_some_and(|other| {
            let names = |vary: &Self| vary.0.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
            names(&other) == names(self)
        })
    }

    /// Whether a request with these headers selects the same response.
    pub fn is_met_by(&self, request: &HeaderMap) -> bool {
        self.0.iter().all(|(name, value)| said(request, name) == *value)
    }

    /// Estimated bytes in memory.
    pub fn bytes(&self) -> usize {
        self.0.iter().map(|(name, value)| name.as_str().len() + value.as_ref().map_or(0, String::len) + 32).sum()
    }
}

/// Returns a field's value in a request, normalized as RFC 9111, section 4.1 allows: lines are joined, and whitespace
/// around commas is removed.
fn said(request: &HeaderMap, name: &HeaderName) -> Option<String> {
    if !request.contains_key(name) {
        return None;
    }
    // Each byte becomes one character, so that values that differ in bytes differ here.
    let lines = request.get_all(name).iter().map(|line| line.as_bytes().iter().map(|byte| char::from(*byte)));
    let lines = lines.map(Iterator::collect::<String>);
    let mut text = String::new();
    for line in lines {
        for part in line.split(',') {
            if !text.is_empty() {
                text.push(',');
            }
            text.push_str(part.trim());
        }
    }
    if *name == ACCEPT_LANGUAGE || *name == ACCEPT_ENCODING {
        // Both fields are case-insensitive, and browsers differ in case.
        text.make_ascii_lowercase();
        text.retain(|c| c != ' ');
    }
    Some(text)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn headers(lines: &[(&'static str, &'static str)]) -> HeaderMap {
        lines.iter().map(|(name, value)| (HeaderName::from_static(name), value.parse().unwrap())).fold(
            HeaderMap::new(),
            |mut all, (name, value)| {
                all.append(name, value);
                all
            },
        )
    }

    fn target(user: Option<&str>, path: &'static str) -> Target {
        let authority = Authority::parse("web:80", None).unwrap();
        Target { user: user.map(Arc::from), scheme: Scheme::HTTP, authority, path: PathAndQuery::from_static(path) }
    }

    #[test]
    fn fields_choose_a_response() {
        let vary = |response: &[_], request: &[_]| Vary::of(&headers(response), &headers(request));
        let foo = vary(&[("vary", "Foo, bar"), ("vary", ""), ("vary", "foo")], &[("foo", "1")]).unwrap();
        assert!(foo.is_met_by(&headers(&[("foo", "1"), ("other", "2")])));
        assert!(!foo.is_met_by(&headers(&[("foo", "2")])));
        assert!(!foo.is_met_by(&headers(&[])));
        assert!(!foo.is_met_by(&headers(&[("foo", "1"), ("bar", "")])));
        let two = vary(&[("vary", "foo")], &[("foo", "1, 2")]).unwrap();
        assert!(two.is_met_by(&headers(&[("foo", "1"), ("foo", "2")])));
        assert!(!two.is_met_by(&headers(&[("foo", "2"), ("foo", "1")])));
        let language = vary(&[("vary", "accept-language")], &[("accept-language", "en, De")]).unwrap();
        assert!(language.is_met_by(&headers(&[("accept-language", "EN,de")])));
        for star in ["*", "*, *", ", *", "foo, *", "*, foo", "f oo"] {
            assert_eq!(vary(&[("vary", star)], &[]), None, "{star}");
        }
        let many: HeaderMap = (0..=MAX_FIELDS).map(|at| (VARY, format!("f{at}").parse().unwrap())).fold(
            HeaderMap::new(),
            |mut all, line| {
                all.append(line.0, line.1);
                all
            },
        );
        assert_eq!(Vary::of(&many, &HeaderMap::new()), None);
    }

    #[test]
    fn users_have_keys_of_their_own() {
        assert_ne!(target(None, "/").key(), target(Some("a"), "/").key());
        assert_ne!(target(Some("a"), "/").key(), target(Some("b"), "/").key());
        // A user name that looks like a part of the key.
        assert_ne!(target(Some("a http://web:80/ 1:b"), "/").key(), target(Some("a"), "/").key());
        assert_ne!(target(None, "/?a").key(), target(None, "/?b").key());
    }

    #[test]
    fn a_response_speaks_of_its_own_origin() {
        let base = target(None, "/a/b?c");
        let named = |reference| base.named(reference).map(|target| target.path.to_string());
        for (reference, path) in [
            ("/x?y#z", Some("/x?y")),
            ("x", Some("/a/x")),
            ("?d", Some("/a/b?d")),
            ("", Some("/a/b")),
            ("http://web/x", Some("/x")),
            ("http://WEB:80/x", Some("/x")),
            ("//web/x", Some("/x")),
            ("https://web/x", None),
            ("http://other/x", None),
            ("http://web:81/x", None),
            ("http://", None),
        ] {
            assert_eq!(named(reference).as_deref(), path, "{reference}");
        }
    }
}
