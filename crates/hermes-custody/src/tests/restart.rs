//! Exchanges restored from a journal: they continue where that is safe, and never run twice.
//!
//! In: the content of a journal, and records of neighbours. Out: forwarded bytes.

use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use hermes_wire::custody::{AckReason, Direction, Record};

use super::super::engine::{Durability, Engine, Entry, Limits, Output, RestoredStream, Side};
use super::super::journal_record::{self, Intent, JournalRecord};
use super::super::service::CustodyService;
use super::super::stream_state::Progress;
use super::alone::{DISK, ID, NOW, begun, data, gone, held, say, write};
use super::{account, engine, name};

/// A restored exchange from n0 to n1, with a complete request of 94 bytes, and no response yet.
fn restored() -> Engine {
    let mut engine = engine(DISK);
    let request = RestoredStream { head: Some((10, 4)), pieces: vec![(Progress { offset: 4, is_whole: true }, 90)] };
    let sides = (Side::Peer(name(0)), Side::Peer(name(1)));
    let time = (NOW, Duration::from_secs(900), Duration::from_secs(1000));
    engine.restore(ID, sides, time, &account(), false, [request, RestoredStream::default()]);
    engine.opened(&name(1));
    engine
}

/// The age of an exchange survives a restart.
#[test]
fn an_exchange_is_as_old_as_it_was() {
    assert_eq!(restored().age(Duration::from_secs(7), ID), Some(Duration::from_secs(107)));
}

/// Only the previous node knows whether a restored exchange had ended.
#[test]
fn nothing_goes_on_before_it_is_known_where_it_came_from() {
    let reads = |engine: &mut Engine| say(engine, 1).into_iter().find(|one| matches!(one, Record::Begin { .. }));
    let mut engine = restored();
    assert_eq!(say(&mut engine, 1), []);
    engine.opened(&name(0));
    assert_eq!(say(&mut engine, 0), [held(Direction::Request, 100, true)], "it is asked about");
    assert_eq!(say(&mut engine, 1), []);
    engine.receive(NOW, &name(0), held(Direction::Response, 0, false), &account());
    assert!(reads(&mut engine).is_some());
    // A previous node that does not know the exchange had received its response, or no longer wants it.
    let mut engine = restored();
    engine.opened(&name(0));
    engine.receive(NOW, &name(0), Record::Done { id: ID }, &account());
    assert_eq!((reads(&mut engine), engine.len()), (None, 0));
}

/// A node confirms an exchange on each new channel to the next node, even if the next node has acknowledged the whole
/// request.
#[test]
fn who_knows_an_exchange_says_so_on_each_channel() {
    for upto in [50, 94] {
        let mut engine = begun(DISK, Side::Peer(name(1)));
        let rest = Record::Data {
            id: ID,
            part: Direction::Request,
            offset: 10,
            is_last: upto == 94,
            bytes: vec![7; 90].into(),
        };
        engine.receive(NOW, &name(0), rest, &account());
        write(&mut engine);
        say(&mut engine, 1);
        engine.receive(NOW, &name(1), held(Direction::Request, upto, upto == 94), &account());
        engine.closed(&name(1));
        engine.opened(&name(1));
        assert!(say(&mut engine, 1).contains(&held(Direction::Response, 0, false)), "{upto}");
    }
}

/// A killed node may lose a failure that it heard before it wrote it, and would then begin the exchange again.
#[test]
fn whoever_ended_it_forgets_it_once_that_is_written() {
    let mut engine = begun(DISK, Side::Peer(name(1)));
    say(&mut engine, 1);
    let gone = Record::Gone { id: ID, status: 502, reason: "so it is".to_owned() };
    engine.receive(NOW, &name(1), gone.clone(), &account());
    assert_eq!((say(&mut engine, 1), say(&mut engine, 0)), (vec![], vec![gone]));
    engine.is_forgotten(ID);
    assert_eq!(say(&mut engine, 1), [Record::Done { id: ID }]);
}

/// A restored exchange that ends at this node, with 40 bytes of its request on disk.
fn restored_here() -> Engine {
    let mut engine = engine(DISK);
    let request = RestoredStream { head: Some((0, 0)), pieces: vec![(Progress::default(), 40)] };
    let sides = (Side::Peer(name(0)), Side::Here);
    let time = (NOW, Duration::from_secs(900), Duration::from_secs(900));
    engine.restore(ID, sides, time, &account(), false, [request, RestoredStream::default()]);
    engine.opened(&name(0));
    engine
}

