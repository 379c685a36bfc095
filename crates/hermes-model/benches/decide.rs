//! Benchmarks of decisions with 10 and with 10,000 routes, for several shapes of documents.
//!
//! `cargo bench -p hermes-model --bench decide`. Each pair should cost about the same.

#![allow(clippy::unwrap_used)]

use std::fmt::Write;
use std::hint::black_box;
use std::path::Path;
use std::sync::Arc;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use hermes_model::{Authority, Decision, Facts, Kind, Snapshot, Trust, check, decide};
use http::{HeaderMap, HeaderValue, Method};

/// The `match` of route N, and a session that matches the last route.
type Shape = (&'static str, fn(usize) -> String, fn(usize) -> Facts);

fn facts(kind: Kind, authority: &str, path: &str) -> Facts {
    let mut headers = HeaderMap::new();
    for name in ["accept", "accept-encoding", "user-agent", "x-request-id", "traceparent", "hermes-user"] {
        headers.insert(name, HeaderValue::from_static("some ordinary value"));
    }
    Facts {
        listener: Arc::from("apps"),
        kind,
        source: "127.0.0.1:40000".parse().unwrap(),
        trust: Trust::Anonymous,
        user: None,
        method: Method::GET,
        authority: Authority::parse(authority, Some(80)).unwrap(),
        path: path.parse().unwrap(),
        headers,
        network: None,
        announced_network: None,
        protocol: None,
    }
}

const SHAPES: [Shape; 10] = [
    (
        "by authority",
        |n| format!("authority: service-{n}"),
        |last| facts(Kind::Http, &format!("service-{last}"), "/index.html"),
    ),
    (
        "by suffix",
        |n| format!("authority: '*.service-{n}.example.com'"),
        |last| facts(Kind::Http, &format!("a.b.service-{last}.example.com"), "/index.html"),
    ),
    (
        "by path under one authority",
        |n| format!("authority: API, path: '/v1/items-{n}/*'"),
        |last| facts(Kind::Http, "api", &format!("/v1/items-{last}/7/photo")),
    ),
    (
        "by path behind a wildcard, a long path",
        |n| format!("path: '/*/items-{n}'"),
        |last| facts(Kind::Http, "api", &format!("/{}/items-{last}", "x".repeat(4000))),
    ),
    (
        "by what a segment begins with, a long path",
        |n| format!("path: '/*/items-{n}-*'"),
        |last| facts(Kind::Http, "api", &format!("/v1/items-{last}-{}", "x/".repeat(2000))),
    ),
    (
        "by path, escaped slashes",
        |n| format!("path: '/items-{n}/*'"),
        |last| facts(Kind::Http, "api", &format!("/items-{last}/{}", "%2f".repeat(1300))),
    ),
    (
        "by user under one authority",
        |n| format!("authority: VIDEO, user: user-{n}"),
        |last| Facts { user: Some(Arc::from(format!("user-{last}"))), ..facts(Kind::Http, "video", "/file") },
    ),
    (
        "by header under one authority",
        |n| format!("authority: VIDEO, headers: {{hermes-user: user-{n}}}"),
        |last| {
            let mut facts = facts(Kind::Http, "video", "/file");
            facts.headers.insert("hermes-user", HeaderValue::from_str(&format!("user-{last}")).unwrap());
            facts
        },
    ),
    (
        "by network",
        |n| format!("kind: ip, network: 10.{}.{}.0/24", n / 256, n % 256),
        |last| Facts {
            network: Some(format!("10.{}.{}.7/32", last / 256, last % 256).parse().unwrap()),
            ..facts(Kind::Ip, "gateway", "/")
        },
    ),
    (
        "mixed, with catch-alls",
        |n| match n % 4 {
            0 => format!("authority: service-{n}"),
            1 => format!("path: '/v1/items-{n}/*', method: [GET, POST]"),
            2 => format!("authority: '*.zone-{n}', user: '*'"),
            _ => format!("authority: shared, user: user-{n}, kind: http"),
        },
        |last| Facts {
            user: Some(Arc::from(format!("user-{}", last | 3))),
            ..facts(Kind::Http, "shared", "/v1/other/7")
        },
    ),
];

fn snapshot(routes: usize, shape: fn(usize) -> String) -> Snapshot {
    let mut text = "node: edge\nroutes:\n".to_owned();
    for n in 0..routes {
        writeln!(text, "- {{name: r{n}, match: {{{}}}, respond: {{status: 404}}}}", shape(n)).unwrap();
    }
    writeln!(text, "- {{name: rest, respond: {{status: 404}}}}").unwrap();
    check(&text, Path::new("/")).unwrap().snapshot
}

fn decisions(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("decide");
    for (name, shape, session) in SHAPES {
        for routes in [10, 10_000] {
            let snapshot = snapshot(routes, shape);
            // The last route of the last complete group of four.
            let facts = session(routes / 4 * 4 - 1);
            match decide(&facts, &snapshot) {
                Decision::Act(route) => assert_ne!(&*route.name, "rest", "{name}: the session meets no route"),
                Decision::Deny(deny) => panic!("{name}: {deny}"),
            }
            group.bench_function(BenchmarkId::new(name, routes), |bencher| {
                bencher.iter(|| decide(black_box(&facts), black_box(&snapshot)));
            });
        }
    }
    group.finish();
}

fn parsing(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("parse");
    group.bench_function("authority", |b| b.iter(|| Authority::parse(black_box("video.example.com:8443"), Some(80))));
    group.bench_function("authority in capitals", |b| b.iter(|| Authority::parse(black_box("VIDEO"), Some(80))));
    group.sample_size(10);
    let mut text = "node: edge\nroutes:\n".to_owned();
    for n in 0..10_000 {
        writeln!(text, "- {{name: r{n}, match: {{authority: s{n}, path: '/a/*'}}, respond: {{status: 404}}}}").unwrap();
    }
    group.bench_function("a document of 10,000 routes", |b| b.iter(|| check(black_box(&text), Path::new("/")).is_ok()));
    group.finish();
}

criterion_group!(benches, decisions, parsing);
criterion_main!(benches);
