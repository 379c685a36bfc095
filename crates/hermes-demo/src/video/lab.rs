//! The network of the video case: six namespaces, one of them a router, and a path that loses packets.
//!
//! In: root. Out: namespaces with an address each, connected by the router. The user's link has 10 Mbit/s and randomly
//! loses one packet in a hundred, in each direction. Dropping the value removes the network.

use std::net::Ipv4Addr;

use anyhow::Context;
use serde::Serialize;

use crate::namespace::{Namespace, feed};

/// The prefix of every namespace's name; the demo's pid follows, which identifies leftovers.
pub(super) const PREFIX: &str = "hermes-video-";
/// Packets in ten thousand that the user's link loses, each way: the paper's 1 %.
const LOST: u32 = 100;
/// The shaper of each direction. Its queue holds 300 ms, because frames come in bursts and only `LOST` may drop
/// packets.
const SHAPER: [&str; 7] = ["tbf", "rate", "10mbit", "burst", "16kb", "latency", "300ms"];

/// The whole network.
#[derive(Debug)]
pub(super) struct Lab {
    /// The user's machine, behind the link that loses packets.
    pub(super) user: Namespace,
    /// The provider's ingress.
    pub(super) ingress: Namespace,
    /// Two distributors.
    pub(super) distributors: [Namespace; 2],
    /// The video server's machine.
    pub(super) server: Namespace,
    router: Namespace,
}

/// Counters of the user's link.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(super) struct Link {
    /// Packets towards the user.
    pub(super) down: u64,
    /// Packets towards the user that were dropped on purpose.
    pub(super) down_lost: u64,
    /// Packets from the user.
    pub(super) up: u64,
    /// Packets from the user that were dropped on purpose.
    pub(super) up_lost: u64,
}

impl Lab {
    /// Creates the network. `number` distinguishes the labs of one process.
    ///
    /// # Errors
    /// Returns the error of iproute2 or nftables.
    pub(super) fn new(number: usize) -> anyhow::Result<Self> {
        let place = |index: u8, what: &str| Namespace::new(PREFIX, number, what, Ipv4Addr::new(10, 77, index, 2));
        let this = Self {
            user: place(1, "user")?,
            ingress: place(2, "ingress")?,
            distributors: [place(3, "dist-1")?, place(4, "dist-2")?],
            server: place(5, "server")?,
            router: place(0, "router")?,
        };
        for (place, what) in this.places().into_iter().zip(["user", "ingress", "dist-1", "dist-2", "server"]) {
            // Segmentation offload is off: one lost packet must not be forty in one.
            this.router.attach(place, what, "gso_max_segs 1")?;
        }
        this.router.forward()?;
        feed(this.router.command(&["nft", "-f", "-"]), &rules())?;
        for (place, device) in [(&this.user, "eth0"), (&this.router, "user")] {
            feed(place.command(&[&["tc", "qdisc", "add", "dev", device, "root"], &SHAPER[..]].concat()), "")?;
        }
        Ok(this)
    }

    fn places(&self) -> [&Namespace; 5] {
        let [one, two] = &self.distributors;
        [&self.user, &self.ingress, one, two, &self.server]
    }

    /// The counters of the user's link so far.
    ///
    /// # Errors
    /// The counters cannot be read from nftables.
    pub(super) fn link(&self) -> anyhow::Result<Link> {
        let listed = feed(self.router.command(&["nft", "-j", "list", "counters"]), "")?;
        let listed: serde_json::Value = serde_json::from_slice(&listed).context("nft list counters")?;
        let packets = |name: &str| {
            let counters = listed["nftables"].as_array().into_iter().flatten().map(|item| &item["counter"]);
            counters.filter(|counter| counter["name"] == name).find_map(|counter| counter["packets"].as_u64())
        };
        let packets = |name: &str| packets(name).with_context(|| format!("nft has no counter {name}"));
        Ok(Link {
            down: packets("down")?,
            down_lost: packets("down-lost")?,
            up: packets("up")?,
            up_lost: packets("up-lost")?,
        })
    }
}

fn rules() -> String {
    let mut text = "table inet path {\n".to_owned();
    for name in ["down", "down-lost", "up", "up-lost"] {
        text += &format!("  counter {name} {{}}\n");
    }
    text += "  chain forward {\n    type filter hook forward priority 0\n";
    for (device, name) in [("oifname", "down"), ("iifname", "up")] {
        text += &format!("    {device} \"user\" counter name \"{name}\"\n");
        text += &format!("    {device} \"user\" numgen random mod 10000 < {LOST} counter name \"{name}-lost\" drop\n");
    }
    text + "  }\n}\n"
}
