//! Chains of engines in time that is computed: what custody comes to over links that are up in turns, without a socket.
//!
//! In: sizes, links, phases. Out: when the response was there, against what the links allow. Every byte is compared.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use hermes_wire::custody::{ExchangeId, Part, Record};

use super::engine::{Appended, Engine, Entry, Limits, Output, Side, Survives};

const LIMITS: Limits = Limits { exchanges: 1000, memory: 1 << 30, disk: 0, survives: Survives::Nothing };
/// Bytes a microsecond: 10 Mbit/s.
const RATE: f64 = 1.25;
/// What records cost beside their bytes: their own head, TCP's and IP's.
const HEAD: usize = 80;
const TICK: Duration = Duration::from_millis(1);
/// So often it is tried whether a link is up, and so long nothing is heard where it is not.
const BEACON: u128 = 20;
const SILENCE: Duration = Duration::from_millis(100);

/// The bytes at this place of a response of this exchange.
fn content(id: ExchangeId, length: usize) -> Bytes {
    (0..length).map(|at| (at as u32).wrapping_mul(2_654_435_761).to_be_bytes()[0] ^ id.0[0]).collect()
}

/// One direction of a link.
#[derive(Default)]
struct Way {
    busy_until: Duration,
    under_way: VecDeque<(Duration, Record)>,
}

struct Node {
    engine: Engine,
    /// What is delivered of requests here, and answered.
    asked: Vec<(ExchangeId, usize)>,
    /// And when it was whole.
    answered: Vec<(ExchangeId, BytesMut, Option<Duration>)>,
    failed: Vec<ExchangeId>,
}

fn account() -> Arc<str> {
    Arc::from("all")
}

fn engine(limits: Limits) -> Engine {
    let mut engine = Engine::new();
    engine.allow(&account(), limits);
    engine
}

/// When a link is up.
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

