//! Tests the state of a download after each response.

use super::*;

fn etag(tag: &str) -> Option<Validator> {
    Some(Validator::Etag(tag.to_owned()))
}

fn ok(tag: &str, length: u64) -> ResponseHead {
    ResponseHead {
        status: 200,
        length: Some(length),
        validator: etag(tag),
        etag: Some(tag.into()),
        ..ResponseHead::default()
    }
}

fn part(tag: &str, first: u64, last: u64, of: u64) -> ResponseHead {
    let part = Some(ContentRange { bytes: Some((first, last)), of: Some(of) });
    ResponseHead { status: 206, part, length: Some(last - first + 1), ..ok(tag, 0) }
}

/// A download that holds 40 of 100 bytes of `"a"`.
fn begun(is_final: bool) -> Download {
    let mut download = Download::new(Digests::default(), is_final);
    assert_eq!(download.range_request(), RangeRequest::Whole);
    let Meaning::Content(take) = download.read(&RangeRequest::Whole, &ok("\"a\"", 100)) else { panic!("refused") };
    assert_eq!(take, Take { length: Some(100), ..Take::default() });
    download.took(40);
    download.broke();
    download
}

fn rest() -> RangeRequest {
    RangeRequest::From(40, etag("\"a\""))
}

fn digest(byte: char) -> Digests {
    format!("sha-256={}", byte.to_string().repeat(64)).parse().unwrap()
}

#[test]
fn what_broke_off_is_asked_for_from_there_if_it_is_the_same() {
    let mut download = begun(false);
    assert_eq!(download.range_request(), rest());
    let meaning = download.read(&rest(), &part("\"a\"", 40, 99, 100));
    assert_eq!(meaning, Meaning::Content(Take { length: Some(60), ..Take::default() }));
    download.took(60);
    assert_eq!(download.ended(206), Ok(End::Whole));
}

#[test]
fn a_shorter_part_is_a_step_and_an_earlier_one_is_skipped_into() {
    let mut download = begun(false);
    let meaning = download.read(&rest(), &part("\"a\"", 30, 49, 100));
    assert_eq!(meaning, Meaning::Content(Take { skip: 10, length: Some(20), ..Take::default() }));
    download.took(10);
    assert_eq!(download.ended(206), Ok(End::More));
    assert_eq!(download.range_request(), RangeRequest::From(50, etag("\"a\"")));
}

#[test]
fn a_range_that_was_not_asked_for_is_a_lie_and_all_is_asked_for_until_that_breaks_off() {
    let short = ResponseHead { length: Some(7), ..part("\"a\"", 40, 99, 100) };
    let silent = ResponseHead { part: None, ..part("\"a\"", 40, 99, 100) };
    let nobody_s = ResponseHead { validator: None, etag: None, ..part("\"a\"", 40, 99, 100) };
    let multipart = ResponseHead { is_multipart: true, ..part("\"a\"", 40, 99, 100) };
    let late = part("\"a\"", 50, 99, 100);
    let early = part("\"a\"", 0, 20, 100);
    for lie in [short, silent, nobody_s, multipart, late, early] {
        let mut download = begun(false);
        assert!(matches!(download.read(&rest(), &lie), Meaning::Later { after: None, .. }), "{lie:?}");
        assert_eq!((download.held(), download.range_request()), (40, RangeRequest::Whole), "what is held may be right");
        let meaning = download.read(&RangeRequest::Whole, &ok("\"a\"", 100));
        assert_eq!(meaning, Meaning::Content(Take { skip: 40, length: Some(100), ..Take::default() }));
        download.broke();
        assert_eq!(download.range_request(), rest());
    }
}

#[test]
fn changed_content_begins_anew_however_it_shows() {
    for changed in [part("\"b\"", 40, 99, 100), part("\"a\"", 40, 99, 101)] {
        let mut download = begun(false);
        assert!(matches!(download.read(&rest(), &changed), Meaning::Anew(_)));
        assert_eq!((download.held(), download.range_request()), (0, RangeRequest::Whole));
    }
    let mut download = begun(false);
    let Meaning::Content(take) = download.read(&rest(), &ok("\"b\"", 70)) else { panic!("refused") };
    assert_eq!((take.skip, take.anew), (0, Some("the object changed at the origin")));
    assert_eq!(download.held(), 0);
    // The digest shows the change, although the tag is the same.
    let mut download = begun(false);
    download.known.digests = digest('1');
    let other = ResponseHead { digests: digest('2'), ..part("\"a\"", 40, 99, 100) };
    assert!(matches!(download.read(&rest(), &other), Meaning::Anew(_)));
}

