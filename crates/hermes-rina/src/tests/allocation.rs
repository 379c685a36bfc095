//! Allocation and deallocation: refusal, a dark server, cancellation, reset, release, restart, timeouts.

use super::*;
use crate::Reason;

fn allocate(net: &mut Net) -> FlowId {
    net.nodes[0].allocate(net.now, address(1), FlowRequest::to("web", "10.0.0.1:40000>10.0.1.2:80")).unwrap()
}

fn lossy() -> Faults {
    Faults { loss: 30, duplication: 20, reordering: 20, ..CLEAN }
}

#[test]
fn a_refusal_arrives_with_its_reason() {
    for reason in crate::message::REASONS {
        for (seed, faults) in [(1, CLEAN), (2, lossy()), (3, lossy())] {
            let mut net = Net::pair(faults, seed);
            let flow = allocate(&mut net);
            let other = net.requested();
            net.nodes[1].refuse(net.now, other, reason).unwrap();
            net.run(20 * SECOND);
            let failed = Event::AllocationFailed { flow, reason };
            assert_eq!(net.take_events(0).into_iter().filter(|event| *event == failed).count(), 1);
            assert_eq!(net.take_events(1), [], "a repeated request is not a new one");
            assert_eq!((net.nodes[0].usage().flows, net.nodes[1].usage().flows), (0, 0));
        }
    }
}

#[test]
fn a_request_carries_its_names() {
    let mut net = Net::pair(CLEAN, 1);
    allocate(&mut net);
    net.run(SECOND);
    let expected = FlowRequest::to("web", "10.0.0.1:40000>10.0.1.2:80");
    assert!(net.take_events(1).iter().any(|event| matches!(event, Event::FlowRequested { peer, request, .. }
        if *peer == address(0) && *request == expected)));
}

#[test]
fn a_dark_server_answers_nothing_until_it_decides() {
    let mut net = Net::pair(CLEAN, 1);
    let flow = allocate(&mut net);
    let other = net.requested();
    net.flush();
    let before = net.nodes[1].counters().datagrams_out;
    net.run(20 * SECOND);
    assert_eq!(net.nodes[1].counters().datagrams_out, before);
    assert!(net.nodes[0].counters().datagrams_out < 20, "repetitions back off");
    assert!(net.take_events(0).iter().all(|event| matches!(event, Event::Enrolled { .. })));
    net.nodes[1].accept(net.now, other).unwrap();
    net.run(20 * MS);
    assert_eq!(net.take_events(0), [Event::FlowAllocated { flow }]);
}

#[test]
fn an_undecided_request_expires_on_both_sides() {
    let mut net = Net::pair(CLEAN, 1);
    let flow = allocate(&mut net);
    let other = net.requested();
    net.run(60 * SECOND);
    assert!(net.take_events(0).contains(&Event::AllocationFailed { flow, reason: Reason::Timeout }));
    assert!(net.take_events(1).contains(&Event::Closed { flow: other, reason: Some(Reason::Timeout) }));
    assert_eq!((net.nodes[0].usage().flows, net.nodes[1].usage().flows), (0, 0));
}

#[test]
fn a_cancelled_request_disappears() {
    for (seed, faults) in [(1, CLEAN), (7, lossy())] {
        let mut net = Net::pair(faults, seed);
        let flow = allocate(&mut net);
        let other = net.requested();
        net.nodes[0].reset(net.now, flow, Reason::Aborted).unwrap();
        net.run(20 * SECOND);
        assert!(net.take_events(1).contains(&Event::Closed { flow: other, reason: Some(Reason::Aborted) }));
        assert_eq!((net.nodes[0].usage().flows, net.nodes[1].usage().flows), (0, 0));
        assert_eq!(net.nodes[1].accept(net.now, other), Err(crate::FlowError::Unknown));
    }
}

#[test]
fn a_reset_reaches_the_peer_and_frees_memory() {
    for (seed, faults) in [(1, CLEAN), (4, lossy())] {
        let mut net = Net::pair(faults, seed);
        let (a, b) = net.open();
        net.nodes[0].write(net.now, a, &mut pattern(100_000, 0)).unwrap();
        net.run(30 * MS);
        net.nodes[1].reset(net.now, b, Reason::Policy).unwrap();
        assert_eq!(net.nodes[1].usage().receive, 0);
        net.run(20 * SECOND);
        assert!(net.take_events(0).contains(&Event::Closed { flow: a, reason: Some(Reason::Policy) }));
        for node in &net.nodes {
            let usage = node.usage();
            assert_eq!((usage.flows, usage.send, usage.receive), (0, 0, 0));
        }
    }
}

