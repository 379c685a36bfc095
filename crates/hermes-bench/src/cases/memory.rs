//! Resident memory with a thousand idle clients.
//!
//! In: a session. Out: samples `idle` for HTTP/1.1 keep-alive connections and for TCP tunnels: the memory of both
//! proxies together before the clients connect and while they are connected. Each measurement uses new proxies.

use anyhow::Result;
use hermes_testkit::{load::Load, process::Memory};

use super::Session;
use crate::{
    chain::{Case, Chain, Security, Shape},
    progress,
    record::{Figures, Key, Sample},
    settings::IDLE_CLIENTS,
    testbed::Testbed,
};

/// The number of rounds: memory varies little.
const ROUNDS: usize = 3;
const MIB: f64 = 1024.0 * 1024.0;

/// Runs the case, in the clear and over mutual TLS.
pub(crate) fn run(session: &mut Session<'_>) -> Result<()> {
    let testbed = Testbed::loopback(session.dir, false)?;
    for round in 0..session.settings.rounds.min(ROUNDS) {
        progress::print(&format!("memory: round {}", round + 1));
        for security in [Security::Plain, Security::Mtls] {
            for case in [Case::Http, Case::Tcp] {
                one_round(session, &testbed, (case, security), round)?;
            }
        }
    }
    Ok(())
}

fn one_round(
    session: &mut Session<'_>,
    testbed: &Testbed,
    (case, security): (Case, Security),
    round: usize,
) -> Result<()> {
    let key = Key { case: Some(case), security: Some(security), clients: Some(IDLE_CLIENTS), ..Key::new("idle") };
    let contenders = session.contenders.clone();
    for contender in contenders.into_iter().filter(|c| c.name() != "direct") {
        let Some(chain) = testbed.start(contender, Shape::TwoHops, security)? else { continue };
        let Some(exchange) = chain.listeners.exchange(case, testbed.ca()) else { continue };
        // One request comes first: memory allocated on first use does not count for a connection.
        testbed.measure(&chain, Load::Single { exchange: exchange.clone(), count: 1, warmup: 0 })?;
        let before = weigh(&chain)?;
        let load = Load::Idle { exchange, clients: IDLE_CLIENTS };
        let (with, measured) = testbed.while_idle(&chain, &load, || weigh(&chain))?;
        let figures = Figures::from([
            ("empty_rss_mib".to_owned(), before.rss as f64 / MIB),
            ("rss_mib".to_owned(), with.rss as f64 / MIB),
            ("pss_mib".to_owned(), with.pss as f64 / MIB),
            ("kib_per_client".to_owned(), (with.rss as f64 - before.rss as f64) / 1024.0 / IDLE_CLIENTS as f64),
        ]);
        session.samples.push(Sample::new(key.clone(), chain.contender, round, &measured, figures));
    }
    Ok(())
}

fn weigh(chain: &Chain) -> Result<Memory> {
    let mut sum = Memory::default();
    for program in &chain.programs {
        let memory = program.usage()?.memory;
        sum.rss += memory.rss;
        sum.pss += memory.pss;
    }
    Ok(sum)
}
