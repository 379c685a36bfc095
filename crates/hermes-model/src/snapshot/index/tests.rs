//! The index compared with a test of all routes.

#![allow(clippy::unwrap_used)]

use http::{HeaderName, HeaderValue, StatusCode};
use proptest::prelude::*;

use super::*;
use crate::facts::Kind;
use crate::matcher::Matcher;
use crate::pattern::{AuthorityPattern, PathPattern, UserPattern, ValuePattern};
use crate::snapshot::{Action, Importance, OnChange, Respond, Timeouts};
use crate::test_fixtures::session;

fn route(at: usize, matcher: Matcher) -> Arc<Route> {
    let respond = Respond { status: StatusCode::NOT_FOUND, headers: Vec::new(), body: Vec::new().into() };
    Arc::new(Route {
        name: Arc::from(format!("r{at}")),
        matcher,
        action: Action::Respond(respond),
        rewrite: None,
        retry: None,
        custody: None,
        cache: None,
        upstream_rate_limit: None,
        resume: None,
        trusts_idempotency_key: false,
        timeout: Timeouts::default(),
        on_change: OnChange::default(),
        early_data: true,
        importance: Importance::Normal,
    })
}

/// A small set of values, so that sessions match often.
fn some<T: Clone + std::fmt::Debug + 'static>(values: Vec<T>) -> impl Strategy<Value = Vec<T>> {
    prop_oneof![3 => Just(Vec::new()), 2 => proptest::sample::subsequence(values, 1..3)]
}

fn parsed<T>(texts: &[&str], parse: fn(&str) -> Result<T, String>) -> Vec<T> {
    texts.iter().map(|text| parse(text).unwrap()).collect()
}

const AUTHORITIES: [&str; 14] =
    ["a", "b", "a:80", "a:8080", "a:*", "x.a", "*", "*:*", "*:8080", "*.a", "*.x.a", "*.a:*", "*.a:8080", "[::1]"];
const PATHS: [&str; 18] = [
    "*", "/", "/*", "/p", "/p/", "/p/*", "/p*", "/p/q", "/p/*/r", "/p/*/r/*", "/p/q/*", "/*/q", "/*/q*", "/*/*/r",
    "/*/*/*", "/*/", "/p/*/", "/*/q/r*",
];
const VALUES: [&str; 4] = ["*", "v", "w", "v*"];

fn matcher() -> impl Strategy<Value = Matcher> {
    let headers = some(vec!["h1", "h2"]).prop_flat_map(|names| {
        let one = |name: &str| {
            let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
            proptest::sample::subsequence(parsed(&VALUES, ValuePattern::parse), 1..3)
                .prop_map(move |v| (name.clone(), v))
        };
        names.iter().map(|name| one(name)).collect::<Vec<_>>()
    });
    let names = (
        some(vec![Arc::from("l1"), Arc::from("l2")]),
        some(parsed(&["*", "u1", "u2"], UserPattern::parse)),
        some(parsed(&AUTHORITIES, AuthorityPattern::parse)),
        some(parsed(&PATHS, PathPattern::parse)),
        headers,
    );
    let numbers = (
        some(vec![Kind::Http, Kind::Tcp, Kind::Ip]),
        some(vec![80, 443, 8080]),
        some(["10.0.0.0/8", "10.1.0.0/16", "0.0.0.0/0", "2001:db8::/32"].map(|net| net.parse().unwrap()).to_vec()),
        some(vec![6, 17]),
        proptest::bool::ANY,
    );
    (names, numbers).prop_map(
        |(
            (listeners, users, authorities, paths, headers),
            (kinds, ports, networks, protocols, accepts_announced_network),
        )| Matcher {
            listeners,
            kinds,
            authorities,
            paths,
            methods: Vec::new(),
            headers,
            users,
            networks,
            accepts_announced_network,
            protocols,
            ports,
        },
    )
}

