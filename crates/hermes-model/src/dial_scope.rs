//! Reach: address ranges that a route may dial if the request names the target.
//!
//! In: an address that the request named or that its name resolved to, and the node's own addresses.
//! Out: a reason to reject the address, or none.
//! Never: name resolution. The caller checks every resolved address and dials exactly the checked one.
//!
//! Sources: the IANA IPv4 and IPv6 Special-Purpose Address Registries (RFC 6890 and updates), RFC 4291, RFC 6052 and
//! RFC 8215 (NAT64), RFC 3056 (6to4), RFC 4380 (Teredo), RFC 5214 (ISATAP).

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Address ranges that a terminating route may dial if the request names the target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DialScope {
    /// Globally reachable unicast addresses.
    #[default]
    Public,
    /// Public addresses and private networks: RFC 1918, RFC 6598 (carrier-grade NAT), RFC 4193 (ULA).
    Private,
    /// Every address, including this machine's.
    Any,
}

impl fmt::Display for DialScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DialScope::Public => "public",
            DialScope::Private => "private",
            DialScope::Any => "any",
        })
    }
}

impl DialScope {
    /// The reason why `addr` may not be dialled; `None` if it may.
    ///
    /// `own` tells whether an address belongs to this node. An IPv6 address that embeds an IPv4 address is checked for
    /// both, since it reaches the same host; `own` is then called with the IPv4 address too.
    pub fn forbids(self, addr: IpAddr, own: &dyn Fn(IpAddr) -> bool) -> Option<&'static str> {
        if self == DialScope::Any {
            return None;
        }
        if own(addr) {
            return Some("is this node's own address");
        }
        match addr {
            IpAddr::V4(v4) => self.forbids_v4(v4),
            IpAddr::V6(v6) => match embedded_v4(v6) {
                Some(v4) if own(IpAddr::V4(v4)) => Some("is this node's own address, embedded in IPv6"),
                Some(v4) => self.forbids_v4(v4),
                None => self.forbids_v6(v6),
            },
        }
    }

    fn forbids_v4(self, addr: Ipv4Addr) -> Option<&'static str> {
        let bits = u32::from(addr);
        let block = V4_SPECIAL.iter().find(|block| block.contains(bits))?;
        (block.class == Class::Never || self == DialScope::Public).then_some(block.reason)
    }

    fn forbids_v6(self, addr: Ipv6Addr) -> Option<&'static str> {
        let bits = u128::from(addr);
        match V6_SPECIAL.iter().find(|block| block.contains(bits)) {
            Some(block) if block.class == Class::Private && self == DialScope::Private => None,
            Some(block) => Some(block.reason),
            // Only 2000::/3 is delegated for global unicast (RFC 4291, 2.4).
            None if bits >> 125 == 0b001 => None,
            None => Some("is outside the global unicast space of IPv6"),
        }
    }
}

/// The least reach that permits a special-purpose block.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    /// `reach: any` alone.
    Never,
    /// At least `reach: private`.
    Private,
}

struct Block<T> {
    first: T,
    /// Number of low bits that vary.
    host_bits: u32,
    class: Class,
    reason: &'static str,
}

impl Block<u32> {
    fn contains(&self, bits: u32) -> bool {
        (bits ^ self.first).checked_shr(self.host_bits).unwrap_or(0) == 0
    }
}

impl Block<u128> {
    fn contains(&self, bits: u128) -> bool {
        (bits ^ self.first).checked_shr(self.host_bits).unwrap_or(0) == 0
    }
}

const fn v4(octets: [u8; 4], length: u32, class: Class, reason: &'static str) -> Block<u32> {
    Block { first: u32::from_be_bytes(octets), host_bits: 32 - length, class, reason }
}

const fn v6(high: [u16; 4], length: u32, class: Class, reason: &'static str) -> Block<u128> {
    v6_whole([high[0], high[1], high[2], high[3], 0, 0, 0, 0], length, class, reason)
}

const fn v6_whole(s: [u16; 8], length: u32, class: Class, reason: &'static str) -> Block<u128> {
    let first = Ipv6Addr::new(s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]).to_bits();
    Block { first, host_bits: 128 - length, class, reason }
}

/// More specific blocks precede those that contain them. Two anycast addresses of 192.0.0.0/24 are globally reachable
/// (PCP and TURN), but no request needs them, so they stay blocked.
const V4_SPECIAL: [Block<u32>; 18] = [
    v4([0, 0, 0, 0], 8, Class::Never, "is in 0.0.0.0/8, which means this host"),
    v4([10, 0, 0, 0], 8, Class::Private, "is private (10.0.0.0/8)"),
    v4([100, 100, 100, 200], 32, Class::Never, "is a cloud's metadata service (100.100.100.200)"),
    v4([100, 64, 0, 0], 10, Class::Private, "is shared address space (100.64.0.0/10)"),
    v4([127, 0, 0, 0], 8, Class::Never, "is loopback (127.0.0.0/8)"),
    v4([169, 254, 0, 0], 16, Class::Never, "is link-local, where cloud metadata lives (169.254.0.0/16)"),
    v4([172, 16, 0, 0], 12, Class::Private, "is private (172.16.0.0/12)"),
    v4([192, 0, 0, 0], 24, Class::Never, "is reserved for protocol assignments (192.0.0.0/24)"),
    v4([192, 0, 2, 0], 24, Class::Never, "is reserved for documentation (192.0.2.0/24)"),
    v4([192, 88, 99, 0], 24, Class::Never, "is a 6to4 relay (192.88.99.0/24)"),
    v4([192, 168, 0, 0], 16, Class::Private, "is private (192.168.0.0/16)"),
    v4([198, 18, 0, 0], 15, Class::Never, "is reserved for benchmarks (198.18.0.0/15)"),
    v4([198, 51, 100, 0], 24, Class::Never, "is reserved for documentation (198.51.100.0/24)"),
    v4([203, 0, 113, 0], 24, Class::Never, "is reserved for documentation (203.0.113.0/24)"),
    v4([168, 63, 129, 16], 32, Class::Never, "is a cloud's metadata service (168.63.129.16)"),
    v4([224, 0, 0, 0], 4, Class::Never, "is multicast (224.0.0.0/4)"),
    v4([255, 255, 255, 255], 32, Class::Never, "is broadcast (255.255.255.255)"),
    v4([240, 0, 0, 0], 4, Class::Never, "is reserved (240.0.0.0/4)"),
];

