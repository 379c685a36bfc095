//! Rules of one stream, each tested alone.

use super::*;

fn upto(offset: u64, is_whole: bool) -> Upto {
    Upto { offset, is_whole }
}

fn bytes(text: &'static str) -> Bytes {
    Bytes::from_static(text.as_bytes())
}

fn next(offset: u64, text: &'static str, is_last: bool) -> Option<Next> {
    Some(Next::Bytes { offset, bytes: bytes(text), is_last })
}

#[test]
fn what_comes_twice_is_taken_once_and_behind_a_gap_nothing() {
    let mut half = Half::default();
    assert_eq!(half.take(0, bytes("hello"), false), Some((0, bytes("hello"))));
    assert_eq!(half.take(0, bytes("hello"), false), None);
    assert_eq!(half.take(7, bytes("x"), false), None);
    assert_eq!(half.take(3, bytes("lo, you"), false), Some((5, bytes(", you"))));
    assert_eq!(half.take(10, bytes(""), true), Some((10, bytes(""))));
    assert_eq!(half.take(10, bytes("more"), true), None);
    assert_eq!(half.have(), upto(10, true));
}

#[test]
fn nothing_is_told_before_it_is_safe() {
    let mut half = Half::default();
    half.take(0, bytes("hello"), true);
    assert_eq!(half.news(true, false), None);
    half.set_safe(upto(3, false));
    assert_eq!(half.news(true, false), Some((upto(3, false), Behind::Taken)));
    half.set_safe(upto(5, true));
    assert_eq!(half.news(true, false), Some((upto(5, true), Behind::Taken)));
    assert_eq!(half.news(true, false), None);
    half.forget_told();
    assert_eq!(half.news(true, false), Some((upto(5, true), Behind::Taken)));
    // An acknowledgement of the next node releases bytes as well.
    let mut half = Half::default();
    half.take(0, bytes("hello"), true);
    half.send(100);
    half.set_held(upto(5, true));
    assert_eq!(half.news(true, false), Some((upto(5, true), Behind::Taken)));
}

#[test]
fn it_is_sent_in_pieces_and_again_from_where_the_next_one_holds_it() {
    let mut half = Half::default();
    half.take(0, bytes("hello"), false);
    half.take(5, bytes("world"), true);
    assert_eq!(half.send(3), next(0, "hel", false));
    assert_eq!(half.send(100), next(3, "lo", false));
    assert_eq!(half.send(100), next(5, "world", true));
    assert_eq!((half.send(100), half.in_flight()), (None, 10));
    half.set_held(upto(4, false));
    assert_eq!((half.in_flight(), half.kept()), (6, 6));
    half.rewind();
    assert_eq!(half.send(100), next(4, "o", false));
    assert_eq!(half.send(100), next(5, "world", true));
    // An older acknowledgement arrives late.
    half.set_held(upto(1, false));
    assert_eq!(half.held(), upto(4, false));
    half.set_held(upto(10, true));
    assert!(half.is_over() && half.kept() == 0 && !half.is_sendable() && half.in_memory(false) == 0);
}

#[test]
fn what_the_next_one_holds_need_not_come_again() {
    let mut half = Half::default();
    half.take(0, bytes("hel"), false);
    half.set_held(upto(5, false));
    assert_eq!(
        (half.kept(), half.have(), half.news(true, false)),
        (0, upto(5, false), Some((upto(5, false), Behind::Again)))
    );
    assert_eq!(half.take(5, bytes("!"), true), Some((5, bytes("!"))));
    assert_eq!(half.send(9), next(5, "!", true));
}

#[test]
fn what_there_was_no_room_for_is_asked_for_once_there_is() {
    let mut half = Half::default();
    half.take(0, bytes("hel"), false);
    half.set_safe(upto(3, false));
    half.refuse();
    assert_eq!(half.take(5, bytes("!"), true), None);
    assert_eq!(half.news(false, false), Some((upto(3, false), Behind::NoRoom)));
    assert_eq!(half.news(false, false), None);
    assert_eq!(half.news(true, false), Some((upto(3, false), Behind::Again)));
    // Further data in flight arrives.
    assert_eq!(half.take(5, bytes("!"), true), None);
    assert_eq!(half.news(true, false), None);
    assert_eq!(half.take(3, bytes("lo!"), true), Some((3, bytes("lo!"))));
}

