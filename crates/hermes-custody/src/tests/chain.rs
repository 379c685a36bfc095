//! Chains of engines in computed time: the performance of custody over links that are up in turns, without a socket.
//!
//! In: sizes, links, phases. Out: the completion time of the response, compared with the physical limit. Every byte is
//! compared.

use std::collections::VecDeque;
use std::time::Duration;

use bytes::BytesMut;
use hermes_wire::custody::{Direction, ExchangeId, Record};

use super::super::engine::{Appended, Durability, Engine, Entry, Limits, Output, Side};
use super::{LIMITS, account, content, engine, name};

/// Bytes a microsecond: 10 Mbit/s.
const RATE: f64 = 1.25;
/// Overhead of a record: its own header, and those of TCP and IP.
const HEAD: usize = 80;
const TICK: Duration = Duration::from_millis(1);
/// Interval of probes for a link that comes up, and silence after which a link counts as down.
const BEACON: u128 = 20;
const SILENCE: Duration = Duration::from_millis(100);

/// A direction of a link.
#[derive(Default)]
struct Way {
    busy_until: Duration,
    under_way: VecDeque<(Duration, Record)>,
}

struct Node {
    engine: Engine,
    /// Request bytes delivered at this node, by exchange.
    asked: Vec<(ExchangeId, usize)>,
    /// Response bytes received at this node, and the time of completion.
    answered: Vec<(ExchangeId, BytesMut, Option<Duration>)>,
    failed: Vec<ExchangeId>,
}

/// The schedule of a link.
type IsUp = fn(link: usize, at: Duration) -> bool;

struct Chain {
    nodes: Vec<Node>,
    links: Vec<[Way; 2]>,
    open: Vec<bool>,
    dark_since: Vec<Option<Duration>>,
    now: Duration,
    is_up: IsUp,
    size: usize,
}

impl Chain {
    fn new(nodes: usize, size: usize, begin: Duration, is_up: IsUp) -> Self {
        let node = |_| Node { engine: engine(LIMITS), asked: vec![], answered: vec![], failed: vec![] };
        Self {
            nodes: (0..nodes).map(node).collect(),
            links: (1..nodes).map(|_| Default::default()).collect(),
            open: vec![false; nodes - 1],
            dark_since: vec![None; nodes - 1],
            now: begin,
            is_up,
            size,
        }
    }

    fn begin(&mut self, number: u8) -> ExchangeId {
        let id = ExchangeId([number; 16]);
        let engine = &mut self.nodes[0].engine;
        engine
            .begin(self.now, id, Side::Peer(name(1)), Duration::from_secs(900), (&account(), &name(77)), false)
            .unwrap();
        assert_eq!(engine.append(id, Direction::Request, content(id, 200), true), Appended::Taken);
        id
    }

