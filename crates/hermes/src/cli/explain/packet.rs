//! `--packet`: the head of a packet, as options describe it.
//!
//! In: `src=10.20.0.2,dst=10.0.0.1,proto=tcp,length=1400,mtu=1280`. Out: the packet. Never: a verdict on it.

use std::net::IpAddr;

use anyhow::{Context, bail, ensure};
use hermes_proxy::Packet;

/// The length of a packet if the option omits it; it fits every MTU.
const DEFAULT_PACKET_BYTES: usize = 60;
/// The maximum packet length. Without an MTU, no packet is too long.
const MAX_PACKET_BYTES: usize = 65_535;
const FORM: &str = "write src=ADDRESS,dst=ADDRESS[,proto=tcp][,length=BYTES][,mtu=BYTES]";

pub(super) fn parse(text: &str) -> anyhow::Result<Packet> {
    let (mut source, mut destination, mut protocol, mut length, mut mtu) =
        (None, None, None, DEFAULT_PACKET_BYTES, MAX_PACKET_BYTES);
    for part in text.split(',') {
        let (key, value) = part.split_once('=').with_context(|| format!("--packet: {part} has no value; {FORM}"))?;
        let wrong = || format!("--packet: {part}; {FORM}");
        match key.trim() {
            "src" => source = Some(value.parse::<IpAddr>().with_context(wrong)?),
            "dst" => destination = Some(value.parse::<IpAddr>().with_context(wrong)?),
            "proto" => protocol = Some(number(value).with_context(wrong)?),
            "length" => length = value.parse().with_context(wrong)?,
            "mtu" => mtu = value.parse().with_context(wrong)?,
            _ => bail!(wrong()),
        }
    }
    let (Some(source), Some(destination)) = (source, destination) else { bail!("--packet: {FORM}") };
    ensure!(source.is_ipv4() == destination.is_ipv4(), "--packet: source and destination have different IP versions");
    let icmp = if source.is_ipv4() { 1 } else { 58 };
    Ok(Packet { source, destination, protocol: protocol.unwrap_or(icmp), length, mtu })
}

fn number(text: &str) -> Option<u8> {
    let named = [("icmp", 1), ("tcp", 6), ("udp", 17), ("icmpv6", 58), ("sctp", 132)];
    named.into_iter().find(|(name, _)| *name == text).map(|(_, number)| number).or_else(|| text.parse().ok())
}
