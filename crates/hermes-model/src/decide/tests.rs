//! Tables of decisions: a document, sessions, and their results.

#![allow(clippy::unwrap_used)]

use super::*;
use crate::test_fixtures::{certified, connect, get, packets, session, snapshot};
use http::Method;

/// The name of the route that acts, or the status and reason of the denial.
fn outcome(facts: &Facts, snapshot: &Snapshot) -> String {
    match decide(facts, snapshot) {
        Decision::Act(route) => route.name.to_string(),
        Decision::Deny(deny) => deny.to_string(),
    }
}

fn all(document: &str, table: &[(Facts, &str)]) {
    let snapshot = snapshot(document);
    for (facts, wanted) in table {
        assert_eq!(outcome(facts, &snapshot), *wanted, "{facts:?}");
    }
}

/// A document whose routes respond themselves, so that all of them support http.
fn routes(matches: &[(&str, &str)]) -> String {
    let head = "node: edge\nlisteners:\n- {name: apps, bind: 127.0.0.1:0, protocol: http}\n\
                - {name: db, bind: 127.0.0.1:0, protocol: tcp, authority: 'DB:3306'}\nroutes:\n";
    let route =
        |(name, what): &(&str, &str)| format!("- {{name: {name}, match: {{{what}}}, respond: {{status: 404}}}}\n");
    format!("{head}{}", matches.iter().map(route).collect::<String>())
}

#[test]
fn authorities_compare_without_case_and_default_ports() {
    let document = routes(&[
        ("video", "authority: VIDEO"),
        ("video-8080", "authority: 'video:8080'"),
        ("video-any", "authority: 'Video:*'"),
        ("web-443", "authority: 'WEB:443'"),
        ("example", "authority: '*.example.com'"),
        ("example-any", "authority: '*.example.com:*'"),
        ("six", "authority: '[2001:db8::1]:80'"),
        ("any-22", "authority: '*:22'"),
        ("rest", "authority: '*'"),
    ]);
    let https = |authority: &str| Facts { authority: Authority::parse(authority, Some(443)).unwrap(), ..get("x", "/") };
    all(
        &document,
        &[
            (get("VIDEO", "/"), "video"),
            (get("video:80", "/"), "video"),
            (get("ViDeO.", "/"), "video"),
            (get("video:443", "/"), "video-any"),
            (https("video:443"), "video"),
            (https("video"), "video"),
            (https("video:80"), "video-any"),
            (connect("VIDEO:80"), "video"),
            (connect("VIDEO:443"), "video"),
            (connect("VIDEO:8080"), "video-8080"),
            (connect("VIDEO:3306"), "video-any"),
            (https("web"), "web-443"),
            (get("web", "/"), "rest"),
            (get("a.example.com", "/"), "example"),
            (get("a.b.EXAMPLE.com:80", "/"), "example"),
            (connect("a.example.com:25"), "example-any"),
            (get("example.com", "/"), "rest"),
            (get("badexample.com", "/"), "rest"),
            (get("[2001:DB8:0::1]", "/"), "six"),
            (connect("anything:22"), "any-22"),
            (connect("anything:23"), "404: no route for tcp to anything:23"),
        ],
    );
}

#[test]
fn every_field_of_a_match_must_hold() {
    let document = routes(&[
        ("post", "method: [POST, PUT], path: /form"),
        ("alice", "headers: {hermes-user: [alice, bob], x-a: '*'}"),
        ("beta", "headers: {x-version: 'beta-*'}"),
        ("carol", "user: carol"),
        ("known", "user: '*', path: /mine"),
        ("net", "kind: ip, network: [10.0.0.0/8, '2001:db8::/32'], protocol: [tcp, 17]"),
        ("database", "listener: db"),
        ("port", "port: [8080, 8443]"),
    ]);
    let no_route = "404: no route for http to x";
    all(
        &document,
        &[
            (session(Kind::Http, Method::POST, "x", "/form?a=1"), "post"),
            (get("x", "/form"), no_route),
            (get("x", "/").header("hermes-user", "bob").header("x-a", ""), "alice"),
            (get("x", "/").header("hermes-user", "bob"), no_route),
            (get("x", "/").header("hermes-user", "eve").header("hermes-user", "alice").header("x-a", "1"), "alice"),
            (get("x", "/").header("x-version", "beta-2"), "beta"),
            (get("x", "/").header("x-version", "BETA-2"), no_route),
            (get("x", "/").of("carol"), "carol"),
            (get("x", "/mine").of("dave"), "known"),
            (get("x", "/mine"), no_route),
            (packets("10.1.0.0/16", 6), "net"),
            (packets("10.1.0.0/16", 1), "404: no route for ip to gateway"),
            (packets("0.0.0.0/0", 6), "404: no route for ip to gateway"),
            (packets("2001:db8:1::/48", 17), "net"),
            (connect("DB:3306").on("db"), "database"),
            (connect("x:8443"), "port"),
            (get("x:8080", "/"), "port"),
        ],
    );
}

