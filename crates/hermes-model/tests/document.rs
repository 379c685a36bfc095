//! The document as data: it serialises and parses to itself, redaction removes secrets, and the reference contains
//! every key.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;

use hermes_model::check::check_document;
use hermes_model::document::Document;
use hermes_model::limits::Limits;
use hermes_model::{Snapshot, check};

const BASE: &str = "/etc/hermes";

fn snapshot(text: &str) -> Snapshot {
    match check(text, Path::new(BASE)) {
        Ok(checked) => checked.snapshot,
        Err(problems) => panic!("{text}\n{problems:?}"),
    }
}

fn reference() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/node-document.md");
    fs::read_to_string(path).unwrap()
}

#[test]
fn a_document_survives_being_written_and_read_again() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/config/valid");
    let mut count = 0;
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "yaml") {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        let first = snapshot(&text);
        // JSON is YAML. The redacted document lacks possible secrets.
        let written = serde_json::to_string(&serde_saphyr::from_str::<Document>(&text).unwrap()).unwrap();
        let second = snapshot(&written);
        assert_eq!(first.redacted, second.redacted, "{}", path.display());
        assert_eq!(
            (&first.listeners, &first.routes, &first.upstreams),
            (&second.listeners, &second.routes, &second.upstreams)
        );
        assert_eq!((&first.limits, &first.users, &first.identity), (&second.limits, &second.users, &second.identity));

        let document: Document = serde_json::from_str(&written).unwrap();
        let third = check_document(document, Path::new(BASE)).unwrap().snapshot;
        assert_eq!(first.redacted, third.redacted, "{}", path.display());
        count += 1;
    }
    assert!(count > 10, "{count} documents");
}

#[test]
fn relative_files_start_from_the_documents_directory() {
    let text = "{node: a, access-log: log/s.json, identity: {cert: a.pem, key: /keys/a.key, ca: ../ca.pem}}";
    let snapshot = snapshot(text);
    let files = snapshot.identity.unwrap();
    assert_eq!(files.cert, Path::new("/etc/hermes/a.pem"));
    assert_eq!(files.key, Path::new("/keys/a.key"));
    assert_eq!(files.ca, Path::new("/etc/hermes/../ca.pem"));
    assert_eq!(snapshot.access_log, hermes_model::snapshot::AccessLog::File("/etc/hermes/log/s.json".into()));
}

#[test]
fn secrets_are_not_shown() {
    let text = "
node: a
listeners:
- {name: l, bind: '127.0.0.1:1', protocol: http, set-headers: {Authorization: Bearer s3cret, x-plain: s3cret}}
routes:
- name: r
  match: {headers: {cookie: [s3cret, 's3cret*'], x-api-key: s3cret, dpop: s3cret, x-jwt: s3cret, x-sig: s3cret, accept: shown}}
  upstream: u
  rewrite:
    query: {set: {access_token: s3cret, sig: s3cret, page: s3cret}}
    set-headers: {Proxy-Authorization: Basic s3cret}
    add-headers: {x-session-secret: [s3cret, s3cret]}
    response: {set-headers: {set-cookie: s3cret, x-by: s3cret, cache-control: shown}}
- {name: s, respond: {headers: {x-password-hint: s3cret, server: shown}}}
- {name: q, redirect: {location: 'https://s3cret@shown/?sig=s3cret#token=s3cret'}}
- {name: f, redirect: {location: 'https://shown/#s3cret?s3cret'}}
- {name: p, redirect: {location: 'https://shown{path}?{query}'}}
upstreams: [{name: u, protocol: h1, endpoints: ['a:1']}]
";
    let shown = snapshot(text).redacted.to_string();
    assert!(!shown.contains("s3cret"), "{shown}");
    assert_eq!(shown.matches("shown").count(), 6, "{shown}");
    assert_eq!(shown.matches("(left out)").count(), 19, "{shown}");
}

/// An unknown key in each section, so that the problems list all known keys.
const EVERY_SECTION: &str = "
node: a
qqqqqqqqqqqqqqqq: 1
identity: {cert: a, key: b, ca: c, qqqqqqqqqqqqqqqq: 1}
limits: {qqqqqqqqqqqqqqqq: 1}
listeners:
- {name: l, bind: '127.0.0.1:1', protocol: http, tls: {qqqqqqqqqqqqqqqq: 1}, qqqqqqqqqqqqqqqq: 1}
routes:
- name: r
  qqqqqqqqqqqqqqqq: 1
  match: {qqqqqqqqqqqqqqqq: 1}
  terminate: {qqqqqqqqqqqqqqqq: 1}
  respond: {qqqqqqqqqqqqqqqq: 1}
  redirect: {location: /, qqqqqqqqqqqqqqqq: 1}
  retry: {qqqqqqqqqqqqqqqq: 1, backoff: {qqqqqqqqqqqqqqqq: 1}}
  timeout: {qqqqqqqqqqqqqqqq: 1}
  rewrite:
    qqqqqqqqqqqqqqqq: 1
    path: {to: /, qqqqqqqqqqqqqqqq: 1}
    query: {qqqqqqqqqqqqqqqq: 1}
    response: {qqqqqqqqqqqqqqqq: 1}
upstreams:
- name: u
  protocol: h1
  endpoints: ['a:1']
  qqqqqqqqqqqqqqqq: 1
  balance: {hash: {header: x, qqqqqqqqqqqqqqqq: 1}}
  health: {qqqqqqqqqqqqqqqq: 1}
  outlier: {qqqqqqqqqqqqqqqq: 1}
  tls: {qqqqqqqqqqqqqqqq: 1}
";

#[test]
fn the_reference_names_every_key() {
    let reference = reference();
    let problems = check(EVERY_SECTION, Path::new(BASE)).unwrap_err();
    let listed: Vec<&str> =
        problems.iter().filter_map(|p| Some(p.message.split_once("expected one of: ")?.1)).collect();
    assert_eq!(listed.len(), 22, "{problems:#?}");
    for key in listed.iter().flat_map(|keys| keys.split(", ")) {
        let named = [format!("`{key}`"), format!("`{key}: "), format!("{{{key}: "), format!(", {key}: ")];
        assert!(named.iter().any(|form| reference.contains(form)), "docs/reference/node-document.md lacks {key}");
    }
}

#[test]
fn the_reference_has_every_limit_with_its_default_and_range() {
    let reference = reference();
    for row in Limits::table() {
        // Other sections may have a key of the same name.
        let lines: Vec<_> = reference.lines().filter(|line| line.starts_with(&format!("| `{}` |", row.name))).collect();
        let end = format!("| {} | {} | {} |", row.default, row.min, row.max);
        assert!(lines.iter().any(|line| line.ends_with(&end)), "{}: {lines:#?}\nshould end with {end}", row.name);
    }
}

#[test]
fn the_references_example_is_valid() {
    let reference = reference();
    let example = reference.split("```yaml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let checked = check(example, Path::new(BASE)).unwrap();
    assert_eq!(checked.warnings, []);
}
