//! Tables of identity verification.

#![allow(clippy::unwrap_used)]

use super::*;
use crate::test_fixtures::{certified, packets, snapshot};

const DOCUMENT: &str = "{node: edge, users: {laptop: [alice], shared: [dave, erin], relay: ['*']}}";

/// `user`, `-` for nobody, `-(claim)` for nobody with a dropped claim, or the refusal.
fn judged(trust: &Trust, claims: &[&str]) -> String {
    let lines: Vec<HeaderValue> =
        claims.iter().map(|claim| HeaderValue::from_bytes(claim.as_bytes()).unwrap()).collect();
    match identify(trust, &lines, &snapshot(DOCUMENT)) {
        Identity::User { user, dropped: None } => user.as_deref().unwrap_or("-").to_owned(),
        Identity::User { user, dropped: Some(claim) } => {
            format!("{}({})", user.as_deref().unwrap_or("-"), String::from_utf8_lossy(claim.as_bytes()))
        }
        Identity::Refuse(refusal) => format!("{} {}", refusal.status().as_u16(), refusal),
    }
}

#[test]
fn claims_are_accepted_only_from_peers_that_may_make_them() {
    let node = |name: &str, users: &[&str]| certified(Some(name), users, false);
    let conflict = "400 conflicting hermes-user headers; send one";
    let illegal =
        "400 invalid user name in hermes-user; send 1 to 255 visible ASCII characters without commas and quotes";
    let table: &[(&str, Trust, &[&str], &str)] = &[
        ("anyone", Trust::Anonymous, &[], "-"),
        ("anyone who claims", Trust::Anonymous, &["alice"], "-(alice)"),
        ("anyone with garbage", Trust::Anonymous, &["", "b"], "-()"),
        ("an address", Trust::Address, &["alice"], "alice"),
        ("an address that claims nobody", Trust::Address, &[], "-"),
        ("an address in conflict", Trust::Address, &["alice", "bob"], conflict),
        ("bound by certificate", node("phone", &["bob"]), &["bob"], "bob"),
        ("bound by certificate, silent", node("phone", &["bob"]), &[], "bob"),
        ("one of two, silent", node("phone", &["bob", "carol"]), &[], "-"),
        ("one of two", node("phone", &["bob", "carol"]), &["carol"], "carol"),
        ("bound by the document", node("laptop", &[]), &["alice"], "alice"),
        ("bound by the document, silent", node("laptop", &[]), &[], "alice"),
        ("bound by both to the same", node("laptop", &["alice"]), &[], "alice"),
        ("bound by both to others", node("laptop", &["bob"]), &[], "-"),
        ("any user", node("relay", &[]), &["zoe"], "zoe"),
        ("any user, silent", node("relay", &[]), &[], "-"),
        ("the wildcard is no user", node("relay", &[]), &["*"], illegal),
        ("a node without users", node("plain", &[]), &["alice"], "-(alice)"),
        ("a node without users, silent", node("plain", &[]), &[], "-"),
        ("standalone", certified(Some("sap"), &[], true), &["alice"], "alice"),
        ("standalone, silent, with a user", certified(Some("sap"), &["ops"], true), &[], "ops"),
        ("standalone, for somebody else", certified(Some("sap"), &["ops"], true), &["alice"], "alice"),
        ("a user without a node", certified(None, &["bob"], false), &[], "bob"),
        ("the same twice", node("phone", &["bob"]), &["bob", "bob"], "bob"),
        ("conflict", node("phone", &["bob", "carol"]), &["bob", "carol"], conflict),
        ("empty", node("phone", &["bob"]), &[""], illegal),
        ("a list", node("relay", &[]), &["alice, bob"], illegal),
        ("beyond ASCII", node("relay", &[]), &["caf\u{e9}"], illegal),
        ("case matters", node("laptop", &[]), &["alice"], "alice"),
    ];
    for (what, trust, claims, wanted) in table {
        assert_eq!(judged(trust, claims), *wanted, "{what}");
    }
}

#[test]
fn a_device_that_claims_to_be_another_user_is_refused_by_name_with_the_remedy() {
    let said = "403 node laptop claims to be user mallory, who is not bound to it; bind the user in the node's \
                certificate (URI .../user/mallory) or in this node's document (users: {laptop: [mallory]})";
    assert_eq!(judged(&certified(Some("laptop"), &[], false), &["mallory"]), said);
    assert!(judged(&certified(Some("laptop"), &[], false), &["Alice"]).starts_with("403"));
    assert!(judged(&certified(None, &["bob"], false), &["mallory"]).starts_with("403 node bob claims"));
}

#[test]
fn a_dependent_node_cannot_pass_on_what_others_asserted() {
    // A standalone node asserts alice to a dependent node, which accepts it ...
    let standalone = certified(Some("sap"), &[], true);
    assert_eq!(judged(&standalone, &["alice"]), "alice");
    // ... and forwards alice. The next node knows it as dependent: it rejects the session if the node has bound
    // users, and removes the claim otherwise.
    assert!(judged(&certified(Some("dp"), &["dora"], false), &["alice"]).starts_with("403"));
    assert_eq!(judged(&certified(Some("dp"), &[], false), &["alice"]), "-(alice)");
}

