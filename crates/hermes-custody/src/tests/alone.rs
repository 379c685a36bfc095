//! A single engine with two neighbours; a test carries out each action by hand.
//!
//! In: records, bytes, and durable entries. Out: the bytes that the engine stores, sends and drops.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hermes_wire::custody::{AckReason, Direction, ExchangeId, Record};

use super::super::engine::{Appended, Durability, Engine, Entry, Limits, Output, Side};
use super::{LIMITS, account, engine, name};

pub(super) const DISK: Limits =
    Limits { exchanges: 1000, memory: 1 << 20, disk: 1 << 20, survives: Durability::Process };
pub(super) const ID: ExchangeId = ExchangeId([1; 16]);
pub(super) const NOW: Duration = Duration::ZERO;

/// Carries out all outputs, so that each entry is durable. Returns the released ranges.
pub(super) fn write(engine: &mut Engine) -> Vec<(Direction, u64)> {
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

pub(super) fn data(part: Direction, offset: u64, length: usize, is_last: bool) -> Record {
    Record::Data { id: ID, part, offset, is_last, bytes: vec![7; length].into() }
}

pub(super) fn held(part: Direction, upto: u64, is_whole: bool) -> Record {
    Record::Held { id: ID, part, upto, is_whole, behind: AckReason::Taken }
}

/// An engine with an exchange that came from n0 and is assigned to `to`.
pub(super) fn begun(limits: Limits, to: Side) -> Engine {
    let mut engine = engine(limits);
    for peer in [name(0), name(1)] {
        engine.opened(&peer);
    }
    engine.receive(NOW, &name(0), Record::Begin { id: ID, left: 1_000_000 }, &account());
    engine.receive(NOW, &name(0), data(Direction::Request, 0, 10, false), &account());
    match to {
        Side::Here => engine.accept_local(ID, &account(), false),
        to => _ = engine.lead(ID, (to, false), &account(), 10, Bytes::from_static(b"head")),
    }
    write(&mut engine);
    engine
}

pub(super) fn say(engine: &mut Engine, peer: usize) -> Vec<Record> {
    std::iter::from_fn(|| engine.next_record(NOW, &name(peer), None)).collect()
}

/// The status that a neighbour receives for the failed exchange.
pub(super) fn gone(engine: &mut Engine, peer: &Arc<str>) -> Option<u16> {
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
        engine.receive(Duration::ZERO, &name(0), Record::Begin { id, left: 1000 }, &account());
        engine.fail(id, said, "so it is");
        assert_eq!(gone(&mut engine, &name(0)), Some(heard), "{said}");
    }
}

#[test]
fn what_passes_by_a_disk_that_does_not_keep_up_is_bounded() {
    let mut engine = begun(DISK, Side::Peer(name(1)));
    let piece = |at| data(Direction::Request, 10 + at * 16_384, 16_384, false);
    for at in 0..200 {
        engine.receive(NOW, &name(0), piece(at), &account());
        say(&mut engine, 1);
        let upto = engine.have(ID, Direction::Request).unwrap().offset;
        engine.receive(NOW, &name(1), held(Direction::Request, upto, false), &account());
    }
    let had = engine.have(ID, Direction::Request).unwrap().offset;
    assert!((370_000..=400_000).contains(&had), "half of what its direction may have: {had}");
    say(&mut engine, 0);
    // The entries are durable now, so the refused neighbour sends again.
    write(&mut engine);
    let again = Record::Held {
        id: ID,
        part: Direction::Request,
        upto: had - 4 + 10,
        is_whole: false,
        behind: AckReason::Again,
    };
    assert_eq!(say(&mut engine, 0), [again]);
    engine.receive(NOW, &name(0), piece((had - 4) / 16_384), &account());
    assert_eq!(engine.have(ID, Direction::Request).unwrap().offset, had + 16_384);
}

