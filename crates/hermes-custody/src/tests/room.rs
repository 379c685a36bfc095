//! Distribution of room among exchanges, and wake-ups of those that wait for it.
//!
//! In: an engine whose neighbours send more than it may store. Out: the bytes that it accepts, and the neighbours that
//! it informs of free room.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hermes_wire::custody::{AckReason, Direction, ExchangeId, Record};

use super::super::engine::{Appended, Durability, Engine, Limits, Output, Side};
use super::alone::{DISK, ID, NOW, begun, data, gone, held, say, write};
use super::{LIMITS, account, content, engine, name};

const SMALL: Limits = Limits { memory: 1 << 20, ..LIMITS };

#[test]
fn what_arrives_for_a_route_that_holds_what_it_may_waits() {
    let mut engine = engine(LIMITS);
    let small: Arc<str> = Arc::from("small");
    engine.allow(&small, Limits { exchanges: 2, memory: 1000, disk: 0, survives: Durability::Nothing });
    let begin = |engine: &mut Engine, number, length| {
        let id = ExchangeId([number; 16]);
        engine.receive(Duration::ZERO, &name(0), Record::Begin { id, left: 1000 }, &account());
        let bytes = content(id, length);
        let data = Record::Data { id, part: Direction::Request, offset: 0, is_last: true, bytes };
        engine.receive(Duration::ZERO, &name(0), data, &account());
        id
    };
    let lead = |engine: &mut Engine, id| {
        let led = engine.lead(id, (Side::Peer(name(1)), false), &small, 1, Bytes::from_static(b"n"));
        assert_eq!(engine.is_led(id), led == Appended::Taken);
        led
    };
    let [first, second, long] = [(1, 600), (2, 300), (3, 2000)].map(|(number, length)| {
        let id = begin(&mut engine, number, length);
        (id, lead(&mut engine, id))
    });
    assert_eq!(
        [first.1, second.1, long.1],
        [Appended::Taken, Appended::Taken, Appended::Gone],
        "as many as there may be"
    );
    assert_eq!(gone(&mut engine, &name(0)), Some(503));
    engine.fail(second.0, 499, "its client is gone");
    let waits = [(4, 600), (5, 700)].map(|(number, length)| begin(&mut engine, number, length));
    waits.iter().for_each(|id| assert_eq!(lead(&mut engine, *id), Appended::Full));
    while engine.output().is_some() {}
    let has_room = |engine: &mut Engine| std::iter::from_fn(|| engine.output()).any(|one| one == Output::Room);
    assert!(!has_room(&mut engine));
    engine.fail(first.0, 499, "its client is gone");
    assert!(has_room(&mut engine));
    assert_eq!(waits.map(|id| lead(&mut engine, id)), [Appended::Taken, Appended::Full]);
    engine.fail(waits[0], 499, "its client is gone");
    assert!(has_room(&mut engine));
    assert_eq!(lead(&mut engine, waits[1]), Appended::Taken);
}

/// Bytes accepted from a neighbour for an exchange whose next node acknowledges nothing.
fn fill(engine: &mut Engine, id: ExchangeId, part: Direction) -> u64 {
    fill_by(engine, id, part, 16_384)
}

/// The same as `fill`, with pieces of this length.
fn fill_by(engine: &mut Engine, id: ExchangeId, part: Direction, length: usize) -> u64 {
    let from = name(if part == Direction::Request { 0 } else { 1 });
    let begin = engine.have(id, part).unwrap().offset;
    for at in (begin..).step_by(length).take(4096) {
        let bytes = vec![7; length].into();
        let offset = at - 4 + if part == Direction::Request { 10 } else { 0 };
        engine.receive(NOW, &from, Record::Data { id, part, offset, is_last: false, bytes }, &account());
        write(engine);
    }
    engine.have(id, part).unwrap().offset - begin
}

