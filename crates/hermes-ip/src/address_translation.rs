//! Another address than a tunnel's far side knows: of a machine that a route names, or of who was given another one than
//! it has.
//!
//! In: packets that were judged. Out: the same with the other address, in errors about them too. Never: a packet that
//! may not pass.

use std::net::IpAddr;

use bytes::Bytes;
use hermes_wire::connect_ip::{Address, Prefix};
use hermes_wire::ip;
use ipnet::IpNet;

/// Whom packets are for, and who gets them.
#[derive(Clone, Copy)]
pub struct Inner {
    /// The address that the session holds.
    pub asked: IpAddr,
    /// The address that the client uses.
    pub inner: IpAddr,
}

impl Inner {
    /// Everything for what the session is scoped to goes to `inner`.
    ///
    /// # Errors
    /// That is not one address of the same version.
    pub fn of(inner: IpAddr, network: Option<IpNet>) -> Result<Self, String> {
        let one = network.filter(|network| network.prefix_len() == network.max_prefix_len());
        match one.map(|network| network.addr()) {
            Some(asked) if asked.is_ipv4() == inner.is_ipv4() => Ok(Self { asked, inner }),
            _ => Err(format!("packets go to {inner} alone, and the session is not for one address of its version")),
        }
    }

    /// What was given in the place of what was wanted; `None`: it is the same, or not for one machine.
    pub fn instead(given: &Address, wanted: &[Address]) -> Option<Self> {
        let wanted = wanted.iter().find(|wanted| wanted.request == given.request)?;
        let (asked, inner) = (one_address(given.prefix)?, one_address(wanted.prefix)?);
        (asked != inner && asked.is_ipv4() == inner.is_ipv4()).then_some(Self { asked, inner })
    }

    /// A packet that was for the one is for the other.
    pub fn inwards(self, packet: &mut Bytes) {
        let Ok(header) = ip::parse(packet) else { return };
        if header.destination != self.asked {
            return;
        }
        let mut changed = packet.to_vec();
        if ip::readdress(&mut changed, &header, ip::Side::Destination, self.inner) {
            *packet = changed.into();
        }
    }

    /// A packet of the one comes from the other.
    pub fn outwards(self, packet: Bytes, header: ip::Header) -> (Bytes, ip::Header) {
        let mut changed = packet.to_vec();
        if !ip::readdress(&mut changed, &header, ip::Side::Source, self.asked) {
            return (packet, header);
        }
        (changed.into(), ip::Header { source: self.asked, ..header })
    }

    /// A router behind the device speaks of a packet to the one: its sender knows the other.
    pub fn cited_outwards(&self, packet: &[u8], header: &ip::Header) -> Bytes {
        let mut changed = packet.to_vec();
        ip::readdress_cited(&mut changed, header, ip::Side::Destination, self.inner, self.asked);
        changed.into()
    }
}

/// The address of a prefix that has one.
fn one_address(prefix: Prefix) -> Option<IpAddr> {
    let whole = if prefix.address().is_ipv4() { 32 } else { 128 };
    (prefix.length() == whole).then_some(prefix.address())
}
