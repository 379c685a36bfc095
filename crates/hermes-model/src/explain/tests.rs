//! Explanations: the decision of `decide`, with all of its reasons.

#![allow(clippy::unwrap_used)]

use super::*;
use crate::test_fixtures::{certified, connect, get, packets, snapshot};

const DOCUMENT: &str = "
node: edge
routes:
- {name: video, match: {authority: VIDEO, path: '/files/*', headers: {hermes-user: [alice, bob]}}, upstream: ingress, timeout: {idle: 60s}}
- {name: token, match: {headers: {authorization: Bearer s3cret}, port: [8080, 8443]}, upstream: ingress}
- {name: of-carol, match: {user: carol, kind: [http, tcp]}, respond: {status: 403}}
- {name: net, match: {kind: ip, network: 10.0.0.0/8, protocol: tcp}, upstream: ingress}
- {name: db, match: {authority: 'DB:*'}, terminate: {tcp: '127.0.0.1:3306'}}
upstreams: [{name: ingress, protocol: h1, endpoints: ['192.0.2.1:80', '192.0.2.2:80']}]
";

#[test]
fn the_match_is_shown_with_its_action_and_timeouts() {
    let facts = get("VIDEO", "/files/a?b").of("bob").header("hermes-user", "bob");
    assert_eq!(
        explain(&facts, &snapshot(DOCUMENT), &|_| false).to_string(),
        "session   http GET video/files/a?b on apps\n\
         identity  user bob, from an anonymous client at 127.0.0.1:40000\n\
         \x20 * routes[0] video: matches\n\
         decision  video: forward to upstream ingress (192.0.2.1:80, 192.0.2.2:80)\n\
         timeouts  connect 5s, idle 1m, progress 1m\n"
    );
}

#[test]
fn the_first_failing_condition_of_each_route_is_shown() {
    let facts = Facts { trust: certified(Some("laptop"), &[], false), ..connect("DB:3306") };
    assert_eq!(
        explain(&facts, &snapshot(DOCUMENT), &|_| false).to_string(),
        "session   tcp CONNECT db:3306 on apps\n\
         identity  no user, from node laptop of test at 127.0.0.1:40000\n\
         \x20 - routes[0] video: authority must be video, but is db:3306\n\
         \x20 - routes[1] token: port must be [8080, 8443], but is 3306\n\
         \x20 - routes[2] of-carol: user must be carol, but is absent\n\
         \x20 - routes[3] net: kind must be ip, but is tcp\n\
         \x20 * routes[4] db: matches\n\
         decision  db: open tcp to 127.0.0.1:3306\n\
         timeouts  connect 5s, idle 1h, progress 1m\n"
    );
}

#[test]
fn custody_is_shown_where_a_route_asks_for_it() {
    let document = "
node: edge
routes: [{name: on, upstream: next, custody: {deadline: 1h}}]
upstreams: [{name: next, protocol: h2, endpoints: ['192.0.2.1:80']}]
";
    let said = |document: &str, facts| explain(&facts, &snapshot(document), &|_| false).custody;
    let held = |how: &str| Some(format!("for at most 1h, regardless of timeouts; stored {how}"));
    assert_eq!(said(document, get("FILES", "/")), held("in memory only, lost when this node restarts"));
    let stored = document.replace("node: edge", "node: edge\nstate: /tmp/state");
    assert_eq!(said(&stored, connect("DB:3306")), held("on disk"));
    let fsync = stored.replace("1h", "1h, durable: fsync");
    assert_eq!(said(&fsync, get("FILES", "/")), held("on disk, synced to survive a loss of power"));
    assert_eq!(said(DOCUMENT, get("DB", "/")), None);
}

#[test]
fn backup_endpoints_are_shown() {
    let document = "
node: edge
routes: [{name: on, upstream: next}]
upstreams: [{name: next, protocol: h1, endpoints: ['192.0.2.1:80'], backup: ['192.0.2.2:80', '192.0.2.3:80']}]
";
    let said = explain(&get("FILES", "/"), &snapshot(document), &|_| false).action.unwrap();
    assert_eq!(said, "forward to upstream next (192.0.2.1:80; backup: 192.0.2.2:80, 192.0.2.3:80)");
}

