//! Table IX and Figure 10 on loopback: four cases, one request at a time and many at once.
//!
//! In: a session. Out: samples `single` (mean, deviation, median, 99th percentile) and `burst` (mean completion of 200
//! to 1,000 one-shot clients). Proxies are restarted in each round, so that lingering flows of one round do not burden
//! the next.

use anyhow::Result;
use hermes_testkit::load::{Exchange, Load};

use super::{Session, in_turn};
use crate::{
    chain::{Case, Chain, Security, Shape},
    progress,
    record::{Key, latencies},
    testbed::Testbed,
};

/// The share of warm-up requests, as a divisor: they fill connection pools and caches.
const WARMUP_SHARE: usize = 5;

/// Runs the case, in the clear and over mutual TLS.
pub(crate) fn run(session: &mut Session<'_>) -> Result<()> {
    let testbed = Testbed::loopback(session.dir, false)?;
    for round in 0..session.settings.rounds {
        for security in [Security::Plain, Security::Mtls] {
            progress::print(&format!(
                "figure10: round {} of {}, {}",
                round + 1,
                session.settings.rounds,
                security.name()
            ));
            one_round(session, &testbed, security, round)?;
        }
    }
    Ok(())
}

/// Starts all paths and measures every case on them.
pub(super) fn one_round(session: &mut Session<'_>, testbed: &Testbed, security: Security, round: usize) -> Result<()> {
    let chains = session.start_all(testbed, Shape::TwoHops, security)?;
    for case in Case::ALL {
        singles(session, testbed, &chains, (case, security), round)?;
        for clients in session.settings.clients.clone() {
            bursts(session, testbed, &chains, (case, security), clients, round)?;
        }
    }
    Ok(())
}

fn singles(
    session: &mut Session<'_>,
    testbed: &Testbed,
    chains: &[Chain],
    (case, security): (Case, Security),
    round: usize,
) -> Result<()> {
    let key = Key { case: Some(case), security: Some(security), ..Key::new("single") };
    let count = session.settings.singles;
    for (chain, exchange) in carrying(testbed, chains, case, round) {
        let load = Load::Single { exchange, count, warmup: count / WARMUP_SHARE };
        session.record((testbed, chain), &key, round, load, |m| latencies(&m.outcome))?;
    }
    Ok(())
}

fn bursts(
    session: &mut Session<'_>,
    testbed: &Testbed,
    chains: &[Chain],
    (case, security): (Case, Security),
    clients: usize,
    round: usize,
) -> Result<()> {
    let key = Key { case: Some(case), security: Some(security), clients: Some(clients), ..Key::new("burst") };
    for (chain, exchange) in carrying(testbed, chains, case, round) {
        let load = Load::Burst { exchange, clients };
        session.record((testbed, chain), &key, round, load, |m| latencies(&m.outcome))?;
    }
    Ok(())
}

/// The chains that support `case`, with the exchange of a client on each.
fn carrying<'a>(
    testbed: &'a Testbed,
    chains: &'a [Chain],
    case: Case,
    round: usize,
) -> impl Iterator<Item = (&'a Chain, Exchange)> {
    in_turn(chains, round).filter_map(move |chain| Some((chain, chain.listeners.exchange(case, testbed.ca())?)))
}
