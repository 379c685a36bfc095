//! Rules of one stream, each tested alone.

use super::*;

fn upto(offset: u64, is_whole: bool) -> Progress {
    Progress { offset, is_whole }
}

fn bytes(text: &'static str) -> Bytes {
    Bytes::from_static(text.as_bytes())
}

fn next(offset: u64, text: &'static str, is_last: bool) -> Option<Next> {
    Some(Next::Bytes { offset, bytes: bytes(text), is_last })
}

#[test]
fn what_comes_twice_is_taken_once_and_behind_a_gap_nothing() {
    let mut stream = StreamState::default();
    assert_eq!(stream.take(0, bytes("hello"), false), Some((0, bytes("hello"))));
    assert_eq!(stream.take(0, bytes("hello"), false), None);
    assert_eq!(stream.take(7, bytes("x"), false), None);
    assert_eq!(stream.take(3, bytes("lo, you"), false), Some((5, bytes(", you"))));
    assert_eq!(stream.take(10, bytes(""), true), Some((10, bytes(""))));
    assert_eq!(stream.take(10, bytes("more"), true), None);
    assert_eq!(stream.have(), upto(10, true));
}

#[test]
fn nothing_is_told_before_it_is_safe() {
    let mut stream = StreamState::default();
    stream.take(0, bytes("hello"), true);
    assert_eq!(stream.news(true, false), None);
    stream.set_safe(upto(3, false));
    assert_eq!(stream.news(true, false), Some((upto(3, false), AckReason::Taken)));
    stream.set_safe(upto(5, true));
    assert_eq!(stream.news(true, false), Some((upto(5, true), AckReason::Taken)));
    assert_eq!(stream.news(true, false), None);
    stream.forget_acks();
    assert_eq!(stream.news(true, false), Some((upto(5, true), AckReason::Taken)));
    // An acknowledgement of the next node releases bytes as well.
    let mut stream = StreamState::default();
    stream.take(0, bytes("hello"), true);
    stream.send(100);
    stream.set_held(upto(5, true));
    assert_eq!(stream.news(true, false), Some((upto(5, true), AckReason::Taken)));
}

#[test]
fn it_is_sent_in_pieces_and_again_from_where_the_next_one_holds_it() {
    let mut stream = StreamState::default();
    stream.take(0, bytes("hello"), false);
    stream.take(5, bytes("world"), true);
    assert_eq!(stream.send(3), next(0, "hel", false));
    assert_eq!(stream.send(100), next(3, "lo", false));
    assert_eq!(stream.send(100), next(5, "world", true));
    assert_eq!((stream.send(100), stream.in_flight()), (None, 10));
    stream.set_held(upto(4, false));
    assert_eq!((stream.in_flight(), stream.kept()), (6, 6));
    stream.rewind();
    assert_eq!(stream.send(100), next(4, "o", false));
    assert_eq!(stream.send(100), next(5, "world", true));
    // An older acknowledgement arrives late.
    stream.set_held(upto(1, false));
    assert_eq!(stream.held(), upto(4, false));
    stream.set_held(upto(10, true));
    assert!(stream.is_over() && stream.kept() == 0 && !stream.is_sendable() && stream.in_memory(false) == 0);
}

#[test]
fn what_the_next_one_holds_need_not_come_again() {
    let mut stream = StreamState::default();
    stream.take(0, bytes("hel"), false);
    stream.set_held(upto(5, false));
    assert_eq!(
        (stream.kept(), stream.have(), stream.news(true, false)),
        (0, upto(5, false), Some((upto(5, false), AckReason::Again)))
    );
    assert_eq!(stream.take(5, bytes("!"), true), Some((5, bytes("!"))));
    assert_eq!(stream.send(9), next(5, "!", true));
}

#[test]
fn what_there_was_no_room_for_is_asked_for_once_there_is() {
    let mut stream = StreamState::default();
    stream.take(0, bytes("hel"), false);
    stream.set_safe(upto(3, false));
    stream.refuse();
    assert_eq!(stream.take(5, bytes("!"), true), None);
    assert_eq!(stream.news(false, false), Some((upto(3, false), AckReason::NoRoom)));
    assert_eq!(stream.news(false, false), None);
    assert_eq!(stream.news(true, false), Some((upto(3, false), AckReason::Again)));
    // Further data in flight arrives.
    assert_eq!(stream.take(5, bytes("!"), true), None);
    assert_eq!(stream.news(true, false), None);
    assert_eq!(stream.take(3, bytes("lo!"), true), Some((3, bytes("lo!"))));
}