    /// Carries out the outputs of a node.
    fn act(&mut self, index: usize) {
        let last = self.nodes.len() - 1;
        let (size, now) = (self.size, self.now);
        let node = &mut self.nodes[index];
        while let Some(output) = node.engine.output() {
            match output {
                Output::Begun { .. } | Output::Read { .. } | Output::Stir(_) | Output::Room | Output::Onward { .. } => {
                }
                Output::Release { .. } | Output::Scarce(_) => {}
                // The first bytes are the head, and each node but the last writes its own.
                Output::Head { id, part: Direction::Request, .. } if index == last => {
                    node.engine.accept_local(id, &account(), false);
                }
                Output::Head { id, part: Direction::Request, bytes } => {
                    let head = [&b"node"[..], &bytes[..1]].concat();
                    node.engine.lead(id, (Side::Peer(name(index + 1)), false), &account(), 1, head.into());
                }
                Output::Head { id, part, bytes } => {
                    let head = [&b"n"[..], &bytes[..1]].concat();
                    node.engine.settle(id, part, 1, head.into());
                }
                Output::Keep { id, entry: Entry::Bytes { part, offset, bytes, is_last }, .. } => {
                    node.engine.is_safe(id, part, offset + bytes.len() as u64, is_last);
                }
                Output::Keep { id, entry: Entry::Head { part, head, .. }, .. } => {
                    node.engine.is_safe(id, part, head.len() as u64, false);
                }
                Output::Keep { .. } => {}
                Output::Ready { id, part: Direction::Request } => {
                    let known = node.asked.iter().position(|(known, _)| *known == id).unwrap_or_else(|| {
                        node.asked.push((id, 0));
                        node.asked.len() - 1
                    });
                    while let Some((bytes, is_last)) = node.engine.read(id, Direction::Request, 99) {
                        node.asked[known].1 += bytes.len();
                        if is_last {
                            assert_eq!(node.asked[known].1, 200 + 4 * (last - 1));
                            let response = content(id, size);
                            assert_eq!(node.engine.append(id, Direction::Response, response, true), Appended::Taken);
                        }
                    }
                }
                Output::Ready { id, .. } => {
                    let known = node.answered.iter().position(|(known, ..)| *known == id).unwrap_or_else(|| {
                        node.answered.push((id, BytesMut::new(), None));
                        node.answered.len() - 1
                    });
                    let (_, came, whole_at) = &mut node.answered[known];
                    while let Some((bytes, is_last)) = node.engine.read(id, Direction::Response, usize::MAX) {
                        came.extend_from_slice(&bytes);
                        assert!(whole_at.is_none(), "bytes came twice");
                        *whole_at = is_last.then_some(now);
                    }
                }
                Output::Failed { id, .. } => node.failed.push(id),
                Output::Forget { .. } => {}
            }
        }
    }

    fn tick(&mut self) {
        self.now += TICK;
        let now = self.now;
        for link in 0..self.links.len() {
            let is_up = (self.is_up)(link, now);
            let dark_since = &mut self.dark_since[link];
            *dark_since = if is_up { None } else { dark_since.or(Some(now)) };
            let ends = [(link, name(link + 1)), (link + 1, name(link))];
            if self.open[link] && dark_since.is_some_and(|since| now - since >= SILENCE) {
                self.open[link] = false;
                for (node, peer) in &ends {
                    self.nodes[*node].engine.closed(peer);
                }
            }
            let wanted = ends.iter().any(|(node, peer)| self.nodes[*node].engine.wants(peer));
            if !self.open[link] && is_up && wanted && now.as_millis().is_multiple_of(BEACON) {
                self.open[link] = true;
                self.links[link] = Default::default();
                for (node, peer) in &ends {
                    self.nodes[*node].engine.opened(peer);
                }
            }
            for (way, (node, peer)) in ends.iter().enumerate() {
                // Records of the opposite direction arrive at this node.
                let other = &mut self.links[link][1 - way].under_way;
                while other.front().is_some_and(|(at, _)| *at <= now) {
                    let Some((at, record)) = other.pop_front() else { break };
                    if (self.is_up)(link, at) {
                        self.nodes[*node].engine.receive(now, peer, record, &account());
                    }
                }
                self.act(*node);
                let way = &mut self.links[link][way];
                if !self.open[link] {
                    continue;
                }
                while way.busy_until <= now + TICK
                    && let Some(record) = self.nodes[*node].engine.next_record(now, peer, None)
                {
                    let bytes = if let Record::Data { bytes, .. } = &record { bytes.len() } else { 0 };
                    let heads = HEAD * bytes.div_ceil(1400).max(1);
                    let takes = Duration::from_nanos((1000.0 * (bytes + heads) as f64 / RATE) as u64);
                    way.busy_until = way.busy_until.max(now) + takes;
                    way.under_way.push_back((way.busy_until, record));
                }
            }
        }
    }