#[test]
fn a_listener_may_give_a_user() {
    let text = "{node: a, listeners: [
        {name: apps, bind: '127.0.0.1:1', protocol: http, set-headers: {Hermes-User: alice}},
        {name: other, bind: '127.0.0.1:2', protocol: http, set-headers: {x-user: alice}}]}";
    let snapshot = snapshot(text);
    let users: Vec<_> = snapshot.listeners.iter().map(|listener| listener_user(listener)).collect();
    assert_eq!(users, [Some(Arc::from("alice")), None]);
}

#[test]
fn uris_of_certificates_are_read_strictly() {
    let read = |uri: &str| parse_spiffe(uri).map(|id| (id.overlay.to_owned(), id.kind, id.name.to_owned()));
    let is = |kind, name: &str| Some(("test.example".to_owned(), kind, name.to_owned()));
    assert_eq!(read("spiffe://test.example/node/edge-7"), is(SpiffeKind::Node, "edge-7"));
    assert_eq!(read("spiffe://test.example/user/Al.ice_1"), is(SpiffeKind::User, "Al.ice_1"));
    assert_eq!(read("spiffe://test.example/role/standalone"), is(SpiffeKind::Role, "standalone"));
    for uri in [
        "",
        "https://test/node/a",
        "SPIFFE://test/node/a",
        "spiffe:/test/node/a",
        "spiffe:///node/a",
        "spiffe://test",
        "spiffe://test/",
        "spiffe://test/node",
        "spiffe://test/node/",
        "spiffe://test/node//a",
        "spiffe://test//node/a",
        "spiffe://test/node/a/",
        "spiffe://test/node/a/b",
        "spiffe://test/node/%61",
        "spiffe://test/node/a?b",
        "spiffe://test/node/a#b",
        "spiffe://test/node/.",
        "spiffe://test/node/..",
        "spiffe://test:80/node/a",
        "spiffe://u@test/node/a",
        "spiffe://TEST/node/a",
        "spiffe://test/Node/a",
        "spiffe://test/group/a",
        "spiffe://test/node/caf\u{e9}",
        "spiffe://test/node/a b",
        "spiffe://test/node/a\0",
    ] {
        assert_eq!(read(uri), None, "{uri}");
    }
    assert_eq!(read(&format!("spiffe://test/node/{}", "a".repeat(2048))), None);
}

#[test]
fn overlay_headers_of_strangers_are_removed_and_origins_are_proven() {
    let snapshot = snapshot("{node: edge, listeners: [{name: in, bind: '127.0.0.1:1', protocol: http}]}");
    let settled = |trust: Trust, origin: Option<&str>| {
        let mut facts = packets("10.0.0.1/32", 0).header("hermes-mtu", "1400").from("192.0.2.7:5");
        if let Some(origin) = origin {
            facts = facts.header("hermes-origin", origin);
        }
        facts.trust = trust;
        settle(&mut facts, &snapshot.listeners[0], &snapshot).unwrap();
        let of = |name: &str| facts.headers.get(name).map(|value| value.to_str().unwrap().to_owned());
        (of("hermes-mtu"), of("hermes-origin").unwrap())
    };
    let mtu = Some("1400".to_owned());
    let address = || "address/192.0.2.7".to_owned();
    assert_eq!(settled(Trust::Anonymous, Some("node/laptop")), (None, address()));
    assert_eq!(settled(Trust::Address, None), (mtu.clone(), address()));
    assert_eq!(settled(Trust::Address, Some("node/laptop")), (mtu.clone(), "node/laptop".to_owned()));
    let laptop = || certified(Some("laptop"), &[], false);
    assert_eq!(settled(laptop(), Some("node/other")), (mtu.clone(), "node/laptop".to_owned()));
    let ingress = || certified(Some("ingress"), &[], true);
    assert_eq!(settled(ingress(), Some("address/10.1.2.3")), (mtu.clone(), "address/10.1.2.3".to_owned()));
    assert_eq!(settled(ingress(), None), (mtu, "node/ingress".to_owned()));
}

/// A certificate that speaks for its holder alone does not prove that others were checked.
#[test]
fn only_nodes_that_pass_on_assertions_say_for_how_many_they_subscribe() {
    let snapshot = snapshot("{node: edge, listeners: [{name: in, bind: '127.0.0.1:1', protocol: http}]}");
    for (trust, is_kept) in [
        (Trust::Anonymous, false),
        (certified(Some("laptop"), &[], false), false),
        (certified(Some("ingress"), &[], true), true),
        (Trust::Address, true),
    ] {
        let mut facts = packets("10.0.0.1/32", 0).header("hermes-subscribers-behind", "5");
        facts.trust = trust.clone();
        settle(&mut facts, &snapshot.listeners[0], &snapshot).unwrap();
        assert_eq!(facts.headers.contains_key(SUBSCRIBERS_BEHIND), is_kept, "{trust:?}");
    }
}
