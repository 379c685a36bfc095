//! Explanations: the same decision as `decide`, and every reason on the way to it.

#![allow(clippy::unwrap_used)]

use super::*;
use crate::specimen::{certified, connect, get, packets, snapshot};

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
        explain(&facts, &snapshot(DOCUMENT)).to_string(),
        "session   http GET video/files/a?b on apps\n\
         identity  user bob, brought by an anonymous client at 127.0.0.1:40000\n\
         \x20 * routes[0] video: matches\n\
         decision  video: forward to upstream ingress (192.0.2.1:80, 192.0.2.2:80)\n\
         timeouts  connect 5s, idle 1m, progress 1m\n"
    );
}

#[test]
fn the_first_failing_condition_of_each_route_is_shown() {
    let facts = Facts { trust: certified(Some("laptop"), &[], false), ..connect("DB:3306") };
    assert_eq!(
        explain(&facts, &snapshot(DOCUMENT)).to_string(),
        "session   tcp CONNECT db:3306/ on apps\n\
         identity  no user, brought by node laptop of test at 127.0.0.1:40000\n\
         \x20 - routes[0] video: authority must be video, and is db:3306\n\
         \x20 - routes[1] token: port must be [8080, 8443], and is 3306\n\
         \x20 - routes[2] of-carol: user must be carol, and is none\n\
         \x20 - routes[3] net: kind must be ip, and is tcp\n\
         \x20 * routes[4] db: matches\n\
         decision  db: open tcp to 127.0.0.1:3306\n\
         timeouts  connect 5s, idle 1h, progress 1m\n"
    );
}

#[test]
fn secrets_are_not_explained() {
    let facts = get("VIDEO:8080", "/files/a").header("authorization", "Bearer wrong").header("hermes-user", "eve");
    let text = explain(&facts, &snapshot(DOCUMENT)).to_string();
    assert!(text.contains("header authorization must have a certain value, and has another value"), "{text}");
    assert!(!text.contains("s3cret") && !text.contains("wrong"), "{text}");
    let other = explain(&get("VIDEO", "/files/a").header("hermes-user", "eve"), &snapshot(DOCUMENT)).to_string();
    assert!(other.contains("header hermes-user must be [alice, bob], and has another value"), "{other}");
}

#[test]
fn a_denial_is_shown_with_its_status_and_reason() {
    let snapshot = snapshot(DOCUMENT);
    let explanation = explain(&packets("10.0.0.1/32", 17), &snapshot);
    assert_eq!((explanation.decision, explanation.status), ("deny", Some(404)));
    assert_eq!(explanation.routes[3].failed.as_deref(), Some("protocol must be 6, and is 17"));
    let json = serde_json::to_value(&explanation).unwrap();
    assert_eq!(json["reason"], "no route for ip to gateway");
    assert_eq!(json["routes"][0]["failed"], "authority must be video, and is gateway");
    let dots = explain(&get("VIDEO", "/a/../b"), &snapshot);
    assert_eq!(dots.reason.as_deref(), Some("the path has a . or .. segment; send the resolved path"));
}

#[test]
fn many_routes_are_counted_and_the_last_ones_shown() {
    let mut text = "node: a\nroutes:\n".to_owned();
    for n in 0..200 {
        text += &format!("- {{name: r{n}, match: {{authority: h{n}}}, respond: {{}}}}\n");
    }
    let explanation = explain(&get("h150", "/"), &snapshot(&text));
    assert_eq!((explanation.left_out, explanation.routes.len()), (101, 50));
    assert_eq!(explanation.routes.last().map(|route| (route.index, route.failed.is_none())), Some((150, true)));
    assert!(explanation.to_string().contains("101 before these do not match either"));
}
