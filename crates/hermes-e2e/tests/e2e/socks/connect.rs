//! CONNECT: by curl in both of its ways, and each reply by hand.

use std::process::Stdio;

use hermes_testkit::{
    ca::Subject,
    listener_client::{ListenerClient, NODE_NAME},
    raw_http1::{RawHttp1, SILENCE},
    skip::skip,
};
use tokio::process::Command;

use crate::socks::lab::{ASSOCIATE, BIND, CONNECT, Lab, ask, connected, greeted, overlay, reply, target};

/// Runs curl through a SOCKS proxy; `None` where there is none.
async fn curl(test: &str, args: &[&str]) -> Option<(Option<i32>, String, String)> {
    let mut command = Command::new("curl");
    command.args(["--silent", "--show-error", "--max-time", "30"]).args(args).stdin(Stdio::null()).kill_on_drop(true);
    for name in ["all_proxy", "no_proxy", "http_proxy", "ALL_PROXY", "NO_PROXY"] {
        command.env_remove(name);
    }
    match tokio::time::timeout(SILENCE * 2, command.output()).await.expect("curl hangs") {
        Ok(output) => {
            let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
            Some((output.status.code(), text(&output.stdout), text(&output.stderr)))
        }
        Err(error) => {
            skip(test, &format!("curl does not run: {error}"));
            None
        }
    }
}

#[tokio::test]
async fn curl_leaves_names_to_the_overlay() {
    let lab = Lab::new().await;
    let proxy = lab.socks().to_string();
    let args = ["--socks5-hostname", &*proxy, "http://VIDEO/"];
    let Some((code, out, err)) = curl("curl_leaves_names_to_the_overlay", &args).await else { return };
    assert_eq!((code, &*out), (Some(0), "web"), "{err}");
    let record = lab.near.record(|record| record["listener"] == "socks").await;
    assert_eq!(record["authority"], "video:80", "{record}");
    assert_eq!((&record["kind"], &record["method"]), (&"tcp".into(), &"CONNECT".into()), "{record}");
    assert_eq!((&record["user"], &record["status"]), (&"alice".into(), &200.into()), "{record}");
    assert_eq!(record["route"], "away", "{record}");
    // The next node sees the very request that it would see behind an HTTP listener.
    let there = lab.far.record(|record| record["route"] == "web").await;
    assert_eq!(there["method"], "CONNECT", "{there}");
}

#[tokio::test]
async fn curl_resolves_names_itself_with_socks5() {
    let lab = Lab::new().await;
    let (proxy, url) = (lab.socks().to_string(), format!("http://{}/", lab.services.web.address()));
    let test = "curl_resolves_names_itself_with_socks5";
    let Some((code, out, err)) = curl(test, &["--socks5", &proxy, &url]).await else { return };
    assert_eq!((code, &*out), (Some(0), "web"), "{err}");
    // What failed, in curl's own words: the reply's code.
    for (url, code) in [("http://DENIED/", "(2)"), ("http://UNKNOWN:9/", "(4)"), ("http://NOBODY:7/", "(5)")] {
        let Some((status, _, err)) = curl(test, &["--socks5-hostname", &proxy, url]).await else { return };
        assert_eq!(status, Some(97), "{url}: {err}");
        assert!(err.contains(code), "{url}: {err}");
    }
}

#[tokio::test]
async fn bytes_pass_in_both_directions_and_each_ends_separately() {
    let lab = Lab::new().await;
    for socks in [lab.socks(), lab.near.address("socks-6")] {
        let mut http1 = connected(socks, "ECHO", 7).await;
        let text = "there and back\n".repeat(10_000);
        http1.send(&text).await.unwrap();
        assert_eq!(http1.exactly(text.len()).await.unwrap(), text.as_bytes());
        http1.finish().await.unwrap();
        assert_eq!(http1.to_end().await.unwrap(), b"");
    }
    lab.quiet().await;
}