#[test]
fn secrets_are_not_explained() {
    let facts = get("VIDEO:8080", "/files/a").header("authorization", "Bearer wrong").header("hermes-user", "eve");
    let text = explain(&facts, &snapshot(DOCUMENT), &|_| false).to_string();
    assert!(text.contains("header authorization must have a secret value, but has a different value"), "{text}");
    assert!(!text.contains("s3cret") && !text.contains("wrong"), "{text}");
    let other =
        explain(&get("VIDEO", "/files/a").header("hermes-user", "eve"), &snapshot(DOCUMENT), &|_| false).to_string();
    assert!(other.contains("header hermes-user must be [alice, bob], but has a different value"), "{other}");
}

#[test]
fn a_denial_is_shown_with_its_status_and_reason() {
    let snapshot = snapshot(DOCUMENT);
    let explanation = explain(&packets("10.0.0.1/32", 17), &snapshot, &|_| false);
    assert_eq!((explanation.decision, explanation.status), ("deny", Some(404)));
    assert_eq!(explanation.routes[3].failed.as_deref(), Some("protocol must be 6, but is 17"));
    let json = serde_json::to_value(&explanation).unwrap();
    assert_eq!(json["reason"], "no route for ip to gateway");
    assert_eq!(json["routes"][0]["failed"], "authority must be video, but is gateway");
    let dots = explain(&get("VIDEO", "/a/../b"), &snapshot, &|_| false);
    assert_eq!(dots.reason.as_deref(), Some("the path has a . or .. segment; send the resolved path"));
}

#[test]
fn many_routes_are_counted_and_the_last_ones_shown() {
    let mut text = "node: a\nroutes:\n".to_owned();
    for n in 0..200 {
        text += &format!("- {{name: r{n}, match: {{authority: h{n}}}, respond: {{}}}}\n");
    }
    let explanation = explain(&get("h150", "/"), &snapshot(&text), &|_| false);
    assert_eq!((explanation.left_out, explanation.routes.len()), (101, 50));
    assert_eq!(explanation.routes.last().map(|route| (route.index, route.failed.is_none())), Some((150, true)));
    assert!(explanation.to_string().contains("101 earlier routes do not match"));
}

const ARRIVALS: &str = "
node: edge
identity: {cert: a.pem, key: a.key, ca: ca.pem}
users: {edge-7: [carol]}
listeners:
- {name: apps, bind: '127.0.0.1:8080', protocol: http, set-headers: {hermes-user: alice, x-zone: home}}
- {name: plain, bind: '127.0.0.1:8081', protocol: http}
- {name: overlay, bind: '127.0.0.1:8443', protocol: http, tls: {client: required}}
routes:
- {name: of-mallory, match: {user: mallory}, respond: {status: 403}}
- {name: of-home, match: {headers: {x-zone: home}, user: alice}, respond: {}}
- {name: of-carol, match: {user: carol}, respond: {}}
- {name: forward, match: {kind: http, listener: plain}, terminate: {http: authority}}
- {name: inside, match: {kind: tcp, listener: plain}, terminate: {tcp: authority, reach: private}}
- {name: all-udp, match: {kind: udp, listener: plain}, terminate: {udp: authority, reach: any}}
";

fn arrive(facts: Facts) -> Explanation {
    let snapshot = snapshot(ARRIVALS);
    let listener = snapshot.listeners.iter().find(|listener| listener.name == facts.listener).unwrap();
    explain_arrival(facts, listener, &snapshot, &|ip| ip.to_string() == "93.184.216.34")
}

#[test]
fn headers_of_the_listener_replace_claims_of_the_client() {
    let claimed = get("X", "/").header("hermes-user", "mallory").header("x-zone", "abroad");
    let explanation = arrive(claimed);
    assert_eq!(explanation.route.as_deref(), Some("of-home"));
    assert!(explanation.identity.starts_with("user alice"), "{explanation}");
    assert_eq!(explanation.claim.as_deref(), Some("user mallory ignored: listener apps sets hermes-user"));
    let same = arrive(get("X", "/").header("hermes-user", "alice"));
    assert_eq!((same.route.as_deref(), same.claim), (Some("of-home"), None));
}

