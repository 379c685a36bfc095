//! The benchmark's arithmetic and its documents.
#![allow(clippy::unwrap_used)]

use std::net::{Ipv4Addr, SocketAddr};

use hermes_testkit::{
    ca::{Authority, IdentityFiles, Subject},
    load::Outcome,
};

use crate::{
    chain::{Case, Location, Origins, Plan, Ports, Security, Shape},
    contender::hermes,
    record::{Figures, Key, Results, Sample, Spread, latencies},
    svg, table,
    testbed::Measured,
};

fn sample(key: &Key, contender: &str, round: usize, mean: f64, failed: u64) -> Sample {
    let outcome = Outcome { completed: 10, failed, seconds: 1.0, ..Outcome::default() };
    let measured = Measured { outcome, proxies: 0.5, origin: 0.1, work_ms: 4.0 };
    let figures = Figures::from([("mean_us".to_owned(), mean), ("sd_us".to_owned(), mean / 10.0)]);
    Sample::new(key.clone(), contender, round, &measured, figures)
}

fn figure10_results() -> Results {
    let mut results = Results { benchmark: "figure10".into(), ..Results::default() };
    for case in Case::ALL {
        for clients in [200, 1000] {
            let key =
                Key { case: Some(case), security: Some(Security::Plain), clients: Some(clients), ..Key::new("burst") };
            for round in 0..2 {
                let base = clients as f64 * (round + 1) as f64;
                results.samples.push(sample(&key, "direct", round, base, 0));
                results.samples.push(sample(&key, "envoy", round, base * 4.0, 0));
                results.samples.push(sample(&key, "hermes", round, base * 2.0, 0));
            }
        }
    }
    results.sum_up();
    results
}

#[test]
fn spread_is_median_and_range() {
    assert_eq!(Spread::of(&[]), None);
    assert_eq!(Spread::of(&[3.0, 1.0, 2.0]), Some(Spread { median: 2.0, min: 1.0, max: 3.0 }));
    assert_eq!(Spread::of(&[4.0, 1.0, 2.0, 3.0]).map(|s| s.median), Some(2.5));
}

#[test]
fn ratios_are_taken_within_rounds() {
    let key = Key::new("single");
    let mut results = Results::default();
    // A disturbed second round must not show in the ratio.
    for (round, disturbance) in [(0, 1.0), (1, 7.0), (2, 1.0)] {
        results.samples.push(sample(&key, "envoy", round, 100.0 * disturbance, 0));
        results.samples.push(sample(&key, "hermes", round, 50.0 * disturbance, 0));
    }
    results.sum_up();
    let summary = results.find(&key, "hermes").unwrap();
    assert_eq!(summary.to_reference["mean_us"], Spread { median: 0.5, min: 0.5, max: 0.5 });
    assert_eq!(summary.figures["mean_us"], Spread { median: 50.0, min: 50.0, max: 350.0 });
    assert_eq!(summary.samples, 3);
}

#[test]
fn failures_stand_in_the_table() {
    let mut results = Results { benchmark: "figure10".into(), ..Results::default() };
    let key = Key { case: Some(Case::Tcp), security: Some(Security::Plain), ..Key::new("single") };
    results.samples.push(sample(&key, "envoy", 0, 212.0, 3));
    results.sum_up();
    let text = table::markdown(&[results]);
    assert!(text.contains("212 (212–212) **(3 failed)**"), "{text}");
}

#[test]
fn results_survive_their_file() {
    let dir = tempfile::tempdir().unwrap();
    let results = figure10_results();
    results.write(dir.path()).unwrap();
    let read = Results::read(dir.path(), "figure10").unwrap().unwrap();
    assert_eq!(read.samples.len(), results.samples.len());
    assert_eq!(serde_json::to_value(&read).unwrap(), serde_json::to_value(&results).unwrap());
    assert!(Results::read(dir.path(), "memory").unwrap().is_none());
}

#[test]
fn the_figure_has_one_panel_for_each_case_and_quotes_the_paper() {
    let svg = svg::figure10(&figure10_results()).unwrap();
    for case in Case::ALL {
        assert!(svg.contains(case.title()));
    }
    assert_eq!(svg.matches("<polyline").count(), 12, "three lines in each of four panels");
    assert!(svg.contains("direct 110.5 % slower than proxied"));
    assert!(svg.contains("here: direct 75.0 % faster than envoy") && svg.contains("direct 50.0 % faster than hermes"));
    assert!(svg::figure10(&Results { benchmark: "memory".into(), ..Results::default() }).is_none());
}

#[test]
fn latencies_of_nothing_are_no_figures() {
    assert!(latencies(&Outcome::default()).is_empty());
}

/// Runs `look` on the plan of each shape and security.
fn with_plans(look: impl Fn(&Plan<'_>)) {
    let dir = tempfile::tempdir().unwrap();
    let ca = Authority::new("bench").unwrap();
    let issue = |name: &str| -> IdentityFiles {
        let subject = Subject::node(name).standalone().with_address(Ipv4Addr::LOCALHOST.into());
        ca.issue(&subject).unwrap().write(dir.path(), name).unwrap()
    };
    let identities = [issue("near"), issue("far")];
    let at = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let origins =
        Origins { http: at(1), http2: Some(at(2)), secure: at(3), tcp: at(4), udp: at(5), sink: at(6), flood: at(7) };
    let ports = Ports { http: 11, http2: 12, tcp: 13, sink: 14, udp: 15, flood: 16, link: 17, admin: [18, 19] };
    for (shape, security) in [Security::Plain, Security::Mtls, Security::Quic]
        .map(|security| (Shape::TwoHops, security))
        .into_iter()
        .chain([(Shape::OneHop, Security::Plain)])
    {
        let location = Location { namespace: None, address: Ipv4Addr::LOCALHOST, cpus: &[] };
        let dir = dir.path();
        look(&Plan {
            shape,
            security,
            near: location,
            far: location,
            origins: &origins,
            identities: &identities,
            ports,
            dir,
        });
    }
}

#[test]
fn hermes_accepts_the_documents_that_are_rendered_for_it() {
    with_plans(|plan| {
        let mut documents = vec![hermes::near_document(plan)];
        if plan.shape == Shape::TwoHops {
            documents.push(hermes::far_document(plan));
        }
        for document in documents {
            let checked = hermes_model::check::check(&document, plan.dir);
            assert!(checked.is_ok(), "{:?}\n{document}", checked.err());
        }
    });
}