    /// Runs until `count` responses are complete at the first node.
    fn run(&mut self, count: usize, at_most: Duration) {
        let end = self.now + at_most;
        while self.nodes[0].answered.iter().filter(|(_, _, whole_at)| whole_at.is_some()).count() < count {
            assert!(self.now < end, "not there after {at_most:?}");
            self.tick();
        }
        for (id, came, _) in &self.nodes[0].answered {
            let heads = self.nodes.len() - 2;
            assert!(came[..heads].iter().all(|byte| *byte == b'n'), "each node has its own head");
            assert!(came[heads..] == content(*id, self.size), "{id} is not what was sent");
        }
    }
}

/// Each of three links is up for one second in turn.
fn in_turns(link: usize, at: Duration) -> bool {
    at.as_secs() % 3 == link as u64
}

/// Mean completion time over all phases of the links, in seconds.
fn mean(size: usize) -> f64 {
    let phases = 30;
    let took = |phase: u32| {
        let begin = Duration::from_secs(3) * phase / phases;
        let mut chain = Chain::new(4, size, begin, in_turns);
        chain.begin(7);
        chain.run(1, Duration::from_secs(300));
        (chain.now - begin).as_secs_f64()
    };
    (0..phases).map(took).sum::<f64>() / f64::from(phases)
}

/// The limits are the physical ones, measured on such links: `hop-transport` of the design.
#[test]
fn links_in_turns_are_used_to_their_limit() {
    for (size, limit) in [(45 << 10, 6.54), (500 << 10, 6.93), (1 << 20, 7.37), (5 << 20, 18.85)] {
        let mean = mean(size);
        println!("{size}: {mean:.2} s, {:.3} of the limit", mean / limit);
        assert!(mean <= 1.05 * limit, "{size} bytes: {mean:.2} s, and physics allows {limit}");
    }
}

#[test]
fn what_is_over_is_forgotten_by_all() {
    let mut chain = Chain::new(4, 100_000, Duration::ZERO, in_turns);
    for number in 0..20 {
        chain.begin(number);
    }
    chain.run(20, Duration::from_secs(100));
    for _ in 0..30_000 {
        chain.tick();
    }
    for (index, node) in chain.nodes.iter().enumerate() {
        assert_eq!(node.engine.kept(), (0, 0), "node {index}");
        assert_eq!(node.engine.deadline(), None, "node {index}: {:?}", node.engine);
    }
}

/// All links are down for an hour, longer than the deadline.
#[test]
fn what_has_had_its_time_comes_to_nothing_everywhere() {
    let mut chain = Chain::new(3, 1 << 20, Duration::ZERO, |link, at| link == 0 && at < Duration::from_secs(2));
    let id = chain.begin(1);
    for _ in 0..2500 {
        chain.tick();
    }
    chain.now += Duration::from_secs(3600);
    for index in 0..3 {
        let now = chain.now;
        chain.nodes[index].engine.expire(now);
        chain.act(index);
    }
    assert_eq!(chain.nodes[0].failed, [id]);
    assert!(chain.nodes.iter().all(|node| node.engine.deadline().is_none() && node.engine.kept() == (0, 0)));
}

/// All links are down for an hour during a transfer whose deadline is later.
#[test]
fn after_an_hour_of_darkness_it_goes_on_where_it_was() {
    const HOUR: Duration = Duration::from_secs(3600);
    let is_up: IsUp = |link, at| !(Duration::from_secs(6)..HOUR).contains(&at) && in_turns(link, at);
    let mut chain = Chain::new(4, 1 << 20, Duration::ZERO, is_up);
    let id = ExchangeId([7; 16]);
    let engine = &mut chain.nodes[0].engine;
    engine.begin(Duration::ZERO, id, Side::Peer(name(1)), 2 * HOUR, (&account(), &name(77)), false).unwrap();
    assert_eq!(engine.append(id, Direction::Request, content(id, 200), true), Appended::Taken);
    for _ in 0..6500 {
        chain.tick();
    }
    let has_come = |chain: &Chain| chain.nodes[1].engine.kept().0;
    let before = has_come(&chain);
    assert!(before > 0, "some of it is on its way");
    chain.now = HOUR - TICK;
    for index in 0..4 {
        let now = chain.now;
        chain.nodes[index].engine.expire(now);
        chain.act(index);
    }
    assert_eq!(has_come(&chain), before);
    chain.run(1, Duration::from_secs(20));
    assert!(chain.nodes[0].failed.is_empty());
}