#[test]
fn a_silent_peer_ends_the_flow() {
    let mut net = Net::pair(CLEAN, 1);
    let (a, _) = net.open();
    net.run(100 * SECOND);
    assert!(net.nodes[0].path(a).is_some(), "keepalives keep an idle flow");
    net.dark = Some(1);
    net.run(40 * SECOND);
    assert!(net.take_events(0).contains(&Event::Closed { flow: a, reason: Some(Reason::Timeout) }));
}

#[test]
fn an_idle_flow_ends() {
    let mut net = Net::pair(CLEAN, 1);
    let (a, _) = net.open();
    net.run(4000 * SECOND);
    assert!(net.take_events(0).contains(&Event::Closed { flow: a, reason: Some(Reason::Idle) }));
    assert_eq!(net.nodes[0].usage().neighbours, 0, "the neighbour expires too");
}

#[test]
fn an_unreachable_neighbour_fails_the_request() {
    let mut net = Net::pair(CLEAN, 1);
    net.dark = Some(1);
    let flow = allocate(&mut net);
    net.run(20 * SECOND);
    let reason = Reason::Unreachable;
    let expected = [Event::AllocationFailed { flow, reason }, Event::NeighbourLost { peer: address(1), reason }];
    assert_eq!(net.take_events(0), expected);
    assert_eq!(net.nodes[0].usage().neighbours, 0);
    assert_eq!(net.nodes[0].next_timeout(), None);
}

#[test]
fn a_release_ends_all_flows() {
    let mut net = Net::pair(CLEAN, 1);
    let (a, b) = net.open();
    net.nodes[0].disconnect(net.now, address(1));
    net.run(SECOND);
    let reason = Some(Reason::Released);
    assert!(net.take_events(0).contains(&Event::Closed { flow: a, reason }));
    assert!(net.take_events(1).contains(&Event::Closed { flow: b, reason }));
    assert!(!net.nodes[1].is_enrolled(address(0)));
    net.open();
}

#[test]
fn a_restarted_peer_is_noticed_at_the_next_pdu() {
    let mut net = Net::pair(CLEAN, 1);
    let (a, _) = net.open();
    net.nodes[1] = Dif::new(config(), &[99; 32]).unwrap();
    net.nodes[0].write(net.now, a, &mut Bytes::from_static(b"lost")).unwrap();
    net.run(SECOND);
    assert!(net.take_events(0).contains(&Event::Closed { flow: a, reason: Some(Reason::Restarted) }));
    let (a, _) = net.open();
    // The requester restarts: its new enrolment replaces the old one.
    net.nodes[0] = Dif::new(config(), &[98; 32]).unwrap();
    net.open();
    assert!(net.nodes[0].path(a).is_none() && net.nodes[1].usage().flows == 1);
}

#[test]
fn both_sides_may_enrol_at_once() {
    for seed in 0..20 {
        let faults = if seed < 4 { CLEAN } else { lossy() };
        let mut net = Net::pair(faults, seed);
        let flows =
            [0, 1].map(|node| net.nodes[node].allocate(net.now, address(1 - node), FlowRequest::to("x", "y")).unwrap());
        net.run(15 * SECOND);
        for (node, flow) in flows.into_iter().enumerate() {
            let events = net.take_events(node);
            let requests = events.iter().filter(|event| matches!(event, Event::FlowRequested { .. })).count();
            assert_eq!(requests, 1, "seed {seed}: {events:?}");
            assert!(!events.contains(&Event::Closed { flow, reason: Some(Reason::Restarted) }));
        }
    }
}

#[test]
fn thousands_of_flows_share_a_neighbour() {
    let mut net = Net::pair(Faults { loss: 5, ..CLEAN }, 1);
    let flows: Vec<FlowId> = (0..1000).map(|_| allocate(&mut net)).collect();
    let mut allocated = 0;
    let end = net.now + 60 * SECOND;
    while allocated < flows.len() {
        assert!(net.step(end));
        for event in net.take_events(1) {
            if let Event::FlowRequested { flow, .. } = event {
                net.nodes[1].accept(net.now, flow).unwrap();
            }
        }
        allocated += net.take_events(0).iter().filter(|event| matches!(event, Event::FlowAllocated { .. })).count();
    }
    net.nodes[0].disconnect(net.now, address(1));
    net.run(5 * SECOND);
    assert_eq!((net.nodes[0].usage().flows, net.nodes[0].next_timeout()), (0, None));
}