/// The disk was full and lacks bytes that the origin had read. The previous node has dropped them, and would wait
/// forever.
#[test]
fn what_was_lost_with_a_process_is_asked_for_and_who_has_it_no_more_says_so() {
    let again =
        |upto| Record::Held { id: ID, part: Direction::Request, upto, is_whole: false, behind: AckReason::Again };
    assert_eq!(say(&mut restored_here(), 0), [again(40)]);
    for (held_before, is_whole, becomes) in
        [(40, false, None), (20, false, None), (60, false, Some(502)), (94, true, Some(502))]
    {
        let mut engine = begun(DISK, Side::Peer(name(1)));
        engine.receive(NOW, &name(0), data(Direction::Request, 10, 90, true), &account());
        write(&mut engine);
        say(&mut engine, 1);
        engine.receive(NOW, &name(1), held(Direction::Request, held_before, is_whole), &account());
        engine.closed(&name(1));
        engine.opened(&name(1));
        engine.receive(NOW, &name(1), again(40), &account());
        assert_eq!(gone(&mut engine, &name(0)), becomes, "{held_before}");
    }
}

/// A restarted node does not request bytes that the next node may hold already.
#[test]
fn a_node_between_waits_for_what_the_next_one_says() {
    let mut engine = engine(DISK);
    let request = RestoredStream { head: Some((0, 0)), pieces: vec![(Progress::default(), 40)] };
    let sides = (Side::Peer(name(0)), Side::Peer(name(1)));
    let time = (NOW, Duration::from_secs(900), Duration::from_secs(900));
    engine.restore(ID, sides, time, &account(), false, [request, RestoredStream::default()]);
    [0, 1].iter().for_each(|peer| engine.opened(&name(*peer)));
    engine.receive(NOW, &name(0), data(Direction::Request, 60, 10, false), &account());
    assert_eq!(say(&mut engine, 0), [held(Direction::Request, 40, false)]);
    engine.receive(NOW, &name(1), held(Direction::Request, 60, false), &account());
    let again =
        |upto| Record::Held { id: ID, part: Direction::Request, upto, is_whole: false, behind: AckReason::Again };
    assert_eq!(say(&mut engine, 0), [again(60)]);
    engine.receive(NOW, &name(0), data(Direction::Request, 60, 10, false), &account());
    // Data in flight after the gap is not requested twice.
    engine.receive(NOW, &name(0), data(Direction::Request, 80, 10, false), &account());
    write(&mut engine);
    assert_eq!(say(&mut engine, 0), [again(70)]);
}

/// A node that is killed before it has written a failure begins the exchange again. A neighbour that heard of the end
/// does not run it twice.
#[test]
fn what_has_ended_is_not_begun_again() {
    let mut engine = begun(DISK, Side::Here);
    engine.receive(NOW, &name(0), Record::Gone { id: ID, status: 502, reason: "so it is".to_owned() }, &account());
    assert_eq!(say(&mut engine, 0), [Record::Done { id: ID }]);
    engine.opened(&name(0));
    engine.receive(NOW, &name(0), Record::Begin { id: ID, left: 1000 }, &account());
    assert_eq!((say(&mut engine, 0), engine.len()), (vec![Record::Done { id: ID }], 0));
}

/// A node that waits to forget an end forgets it durably; no other node needs that.
#[test]
fn an_end_that_is_waited_for_survives_what_its_bytes_do() {
    let survives = |engine: &mut Engine| {
        std::iter::from_fn(|| engine.output()).find_map(|output| match output {
            Output::Keep { entry: Entry::Forget, survives, .. } => Some(survives),
            _ => None,
        })
    };
    let limits = Limits { survives: Durability::Power, ..DISK };
    let mut engine = begun(limits, Side::Peer(name(1)));
    let record = Record::Gone { id: ID, status: 502, reason: "so it is".to_owned() };
    engine.receive(NOW, &name(1), record, &account());
    assert_eq!(survives(&mut engine), Some(Durability::Power));
    let mut engine = begun(limits, Side::Peer(name(1)));
    engine.fail(ID, 502, "so it is");
    assert_eq!(survives(&mut engine), Some(Durability::Nothing));
}

/// Damage makes the intents of orders doubtful. The doubt survives another restart, although the repaired journal is
/// sound.
#[test]
fn a_doubt_survives_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let _guard = runtime.enter();
    let begin = |notes: &mut BytesMut| {
        let (from, to, account) = (Side::Peer(name(0)), Side::Here, account());
        let begin = JournalRecord::Begin { from, account: account.clone(), deadline: u64::MAX >> 2, life: 1000 };
        journal_record::put(ID, &begin, notes);
        journal_record::put(ID, &JournalRecord::Lead { to, account, is_tunnel: false }, notes);
    };
    let intent = || {
        let office = Arc::new(CustodyService::new());
        office.will_store();
        office.store_in(directory.path()).unwrap();
        let intent = office.resumed(ID).unwrap().intent;
        office.stop();
        intent
    };
    let file = directory.path().join(format!("{:012}.log", 0));
    let mut notes = BytesMut::new();
    begin(&mut notes);
    std::fs::write(&file, &notes).unwrap();
    assert_eq!(intent(), None);
    // A record of one byte with a wrong checksum.
    notes.extend_from_slice(&[1, 0, 0, 0, 7, 7, 7, 7, 1]);
    std::fs::write(&file, &notes).unwrap();
    assert_eq!([intent(), intent()], [Some(Intent::Possible); 2]);
}