#[test]
fn claims_are_judged_as_the_node_judges_them() {
    let claim = |trust: Trust, user: &str, on: &str| {
        arrive(Facts { trust, ..get("198.41.0.4", "/").header("hermes-user", user).on(on) })
    };
    let anonymous = claim(Trust::Anonymous, "mallory", "plain");
    assert_eq!(anonymous.route.as_deref(), Some("forward"));
    assert!(anonymous.claim.unwrap().contains("removed: the client has neither a certificate"));
    let relayed = claim(certified(Some("ingress"), &[], true), "mallory", "overlay");
    assert_eq!((relayed.route.as_deref(), relayed.claim), (Some("of-mallory"), None));
    let bound = claim(certified(Some("edge-7"), &[], false), "carol", "overlay");
    assert_eq!(bound.route.as_deref(), Some("of-carol"));
    let other = claim(certified(Some("edge-7"), &[], false), "alice", "overlay");
    assert_eq!((other.decision, other.status), ("deny", Some(403)));
    assert!(other.reason.unwrap().contains("node edge-7 claims to be user alice, who is not bound to it"));
    let stranger = claim(certified(Some("edge-8"), &[], false), "alice", "overlay");
    assert!(stranger.claim.unwrap().contains("no user is bound"));
}

#[test]
fn without_a_required_certificate_nothing_is_decided() {
    let explanation = arrive(get("X", "/").on("overlay"));
    assert_eq!((explanation.decision, explanation.status, explanation.routes.len()), ("deny", None, 0));
    assert!(explanation.to_string().contains("decision  TLS handshake failure: listener overlay"));
    let shown = arrive(Facts { trust: certified(Some("edge-7"), &[], false), ..get("X", "/").on("overlay") });
    assert_eq!(shown.route.as_deref(), Some("of-carol"), "{shown}");
}

#[test]
fn targets_out_of_reach_are_denied_with_the_reason() {
    let cases = [
        (get("169.254.169.254", "/latest"), Some("169.254.169.254 is link-local")),
        (get("127.0.0.1:22", "/"), Some("is loopback (127.0.0.0/8); out of reach of route forward (reach: public)")),
        (get("[::ffff:10.0.0.1]", "/"), Some("is private (10.0.0.0/8)")),
        (get("93.184.216.34", "/"), Some("is this node's own address")),
        (connect("169.254.169.254:80"), Some("out of reach of route inside (reach: private)")),
        (connect("10.0.0.1:22"), None),
        (get("198.41.0.4", "/"), None),
        (Facts { kind: Kind::Udp, ..connect("127.0.0.1:53") }, None),
    ];
    for (facts, wanted) in cases {
        let explanation = arrive(facts.on("plain"));
        match wanted {
            Some(words) => {
                assert_eq!((explanation.decision, explanation.status), ("deny", Some(403)), "{explanation}");
                assert!(explanation.reason.as_ref().is_some_and(|reason| reason.contains(words)), "{explanation}");
                assert!(!explanation.to_string().contains(": open "), "{explanation}");
            }
            None => assert_eq!((explanation.decision, explanation.reason.as_deref()), ("act", None), "{explanation}"),
        }
    }
    let named = arrive(get("example.com", "/").on("plain"));
    assert_eq!(named.decision, "act");
    assert!(
        named.to_string().contains("reach     public: the addresses of example.com are checked when it is resolved")
    );
}

#[test]
fn a_node_that_nobody_can_dial_is_shown_by_its_name() {
    let document = "
node: hub
identity: {cert: hub.pem, key: hub.key, ca: ca.pem}
listeners: [{name: door, bind: '127.0.0.1:9443', protocol: http, tls: {client: required}}]
routes: [{name: files, upstream: laptop}]
upstreams: [{name: laptop, protocol: h2, node: alice-laptop}]
";
    let text = explain(&get("FILES", "/"), &snapshot(document), &|_| false).to_string();
    assert!(text.contains("decision  files: forward to upstream laptop (node alice-laptop)\n"), "{text}");
}
