//! What no resolver sends, and too much of what any does.

use std::time::Duration;

use hermes_testkit::{poll::until, raw_http1::RawHttp1};
use hickory_proto::{op::ResponseCode, rr::RecordType};
use tokio::net::{TcpStream, UdpSocket};

use crate::dns::lab::{ANY, Lab, Server, addresses, ask, by_tcp, by_udp, question, receive, send};

async fn still_answers(lab: &Lab) {
    let requests = question("VIDEO", RecordType::A);
    assert_eq!(addresses(&by_udp(lab.dns(), &requests).await.unwrap()).len(), 1);
    assert_eq!(addresses(&by_tcp(lab.dns(), &requests).await.unwrap()).len(), 1);
}

#[tokio::test]
async fn malformed_dns_queries_are_refused_or_ignored() {
    let lab = Lab::new().await;
    let good = question("VIDEO", RecordType::A).to_vec().unwrap();
    let with = |at: usize, byte: u8| {
        let mut message = good.clone();
        message[at] = byte;
        message
    };
    // Notimp for another operation, Formerr for what cannot be read: questions that end early, too many, loops of names.
    let looping = [&good[..12], b"\xc0\x0c\0\x01\0\x01"].concat();
    for (message, code) in [
        (with(2, 5 << 3), 4),
        (with(5, 0), 1),
        (with(5, 9), 1),
        (with(7, 200), 1),
        (good[..20].to_vec(), 1),
        (looping, 1),
    ] {
        let answer = ask(lab.dns(), &message).await.unwrap();
        assert_eq!((&answer[..2], answer[3] & 0xf), (&message[..2], code), "{message:?}");
    }
    // To answer an answer could go on for ever; what has no header cannot be answered.
    let socket = UdpSocket::bind(ANY).await.unwrap();
    for message in [with(2, 0x81), b"".to_vec(), b"short".to_vec()] {
        socket.send_to(&message, lab.dns()).await.unwrap();
    }
    lab.node.metric_reaches("hermes_dns_questions_total", "refused", 9.0).await;
    let silent = socket.try_recv(&mut [0; 512]).unwrap_err();
    assert_eq!(silent.kind(), std::io::ErrorKind::WouldBlock);
    still_answers(&lab).await;
}

#[tokio::test]
async fn a_flood_of_questions_meets_its_limit_and_owned_names_are_still_answered() {
    const LIMIT: usize = 20;
    let silent = Server::start(|_| Vec::new()).await;
    let lab = Lab::with(&format!("dns-questions: {LIMIT}"), &[silent.address]).await;
    let idle = lab.node.descriptors().unwrap();
    let flood = UdpSocket::bind(ANY).await.unwrap();
    for number in 0..10 * LIMIT {
        let message = question(&format!("host-{number}.example"), RecordType::A).to_vec().unwrap();
        flood.send_to(&message, lab.dns()).await.unwrap();
    }
    lab.node.metric_reaches("hermes_limit_hits_total", "dns-questions", 1.0).await;
    let refused = by_udp(lab.dns(), &question("one-more.example", RecordType::A)).await.unwrap();
    assert_eq!(refused.metadata.response_code, ResponseCode::ServFail, "at once");
    still_answers(&lab).await;
    // Each of those that were taken ends, and leaves nothing behind.
    until("no socket is left behind", async || lab.node.descriptors().unwrap() <= idle + 1).await;
    assert!(silent.requests().len() <= 3 * LIMIT, "{}", silent.requests().len());
}

#[tokio::test]
async fn the_flood_of_one_client_leaves_room_for_others() {
    let some = Server::start(|requests| {
        let is_flood = contains(&requests.message, b"flood");
        if is_flood { Vec::new() } else { vec![requests.answer(ResponseCode::NoError).to_vec().unwrap()] }
    })
    .await;
    let lab = Lab::with("dns-questions: 20", &[some.address]).await;
    let flood = UdpSocket::bind("127.0.0.2:0").await.unwrap();
    for number in 0..100 {
        let message = question(&format!("{number}.flood"), RecordType::A).to_vec().unwrap();
        flood.send_to(&message, lab.dns()).await.unwrap();
    }
    lab.node.metric_reaches("hermes_limit_hits_total", "dns-questions", 1.0).await;
    let answer = by_udp(lab.dns(), &question("www.example", RecordType::A)).await.unwrap();
    assert_eq!(answer.metadata.response_code, ResponseCode::NoError);
}

/// The flood's questions are answered with a failure at once, not when they would have timed out.
#[tokio::test]
async fn questions_of_one_client_yield_to_those_of_others_until_both_have_as_many() {
    let silent = Server::start(|_| Vec::new()).await;
    let lab = Lab::with("dns-questions: 20", &[silent.address]).await;
    let ask = async |socket: &UdpSocket, name: String| {
        let message = question(&name, RecordType::A).to_vec().unwrap();
        socket.send_to(&message, lab.dns()).await.unwrap();
        let requests = || silent.requests().iter().any(|requests| contains(&requests.message, name.as_bytes()));
        until("the other server is asked", async || requests()).await;
    };
    let (flood, other) = (UdpSocket::bind("127.0.0.2:0").await.unwrap(), UdpSocket::bind(ANY).await.unwrap());
    for number in 0..20 {
        ask(&flood, format!("flood-{number}")).await;
    }
    for number in 0..10 {
        ask(&other, format!("other-{number}")).await;
    }
    lab.node.metric_reaches("hermes_limit_hits_total", "dns-questions", 10.0).await;
}

fn contains(message: &[u8], part: &[u8]) -> bool {
    message.windows(part.len()).any(|window| window == part)
}

#[tokio::test]
async fn a_connection_carries_many_questions_and_bad_ones_end_it() {
    let slow = Server::start(|_| Vec::new()).await;
    let lab = Lab::with("header-timeout: 500ms", &[slow.address]).await;
    let mut stream = TcpStream::connect(lab.dns()).await.unwrap();
    // Whoever waits for another server holds nobody up.
    send(&mut stream, &question("slow.example", RecordType::A).to_vec().unwrap()).await.unwrap();
    let mut owned = question("VIDEO", RecordType::A);
    for id in 1..=100 {
        owned.metadata.id = id;
        send(&mut stream, &owned.to_vec().unwrap()).await.unwrap();
    }
    for _ in 0..100 {
        assert_ne!(receive(&mut stream).await.unwrap()[..2], 4711u16.to_be_bytes());
    }
    let last = receive(&mut stream).await.unwrap();
    assert_eq!((last[..2].to_vec(), last[3] & 0xf), (4711u16.to_be_bytes().to_vec(), 2), "SERVFAIL");
    // A length that no question has; a message that does not go on; one in single bytes.
    for beginning in [&b"\xff\xff"[..], b"\x00", b"\x00\x20\x12\x34"] {
        let mut http1 = RawHttp1::connect(lab.dns()).await.unwrap();
        http1.send(beginning).await.unwrap();
        assert_eq!(http1.to_end().await.unwrap_or_default(), b"", "{beginning:?}");
    }
    let mut http1 = RawHttp1::connect(lab.dns()).await.unwrap();
    for byte in [0, 200].into_iter().chain(std::iter::repeat_n(1, 200)) {
        if http1.send([byte]).await.is_err() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(http1.to_end().await.unwrap_or_default(), b"");
    lab.node.metric_reaches("hermes_limit_hits_total", "slow-client", 3.0).await;
    still_answers(&lab).await;
}
