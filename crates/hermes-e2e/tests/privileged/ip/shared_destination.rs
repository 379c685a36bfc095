//! Two virtual addresses that lead to the same machine: replies must return from the address that was asked.
//!
//! In: a near node that captures both addresses, a far node that routes both to its own address, pings and
//! connections. Out: each reply comes from the requested address, also after takeovers of either node.

use hermes_testkit::{
    origin::{self, stream},
    overlay::Node,
    poll::until,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use crate::ip::node_chain::{Hop, NodeChain, anywhere, as_root, process};
use crate::ip::pings::pings;

const NEAR: &str = "
workers: 2
drain: 1s
listeners:
- name: l3
  protocol: tun
  device: hermes0
  address: [10.20.0.2, 'fd00:20::2']
  capture: [10.0.0.1/32, 10.0.0.2/32, 'fd00:10::1/128', 'fd00:10::2/128']
  set-headers: {hermes-user: alice}
routes:
- {name: vpn, match: {kind: ip}, upstream: next}
upstreams:
- {name: next, protocol: $PROTOCOL, endpoints: ['$NEXT'], tls: {}}
";

const FAR: &str = "
workers: 2
drain: 1s
listeners:
- {name: overlay, bind: '0.0.0.0:9443', protocol: http, http3: true, tls: {client: required}}
routes:
- name: v4
  match: {kind: ip, network: 10.0.0.0/24}
  terminate: {tun: gw0, address: [10.9.0.1], dnat: 10.9.0.1, assign: [10.20.0.0/24]}
- name: v6
  match: {kind: ip, network: 'fd00:10::/64'}
  terminate: {tun: gw0, address: ['fd00:9::1'], dnat: 'fd00:9::1', assign: ['fd00:20::/64']}
";

const ASKED: [&str; 4] = ["10.0.0.1", "10.0.0.2", "fd00:10::1", "fd00:10::2"];
const ECHO: u16 = 7;

async fn start(chain: &NodeChain, index: usize, hop: Hop, called: &str) -> Node {
    let (name, document) = [("near", NEAR), ("node-1", FAR)][index];
    process(chain, index, name, document, hop, called).start().await.unwrap()
}

/// All of them at once.
async fn all_answer(chain: &NodeChain, when: &str) {
    let ping = async |requests: &str| {
        pings(chain.near(), &["-i", "0.02"], 20, requests).await.all_came(chain, &format!("{when}, {requests}")).await;
    };
    let [one, two, three, four] = ASKED;
    tokio::join!(ping(one), ping(two), ping(three), ping(four));
}

fn answered(hop: Hop) {
    as_root(&format!("two addresses of one machine, {hop:?}"), || async {
        let mut chain = NodeChain::empty(2);
        chain.nodes.push(start(&chain, 1, hop, "far-0").await);
        chain.nodes.insert(0, start(&chain, 0, hop, "near-0").await);
        for requests in ASKED {
            until("it answers", async || chain.near().output(&["ping", "-c1", "-W0.3", requests]).await.is_ok()).await;
        }
        all_answer(&chain, "at first").await;
        let listening = async { stream::echo(origin::listen(anywhere(ECHO)).unwrap()).unwrap() };
        let _echo = chain.far().run(listening).await.unwrap();
        let mut connections = Vec::new();
        for requests in ASKED {
            let target: std::net::IpAddr = requests.parse().unwrap();
            connections.push(chain.near().run(TcpStream::connect((target, ECHO))).await.unwrap().unwrap());
        }
        for (number, index) in [1, 0, 1].into_iter().enumerate() {
            let successor = start(&chain, index, hop, &format!("process-{number}")).await;
            let old = std::mem::replace(&mut chain.nodes[index], successor);
            until("the old process parts", async || old.log().contains("another process has the listeners")).await;
            // What it has moves to the new one.
            old.signal(nix::sys::signal::Signal::SIGTERM).unwrap();
            assert!(old.ended().await.success());
            all_answer(&chain, &format!("takeover {number}, at place {index}")).await;
            for (requests, connection) in ASKED.iter().zip(&mut connections) {
                connection.write_all(&[number as u8]).await.unwrap();
                let received = connection.read_u8().await.unwrap_or_else(|error| panic!("{requests}: {error}"));
                assert_eq!(usize::from(received), number, "{requests}");
            }
        }
    });
}

#[test]
fn each_address_of_a_machine_answers_for_itself_with_http_2_between() {
    answered(Hop::H2);
}

#[test]
fn each_address_of_a_machine_answers_for_itself_with_http_3_between() {
    answered(Hop::H3);
}