fn facts() -> impl Strategy<Value = Facts> {
    let hosts = ["a", "b", "x.a", "y.x.a", "c", "a:8080", "x.a:8080", "[::1]", "a:443"];
    let paths = ["/", "/p", "/p/", "/p/q", "/p/q/r", "/p/q/r/s", "/px", "/q", "*", "/p//", "//q", "/x/qr", "/x/q/rs"];
    let networks = ["10.1.2.0/24", "10.2.0.0/16", "10.0.0.0/8", "0.0.0.0/0", "2001:db8:1::/48", "fd00::/8"];
    let choose = (
        proptest::sample::select(hosts.to_vec()),
        proptest::sample::select(paths.to_vec()),
        proptest::sample::select(vec![Kind::Http, Kind::Tcp, Kind::Ip]),
        proptest::sample::select(vec!["l1", "l2", "l3"]),
        proptest::option::of(proptest::sample::select(vec!["u1", "u2", "u3"])),
        proptest::option::of(proptest::sample::select(networks.to_vec())),
        proptest::bool::ANY,
    );
    let lines = proptest::collection::vec(
        (proptest::sample::select(vec!["h1", "h2", "h3"]), proptest::sample::select(vec!["v", "w", "vv", ""])),
        0..4,
    );
    (choose, lines).prop_map(|((host, path, kind, listener, user, network, is_told), lines)| {
        let mut facts = session(kind, http::Method::GET, host, path).on(listener);
        facts.user = user.map(Arc::from);
        facts.network = network.map(|net| net.parse().unwrap());
        facts.protocol = facts.network.map(|_| 6);
        if is_told {
            facts.announced_network = facts.network.take();
        }
        for (name, value) in lines {
            facts.headers.append(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        facts
    })
}

fn walk(routes: &[Arc<Route>], facts: &Facts, path: &str) -> Option<usize> {
    routes.iter().position(|route| route.matcher.matches(facts, path))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn the_index_finds_what_a_walk_finds(
        matchers in proptest::collection::vec(matcher(), 0..120),
        sessions in proptest::collection::vec(facts(), 30),
    ) {
        let routes: Vec<Arc<Route>> = matchers.into_iter().enumerate().map(|(at, m)| route(at, m)).collect();
        let index = RouteIndex::build(&routes);
        for facts in &sessions {
            let path = facts.path.path();
            prop_assert_eq!(index.first_match(&routes, facts, path), walk(&routes, facts, path), "{:?}", facts);
        }
    }

    #[test]
    fn a_match_that_covers_another_matches_whatever_that_one_does(
        wide in matcher(),
        narrow in matcher(),
        sessions in proptest::collection::vec(facts(), 30),
    ) {
        for facts in &sessions {
            let path = facts.path.path();
            if narrow.matches(facts, path) && wide.covers(&narrow) {
                prop_assert!(wide.matches(facts, path), "{:?} covers {:?}: {:?}", wide, narrow, facts);
            }
        }
    }
}

fn many(matcher: impl Fn(usize) -> Matcher) -> Vec<Arc<Route>> {
    (0..2000).map(|at| route(at, matcher(at))).collect()
}

/// A path of eleven segments, each `a` or a wildcard, with `*` at the end. Later routes have fewer wildcards.
fn wild(number: usize) -> String {
    let segments = (0..11).map(|bit| if number >> bit & 1 == 0 { "/*" } else { "/a" });
    segments.chain(["/*"]).collect()
}

fn authority(text: &str) -> Vec<AuthorityPattern> {
    parsed(&[text], AuthorityPattern::parse)
}

#[test]
fn few_routes_are_tested_however_many_there_are() {
    let get = |host: &str, path: &str| session(Kind::Http, http::Method::GET, host, path);
    let path = |text: &str| parsed(&[text], PathPattern::parse);
    let shapes = [
        (
            "authority",
            many(|n| Matcher { authorities: authority(&format!("h{n}")), ..Matcher::default() }),
            get("h7", "/"),
        ),
        (
            "port",
            many(|n| Matcher { authorities: authority(&format!("*:{}", n + 1)), ..Matcher::default() }),
            get("h:7", "/"),
        ),
        (
            "suffix",
            many(|n| Matcher { authorities: authority(&format!("*.h{n}")), ..Matcher::default() }),
            get("a.b.c.h7", "/"),
        ),
        (
            "path under one authority",
            many(|n| Matcher { authorities: authority("a"), paths: path(&format!("/p{n}/*")), ..Matcher::default() }),
            get("a", "/p7/x/y"),
        ),
        (
            "path behind a wildcard",
            many(|n| Matcher { paths: path(&format!("/*/b{n}")), ..Matcher::default() }),
            get("a", &format!("/{}/b7", "x".repeat(4000))),
        ),
        (
            "what a segment begins with",
            many(|n| Matcher { paths: path(&format!("/*/b{n}-*")), ..Matcher::default() }),
            get("a", "/x/b7-8/9"),
        ),
        (
            "wildcards and texts in every order",
            many(|n| Matcher { paths: path(&wild(n)), ..Matcher::default() }),
            get("a", &"/a".repeat(16_000)),
        ),
        (
            "authority and path, a hundred of each",
            many(|n| Matcher {
                authorities: authority(&format!("h{}", n % 45)),
                paths: path(&format!("/p{}/*", n / 45)),
                ..Matcher::default()
            }),
            get("h7", "/p7/x"),
        ),
        (
            "user under one authority",
            many(|n| Matcher {
                authorities: authority("a"),
                users: vec![UserPattern::Is(Arc::from(format!("u{n}")))],
                ..Matcher::default()
            }),
            get("a", "/").of("u7"),
        ),
        (
            "header under one authority",
            many(|n| Matcher {
                authorities: authority("a"),
                headers: vec![(HeaderName::from_static("x"), parsed(&[&format!("v{n}")], ValuePattern::parse))],
                ..Matcher::default()
            }),
            get("a", "/").header("x", "v7"),
        ),
        (
            "network",
            many(|n| Matcher {
                networks: vec![format!("10.{}.{}.0/24", n / 256, n % 256).parse().unwrap()],
                ..Matcher::default()
            }),
            crate::test_fixtures::packets("10.0.7.1/32", 6),
        ),
    ];
    for (name, routes, facts) in shapes {
        assert!(walk(&routes, &facts, facts.path.path()).is_some(), "{name}: the session matches nothing");
        let tested = RouteIndex::build(&routes).search(&routes, &facts, facts.path.path()).tested;
        assert!(tested <= 10, "{name}: {tested} routes were tested");
    }
}