/// The link is up a tenth of the time, at random.
fn seldom(link: usize, at: Duration) -> bool {
    let slot = at.as_millis() as u64 / 200 + 1;
    let mixed = (slot ^ (link as u64) << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 32 < (1 << 32) / 10
}

#[test]
fn eight_links_that_are_seldom_up_bring_all_of_it() {
    let mut chain = Chain::new(9, 1 << 20, Duration::ZERO, seldom);
    for number in 0..5 {
        chain.begin(number);
    }
    chain.run(5, Duration::from_secs(800));
    assert!(chain.nodes[8].asked.len() == 5 && chain.nodes[0].failed.is_empty());
}

/// A hundred exchanges at once share the links, and waste little capacity.
#[test]
fn many_at_once_take_what_the_links_can_carry() {
    const COUNT: u8 = 100;
    let mut chain = Chain::new(4, 45 << 10, Duration::ZERO, in_turns);
    for number in 0..COUNT {
        chain.begin(number);
    }
    chain.run(usize::from(COUNT), Duration::from_secs(200));
    let took = chain.now.as_secs_f64();
    // A single exchange of their total size is the measure.
    let mut one = Chain::new(4, usize::from(COUNT) * (45 << 10), Duration::ZERO, in_turns);
    one.begin(1);
    one.run(1, Duration::from_secs(200));
    assert!(took <= 1.1 * one.now.as_secs_f64(), "{took} s, and {:?} for one of that size", one.now);
}

/// Small exchanges do not wait for a large one, and the large one completes nevertheless.
#[test]
fn small_ones_come_first_and_large_ones_are_not_starved() {
    let always: IsUp = |_, _| true;
    let mut chain = Chain::new(3, 2 << 20, Duration::ZERO, always);
    let large = chain.begin(0);
    for _ in 0..500 {
        chain.tick();
    }
    chain.size = 20_000;
    let mut begun = Vec::new();
    let is_whole = |chain: &Chain, wanted: ExchangeId| {
        chain.nodes[0].answered.iter().find(|(id, ..)| *id == wanted).and_then(|(_, _, whole_at)| *whole_at)
    };
    // Small exchanges arrive all the time, and alone take two thirds of the links.
    while is_whole(&chain, large).is_none() {
        if chain.now.as_millis().is_multiple_of(24) && begun.len() < 250 {
            let id = chain.begin(begun.len() as u8 + 1);
            begun.push((id, chain.now));
        }
        assert!(chain.now < Duration::from_secs(60), "the large one is starved");
        chain.tick();
    }
    let mut waits: Vec<Duration> =
        begun.iter().filter_map(|(id, at)| is_whole(&chain, *id).map(|whole_at| whole_at - *at)).collect();
    waits.sort_unstable();
    assert!(waits.len() > 100, "{}", waits.len());
    // Each link takes 16 ms, after the data already in flight.
    assert!(waits[waits.len() / 2] < Duration::from_millis(250), "{:?}", waits[waits.len() / 2]);
}

/// A node in the middle has less room than the data that arrives.
#[test]
fn a_node_without_room_loses_nothing() {
    let first_up: IsUp = |link, at| link == 1 || at.as_secs() % 2 == 1;
    let mut chain = Chain::new(3, 1 << 20, Duration::ZERO, first_up);
    chain.nodes[1].engine = engine(Limits { exchanges: 10, memory: 100_000, disk: 0, survives: Durability::Nothing });
    for number in 0..3 {
        chain.begin(number);
    }
    chain.run(3, Duration::from_secs(100));
}
