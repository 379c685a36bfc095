//! What was held before this process: it goes on where that is safe, and is done twice nowhere.
//!
//! In: what a journal says, and what neighbours say of it. Out: what is sent on.

use std::time::Duration;

use hermes_wire::custody::{Part, Record};

use super::super::engine::{Engine, Former, Side};
use super::super::half::Upto;
use super::alone::{DISK, ID, NOW, begun, held, say, write};
use super::{account, engine, name};

/// One that came from n0 and goes to n1, whose request of 94 bytes is whole; nothing is known of its response.
fn restored() -> Engine {
    let mut engine = engine(DISK);
    let request = Former { head: Some((10, 4)), pieces: vec![(Upto { offset: 4, is_whole: true }, 90)] };
    let sides = (Side::Peer(name(0)), Side::Peer(name(1)));
    let time = (NOW, Duration::from_secs(900));
    engine.restore(ID, sides, time, &account(), false, [request, Former::default()]);
    engine.opened(&name(1));
    engine
}

/// Whether it was over nobody can tell but whoever it came from.
#[test]
fn nothing_goes_on_before_it_is_known_where_it_came_from() {
    let reads = |engine: &mut Engine| say(engine, 1).into_iter().find(|one| matches!(one, Record::Begin { .. }));
    let mut engine = restored();
    assert_eq!(say(&mut engine, 1), []);
    engine.opened(&name(0));
    assert_eq!(say(&mut engine, 0), [held(Part::Request, 100, true)], "it is asked about");
    assert_eq!(say(&mut engine, 1), []);
    engine.hear(NOW, &name(0), held(Part::Response, 0, false), &account());
    assert!(reads(&mut engine).is_some());
    // Who knows nothing of it had all of its answer, or wants none any more.
    let mut engine = restored();
    engine.opened(&name(0));
    engine.hear(NOW, &name(0), Record::Done { id: ID }, &account());
    assert_eq!((reads(&mut engine), engine.len()), (None, 0));
}

/// It says so of what a node before it has the whole of, too.
#[test]
fn who_knows_an_exchange_says_so_on_each_channel() {
    for upto in [50, 94] {
        let mut engine = begun(DISK, Side::Peer(name(1)));
        let rest =
            Record::Data { id: ID, part: Part::Request, offset: 10, is_last: upto == 94, bytes: vec![7; 90].into() };
        engine.hear(NOW, &name(0), rest, &account());
        write(&mut engine);
        say(&mut engine, 1);
        engine.hear(NOW, &name(1), held(Part::Request, upto, upto == 94), &account());
        engine.closed(&name(1));
        engine.opened(&name(1));
        assert!(say(&mut engine, 1).contains(&held(Part::Response, 0, false)), "{upto}");
    }
}

/// A node that was told that something came to nothing, and is killed before that is written, would offer it once more.
#[test]
fn whoever_ended_it_forgets_it_once_that_is_written() {
    let mut engine = begun(DISK, Side::Peer(name(1)));
    say(&mut engine, 1);
    let gone = Record::Gone { id: ID, status: 502, reason: "so it is".to_owned() };
    engine.hear(NOW, &name(1), gone.clone(), &account());
    assert_eq!((say(&mut engine, 1), say(&mut engine, 0)), (vec![], vec![gone]));
    engine.is_forgotten(ID);
    assert_eq!(say(&mut engine, 1), [Record::Done { id: ID }]);
}
