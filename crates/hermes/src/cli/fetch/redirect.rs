//! The target of a redirect (RFC 9110, section 10.2.2; RFC 3986, section 5).
//!
//! In: the requested URL, and a `Location`. Out: the next URL. Never: from TLS to plaintext, nor to another scheme than
//! HTTP.

use anyhow::{Context as _, ensure};
use http::Uri;
use http::uri::PathAndQuery;

use super::authority;

/// Returns true if both URLs have one origin. Credentials go to that origin only.
pub(super) fn same_origin(one: &Uri, other: &Uri) -> bool {
    let ((host, port), (other_host, other_port)) = (authority(one), authority(other));
    one.scheme() == other.scheme() && host.eq_ignore_ascii_case(other_host) && port == other_port
}

/// Resolves a location against a URL.
pub(super) fn resolve(from: &Uri, location: &str) -> anyhow::Result<Uri> {
    let wrong = || format!("redirected to {location:?}, which is not an http or https URL; check the origin");
    // A fragment is only for display.
    let location = location.split('#').next().unwrap_or_default();
    let absolute = if location.starts_with("//") {
        format!("{}:{location}", from.scheme_str().unwrap_or("http"))
    } else if has_scheme(location) {
        location.to_owned()
    } else {
        let path = reference(from, location);
        format!("{}://{}{path}", from.scheme_str().unwrap_or("http"), from.authority().map_or("", |a| a.as_str()))
    };
    let url: Uri = absolute.parse().with_context(wrong)?;
    super::fetchable(&url).map_err(anyhow::Error::msg).with_context(wrong)?;
    let is_worse = from.scheme_str() == Some("https") && url.scheme_str() == Some("http");
    ensure!(
        !is_worse,
        "redirected from https to {url}, which is not encrypted; fetch that URL yourself if you trust the network"
    );
    Ok(url)
}

fn has_scheme(text: &str) -> bool {
    let scheme = text.split(['/', '?']).next().unwrap_or_default().split_once(':');
    scheme.is_some_and(|(name, _)| name.starts_with(|c: char| c.is_ascii_alphabetic()))
}

/// Resolves an absolute or relative path, and a query.
fn reference(from: &Uri, location: &str) -> String {
    let base = from.path_and_query().map_or("/", PathAndQuery::path);
    let (path, query) = match location.split_once('?') {
        Some((path, query)) => (path, Some(query)),
        None => (location, None),
    };
    let joined = match path {
        "" => base.to_owned(),
        path if path.starts_with('/') => path.to_owned(),
        path => format!("{}{path}", &base[..=base.rfind('/').unwrap_or(0)]),
    };
    let clean = without_dots(&joined);
    match query {
        Some(query) => format!("{clean}?{query}"),
        None => clean,
    }
}

/// Removes dot segments (RFC 3986, section 5.2.4).
fn without_dots(path: &str) -> String {
    let mut kept: Vec<&str> = Vec::new();
    let segments: Vec<&str> = path.split('/').skip(1).collect();
    for (index, segment) in segments.iter().enumerate() {
        let is_last = index + 1 == segments.len();
        match *segment {
            "." | ".." => {
                if *segment == ".." {
                    kept.pop();
                }
                if is_last {
                    kept.push("");
                }
            }
            other => kept.push(other),
        }
    }
    format!("/{}", kept.join("/"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn locations_are_seen_from_where_they_were_said() {
        let from: Uri = "http://a:81/b/c/d?q".parse().unwrap();
        for (location, wanted) in [
            ("g", "http://a:81/b/c/g"),
            ("./g", "http://a:81/b/c/g"),
            ("../g?y#z", "http://a:81/b/g?y"),
            ("../../../g/", "http://a:81/g/"),
            ("/g", "http://a:81/g"),
            ("?y", "http://a:81/b/c/d?y"),
            ("..", "http://a:81/b/"),
            ("//h/x", "http://h/x"),
            ("https://h/x", "https://h/x"),
            ("g?u=http://x", "http://a:81/b/c/g?u=http://x"),
        ] {
            assert_eq!(resolve(&from, location).unwrap().to_string(), wanted, "{location}");
        }
        for bad in ["ftp://h/x", "http://", "mailto:a", "http://u:p@h/"] {
            assert!(resolve(&from, bad).is_err(), "{bad}");
        }
        let tls: Uri = "https://a/".parse().unwrap();
        assert!(resolve(&tls, "http://a/").unwrap_err().to_string().contains("not encrypted"));
        assert!(resolve(&tls, "/x").is_ok());
    }

    #[test]
    fn an_origin_is_scheme_host_and_port() {
        let same = |a: &str, b: &str| same_origin(&a.parse().unwrap(), &b.parse().unwrap());
        assert!(same("http://a/x", "http://A:80/y"));
        assert!(
            !same("http://a/", "http://a:8080/")
                && !same("http://a/", "https://a:80/")
                && !same("http://a/", "http://b/")
        );
    }
}
