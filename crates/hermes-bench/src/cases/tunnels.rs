//! Bulk through tunnels: TCP in Gbit/s, UDP in datagrams a second, over HTTP/2 and HTTP/3.
//!
//! In: a session. Out: samples `bulk` (by number of connections), `datagrams` and `datagrams-apart`. Two proxies
//! forward in one direction, into a sink in the load's own process. A datagram is sent when an earlier one arrives, so
//! that only the path causes loss.

use anyhow::Result;
use hermes_testkit::load::Load;

use super::{Session, in_turn};
use crate::{
    chain::{Chain, ClientListeners, Security, Shape},
    progress,
    record::{Figures, Key, rates},
    settings::DATAGRAM,
    testbed::{Measured, Testbed},
};

/// Numbers of TCP connections.
const CONNECTIONS: [usize; 2] = [1, 8];
/// Flows of datagrams, and datagrams in flight in each: fewer than any default socket buffer holds.
const FLOWS: (usize, usize) = (8, 32);

/// Runs the case in the clear, over mutual TLS and over QUIC. Datagrams are also measured with the proxies on their own
/// core. On the sender's core a proxy that keeps up handles each datagram as it arrives, so its cost depends on the
/// sender's speed. On its own core a proxy is fully loaded.
pub(crate) fn run(session: &mut Session<'_>) -> Result<()> {
    for apart in [false, true] {
        let testbed = Testbed::loopback(session.dir, apart)?;
        for security in [Security::Plain, Security::Mtls, Security::Quic] {
            let chains = session.start_all(&testbed, Shape::TwoHops, security)?;
            for connections in CONNECTIONS.into_iter().filter(|_| !apart) {
                let key = Key { security: Some(security), clients: Some(connections), ..Key::new("bulk") };
                rounds(session, &testbed, &chains, &key, bulk_figures, |listeners, times| {
                    bulk(&testbed, listeners, connections, times)
                })?;
            }
            let measure = if apart { "datagrams-apart" } else { "datagrams" };
            let key = Key { security: Some(security), clients: Some(FLOWS.0), ..Key::new(measure) };
            rounds(session, &testbed, &chains, &key, datagram_figures, |listeners, times| {
                datagrams(&testbed, listeners, times)
            })?;
        }
    }
    Ok(())
}

fn rounds(
    session: &mut Session<'_>,
    testbed: &Testbed,
    chains: &[Chain],
    key: &Key,
    figures: fn(&Measured) -> Figures,
    load: impl Fn(&ClientListeners, (u64, u64)) -> Option<Load>,
) -> Result<()> {
    progress::print(&format!("tunnels: {key}"));
    let times = (session.settings.warmup_ms, session.settings.window_ms);
    for round in 0..session.settings.window_rounds {
        for chain in in_turn(chains, round) {
            if let Some(load) = load(&chain.listeners, times) {
                session.record((testbed, chain), key, round, load, figures)?;
            }
        }
    }
    Ok(())
}

fn bulk(
    testbed: &Testbed,
    listeners: &ClientListeners,
    connections: usize,
    (warmup, window): (u64, u64),
) -> Option<Load> {
    Some(Load::Bulk { address: listeners.sink?, sink: testbed.sinks().0, sink_in: None, connections, warmup, window })
}

fn datagrams(testbed: &Testbed, listeners: &ClientListeners, (warmup, window): (u64, u64)) -> Option<Load> {
    let (flows, in_flight) = FLOWS;
    let address = listeners.flood?;
    let sink = testbed.sinks().1;
    Some(Load::Datagrams { address, sink, sink_in: None, length: DATAGRAM, flows, in_flight, warmup, window })
}

pub(super) fn bulk_figures(measured: &Measured) -> Figures {
    let mut figures = rates("gbit", measured.outcome.bytes as f64 * 8.0 / 1e9, measured);
    figures.extend(rates("gbyte", measured.outcome.bytes as f64 / 1e9, measured));
    figures
}

pub(super) fn datagram_figures(measured: &Measured) -> Figures {
    rates("datagrams", measured.outcome.completed as f64, measured)
}
