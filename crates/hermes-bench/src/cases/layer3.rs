//! IP through devices: bulk, small packets, many flows, and the delay that each hop adds to an echo.
//!
//! In: a session. Out: samples `ip-bulk` (by number of connections), `ip-datagrams` (by number of flows) and `ip-echo`
//! (by number of hops). For `ip-echo-awake` the cores are kept from halting; for `ip-echo-next` each echo is sent when
//! the previous one is answered. Each is measured beside the bare path over the same links and wireguard-go. All
//! tunnels are up throughout; those that are not measured are idle.

use anyhow::Result;
use hermes_testkit::load::Load;

use super::{
    Session,
    tunnels::{bulk_figures, datagram_figures},
};
use crate::{
    machine,
    packet_path::{Machines, PacketPath, Tunnel, target},
    progress,
    record::{Figures, Key, Sample, latencies},
    testbed::Measured,
};

/// Numbers of TCP connections.
const CONNECTIONS: [usize; 2] = [1, 8];
/// Flows of datagrams, and datagrams in flight in each.
const FLOWS: [(usize, usize); 2] = [(8, 32), (1000, 2)];
/// Bytes of a datagram, the size of a voice codec's.
const SMALL: usize = 64;
/// The numbers of hops over which echoes are measured.
const HOPS: [usize; 3] = [1, 2, 4];
/// Echoes of a sample, and milliseconds between two.
const ECHOES: (usize, u64) = (400, 3);
/// The same if each echo is sent when the previous one is answered.
const NEXT: (usize, u64) = (4000, 0);
/// The ways measured with bulk and datagrams, in the order of their turns.
const PATHS: [PacketPath; 5] = [
    PacketPath::Bare,
    PacketPath::WireGuard,
    PacketPath::Hermes("h1"),
    PacketPath::Hermes("h2"),
    PacketPath::Hermes("h3"),
];
/// The ways measured with echoes. They include the devices alone, without TLS and HTTP.
const ECHO_MODES: [PacketPath; 6] = [PATHS[0], PATHS[1], PacketPath::Udp, PATHS[2], PATHS[3], PATHS[4]];

/// Runs the case.
pub(crate) fn run(session: &mut Session<'_>) -> Result<()> {
    let row = Machines::new(&session.dir.join("layer3"), HOPS[HOPS.len() - 1] + 1)?;
    let mut one_hop = Vec::new();
    for path in session.paths(&PATHS) {
        one_hop.extend(row.start(path, session.programs, 1)?);
    }
    let (warmup, window) = (session.settings.warmup_ms, session.settings.window_ms);
    for connections in CONNECTIONS {
        let key = Key { clients: Some(connections), ..Key::new("ip-bulk") };
        rounds(session, &row, &one_hop, &key, bulk_figures, |tunnel| {
            let (address, sink, sink_in) = row.sink(tunnel);
            Load::Bulk { address, sink, sink_in, connections, warmup, window }
        })?;
    }
    for (flows, in_flight) in FLOWS {
        let key = Key { clients: Some(flows), ..Key::new("ip-datagrams") };
        rounds(session, &row, &one_hop, &key, datagram_figures, |tunnel| {
            let (address, sink, sink_in) = row.sink(tunnel);
            Load::Datagrams { address, sink, sink_in, length: SMALL, flows, in_flight, warmup, window }
        })?;
    }
    for hops in HOPS {
        let mut tunnels: Vec<Tunnel> = Vec::new();
        for path in session.paths(&ECHO_MODES) {
            tunnels.extend(row.start(path, session.programs, hops)?);
        }
        for (measure, pace) in [("ip-echo", ECHOES), ("ip-echo-awake", ECHOES), ("ip-echo-next", NEXT)] {
            let awake = if measure == "ip-echo-awake" { machine::awake(session.dir)? } else { Vec::new() };
            let key = Key { clients: Some(hops), ..Key::new(measure) };
            let first = session.samples.len();
            rounds(
                session,
                &row,
                &tunnels,
                &key,
                |measured| latencies(&measured.outcome),
                |tunnel| echoes(tunnel, pace),
            )?;
            added(&mut session.samples[first..], hops);
            drop(awake);
        }
    }
    Ok(())
}

fn echoes(tunnel: &Tunnel, (count, interval): (usize, u64)) -> Load {
    Load::Ping { address: target(tunnel), count, warmup: 20, interval }
}

fn rounds(
    session: &mut Session<'_>,
    row: &Machines,
    tunnels: &[Tunnel],
    key: &Key,
    figures: impl Fn(&Measured) -> Figures,
    load: impl Fn(&Tunnel) -> Load,
) -> Result<()> {
    progress::print(&format!("layer3: {key}"));
    for round in 0..session.settings.window_rounds {
        for tunnel in tunnels.iter().cycle().skip(round).take(tunnels.len()) {
            let measured = row.measure(tunnel, load(tunnel))?;
            let figures = figures(&measured);
            session.samples.push(Sample::new(key.clone(), &tunnel.contender, round, &measured, figures));
        }
    }
    Ok(())
}

/// Computes the delay that a hop adds to the median, relative to the bare path of the same round.
fn added(samples: &mut [Sample], hops: usize) {
    let bare = |round: usize, samples: &[Sample]| {
        let found = samples.iter().find(|s| s.round == round && s.contender == PacketPath::Bare.name());
        found.and_then(|s| s.figures.get("p50_us").copied())
    };
    let bases: Vec<Option<f64>> = samples.iter().map(|s| bare(s.round, samples)).collect();
    for (sample, base) in samples.iter_mut().zip(bases) {
        if let (Some(own), Some(base)) = (sample.figures.get("p50_us").copied(), base) {
            sample.figures.insert("added_us_per_hop".to_owned(), (own - base) / hops as f64);
        }
    }
}