fn name(node: usize) -> Arc<str> {
    Arc::from(format!("n{node}"))
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
        engine.begin(self.now, id, Side::Peer(name(1)), Duration::from_secs(900), &account(), false).unwrap();
        assert_eq!(engine.append(id, Part::Request, content(id, 200), true), Appended::Taken);
        id
    }

    /// What each node has to do.
    fn act(&mut self, index: usize) {
        let last = self.nodes.len() - 1;
        let (size, now) = (self.size, self.now);
        let node = &mut self.nodes[index];
        while let Some(output) = node.engine.output() {
            match output {
                Output::Begun { .. } | Output::Read { .. } | Output::Stir(_) | Output::Room => {}
                Output::Release { .. } | Output::Scarce(_) => {}
                // A head is what comes first, and each node but the last has its own.
                Output::Head { id, part: Part::Request, .. } if index == last => {
                    node.engine.take_in(id, &account(), false);
                }
                Output::Head { id, part: Part::Request, bytes } => {
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
                Output::Ready { id, part: Part::Request } => {
                    let known = node.asked.iter().position(|(known, _)| *known == id).unwrap_or_else(|| {
                        node.asked.push((id, 0));
                        node.asked.len() - 1
                    });
                    while let Some((bytes, is_last)) = node.engine.read(id, Part::Request, 99) {
                        node.asked[known].1 += bytes.len();
                        if is_last {
                            assert_eq!(node.asked[known].1, 200 + 4 * (last - 1));
                            let response = content(id, size);
                            assert_eq!(node.engine.append(id, Part::Response, response, true), Appended::Taken);
                        }
                    }
                }
                Output::Ready { id, .. } => {
                    let known = node.answered.iter().position(|(known, ..)| *known == id).unwrap_or_else(|| {
                        node.answered.push((id, BytesMut::new(), None));
                        node.answered.len() - 1
                    });
                    let (_, came, whole_at) = &mut node.answered[known];
                    while let Some((bytes, is_last)) = node.engine.read(id, Part::Response, usize::MAX) {
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
                // Arrivals of the other way are for this node.
                let other = &mut self.links[link][1 - way].under_way;
                while other.front().is_some_and(|(at, _)| *at <= now) {
                    let Some((at, record)) = other.pop_front() else { break };
                    if (self.is_up)(link, at) {
                        self.nodes[*node].engine.hear(now, peer, record, &account());
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

    /// Goes on until so many responses are whole at the first node.
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

/// One link of three each second.
fn in_turns(link: usize, at: Duration) -> bool {
    at.as_secs() % 3 == link as u64
}

/// Over all phases of the links, in seconds.
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

/// What was measured of such links is the limit that physics sets: `hop-transport` of the design.
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

/// An hour in which nothing passes, and a deadline within it.
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

/// What a neighbour hears of an engine's exchange that has come to nothing.
fn gone(engine: &mut Engine, peer: &Arc<str>) -> Option<u16> {
    engine.opened(peer);
    while let Some(record) = engine.next_record(Duration::ZERO, peer, None) {
        if let Record::Gone { status, .. } = record {
            return Some(status);
        }
    }
    None
}

#[test]
fn what_comes_to_nothing_has_a_status_that_every_neighbour_knows() {
    for (said, heard) in [(302, 502), (101, 502), (404, 404), (504, 504), (700, 502)] {
        let mut engine = engine(LIMITS);
        let id = ExchangeId([1; 16]);
        engine.hear(Duration::ZERO, &name(0), Record::Begin { id, left: 1000 }, &account());
        engine.fail(id, said, "so it is");
        assert_eq!(gone(&mut engine, &name(0)), Some(heard), "{said}");
    }
}

#[test]
fn a_route_that_holds_what_it_may_takes_nothing_that_arrives() {
    let mut engine = engine(LIMITS);
    let small: Arc<str> = Arc::from("small");
    engine.allow(&small, Limits { exchanges: 1, memory: 1000, disk: 0, survives: Survives::Nothing });
    for (number, length, is_taken) in [(1, 10, true), (2, 10, false), (3, 2000, false)] {
        let id = ExchangeId([number; 16]);
        engine.hear(Duration::ZERO, &name(0), Record::Begin { id, left: 1000 }, &account());
        let bytes = content(id, length);
        let data = Record::Data { id, part: Part::Request, offset: 0, is_last: true, bytes };
        engine.hear(Duration::ZERO, &name(0), data, &account());
        engine.lead(id, (Side::Peer(name(1)), false), &small, 1, Bytes::from_static(b"n"));
        assert_eq!(engine.is_led(id), is_taken, "{number}");
    }
    assert_eq!(gone(&mut engine, &name(0)), Some(503));
}

/// An hour in which nothing passes, amid a transfer, and time for more.
#[test]
fn after_an_hour_of_darkness_it_goes_on_where_it_was() {
    const HOUR: Duration = Duration::from_secs(3600);
    let is_up: IsUp = |link, at| !(Duration::from_secs(6)..HOUR).contains(&at) && in_turns(link, at);
    let mut chain = Chain::new(4, 1 << 20, Duration::ZERO, is_up);
    let id = ExchangeId([7; 16]);
    let engine = &mut chain.nodes[0].engine;
    engine.begin(Duration::ZERO, id, Side::Peer(name(1)), 2 * HOUR, &account(), false).unwrap();
    assert_eq!(engine.append(id, Part::Request, content(id, 200), true), Appended::Taken);
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

/// Up a tenth of the time, by chance.
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

/// A hundred at once share what the links carry, and waste little of it.
#[test]
fn many_at_once_take_what_the_links_can_carry() {
    const COUNT: u8 = 100;
    let mut chain = Chain::new(4, 45 << 10, Duration::ZERO, in_turns);
    for number in 0..COUNT {
        chain.begin(number);
    }
    chain.run(usize::from(COUNT), Duration::from_secs(200));
    let took = chain.now.as_secs_f64();
    // As one of their size together.
    let mut one = Chain::new(4, usize::from(COUNT) * (45 << 10), Duration::ZERO, in_turns);
    one.begin(1);
    one.run(1, Duration::from_secs(200));
    assert!(took <= 1.1 * one.now.as_secs_f64(), "{took} s, and {:?} for one of that size", one.now);
}

/// What is small does not wait for what is large, and what is large ends too.
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
    // Small ones all the time, which alone take two thirds of the links.
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
    // 16 ms a link each, behind what is under way already.
    assert!(waits[waits.len() / 2] < Duration::from_millis(250), "{:?}", waits[waits.len() / 2]);
}

/// A node in the middle that has room for less than comes.
#[test]
fn a_node_without_room_loses_nothing() {
    let first_up: IsUp = |link, at| link == 1 || at.as_secs() % 2 == 1;
    let mut chain = Chain::new(3, 1 << 20, Duration::ZERO, first_up);
    chain.nodes[1].engine = engine(Limits { exchanges: 10, memory: 100_000, disk: 0, survives: Survives::Nothing });
    for number in 0..3 {
        chain.begin(number);
    }
    chain.run(3, Duration::from_secs(100));
}

/// A node alone: two neighbours, and nothing that is carried out.
mod alone {
    use super::*;

    const DISK: Limits = Limits { exchanges: 1000, memory: 1 << 20, disk: 1 << 20, survives: Survives::Process };
    const ID: ExchangeId = ExchangeId([1; 16]);
    const NOW: Duration = Duration::ZERO;

    /// Does what is to be done: what is written is safe. What is released.
    fn write(engine: &mut Engine) -> Vec<(Part, u64)> {
        let mut released = Vec::new();
        while let Some(output) = engine.output() {
            match output {
                Output::Keep { id, entry: Entry::Bytes { part, offset, bytes, is_last }, .. } => {
                    engine.is_safe(id, part, offset + bytes.len() as u64, is_last);
                }
                Output::Keep { id, entry: Entry::Head { part, head, .. }, .. } => {
                    engine.is_safe(id, part, head.len() as u64, false);
                }
                Output::Release { part, upto, .. } => released.push((part, upto)),
                _ => {}
            }
        }
        released
    }

    fn data(part: Part, offset: u64, length: usize, is_last: bool) -> Record {
        Record::Data { id: ID, part, offset, is_last, bytes: vec![7; length].into() }
    }

    fn held(part: Part, upto: u64, is_whole: bool) -> Record {
        Record::Held { id: ID, part, upto, is_whole, again: false }
    }

    /// One that came from n0, and goes on to n1 if it goes anywhere.
    fn begun(limits: Limits, to: Side) -> Engine {
        let mut engine = engine(limits);
        for peer in [name(0), name(1)] {
            engine.opened(&peer);
        }
        engine.hear(NOW, &name(0), Record::Begin { id: ID, left: 1_000_000 }, &account());
        engine.hear(NOW, &name(0), data(Part::Request, 0, 10, false), &account());
        match to {
            Side::Here => engine.take_in(ID, &account(), false),
            to => engine.lead(ID, (to, false), &account(), 10, Bytes::from_static(b"head")),
        }
        write(&mut engine);
        engine
    }

    fn say(engine: &mut Engine, peer: usize) -> Vec<Record> {
        std::iter::from_fn(|| engine.next_record(NOW, &name(peer), None)).collect()
    }

    #[test]
    fn what_has_passed_is_not_kept_on_disk() {
        let mut engine = begun(DISK, Side::Peer(name(1)));
        let (mut released, mut at) = (0, 4);
        // Sixteen times what it may hold.
        for piece in 0..1024 {
            engine.hear(NOW, &name(0), data(Part::Request, 10 + piece * 16_384, 16_384, piece == 1023), &account());
            released = write(&mut engine).into_iter().map(|(_, upto)| upto).max().unwrap_or(released);
            say(&mut engine, 1);
            at += 16_384;
            engine.hear(NOW, &name(1), held(Part::Request, at, piece == 1023), &account());
            released = write(&mut engine).into_iter().map(|(_, upto)| upto).max().unwrap_or(released);
            assert!(at - released <= 256 << 10, "{at} {released}");
        }
        assert!(engine.have(ID, Part::Request).unwrap().is_whole);
    }

    #[test]
    fn what_may_be_read_again_gives_way_to_what_has_to_be_kept() {
        let mut engine = begun(DISK, Side::Here);
        let mut released = Vec::new();
        for piece in 0..100 {
            engine.hear(NOW, &name(0), data(Part::Request, 10 + piece * 16_384, 16_384, false), &account());
            released.extend(write(&mut engine));
            while engine.read(ID, Part::Request, usize::MAX).is_some() {}
            assert_eq!(engine.have(ID, Part::Request).unwrap().offset, 10 + (piece + 1) * 16_384, "refused");
            assert_eq!(engine.is_torn(ID, Part::Request), !released.is_empty());
        }
        assert!((1..10).contains(&released.len()), "{released:?}");
    }

    #[test]
    fn small_pieces_are_counted_for_what_they_take() {
        let mut engine = begun(DISK, Side::Peer(name(1)));
        for at in 0..100_000 {
            engine.hear(NOW, &name(0), data(Part::Request, 10 + at, 1, false), &account());
            write(&mut engine);
        }
        let (memory, disk) = engine.kept();
        // The last one may cost more than its byte.
        assert!(memory <= (1 << 20) + 200 && disk <= 1 << 20, "{memory} {disk}");
        assert!(engine.have(ID, Part::Request).unwrap().offset < 20_000);
    }

    #[test]
    fn small_pieces_that_were_read_are_in_nobodys_way() {
        let mut engine = begun(DISK, Side::Here);
        for at in 0..50_000 {
            engine.hear(NOW, &name(0), data(Part::Request, 10 + at, 1, false), &account());
            write(&mut engine);
            while engine.read(ID, Part::Request, usize::MAX).is_some() {}
        }
        assert_eq!(engine.have(ID, Part::Request).unwrap().offset, 50_010);
    }

    #[test]
    fn what_the_next_one_has_need_not_be_read() {
        let mut engine = begun(Limits { memory: 40_000, ..DISK }, Side::Peer(name(1)));
        engine.hear(NOW, &name(0), data(Part::Request, 10, 30_000, false), &account());
        write(&mut engine);
        engine.closed(&name(1));
        engine.opened(&name(1));
        say(&mut engine, 1);
        engine.hear(NOW, &name(1), held(Part::Request, 20_000, false), &account());
        engine.is_unreadable(ID, Part::Request, 4);
        assert_eq!(engine.len(), 1, "it has passed");
        engine.is_unreadable(ID, Part::Request, 20_004);
        assert_eq!(engine.len(), 0);
    }

    #[test]
    fn of_an_origins_answer_nothing_goes_out_that_is_not_safe() {
        let mut engine = begun(DISK, Side::Here);
        assert_eq!(engine.append(ID, Part::Response, vec![1; 100].into(), false), Appended::Taken);
        write(&mut engine);
        assert_eq!(engine.append(ID, Part::Response, vec![2; 50].into(), true), Appended::Taken);
        let sent = |records: Vec<Record>| {
            records
                .into_iter()
                .filter_map(|record| match record {
                    Record::Data { bytes, is_last, .. } => Some((bytes.len(), is_last)),
                    _ => None,
                })
                .collect::<Vec<_>>()
        };
        assert_eq!(sent(say(&mut engine, 0)), [(100, false)]);
        write(&mut engine);
        assert_eq!(sent(say(&mut engine, 0)), [(50, true)]);
    }

    /// A neighbour without a journal is restarted: it knows nothing of what it had answered for.
    #[test]
    fn what_a_neighbour_has_lost_is_found_out() {
        let mut engine = begun(LIMITS, Side::Peer(name(1)));
        engine.hear(NOW, &name(0), data(Part::Request, 10, 20, true), &account());
        write(&mut engine);
        say(&mut engine, 1);
        engine.hear(NOW, &name(1), held(Part::Request, 24, true), &account());
        engine.closed(&name(1));
        engine.opened(&name(1));
        let words = say(&mut engine, 1);
        assert_eq!(words, [held(Part::Response, 0, false)]);
        // As long as the answer has not begun, its neighbour says nothing to that.
        let mut next = begun(LIMITS, Side::Here);
        next.hear(NOW, &name(0), words[0].clone(), &account());
        assert!(next.is_for_here(ID));
        let mut next = super::engine(LIMITS);
        next.opened(&name(0));
        next.hear(NOW, &name(0), words[0].clone(), &account());
        for record in say(&mut next, 0) {
            engine.hear(NOW, &name(1), record, &account());
        }
        assert_eq!(gone(&mut engine, &name(0)), Some(502));
    }

    #[test]
    fn a_tunnel_that_is_over_is_not_begun_anew() {
        let mut engine = begun(LIMITS, Side::Here);
        engine.fail(ID, 502, "to begin with");
        let mut engine = super::engine(LIMITS);
        engine.opened(&name(0));
        engine.hear(NOW, &name(0), Record::Begin { id: ID, left: 1_000_000 }, &account());
        engine.hear(NOW, &name(0), data(Part::Request, 0, 10, true), &account());
        engine.take_in(ID, &account(), true);
        write(&mut engine);
        while engine.read(ID, Part::Request, 99).is_some() {}
        engine.append(ID, Part::Response, vec![1; 10].into(), true);
        write(&mut engine);
        say(&mut engine, 0);
        engine.hear(NOW, &name(0), held(Part::Response, 10, true), &account());
        assert_eq!(engine.len(), 0);
        // Whoever was restarted before it heard that.
        engine.opened(&name(0));
        assert_eq!(say(&mut engine, 0), [], "it is not said unasked");
        engine.hear(NOW, &name(0), Record::Begin { id: ID, left: 1_000_000 }, &account());
        assert_eq!(engine.len(), 0);
        assert_eq!(say(&mut engine, 0), [Record::Done { id: ID }]);
        engine.expire(Duration::from_secs(2000));
        assert_eq!(engine.deadline(), None);
    }

    #[test]
    fn a_neighbour_that_hears_nothing_costs_the_others_nothing() {
        let mut engine = engine(Limits { exchanges: 10, ..LIMITS });
        engine.opened(&name(0));
        engine.opened(&name(9));
        for number in 0..40_000_u32 {
            let mut id = [0; 16];
            id[..4].copy_from_slice(&number.to_be_bytes());
            let id = ExchangeId(id);
            engine.begin(NOW, id, Side::Peer(name(9)), Duration::from_secs(1), &account(), false).unwrap();
            // It had heard of each.
            if number % 2 == 0 {
                engine.append(id, Part::Request, vec![1; 10].into(), true);
                write(&mut engine);
                say(&mut engine, 9);
            }
            engine.fail(id, 499, "its client is gone");
        }
        assert!(engine.ended_of(&name(9)) <= 16 << 10, "{}", engine.ended_of(&name(9)));
        engine.hear(NOW, &name(0), Record::Begin { id: ID, left: 1_000_000 }, &account());
        assert_eq!(engine.len(), 1);
        engine.expire(Duration::from_secs(2));
        assert_eq!(engine.ended_of(&name(9)), 0);
    }
}
