//! What no program should send: half messages, other protocols, one byte at a time, floods.

use std::time::Duration;

use hermes_testkit::{poll::until, raw_http1::RawHttp1};
use tokio::net::{TcpSocket, TcpStream};

use crate::socks::lab::{ASSOCIATE, Association, CONNECT, Lab, ask, connected, greeted, target};

/// All that it says up to its end.
async fn last_words(mut http1: RawHttp1<TcpStream>, what: &str) -> Vec<u8> {
    let ended = http1.to_end().await;
    let waits = matches!(&ended, Err(error) if error.kind() == std::io::ErrorKind::TimedOut);
    assert!(!waits, "{what}: the connection stays open");
    ended.unwrap_or_else(|_| http1.unread().to_vec())
}

async fn still_serves(lab: &Lab) {
    let mut http1 = connected(lab.socks(), "ECHO", 7).await;
    http1.send("hello").await.unwrap();
    assert_eq!(http1.exactly(5).await.unwrap(), b"hello");
}

#[tokio::test]
async fn malformed_socks_is_closed_with_an_error_reply() {
    let lab = Lab::new().await;
    let table: [(&[u8], &[u8]); 8] = [
        (b"\x04\x01\x00\x50\x7f\x00\x00\x01\x00", b""),
        (b"GET / HTTP/1.1\r\n\r\n", b""),
        (b"\x16\x03\x01\x02\x00\x01", b""),
        (b"\x05\x00", b"\x05\xff"),
        (b"\x05\x01\x00\x04\x01", b"\x05\x00"),
        (b"\x05\x01\x00\x05\x01\x00\x02", b"\x05\x00\x05\x08\x00\x01\0\0\0\0\0\0"),
        (b"\x05\x01\x00\x05\x01\x07\x01", b"\x05\x00\x05\x01\x00\x01\0\0\0\0\0\0"),
        (b"\x05\x01\x00\x05\x01\x00\x03\x00", b"\x05\x00\x05\x01\x00\x01\0\0\0\0\0\0"),
    ];
    for (bytes, words) in table {
        let mut http1 = RawHttp1::connect(lab.socks()).await.unwrap();
        http1.send(bytes).await.unwrap();
        http1.finish().await.unwrap();
        assert_eq!(last_words(http1, &format!("{bytes:?}")).await, words, "{bytes:?}");
    }
    lab.near.metric_reaches("hermes_tls_handshake_failures_total", "socks", table.len() as f64).await;
    still_serves(&lab).await;
}

#[tokio::test]
async fn clients_without_a_request_are_closed() {
    let lab = Lab::with("limits: {header-timeout: 500ms}", "").await;
    let longest = [&[5, 1, 0, 5, CONNECT, 0, 3, 255][..], &[b'a'; 200]].concat();
    let beginnings: [&[u8]; 5] = [b"", b"\x05", b"\x05\xff\x00\x01", b"\x05\x01\x00", &longest];
    let mut waiting = Vec::new();
    for bytes in beginnings {
        let mut http1 = RawHttp1::connect(lab.socks()).await.unwrap();
        http1.send(bytes).await.unwrap();
        waiting.push(http1);
    }
    // A byte now and then wins no time.
    let mut trickling = RawHttp1::connect(lab.socks()).await.unwrap();
    for byte in &longest {
        if trickling.send([*byte]).await.is_err() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    waiting.push(trickling);
    let count = waiting.len();
    for http1 in waiting {
        let words = last_words(http1, "a beginning").await;
        assert!(words.is_empty() || words == [5, 0], "{words:?}");
    }
    lab.near.metric_reaches("hermes_limit_hits_total", "slow-client", count as f64).await;
    still_serves(&lab).await;
}

#[tokio::test]
async fn a_flood_of_associations_and_targets_meets_its_limit() {
    const FLOWS: usize = 20;
    let lab = Lab::with(&format!("limits: {{udp-flows: {FLOWS}}}"), "").await;
    // What stays: the connection to the next node, and what the process holds of UDP.
    Association::open(lab.socks()).await.echo("ECHO", 7, b"x").await;
    lab.quiet().await;
    let idle = lab.near.descriptors().unwrap();
    // Half of the room is taken by associations, one after the other until there is none.
    let mut held = Vec::new();
    for _ in 0..FLOWS / 2 {
        held.push(Association::open(lab.socks()).await);
    }
    // One of them asks for all the world.
    for number in 0..10 * FLOWS {
        held[0].send(&format!("HOST-{number}"), 7, b"x").await;
    }
    lab.near.metric_reaches("hermes_limit_hits_total", "udp-flows", 1.0).await;
    lab.near.metric_reaches("hermes_datagrams_dropped_total", "udp-flows", 1.0).await;
    lab.near.quiet().await;
    // There is no HOST: its flows fail, and their places are given back.
    for _ in 0..FLOWS / 2 {
        held.push(Association::open(lab.socks()).await);
    }
    let mut refused = greeted(lab.socks()).await;
    assert_eq!(ask(&mut refused, ASSOCIATE, "0.0.0.0", 0).await.unwrap().0, 1);
    still_serves(&lab).await;
    drop((held, refused));
    until("no socket is left behind", async || lab.near.descriptors().unwrap() <= idle).await;
    Association::open(lab.socks()).await.echo("ECHO", 7, b"room again").await;
}

#[tokio::test]
async fn associations_of_one_client_yield_to_those_of_others_until_both_have_as_many() {
    let lab = Lab::with("limits: {udp-flows: 10}", "").await;
    let open = async |from: &str| {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(from.parse().unwrap()).unwrap();
        let mut http1 = RawHttp1::new(socket.connect(lab.socks()).await.unwrap());
        http1.send([5, 1, 0]).await.unwrap();
        assert_eq!(http1.exactly(2).await.unwrap(), [5, 0]);
        assert_eq!(ask(&mut http1, ASSOCIATE, "0.0.0.0", 0).await.unwrap().0, 0);
        http1
    };
    let (mut flood, mut others) = (Vec::new(), Vec::new());
    for _ in 0..10 {
        flood.push(open("127.0.0.2:0").await);
    }
    for _ in 0..5 {
        others.push(open("127.0.0.1:0").await);
    }
    // Those that were open for longest have ended.
    for yielded in &mut flood[..5] {
        assert_eq!(yielded.to_end().await.unwrap_or_default(), b"");
    }
}

#[tokio::test]
async fn bytes_on_an_association_connection_are_discarded() {
    let lab = Lab::new().await;
    let mut association = Association::open(lab.socks()).await;
    association.echo("ECHO", 7, b"x").await;
    let before = lab.near.memory().unwrap();
    for _ in 0..64 {
        association.http1.send(vec![0; 1 << 20]).await.unwrap();
    }
    assert!(lab.near.memory().unwrap() < before + (16 << 20), "it keeps what nobody reads");
    association.echo("ECHO", 7, b"still here").await;
}

#[tokio::test]
async fn clients_that_disconnect_at_any_moment_leak_nothing() {
    let lab = Lab::new().await;
    let whole = [&[5, 1, 0, 5, CONNECT, 0][..], &target("ECHO", 7), b"payload"].concat();
    for length in 0..=whole.len() {
        let mut http1 = RawHttp1::connect(lab.socks()).await.unwrap();
        http1.send(&whole[..length]).await.unwrap();
    }
    for _ in 0..20 {
        let association = Association::open(lab.socks()).await;
        association.send("ECHO", 7, b"x").await;
    }
    lab.quiet().await;
    still_serves(&lab).await;
}
