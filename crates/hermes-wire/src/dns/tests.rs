//! Tests of DNS questions and answers, valid and malformed.

#![allow(clippy::unwrap_used)]

use hickory_proto::op::EdnsFlags;
use proptest::prelude::*;

use super::*;

/// A question of a stub resolver.
fn asked(name: &str, kind: RecordType, room: Option<u16>) -> Vec<u8> {
    let mut message = Message::new(77, MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.queries.push(Query::query(Name::from_ascii(name).unwrap(), kind));
    if let Some(room) = room {
        let mut edns = Edns::new();
        edns.set_max_payload(room);
        *edns.flags_mut() = EdnsFlags::from(0);
        message.set_edns(edns);
    }
    message.to_vec().unwrap()
}

fn question(name: &str, kind: RecordType) -> Question {
    Question::parse(&asked(name, kind, None)).unwrap()
}

fn read(bytes: &[u8]) -> Message {
    Message::from_vec(bytes).unwrap()
}

#[test]
fn names_are_in_one_spelling() {
    for (written, name) in [("VIDEO.", "video"), ("a.Corp.", "a.corp"), ("_x._tcp.corp.", "_x._tcp.corp"), (".", "")] {
        assert_eq!(question(written, RecordType::A).name(), name);
    }
}

#[test]
fn kinds_and_addresses() {
    assert_eq!(question("a.", RecordType::A).kind(), Kind::A);
    assert_eq!(question("a.", RecordType::AAAA).kind(), Kind::Aaaa);
    assert_eq!(question("a.", RecordType::HTTPS).kind(), Kind::Other);
    for (name, address) in [
        ("5.0.18.198.in-addr.arpa.", Some("198.18.0.5")),
        ("5.0.18.198.IN-ADDR.ARPA.", Some("198.18.0.5")),
        ("1.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.d.f.ip6.arpa.", Some("fd00::1")),
        ("0.18.198.in-addr.arpa.", None),
        ("a.5.0.18.198.in-addr.arpa.", None),
        ("999.0.18.198.in-addr.arpa.", None),
        ("corp.", None),
    ] {
        assert_eq!(question(name, RecordType::PTR).address(), address.map(|text| text.parse().unwrap()), "{name}");
    }
}

#[test]
fn answers_have_the_question_its_id_and_its_spelling() {
    let addresses = ["198.18.0.5".parse().unwrap(), "fd00::5".parse().unwrap()];
    let message = read(&question("Video.", RecordType::ANY).answer(&Answer::Addresses(&addresses), 10));
    assert_eq!((message.metadata.id, message.metadata.message_type), (77, MessageType::Response));
    assert!(message.metadata.authoritative && message.metadata.recursion_available);
    assert!(message.metadata.recursion_desired, "it is what the client said");
    assert!(message.queries[0].name().eq_case(&Name::from_ascii("Video.").unwrap()));
    let found: Vec<IpAddr> = message.answers.iter().filter_map(|record| record.data.ip_addr()).collect();
    assert_eq!(found, addresses);
    assert!(message.answers.iter().all(|record| record.ttl == 10));
    assert!(message.edns.is_none(), "who speaks no EDNS is not answered with it");

    let named = read(&question("5.0.18.198.in-addr.arpa.", RecordType::PTR).answer(&Answer::Name("video"), 10));
    assert_eq!(named.answers[0].data, RData::PTR(PTR(Name::from_ascii("video.").unwrap())));
    for (answer, code) in [
        (Answer::Addresses(&[]), ResponseCode::NoError),
        (Answer::NoSuchName, ResponseCode::NXDomain),
        (Answer::Failed, ResponseCode::ServFail),
    ] {
        let message = read(&question("x.", RecordType::TXT).answer(&answer, 10));
        assert_eq!((message.metadata.response_code, message.answers.len()), (code, 0));
    }
}

#[test]
fn edns_is_answered_with_edns_and_bounds_what_goes_by_udp() {
    for (room, bytes) in [(None, 512), (Some(100), 512), (Some(1232), 1232), (Some(65_535), 4096)] {
        assert_eq!(Question::parse(&asked("a.", RecordType::A, room)).unwrap().room(), bytes);
    }
    let question = Question::parse(&asked("a.", RecordType::A, Some(1232))).unwrap();
    assert_eq!(read(&question.answer(&Answer::NoSuchName, 0)).max_payload(), 1232);
}

#[test]
fn what_is_no_question_is_refused_and_answers_are_not_answered() {
    let good = asked("a.", RecordType::A, None);
    let code = |bytes: &[u8]| {
        let refusal = Question::parse(bytes).unwrap_err().0?;
        let message = read(&refusal);
        assert_eq!(message.metadata.id, u16::from_be_bytes([bytes[0], bytes[1]]));
        Some(message.metadata.response_code)
    };
    assert_eq!(code(b"short"), None);
    let mut response = good.clone();
    response[2] |= 0x80;
    assert_eq!(code(&response), None);
    let mut notify = good.clone();
    notify[2] = 4 << 3;
    assert_eq!(code(&notify), Some(ResponseCode::NotImp));
    assert_eq!(code(&good[..good.len() - 1]), Some(ResponseCode::FormErr), "it ends within the question");
    let mut none = good[..12].to_vec();
    none[5] = 0;
    assert_eq!(code(&none), Some(ResponseCode::FormErr));
    let mut two = good.clone();
    two[5] = 2;
    two.extend_from_slice(&good[12..]);
    assert_eq!(code(&two), Some(ResponseCode::FormErr));
    let mut later = asked("a.", RecordType::A, Some(1232));
    let version = later.len() - 5;
    later[version] = 1;
    let refusal = read(&Question::parse(&later).unwrap_err().0.unwrap());
    // The code BADVERS, which shares its number with BADSIG.
    assert_eq!(u16::from(refusal.metadata.response_code), 16);
}

#[test]
fn only_the_answer_to_the_question_is_believed() {
    let question = question("Host.example.", RecordType::A);
    let answer = |id: u16, name: &str, kind| {
        let mut message = Message::response(id, OpCode::Query);
        message.queries.push(Query::query(Name::from_ascii(name).unwrap(), kind));
        message.to_vec().unwrap()
    };
    assert!(question.is_answered_by(9, &answer(9, "hOST.example.", RecordType::A)));
    assert!(!question.is_answered_by(9, &answer(8, "host.example.", RecordType::A)), "another id");
    assert!(!question.is_answered_by(9, &answer(9, "other.example.", RecordType::A)), "another name");
    assert!(!question.is_answered_by(9, &answer(9, "host.example.", RecordType::AAAA)), "another kind");
    assert!(!question.is_answered_by(77, &asked("host.example.", RecordType::A, None)), "our own question");
    let bare = |code| Message::error_msg(9, OpCode::Query, code).to_vec().unwrap();
    assert!(question.is_answered_by(9, &bare(ResponseCode::ServFail)), "a complaint without the question");
    assert!(!question.is_answered_by(9, &bare(ResponseCode::NoError)));
    assert!(!question.is_answered_by(9, &bare(ResponseCode::NXDomain)));
    assert!(is_failure(&bare(ResponseCode::Refused)) && !is_failure(&bare(ResponseCode::NXDomain)));
}

#[test]
fn what_is_passed_on_keeps_its_bytes_or_is_cut() {
    let question = question("a.example.", RecordType::TXT);
    let mut answer = Message::response(9, OpCode::Query);
    answer.metadata.response_code = ResponseCode::NXDomain;
    answer.queries.push(Query::query(Name::from_ascii("a.example.").unwrap(), RecordType::TXT));
    let bytes = answer.to_vec().unwrap();
    let passed = question.pass(bytes.clone(), 512);
    assert_eq!((&passed[..2], &passed[2..]), (&77u16.to_be_bytes()[..], &bytes[2..]));
    let cut = read(&question.pass([bytes, vec![0; 600]].concat(), 512));
    assert!(cut.metadata.truncation);
    assert_eq!((cut.metadata.id, cut.metadata.response_code), (77, ResponseCode::NXDomain));
    assert_eq!(cut.queries.len(), 1);
}

proptest! {
    #[test]
    fn nothing_that_comes_is_more_than_refused(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
        match Question::parse(&bytes) {
            Ok(question) => {
                let answer = question.answer(&Answer::NoSuchName, 1);
                prop_assert!(Message::from_vec(&answer).is_ok());
                prop_assert!(question.is_answered_by(question.id, &answer));
                let _ = (question.name(), question.address());
            }
            Err(Refusal(answer)) => prop_assert!(answer.is_none_or(|answer| answer.len() >= HEADER)),
        }
    }
}