/// A peer can announce any network for a name, so only the node that sends the packets out may rely on it.
#[test]
fn an_announced_network_matches_where_the_packets_are_sent_out() {
    let document = "node: edge\nlisteners:\n- {name: apps, bind: 127.0.0.1:0, protocol: http}\nroutes:\n\
                    - {name: on, match: {kind: ip, network: 10.0.0.0/8}, upstream: next}\n\
                    - {name: out, match: {kind: ip, network: 10.1.0.0/16}, terminate: {tun: gw0}}\n\
                    - {name: named, match: {kind: ip, authority: FILES}, upstream: next}\n\
                    upstreams:\n- {name: next, protocol: h2, endpoints: ['192.0.2.1:443']}\n";
    let announced = |authority: &str, network: &str| Facts {
        announced_network: Some(network.parse().unwrap()),
        ..session(Kind::Ip, Method::CONNECT, authority, "/")
    };
    all(
        document,
        &[
            (packets("10.1.0.7/32", 6), "on"),
            (announced("FILES", "10.1.0.7/32"), "out"),
            (announced("FILES", "10.2.0.7/32"), "named"),
            (announced("MAIL", "10.2.0.7/32"), "404: no route for ip to mail"),
        ],
    );
}

#[test]
fn the_first_match_wins_under_any_index_key() {
    let document = routes(&[
        ("by-header", "headers: {x-first: 'yes'}"),
        ("by-path", "path: '/a/*'"),
        ("by-host", "authority: A"),
        ("catch-all", ""),
        ("never", "authority: B"),
    ]);
    all(
        &document,
        &[
            (get("A", "/a/b").header("x-first", "yes"), "by-header"),
            (get("A", "/a/b"), "by-path"),
            (get("A", "/b"), "by-host"),
            (get("B", "/b"), "catch-all"),
        ],
    );
}

#[test]
fn paths_match_by_whole_segments_and_cannot_be_walked_around() {
    let document = routes(&[
        ("admin", "path: '/admin/*'"),
        ("photos", "path: '/users/*/photos'"),
        ("photo", "path: '/users/*/photos/*'"),
        ("scoped", "path: '/npm/*'"),
        ("files", "path: '/files*'"),
        ("root", "path: /"),
        ("public", "path: '/*'"),
    ]);
    let dots = "400: the path has a . or .. segment; send the resolved path";
    let escape = "400: the path has a % without two hexadecimal digits; escape a literal % as %25";
    let ambiguous = "400: ambiguous path: empty segments, escaped slashes or parameters after `;` match different routes; \
                     send single, unescaped slashes and no parameters";
    all(
        &document,
        &[
            (get("x", "/"), "root"),
            (get("x", "/?a=/admin/"), "root"),
            (get("x", "/admin/users"), "admin"),
            (get("x", "/admin"), "public"),
            (get("x", "/%61dmin/users"), "admin"),
            (get("x", "/%41dmin/users"), "public"),
            (get("x", "/public/../admin/users"), dots),
            (get("x", "/public/%2e%2E/admin/users"), dots),
            (get("x", "/public/..;a/admin/users"), dots),
            (get("x", "/public/..%2fadmin/users"), dots),
            (get("x", "/./admin/users"), dots),
            (get("x", "/public/%2%65%2%65/admin/users"), escape),
            (get("x", "/%6%31dmin/users"), escape),
            (get("x", "/100%"), escape),
            (get("x", "/100%25"), "public"),
            (get("x", "/?100%"), "root"),
            (get("x", "//admin/users"), ambiguous),
            (get("x", "/%2fadmin/users"), ambiguous),
            (get("x", "/admin%2fusers"), ambiguous),
            (get("x", "/admin%5Cusers"), ambiguous),
            (get("x", "/admin;x/users"), ambiguous),
            (get("x", "/;x/admin/users"), ambiguous),
            (get("x", "/admin;a%2fusers"), ambiguous),
            (get("x", "/;%2Fadmin/users"), ambiguous),
            (get("x", "/npm/cart;id=7"), "scoped"),
            (get("x", "/a//b"), "public"),
            (get("x", "/npm/@scope%2fname"), "scoped"),
            (get("x", "/users/7/photos"), "photos"),
            (get("x", "/users//photos"), "public"),
            (get("x", "/users//7/photos"), ambiguous),
            (get("x", "/users/7/8/photos"), "public"),
            (get("x", "/users/7/photos/9/large"), "photo"),
            (get("x", "/filesystem"), "files"),
            (session(Kind::Http, Method::OPTIONS, "x", "*"), "404: no route for http to x"),
        ],
    );
}

