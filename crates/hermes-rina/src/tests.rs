//! Tests of engines on a simulated network in computed time: `transfer` (bytes), `allocation` (flows begin and end),
//! `hostile` (attacks and full tables).
//!
//! In: the seed and the faults of the network. Out: engines that exchange datagrams, and their events.

mod allocation;
mod hostile;
mod transfer;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::{Bytes, BytesMut};

use crate::{Config, Dif, Event, FlowId, FlowRequest, Read};

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

/// The faults of a network.
#[derive(Debug, Clone, Copy)]
struct Faults {
    /// Percentages.
    loss: u64,
    duplication: u64,
    reordering: u64,
    delay: Duration,
}

const CLEAN: Faults = Faults { loss: 0, duplication: 0, reordering: 0, delay: Duration::from_millis(5) };

/// A network of engines.
struct Net {
    now: Duration,
    nodes: Vec<Dif>,
    events: Vec<Vec<Event>>,
    faults: Faults,
    random: u64,
    /// Datagrams by arrival time and serial number: source, destination, bytes.
    sky: BTreeMap<(Duration, u64), (usize, usize, Bytes)>,
    serial: u64,
    max_segments: usize,
    /// Datagrams from this node are lost.
    dark: Option<usize>,
    sent: u64,
}

fn address(node: usize) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, node as u8], 4000))
}

fn config() -> Config {
    let mut config = Config::new("test");
    config.key = Some(b"secret".to_vec());
    config
}

impl Net {
    fn new(faults: Faults, seed: u64, configs: impl IntoIterator<Item = Config>) -> Self {
        let nodes: Vec<Dif> = configs
            .into_iter()
            .enumerate()
            .map(|(at, config)| Dif::new(config, &[at as u8 + 1; 32]).unwrap())
            .collect();
        let events = nodes.iter().map(|_| Vec::new()).collect();
        let (now, sky) = (SECOND, BTreeMap::new());
        let random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        Self { now, nodes, events, faults, random, sky, serial: 0, max_segments: 16, dark: None, sent: 0 }
    }

    fn pair(faults: Faults, seed: u64) -> Self {
        Self::new(faults, seed, [config(), config()])
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % 100 < percent
    }

    fn launch(&mut self, from: usize, to: SocketAddr, datagram: Bytes) {
        let Some(to) = (0..self.nodes.len()).find(|node| address(*node) == to) else { return };
        self.sent += 1;
        if self.dark == Some(from) || self.chance(self.faults.loss) {
            return;
        }
        for _ in 0..1 + u64::from(self.chance(self.faults.duplication)) {
            let late = if self.chance(self.faults.reordering) { self.faults.delay * 2 } else { Duration::ZERO };
            self.serial += 1;
            self.sky.insert((self.now + self.faults.delay + late, self.serial), (from, to, datagram.clone()));
        }
    }

    /// Sends everything that the engines want to send, and collects their events.
    fn flush(&mut self) {
        for node in 0..self.nodes.len() {
            let mut out = BytesMut::new();
            while let Some(transmit) = self.nodes[node].poll_transmit(self.now, &mut out, self.max_segments) {
                let mut batch = out.split().freeze();
                assert_eq!(batch.len(), transmit.len);
                let size = transmit.segment_size.unwrap_or(batch.len());
                assert!(size <= 1400 && batch.len() <= size * self.max_segments, "a datagram of {size} bytes");
                while !batch.is_empty() {
                    let datagram = batch.split_to(size.min(batch.len()));
                    self.launch(node, transmit.peer, datagram);
                }
            }
            while let Some(event) = self.nodes[node].poll_event() {
                self.events[node].push(event);
            }
        }
    }

    /// Advances to the next datagram or timeout, at most until `end`. `false`: the time is `end`.
    fn step(&mut self, end: Duration) -> bool {
        self.flush();
        let arrival = self.sky.first_key_value().map(|((at, _), _)| *at);
        let timeout = self.nodes.iter().filter_map(Dif::next_timeout).min();
        let next = arrival.into_iter().chain(timeout).min().unwrap_or(end).max(self.now);
        if next >= end {
            self.now = end;
            return false;
        }
        self.now = next;
        while self.sky.first_key_value().is_some_and(|((at, _), _)| *at <= next) {
            let (_, (from, to, datagram)) = self.sky.pop_first().unwrap();
            self.nodes[to].handle_datagram(next, address(from), datagram);
        }
        self.nodes.iter_mut().for_each(|node| node.handle_timeout(next));
        true
    }

    fn run(&mut self, time: Duration) {
        let end = self.now + time;
        while self.step(end) {}
        self.flush();
    }

    fn take_events(&mut self, node: usize) -> Vec<Event> {
        self.flush();
        std::mem::take(&mut self.events[node])
    }

    /// Allocates a flow from node 0 to node 1 and accepts it.
    fn open(&mut self) -> (FlowId, FlowId) {
        let flow = self.nodes[0].allocate(self.now, address(1), FlowRequest::to("web", "a>b")).unwrap();
        let other = self.requested();
        self.nodes[1].accept(self.now, other).unwrap();
        for _ in 0..1000 {
            if self.take_events(0).contains(&Event::FlowAllocated { flow }) {
                return (flow, other);
            }
            self.step(self.now + SECOND);
        }
        panic!("the flow was not allocated");
    }

    /// Runs until node 1 has a request.
    fn requested(&mut self) -> FlowId {
        for _ in 0..1000 {
            let found = self.take_events(1).into_iter().find_map(|event| match event {
                Event::FlowRequested { flow, .. } => Some(flow),
                _ => None,
            });
            if let Some(flow) = found {
                return flow;
            }
            self.step(self.now + SECOND);
        }
        panic!("no request arrived");
    }

    /// Reads all bytes that are ready. `true`: the end was read.
    fn read(&mut self, node: usize, flow: FlowId, into: &mut Vec<u8>) -> bool {
        loop {
            match self.nodes[node].read(self.now, flow, usize::MAX) {
                Ok(Read::Bytes(bytes)) => into.extend_from_slice(&bytes),
                Ok(Read::Blocked) => return false,
                Ok(Read::End) => return true,
                Err(error) => panic!("read of {flow:?} at node {node}: {error}"),
            }
        }
    }
}

fn pattern(length: usize, salt: usize) -> Bytes {
    (0..length).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8 ^ salt as u8).collect()
}
