//! connect-ip-go, as client and as proxy: a device of another implementation at one end, ours at the other.
//!
//! In: the program that `scripts/setup.sh` builds. Out: its machine and ours ping each other and move data, IPv4 and
//! IPv6. Skipped loudly where it could not be built.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use hermes_testkit::{
    ca::Subject,
    listener_client::NODE_NAME,
    process::{Program, Running},
    skip::skip,
    tool,
};

use crate::ip::{
    node_chain::{FAR, FAR_DOCUMENT, Hop, NEAR, NEAR_DOCUMENT, NodeChain, PORT, as_root, next},
    pings::pings,
    traffic::iperf,
};

/// What it says when packets go through.
const READY: &str = "ready";
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// `None`, said loudly, where it is not there.
fn found(test: &str) -> Option<PathBuf> {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    tool::find("connect-ip-go", "HERMES_CONNECT_IP_GO", target).map_err(|missing| skip(test, &missing.to_string())).ok()
}

/// Starts it at a place of a line, as a node of the overlay.
fn start(program: &Path, chain: &NodeChain, index: usize, words: &[&str]) -> Running {
    let identity = chain.overlay.authority().issue(&Subject::node("go").standalone().with_dns(NODE_NAME)).unwrap();
    let files = identity.write(chain.overlay.dir(), "go").unwrap();
    let [cert, key, ca] = [&files.cert, &files.key, &files.ca].map(|path| path.to_str().unwrap());
    let known = ["-cert", cert, "-key", key, "-ca", ca];
    let program = Program::new("connect-ip-go", program, chain.overlay.dir()).args(words).args(known);
    let mut running = program.within(Some(&chain.namespaces[index])).start().unwrap();
    assert_eq!(running.wait_first_line(START_TIMEOUT).unwrap(), READY);
    running
}

async fn packets_pass(chain: &NodeChain) {
    chain.answers().await;
    for (from, to) in [(chain.near(), FAR), (chain.far(), NEAR)] {
        for address in to {
            pings(from, &["-i", "0.05", "-s", "1000"], 3, address).await.all_came(chain, address).await;
        }
    }
    for far in FAR {
        for direction in [&["-n", "4M"][..], &["-n", "4M", "-R"]] {
            let report = iperf(chain, far, direction).await;
            let received = &report["end"]["sum_received"];
            assert!(received["bytes"].as_u64() > Some(256 << 10), "{far} {direction:?}: {received}");
        }
    }
}

#[test]
fn the_connect_ip_go_client_uses_our_listener() {
    let test = "connect-ip-go's client at our listener";
    as_root(test, || async {
        let Some(program) = found(test) else { return };
        let mut chain = NodeChain::empty(2);
        chain.add(1, FAR_DOCUMENT, None).await;
        let template = format!("https://{NODE_NAME}/.well-known/masque/ip/*/*/");
        let (at, own) = (format!("{}:{PORT}", next(0)), NEAR.join(","));
        let words = ["client", "-template", &template, "-dial", &at, "-name", NODE_NAME, "-address", &own];
        let _client = start(&program, &chain, 0, &words);
        packets_pass(&chain).await;
    });
}

#[test]
fn the_connect_ip_go_proxy_serves_our_upstream() {
    let test = "connect-ip-go's proxy behind our upstream";
    as_root(test, || async {
        let Some(program) = found(test) else { return };
        let mut chain = NodeChain::empty(2);
        let (at, own) = (format!("{}:{PORT}", next(0)), FAR.join(","));
        let template = format!("https://{at}/");
        let words = ["proxy", "-template", &template, "-listen", &at, "-address", &own];
        let _proxy = start(&program, &chain, 1, &words);
        chain.add(0, NEAR_DOCUMENT, Some(Hop::H3)).await;
        packets_pass(&chain).await;
    });
}