#[test]
fn a_server_without_ranges_costs_no_byte_that_is_held() {
    let mut download = begun(false);
    let meaning = download.read(&rest(), &ok("\"a\"", 100));
    assert_eq!(meaning, Meaning::Content(Take { skip: 40, length: Some(100), ..Take::default() }));
    download.broke();
    assert_eq!(download.range_request(), rest());
}

#[test]
fn without_a_validator_pieces_are_put_together_only_where_a_digest_will_judge_them() {
    let weak = ResponseHead { validator: None, ..ok("W/\"a\"", 100) };
    let mut download = Download::new(Digests::default(), false);
    download.read(&RangeRequest::Whole, &weak);
    download.took(40);
    assert_eq!(download.range_request(), RangeRequest::Whole);
    let Meaning::Content(take) = download.read(&RangeRequest::Whole, &weak) else { panic!("refused") };
    assert!(take.anew.is_some() && take.skip == 0 && download.held() == 0);

    let mut download = Download::new(digest('1'), false);
    download.read(&RangeRequest::Whole, &weak);
    download.took(40);
    assert_eq!(download.range_request(), RangeRequest::From(40, None));
}

#[test]
fn what_was_written_to_a_pipe_is_compared_and_not_written_again() {
    let mut download = begun(true);
    let Meaning::Content(take) = download.read(&rest(), &ok("\"b\"", 100)) else { panic!("refused") };
    assert_eq!(take, Take { skip: 40, compare: true, length: Some(100), anew: None });
    assert_eq!(download.held(), 40);
    let mut download = begun(true);
    assert!(matches!(download.read(&rest(), &part("\"b\"", 40, 99, 100)), Meaning::Anew(_)));
    assert_eq!((download.held(), download.range_request()), (40, RangeRequest::Whole));
    assert_eq!(download.verify(&digest('2')), Verdict::Good, "nothing says what it must be");
    download.demanded = digest('1');
    assert_eq!(download.verify(&digest('2')), Verdict::Bad);
}

#[test]
fn one_that_was_whole_already_asks_for_its_last_byte() {
    let mut download = begun(false);
    download.took(60);
    let ask = download.range_request();
    assert_eq!(ask, RangeRequest::From(99, etag("\"a\"")));
    let meaning = download.read(&ask, &part("\"a\"", 99, 99, 100));
    assert_eq!(meaning, Meaning::Content(Take { skip: 1, length: Some(1), ..Take::default() }));
    assert_eq!(download.ended(206), Ok(End::Whole));
}

#[test]
fn a_range_that_is_not_there_says_that_all_is_held_or_that_it_changed() {
    let beyond = |of| ResponseHead {
        status: 416,
        part: Some(ContentRange { bytes: None, of: Some(of) }),
        etag: None,
        validator: None,
        ..ok("", 0)
    };
    let unknown = || {
        let mut download = begun(false);
        download.known.total = None;
        download
    };
    assert_eq!(unknown().read(&rest(), &beyond(40)), Meaning::Whole);
    assert!(matches!(unknown().read(&rest(), &beyond(30)), Meaning::Anew(_)));
    let other = ResponseHead { etag: Some("\"b\"".into()), ..beyond(40) };
    assert!(matches!(unknown().read(&rest(), &other), Meaning::Anew(_)));
    // A 416 response to a request without a range is an ordinary error.
    assert!(matches!(begun(false).read(&RangeRequest::Whole, &beyond(40)), Meaning::Never { .. }));
}

#[test]
fn the_end_of_a_content_is_the_whole_only_where_all_is_there() {
    let mut download = begun(false);
    assert!(download.ended(200).is_err());
    download.known.total = None;
    assert_eq!(download.ended(206), Ok(End::More));
    assert_eq!(download.ended(200), Ok(End::Whole));
    assert_eq!(download.known().total, Some(40));
}