fn led(engine: &mut Engine, number: u8) -> ExchangeId {
    let id = ExchangeId([number; 16]);
    engine.receive(NOW, &name(0), Record::Begin { id, left: 1_000_000 }, &account());
    let head = Record::Data { id, part: Direction::Request, offset: 0, is_last: false, bytes: vec![7; 10].into() };
    engine.receive(NOW, &name(0), head, &account());
    engine.lead(id, (Side::Peer(name(1)), false), &account(), 10, Bytes::from_static(b"head"));
    engine.settle(id, Direction::Response, 0, Bytes::from_static(b"head"));
    write(engine);
    id
}

#[test]
fn what_does_not_move_leaves_room_to_what_does() {
    for limits in [Limits { memory: 1 << 20, ..LIMITS }, DISK] {
        let mut engine = engine(limits);
        [name(0), name(1)].iter().for_each(|peer| engine.opened(peer));
        let ids: Vec<_> = (1..6).map(|number| led(&mut engine, number)).collect();
        let filled: Vec<_> = ids.iter().map(|id| fill(&mut engine, *id, Direction::Request)).collect();
        // The first stream fills half of three quarters, the next one half of the rest, and so on.
        assert!(filled[0] > 370_000 && filled[1] > 180_000 && filled[4] > 15_000, "{filled:?}");
        assert!(filled.iter().sum::<u64>() <= 7 << 17, "{filled:?}");
        // The other direction and small streams still have room, whatever the piece size of the others was.
        assert!(fill(&mut engine, ids[0], Direction::Response) > 50_000);
        fill_by(&mut engine, ids[1], Direction::Request, 50);
        let small = led(&mut engine, 9);
        assert_eq!(engine.have(small, Direction::Request).unwrap().offset, 4);
        assert!(fill_by(&mut engine, small, Direction::Request, 300) >= 16_000);
    }
}

/// An exchange of this size to a neighbour without a channel.
fn dark(engine: &mut Engine, number: u8, bytes: usize) -> ExchangeId {
    let id = ExchangeId([number; 16]);
    engine.begin(NOW, id, Side::Peer(name(9)), Duration::from_secs(900), (&account(), &name(77)), false).unwrap();
    while engine.have(id, Direction::Request).unwrap().offset < bytes as u64 {
        assert_eq!(engine.append(id, Direction::Request, vec![1; 1000].into(), false), Appended::Taken);
        write(engine);
    }
    id
}

fn outputs(engine: &mut Engine) -> Vec<Output> {
    std::iter::from_fn(|| engine.output()).collect()
}

#[test]
fn who_was_refused_goes_on_when_there_is_room() {
    let mut engine = engine(SMALL);
    engine.opened(&name(1));
    for number in 10..58 {
        dark(&mut engine, number, 16_000);
    }
    let another = dark(&mut engine, 60, 12_000);
    engine.begin(NOW, ID, Side::Peer(name(1)), Duration::from_secs(900), (&account(), &name(77)), false).unwrap();
    let piece = Bytes::from(vec![7; 40_000]);
    let append = |engine: &mut Engine| engine.append(ID, Direction::Request, piece.slice(..16_000), false);
    while append(&mut engine) == Appended::Taken {
        write(&mut engine);
    }
    let upto = engine.have(ID, Direction::Request).unwrap().offset;
    assert!(upto > 0);
    say(&mut engine, 1);
    outputs(&mut engine);
    // The usage of this exchange has shrunk: it is told at once, however little became free.
    engine.receive(NOW, &name(1), held(Direction::Request, 1000, false), &account());
    assert!(outputs(&mut engine).contains(&Output::Onward { id: ID }));
    assert_eq!(append(&mut engine), Appended::Full);
    // Another exchange's usage has shrunk by little, so the waiting producer is woken at the next sweep.
    engine.fail(another, 499, "its client is gone");
    assert!(!outputs(&mut engine).contains(&Output::Room));
    engine.expire(Duration::from_millis(250));
    assert!(outputs(&mut engine).contains(&Output::Room));
    assert_eq!(append(&mut engine), Appended::Full);
    engine.expire(Duration::from_millis(500));
    assert!(!outputs(&mut engine).contains(&Output::Room), "there is no more of it than before");
}