#[test]
fn an_end_that_comes_alone_is_sent_alone() {
    let mut stream = StreamState::default();
    stream.take(0, bytes("x"), false);
    assert_eq!(stream.send(9), next(0, "x", false));
    stream.take(1, bytes(""), true);
    assert_eq!(stream.send(9), next(1, "", true));
    assert_eq!(stream.send(9), None);
    stream.set_held(upto(1, false));
    stream.rewind();
    assert_eq!(stream.send(9), next(1, "", true));
}

#[test]
fn another_head_stands_in_the_place_of_theirs() {
    let mut stream = StreamState::awaiting_head();
    assert_eq!(stream.take(0, bytes("head"), false), Some((0, bytes("head"))));
    assert_eq!(stream.take(4, bytes("er+body"), false), Some((4, bytes("er+body"))));
    assert_eq!((stream.send(99), stream.news(true, false)), (None, None));
    // The text "header+" stands for the previous node's head.
    assert_eq!(stream.settle(7, bytes("HD+")), [bytes("body")]);
    assert_eq!((stream.have(), stream.in_memory(false)), (upto(7, false), 7));
    assert_eq!(stream.send(99), None, "its head has to be safe first");
    stream.set_safe(upto(3, false));
    assert_eq!(stream.news(true, false), Some((upto(7, false), AckReason::Taken)));
    assert_eq!(stream.send(99), next(0, "HD+", false));
    assert_eq!(stream.send(99), next(3, "body", false));
    // Bytes of the replaced head that arrive again change nothing.
    assert_eq!(stream.take(0, bytes("header"), false), None);
    assert_eq!(stream.take(5, bytes("r+body!"), true), Some((7, bytes("!"))));
    stream.set_held(upto(5, false));
    assert_eq!(stream.news(true, false), Some((upto(9, false), AckReason::Taken)));
    stream.set_held(upto(8, true));
    assert_eq!(stream.news(true, false), Some((upto(12, true), AckReason::Taken)));
}

#[test]
fn a_part_of_a_head_is_none_for_the_one_before() {
    let mut stream = StreamState::awaiting_head();
    stream.take(0, bytes("hd"), false);
    stream.settle(2, bytes("a longer head"));
    stream.set_safe(upto(5, false));
    assert_eq!(stream.news(true, false), None);
    stream.set_safe(upto(13, false));
    assert_eq!(stream.news(true, false), Some((upto(2, false), AckReason::Taken)));
}

#[test]
fn what_is_on_disk_is_read_again_when_it_is_to_be_sent() {
    let mut stream = StreamState::default();
    for (offset, text) in [(0, "hello"), (5, "world"), (10, "again")] {
        stream.take(offset, bytes(text), false);
    }
    stream.set_safe(upto(12, false));
    assert_eq!(stream.send(5), next(0, "hello", false));
    stream.evict();
    assert_eq!((stream.in_memory(false), stream.kept()), (10, 15), "what is under way stays, and what is not safe");
    stream.set_safe(upto(15, false));
    stream.evict();
    assert_eq!((stream.in_memory(false), stream.kept()), (5, 15));
    assert_eq!(stream.send(4), Some(Next::Away { offset: 5, length: 10 }));
    stream.request_read(10);
    assert_eq!((stream.send(4), stream.loading()), (None, 10), "it is on its way");
    stream.set_held(upto(6, false));
    stream.load(5, bytes("worl"));
    assert_eq!((stream.in_memory(false), stream.kept()), (3, 9));
    assert_eq!(stream.send(99), next(6, "orl", false));
    assert_eq!(stream.send(99), Some(Next::Away { offset: 9, length: 6 }));
    stream.request_read(6);
    stream.load(9, bytes("dagain"));
    assert_eq!(stream.send(99), next(9, "dagain", false));
    stream.set_held(upto(15, false));
    assert_eq!((stream.in_memory(false), stream.kept()), (0, 0));
}

