//! Table VII of the first paper: echoes to a server on another continent and to one nearby.
//!
//! In: a session. Out: samples `table7-poland` and `table7-us`. They cover the bare path, tunnels without HTTP from the
//! user to the server (IP in UDP as in the paper, and wireguard-go), and the overlay. The overlay's ingress is next to
//! the server. The delay is the paper's round-trip time.

use std::time::Duration;

use anyhow::Result;
use hermes_testkit::load::Load;

use super::Session;
use crate::{
    packet_path::{Machines, PacketPath, Tunnel, target},
    progress,
    record::{Key, Sample, latencies},
};

/// The sites, and their bare round-trip time in microseconds.
pub(crate) const SITES: [(&str, u64); 2] = [("poland", 129_730), ("us", 21_710)];
/// Echoes of a sample, and milliseconds between two. The paper sends one a second.
const ECHOES: (usize, u64) = (30, 100);
/// The hops: user to ingress, ingress to server.
const HOPS: usize = 2;
const PATHS: [PacketPath; 5] =
    [PacketPath::Bare, PacketPath::Udp, PacketPath::WireGuard, PacketPath::Hermes("h2"), PacketPath::Hermes("h3")];

/// Runs the case.
pub(crate) fn run(session: &mut Session<'_>) -> Result<()> {
    for (site, rtt) in SITES {
        let row = Machines::far(&session.dir.join(site), Duration::from_micros(rtt / 2))?;
        let mut tunnels: Vec<Tunnel> = Vec::new();
        for path in session.paths(&PATHS) {
            tunnels.extend(row.start(path, session.programs, HOPS)?);
        }
        let key = Key::new(&format!("table7-{site}"));
        progress::print(&format!("table7: {site}"));
        for round in 0..session.settings.delayed_rounds {
            for tunnel in tunnels.iter().cycle().skip(round).take(tunnels.len()) {
                let (count, interval) = ECHOES;
                let load = Load::Ping { address: target(tunnel), count, warmup: 0, interval };
                let measured = row.measure(tunnel, load)?;
                let figures = latencies(&measured.outcome);
                session.samples.push(Sample::new(key.clone(), &tunnel.contender, round, &measured, figures));
            }
        }
        progress::print(&format!("table7: the delayed link dropped {} frames", row.dropped()));
    }
    Ok(())
}
