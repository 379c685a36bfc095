//! The reference names every key, and its example is an overlay.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::path::Path;

use hermes_controller::catalog::Catalog;
use hermes_controller::compile::compile;
use hermes_controller::document::read;
use serde_json::Value;

fn reference() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/overlay-documents.md");
    std::fs::read_to_string(path).unwrap()
}

/// A document of each kind, with every key that is not also a key of node documents.
const ALL: &str = "\
kind: Overlay
name: x
providers: {acme: {quota: {services: 1, users: 2, groups: 3, memory: 1MiB, disk: 1MiB}}}
certificate-lifetime: 1h
rollout: {first: 1, growth: 2, settle: 1s}
programs: \"0000000000000000000000000000000000000000000000000000000000000000\"
nodes: {admin: \"127.0.0.1:9900\", drain: 1s, access-log: \"off\", limits: {connections: 100}}
---
kind: Node
name: n
role: standalone
runs: envoy
address: \"192.0.2.1:9443\"
bind: \"0.0.0.0:9443\"
http3: true
links: m
providers: acme
apps: [{bind: \"127.0.0.1:8080\", protocol: tcp, authority: \"DB:1\", user: acme/ann}, {protocol: tun, device: a, address: 10.20.0.2}, {protocol: dns, bind: \"127.0.0.1:53\", addresses: 100.64.0.0/10, forward: 192.0.2.53}]
listeners: [{name: a, bind: \"127.0.0.1:8081\", protocol: http}]
admin: \"127.0.0.1:9900\"
drain: 1s
draining: true
workers: 1
dispatch: exclusive
access-log: \"off\"
limits: {connections: 100}
---
kind: Service
provider: acme
name: S
authority: \"*.example.com\"
path: /a
method: GET
at: {node: n, http: authority, tcp: authority, udp: authority, reach: any}
for: {users: ann, groups: all}
retry: {on: [connect-failure], attempts: 2}
timeout: {connect: 1s}
custody: {}
cache: {}
upstream-rate-limit: {}
resume: {}
rewrite: {set-headers: {a: b}}
on-change: move
---
kind: Network
provider: acme
name: N
prefixes: 10.0.0.0/8
at: {node: n, device: gate, address: 10.0.0.1, assign: 10.20.0.0/16, assign-networks: true, nat: true, dnat: 10.0.0.2}
for: {users: ann, groups: all}
timeout: {connect: 1s}
---
kind: User
provider: acme
name: ann
nodes: n
---
kind: Group
provider: acme
name: all
users: ann
";

fn keys(value: &Value, depth: usize, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                found.insert(key.clone());
                // Node document sections have a reference of their own.
                if depth > 0
                    && ["apps", "at", "for", "quota", "providers", "acme", "nodes", "rollout"].contains(&key.as_str())
                {
                    keys(value, depth - 1, found);
                }
            }
        }
        Value::Array(list) => list.iter().for_each(|value| keys(value, depth, found)),
        _ => {}
    }
}

#[test]
fn the_reference_names_every_key() {
    let reference = reference();
    let mut found = BTreeSet::new();
    for resource in read(ALL).unwrap_or_else(|faults| panic!("{faults:#?}")) {
        keys(&serde_json::to_value(&resource).unwrap(), 3, &mut found);
    }
    assert!(found.len() > 30, "{found:?}");
    found.remove("acme");
    for key in found {
        let named = [format!("`{key}`"), format!("{key},"), format!(", {key}"), format!("{{{key}")];
        assert!(named.iter().any(|form| reference.contains(form.as_str())), "the reference lacks {key}");
    }
}

#[test]
fn the_references_example_is_an_overlay() {
    let reference = reference();
    let example = reference.split("```yaml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let mut catalog = Catalog::default();
    for resource in read(example).unwrap_or_else(|faults| panic!("{faults:#?}")) {
        catalog.put(resource);
    }
    let documents = compile(&catalog).unwrap_or_else(|faults| panic!("{faults:#?}"));
    assert_eq!(documents.len(), 5);
}

/// Messages and their fields: name, type, whether repeated, number.
type Messages = BTreeSet<(String, String, String, u32)>;

fn of_proto(text: &str) -> Messages {
    let (mut found, mut message) = (Messages::new(), None);
    for line in text.lines().map(str::trim) {
        let words: Vec<&str> = line.trim_end_matches([';', '{']).split_whitespace().collect();
        match words[..] {
            ["message", name] => message = Some(name.to_owned()),
            ["}"] => message = None,
            [ref repeated @ .., kind, field, "=", number] if message.is_some() => {
                let (message, kind) = (message.clone().unwrap(), [repeated, &[kind]].concat().join(" "));
                found.insert((message, field.to_owned(), kind, number.parse().unwrap()));
            }
            _ => {}
        }
    }
    found
}

fn of_source(text: &str) -> Messages {
    let (mut found, mut message, mut report) = (Messages::new(), String::new(), None);
    for line in text.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix("pub struct ") {
            message = name.trim_end_matches(" {").to_owned();
        } else if let Some(inner) = line.strip_prefix("#[prost(").and_then(|rest| rest.strip_suffix(")]")) {
            let repeated = if inner.contains(", repeated") { "repeated " } else { "" };
            let kind = format!("{repeated}{}", inner.split([' ', ',']).next().unwrap());
            let number: u32 = inner.split("tag = \"").nth(1).unwrap().trim_end_matches('"').parse().unwrap();
            report = Some((kind, number));
        } else if let Some((kind, number)) = report.take() {
            let (field, of) = line.strip_prefix("pub ").unwrap().split_once(':').unwrap();
            // A field with a message type: `Vec<TYPE>`.
            let of = of.split(['<', '>']).nth(1).unwrap_or(of).trim();
            let (field, kind) = (field.to_owned(), kind.replace("message", of));
            found.insert((message.clone(), field, kind, number));
        }
    }
    found
}

#[test]
fn the_protocol_is_what_is_spoken() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = |path: &str| std::fs::read_to_string(root.join(path)).unwrap();
    let (proto, source) = (text("../../docs/reference/control.proto"), text("src/control.rs"));
    let spoken = of_source(&source);
    assert!(spoken.len() > 10, "{spoken:?}");
    // `bytes = "bytes"` selects a Rust type.
    let spoken: Messages =
        spoken.into_iter().map(|(m, f, kind, n)| (m, f, kind.replace("bytes=", "bytes"), n)).collect();
    assert_eq!(of_proto(&proto), spoken);
    for method in ["Enrol", "Renew", "Follow"] {
        assert!(
            proto.contains(&format!("rpc {method}(")) && source.contains(&format!("control.v1.Control/{method}\""))
        );
    }
}