#[test]
fn what_found_no_room_is_not_under_way() {
    let mut engine = engine(LIMITS);
    engine.opened(&name(1));
    let ids = [1, 2].map(|number| ExchangeId([number; 16]));
    let bytes = |length: usize| Bytes::from(vec![7; length]);
    for (id, length) in ids.into_iter().zip([100_000, 10_000]) {
        engine.begin(NOW, id, Side::Peer(name(1)), Duration::from_secs(9), (&account(), &name(77)), false).unwrap();
        assert_eq!(engine.append(id, Direction::Request, bytes(length), true), Appended::Taken);
        write(&mut engine);
        if id == ids[0] {
            // Sends until the window is full.
            while engine.next_record(NOW, &name(1), Some(50_000)).is_some() {}
        }
    }
    assert_eq!(engine.next_record(NOW, &name(1), Some(50_000)), Some(Record::Begin { id: ids[1], left: 9_000 }));
    assert_eq!(engine.next_record(NOW, &name(1), Some(50_000)), None, "the first one is under way");
    let said = |behind| Record::Held { id: ids[0], part: Direction::Request, upto: 16_384, is_whole: false, behind };
    engine.receive(NOW, &name(1), said(AckReason::NoRoom), &account());
    let next = engine.next_record(NOW, &name(1), Some(50_000));
    assert!(matches!(next, Some(Record::Data { id, .. }) if id == ids[1]), "{next:?}");
    assert_eq!(engine.next_record(NOW, &name(1), Some(50_000)), None, "it waits until there is room");
    engine.receive(NOW, &name(1), said(AckReason::Again), &account());
    let next = engine.next_record(NOW, &name(1), Some(50_000));
    assert!(matches!(next, Some(Record::Data { id, offset: 16_384, .. }) if id == ids[0]), "{next:?}");
}

/// Appends until the engine refuses. Returns the accepted bytes, and whether the producer must wait for its path.
fn bring(engine: &mut Engine) -> (u64, bool) {
    let piece = Bytes::from(vec![7; 16_384]);
    for count in 0..1000 {
        match engine.append(ID, Direction::Response, piece.clone(), false) {
            Appended::Taken => {}
            Appended::Ahead => return (16_384 * count, true),
            Appended::Full | Appended::Gone => unreachable!(),
        }
    }
    (16_384 * 1000, false)
}

/// Whether the producer may continue.
fn is_let_on(engine: &mut Engine) -> bool {
    std::iter::from_fn(|| engine.output()).filter(|output| matches!(output, Output::Onward { id: ID })).count() > 0
}

#[test]
fn what_is_brought_is_not_far_ahead_of_a_path_that_is_up() {
    let mut engine = begun(LIMITS, Side::Here);
    assert_eq!(bring(&mut engine), ((1 << 20) + 16_384, true));
    let mut at = 0;
    let whole = (1 << 20) + 16_384;
    while at < whole {
        write(&mut engine);
        let sent: u64 = say(&mut engine, 0)
            .into_iter()
            .map(|record| if let Record::Data { bytes, .. } = record { bytes.len() as u64 } else { 0 })
            .sum();
        at += sent;
        assert!(sent > 0);
        assert_eq!(is_let_on(&mut engine), at >= whole - (1 << 19) && at - sent < whole - (1 << 19), "{at}");
        engine.receive(NOW, &name(0), held(Direction::Response, at, false), &account());
    }
    assert_eq!(bring(&mut engine), (whole, true));
    // The link is down from here on, and everything fits.
    engine.closed(&name(0));
    assert!(is_let_on(&mut engine));
    assert_eq!(bring(&mut engine), (16_384 * 1000, false));
}

/// A link can be down without detection, or so slow that an origin would time out.
#[test]
fn nobody_waits_for_long_for_a_path_that_takes_nothing() {
    let mut engine = begun(LIMITS, Side::Here);
    assert_eq!(bring(&mut engine), ((1 << 20) + 16_384, true));
    let mut late = |millis| {
        engine.expire(Duration::from_millis(millis));
        is_let_on(&mut engine)
    };
    assert_eq!([100, 1000, 1100, 2000].map(&mut late), [false, false, true, false]);
    assert_eq!(bring(&mut engine), (16_384 * 1000, false));
}

