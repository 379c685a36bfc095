//! Attacks: spoofed sources, replays, foreign keys, full tables, garbage.

use proptest::prelude::*;

use super::*;
use crate::auth::{Key, Role};
use crate::message::{Cookie, DataHeader, Message};
use crate::{FlowError, Reason};

fn connect(key: &[u8], nonce: u8, cookie: Cookie) -> Bytes {
    let mut out = BytesMut::new();
    Message::Connect { nonce: [nonce; 16], cookie, mtu: 1400, dif: "test".to_owned() }.encode(&mut out);
    Key::of_dif("test", Some(key)).seal(Role::Initiator, 0, &mut out);
    out.freeze()
}

/// Returns all bytes that the node sends.
fn output(dif: &mut Dif, now: Duration) -> Vec<Bytes> {
    let mut out = BytesMut::new();
    std::iter::from_fn(|| dif.poll_transmit(now, &mut out, 1).map(|_| out.split().freeze())).collect()
}

#[test]
fn spoofed_sources_cost_no_state_and_are_not_amplified() {
    let mut dif = Dif::new(config(), &[1; 32]).unwrap();
    for spoofed in 0..10_000u32 {
        let peer = SocketAddr::from((spoofed.to_be_bytes(), 4000));
        let datagram = connect(b"secret", 1, Cookie { issued: u64::from(spoofed % 2), mac: [3; 16] });
        let length = datagram.len();
        dif.handle_datagram(SECOND, peer, datagram);
        let sent = output(&mut dif, SECOND);
        assert_eq!(sent.len(), 1);
        assert!(sent[0].len() < length);
    }
    assert_eq!((dif.usage().neighbours, dif.next_timeout(), dif.poll_event()), (0, None, None));
    assert_eq!(dif.counters().challenges, 10_000);
}

#[test]
fn without_the_key_there_is_no_answer() {
    let mut dif = Dif::new(config(), &[1; 32]).unwrap();
    dif.handle_datagram(SECOND, address(3), connect(b"guess", 1, Cookie::default()));
    assert_eq!(output(&mut dif, SECOND), [] as [Bytes; 0]);
    assert_eq!(dif.counters().wrong_tag, 1);
    let mut other = config();
    other.key = Some(b"guess".to_vec());
    let mut net = Net::new(CLEAN, 1, [config(), other]);
    net.nodes[0].connect(net.now, address(1)).unwrap();
    net.run(20 * SECOND);
    let lost = Event::NeighbourLost { peer: address(1), reason: Reason::Unreachable };
    assert_eq!(net.take_events(0), [lost]);
}

#[test]
fn a_cookie_works_only_for_its_address_and_for_a_while() {
    for (from, after, enrols) in [(0, SECOND, true), (1, SECOND, false), (0, 11 * SECOND, false)] {
        let mut dif = Dif::new(config(), &[1; 32]).unwrap();
        dif.handle_datagram(SECOND, address(0), connect(b"secret", 1, Cookie::default()));
        let reply = output(&mut dif, SECOND).remove(0);
        let body = reply.slice(..reply.len() - crate::message::TAG_LEN);
        let Ok(Message::ConnectReply(crate::message::ConnectReply::Challenge { cookie, .. })) = Message::decode(body)
        else {
            panic!("not a challenge")
        };
        dif.handle_datagram(SECOND + after, address(from), connect(b"secret", 1, cookie));
        assert_eq!(dif.is_enrolled(address(from)), enrols);
    }
}

/// Everything that was ever sent arrives again, several times and in reverse order.
#[test]
fn replays_change_nothing() {
    let mut net = Net::pair(CLEAN, 1);
    let mut recorded = Vec::new();
    let (a, b) = net.open();
    net.nodes[0].write(net.now, a, &mut pattern(20_000, 1)).unwrap();
    let end = net.now + SECOND;
    loop {
        net.flush();
        recorded.extend(net.sky.values().cloned());
        if !net.step(end) {
            break;
        }
    }
    let mut read = Vec::new();
    net.read(1, b, &mut read);
    // The session's own messages too.
    let refused = net.nodes[0].allocate(net.now, address(1), FlowRequest::to("x", "y")).unwrap();
    let request = net.requested();
    net.nodes[1].refuse(net.now, request, Reason::Policy).unwrap();
    net.flush();
    recorded.extend(net.sky.values().cloned());
    net.run(5 * SECOND);
    assert!(net.take_events(0).contains(&Event::AllocationFailed { flow: refused, reason: Reason::Policy }));
    net.take_events(1);
    for (from, to, datagram) in recorded.iter().rev().chain(&recorded) {
        let now = net.now;
        net.nodes[*to].handle_datagram(now, address(*from), datagram.clone());
    }
    net.run(SECOND);
    assert_eq!((net.take_events(0), net.take_events(1)), (vec![], vec![]));
    assert!(net.nodes[0].path(a).is_some() && net.nodes[1].path(b).is_some());
    let mut read = Vec::new();
    assert!(!net.read(1, b, &mut read) && read.is_empty());
}