#[test]
fn a_digest_that_fails_twice_is_believed() {
    let mut download = begun(false);
    download.demanded = digest('1');
    download.read(&rest(), &part("\"a\"", 40, 99, 100));
    download.took(60);
    assert_eq!(download.verify(&digest('2')), Verdict::Again);
    assert_eq!((download.held(), download.range_request()), (0, RangeRequest::Whole));
    download.read(&RangeRequest::Whole, &ok("\"a\"", 100));
    download.took(40);
    assert_eq!(download.range_request(), RangeRequest::Whole, "pieces are not trusted");
    download.broke();
    assert_eq!(download.range_request(), rest(), "but what cannot be had whole is had in pieces");
    assert_eq!(download.verify(&digest('2')), Verdict::Bad);
}

#[test]
fn what_may_pass_is_told_from_what_will_not() {
    let status = |status| ResponseHead { status, retry_after: Some(Duration::from_secs(3)), ..ResponseHead::default() };
    let mut download = Download::new(Digests::default(), false);
    for passing in [408, 425, 429, 500, 502, 503, 504] {
        let meaning = download.read(&RangeRequest::Whole, &status(passing));
        assert!(matches!(meaning, Meaning::Later { after: Some(_), .. }), "{passing}");
    }
    for lasting in [204, 302, 304, 400, 401, 403, 404, 407, 410, 416, 501, 505] {
        let meaning = download.read(&RangeRequest::Whole, &status(lasting));
        assert!(matches!(&meaning, Meaning::Never { why, .. } if why.starts_with(&lasting.to_string())), "{meaning:?}");
    }
    let there = ResponseHead { location: Some("/b".into()), ..status(302) };
    assert_eq!(download.read(&RangeRequest::Whole, &there), Meaning::Elsewhere("/b".into()));
}

#[test]
fn a_part_that_nobody_asked_for_is_fine_where_it_is_all() {
    let mut download = Download::new(Digests::default(), false);
    let meaning = download.read(&RangeRequest::Whole, &part("\"a\"", 0, 99, 100));
    assert_eq!(meaning, Meaning::Content(Take { length: Some(100), ..Take::default() }));
    let mut download = Download::new(Digests::default(), false);
    assert!(matches!(download.read(&RangeRequest::Whole, &part("\"a\"", 0, 9, 100)), Meaning::Later { .. }));
}

/// Without a length, the end of the connection may be a truncation. The download asks for the bytes after it; a 416
/// response shows that there are none.
#[test]
fn a_content_that_ends_with_its_connection_is_doubted_once() {
    let endless = ResponseHead { length: None, is_endless: true, ..ok("\"a\"", 0) };
    let begun = |answer: &ResponseHead| {
        let mut download = Download::new(Digests::default(), false);
        assert!(matches!(download.read(&RangeRequest::Whole, answer), Meaning::Content(_)));
        download.took(40);
        let ended = download.ended(200);
        (download, ended)
    };
    let (mut download, ended) = begun(&endless);
    assert_eq!((ended, download.range_request()), (Ok(End::More), rest()));
    let beyond = ResponseHead { status: 416, part: Some(ContentRange { bytes: None, of: Some(40) }), ..ok("\"a\"", 0) };
    assert_eq!(download.read(&rest(), &beyond), Meaning::Whole);
    // The content was truncated.
    let (mut download, _) = begun(&endless);
    assert!(matches!(download.read(&rest(), &part("\"a\"", 40, 99, 100)), Meaning::Content(_)));
    // An origin without range support sends the whole content again, with the same end.
    let (mut download, _) = begun(&endless);
    assert!(matches!(download.read(&rest(), &endless), Meaning::Content(Take { skip: 40, .. })));
    assert_eq!(download.ended(200), Ok(End::Whole));
    // Chunked content marks its own end. Without a validator the download could not be resumed at all.
    let (_, ended) = begun(&ResponseHead { is_endless: false, ..endless.clone() });
    assert_eq!(ended, Ok(End::Whole));
    let (_, ended) = begun(&ResponseHead { validator: None, etag: None, ..endless });
    assert_eq!(ended, Ok(End::Whole));
}
