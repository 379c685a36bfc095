//! Properties of `hermes-rina`: the codec of its PDUs, and the bounds of its engine.
//!
//! In: datagrams, each after one byte with its length and one byte that selects how it arrives. Out: nothing, or a panic.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use hermes_rina::message::Message;
use hermes_rina::{Config, Dif, Event, FlowId, FlowRequest};

/// A datagram that decodes must encode to itself. Two engines with an open flow receive datagrams, damaged ones of their
/// own and arbitrary ones, and stay within their bounds.
pub fn check(data: &[u8]) {
    let datagram = Bytes::copy_from_slice(data);
    if let Ok(message) = Message::decode(datagram.clone()) {
        let mut out = BytesMut::new();
        message.encode(&mut out);
        assert_eq!(out, datagram, "{message:?}");
        assert_eq!(Message::decode(out.freeze()).as_ref(), Ok(&message));
    }
    let mut pair = Pair::open();
    let mut rest = data;
    while let Some(([length, how], tail)) = rest.split_first_chunk::<2>() {
        let (datagram, tail) = tail.split_at(tail.len().min(usize::from(*length)));
        pair.step(datagram, *how);
        rest = tail;
    }
}

/// Two engines and the flow between them.
struct Pair {
    now: Duration,
    nodes: [Dif; 2],
    flows: [FlowId; 2],
}

fn address(node: usize) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, node as u8], 4000))
}

fn config() -> Config {
    let mut config = Config::new("fuzz");
    config.limits.send_buffer = 20_000;
    config.limits.receive_window = 20_000;
    config.limits.control_queue = 64;
    config
}

impl Pair {
    fn open() -> Self {
        let nodes = [1, 2].map(|seed| Dif::new(config(), &[seed; 32]).expect("the configuration is valid"));
        let now = Duration::from_secs(1);
        let mut pair = Self { now, nodes, flows: [FlowId::default(); 2] };
        let request = FlowRequest::to("web", "10.0.0.1:40000>10.0.1.2:80");
        pair.flows[0] = pair.nodes[0].allocate(now, address(1), request).expect("the table is empty");
        pair.exchange(&[], 0);
        while let Some(event) = pair.nodes[1].poll_event() {
            if let Event::FlowRequested { flow, .. } = event {
                pair.flows[1] = flow;
                pair.nodes[1].accept(now, flow).expect("the flow was requested");
            }
        }
        pair.exchange(&[], 0);
        assert!(pair.nodes.iter().zip(pair.flows).all(|(node, flow)| node.path(flow).is_some()), "no flow");
        pair
    }

    fn step(&mut self, datagram: &[u8], how: u8) {
        let to = usize::from(how & 1);
        self.now += Duration::from_millis(1 << (how >> 5));
        let _ = self.nodes[1 - to].write(self.now, self.flows[1 - to], &mut Bytes::from(vec![how; 3000]));
        if how & 2 != 0 {
            let _ = self.nodes[to].read(self.now, self.flows[to], 5000);
        }
        if how & 4 != 0 {
            self.nodes[to].handle_datagram(self.now, address(1 - to), Bytes::copy_from_slice(datagram));
        }
        self.exchange(if how & 8 != 0 { datagram } else { &[] }, usize::from(how >> 4));
        for node in &mut self.nodes {
            node.handle_timeout(self.now);
            while node.poll_event().is_some() {}
            let usage = node.usage();
            assert!(usage.receive <= 20_000 && usage.send <= 20_000 && usage.control <= 64, "{usage:?}");
            assert!(usage.flows <= 64 && usage.neighbours <= 1, "{usage:?}");
        }
    }

    /// Delivers what both engines send, after a few bytes at an offset were replaced.
    fn exchange(&mut self, damage: &[u8], offset: usize) {
        let mut out = BytesMut::new();
        for round in 0..16 {
            let from = round % 2;
            while self.nodes[from].poll_transmit(self.now, &mut out, 1).is_some() {
                let mut datagram = out.split();
                datagram.iter_mut().skip(offset).zip(damage).for_each(|(to, from)| *to ^= from);
                self.nodes[1 - from].handle_datagram(self.now, address(from), datagram.freeze());
            }
        }
    }
}
