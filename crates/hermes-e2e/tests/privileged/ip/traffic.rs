//! Traffic of real programs, IPv4 and IPv6, through one, two and four hops of mixed versions.
//!
//! In: rows of nodes. Out: every answer arrives, whatever its length; no program was told an MTU.

use std::time::{Duration, Instant};

use hermes_testkit::{
    dns::{Dns, Record, resolving_by},
    origin::{self, stream},
    process::{Port, Program},
};
use serde_json::Value;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use crate::ip::node_chain::{FAR, Hop, NodeChain, anywhere, as_root};

/// Where the far end echoes.
const ECHO: u16 = 22;
const IPERF: u16 = 5201;
/// Keys that a user types.
const KEYS: u8 = 100;
/// What a user would take for a hanging terminal.
const NO_KEY_TAKES: Duration = Duration::from_secs(3);

#[test]
fn one_hop_over_http_1() {
    through(&[Hop::H1]);
}

#[test]
fn one_hop_over_http_2() {
    through(&[Hop::H2]);
}

#[test]
fn one_hop_over_http_3() {
    through(&[Hop::H3]);
}

#[test]
fn two_hops_from_http_1_to_http_3() {
    through(&[Hop::H1, Hop::H3]);
}

#[test]
fn two_hops_from_http_3_to_http_2() {
    through(&[Hop::H3, Hop::H2]);
}

#[test]
fn four_hops_of_every_version() {
    through(&[Hop::H2, Hop::H3, Hop::H1, Hop::H3]);
}

fn through(hops: &[Hop]) {
    as_root(&format!("traffic through {hops:?}"), || async {
        let chain = NodeChain::start(hops).await;
        pings(&chain).await;
        transfers(&chain).await;
        keys(&chain).await;
        names(&chain).await;
    });
}

/// Small ones, and the largest that there are.
pub(crate) async fn pings(chain: &NodeChain) {
    for far in FAR {
        for size in ["56", "1400", "65507"] {
            // With -l ping's own socket has room for so many answers.
            let ping = ["ping", "-q", "-c", "3", "-l", "3", "-W", "5", "-s", size, far];
            let text = chain.near().output(&ping).await;
            let all = text.as_ref().is_ok_and(|text| text.contains(" 0% packet loss"));
            assert!(all, "{size} bytes to {far}: {text:?}\n{}", chain.dropped().await);
        }
    }
}

pub(crate) async fn transfers(chain: &NodeChain) {
    for far in FAR {
        for direction in [&["-n", "4M"][..], &["-n", "4M", "-R"]] {
            let report = iperf(chain, far, direction).await;
            let received = &report["end"]["sum_received"];
            // What lies in buffers at the end is not counted.
            assert!(received["bytes"].as_u64() > Some(256 << 10), "{far} {direction:?}: {received}");
        }
        let report = iperf(chain, far, &["-u", "-b", "10M", "-n", "500K"]).await;
        let lost = report["end"]["sum"]["lost_percent"].as_f64();
        assert!(lost.is_some_and(|lost| lost < 10.0), "UDP to {far}: {lost:?} % lost\n{}", chain.dropped().await);
    }
}

/// One transfer, with a server of its own: one that has served is not ready for the next at once.
pub(crate) async fn iperf(chain: &NodeChain, far: &str, more: &[&str]) -> Value {
    let server = Program::new("iperf3", "iperf3", chain.overlay.dir()).args(["-s", "-1"]).within(Some(chain.far()));
    let mut server = server.start().unwrap();
    server.wait_listening(&[Port::Tcp(IPERF)], Duration::from_secs(10)).unwrap();
    let words = [&["iperf3", "-J", "-c", far, "--connect-timeout", "5000"], more].concat();
    let text = match chain.near().output(&words).await {
        Ok(text) => text,
        Err(error) => panic!("{error}\n{}", chain.dropped().await),
    };
    let report: Value = serde_json::from_str(&text).unwrap();
    assert!(report["error"].is_null(), "{words:?}: {}\n{}", report["error"], chain.dropped().await);
    report
}

/// What a user types at a far shell comes back key by key.
async fn keys(chain: &NodeChain) {
    let listening = async { stream::echo(origin::listen(anywhere(ECHO)).unwrap()).unwrap() };
    let _shell = chain.far().run(listening).await.unwrap();
    for far in FAR {
        let far: std::net::IpAddr = far.parse().unwrap();
        let mut terminal = chain.near().run(TcpStream::connect((far, ECHO))).await.unwrap().unwrap();
        terminal.set_nodelay(true).unwrap();
        for key in 0..KEYS {
            let began = Instant::now();
            terminal.write_u8(key).await.unwrap();
            assert_eq!(terminal.read_u8().await.unwrap(), key);
            assert!(began.elapsed() < NO_KEY_TAKES, "key {key} took {:?}", began.elapsed());
        }
    }
}

/// The C library's resolver asks the far end, by UDP and by TCP.
async fn names(chain: &NodeChain) {
    let answers = |name: &str| (name == "web.test").then(|| vec![Record::address(60, [192, 0, 2, 80])]);
    let dns = chain.far().run(Dns::serve(anywhere(53), answers)).await.unwrap().unwrap();
    for far in FAR {
        let wrapper = resolving_by(far.parse().unwrap(), chain.overlay.dir()).unwrap();
        for (option, by_tcp) in [("attempts:3", false), ("use-vc", true)] {
            let before = dns.asked_by_tcp("web.test");
            let options = format!("RES_OPTIONS={option}");
            let mut words: Vec<&str> = wrapper.iter().map(String::as_str).collect();
            words.extend(["env", &options, "getent", "ahostsv4", "web.test"]);
            let text = chain.near().output(&words).await.unwrap();
            assert!(text.contains("192.0.2.80"), "{text}");
            assert_eq!(dns.asked_by_tcp("web.test") > before, by_tcp, "{far} with {option}");
        }
    }
}