/// Two adjacent nodes were killed. The second one does not continue before the first one confirms the exchange,
/// although the first one has nothing left to send. Either may restart first.
#[test]
fn a_node_between_makes_the_next_one_go_on() {
    let greeting = held(Direction::Response, 0, false);
    for upto in [40, 94] {
        let all = held(Direction::Request, upto, upto == 94);
        let mut engine = restored();
        engine.opened(&name(0));
        engine.receive(NOW, &name(1), all.clone(), &account());
        assert_eq!(say(&mut engine, 1), [], "nobody vouches for it");
        engine.receive(NOW, &name(0), greeting.clone(), &account());
        assert!(say(&mut engine, 1).contains(&greeting), "{upto}");

        let mut engine = restored();
        engine.opened(&name(0));
        engine.receive(NOW, &name(0), greeting.clone(), &account());
        engine.receive(NOW, &name(1), all.clone(), &account());
        assert!(say(&mut engine, 1).contains(&greeting), "{upto}: it was back first");
    }
}

/// The next node restarted, and its acknowledgement of the whole request was lost with the channel. The next node
/// repeats it, and waits until this node confirms the exchange.
#[test]
fn who_had_not_heard_that_it_is_held_makes_the_next_one_go_on() {
    let mut engine = begun(DISK, Side::Peer(name(1)));
    engine.receive(NOW, &name(0), data(Direction::Request, 10, 90, true), &account());
    write(&mut engine);
    say(&mut engine, 1);
    engine.closed(&name(1));
    engine.opened(&name(1));
    engine.receive(NOW, &name(1), held(Direction::Request, 94, true), &account());
    assert_eq!(say(&mut engine, 1), [held(Direction::Response, 0, false)]);
}

/// An order failed after it may have run. A neighbour that has forgotten the order, or never wrote it, and sends it
/// again, learns how it ended, even after a restart of this node.
#[test]
fn an_order_that_may_have_been_done_is_not_begun_again() {
    let gone = Record::Gone { id: ID, status: 502, reason: "so it is".to_owned() };
    let again = Record::Begin { id: ID, left: 1000 };
    for hears in [None, Some(gone.clone()), Some(Record::Done { id: ID })] {
        let mut engine = begun(DISK, Side::Here);
        engine.intend(ID);
        let ends_here = hears.is_none();
        match hears {
            None => engine.fail(ID, 502, "so it is"),
            Some(record) => engine.receive(NOW, &name(0), record, &account()),
        }
        let kept = std::iter::from_fn(|| engine.output()).find_map(|output| match output {
            Output::Keep { entry: Entry::Gone { peer, status, .. }, survives, .. } => Some((peer, status, survives)),
            _ => None,
        });
        assert_eq!(kept, Some((name(0), 502, Durability::Process)));
        engine.opened(&name(0));
        assert_eq!(say(&mut engine, 0).contains(&gone), ends_here, "it is said unasked to who has not said so itself");
        // A neighbour without the exchange sends this record, and so does one that has confirmed its end.
        engine.receive(NOW, &name(0), Record::Done { id: ID }, &account());
        engine.receive(NOW, &name(0), again.clone(), &account());
        assert_eq!(engine.len(), 0);
        assert!(matches!(&say(&mut engine, 0)[..], [Record::Gone { id: ID, status: 502, .. }]));
        engine.expire(Duration::from_secs(2000));
        let forgets = |output| matches!(output, Output::Keep { entry: Entry::Forget, .. });
        assert!(std::iter::from_fn(|| engine.output()).any(forgets), "it has had its time");
    }
    // A route without a journal deletes the entries that were written before the route was known.
    let mut engine = begun(super::LIMITS, Side::Here);
    engine.intend(ID);
    engine.fail(ID, 502, "so it is");
    let forgets = |output| matches!(output, Output::Keep { entry: Entry::Forget, .. });
    assert!(std::iter::from_fn(|| engine.output()).any(forgets));
    let mut engine = super::engine(DISK);
    engine.restore_end(ID, name(0), gone.clone(), Duration::from_secs(9));
    engine.opened(&name(0));
    assert_eq!(say(&mut engine, 0), std::slice::from_ref(&gone));
    engine.receive(NOW, &name(0), again, &account());
    assert_eq!((say(&mut engine, 0), engine.len()), (vec![gone], 0));
}

/// A neighbour begins an exchange, and is killed before it sends data. The node asks it, and drops the exchange if the
/// neighbour does not know it.
#[test]
fn what_was_begun_and_no_more_is_asked_about() {
    let mut engine = engine(DISK);
    engine.opened(&name(0));
    engine.receive(NOW, &name(0), Record::Begin { id: ID, left: 1000 }, &account());
    assert_eq!((say(&mut engine, 0), engine.len()), (vec![], 1));
    engine.closed(&name(0));
    engine.opened(&name(0));
    assert_eq!(say(&mut engine, 0), [held(Direction::Request, 0, false)]);
    engine.receive(NOW, &name(0), Record::Done { id: ID }, &account());
    assert_eq!(engine.len(), 0);
}