#[test]
fn a_head_that_found_no_room_is_sent_again() {
    let mut before = engine(LIMITS);
    before.opened(&name(1));
    before.begin(NOW, ID, Side::Peer(name(1)), Duration::from_secs(900), (&account(), &name(77)), false).unwrap();
    assert_eq!(before.append(ID, Direction::Request, vec![2; 2000].into(), true), Appended::Taken);
    write(&mut before);
    let mut engine = engine(SMALL);
    engine.opened(&name(0));
    let mut full: Vec<_> = (10..75).map(|number| dark(&mut engine, number, 14_000)).collect();
    full.push(dark(&mut engine, 75, 6_000));
    let bring = |before: &mut Engine, engine: &mut Engine| {
        say(before, 1).into_iter().for_each(|record| engine.receive(NOW, &name(0), record, &account()));
        write(engine);
        engine.have(ID, Direction::Request).unwrap().offset
    };
    assert_eq!(bring(&mut before, &mut engine), 0);
    let said = |behind| Record::Held { id: ID, part: Direction::Request, upto: 0, is_whole: false, behind };
    assert_eq!(say(&mut engine, 0), [said(AckReason::NoRoom)]);
    before.receive(NOW, &name(1), said(AckReason::NoRoom), &account());
    assert_eq!(say(&mut before, 1), []);
    full.iter().for_each(|id| engine.fail(*id, 499, "its client is gone"));
    assert_eq!(say(&mut engine, 0), [said(AckReason::Again)]);
    before.receive(NOW, &name(1), said(AckReason::Again), &account());
    assert_eq!(bring(&mut before, &mut engine), 2000);
}

/// Otherwise the exchange would outgrow the room that it waits for.
#[test]
fn what_waits_for_its_route_grows_no_more() {
    let mut engine = engine(LIMITS);
    [name(0), name(1)].iter().for_each(|peer| engine.opened(peer));
    let small: Arc<str> = Arc::from("small");
    engine.allow(&small, Limits { exchanges: 100, ..SMALL });
    let sizes = [390_000, 190_000, 95_000, 30_000, 30_000, 30_000, 30_000];
    let others = (50..).zip(sizes).map(|(number, bytes)| {
        let id = ExchangeId([number; 16]);
        engine.begin(NOW, id, Side::Peer(name(9)), Duration::from_secs(900), (&small, &name(77)), false).unwrap();
        assert_eq!(engine.append(id, Direction::Request, vec![1; bytes].into(), false), Appended::Taken);
        id
    });
    let others: Vec<_> = others.collect();
    engine.receive(NOW, &name(0), Record::Begin { id: ID, left: 1_000_000 }, &account());
    let bring = |engine: &mut Engine| {
        let at = engine.have(ID, Direction::Request).unwrap().offset;
        engine.receive(NOW, &name(0), data(Direction::Request, at, 16_384, false), &account());
        write(engine);
        engine.have(ID, Direction::Request).unwrap().offset - at
    };
    (0..16).for_each(|_| assert_eq!(bring(&mut engine), 16_384));
    assert_eq!(bring(&mut engine), 0, "it is not known yet where it goes");
    assert!(say(&mut engine, 0).iter().all(|one| !matches!(one, Record::Held { behind: AckReason::Again, .. })));
    let lead =
        |engine: &mut Engine| engine.lead(ID, (Side::Peer(name(1)), false), &small, 10, Bytes::from_static(b"head"));
    assert_eq!((lead(&mut engine), bring(&mut engine)), (Appended::Full, 0));
    say(&mut engine, 0);
    others.iter().for_each(|id| engine.fail(*id, 499, "its client is gone"));
    assert_eq!(lead(&mut engine), Appended::Taken);
    write(&mut engine);
    let asks = |record: &Record| matches!(record, Record::Held { behind: AckReason::Again, upto: 262_144, .. });
    assert!(say(&mut engine, 0).iter().any(asks), "what was refused is asked for");
}

