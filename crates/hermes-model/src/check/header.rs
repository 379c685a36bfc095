//! Header names and values of a document: which may be matched, and which may be changed.

use std::collections::BTreeMap;
use std::collections::HashSet;

use http::{HeaderName, HeaderValue};

use super::report::Report;
use crate::rewrite::{HeaderRewrite, Template};
use crate::scalar::Many;

/// Fields of one connection (RFC 9110, 7.6.1; RFC 9113, 8.2.2), which every node makes anew.
const HOP_BY_HOP: [&str; 8] =
    ["connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "http2-settings"];

/// Reads a name that is matched or hashed on.
pub(super) fn name(text: &str) -> Result<HeaderName, String> {
    if let Some(pseudo) = text.strip_prefix(':') {
        let instead = match pseudo {
            "authority" => "match.authority, or rewrite.authority",
            "method" => "match.method",
            "path" => "match.path, or rewrite.path",
            _ => "the keys of their own",
        };
        return Err(format!("{text:?} is a pseudo-header of HTTP/2 and no field; use {instead}"));
    }
    HeaderName::from_bytes(text.as_bytes())
        .map_err(|_| format!("{text:?} is no header name; write letters, digits and hyphens, such as x-request-id"))
}

/// Reads a name that is set, added or removed.
pub(super) fn changeable(text: &str) -> Result<HeaderName, String> {
    let name = name(text)?;
    let lower = name.as_str();
    if HOP_BY_HOP.contains(&lower) {
        return Err(format!("{lower} belongs to one connection, and every node makes its own; leave it out"));
    }
    match lower {
        "host" => Err("host is the request's authority; use rewrite.authority".to_owned()),
        "content-length" => {
            Err("content-length frames the body, and the node counts by itself; leave it out".to_owned())
        }
        "via" => Err("via is how loops are found; leave it out".to_owned()),
        _ => Ok(name),
    }
}

/// Reads a map of names to fixed values.
pub(super) fn fixed(
    at: &str,
    section: &BTreeMap<String, String>,
    report: &mut Report,
) -> Vec<(HeaderName, HeaderValue)> {
    let mut seen = Seen::default();
    let mut headers = Vec::new();
    for (text, value) in section {
        let place = || format!("{at}.{text}");
        let name = report.take(place, changeable(text).and_then(|name| seen.once(name)));
        let value = report.take(place, HeaderValue::from_str(value).map_err(|_| illegal_value()));
        headers.extend(name.zip(value));
    }
    headers
}

/// The value itself is not told: it may be a secret.
fn illegal_value() -> String {
    "this is no header value; it may hold visible ASCII characters, spaces and tabs, and no line break".to_owned()
}

/// Reads the changes to the headers of one direction.
pub(super) fn rewrite(
    at: &str,
    set: &BTreeMap<String, Template>,
    add: &BTreeMap<String, Many<Template>>,
    remove: &Many<String>,
    report: &mut Report,
) -> HeaderRewrite {
    let mut result = HeaderRewrite::default();
    let mut seen = Seen::default();
    for (text, value) in set {
        let place = || format!("{at}.set-headers.{text}");
        let name = report.take(place, changeable(text).and_then(|name| seen.once(name)));
        let value = report.take(place, template(value));
        result.set.extend(name.zip(value));
    }
    for (text, values) in add {
        let place = || format!("{at}.add-headers.{text}");
        let name = report.take(place, changeable(text));
        for value in values.iter() {
            let value = report.take(place, template(value));
            result.add.extend(name.clone().zip(value));
        }
    }
    for (index, text) in remove.iter().enumerate() {
        let place = || format!("{at}.remove-headers[{index}]");
        result.remove.extend(report.take(place, changeable(text)));
    }
    result
}

/// The fixed text of a template must be fit for a header; what is filled in is judged then.
fn template(template: &Template) -> Result<Template, String> {
    if template.literals().all(|text| HeaderValue::from_str(text).is_ok()) {
        Ok(template.clone())
    } else {
        Err(illegal_value())
    }
}

/// Names that were seen in a map; `X-A` and `x-a` are one.
#[derive(Default)]
pub(super) struct Seen(HashSet<HeaderName>);

impl Seen {
    pub(super) fn once(&mut self, name: HeaderName) -> Result<HeaderName, String> {
        if self.0.insert(name.clone()) {
            Ok(name)
        } else {
            Err(format!("{name} stands here twice, in different cases; keep one"))
        }
    }
}