#[test]
fn what_has_passed_is_not_kept_on_disk() {
    let mut engine = begun(DISK, Side::Peer(name(1)));
    let (mut released, mut at) = (0, 4);
    // Sixteen times the limit of the account.
    for piece in 0..1024 {
        engine.receive(NOW, &name(0), data(Direction::Request, 10 + piece * 16_384, 16_384, piece == 1023), &account());
        released = write(&mut engine).into_iter().map(|(_, upto)| upto).max().unwrap_or(released);
        say(&mut engine, 1);
        at += 16_384;
        engine.receive(NOW, &name(1), held(Direction::Request, at, piece == 1023), &account());
        released = write(&mut engine).into_iter().map(|(_, upto)| upto).max().unwrap_or(released);
        assert!(at - released <= 256 << 10, "{at} {released}");
    }
    assert!(engine.have(ID, Direction::Request).unwrap().is_whole);
}

#[test]
fn what_may_be_read_again_gives_way_to_what_has_to_be_kept() {
    let mut engine = begun(DISK, Side::Here);
    let mut released = Vec::new();
    for piece in 0..100 {
        engine.receive(NOW, &name(0), data(Direction::Request, 10 + piece * 16_384, 16_384, false), &account());
        released.extend(write(&mut engine));
        while engine.read(ID, Direction::Request, usize::MAX).is_some() {}
        assert_eq!(engine.have(ID, Direction::Request).unwrap().offset, 10 + (piece + 1) * 16_384, "refused");
        assert_eq!(engine.is_torn(ID, Direction::Request), !released.is_empty());
    }
    assert!((1..10).contains(&released.len()), "{released:?}");
}

#[test]
fn small_pieces_are_counted_for_what_they_take() {
    let mut engine = begun(DISK, Side::Peer(name(1)));
    for at in 0..100_000 {
        engine.receive(NOW, &name(0), data(Direction::Request, 10 + at, 1, false), &account());
        write(&mut engine);
    }
    let (memory, disk) = engine.kept();
    // The last piece may cost more than its byte.
    assert!(memory <= (1 << 20) + 200 && disk <= 1 << 20, "{memory} {disk}");
    assert!(engine.have(ID, Direction::Request).unwrap().offset < 20_000);
}

#[test]
fn small_pieces_that_were_read_are_in_nobodys_way() {
    let mut engine = begun(DISK, Side::Here);
    for at in 0..50_000 {
        engine.receive(NOW, &name(0), data(Direction::Request, 10 + at, 1, false), &account());
        write(&mut engine);
        while engine.read(ID, Direction::Request, usize::MAX).is_some() {}
    }
    assert_eq!(engine.have(ID, Direction::Request).unwrap().offset, 50_010);
}

#[test]
fn what_the_next_one_has_need_not_be_read() {
    let mut engine = begun(Limits { memory: 80_000, ..DISK }, Side::Peer(name(1)));
    engine.receive(NOW, &name(0), data(Direction::Request, 10, 30_000, false), &account());
    write(&mut engine);
    engine.closed(&name(1));
    engine.opened(&name(1));
    say(&mut engine, 1);
    engine.receive(NOW, &name(1), held(Direction::Request, 20_000, false), &account());
    engine.is_unreadable(ID, Direction::Request, 4);
    assert_eq!(engine.len(), 1, "it has passed");
    engine.is_unreadable(ID, Direction::Request, 20_004);
    assert_eq!(engine.len(), 0);
}

