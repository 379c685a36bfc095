//! Flows with a computed clock: packets of the node's sockets return to the program, and no alias belongs to two flows.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;

const TCP: &str = "10.20.0.2:4000";
const UDP: &str = "10.20.0.2:5000";

fn address(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn translation() -> Translation {
    Translation::new(address(TCP), address(UDP))
}

/// An IPv4 packet with a bare transport header; its checksums are not verified here.
fn packet(transport: Transport, from: SocketAddr, to: SocketAddr, flags: u8) -> Vec<u8> {
    let (IpAddr::V4(source), IpAddr::V4(destination)) = (from.ip(), to.ip()) else { unreachable!() };
    let mut packet = vec![0x45, 0, 0, 40, 0, 0, 0x40, 0, 64, 0, 0, 0];
    packet[9] = if transport == Transport::Tcp { ip::TCP } else { ip::UDP };
    packet.extend_from_slice(&source.octets());
    packet.extend_from_slice(&destination.octets());
    let sum: u32 = packet.chunks_exact(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]]))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    let check = !(((folded & 0xffff) + (folded >> 16)) as u16);
    packet[10..12].copy_from_slice(&check.to_be_bytes());
    packet.extend_from_slice(&from.port().to_be_bytes());
    packet.extend_from_slice(&to.port().to_be_bytes());
    packet.extend_from_slice(&[0, 0, 0, 1, 0, 0, 0, 0, 0x50, flags, 255, 255, 0, 0, 0, 0]);
    packet
}

fn ends(packet: &[u8]) -> (SocketAddr, SocketAddr) {
    let header = ip::parse(packet).unwrap();
    let (source, destination) = ip::ports(packet, &header).unwrap();
    (SocketAddr::new(header.source, source), SocketAddr::new(header.destination, destination))
}

fn translate(translation: &mut Translation, packet: &mut [u8], now: u64) -> Outcome {
    let header = ip::parse(packet).unwrap();
    translation.translate(packet, &header, now)
}

fn key(transport: Transport, client: &str, target: &str) -> FlowKey {
    FlowKey { transport, client: address(client), target: address(target) }
}

#[test]
fn a_connection_is_opened_before_its_syn_goes_on_and_comes_back_to_its_program() {
    let mut flows = translation();
    let key = key(Transport::Tcp, "10.20.0.2:50000", "100.64.0.7:22");
    let syn = packet(Transport::Tcp, key.client, key.target, ip::SYN);
    assert_eq!(translate(&mut flows, &mut syn.clone(), 0), Outcome::Begins(key));
    let alias = flows.begin(key, 10, 0).unwrap();
    assert_eq!(translate(&mut flows, &mut syn.clone(), 1), Outcome::Waits);
    flows.open(&key);
    let mut inwards = syn.clone();
    assert_eq!(translate(&mut flows, &mut inwards, 2), Outcome::Rewritten);
    assert_eq!(ends(&inwards), (alias, address(TCP)));
    assert_eq!((alias.ip(), flows.flow_of(Transport::Tcp, alias)), (key.target.ip(), Some(key)));
    let mut back = packet(Transport::Tcp, address(TCP), alias, ip::SYN | ip::ACK);
    assert_eq!(translate(&mut flows, &mut back, 3), Outcome::Rewritten);
    assert_eq!(ends(&back), (key.target, key.client));
    // Segments in flight at the close still arrive; a new connection from the same port is a new flow.
    flows.close(Transport::Tcp, alias, 4);
    let mut last = packet(Transport::Tcp, key.client, key.target, ip::ACK);
    assert_eq!(translate(&mut flows, &mut last, 5), Outcome::Rewritten);
    assert_eq!(translate(&mut flows, &mut syn.clone(), 6), Outcome::Begins(key));
    assert_eq!(flows.flow_of(Transport::Tcp, alias), None);
}

#[test]
fn what_belongs_to_no_flow_is_not_rewritten() {
    let mut flows = translation();
    let (client, target) = (address("10.20.0.2:50000"), address("100.64.0.7:22"));
    for flags in [ip::ACK, ip::RST, ip::SYN | ip::ACK] {
        let stray = packet(Transport::Tcp, client, target, flags);
        let mut same = stray.clone();
        assert_eq!((translate(&mut flows, &mut same, 0), same), (Outcome::Unknown, stray));
    }
    let mut own = packet(Transport::Udp, address(UDP), address("100.64.0.7:2000"), 0);
    assert_eq!(translate(&mut flows, &mut own, 0), Outcome::Unknown);
    let mut ping = packet(Transport::Tcp, client, target, 0);
    ping[9] = ip::ICMP;
    let header = Header { protocol: ip::ICMP, ..ip::parse(&packet(Transport::Tcp, client, target, 0)).unwrap() };
    assert_eq!(flows.translate(&mut ping, &header, 0), Outcome::Untranslatable);
}