/// Bytes stored only in memory cannot be read from disk, even if the configuration changes later.
#[test]
fn what_was_never_written_is_not_read_again() {
    let mut engine = begun(SMALL, Side::Peer(name(1)));
    engine.closed(&name(1));
    let piece = |at: u64| data(Direction::Request, 10 + at * 16_384, 16_384, false);
    (0..20).for_each(|at| engine.receive(NOW, &name(0), piece(at), &account()));
    write(&mut engine);
    engine.allow(&account(), DISK);
    engine.receive(NOW, &name(0), piece(20), &account());
    write(&mut engine);
    engine.closed(&name(1));
    engine.opened(&name(1));
    let bytes = |record| if let Record::Data { bytes, .. } = record { bytes.len() } else { 0 };
    let said = std::iter::from_fn(|| engine.next_record(NOW, &name(1), Some(1 << 30)));
    assert_eq!(said.map(bytes).sum::<usize>(), 4 + 21 * 16_384);
    assert!(!outputs(&mut engine).iter().any(|output| matches!(output, Output::Read { .. })));
}

fn begins(engine: &mut Engine, peer: &Arc<str>, numbers: std::ops::Range<u128>) -> usize {
    let before = engine.len();
    for number in numbers {
        let id = ExchangeId(number.to_be_bytes());
        engine.receive(NOW, peer, Record::Begin { id, left: 7 * 24 * 3_600_000 }, &account());
    }
    engine.len() - before
}

/// A neighbour's share does not grow with its number of connections.
#[test]
fn a_neighbour_that_begins_without_end_leaves_half_of_the_exchanges() {
    let mut engine = engine(LIMITS);
    let [one, same, other] = ["flooder by 1", "flooder by 2", "other by 1"].map(Arc::from);
    assert_eq!(begins(&mut engine, &one, 0..400) + begins(&mut engine, &same, 1000..2000), 501);
    assert_eq!(begins(&mut engine, &other, 3000..3200), 200);
    let refused = engine.begin(NOW, ExchangeId([255; 16]), Side::Peer(name(1)), NOW, (&account(), &name(77)), false);
    assert!(refused.is_ok());
}

#[test]
fn what_was_only_begun_is_forgotten_soon_without_a_channel_and_begun_again_with_the_next() {
    let mut engine = engine(LIMITS);
    let peer = name(0);
    engine.opened(&peer);
    assert_eq!(begins(&mut engine, &peer, 0..100), 100);
    let with_data = ExchangeId(7u128.to_be_bytes());
    let data =
        Record::Data { id: with_data, part: Direction::Request, offset: 0, is_last: false, bytes: vec![7; 10].into() };
    engine.receive(NOW, &peer, data, &account());
    let after = |engine: &mut Engine, seconds| {
        engine.expire(Duration::from_secs(seconds));
        let forgotten = std::iter::from_fn(|| engine.output()).filter(|one| matches!(one, Output::Forget { .. }));
        (forgotten.count(), engine.len())
    };
    assert_eq!(after(&mut engine, 100), (0, 100), "its channel is open");
    engine.closed(&peer);
    assert_eq!([101, 110].map(|seconds| after(&mut engine, seconds)), [(0, 100); 2]);
    assert_eq!(after(&mut engine, 111), (99, 1));
    assert_eq!(after(&mut engine, 3600), (0, 1), "what came is kept for its time");
    engine.opened(&peer);
    assert_eq!(begins(&mut engine, &peer, 0..100), 99);
    let told = std::iter::from_fn(|| engine.next_record(NOW, &peer, None));
    assert_eq!(told.filter(|record| matches!(record, Record::Gone { .. } | Record::Done { .. })).count(), 0);
}
