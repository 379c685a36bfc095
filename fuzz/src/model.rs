//! Properties of the small languages in `hermes-model`: authorities, `Via`, patterns, templates, SPIFFE identifiers.
//!
//! In: bytes; if several texts are needed, one on each line. Out: nothing, or a panic.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use hermes_model::authority::{Authority, MAX_HOST_BYTES};
use hermes_model::facts::{Facts, Kind, Trust};
use hermes_model::pattern::{AuthorityPattern, PathPattern, UserPattern, ValuePattern};
use hermes_model::rewrite::{Head, PathRewrite, Rewrite, Template, TemplateValues};
use hermes_model::trust::{SpiffeKind, parse_spiffe};
use hermes_model::via::trail;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderValue, Method, header};

/// A name has a single spelling. An accepted text prints as a text with the same meaning, in lower case and without
/// characters that would split it in a URI.
pub fn authority(data: &[u8]) {
    let Ok(text) = str::from_utf8(data) else {
        return;
    };
    for default in [None, Some(80), Some(443)] {
        let Ok(authority) = Authority::parse(text, default) else {
            continue;
        };
        let host = authority.host();
        assert!(!host.is_empty() && host.len() <= MAX_HOST_BYTES);
        assert!(!host.bytes().any(|byte| byte.is_ascii_uppercase()));
        assert!(host.bytes().all(|byte| byte.is_ascii_graphic() && !b"/\\?#@[]%\"".contains(&byte)));
        assert_ne!(authority.port(), Some(0));
        let again = Authority::parse(&authority.to_string(), default);
        assert_eq!(again.as_ref(), Ok(&authority), "{authority}");
        let shouted = Authority::parse(&text.to_ascii_uppercase(), default);
        assert_eq!(shouted, Ok(authority), "case makes a difference");
    }
}

/// Lines of `Via`. Our own entry on a separate line is found regardless of the others, and counts once: nobody can hide
/// a loop behind a malformed line.
pub fn via(data: &[u8]) {
    let mut headers = HeaderMap::new();
    for line in data.split(|byte| *byte == b'\n').take(64) {
        if let Ok(value) = HeaderValue::from_bytes(line) {
            headers.append(header::VIA, value);
        }
    }
    let before = trail(&headers, "edge");
    assert!(before.hops <= data.len() + 1);
    assert!(before.hops > 0 || (!before.own && before.last.is_empty()));
    let hops = before.hops;
    headers.append(header::VIA, HeaderValue::from_static("1.1 edge:8080 (Hermes, 1)"));
    let after = trail(&headers, "EDGE");
    assert!(after.own);
    assert_eq!((after.hops, after.last), (hops + 1, "edge:8080"));
}

/// The first three lines: two patterns and a text to match, in each of the languages.
pub fn pattern(data: &[u8]) {
    let Ok(text) = str::from_utf8(data) else {
        return;
    };
    let mut lines = text.split('\n');
    let (Some(first), Some(second)) = (lines.next(), lines.next()) else {
        return;
    };
    let subject = lines.next().unwrap_or_default();
    paths(first, second, subject);
    authorities(first, second, subject);
    values(first, second, subject);
    users(first, second, subject);
}

fn paths(first: &str, second: &str, subject: &str) {
    let Ok(wide) = PathPattern::parse(first) else {
        return;
    };
    assert_eq!(PathPattern::parse(&wide.to_string()).as_ref(), Ok(&wide), "{wide} prints as another pattern");
    assert!(wide.covers(&wide), "{wide} does not cover itself");
    if wide.matches(subject) {
        assert!(subject.starts_with(wide.literal_prefix()), "{wide} and {subject}");
    }
    if let Some(exact) = wide.exact() {
        assert!(wide.matches(exact));
        assert_eq!(wide.matches(subject), exact == subject);
    }
    let Ok(narrow) = PathPattern::parse(second) else {
        return;
    };
    if wide.covers(&narrow) && narrow.matches(subject) {
        assert!(wide.matches(subject), "{wide} covers {narrow}, yet not {subject}");
    }
}

fn authorities(first: &str, second: &str, subject: &str) {
    let Ok(wide) = AuthorityPattern::parse(first) else {
        return;
    };
    assert_eq!(AuthorityPattern::parse(&wide.to_string()).as_ref(), Ok(&wide), "{wide} prints as another pattern");
    assert!(wide.covers(&wide), "{wide} does not cover itself");
    let Ok(narrow) = AuthorityPattern::parse(second) else {
        return;
    };
    for default in [None, Some(80), Some(443)] {
        let Ok(authority) = Authority::parse(subject, default) else {
            continue;
        };
        if wide.covers(&narrow) && narrow.matches(&authority) {
            assert!(wide.matches(&authority), "{wide} covers {narrow}, yet not {authority}");
        }
    }
}

fn values(first: &str, second: &str, subject: &str) {
    let Ok(wide) = ValuePattern::parse(first) else {
        return;
    };
    assert_eq!(ValuePattern::parse(&wide.to_string()).as_ref(), Ok(&wide), "{wide} prints as another pattern");
    assert!(wide.covers(&wide), "{wide} does not cover itself");
    let (Ok(narrow), Ok(value)) = (ValuePattern::parse(second), HeaderValue::from_str(subject)) else {
        return;
    };
    if wide.covers(&narrow) && narrow.matches(&value) {
        assert!(wide.matches(&value), "{wide} covers {narrow}, yet not {subject}");
    }
}

