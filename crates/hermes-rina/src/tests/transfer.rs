//! Transfers: exact bytes in both directions under loss, duplication and reordering, in bounded memory; windows that
//! stall; half-close; speed.

use proptest::prelude::*;

use super::*;

/// One side of a transfer.
struct Side {
    flow: FlowId,
    left: Bytes,
    is_finished: bool,
    read: Vec<u8>,
    has_end: bool,
}

impl Side {
    fn new(flow: FlowId, bytes: Bytes) -> Self {
        Self { flow, left: bytes, is_finished: false, read: Vec::new(), has_end: false }
    }

    fn drive(&mut self, net: &mut Net, node: usize) {
        if !self.left.is_empty() {
            net.nodes[node].write(net.now, self.flow, &mut self.left).unwrap();
        }
        if self.left.is_empty() && !self.is_finished {
            self.is_finished = true;
            net.nodes[node].finish(net.now, self.flow).unwrap();
        }
        if !self.has_end {
            self.has_end = net.read(node, self.flow, &mut self.read);
        }
    }
}

/// Transfers bytes in both directions and returns the time that it took.
fn transfer(net: &mut Net, sizes: [usize; 2]) -> Duration {
    let (a, b) = net.open();
    let start = net.now;
    let contents = [pattern(sizes[0], 1), pattern(sizes[1], 2)];
    let mut sides = [Side::new(a, contents[0].clone()), Side::new(b, contents[1].clone())];
    let limits = config().limits;
    while !sides.iter().all(|side| side.has_end) {
        for (node, side) in sides.iter_mut().enumerate() {
            side.drive(net, node);
            let usage = net.nodes[node].usage();
            assert!(usage.send <= limits.send_buffer && usage.receive <= limits.receive_window as usize);
        }
        assert!(net.step(start + 3600 * SECOND), "no progress: {:?}", net.nodes[0].counters());
    }
    let took = net.now - start;
    assert!(sides[0].read == contents[1] && sides[1].read == contents[0], "the bytes differ");
    net.run(20 * SECOND);
    for (node, side) in sides.iter().enumerate() {
        let closed = net.take_events(node).into_iter().filter(|event| matches!(event, Event::Closed { .. }));
        let flow = side.flow;
        assert_eq!(closed.collect::<Vec<_>>(), [Event::Closed { flow, reason: None }]);
        let usage = net.nodes[node].usage();
        assert_eq!((usage.flows, usage.send, usage.receive), (0, 0, 0));
    }
    took
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn bytes_are_exact_on_any_network(
        loss in 0u64..=20, duplication in 0u64..=10, reordering in 0u64..=20, delay in 0u64..40,
        seed: u64, sizes: [u16; 2], scale in 1usize..8, max_segments in 1usize..64,
    ) {
        let faults = Faults { loss, duplication, reordering, delay: Duration::from_millis(delay) };
        let mut net = Net::pair(faults, seed);
        net.max_segments = max_segments;
        transfer(&mut net, sizes.map(|size| usize::from(size) * scale));
    }
}

#[test]
fn a_clean_network_needs_no_retransmission() {
    let mut net = Net::pair(CLEAN, 1);
    let took = transfer(&mut net, [3_000_000, 10]);
    assert_eq!(net.nodes[0].counters().retransmitted, 0);
    // Slow start from ten PDUs: 3 MB need about eight round trips of 10 ms.
    assert!(took < 150 * MS, "{took:?}");
}

#[test]
fn one_percent_loss_keeps_most_of_the_rate() {
    let faults = Faults { loss: 1, ..CLEAN };
    let mut net = Net::pair(faults, 3);
    let took = transfer(&mut net, [4_000_000, 0]);
    let again = net.nodes[0].counters().retransmitted;
    assert!(again < 150, "{again} retransmissions of about 3000 segments");
    assert!(took < 5 * SECOND, "{took:?}");
}

#[test]
fn first_bytes_leave_with_the_allocation() {
    let mut net = Net::pair(CLEAN, 1);
    let flow = net.nodes[0].allocate(net.now, address(1), FlowRequest::to("web", "a>b")).unwrap();
    let mut early = Bytes::from_static(b"early");
    net.nodes[0].write(net.now, flow, &mut early).unwrap();
    let other = net.requested();
    // The server speaks first.
    net.nodes[1].accept(net.now, other).unwrap();
    net.nodes[1].write(net.now, other, &mut Bytes::from_static(b"banner")).unwrap();
    let start = net.now;
    let (mut banner, mut read) = (Vec::new(), Vec::new());
    while banner.is_empty() || read.is_empty() {
        assert!(net.step(start + SECOND));
        if net.take_events(0).contains(&Event::Readable { flow }) {
            net.read(0, flow, &mut banner);
        }
        net.read(1, other, &mut read);
    }
    assert_eq!((&banner[..], &read[..]), (&b"banner"[..], &b"early"[..]));
    assert_eq!(net.now - start, 2 * CLEAN.delay, "no timer is involved");
}

