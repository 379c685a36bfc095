//! The network of the IP case: machines in Poland and in the United States, with the latency of the paper.
//!
//! In: root. Out: Figure 7 as namespaces. Poland has Bob, an ingress, a personal server of each user, an office, and a
//! campus router with a desk behind it. The United States have Alice, who moved there, an ingress, and another personal
//! server of hers. Two wires have delays: Alice's, and the one across the Atlantic. Dropping the value removes the
//! network.

use std::net::Ipv4Addr;
use std::time::Duration;

use serde::Serialize;

use super::delayed_link::DelayedLink;
use crate::namespace::Namespace;

/// The prefix of every namespace's name; the demo's pid follows, which identifies leftovers.
pub(super) const PREFIX: &str = "hermes-ip-";
/// Round trips of the paper's Table VII: from the user in the United States to Poland, and within the United States.
pub(super) const TO_POLAND: Duration = Duration::from_micros(129_730);
pub(super) const TO_US: Duration = Duration::from_micros(21_710);
/// The TTL of an echo reply identifies its sender: initial TTLs of two machines differ by this much.
const TTL_STEP: u8 = 16;

/// Machines that answer echo requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Machine {
    /// Alice's personal server in Poland: her 10.0.0.1 at first.
    AlicePl,
    /// Alice's server in the United States.
    AliceUs,
    /// Bob's server, his 10.0.0.1.
    BobPl,
    /// The office, 10.0.0.2.
    Office,
    /// The desk, behind the router of 128.252.0.0/16.
    Desk,
}

impl Machine {
    const ALL: [Self; 5] = [Self::AlicePl, Self::AliceUs, Self::BobPl, Self::Office, Self::Desk];

    /// The machine's name in the output.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::AlicePl => "alice-pl",
            Self::AliceUs => "alice-us",
            Self::BobPl => "bob-pl",
            Self::Office => "office",
            Self::Desk => "a desk behind campus",
        }
    }

    /// The initial TTL of the machine's packets.
    fn ttl(self) -> u8 {
        64 + TTL_STEP * self as u8
    }

    /// The sender of a reply with this TTL, which routers on the path have decremented.
    pub(super) fn of_ttl(ttl: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|machine| (machine.ttl() - TTL_STEP + 1..=machine.ttl()).contains(&ttl))
    }
}

/// The whole network.
#[derive(Debug)]
pub(super) struct Lab {
    pub(super) alice: Namespace,
    pub(super) bob: Namespace,
    pub(super) ingress_pl: Namespace,
    pub(super) ingress_us: Namespace,
    pub(super) alice_pl: Namespace,
    pub(super) alice_us: Namespace,
    pub(super) bob_pl: Namespace,
    pub(super) office: Namespace,
    pub(super) campus: Namespace,
    pub(super) desk: Namespace,
    poland: Namespace,
    us: Namespace,
    wires: Vec<DelayedLink>,
}

impl Lab {
    /// Creates the network.
    ///
    /// # Errors
    /// Returns iproute2's error, or the reason why no TUN device is available.
    pub(super) fn new() -> anyhow::Result<Self> {
        let place = |what: &str, address: [u8; 4]| Namespace::new(PREFIX, 0, what, Ipv4Addr::from(address));
        let mut this = Self {
            alice: place("alice", [10, 77, 18, 2])?,
            bob: place("bob", [10, 77, 1, 2])?,
            ingress_pl: place("ingress-pl", [10, 77, 2, 2])?,
            ingress_us: place("ingress-us", [10, 77, 16, 2])?,
            alice_pl: place("alice-pl", [10, 77, 3, 2])?,
            alice_us: place("alice-us", [10, 77, 17, 2])?,
            bob_pl: place("bob-pl", [10, 77, 4, 2])?,
            office: place("office", [10, 77, 5, 2])?,
            campus: place("campus", [10, 77, 6, 2])?,
            desk: place("desk", [128, 252, 1, 2])?,
            poland: place("poland", [10, 77, 0, 1])?,
            us: place("us", [10, 77, 16, 1])?,
            wires: Vec::new(),
        };
        this.join()?;
        for (place, machine) in [
            (&this.alice_pl, Machine::AlicePl),
            (&this.alice_us, Machine::AliceUs),
            (&this.bob_pl, Machine::BobPl),
            (&this.office, Machine::Office),
            (&this.desk, Machine::Desk),
        ] {
            place.sysctl("net/ipv4/ip_default_ttl", &machine.ttl().to_string())?;
        }
        Ok(this)
    }

    fn join(&mut self) -> anyhow::Result<()> {
        for (place, device) in [
            (&self.bob, "bob"),
            (&self.ingress_pl, "ingress"),
            (&self.alice_pl, "alice-pl"),
            (&self.bob_pl, "bob-pl"),
            (&self.office, "office"),
            (&self.campus, "campus"),
        ] {
            self.poland.attach(place, device, "")?;
        }
        for (place, device) in [(&self.ingress_us, "ingress"), (&self.alice_us, "alice-us")] {
            self.us.attach(place, device, "")?;
        }
        self.campus.attach(&self.desk, "desk", "")?;
        for router in [&self.poland, &self.us, &self.campus] {
            router.forward()?;
        }
        let ocean = DelayedLink::lay((&self.poland, "us"), (&self.us, "poland"), (TO_POLAND - TO_US) / 2)?;
        let access = DelayedLink::lay((&self.alice, "wan"), (&self.us, "alice"), TO_US / 2)?;
        self.wires = vec![ocean, access];
        self.poland.ip("route add 10.77.16.0/20 dev us\n")?;
        self.us.ip(&format!("route add 10.77.0.0/20 dev poland\nroute add {}/32 dev alice\n", self.alice.address))?;
        self.alice.ip(&format!("addr add {}/32 dev wan\nroute add default dev wan\n", self.alice.address))
    }

    /// Packets that the wires' queues dropped.
    pub(super) fn dropped(&self) -> u64 {
        self.wires.iter().map(DelayedLink::dropped).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_tells_its_machine_even_after_some_routers() {
        for machine in Machine::ALL {
            for routers in 0..3 {
                assert_eq!(Machine::of_ttl(machine.ttl() - routers), Some(machine));
            }
        }
        assert_eq!(Machine::of_ttl(255), None);
        assert_eq!(Machine::of_ttl(1), None);
    }
}
