//! The framings: what a reader gets is what was published.

#![allow(clippy::unwrap_used)]

use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use hermes_relay::fields::EVENT_ID;
use hermes_relay::framing::Framing;
use hermes_relay::framing::multipart::Parser;
use hermes_relay::{Audience, Delivery, NewPublication, Relay, RelayLimits, SubscribeRequest, SubscriptionId};
use proptest::prelude::*;

/// The deliveries of a channel with these publications, of which the first is out of reach.
fn deliveries(bodies: &[Vec<u8>]) -> Vec<Delivery> {
    let relay =
        Relay::new(RelayLimits { history: bodies.len() - 1, history_bytes: u64::MAX, ..RelayLimits::default() });
    let mut first = None;
    for body in bodies {
        let content = NewPublication { body: Bytes::copy_from_slice(body).into(), ..NewPublication::default() };
        let receipt = relay.publish_realtime("host/c", content, Audience::All, 7, Duration::ZERO).unwrap();
        first = first.or(receipt.id);
    }
    let before = first.map(|id| hermes_relay::EventId { sequence: 0, ..id });
    let request = SubscribeRequest {
        id: SubscriptionId(1),
        subject: "s".into(),
        channels: vec![("host/c".into(), before)],
        group: None,
        timeout: Duration::from_secs(1),
        behind: None,
        is_stand_by: false,
        epoch: 7,
    };
    let subscription = relay.subscribe(request, Duration::ZERO).unwrap();
    let mut all = Vec::new();
    let mut cx = Context::from_waker(Waker::noop());
    while let Poll::Ready(Ok(delivery)) = subscription.poll_next(&mut cx, Duration::ZERO) {
        all.push(delivery);
    }
    assert_eq!(all.len(), bodies.len());
    all
}

fn written(framing: &Framing, deliveries: &[Delivery]) -> Vec<u8> {
    let mut out = framing.begin("0000000000000007-0").to_vec();
    for delivery in deliveries {
        let position = match delivery {
            Delivery::Publication(publication) => publication.id.unwrap().to_string(),
            Delivery::Gap { until, .. } => until.to_string(),
        };
        framing.write(&mut out, delivery, &position, false);
        out.extend(framing.heartbeat());
    }
    out.extend(framing.end());
    out
}

proptest! {
    #[test]
    fn parts_are_read_as_they_were_written(
        bodies in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 2..6), step in 1..400_usize
    ) {
        let framing = Framing::select(None, 9).unwrap();
        let bytes = written(&framing, &deliveries(&bodies));
        let content_type = framing.content_type();
        let mut parser = Parser::new(content_type.to_str().unwrap(), 300).unwrap();
        let mut parts = Vec::new();
        for piece in bytes.chunks(step) {
            parser.push(piece);
            while let Some(part) = parser.next_part().unwrap() {
                parts.push(part);
            }
        }
        prop_assert!(parser.has_ended());
        parts.retain(|part| !part.is_heartbeat());
        prop_assert_eq!(parts[0].headers.get("hermes-missed").unwrap(), "1");
        let read: Vec<_> = parts[1..].iter().map(|part| part.body.to_vec()).collect();
        prop_assert_eq!(&read[..], &bodies[1..]);
        prop_assert_eq!(parts[1].headers.get(EVENT_ID).unwrap(), "0000000000000007-2");
    }

    #[test]
    fn garbage_is_an_error_and_never_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let mut parser = Parser::new("multipart/mixed; boundary=x", 100).unwrap();
        parser.push(b"--x\r\n");
        parser.push(&bytes);
        while let Ok(Some(_)) = parser.next_part() {}
    }
}

#[test]
fn a_long_part_is_skipped_as_it_arrives() {
    let mut parser = Parser::new("multipart/mixed; boundary=x", 100).unwrap();
    parser.push(b"--x\r\ncontent-length: 101\r\n\r\n");
    assert_eq!(parser.next_part().unwrap().unwrap().skipped, Some(101));
    for _ in 0..100 {
        parser.push(b"-");
        assert_eq!(parser.next_part(), Ok(None));
    }
    parser.push(b"-\r\n--x\r\ncontent-length: 1\r\n\r\n!");
    assert_eq!(parser.next_part().unwrap().unwrap().body, "!");
}

#[test]
fn events_and_lines_carry_any_content() {
    let bodies = [b"lost".to_vec(), b"a\n\nb".to_vec(), b"\r\n".to_vec(), vec![0xFF, 0], b"".to_vec()];
    let all = deliveries(&bodies);
    let events = String::from_utf8(written(&Framing::EventStream, &all)).unwrap().replace(":\n\n", "");
    let id = |number: usize| format!("id: 0000000000000007-{number}\n");
    let expected = format!(
        "{}\n{}event: gap\ndata: 1\n\n{}data: a\ndata: \ndata: b\n\n{}event: base64\ndata: DQo=\n\n{}event: base64\n\
         data: /wA=\n\n{}data: \n\n",
        id(0),
        id(1),
        id(2),
        id(3),
        id(4),
        id(5)
    );
    assert_eq!(events, expected);
    let lines = String::from_utf8(written(&Framing::JsonLines, &all)).unwrap();
    let lines: Vec<serde_json::Value> =
        lines.lines().filter(|line| !line.is_empty()).map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines[0]["missed"], 1);
    assert_eq!(lines[1]["data"], "a\n\nb");
    assert_eq!(lines[2]["data"], "\r\n");
    assert_eq!(lines[3]["base64"], "/wA=");
    assert_eq!(lines[4]["data"], "");
}