fn users(first: &str, second: &str, subject: &str) {
    let (Ok(wide), Ok(narrow)) = (UserPattern::parse(first), UserPattern::parse(second)) else {
        return;
    };
    assert_eq!(UserPattern::parse(&wide.to_string()).as_ref(), Ok(&wide));
    for user in [None, Some(subject)] {
        if wide.covers(&narrow) && narrow.matches(user) {
            assert!(wide.matches(user), "{wide} covers {narrow}, yet not {user:?}");
        }
    }
}

/// Lines: a template, the pattern and the new form of a path, the path of a request, and its authority. A rewritten
/// path is legal, and a rejected one is unchanged.
pub fn template(data: &[u8]) {
    let Ok(text) = str::from_utf8(data) else {
        return;
    };
    let mut lines = text.split('\n');
    let mut line = || lines.next().unwrap_or_default();
    let (template, from, to, path, authority) = (line(), line(), line(), line(), line());
    let Some(facts) = facts(Kind::Http, authority, path) else {
        return;
    };
    let vars = TemplateValues { facts: &facts, node: "edge-7" };
    let template = Template::parse(template);
    if let Ok(template) = &template {
        assert_eq!(Template::parse(&template.to_string()).as_ref(), Ok(template));
        if let Ok(location) = template.render_location(&vars) {
            assert!(location.to_str().is_ok_and(|text| text.bytes().all(|byte| byte.is_ascii_graphic())));
        }
    }
    for path in [PathRewrite::pattern(from, to), PathRewrite::prefix(from, to)] {
        let mut rewrite = Rewrite { path: path.ok(), ..Rewrite::default() };
        if let Ok(template) = &template {
            rewrite.authority = Some(template.clone());
            rewrite.headers.set.push((header::FORWARDED, template.clone()));
            rewrite.query.set.push(("q&=".to_owned(), template.clone()));
            rewrite.query.remove.push("token".to_owned());
        }
        apply(&rewrite, &facts, &vars);
        rewrite.authority = None;
        apply(&rewrite, &facts, &vars);
        if let Some(new) = rewrite.path.and_then(|path| path.apply(facts.path.path())) {
            // The document may contain dots; the client must not pass one through the check.
            let written = to.contains(['.', '\\']) || to.contains("%2") || to.contains("%5");
            assert!(written || climbs(facts.path.path()) || !climbs(&new), "{} becomes {new}", facts.path);
        }
    }
}

/// An origin could resolve a dot segment in this path.
fn climbs(path: &str) -> bool {
    let lower = path.to_ascii_lowercase().replace("%2e", ".");
    let segments = lower.replace("%2f", "/").replace(['\\'], "/").replace("%5c", "/");
    segments.split('/').any(|segment| matches!(segment.split(';').next(), Some("." | "..")))
}

fn apply(rewrite: &Rewrite, facts: &Facts, vars: &TemplateValues<'_>) {
    let (mut authority, mut path) = (facts.authority.clone(), facts.path.clone());
    let mut headers = HeaderMap::new();
    let head = Head { authority: &mut authority, path: &mut path, headers: &mut headers };
    match rewrite.request(head, vars) {
        Err(_) => assert!(authority == facts.authority && path == facts.path && headers.is_empty()),
        // A path that does not match is forwarded unchanged.
        Ok(()) if rewrite.query.is_empty() && path == facts.path => {}
        Ok(()) => {
            let text = path.as_str();
            assert!(text.starts_with(['/', '*']) && text.bytes().all(|byte| byte.is_ascii_graphic()), "{text}");
            let pairs = path.query().unwrap_or_default().split('&');
            assert!(
                rewrite.query.remove.is_empty() || pairs.into_iter().all(|pair| !pair.starts_with("token=")),
                "{text} still has the token"
            );
        }
    }
}

/// The session that a listener would create from these parts, or `None` if no listener would.
pub(crate) fn facts(kind: Kind, authority: &str, path: &str) -> Option<Facts> {
    Some(Facts {
        listener: Arc::from("apps"),
        kind,
        source: SocketAddr::from((Ipv4Addr::LOCALHOST, 40_000)),
        trust: Trust::Anonymous,
        user: Some(Arc::from("alice")),
        method: if kind == Kind::Http { Method::GET } else { Method::CONNECT },
        authority: Authority::parse(authority, (kind == Kind::Http).then_some(80)).ok()?,
        path: PathAndQuery::try_from(path).ok().filter(|path| path.as_str().starts_with('/'))?,
        headers: HeaderMap::new(),
        network: None,
        announced_network: None,
        protocol: None,
    })
}

/// An accepted identifier has exactly one spelling.
pub fn spiffe(data: &[u8]) {
    let Ok(text) = str::from_utf8(data) else {
        return;
    };
    let Some(id) = parse_spiffe(text) else { return };
    let kind = match id.kind {
        SpiffeKind::Node => "node",
        SpiffeKind::User => "user",
        SpiffeKind::Role => "role",
    };
    assert_eq!(format!("spiffe://{}/{kind}/{}", id.overlay, id.name), text);
    assert!(!id.overlay.is_empty() && !id.name.is_empty() && id.name != "*");
    assert!(!id.name.contains(['/', '%', '?', '#', ':']));
}
