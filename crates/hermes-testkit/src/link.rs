//! Links between two namespaces for kernels without netem: delayed, slow, lossy, intermittent.
//!
//! In: two namespaces, an address for each, link conditions. Out: a link, which exists until it is dropped.
//! `hermes-lab` emulates the conditions.

use std::{
    net::Ipv4Addr,
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use hermes_lab::End;
pub use hermes_lab::{Conditions, Counters, Link, Up};

use crate::{Error, Result, netns::Namespace};

/// Devices of this process have names of their own.
static NEXT: AtomicU32 = AtomicU32::new(0);

/// Joins two namespaces whose addresses are in one `/24`. The ends have static neighbour entries: neighbour discovery
/// would fail while the link is down. The conditions are those from the first to the second, and back; links with one
/// epoch share one clock.
///
/// # Errors
/// Without root, or when a tap cannot be made or moved.
pub fn join(
    a: (&Namespace, Ipv4Addr),
    b: (&Namespace, Ipv4Addr),
    conditions: [Conditions; 2],
    epoch: Instant,
) -> Result<Link> {
    let device = format!("link{}", NEXT.fetch_add(1, Ordering::Relaxed));
    let ends = [a.0, b.0].map(|namespace| End { namespace: namespace.name(), device: &device });
    let link = Link::new(ends, conditions, epoch).map_err(Error::io("making a link between two namespaces"))?;
    let [of_a, of_b] = link.ethernet();
    for (here, there, ethernet) in [(a, b, of_b), (b, a, of_a)] {
        here.0.address(&device, here.1)?;
        let there = there.1.to_string();
        here.0.ip(&["neigh", "replace", &there, "lladdr", &ethernet, "dev", &device, "nud", "permanent"])?;
    }
    Ok(link)
}

/// Conditions with this delay for every frame, and no losses.
///
/// # Errors
/// The errors of [`join`].
pub fn delayed(a: (&Namespace, Ipv4Addr), b: (&Namespace, Ipv4Addr), one_way: Duration) -> Result<Link> {
    let conditions = Conditions { one_way, ..Conditions::default() };
    join(a, b, [conditions.clone(), conditions], Instant::now())
}

/// Frames that have arrived, both ways.
pub fn arrived(link: &Link) -> u64 {
    link.counters().iter().map(|counters| counters.arrived.load(Ordering::Relaxed)).sum()
}

/// Frames that a link could not hold, both ways.
pub fn overflown(link: &Link) -> u64 {
    link.counters().iter().map(|counters| counters.full.load(Ordering::Relaxed)).sum()
}
