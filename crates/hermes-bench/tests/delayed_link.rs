//! A delayed link costs what it says, for handshakes and datagrams alike; and the paper's server works behind it.
#![allow(clippy::unwrap_used)]

use std::{net::Ipv4Addr, time::Duration};

use hermes_testkit::{
    ca::{Authority, Subject},
    link,
    load::{Exchange, Outcome, exchange::payload},
    netns::Namespace,
    origin::slow,
    process::{Program, Running},
};

const RTT: f64 = 20_000.0;

#[test]
fn a_round_trip_takes_the_round_trip_time_and_a_handshake_one_more() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("SKIPPED: taps and namespaces need root");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (here, there) = (Namespace::new().unwrap(), Namespace::new().unwrap());
    let (a, b) = (Ipv4Addr::new(10, 77, 0, 1), Ipv4Addr::new(10, 77, 0, 2));
    let link = link::delayed((&here, a), (&there, b), Duration::from_millis(10)).unwrap();
    let (server, ports) = python_server(&there, b, dir.path());
    let at = |kind: &str| ports[kind].as_str().unwrap().parse().unwrap();
    let udp = Exchange::Udp { address: at("udp"), length: 100 };
    let tcp = Exchange::Tcp { address: at("tcp"), length: 100 };
    for (exchange, round_trips) in [(udp, 1.0), (tcp, 2.0)] {
        // Other programs of the machine delay some of the runs.
        let medians = (0..3).map(|_| {
            let outcome = load(&here, dir.path(), &exchange);
            assert_eq!(outcome.failed, 0, "{:?}", outcome.failures);
            outcome.latency.unwrap().p50_us / RTT
        });
        let least = medians.fold(f64::MAX, f64::min);
        assert!((round_trips..round_trips + 0.3).contains(&least), "{least} round trips, not {round_trips}");
    }
    drop(server);
    drop(link);
}

fn python_server(namespace: &Namespace, bind: Ipv4Addr, dir: &std::path::Path) -> (Running, serde_json::Value) {
    let ca = Authority::new("lab").unwrap();
    let identity = ca.issue(&Subject::server("secure")).unwrap().write(dir, "secure").unwrap();
    std::fs::write(dir.join("payload"), payload(100)).unwrap();
    let mut server = Program::new("slow", "python3", dir)
        .args([slow::write(dir).unwrap().as_os_str(), bind.to_string().as_ref()])
        .args([dir.join("payload").as_os_str(), "100".as_ref(), identity.cert.as_ref(), identity.key.as_ref()])
        .within(Some(namespace))
        .start()
        .unwrap();
    let line = server.wait_first_line(Duration::from_secs(20)).unwrap();
    (server, serde_json::from_str(&line).unwrap())
}

/// The benchmark's own load process, inside the namespace.
fn load(namespace: &Namespace, dir: &std::path::Path, exchange: &Exchange) -> Outcome {
    let task = serde_json::json!({
        "load": {"load": "single", "exchange": exchange, "count": 15, "warmup": 1},
        "watch": [],
    });
    let program = Program::new("load", env!("CARGO_BIN_EXE_hermes-bench"), dir)
        .args(["load", &task.to_string()])
        .within(Some(namespace));
    let output = program.start().unwrap().wait_output(Duration::from_secs(30)).unwrap();
    serde_json::from_str(&output).unwrap()
}
