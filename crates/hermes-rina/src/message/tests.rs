//! Tests of the codec: every message survives a round trip, and no datagram causes a panic.

use proptest::prelude::*;

use super::*;

fn bytes(message: &Message) -> Bytes {
    let mut out = BytesMut::new();
    message.encode(&mut out);
    out.freeze()
}

fn name() -> impl Strategy<Value = AppName> {
    ("[a-z]{0,20}", "[0-9.:>]{0,60}").prop_map(|(process, instance)| AppName { process, instance })
}

fn ack_of() -> impl Strategy<Value = AckInfo> {
    (0..=MAX_SEQUENCE, any::<u32>(), any::<Option<u32>>(), any::<u16>(), any::<u16>())
        .prop_map(|(sequence, credit, echo, delay, marks)| AckInfo { sequence, credit, echo, delay, marks })
}

fn cookie_of() -> impl Strategy<Value = Cookie> {
    (any::<u64>(), any::<[u8; 16]>()).prop_map(|(issued, mac)| Cookie { issued, mac })
}

fn management() -> BoxedStrategy<Message> {
    let reason = || (0..REASONS.len()).prop_map(|at| REASONS[at]);
    let endpoint = (any::<u32>(), any::<u32>(), 0..=MAX_SEQUENCE, any::<u32>())
        .prop_map(|(port, cep, sequence, credit)| Endpoint { port, cep, sequence, credit });
    let nonce = any::<[u8; 16]>;
    prop_oneof![
        (nonce(), cookie_of(), any::<u16>(), "[a-z]{0,64}").prop_map(|(nonce, cookie, mtu, dif)| Message::Connect {
            nonce,
            cookie,
            mtu,
            dif
        }),
        (nonce(), cookie_of(), any::<u16>())
            .prop_map(|(nonce, cookie, mtu)| Message::ConnectReply(ConnectReply::Enrolled { nonce, cookie, mtu })),
        (nonce(), cookie_of())
            .prop_map(|(nonce, cookie)| Message::ConnectReply(ConnectReply::Challenge { nonce, cookie })),
        any::<[u8; 8]>().prop_map(|echo| Message::ConnectReply(ConnectReply::NotEnrolled { echo })),
        (any::<bool>(), any::<u32>(), any::<u32>(), 0..=MAX_SEQUENCE, any::<u32>(), name(), name()).prop_map(
            |(unreliable, port, cep, sequence, credit, source, destination)| {
                let qos = if unreliable { Qos::Unreliable } else { Qos::Reliable };
                Message::Create { qos, port, cep, sequence, credit, source, destination }
            }
        ),
        (any::<u32>(), any::<u32>(), proptest::result::maybe_err(endpoint, reason()))
            .prop_map(|(port, cep, result)| Message::CreateReply { port, cep, result }),
        (reason(), any::<u32>(), any::<u32>(), any::<u32>()).prop_map(|(reason, to, from, port)| Message::Delete {
            reason,
            to,
            from,
            port
        }),
        (any::<u32>(), any::<u32>()).prop_map(|(to, from)| Message::DeleteReply { to, from }),
        nonce().prop_map(|nonce| Message::Release { nonce }),
    ]
    .boxed()
}

fn transfer() -> BoxedStrategy<Message> {
    let flags = any::<[bool; 4]>().prop_map(|[fin, reset, mark, probe]| Flags { fin, reset, mark, probe });
    let payload = || any::<Vec<u8>>().prop_map(Bytes::from);
    prop_oneof![
        (any::<[u32; 3]>(), flags, 0..=MAX_SEQUENCE, ack_of(), payload()).prop_map(
            |([to, from, number], flags, sequence, ack, payload)| Message::Data {
                header: DataHeader { to, from, flags, number, sequence, ack },
                payload
            }
        ),
        (any::<[u32; 2]>(), ack_of(), proptest::collection::vec(any::<(u32, u32)>(), 0..=MAX_RANGES))
            .prop_map(|([to, from], ack, ranges)| Message::Ack { to, from, ack, ranges }),
        (any::<[u32; 3]>(), payload()).prop_map(|([to, from, number], payload)| Message::Datagram {
            to,
            from,
            number,
            payload
        }),
    ]
    .boxed()
}

proptest! {
    #[test]
    fn a_message_survives_the_round_trip(message in prop_oneof![management(), transfer()]) {
        prop_assert_eq!(Message::decode(bytes(&message)), Ok(message));
    }

    #[test]
    fn a_truncated_management_message_is_an_error(message in management(), cut in 0usize..80) {
        let whole = bytes(&message);
        let cut = cut.min(whole.len() - 1);
        prop_assert!(Message::decode(whole.slice(..cut)).is_err());
    }

    #[test]
    fn arbitrary_bytes_never_panic(mut data: Vec<u8>, kind in 0u8..20) {
        let _ = Message::decode(Bytes::from(data.clone()));
        if let [version, second, ..] = &mut data[..] {
            (*version, *second) = (VERSION, kind);
        }
        if let Ok(message) = Message::decode(Bytes::from(data.clone())) {
            prop_assert_eq!(bytes(&message), data);
        }
    }
}

#[test]
fn header_lengths_are_those_of_the_encoder() {
    let data = Message::Data { header: DataHeader::default(), payload: Bytes::new() };
    assert_eq!(bytes(&data).len(), DATA_HEADER);
    let ack = Message::Ack { to: 0, from: 0, ack: AckInfo::default(), ranges: Vec::new() };
    assert_eq!(bytes(&ack).len(), ACK_HEADER);
    let datagram = Message::Datagram { to: 0, from: 0, number: 0, payload: Bytes::new() };
    assert_eq!(bytes(&datagram).len(), DATAGRAM_HEADER);
}

#[test]
fn no_reply_is_longer_than_its_request() {
    let cookie = Cookie::default();
    let connect = Message::Connect { nonce: [0; 16], cookie, mtu: 1400, dif: "d".to_owned() };
    let challenge = Message::ConnectReply(ConnectReply::Challenge { nonce: [0; 16], cookie });
    assert!(bytes(&challenge).len() < bytes(&connect).len());
    let hint = Message::ConnectReply(ConnectReply::NotEnrolled { echo: [0; 8] });
    assert!(bytes(&hint).len() + TAG_LEN < ACK_HEADER);
}

#[test]
fn malformed_fields_are_errors() {
    let cases: [(&[u8], MessageError); 6] = [
        (&[], MessageError::Truncated),
        (&[2, 1, 0, 0], MessageError::Version(2)),
        (&[1, 9, 0, 0], MessageError::Kind(9)),
        (&[1, 16, 32, 0], MessageError::Field("flags")),
        (&[1, 17, 0, 33], MessageError::Field("flags")),
        (&[1, 5, 0, 0], MessageError::Field("reason")),
    ];
    for (datagram, error) in cases {
        assert_eq!(Message::decode(Bytes::from_static(datagram)), Err(error), "{datagram:?}");
    }
}