#[test]
fn loops_end_and_name_both_nodes() {
    let document = "{node: edge, routes: [{name: all, respond: {status: 404}}]}";
    let sixteen = (0..16).map(|n| format!("1.1 n{n}")).collect::<Vec<_>>().join(", ");
    all(
        document,
        &[
            (get("x", "/").header("via", "1.1 other"), "all"),
            (
                get("x", "/").header("via", "1.1 edge, 2 beta"),
                "508: loop: beta sent back to edge a request that edge had forwarded",
            ),
            (
                connect("x:1").header("via", "2 a").header("via", "2 EDGE:80"),
                "508: loop: EDGE:80 sent back to edge a request that edge had forwarded",
            ),
            (get("x", "/").header("via", &sixteen), "all"),
            (
                connect("x:1").header("via", &sixteen).header("via", "2 last"),
                "508: too many hops: 17 before edge, the last one last; more than 16 is treated as a loop",
            ),
        ],
    );
}

#[test]
fn a_route_that_cannot_carry_the_kind_denies_and_does_not_fall_through() {
    let document = "
node: edge
routes:
- {name: udp-only, match: {authority: 'VIDEO:*'}, terminate: {udp: '127.0.0.1:7000'}}
- {name: page, match: {authority: PAGE}, respond: {body: hi}}
- {name: gone, match: {authority: OLD}, redirect: {location: 'http://NEW/'}}
- {name: blocked, match: {authority: 'EVIL:*'}, respond: {status: 403}}
- {name: bytes, match: {authority: 'DB:*'}, upstream: db}
- {name: all, upstream: web}
upstreams:
- {name: db, protocol: tcp, endpoints: ['127.0.0.1:1']}
- {name: web, protocol: h1, endpoints: ['127.0.0.1:1']}
";
    all(
        document,
        &[
            (session(Kind::Udp, Method::CONNECT, "VIDEO:5004", "/"), "udp-only"),
            (get("VIDEO", "/"), "403: route udp-only matches first, but does not support http"),
            (connect("PAGE:443"), "403: route page matches first, but does not support tcp"),
            (connect("OLD:80"), "403: route gone matches first, but does not support tcp"),
            (connect("EVIL:25"), "blocked"),
            (get("DB", "/"), "403: route bytes matches first, but does not support http"),
            (connect("DB:3306"), "bytes"),
            (connect("OTHER:1"), "all"),
        ],
    );
}

#[test]
fn nobody_from_elsewhere_may_name_the_target_anonymously() {
    let document = "
node: edge
listeners:
- {name: lab, bind: '10.9.0.1:8080', protocol: http, trust: 10.9.0.0/24}
- {name: raw, bind: '10.9.0.1:8081', protocol: tcp, authority: 'example.com:443'}
routes:
- {name: fixed, match: {authority: 'DB:3306'}, terminate: {tcp: authority, reach: private}}
- {name: anywhere, match: {kind: tcp}, terminate: {tcp: authority}}
";
    let denied = "403: route anywhere dials the target of the request, but only for clients on this machine or with a \
                  certificate, a trusted address or a user";
    let far = || connect("example.com:443").on("lab").from("192.0.2.9:1");
    all(
        document,
        &[
            (far(), denied),
            (Facts { trust: Trust::Address, ..far() }, "anywhere"),
            (Facts { trust: certified(Some("n"), &[], false), ..far() }, "anywhere"),
            (far().of("alice"), "anywhere"),
            (connect("example.com:443").from("[::ffff:127.0.0.1]:1"), "anywhere"),
            (connect("DB:3306").from("192.0.2.9:1"), "fixed"),
            // The document names the target.
            (far().on("raw"), "anywhere"),
        ],
    );
}