#[tokio::test]
async fn a_client_that_does_not_wait_for_replies_loses_no_bytes() {
    let lab = Lab::new().await;
    let mut http1 = RawHttp1::connect(lab.socks()).await.unwrap();
    let all = [&[5, 3, 1, 0, 2][..], &[5, CONNECT, 0], &target("ECHO", 7), b"ahead"].concat();
    http1.send(all).await.unwrap();
    assert_eq!(http1.exactly(2).await.unwrap(), [5, 0]);
    assert_eq!(reply(&mut http1).await.unwrap().0, 0);
    assert_eq!(http1.exactly(5).await.unwrap(), b"ahead");
}

#[tokio::test]
async fn each_failure_has_its_reply() {
    let lab = Lab::new().await;
    let table = [
        (CONNECT, "DENIED", 80, 2, "a route says no"),
        (CONNECT, "10.0.0.1", 80, 2, "an address out of reach"),
        (CONNECT, "UNKNOWN", 9, 4, "no route"),
        (CONNECT, "ELSEWHERE", 80, 4, "no route at the next node"),
        (CONNECT, "NOBODY", 7, 5, "refused at the next node"),
        (CONNECT, "NOWHERE", 80, 5, "the next node is not there"),
        (CONNECT, "VIDEO", 0, 1, "no port"),
        (CONNECT, "two words", 80, 1, "no name"),
        (BIND, "VIDEO", 80, 7, "BIND"),
        (9, "VIDEO", 80, 7, "a command of nobody's"),
    ];
    for (command, host, port, code, what) in table {
        let mut http1 = greeted(lab.socks()).await;
        let (got, _) = ask(&mut http1, command, host, port).await.unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(got, code, "{what}");
        assert_eq!(http1.to_end().await.unwrap(), b"", "{what}: closed in order");
    }
    // What failed is in the records, as over HTTP.
    let denied = lab.near.record(|record| record["authority"] == "denied:80").await;
    assert_eq!(denied["status"], 403, "{denied}");
    lab.quiet().await;
}

#[tokio::test]
async fn a_client_that_requires_a_password_is_rejected() {
    let lab = Lab::new().await;
    let mut http1 = RawHttp1::connect(lab.socks()).await.unwrap();
    http1.send([5, 1, 2]).await.unwrap();
    assert_eq!(http1.exactly(2).await.unwrap(), [5, 0xff]);
    assert_eq!(http1.to_end().await.unwrap(), b"");
    lab.near.says("insists on authentication").await;
}

#[tokio::test]
async fn a_certificate_identifies_a_tls_client_and_datagrams_are_refused() {
    let (overlay, lab) = (overlay(), Lab::new().await);
    let document = "
listeners:
- {name: socks, bind: '127.0.0.1:0', protocol: socks5, tls: {client: required}}
routes:
- {name: echo, match: {kind: tcp, authority: 'ECHO:7', user: alice}, terminate: {tcp: '$ECHO'}}
";
    let draft = overlay.node("secure").identity(&Subject::node("secure").with_dns(NODE_NAME)).unwrap();
    let node = lab.services.fill(draft.document(document)).start().await.unwrap();
    let alice = overlay.authority().issue(&Subject::node("laptop").with_user("alice")).unwrap();
    let listener = ListenerClient::tls(node.address("socks"), overlay.authority().pem(), Some(&alice));
    for (command, code) in [(CONNECT, 0), (ASSOCIATE, 7)] {
        let mut http1 = RawHttp1::new(listener.stream(&[]).await.unwrap());
        http1.send([&[5, 1, 0, 5, command, 0][..], &target("ECHO", 7), b"hello"].concat()).await.unwrap();
        assert_eq!(http1.exactly(4).await.unwrap(), [5, 0, 5, code]);
        if code == 0 {
            assert_eq!(http1.exactly(8 + 5).await.unwrap()[8..], *b"hello");
        }
    }
    let record = node.record(|record| record["authority"] == "echo:7").await;
    assert_eq!(record["user"], "alice", "{record}");
}
