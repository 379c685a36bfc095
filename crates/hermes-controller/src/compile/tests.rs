//! What nodes get, and what they do not.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use hermes_model::document::Document;

use super::compile;
use crate::catalog::Catalog;
use crate::document::{Name, read};

/// The video case of the first paper: users behind an ingress, two distributors, and a server.
const VIDEO: &str = "\
kind: Overlay
name: video
---
{kind: Node, name: alice-laptop, links: ingress, apps: {bind: 127.0.0.1:8080}}
---
{kind: Node, name: bob-laptop, links: ingress, apps: {bind: 127.0.0.1:8080}}
---
{kind: Node, name: ingress, role: standalone, address: 192.0.2.1:9443, links: [dist-1, dist-2]}
---
{kind: Node, name: dist-1, role: standalone, address: 192.0.2.2:9443, links: server}
---
{kind: Node, name: dist-2, role: standalone, address: 192.0.2.3:9443, links: server}
---
{kind: Node, name: server, address: 192.0.2.4:9443}
---
{kind: User, name: alice, nodes: alice-laptop}
---
{kind: User, name: bob, nodes: bob-laptop}
---
{kind: Group, name: viewers, users: [alice, bob]}
---
{kind: Service, name: VIDEO, at: {node: server, http: \"127.0.0.1:80\"}, for: {groups: viewers}}
---
{kind: Service, name: RADIO, at: {node: server, http: \"127.0.0.1:81\"}, for: {users: bob}}
";

fn catalog(text: &str) -> Catalog {
    let mut catalog = Catalog::default();
    for resource in read(text).unwrap_or_else(|faults| panic!("{faults:#?}")) {
        catalog.put(resource);
    }
    catalog
}

fn compiled(text: &str) -> BTreeMap<String, Document> {
    let documents = compile(&catalog(text))
        .unwrap_or_else(|faults| panic!("{}", faults.iter().map(|fault| format!("{fault}\n")).collect::<String>()));
    documents.into_iter().map(|(name, document): (Name, _)| (name.to_string(), document)).collect()
}

fn faults(text: &str) -> Vec<String> {
    compile(&catalog(text)).unwrap_err().iter().map(ToString::to_string).collect()
}

#[test]
fn the_video_case_is_compiled() {
    insta::assert_json_snapshot!(compiled(VIDEO));
}

#[test]
fn a_node_learns_only_what_it_needs() {
    let documents = compiled(VIDEO);
    let text = |node: &str| serde_json::to_string(&documents[node]).unwrap();
    assert!(!text("alice-laptop").contains("bob") && !text("alice-laptop").contains("RADIO"));
    assert!(!text("alice-laptop").contains("dist") && !text("server").contains("laptop"));
    assert!(text("ingress").contains("\"bob-laptop\":\"bob\""), "{}", text("ingress"));
    assert!(!text("dist-1").contains("laptop"), "what a standalone node says of users is believed");
}

#[test]
fn equally_near_neighbours_are_one_upstream() {
    let ingress = &compiled(VIDEO)["ingress"];
    let names: Vec<_> = ingress.upstreams.iter().map(|upstream| upstream.name.as_str()).collect();
    assert_eq!(names, ["dist-1+dist-2"]);
    assert_eq!(ingress.upstreams[0].endpoints.0.len(), 2);
}

/// Without an address a server keeps a connection to who would dial it.
#[test]
fn who_cannot_be_dialled_keeps_a_connection() {
    let text = "\
kind: Overlay
name: x
---
{kind: Node, name: laptop, links: hub, apps: {bind: 127.0.0.1:8080}}
---
{kind: Node, name: hub, role: standalone, address: 192.0.2.1:9443}
---
{kind: Node, name: home, links: hub}
---
{kind: Service, name: DISK, at: {node: home, tcp: \"127.0.0.1:22\"}, authority: \"DISK:22\", for: everyone}
";
    let documents = compiled(text);
    let home = &documents["home"];
    assert_eq!(home.listeners[0].dial.as_deref(), Some("hub"));
    assert_eq!(home.upstreams[0].endpoints.0[0].to_string(), "192.0.2.1:9443");
    let hub = &documents["hub"];
    assert_eq!(hub.upstreams[0].endpoints.0[0].to_string(), "node home");
    assert!(hub.routes[0].matching.user.is_empty(), "everyone may");
}

#[test]
fn the_most_special_service_comes_first() {
    let text = "\
kind: Overlay
name: x
---
{kind: Node, name: one, address: \"192.0.2.1:9443\", apps: {bind: 127.0.0.1:8080}}
---
{kind: Service, name: a-rest, authority: \"*\", at: {node: one, http: \"127.0.0.1:80\"}, for: everyone}
---
{kind: Service, name: b-sub, authority: \"*.example.com\", at: {node: one, http: \"127.0.0.1:81\"}, for: everyone}
---
{kind: Service, name: c-all, authority: WWW, at: {node: one, http: \"127.0.0.1:82\"}, for: everyone}
---
{kind: Service, name: d-part, authority: WWW, path: /part/*, at: {node: one, http: \"127.0.0.1:83\"}, for: everyone}
";
    let routes: Vec<_> = compiled(text)["one"].routes.iter().map(|route| route.name.clone()).collect();
    assert_eq!(routes, ["d-part", "c-all", "b-sub", "a-rest"]);
}

const PROVIDERS: &str = "\
kind: Overlay
name: x
providers: {acme: {quota: {services: 1}}, bella: {}}
---
{kind: Node, name: device, links: hub, providers: [acme, bella], apps: [{bind: 127.0.0.1:8080, user: acme/ann}, {bind: 127.0.0.1:8081, user: bella/ann}]}
---
{kind: Node, name: hub, role: standalone, address: 192.0.2.1:9443, links: [one, two]}
---
{kind: Node, name: one, address: 192.0.2.2:9443, providers: acme}
---
{kind: Node, name: two, address: 192.0.2.3:9443, providers: bella}
---
{kind: User, provider: acme, name: ann, nodes: device}
---
{kind: User, provider: bella, name: ann, nodes: device}
---
{kind: Service, provider: acme, name: SHOP, at: {node: one, http: \"127.0.0.1:80\"}, for: everyone}
---
{kind: Service, provider: bella, name: SHOP, at: {node: two, http: \"127.0.0.1:80\"}, for: {users: ann}}
";

#[test]
fn one_device_serves_several_providers_who_have_the_same_names() {
    let documents = compiled(PROVIDERS);
    let routes = |node: &str| -> Vec<_> { documents[node].routes.iter().map(|route| route.name.clone()).collect() };
    assert_eq!(routes("device"), ["acme/SHOP", "bella/SHOP"]);
    assert_eq!((routes("one"), routes("two")), (vec!["acme/SHOP".to_owned()], vec!["bella/SHOP".to_owned()]));
    let text = serde_json::to_string(&documents["one"]).unwrap();
    assert!(text.contains("acme/ann") && !text.contains("bella"), "{text}");
    let headers: Vec<_> =
        documents["device"].listeners.iter().map(|one| one.set_headers["hermes-user"].clone()).collect();
    assert_eq!(headers, ["acme/ann", "bella/ann"]);
}

#[test]
fn no_provider_names_what_is_anothers() {
    let foreign = [
        (
            "{kind: Service, provider: bella, name: A, at: {node: one, http: \"127.0.0.1:1\"}, for: everyone}",
            "does not serve bella",
        ),
        (
            "{kind: Service, provider: bella, name: A, at: {node: two, http: \"127.0.0.1:1\"}, for: {users: acme/ann}}",
            "another provider's",
        ),
        ("{kind: Group, provider: bella, name: A, users: [ann, eve]}", "there is no user eve"),
        ("{kind: User, provider: bella, name: A, nodes: one}", "does not serve bella"),
        ("{kind: User, provider: carla, name: A}", "the overlay has no provider carla"),
        ("{kind: User, name: A}", "say whose this is"),
        (
            "{kind: Service, provider: acme, name: A, at: {node: one, http: \"127.0.0.1:1\"}, for: everyone}",
            "acme may have 1 services",
        ),
    ];
    for (document, words) in foreign {
        let said = faults(&format!("{PROVIDERS}---\n{document}\n"));
        assert!(said.len() == 1 && said[0].contains(words), "{document}: {said:#?}");
    }
}

#[test]
fn references_that_lead_nowhere_are_told() {
    let wrong = [
        ("{kind: Node, name: n, links: ingres}", "did you mean ingress?"),
        ("{kind: Node, name: n, links: n}", "no link to itself"),
        ("{kind: Node, name: n, links: bob-laptop}", "nobody can dial bob-laptop"),
        ("{kind: Node, name: n, apps: {bind: 127.0.0.1:1, user: alice}}", "add n to the user's nodes"),
        ("{kind: Service, name: S, at: [{node: server}], for: everyone}", "say what it dials there"),
        ("{kind: Overlay, name: other}", "there is one overlay"),
    ];
    for (document, words) in wrong {
        let said = faults(&format!("{VIDEO}---\n{document}\n"));
        assert!(said.iter().any(|said| said.contains(words)), "{document}: {said:#?}");
    }
    assert!(faults("{kind: User, name: a}")[0].contains("no overlay yet"));
}