#[test]
fn data_from_another_address_or_with_other_ids_is_dropped() {
    let mut net = Net::pair(CLEAN, 1);
    let (a, b) = net.open();
    net.nodes[0].write(net.now, a, &mut Bytes::from_static(b"real")).unwrap();
    net.flush();
    let (_, _, real) = net.sky.values().last().unwrap().clone();
    let Ok(Message::Data { header, payload }) = Message::decode(real) else { panic!("not data") };
    let forge = |header: DataHeader| {
        let mut out = BytesMut::new();
        Message::Data { header, payload: payload.clone() }.encode(&mut out);
        out.freeze()
    };
    let now = net.now;
    let far = DataHeader { sequence: header.sequence + (1 << 30), ..header };
    let reset = crate::message::Flags { reset: true, ..header.flags };
    let cases = [
        (address(7), header),
        (address(0), DataHeader { from: header.from ^ 1 << 20, ..header }),
        (address(0), DataHeader { to: header.to ^ 1 << 20, flags: reset, ..header }),
        (address(0), far),
    ];
    for (peer, header) in cases {
        net.nodes[1].handle_datagram(now, peer, forge(header));
    }
    let counters = net.nodes[1].counters();
    assert_eq!((counters.not_enrolled, counters.unknown_flow, counters.outside_window), (1, 2, 1));
    net.run(SECOND);
    let mut read = Vec::new();
    net.read(1, b, &mut read);
    assert_eq!(read, b"real");
}

#[test]
fn full_tables_refuse_and_count() {
    let mut small = config();
    small.limits.flows_per_neighbour = 3;
    small.limits.pending_per_neighbour = 2;
    small.limits.neighbours = 1;
    let mut net = Net::new(CLEAN, 1, [config(), small, config()]);
    let request = || FlowRequest::to("x", "y");
    let flows: Vec<FlowId> = (0..4).map(|_| net.nodes[0].allocate(net.now, address(1), request()).unwrap()).collect();
    net.run(SECOND);
    let failed = |events: Vec<Event>| events.iter().filter(|e| matches!(e, Event::AllocationFailed { .. })).count();
    assert_eq!(failed(net.take_events(0)), 2);
    assert_eq!(net.nodes[1].counters().pending_limit, 2);
    let pending: Vec<FlowId> = net
        .take_events(1)
        .iter()
        .filter_map(|event| match event {
            Event::FlowRequested { flow, .. } => Some(*flow),
            _ => None,
        })
        .collect();
    pending.iter().for_each(|flow| net.nodes[1].accept(net.now, *flow).unwrap());
    (0..2).for_each(|_| assert!(net.nodes[0].allocate(net.now, address(1), request()).is_ok()));
    net.run(SECOND);
    assert_eq!(failed(net.take_events(0)), 1);
    assert_eq!(net.nodes[1].counters().flow_limit, 1);
    net.nodes[2].connect(net.now, address(1)).unwrap();
    net.run(SECOND);
    let lost = Event::NeighbourLost { peer: address(1), reason: Reason::TooMany };
    assert_eq!(net.take_events(2), [lost]);
    assert_eq!(net.nodes[1].counters().neighbour_limit, 1);
    assert_eq!(net.nodes[1].connect(net.now, address(2)), Err(FlowError::TooMany));
    assert_eq!(flows.len(), 4);
}

#[test]
fn total_limits_hold_and_starved_writers_are_woken() {
    let (mut sender, mut receiver) = (config(), config());
    sender.limits.total_send = 100_000;
    receiver.limits.total_receive = 50_000;
    let mut net = Net::new(CLEAN, 1, [sender, receiver]);
    let pairs: Vec<_> = (0..4).map(|_| net.open()).collect();
    let contents: Vec<Bytes> = (0..4).map(|salt| pattern(200_000, salt)).collect();
    let mut left = contents.clone();
    let mut read = vec![Vec::new(); 4];
    for (at, (a, _)) in pairs.iter().enumerate() {
        net.nodes[0].write(net.now, *a, &mut left[at]).unwrap();
    }
    let end = net.now + 600 * SECOND;
    while read.iter().map(Vec::len).sum::<usize>() < 800_000 {
        assert!(net.step(end), "stalled: {:?} {:?}", net.nodes[0].usage(), net.nodes[1].usage());
        for event in net.take_events(0) {
            if let Event::Writable { flow } = event {
                let at = pairs.iter().position(|(a, _)| *a == flow).unwrap();
                net.nodes[0].write(net.now, flow, &mut left[at]).unwrap();
            }
        }
        assert!(net.nodes[0].usage().send <= 100_000 && net.nodes[1].usage().receive <= 50_000);
        for event in net.take_events(1) {
            if let Event::Readable { flow } = event {
                let at = pairs.iter().position(|(_, b)| *b == flow).unwrap();
                net.read(1, flow, &mut read[at]);
            }
        }
    }
    assert!(read.iter().zip(&contents).all(|(read, content)| read == content));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// An enrolled neighbour damages arbitrary bytes of what it sends.
    #[test]
    fn damaged_datagrams_never_panic(damage in proptest::collection::vec((any::<u16>(), any::<u8>()), 1..300), seed: u64) {
        let mut net = Net::pair(Faults { loss: 5, ..CLEAN }, seed);
        let (a, b) = net.open();
        for (at, value) in damage {
            let _ = net.nodes[0].write(net.now, a, &mut pattern(3000, 1));
            let _ = net.nodes[1].read(net.now, b, usize::MAX);
            net.flush();
            if let Some((_, _, datagram)) = net.sky.values_mut().next_back() {
                let mut bytes = datagram.to_vec();
                let at = usize::from(at) % bytes.len().min(80);
                bytes[at] = value;
                *datagram = Bytes::from(bytes);
            }
            net.step(net.now + SECOND);
            let usage = net.nodes[1].usage();
            prop_assert!(usage.receive <= config().limits.receive_window as usize && usage.control < 100);
        }
    }
}