#[test]
fn another_reader_begins_where_the_first_did() {
    for is_on_disk in [false, true] {
        let mut stream = StreamState::default();
        stream.take(0, bytes("hello"), false);
        stream.take(5, bytes("world"), false);
        stream.set_safe(upto(10, false));
        assert!(stream.reopen(is_on_disk));
        assert_eq!(stream.send(5), next(0, "hello", false));
        assert!(stream.reopen(is_on_disk), "nothing was let go");
        assert_eq!(stream.send(5), next(0, "hello", false));
        stream.set_held(upto(5, false));
        assert_eq!(stream.reopen(is_on_disk), is_on_disk);
        if is_on_disk {
            assert_eq!(stream.send(5), Some(Next::Away { offset: 0, length: 5 }));
            stream.load(0, bytes("hello"));
            assert_eq!((stream.send(9), stream.send(9)), (next(0, "hello", false), next(5, "world", false)));
        }
    }
}

#[test]
fn what_was_there_before_this_process_goes_on() {
    let mut stream = StreamState::awaiting_head();
    stream.restore_head(4, 6);
    stream.restore(upto(6, false), 10);
    stream.restore(upto(16, true), 0);
    assert_eq!((stream.have(), stream.in_memory(false), stream.kept()), (upto(16, true), 0, 16));
    assert_eq!(stream.news(true, false), Some((upto(14, true), AckReason::Taken)));
    assert_eq!(stream.send(20), Some(Next::Away { offset: 0, length: 16 }));
    // The next node had received some of it earlier.
    stream.set_held(upto(9, false));
    stream.load(0, bytes("HEAD++0123456789"));
    assert_eq!(stream.send(20), next(9, "3456789", true));
    // Pieces after a gap: the next node had acknowledged everything before.
    let mut stream = StreamState::default();
    stream.restore(upto(0, false), 5);
    stream.restore(upto(8, false), 2);
    assert_eq!((stream.have(), stream.kept(), stream.held()), (upto(10, false), 2, upto(8, false)));
}

/// A local endpoint has read the bytes, and must read them again if this process is killed.
#[test]
fn what_was_read_here_is_safe_on_disk_alone() {
    let mut stream = StreamState::default();
    stream.take(0, bytes("hello"), true);
    stream.send(100);
    stream.set_held(upto(5, true));
    assert_eq!((stream.news(true, true), stream.spare(true), stream.release_disk(true)), (None, 0, 0));
    stream.set_safe(upto(3, false));
    assert_eq!(stream.news(true, true), Some((upto(3, false), AckReason::Taken)));
    assert_eq!((stream.spare(true), stream.release_disk(true), stream.spare(true)), (3, 3, 0));
    stream.set_safe(upto(5, true));
    assert_eq!((stream.news(true, true), stream.spare(true)), (Some((upto(5, true), AckReason::Taken)), 2));
}

#[test]
fn what_is_let_go_is_gone_for_good() {
    let mut stream = StreamState::default();
    stream.take(0, bytes("hello"), false);
    stream.take(5, bytes("world"), true);
    stream.set_safe(upto(10, true));
    stream.send(7);
    stream.set_held(upto(7, false));
    assert_eq!((stream.spare(false), stream.is_torn(), stream.pieces()), (7, false, 2));
    assert_eq!(stream.release_disk(false), 7);
    assert_eq!((stream.spare(false), stream.is_torn(), stream.pieces()), (0, true, 1));
    assert!(!stream.reopen(true));
}

#[test]
fn small_chunks_are_put_together() {
    let mut stream = StreamState::default();
    let text = "0123456789".repeat(2000);
    for at in 0..text.len() {
        stream.take(at as u64, Bytes::copy_from_slice(&text.as_bytes()[at..=at]), false);
    }
    assert!(stream.kept.len() < 24, "{}", stream.kept.len());
    let mut sent = Vec::new();
    while let Some(Next::Bytes { bytes, .. }) = stream.send(1000) {
        sent.extend_from_slice(&bytes);
    }
    assert!(sent == text.as_bytes());
}

/// A node was killed before it had written all bytes that it had sent, and the previous node had heard that the next
/// node acknowledged them.
#[test]
fn what_came_behind_a_gap_is_asked_for_once_the_gap_is_gone() {
    let mut stream = StreamState::default();
    stream.restore(upto(0, false), 5);
    assert_eq!(stream.take(8, bytes("x"), true), None);
    assert_eq!(stream.news(true, false), Some((upto(5, false), AckReason::Again)));
    assert_eq!(stream.take(8, bytes("x"), true), None);
    stream.set_held(upto(8, false));
    assert_eq!(stream.news(true, false), Some((upto(8, false), AckReason::Again)));
    assert_eq!(stream.take(8, bytes("x"), true), Some((8, bytes("x"))));
}