const V6_SPECIAL: [Block<u128>; 18] = [
    v6_whole([0, 0, 0, 0, 0, 0, 0, 0], 128, Class::Never, "is the unspecified address (::)"),
    v6_whole([0, 0, 0, 0, 0, 0, 0, 1], 128, Class::Never, "is loopback (::1)"),
    // Metadata services within the private space are never permitted, unlike the rest of it.
    v6(
        [0xfd00, 0x0ec2, 0, 0],
        32,
        Class::Never,
        "is a cloud's internal network, including metadata services (fd00:ec2::/32)",
    ),
    v6_whole([0xfd00, 0x0042, 0, 0, 0, 0, 0, 0x0042], 128, Class::Never, "is a cloud's metadata service (fd00:42::42)"),
    v6_whole(
        [0xfd20, 0x00ce, 0, 0, 0, 0, 0, 0x0254],
        128,
        Class::Never,
        "is a cloud's metadata service (fd20:ce::254)",
    ),
    // Each operator divides this prefix differently (RFC 8215), so the position of the IPv4 address is unknown.
    v6([0x0064, 0xff9b, 1, 0], 48, Class::Never, "is NAT64's local prefix (64:ff9b:1::/48)"),
    v6([0x0100, 0, 0, 0], 64, Class::Never, "is discard-only (100::/64)"),
    v6([0x0100, 0, 0, 1], 64, Class::Never, "is a dummy prefix (100:0:0:1::/64)"),
    // No origin uses the globally reachable blocks of 2001::/23 (AMT, AS112, ORCHIDv2, ...).
    v6([0x2001, 0, 0, 0], 23, Class::Never, "is reserved for protocol assignments (2001::/23)"),
    v6([0x2001, 0x0db8, 0, 0], 32, Class::Never, "is reserved for documentation (2001:db8::/32)"),
    v6([0x3fff, 0, 0, 0], 20, Class::Never, "is reserved for documentation (3fff::/20)"),
    v6([0x2620, 0x004f, 0x8000, 0], 48, Class::Never, "is reserved for AS112 (2620:4f:8000::/48)"),
    v6([0x5f00, 0, 0, 0], 16, Class::Never, "is reserved for segment routing (5f00::/16)"),
    v6([0x3ffe, 0, 0, 0], 16, Class::Never, "was used by the 6bone (3ffe::/16)"),
    v6([0xfc00, 0, 0, 0], 7, Class::Private, "is private (fc00::/7)"),
    v6([0xfe80, 0, 0, 0], 10, Class::Never, "is link-local (fe80::/10)"),
    v6([0xfec0, 0, 0, 0], 10, Class::Never, "is site-local (fec0::/10)"),
    v6([0xff00, 0, 0, 0], 8, Class::Never, "is multicast (ff00::/8)"),
];

/// The reason why an address is a cloud's metadata service, or may be one (link-local addresses).
pub(crate) fn metadata(addr: IpAddr) -> Option<&'static str> {
    let is_link_local = |block: &&'static str| block.starts_with("is link-local");
    let reason = match addr {
        IpAddr::V4(v4) => V4_SPECIAL.iter().find(|block| block.contains(u32::from(v4))).map(|block| block.reason),
        IpAddr::V6(v6) => V6_SPECIAL.iter().find(|block| block.contains(u128::from(v6))).map(|block| block.reason),
    };
    reason.filter(|reason| reason.contains("metadata") || is_link_local(reason))
}

/// The IPv4 address that an IPv6 address embeds, if any.
pub(crate) fn embedded_v4(addr: Ipv6Addr) -> Option<Ipv4Addr> {
    let s = addr.segments();
    let join = |high: u16, low: u16| Ipv4Addr::from((u32::from(high) << 16) | u32::from(low));
    match s {
        // `::` and `::1` are IPv6 addresses; they embed no IPv4 address.
        [0, 0, 0, 0, 0, 0, 0, 0 | 1] => None,
        // IPv4-compatible, IPv4-mapped, and IPv4-translated (SIIT, RFC 2765).
        [0, 0, 0, 0, 0, 0, high, low]
        | [0, 0, 0, 0, 0, 0xffff, high, low]
        | [0, 0, 0, 0, 0xffff, 0, high, low]
        // The well-known prefix of NAT64.
        | [0x64, 0xff9b, 0, 0, 0, 0, high, low] => Some(join(high, low)),
        // 6to4.
        [0x2002, high, low, ..] => Some(join(high, low)),
        // Teredo stores the client's address inverted.
        [0x2001, 0, _, _, _, _, high, low] => Some(join(!high, !low)),
        // ISATAP: any prefix, interface identifier 0000:5efe or 0200:5efe.
        [_, _, _, _, 0 | 0x200, 0x5efe, high, low] => Some(join(high, low)),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
