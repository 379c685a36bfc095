//! Requests a second on persistent connections.
//!
//! In: a session. Out: samples `one-hop-h1`, `one-hop-h2` (h1 to the origin) and `two-hops` (h1, h2 between, h1).
//! Proxies run on their own core. The main figure is requests per CPU second of the proxies: on few cores the load and
//! the origin may limit requests a second.

use anyhow::Result;
use hermes_testkit::load::Load;

use super::{Session, in_turn};
use crate::{
    chain::{Chain, ClientListeners, Security, Shape, WEB},
    progress,
    record::{Figures, Key, latencies, rates},
    settings::PAYLOAD,
    testbed::{Measured, Testbed},
};

/// The number of HTTP/1.1 keep-alive connections.
const CONNECTIONS: usize = 64;
/// Connections and streams of HTTP/2: the same number of concurrent requests as with HTTP/1.1.
const MULTIPLEXED: (usize, usize) = (4, 16);

/// Runs the case.
pub(crate) fn run(session: &mut Session<'_>) -> Result<()> {
    let testbed = Testbed::loopback(session.dir, true)?;
    let one_hop = session.start_all(&testbed, Shape::OneHop, Security::Plain)?;
    rounds(session, &testbed, &one_hop, &Key { clients: Some(CONNECTIONS), ..Key::new("one-hop-h1") }, h1)?;
    rounds(session, &testbed, &one_hop, &Key { clients: Some(CONNECTIONS), ..Key::new("one-hop-h2") }, h2)?;
    drop(one_hop);
    for security in [Security::Plain, Security::Mtls] {
        let chains = session.start_all(&testbed, Shape::TwoHops, security)?;
        let key = Key { security: Some(security), clients: Some(CONNECTIONS), ..Key::new("two-hops") };
        rounds(session, &testbed, &chains, &key, h1)?;
    }
    Ok(())
}

type MakeLoad = fn(&ClientListeners, (u64, u64)) -> Option<Load>;

fn rounds(session: &mut Session<'_>, testbed: &Testbed, chains: &[Chain], key: &Key, load: MakeLoad) -> Result<()> {
    progress::print(&format!("throughput: {key}"));
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

fn figures(measured: &Measured) -> Figures {
    let requests = measured.outcome.completed as f64;
    let mut figures = latencies(&measured.outcome);
    figures.extend(rates("requests", requests, measured));
    if measured.proxies > 0.0 && requests > 0.0 {
        figures.insert("cpu_s_per_1000_requests".into(), measured.proxies / requests * 1000.0);
    }
    figures
}

fn h1(listeners: &ClientListeners, (warmup, window): (u64, u64)) -> Option<Load> {
    Some(Load::KeepAlive {
        address: listeners.http,
        authority: WEB.into(),
        length: PAYLOAD,
        connections: CONNECTIONS,
        warmup,
        window,
    })
}

fn h2(listeners: &ClientListeners, (warmup, window): (u64, u64)) -> Option<Load> {
    let (connections, streams) = MULTIPLEXED;
    Some(Load::Multiplexed {
        address: listeners.http2?,
        authority: WEB.into(),
        length: PAYLOAD,
        connections,
        streams,
        warmup,
        window,
    })
}
