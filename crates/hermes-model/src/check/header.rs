//! Header fields of a document: names that may be matched, and names that may be changed.

use std::collections::BTreeMap;
use std::collections::HashSet;

use http::{HeaderName, HeaderValue};

use super::report::Report;
use crate::rewrite::{HeaderRewrite, Template};
use crate::scalar::OneOrMany;

/// Fields of a single connection (RFC 9110, 7.6.1; RFC 9113, 8.2.2), which each node generates.
const HOP_BY_HOP: [&str; 8] =
    ["connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "http2-settings"];

/// Parses a field name to match or to hash.
pub(super) fn name(text: &str) -> Result<HeaderName, String> {
    if let Some(pseudo) = text.strip_prefix(':') {
        let instead = match pseudo {
            "authority" => "match.authority, or rewrite.authority",
            "method" => "match.method",
            "path" => "match.path, or rewrite.path",
            _ => "the corresponding key",
        };
        return Err(format!("invalid field name {text:?}: a pseudo-header of HTTP/2; use {instead}"));
    }
    HeaderName::from_bytes(text.as_bytes())
        .map_err(|_| format!("invalid field name {text:?}; use letters, digits and hyphens, such as x-request-id"))
}

/// Parses a field name to set, add or remove.
pub(super) fn changeable(text: &str) -> Result<HeaderName, String> {
    let name = name(text)?;
    let lower = name.as_str();
    if HOP_BY_HOP.contains(&lower) {
        return Err(format!("{lower} is a hop-by-hop field, which each node generates; remove it"));
    }
    match lower {
        "host" => Err("host is the authority of the request; use rewrite.authority".to_owned()),
        "content-length" => Err("content-length is computed by the node; remove it".to_owned()),
        "via" => Err("via is reserved for loop detection; remove it".to_owned()),
        _ => Ok(name),
    }
}

/// Parses a map of field names to fixed values.
pub(super) fn fixed(
    at: &str,
    section: &BTreeMap<String, String>,
    report: &mut Report,
) -> Vec<(HeaderName, HeaderValue)> {
    let mut seen = UniqueNames::default();
    let mut headers = Vec::new();
    for (text, value) in section {
        let place = || format!("{at}.{text}");
        let name = report.ok_or_report(place, changeable(text).and_then(|name| seen.insert(name)));
        let value = report.ok_or_report(place, HeaderValue::from_str(value).map_err(|_| illegal_value()));
        headers.extend(name.zip(value));
    }
    headers
}

/// The message leaves out the value, which may be a secret.
fn illegal_value() -> String {
    "invalid field value; use visible ASCII characters, spaces and tabs, without line breaks".to_owned()
}

/// Parses the changes to the header of one direction.
pub(super) fn rewrite(
    at: &str,
    set: &BTreeMap<String, Template>,
    add: &BTreeMap<String, OneOrMany<Template>>,
    remove: &OneOrMany<String>,
    report: &mut Report,
) -> HeaderRewrite {
    let mut result = HeaderRewrite::default();
    let mut seen = UniqueNames::default();
    for (text, value) in set {
        let place = || format!("{at}.set-headers.{text}");
        let name = report.ok_or_report(place, changeable(text).and_then(|name| seen.insert(name)));
        let value = report.ok_or_report(place, template(value));
        result.set.extend(name.zip(value));
    }
    for (text, values) in add {
        let place = || format!("{at}.add-headers.{text}");
        let name = report.ok_or_report(place, changeable(text));
        for value in values.iter() {
            let value = report.ok_or_report(place, template(value));
            result.add.extend(name.clone().zip(value));
        }
    }
    for (index, text) in remove.iter().enumerate() {
        let place = || format!("{at}.remove-headers[{index}]");
        result.remove.extend(report.ok_or_report(place, changeable(text)));
    }
    result
}

/// Validates the literal text of a template; expanded values are validated with each request.
fn template(template: &Template) -> Result<Template, String> {
    if template.literals().all(|text| HeaderValue::from_str(text).is_ok()) {
        Ok(template.clone())
    } else {
        Err(illegal_value())
    }
}

/// Field names of a map, to detect duplicates: `X-A` and `x-a` are the same name.
#[derive(Default)]
pub(super) struct UniqueNames(HashSet<HeaderName>);

impl UniqueNames {
    pub(super) fn insert(&mut self, name: HeaderName) -> Result<HeaderName, String> {
        if self.0.insert(name.clone()) {
            Ok(name)
        } else {
            Err(format!("duplicate field {name}, in different case; keep one"))
        }
    }
}
