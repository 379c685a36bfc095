//! Tables of addresses that a request may and may not name.

#![allow(clippy::unwrap_used)]

use super::*;

fn forbidden(reach: DialScope, addr: &str, own: &[&str]) -> Option<&'static str> {
    let own: Vec<IpAddr> = own.iter().map(|addr| addr.parse().unwrap()).collect();
    reach.forbids(addr.parse().unwrap(), &|addr| own.contains(&addr))
}

/// Globally reachable unicast.
const PUBLIC: [&str; 18] = [
    "1.1.1.1",
    "9.255.255.255",
    "11.0.0.0",
    "100.63.255.255",
    "100.128.0.0",
    "128.252.0.1",
    "169.253.255.255",
    "172.15.255.255",
    "172.32.0.0",
    "192.0.1.1",
    "198.17.255.255",
    "198.20.0.0",
    "223.255.255.255",
    "2606:4700::1111",
    "2a00:1450::1",
    // The IPv4 inside is public.
    "64:ff9b::8.8.8.8",
    "2002:0808:0808::1",
    "::ffff:8.8.8.8",
];

/// Private networks: they need at least `reach: private`.
const PRIVATE: [&str; 12] = [
    "10.0.0.1",
    "10.255.255.255",
    "172.16.0.1",
    "172.31.255.255",
    "192.168.0.1",
    "100.64.0.1",
    "100.127.255.255",
    "fc00::1",
    "fdff::1",
    "::ffff:10.0.0.1",
    "64:ff9b::192.168.1.1",
    "2002:0a00:0001::1",
];

/// Blocked addresses: they need `reach: any`.
const NEVER: [&str; 53] = [
    "100.100.100.200",
    "fd00:ec2::23",
    "fd00:42::42",
    "0.0.0.0",
    "0.1.2.3",
    "127.0.0.1",
    "127.255.255.254",
    "169.254.169.254",
    "169.254.0.1",
    "192.0.0.1",
    "192.0.0.192",
    "192.0.2.1",
    "192.88.99.1",
    "198.18.0.1",
    "198.19.255.255",
    "198.51.100.1",
    "203.0.113.1",
    "168.63.129.16",
    "224.0.0.1",
    "239.255.255.255",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "fe80::1",
    "febf::1",
    "fec0::1",
    "ff02::1",
    "ff0e::1",
    "100::1",
    "2001:db8::1",
    "2001:2::1",
    "2001:10::1",
    "2001:20::1",
    "3fff::1",
    "5f00::1",
    "4000::1",
    "fd00:ec2::254",
    "fd20:ce::254",
    // Loopback, metadata and similar addresses, embedded in IPv6.
    "::ffff:127.0.0.1",
    "::ffff:0.0.0.0",
    "::ffff:169.254.169.254",
    "::127.0.0.1",
    "::ffff:0:127.0.0.1",
    "64:ff9b::127.0.0.1",
    "64:ff9b::169.254.169.254",
    "64:ff9b:1::8.8.8.8",
    "64:ff9b:1:7f00:0:1::",
    "2002:7f00:0001::1",
    "2002:a9fe:a9fe::",
    // Teredo, whose client address is inverted: 127.0.0.1.
    "2001:0:1:2:3:4:80ff:fffe",
    // ISATAP on a public prefix: 127.0.0.1.
    "2606:4700::5efe:7f00:1",
    "2606:4700::200:5efe:7f00:1",
];

#[test]
fn public_reaches_global_unicast_only() {
    for addr in PUBLIC {
        assert_eq!(forbidden(DialScope::Public, addr, &[]), None, "{addr}");
    }
    for addr in PRIVATE.iter().chain(&NEVER) {
        assert!(forbidden(DialScope::Public, addr, &[]).is_some(), "{addr}");
    }
    // Teredo with 8.8.8.8 inside.
    assert_eq!(forbidden(DialScope::Public, "2001:0:1:2:3:4:f7f7:f7f7", &[]), None);
}

#[test]
fn private_adds_private_networks_and_nothing_else() {
    for addr in PUBLIC.iter().chain(&PRIVATE) {
        assert_eq!(forbidden(DialScope::Private, addr, &[]), None, "{addr}");
    }
    for addr in NEVER {
        assert!(forbidden(DialScope::Private, addr, &[]).is_some(), "{addr}");
    }
}

#[test]
fn the_nodes_own_addresses_are_out_of_reach_in_any_form() {
    let own = ["10.1.2.3", "2606:4700::7", "8.8.8.8"];
    for addr in
        ["10.1.2.3", "::ffff:10.1.2.3", "64:ff9b::10.1.2.3", "2002:0a01:0203::", "2606:4700::7", "::ffff:8.8.8.8"]
    {
        for reach in [DialScope::Public, DialScope::Private] {
            assert!(
                forbidden(reach, addr, &own).is_some_and(|why| why.contains("own") || reach == DialScope::Public),
                "{addr}"
            );
        }
    }
    assert_eq!(forbidden(DialScope::Private, "10.1.2.4", &own), None);
}

#[test]
fn any_reaches_everything() {
    for addr in PUBLIC.iter().chain(&PRIVATE).chain(&NEVER) {
        assert_eq!(forbidden(DialScope::Any, addr, &[addr]), None, "{addr}");
    }
}
