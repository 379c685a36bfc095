//! The content of compiled node documents.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use hermes_model::document::Document;
use hermes_model::document::keyword::Protocol;
use hermes_model::document::route::Route;
use hermes_model::document::upstream::Upstream;
use serde_json::json;

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
    compile(&catalog(text)).err().unwrap_or_default().iter().map(ToString::to_string).collect()
}

/// Layer 3 of the second paper: 10.0.0.1 is a different machine for each user.
const LAYER3: &str = "\
kind: Overlay
name: layer3
---
{kind: Node, name: laptop, links: ingress, apps: [{bind: 127.0.0.1:8080}, {protocol: tun, address: 10.20.0.2}]}
---
{kind: Node, name: desk, links: ingress, apps: {protocol: tun, device: vpn, address: 10.20.0.3}}
---
{kind: Node, name: ingress, role: standalone, address: 192.0.2.1:9443, http3: true, links: [east, west]}
---
{kind: Node, name: east, address: 192.0.2.2:9443}
---
{kind: Node, name: west, address: 192.0.2.3:9443}
---
{kind: User, name: alice, nodes: laptop}
---
{kind: User, name: bob, nodes: desk}
---
{kind: Service, name: one, at: {node: east, http: \"127.0.0.1:80\"}, for: {users: alice}}
---
{kind: Network, name: one, prefixes: 10.0.0.1, at: {node: east, address: 10.0.0.1, assign: 10.20.0.0/16}, for: {users: alice}}
---
{kind: Network, name: other, prefixes: 10.0.0.1/32, at: {node: west, device: gate, address: 10.0.0.1, assign: 10.20.0.0/16}, for: {users: bob}}
---
{kind: Network, name: campus, prefixes: [10.0.0.0/8, \"2001:db8::/32\"], at: {node: west, device: gate, nat: true}, for: {users: [alice, bob]}, timeout: {connect: 3s}}
";

#[test]
fn networks_are_captured_where_their_users_are_and_come_out_where_they_live() {
    let documents = compiled(LAYER3);
    let listener = |node: &str, protocol| {
        let mut all = documents[node].listeners.iter().filter(|listener| listener.protocol == protocol);
        serde_json::to_value(all.next().unwrap()).unwrap()
    };
    assert_eq!(
        listener("laptop", Protocol::Tun),
        json!({"name": "app-1-tun", "protocol": "tun", "set-headers": {"hermes-user": "alice"}, "device": "hermes0",
               "address": "10.20.0.2", "capture": [{"network": "10.0.0.0/8"}, {"network": "10.0.0.1/32"}]})
    );
    assert_eq!(listener("desk", Protocol::Tun)["device"], "vpn");
    let routes = |node: &str| -> Vec<_> {
        let said = |route: &Route| {
            let value = serde_json::to_value(route).unwrap();
            let [network, user] = ["network", "user"].map(|key| value["match"][key].clone());
            format!("{} {network} {user} {}{}", route.name, value["upstream"], value["terminate"]).replace('"', "")
        };
        documents[node].routes.iter().map(said).collect()
    };
    assert_eq!(
        routes("ingress"),
        [
            "one:ip 10.0.0.1/32 alice eastnull",
            "other:ip 10.0.0.1/32 bob westnull",
            "campus:ip [10.0.0.0/8,2001:db8::/32] [alice,bob] westnull",
            "one null alice eastnull"
        ],
        "the narrow ones first"
    );
    assert_eq!(
        routes("west"),
        [
            "other:ip 10.0.0.1/32 bob null{address:10.0.0.1,assign:10.20.0.0/16,tun:gate}",
            "campus:ip [10.0.0.0/8,2001:db8::/32] [alice,bob] null{nat:true,tun:gate}"
        ]
    );
    assert_eq!(routes("east")[0], "one:ip 10.0.0.1/32 alice null{address:10.0.0.1,assign:10.20.0.0/16,tun:ip-one}");
}

#[test]
fn what_networks_and_devices_lack_is_said() {
    let with = |from: &str, to: &str| faults(&LAYER3.replacen(from, to, 1));
    assert_eq!(
        with("protocol: tun, address: 10.20.0.2", "protocol: tun, bind: \"127.0.0.1:1\""),
        [
            "Node/laptop: apps[1].address: missing; add the address of the device",
            "Node/laptop: apps[1].bind: not for a device (protocol: tun); leave it out"
        ]
    );
    assert_eq!(
        with("{bind: 127.0.0.1:8080}", "{device: hermes1}"),
        [
            "Node/laptop: apps[0].bind: missing; add an address to listen at, such as bind: \"127.0.0.1:8080\"",
            "Node/laptop: apps[0].device: only for protocol: tun; leave it out"
        ]
    );
    let faults = with("users: bob", "users: carol");
    assert!(
        faults.contains(&"Network/other: for.users[0]: unknown user carol; add a document with kind: User".to_owned()),
        "{faults:?}"
    );
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

/// Two ingresses, one with a longer path, and two replicas.
const SPARE: &str = "\
kind: Overlay
name: x
nodes: {health: {interval: 1s}}
---
{kind: Node, name: device, links: [in-1, in-2], apps: {bind: 127.0.0.1:8080}}
---
{kind: Node, name: in-1, role: standalone, address: 192.0.2.1:9443, links: [near, in-2, side, long]}
---
{kind: Node, name: in-2, role: standalone, address: 192.0.2.2:9443, links: long}
---
{kind: Node, name: side, role: standalone, address: 192.0.2.3:9443, links: near}
---
{kind: Node, name: long, role: standalone, address: 192.0.2.4:9443, links: far}
---
{kind: Node, name: near, address: 192.0.2.5:9443}
---
{kind: Node, name: far, address: 192.0.2.6:9443}
---
{kind: User, name: ann, nodes: device}
---
{kind: Service, name: APP, at: [{node: near, http: \"127.0.0.1:80\"}, {node: far, http: \"127.0.0.1:80\"}], for: {users: ann}}
";

fn upstreams(document: &Document) -> Vec<(&str, Vec<String>)> {
    let backup = |upstream: &Upstream| upstream.backup.iter().map(ToString::to_string).collect();
    let is_taken = |upstream: &&Upstream| {
        document.routes.iter().any(|route| route.upstream.as_deref() == Some(upstream.name.as_str()))
    };
    document.upstreams.iter().filter(is_taken).map(|upstream| (upstream.name.as_str(), backup(upstream))).collect()
}

#[test]
fn alternates_lead_on_and_come_in_order() {
    let documents = compiled(SPARE);
    // The alternate that avoids the next hop comes first, although it is not nearer. A node that would send back is not
    // an alternate.
    let backup = ["192.0.2.4:9443", "192.0.2.3:9443"].map(str::to_owned).to_vec();
    assert_eq!(upstreams(&documents["in-1"]), [("near|*", backup)]);
    assert_eq!(upstreams(&documents["device"]), [("in-1|*", vec!["192.0.2.2:9443".to_owned()])]);
    // Alternates have a route for the session, but no alternates of their own for it.
    assert_eq!(upstreams(&documents["in-2"]), [("in-1+long", Vec::new())]);
    assert_eq!(upstreams(&documents["long"]), [("far", Vec::new())]);
    assert_eq!(upstreams(&documents["side"]), [("near", Vec::new())]);
    let believed = serde_json::to_string(&documents["in-2"].users).unwrap();
    assert_eq!(believed, "{\"device\":\"ann\"}");
    assert!(["near", "far"].iter().all(|node| documents[*node].routes[0].terminate.is_some()));
    let health = documents["device"].upstreams[0].health.clone().unwrap();
    assert_eq!(health.interval.unwrap().to_string(), "1s");
    assert!(documents["long"].upstreams[0].health.is_none(), "there is no other path");
}

#[test]
fn who_drains_is_no_alternate_and_what_is_in_custody_has_none() {
    let draining = SPARE.replace("name: in-2,", "name: in-2, draining: true,");
    let documents = compiled(&draining);
    assert_eq!(upstreams(&documents["device"]), [("in-1", Vec::new())]);
    let custody = SPARE.replace("for: {users: ann}", "for: {users: ann}, custody: {deadline: 1h}");
    assert!(compiled(&custody).values().all(|document| document.upstreams.iter().all(|one| one.backup.is_empty())));
    let everyone = compiled(&SPARE.replace("{users: ann}", "everyone"));
    assert_eq!(upstreams(&everyone["device"]), upstreams(&compiled(SPARE)["device"]));
}

/// A node with a reverse connection and a node that is dialled are endpoints of one upstream.
#[test]
fn an_alternate_may_be_one_that_keeps_a_connection() {
    let text = SPARE.replace("address: 192.0.2.4:9443, links: far", "links: [far, in-1, in-2]");
    let text = text
        .replace("links: [near, in-2, side, long]", "links: [near, in-2, side]")
        .replace("links: long}", "links: side}");
    let documents = compiled(&text);
    let backup = ["node long", "192.0.2.3:9443"].map(str::to_owned).to_vec();
    assert_eq!(upstreams(&documents["in-1"]), [("near|*", backup)]);
    let uplinks: Vec<_> = documents["long"].listeners.iter().filter_map(|one| one.dial.as_deref()).collect();
    assert_eq!(uplinks, ["in-1", "in-2"]);
}

/// A server without an address dials a reverse connection to the node that would otherwise dial it.
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
            "serves bella",
        ),
        (
            "{kind: Service, provider: bella, name: A, at: {node: two, http: \"127.0.0.1:1\"}, for: {users: acme/ann}}",
            "belongs to another provider",
        ),
        ("{kind: Group, provider: bella, name: A, users: [ann, eve]}", "unknown user eve"),
        ("{kind: User, provider: bella, name: A, nodes: one}", "serves bella"),
        ("{kind: User, provider: carla, name: A}", "the overlay has no provider carla"),
        ("{kind: User, name: A}", "provider: missing: the overlay has providers"),
        (
            "{kind: Service, provider: acme, name: A, at: {node: one, http: \"127.0.0.1:1\"}, for: everyone}",
            "acme may have 1 services",
        ),
        (
            "{kind: Service, provider: bella, name: A, at: {node: two, http: \"127.0.0.1:1\"}, for: everyone, \
             cache: {memory: 200GiB}}",
            "need more than 4GiB of memory",
        ),
        (
            "{kind: Service, provider: bella, name: A, at: {node: two, http: \"127.0.0.1:1\"}, for: everyone, \
             cache: {disk: 40GiB}, custody: {disk: 30GiB}}",
            "(providers.bella.quota.disk)",
        ),
    ];
    for (document, words) in foreign {
        let said = faults(&format!("{PROVIDERS}---\n{document}\n"));
        assert!(said.len() == 1 && said[0].contains(words), "{document}: {said:#?}");
    }
}

#[test]
fn golden_documents_hold() {
    let said = faults(include_str!("../../tests/overlay/valid/quota.yaml"));
    assert!(said.is_empty(), "{said:#?}");
    let said = faults(include_str!("../../tests/overlay/invalid/quota.yaml"));
    let names = |words: &str| said.iter().any(|one| one.contains(words));
    assert!(names("(providers.acme.quota.memory)") && names("(providers.acme.quota.disk)"), "{said:#?}");
    assert_eq!(said.len(), 2, "{said:#?}");
}

#[test]
fn references_that_lead_nowhere_are_told() {
    let wrong = [
        ("{kind: Node, name: n, links: ingres}", "did you mean \"ingress\"?"),
        ("{kind: Node, name: n, links: n}", "cannot link to itself"),
        ("{kind: Node, name: n, links: bob-laptop}", "bob-laptop has no address to dial"),
        ("{kind: Node, name: n, apps: {bind: 127.0.0.1:1, user: alice}}", "add n to the user's nodes"),
        ("{kind: Service, name: S, at: [{node: server}], for: everyone}", "origin missing"),
        ("{kind: Overlay, name: other}", "more than one Overlay document"),
    ];
    for (document, words) in wrong {
        let said = faults(&format!("{VIDEO}---\n{document}\n"));
        assert!(said.iter().any(|said| said.contains(words)), "{document}: {said:#?}");
    }
    assert!(faults("{kind: User, name: a}")[0].contains("no Overlay document"));
}

mod incremental;

#[test]
fn what_all_cores_do_comes_in_order() {
    for count in [0, 1, super::MIN_PARALLEL - 1, super::MIN_PARALLEL, 1000, 1001] {
        let all: Vec<usize> = (0..count).collect();
        assert_eq!(
            super::on_all_cores(&all, |number| number * 2),
            all.iter().map(|number| number * 2).collect::<Vec<_>>()
        );
    }
}

const NAMES: &str = "\
kind: Overlay
name: test
---
{kind: Node, name: laptop, links: server, apps: [{protocol: tun, address: 10.20.0.2, user: alice}, {protocol: dns, bind: \"127.0.0.53:53\", user: alice}]}
---
{kind: Node, name: server, address: \"192.0.2.1:9443\"}
---
{kind: User, name: alice, nodes: laptop}
---
{kind: User, name: bob, nodes: laptop}
---
{kind: Service, name: DB, authority: [\"DB:5432\", \"*.db.corp:*\", \"192.0.2.7:1\", \"*\"], at: {node: server, tcp: \"127.0.0.1:5432\"}, for: {users: alice}}
---
{kind: Service, name: SHOP, at: {node: server, http: \"127.0.0.1:80\"}, for: {users: [alice, bob]}}
---
{kind: Service, name: SECRET, at: {node: server, http: \"127.0.0.1:81\"}, for: {users: bob}}
";

#[test]
fn a_device_answers_the_names_of_its_user_and_carries_them_as_flows() {
    let documents = compiled(NAMES);
    let listener = |protocol| {
        let mut all = documents["laptop"].listeners.iter().filter(|listener| listener.protocol == protocol);
        serde_json::to_value(all.next().unwrap()).unwrap()
    };
    assert_eq!(
        listener(Protocol::Dns),
        json!({"name": "app-1-dns", "protocol": "dns", "bind": "127.0.0.53:53", "names": ["*.db.corp", "db", "shop"],
               "addresses": "100.64.0.0/10"}),
        "no address, not every name, and no name of a service that is not hers"
    );
    let tun = listener(Protocol::Tun);
    assert_eq!((&tun["carry-names"], &tun["capture"]), (&json!("flows"), &json!({"network": "100.64.0.0/10"})));
}

#[test]
fn names_need_a_device_and_addresses_of_their_own() {
    let start = NAMES.find("apps: ").unwrap() + "apps: ".len();
    let end = start + NAMES[start..].find("}]").unwrap() + 2;
    let told = |apps: &str| faults(&format!("{}{apps}{}", &NAMES[..start], &NAMES[end..])).join("\n");
    let alone = told("[{protocol: dns, bind: \"127.0.0.53:53\", user: alice}]");
    assert!(alone.contains("no device of this user captures the addresses of names"), "{alone}");
    let both = |addresses: &str| {
        let apps = |user: &str, number: u8, more: &str| {
            format!(
                "{{protocol: tun, device: d{number}, address: 10.20.0.{number}, user: {user}}}, \
                 {{protocol: dns, bind: \"127.0.0.{number}:53\", user: {user}{more}}}"
            )
        };
        told(&format!("[{}, {}]", apps("alice", 2, ""), apps("bob", 3, addresses)))
    };
    assert!(both("").contains("is used for names of another user of this node"), "{}", both(""));
    assert_eq!(both(", addresses: 198.18.0.0/16"), "");
}

/// Each next hop but one is a backup, since a tree has one branch for each node.
#[test]
fn the_nodes_on_the_paths_of_a_relay_are_a_tree() {
    let chat = "{kind: Service, name: CHAT, at: {node: server}, relay: {mode: reliable}, for: {groups: viewers}}";
    let documents = compiled(&format!("{VIDEO}---\n{chat}\n"));
    let relay = |node: &str| {
        let all: Vec<&Route> = documents[node].routes.iter().filter(|route| route.relay.is_some()).collect();
        let [route] = all[..] else { panic!("{node}: {all:#?}") };
        assert!(route.upstream.is_none() && route.terminate.is_none());
        let next = route.relay.clone().unwrap().upstream?;
        let mut upstreams = documents[node].upstreams.iter();
        let Upstream { endpoints, backup, .. } = upstreams.find(|upstream| upstream.name == next).unwrap();
        Some((endpoints.0.len(), backup.0.len()))
    };
    assert_eq!(relay("server"), None, "the root");
    assert_eq!(relay("dist-1"), Some((1, 0)));
    assert_eq!(relay("ingress"), Some((1, 1)));
    // A device has several users, of whom the ingress knows who may.
    assert!(documents["alice-laptop"].routes.iter().all(|route| route.relay.is_none()));
    let users = |node: &str| {
        let mut routes = documents[node].routes.iter();
        let route = routes.find(|route| route.relay.is_some()).unwrap();
        route.matching.user.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert_eq!(users("ingress"), ["alice", "bob"]);
    assert_eq!(users("dist-2"), ["alice", "bob", "relay:ingress"]);
    assert_eq!(users("server"), ["alice", "bob", "relay:dist-1", "relay:dist-2"]);
    let told = |document: &str| faults(&format!("{VIDEO}---\n{document}\n")).join("\n");
    let two = told("{kind: Service, name: S, at: [{node: server}, {node: dist-1}], relay: {}, for: everyone}");
    assert!(two.contains("a relay has one root"), "{two}");
    let origin = told("{kind: Service, name: S, at: {node: server, http: \"127.0.0.1:1\"}, relay: {}, for: everyone}");
    assert!(origin.contains("a relay has no origin"), "{origin}");
}