#[test]
fn of_an_origins_answer_nothing_goes_out_that_is_not_safe() {
    let mut engine = begun(DISK, Side::Here);
    assert_eq!(engine.append(ID, Direction::Response, vec![1; 100].into(), false), Appended::Taken);
    write(&mut engine);
    assert_eq!(engine.append(ID, Direction::Response, vec![2; 50].into(), true), Appended::Taken);
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

/// A neighbour without a journal restarts, and has lost the exchanges for which it was responsible.
#[test]
fn what_a_neighbour_has_lost_is_found_out() {
    let mut engine = begun(LIMITS, Side::Peer(name(1)));
    engine.receive(NOW, &name(0), data(Direction::Request, 10, 20, true), &account());
    write(&mut engine);
    say(&mut engine, 1);
    engine.receive(NOW, &name(1), held(Direction::Request, 24, true), &account());
    engine.closed(&name(1));
    engine.opened(&name(1));
    let words = say(&mut engine, 1);
    assert_eq!(words, [held(Direction::Response, 0, false)]);
    // The neighbour does not respond as long as its response has not begun.
    let mut next = begun(LIMITS, Side::Here);
    next.receive(NOW, &name(0), words[0].clone(), &account());
    assert!(next.is_for_here(ID));
    let mut next = super::engine(LIMITS);
    next.opened(&name(0));
    next.receive(NOW, &name(0), words[0].clone(), &account());
    for record in say(&mut next, 0) {
        engine.receive(NOW, &name(1), record, &account());
    }
    assert_eq!(gone(&mut engine, &name(0)), Some(502));
}

#[test]
fn a_tunnel_that_is_over_is_not_begun_anew() {
    let mut engine = begun(LIMITS, Side::Here);
    engine.fail(ID, 502, "to begin with");
    let mut engine = super::engine(LIMITS);
    engine.opened(&name(0));
    engine.receive(NOW, &name(0), Record::Begin { id: ID, left: 1_000_000 }, &account());
    engine.receive(NOW, &name(0), data(Direction::Request, 0, 10, true), &account());
    engine.accept_local(ID, &account(), true);
    write(&mut engine);
    while engine.read(ID, Direction::Request, 99).is_some() {}
    engine.append(ID, Direction::Response, vec![1; 10].into(), true);
    write(&mut engine);
    say(&mut engine, 0);
    engine.receive(NOW, &name(0), held(Direction::Response, 10, true), &account());
    assert_eq!(engine.len(), 0);
    // The neighbour restarted before it heard that.
    engine.opened(&name(0));
    assert_eq!(say(&mut engine, 0), [], "it is not said unasked");
    engine.receive(NOW, &name(0), Record::Begin { id: ID, left: 1_000_000 }, &account());
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
        engine.begin(NOW, id, Side::Peer(name(9)), Duration::from_secs(1), (&account(), &name(77)), false).unwrap();
        // The neighbour was informed of every second exchange.
        if number % 2 == 0 {
            engine.append(id, Direction::Request, vec![1; 10].into(), true);
            write(&mut engine);
            say(&mut engine, 9);
        }
        engine.fail(id, 499, "its client is gone");
    }
    assert!(engine.ended_of(&name(9)) <= 16 << 10, "{}", engine.ended_of(&name(9)));
    engine.receive(NOW, &name(0), Record::Begin { id: ID, left: 1_000_000 }, &account());
    assert_eq!(engine.len(), 1);
    engine.expire(Duration::from_secs(2));
    assert_eq!(engine.ended_of(&name(9)), 0);
}

/// A client whose request timed out receives the reason that its node knows.
#[test]
fn who_had_no_channel_is_told_why() {
    let reason = |trouble: Option<&str>| {
        let mut engine = engine(LIMITS);
        engine.begin(NOW, ID, Side::Peer(name(1)), Duration::from_secs(9), (&account(), &name(77)), false).unwrap();
        trouble.inspect(|why| engine.is_troubled(&name(1), why));
        engine.expire(Duration::from_secs(9));
        std::iter::from_fn(|| engine.output()).find_map(|output| match output {
            Output::Failed { status: 504, reason, .. } => Some(reason),
            _ => None,
        })
    };
    assert_eq!(reason(None).unwrap(), "custody deadline exceeded; no path was up for long enough");
    assert_eq!(reason(Some("403")).unwrap(), "custody deadline exceeded; no channel was open to n1: 403");
}