#[test]
fn the_table_is_bounded_and_gives_up_what_ended_first() {
    let mut flows = translation();
    let tcp = |port: u16| key(Transport::Tcp, &format!("10.20.0.2:{port}"), "100.64.0.7:22");
    let udp = |port: u16| key(Transport::Udp, &format!("10.20.0.2:{port}"), "100.64.0.7:53");
    let first = flows.begin(tcp(1), 3, 0).unwrap();
    let second = flows.begin(tcp(2), 3, 0).unwrap();
    assert!(flows.begin(udp(3), 3, 1).is_some());
    assert_eq!(flows.begin(tcp(4), 3, YIELD_AFTER_MS - 1), None, "all are in use");
    flows.close(Transport::Tcp, second, 10);
    assert!(flows.begin(tcp(4), 3, 20).is_some());
    assert!(flows.aliases.len() == 3 && !flows.aliases.contains_key(&tcp(2)) && flows.take_displaced().is_empty());
    assert!(flows.begin(udp(5), 3, SILENT_KEPT + 1).is_some(), "a UDP flow that was silent for two minutes goes first");
    assert!(!flows.aliases.contains_key(&udp(3)) && flows.take_displaced().len() == 1);
    assert!(flows.begin(tcp(6), 3, SILENT_KEPT + 1).is_some(), "then the flow that was idle for longest");
    assert_eq!(flows.take_displaced(), [(Transport::Tcp, first)]);
    // The end of the displaced flow's task must not affect the connection that has its alias or port meanwhile.
    assert!(flows.begin(tcp(1), 3, SILENT_KEPT + 2).is_some());
    flows.close(Transport::Tcp, first, SILENT_KEPT + 3);
    assert!(flows.closed.is_empty() && flows.aliases.contains_key(&tcp(1)));
}

#[test]
fn a_program_with_many_ports_keeps_no_other_destination_out() {
    const LIMIT: usize = 256;
    let mut flows = translation();
    let tcp = |port: u16, host: u8| key(Transport::Tcp, &format!("10.20.0.2:{port}"), &format!("100.64.0.{host}:22"));
    for port in 0..1000 {
        let begun = flows.begin(tcp(port, 1), LIMIT, 5);
        assert_eq!(begun.is_some(), usize::from(port) < LIMIT, "{port}");
    }
    // A second destination gets as many flows; the oldest flows of the first one are displaced.
    for port in 1000..1000 + LIMIT as u16 {
        let begun = flows.begin(tcp(port, 2), LIMIT, 5);
        assert_eq!(begun.is_some(), usize::from(port) < 1000 + LIMIT / 2, "{port}");
        assert!(flows.by_alias.len() <= LIMIT);
    }
    assert!(flows.begin(tcp(2000, 3), LIMIT, 5).is_some(), "and a third");
}

/// A single scan of the table serves many packets, and an unsuccessful one is not repeated within a tick.
#[test]
fn a_full_table_is_searched_seldom() {
    const LIMIT: usize = 10 * BATCH;
    let mut flows = translation();
    let tcp = |port: u16, host: u8| key(Transport::Tcp, &format!("10.20.0.2:{port}"), &format!("100.64.0.{host}:22"));
    for port in 0..LIMIT as u16 {
        flows.begin(tcp(port, 1), LIMIT, 5).unwrap();
    }
    assert!(flows.begin(tcp(5000, 1), LIMIT, 6).is_none() && flows.unyielding.1.len() == 1);
    assert!(flows.begin(tcp(5001, 1), LIMIT, 6).is_none() && flows.unyielding.1.len() == 1);
    assert!(flows.begin(tcp(5002, 2), LIMIT, 6).is_some(), "another destination");
    assert_eq!((flows.take_displaced().len(), flows.closed.len()), (10, 9));
    for port in 0..9 {
        assert!(flows.begin(tcp(6000 + port, 2), LIMIT, 6).is_some() && flows.take_displaced().is_empty());
    }
    assert!(flows.begin(tcp(6009, 2), LIMIT, 6).is_some() && flows.take_displaced().len() == 10);
    // The largest destination displaces idle flows of its own.
    assert!(flows.begin(tcp(7000, 1), LIMIT, 6 + YIELD_AFTER_MS).is_some());
}

proptest! {
    /// For any sequence of begins and ends, each flow has an alias of its own, and the two tables agree.
    #[test]
    fn aliases_and_flows_are_one_to_one(steps in proptest::collection::vec((0u16..8, 0u8..4, 0u8..3), 1..200)) {
        let mut flows = translation();
        for (now, (port, host, step)) in steps.into_iter().enumerate() {
            let transport = if port % 2 == 0 { Transport::Tcp } else { Transport::Udp };
            let key = key(transport, &format!("10.20.0.2:{}", 50_000 + port), &format!("100.64.0.{host}:22"));
            let now = now as u64 * 5_000;
            match step {
                0 if !flows.aliases.contains_key(&key) => drop(flows.begin(key, 6, now)),
                1 => {
                    let alias = flows.aliases.get(&key).copied();
                    alias.into_iter().for_each(|alias| flows.close(transport, alias, now));
                }
                2 => flows.open(&key),
                _ => {}
            }
            prop_assert!(flows.by_alias.len() <= 6);
            let is_closed = |flow: &&Flow| matches!(flow.state, State::Closed(_));
            let closed = flows.by_alias.values().filter(is_closed).count();
            let counted: usize = flows.counts.values().sum();
            prop_assert_eq!((flows.closed.len(), counted), (closed, flows.by_alias.len() - closed));
            prop_assert_eq!(flows.by_alias.len(), flows.aliases.len());
            for ((transport, alias), flow) in &flows.by_alias {
                prop_assert_eq!(flows.aliases.get(&flow.key), Some(alias));
                prop_assert_eq!(*transport, flow.key.transport);
                prop_assert_eq!(alias.ip(), flow.key.target.ip());
            }
        }
    }
}
