//! Transfers over a path that is slower than the machine, and over one whose last part loses packets.
//!
//! In: the binary. Out: seconds of transfers, directly and split by Hermes and HAProxy. All use the kernel's congestion
//! control, CUBIC. Each path has namespaces and links of its own, and contenders take turns.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use hermes_testkit::{
    link::{Conditions, join},
    netns::Namespace,
};
use serde::Serialize;

use super::contenders::{serve, start_haproxy, start_router};
use super::{
    BUFFER, CLIENT, DIRECT_PORT, HAPROXY_PORT, HELD_PORT, PepOptions, ROUTER, ROUTER_BY_SERVER, SERVER, Target, ask,
    connect, in_namespace, in_namespace_to_end,
};

/// A path: the links from the client to the router, and from the router to the server.
struct LongPath {
    name: &'static str,
    bytes: u64,
    links: [Conditions; 2],
}

/// The transfers over one path.
#[derive(Debug, Serialize)]
pub(super) struct PathFigures {
    pub(super) bytes: u64,
    /// By contender: seconds of each transfer.
    pub(super) seconds: BTreeMap<&'static str, Vec<f64>>,
}

fn paths() -> [LongPath; 2] {
    let at = |rate, one_way_us, loss| Conditions {
        rate: Some(rate),
        one_way: Duration::from_micros(one_way_us),
        loss,
        ..Conditions::default()
    };
    let mbit = 1_000_000;
    [
        LongPath {
            name: "200 Mbit/s, 2 ms",
            bytes: 256 << 20,
            links: [at(1000 * mbit, 250, 0.0), at(200 * mbit, 750, 0.0)],
        },
        LongPath {
            name: "100 ms, 1 % loss in the last 5 ms",
            bytes: 8 << 20,
            links: [at(100 * mbit, 2500, 0.01), at(100 * mbit, 47_500, 0.0)],
        },
    ]
}

/// Measures all paths.
pub(super) fn measure(options: &PepOptions, dir: &Path) -> Result<BTreeMap<&'static str, PathFigures>> {
    if options.path_transfers == 0 {
        return Ok(BTreeMap::new());
    }
    paths().into_iter().map(|path| Ok((path.name, measure_one(options, &path, dir)?))).collect()
}

/// The device of a route.
fn device_of(namespace: &Namespace, network: &str) -> Result<String> {
    let listed = Command::new("ip").args(["-n", namespace.name(), "route", "show", network]).output()?;
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    let device = listed.split_whitespace().skip_while(|word| *word != "dev").nth(1);
    device.map(str::to_owned).with_context(|| format!("no route to {network}"))
}

fn measure_one(options: &PepOptions, path: &LongPath, dir: &Path) -> Result<PathFigures> {
    let [client, router, server] = [Namespace::new()?, Namespace::new()?, Namespace::new()?];
    let epoch = Instant::now();
    let both = |link: &Conditions| [link.clone(), link.clone()];
    let _near = join((&client, CLIENT), (&router, ROUTER), both(&path.links[0]), epoch)?;
    let _far = join((&router, ROUTER_BY_SERVER), (&server, SERVER), both(&path.links[1]), epoch)?;
    // Everybody uses CUBIC, whatever the default of this machine is.
    let cubic = ["congctl", "cubic"];
    client.ip(&[&["route", "add", "default", "via", &ROUTER.to_string()], &cubic[..]].concat())?;
    server.ip(&[&["route", "add", "default", "via", &ROUTER_BY_SERVER.to_string()], &cubic[..]].concat())?;
    for (namespace, own) in [(&client, CLIENT), (&router, ROUTER), (&router, ROUTER_BY_SERVER), (&server, SERVER)] {
        let [a, b, c, _] = own.octets();
        let network = format!("{a}.{b}.{c}.0/24");
        let device = device_of(namespace, &network)?;
        namespace
            .ip(&[&["route", "replace", &network, "dev", &device, "src", &own.to_string()], &cubic[..]].concat())?;
    }
    router.sysctl("net/ipv4/ip_forward", "1")?;
    for port in [DIRECT_PORT, HELD_PORT] {
        in_namespace(&server, move || serve(SocketAddr::from((SERVER, port))))?;
    }
    let _haproxy = start_haproxy(&router, dir)?;
    let _hermes = start_router(&options.hermes, &router, dir)?;
    let targets = [
        Target::new("direct", (SERVER, DIRECT_PORT), None),
        Target::new("haproxy", (ROUTER, HAPROXY_PORT), None),
        Target::new("hermes-held", (SERVER, HELD_PORT), None),
    ];
    let (transfers, bytes, name) = (options.path_transfers, path.bytes, path.name);
    let seconds = in_namespace_to_end(&client, move || -> Result<_> {
        let mut all: BTreeMap<&'static str, Vec<f64>> = BTreeMap::new();
        let mut buffer = vec![0; BUFFER];
        for transfer in 0..transfers {
            for target in &targets {
                eprintln!("pep: {name}: transfer {} of {transfers}, {}", transfer + 1, target.name);
                let began = Instant::now();
                ask(target, &mut connect(target)?, "GET", bytes, &mut buffer)?;
                all.entry(target.name).or_default().push(began.elapsed().as_secs_f64());
            }
        }
        Ok(all)
    })??;
    Ok(PathFigures { bytes, seconds })
}