#[test]
fn an_end_that_comes_alone_is_sent_alone() {
    let mut half = Half::default();
    half.take(0, bytes("x"), false);
    assert_eq!(half.send(9), next(0, "x", false));
    half.take(1, bytes(""), true);
    assert_eq!(half.send(9), next(1, "", true));
    assert_eq!(half.send(9), None);
    half.set_held(upto(1, false));
    half.rewind();
    assert_eq!(half.send(9), next(1, "", true));
}

#[test]
fn another_head_stands_in_the_place_of_theirs() {
    let mut half = Half::awaiting_head();
    assert_eq!(half.take(0, bytes("head"), false), Some((0, bytes("head"))));
    assert_eq!(half.take(4, bytes("er+body"), false), Some((4, bytes("er+body"))));
    assert_eq!((half.send(99), half.news(true, false)), (None, None));
    // The text "header+" stands for the previous node's head.
    assert_eq!(half.settle(7, bytes("HD+")), [bytes("body")]);
    assert_eq!((half.have(), half.in_memory(false)), (upto(7, false), 7));
    assert_eq!(half.send(99), None, "its head has to be safe first");
    half.set_safe(upto(3, false));
    assert_eq!(half.news(true, false), Some((upto(7, false), Behind::Taken)));
    assert_eq!(half.send(99), next(0, "HD+", false));
    assert_eq!(half.send(99), next(3, "body", false));
    // Bytes of the replaced head that arrive again change nothing.
    assert_eq!(half.take(0, bytes("header"), false), None);
    assert_eq!(half.take(5, bytes("r+body!"), true), Some((7, bytes("!"))));
    half.set_held(upto(5, false));
    assert_eq!(half.news(true, false), Some((upto(9, false), Behind::Taken)));
    half.set_held(upto(8, true));
    assert_eq!(half.news(true, false), Some((upto(12, true), Behind::Taken)));
}

#[test]
fn a_part_of_a_head_is_none_for_the_one_before() {
    let mut half = Half::awaiting_head();
    half.take(0, bytes("hd"), false);
    half.settle(2, bytes("a longer head"));
    half.set_safe(upto(5, false));
    assert_eq!(half.news(true, false), None);
    half.set_safe(upto(13, false));
    assert_eq!(half.news(true, false), Some((upto(2, false), Behind::Taken)));
}

#[test]
fn what_is_on_disk_is_read_again_when_it_is_to_be_sent() {
    let mut half = Half::default();
    for (offset, text) in [(0, "hello"), (5, "world"), (10, "again")] {
        half.take(offset, bytes(text), false);
    }
    half.set_safe(upto(12, false));
    assert_eq!(half.send(5), next(0, "hello", false));
    half.evict();
    assert_eq!((half.in_memory(false), half.kept()), (10, 15), "what is under way stays, and what is not safe");
    half.set_safe(upto(15, false));
    half.evict();
    assert_eq!((half.in_memory(false), half.kept()), (5, 15));
    assert_eq!(half.send(4), Some(Next::Away { offset: 5, length: 10 }));
    half.ask(10);
    assert_eq!((half.send(4), half.loading()), (None, 10), "it is on its way");
    half.set_held(upto(6, false));
    half.load(5, bytes("worl"));
    assert_eq!((half.in_memory(false), half.kept()), (3, 9));
    assert_eq!(half.send(99), next(6, "orl", false));
    assert_eq!(half.send(99), Some(Next::Away { offset: 9, length: 6 }));
    half.ask(6);
    half.load(9, bytes("dagain"));
    assert_eq!(half.send(99), next(9, "dagain", false));
    half.set_held(upto(15, false));
    assert_eq!((half.in_memory(false), half.kept()), (0, 0));
}

