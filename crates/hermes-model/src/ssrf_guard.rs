//! The guard: forbidden addresses for targets that the node's operator did not choose.
//!
//! In: an address and a port, the addresses where the node itself listens, and those of its machine. Out: a reason to
//! reject the target, or none.
//! Never: name resolution. The caller checks the resolved address and dials exactly that one.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::dial_scope::{embedded_v4, metadata};

/// The reason why a guarded route may not dial `to`; `None` if it may.
///
/// `listening` holds the addresses at which the node, its `admin` endpoint or a controller listens, each with a
/// description. `own` tells whether an address belongs to this machine; loopback addresses are always its own.
pub fn forbids<'a>(
    to: SocketAddr,
    listening: impl IntoIterator<Item = (SocketAddr, &'a str)>,
    own: &dyn Fn(IpAddr) -> bool,
) -> Option<&'a str> {
    let ip = plain(to.ip());
    if let Some(why) = metadata(ip) {
        return Some(why);
    }
    let is_local = ip.is_loopback() || own(ip);
    let meets = |bind: IpAddr| if bind.is_unspecified() { is_local } else { plain(bind) == ip };
    listening.into_iter().find(|(bind, _)| bind.port() == to.port() && meets(bind.ip())).map(|(_, what)| what)
}

/// The address that a connection to `ip` reaches.
fn plain(ip: IpAddr) -> IpAddr {
    let ip = match ip {
        IpAddr::V6(v6) => embedded_v4(v6).map_or(ip, IpAddr::V4),
        IpAddr::V4(_) => ip,
    };
    match ip {
        // Linux connects to the loopback address instead.
        IpAddr::V4(v4) if v4.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(v6) if v6.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    }
}

/// The address of a host if it is known without DNS: a literal, or a loopback name (RFC 6761, section 6.3).
pub fn literal(host: &str) -> Option<IpAddr> {
    let name = host.trim_end_matches('.').to_ascii_lowercase();
    if name == "localhost" || name.ends_with(".localhost") {
        return Some(Ipv4Addr::LOCALHOST.into());
    }
    host.parse().ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::net::{IpAddr, SocketAddr};

    use super::{forbids, literal};

    #[test]
    fn own_listeners_are_forbidden_in_every_address_form() {
        let listening: [SocketAddr; 3] =
            ["127.0.0.1:9900", "0.0.0.0:9443", "[::]:8443"].map(|text| text.parse().unwrap());
        let own = |ip: IpAddr| ip == "192.0.2.7".parse::<IpAddr>().unwrap();
        let forbidden = |to: &str| {
            forbids(to.parse().unwrap(), listening.iter().map(|bind| (*bind, "listens there")), &own).is_some()
        };
        for to in [
            "127.0.0.1:9900",
            "0.0.0.0:9900",
            "[::ffff:127.0.0.1]:9900",
            "[64:ff9b::7f00:1]:9900",
            "127.1.2.3:9443",
            "192.0.2.7:9443",
            "[::ffff:192.0.2.7]:9443",
            "[::1]:8443",
            "[::]:8443",
            "169.254.169.254:80",
            "[::ffff:a9fe:a9fe]:80",
            "[fd00:ec2::254]:80",
            "168.63.129.16:80",
        ] {
            assert!(forbidden(to), "{to}");
        }
        for to in ["127.0.0.2:9900", "127.0.0.1:9901", "192.0.2.8:9443", "192.0.2.7:9900", "10.0.0.1:80"] {
            assert!(!forbidden(to), "{to}");
        }
    }

    #[test]
    fn names_of_the_loopback_are_addresses() {
        for host in ["localhost", "LOCALHOST.", "x.localhost", "127.0.0.1"] {
            assert!(literal(host).unwrap().is_loopback(), "{host}");
        }
        assert_eq!(literal("localhost.example"), None);
    }
}
