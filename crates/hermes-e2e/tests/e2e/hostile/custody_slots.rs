//! A neighbour begins exchanges of custody without data, until it has no slot left.
//!
//! Meanwhile another neighbour, a second client, a certified node and the admin endpoint are served. The slots are free
//! again soon after the neighbour has closed its channel.

use std::net::{IpAddr, Ipv4Addr};

use bytes::BytesMut;
use hermes_testkit::{ca::Subject, listener_client::NODE_NAME, overlay::Node, poll::until, raw_http1::RawHttp1};
use hermes_wire::custody::{ExchangeId, PATH, PROTOCOL, Record};
use tokio::net::TcpStream;

use crate::hostile::client_limits::{connect, others_are_served};
use crate::hostile::lab::overlay;

const FLOODER: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 4));
const NEIGHBOUR: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 5));
const SLOTS: usize = 100;

const DOCUMENT: &str = "
workers: 2
limits: {custody-exchanges: 100}
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http, trust: [127.0.0.4, 127.0.0.5]}
- {name: tls, bind: '127.0.0.1:0', protocol: http, tls: {client: optional}}
routes:
- {name: all, respond: {body: here}}
";

/// A channel of custody, as a neighbour opens it.
async fn channel(from: IpAddr, node: &Node) -> RawHttp1<TcpStream> {
    let mut http1 = RawHttp1::new(connect(from, node.address("in")).await.unwrap());
    let head = format!(
        "GET {PATH} HTTP/1.1\r\nHost: fort\r\nConnection: upgrade\r\nUpgrade: {PROTOCOL}\r\nhermes-custody-path: a\r\n\r\n"
    );
    http1.send(head).await.unwrap();
    assert_eq!(http1.head().await.unwrap().status(), 101);
    http1
}

/// Begins exchanges, which have a week to live.
async fn begin(channel: &mut RawHttp1<TcpStream>, count: usize, first: u8) {
    let mut out = BytesMut::new();
    for number in 0..count {
        let mut id = [first; 16];
        id[..8].copy_from_slice(&(number as u64).to_be_bytes());
        Record::Begin { id: ExchangeId(id), left: 7 * 24 * 3600 * 1000 }.put(&mut out);
    }
    channel.send(out.to_vec()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_neighbour_without_data_takes_no_more_than_its_share() {
    let overlay = overlay();
    let draft = overlay.node("fort").identity(&Subject::node("fort").with_dns(NODE_NAME)).unwrap();
    let node = draft.document(DOCUMENT).start().await.unwrap();
    let exchanges = async || node.metric("hermes_custody_exchanges", "").await.unwrap_or_default();
    let refused = async || node.metric("hermes_limit_hits_total", "custody-exchanges").await.unwrap_or_default();
    let mut flooder = channel(FLOODER, &node).await;
    begin(&mut flooder, SLOTS + 20, 1).await;
    until("refused beginnings", async || refused().await > 0.0).await;
    assert!(exchanges().await <= SLOTS as f64 / 2.0 + 1.0, "{}", exchanges().await);
    let mut neighbour = channel(NEIGHBOUR, &node).await;
    begin(&mut neighbour, 10, 2).await;
    until("the other neighbour's exchanges", async || exchanges().await > SLOTS as f64 / 2.0 + 9.0).await;
    others_are_served("beginnings without data", &overlay, &node).await;
    drop(flooder);
    until("free slots", async || exchanges().await <= 10.0).await;
}