#[test]
fn another_reader_begins_where_the_first_did() {
    for is_on_disk in [false, true] {
        let mut half = Half::default();
        half.take(0, bytes("hello"), false);
        half.take(5, bytes("world"), false);
        half.set_safe(upto(10, false));
        assert!(half.reopen(is_on_disk));
        assert_eq!(half.send(5), next(0, "hello", false));
        assert!(half.reopen(is_on_disk), "nothing was let go");
        assert_eq!(half.send(5), next(0, "hello", false));
        half.set_held(upto(5, false));
        assert_eq!(half.reopen(is_on_disk), is_on_disk);
        if is_on_disk {
            assert_eq!(half.send(5), Some(Next::Away { offset: 0, length: 5 }));
            half.load(0, bytes("hello"));
            assert_eq!((half.send(9), half.send(9)), (next(0, "hello", false), next(5, "world", false)));
        }
    }
}

#[test]
fn what_was_there_before_this_process_goes_on() {
    let mut half = Half::awaiting_head();
    half.restore_head(4, 6);
    half.restore(upto(6, false), 10);
    half.restore(upto(16, true), 0);
    assert_eq!((half.have(), half.in_memory(false), half.kept()), (upto(16, true), 0, 16));
    assert_eq!(half.news(true, false), Some((upto(14, true), Behind::Taken)));
    assert_eq!(half.send(20), Some(Next::Away { offset: 0, length: 16 }));
    // The next node had received some of it earlier.
    half.set_held(upto(9, false));
    half.load(0, bytes("HEAD++0123456789"));
    assert_eq!(half.send(20), next(9, "3456789", true));
    // Pieces after a gap: the next node had acknowledged everything before.
    let mut half = Half::default();
    half.restore(upto(0, false), 5);
    half.restore(upto(8, false), 2);
    assert_eq!((half.have(), half.kept(), half.held()), (upto(10, false), 2, upto(8, false)));
}

/// A local endpoint has read the bytes, and must read them again if this process is killed.
#[test]
fn what_was_read_here_is_safe_on_disk_alone() {
    let mut half = Half::default();
    half.take(0, bytes("hello"), true);
    half.send(100);
    half.set_held(upto(5, true));
    assert_eq!((half.news(true, true), half.spare(true), half.let_go(true)), (None, 0, 0));
    half.set_safe(upto(3, false));
    assert_eq!(half.news(true, true), Some((upto(3, false), Behind::Taken)));
    assert_eq!((half.spare(true), half.let_go(true), half.spare(true)), (3, 3, 0));
    half.set_safe(upto(5, true));
    assert_eq!((half.news(true, true), half.spare(true)), (Some((upto(5, true), Behind::Taken)), 2));
}

#[test]
fn what_is_let_go_is_gone_for_good() {
    let mut half = Half::default();
    half.take(0, bytes("hello"), false);
    half.take(5, bytes("world"), true);
    half.set_safe(upto(10, true));
    half.send(7);
    half.set_held(upto(7, false));
    assert_eq!((half.spare(false), half.is_torn(), half.pieces()), (7, false, 2));
    assert_eq!(half.let_go(false), 7);
    assert_eq!((half.spare(false), half.is_torn(), half.pieces()), (0, true, 1));
    assert!(!half.reopen(true));
}

#[test]
fn small_chunks_are_put_together() {
    let mut half = Half::default();
    let text = "0123456789".repeat(2000);
    for at in 0..text.len() {
        half.take(at as u64, Bytes::copy_from_slice(&text.as_bytes()[at..=at]), false);
    }
    assert!(half.kept.len() < 24, "{}", half.kept.len());
    let mut sent = Vec::new();
    while let Some(Next::Bytes { bytes, .. }) = half.send(1000) {
        sent.extend_from_slice(&bytes);
    }
    assert!(sent == text.as_bytes());
}

/// A node was killed before it had written all bytes that it had sent, and the previous node had heard that the next
/// node acknowledged them.
#[test]
fn what_came_behind_a_gap_is_asked_for_once_the_gap_is_gone() {
    let mut half = Half::default();
    half.restore(upto(0, false), 5);
    assert_eq!(half.take(8, bytes("x"), true), None);
    assert_eq!(half.news(true, false), Some((upto(5, false), Behind::Again)));
    assert_eq!(half.take(8, bytes("x"), true), None);
    half.set_held(upto(8, false));
    assert_eq!(half.news(true, false), Some((upto(8, false), Behind::Again)));
    assert_eq!(half.take(8, bytes("x"), true), Some((8, bytes("x"))));
}