#[test]
fn a_stalled_reader_stops_the_writer_and_its_window_reopens() {
    for loss in [0, 20] {
        let mut net = Net::pair(Faults { loss, ..CLEAN }, 5);
        let (a, b) = net.open();
        let content = pattern(9 << 20, 3);
        let mut left = content.clone();
        net.nodes[0].write(net.now, a, &mut left).unwrap();
        for _ in 0..100 {
            net.run(SECOND);
            if !left.is_empty() {
                net.nodes[0].write(net.now, a, &mut left).unwrap();
            }
        }
        let limits = config().limits;
        assert_eq!(net.nodes[1].usage().receive, limits.receive_window as usize);
        assert_eq!(net.nodes[0].usage().send, limits.send_buffer);
        assert_eq!(left.len(), content.len() - limits.send_buffer - limits.receive_window as usize);
        // The flow survives as long as probes are answered; then the update is lost too.
        net.dark = Some(1);
        let mut read = Vec::new();
        net.read(1, b, &mut read);
        net.run(SECOND);
        net.dark = None;
        let end = net.now + 200 * SECOND;
        while read.len() < content.len() {
            assert!(net.step(end), "stalled at {}", read.len());
            if !left.is_empty() {
                net.nodes[0].write(net.now, a, &mut left).unwrap();
            }
            net.read(1, b, &mut read);
        }
        assert!(read == content);
    }
}

#[test]
fn half_close_leaves_the_other_direction_open() {
    let mut net = Net::pair(CLEAN, 1);
    let (a, b) = net.open();
    net.nodes[0].write(net.now, a, &mut Bytes::from_static(b"request")).unwrap();
    net.nodes[0].finish(net.now, a).unwrap();
    assert_eq!(net.nodes[0].write(net.now, a, &mut Bytes::from_static(b"x")), Err(crate::FlowError::Finished));
    net.run(60 * SECOND);
    let mut read = Vec::new();
    assert!(net.read(1, b, &mut read));
    assert_eq!(read, b"request");
    net.nodes[1].write(net.now, b, &mut Bytes::from_static(b"response")).unwrap();
    net.run(SECOND);
    let mut read = Vec::new();
    assert!(!net.read(0, a, &mut read));
    assert_eq!(read, b"response");
    net.nodes[1].finish(net.now, b).unwrap();
    net.run(SECOND);
    assert!(net.read(0, a, &mut read));
    net.run(SECOND);
    assert!(net.take_events(0).contains(&Event::Closed { flow: a, reason: None }));
    assert!(net.take_events(1).contains(&Event::Closed { flow: b, reason: None }));
}

#[test]
fn small_writes_cause_no_timer_delay() {
    let mut net = Net::pair(CLEAN, 1);
    let (a, b) = net.open();
    for round in 0..50u8 {
        let start = net.now;
        net.nodes[0].write(net.now, a, &mut Bytes::copy_from_slice(&[round])).unwrap();
        let mut read = Vec::new();
        while read.is_empty() {
            assert!(net.step(start + SECOND));
            net.read(1, b, &mut read);
        }
        assert_eq!((&read[..], net.now - start), (&[round][..], CLEAN.delay));
        net.nodes[1].write(net.now, b, &mut Bytes::copy_from_slice(&[round])).unwrap();
        read.clear();
        while read.is_empty() {
            assert!(net.step(start + SECOND));
            net.read(0, a, &mut read);
        }
        assert_eq!(net.now - start, 2 * CLEAN.delay);
    }
    assert!(net.sent < 50 * 3 + 20, "{} datagrams: acknowledgements travel with data", net.sent);
}

#[test]
fn congestion_marks_reduce_the_window() {
    let mut net = Net::pair(CLEAN, 1);
    let (a, b) = net.open();
    net.nodes[0].write(net.now, a, &mut pattern(1 << 20, 0)).unwrap();
    net.run(25 * MS);
    let before = net.nodes[0].path(a).unwrap().window;
    net.flush();
    let sky = std::mem::take(&mut net.sky);
    let now = net.now;
    sky.into_values().filter(|(_, to, _)| *to == 1).for_each(|(from, to, datagram)| {
        net.nodes[to].handle_marked_datagram(now, address(from), datagram);
    });
    net.run(6 * MS);
    assert!(net.nodes[0].path(a).unwrap().window < before);
    assert!(net.nodes[1].path(b).is_some());
}

/// The last segment arrives out of order: its range must cover the end too.
#[test]
fn an_end_that_arrives_early_is_acknowledged() {
    let faults = Faults { loss: 3, duplication: 1, reordering: 12, delay: Duration::ZERO };
    let mut net = Net::pair(faults, 1_037_554_074_183_551_163);
    net.max_segments = 1;
    transfer(&mut net, [16_951 * 2, 12_205 * 2]);
}
