//! Waits that end: for a connection, for progress, for anything at all. Only that they end is asserted, and how.

use std::{io, time::Duration};

use hermes_testkit::{
    listener_client::{ListenerClient, TunnelMode},
    multiplex::{self, Exchange},
    origin::{self, scripted},
    overlay::{Node, Overlay},
    raw_http1::RawHttp1,
};
use http::{Request, Response};

use crate::http::lab::{next, overlay, seen};

const DOCUMENT: &str = "
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: here, match: {kind: tcp, authority: 'HERE:*'}, terminate: {tcp: '$ORIGIN'}, timeout: $TIMEOUT}
- {name: all, upstream: origin, timeout: $TIMEOUT}
upstreams:
- {name: origin, protocol: $PROTOCOL, overlay: false, endpoints: ['$ORIGIN'] $MORE}
";

async fn node(overlay: &Overlay, protocol: &str, timeout: &str, more: &str, origin: std::net::SocketAddr) -> Node {
    let draft = overlay.node("edge").document(DOCUMENT).with("PROTOCOL", protocol).with("TIMEOUT", timeout);
    draft.with("MORE", more).with("ORIGIN", origin).start().await.unwrap()
}

/// Accepts, and says nothing until the other side goes.
fn silent() -> origin::Origin {
    scripted::h1(|mut http1| async move { http1.to_end().await.map(drop) }).unwrap()
}

#[tokio::test]
async fn a_peer_that_accepts_and_stays_silent_times_out() {
    let origin = silent();
    let overlay = overlay();
    // h2 waits for SETTINGS, TLS for a handshake.
    let ca = overlay.dir().join("ca.pem");
    std::fs::write(&ca, overlay.authority().pem()).unwrap();
    let tls = format!(", tls: {{ca: {}, server-name: web.test, anonymous: true}}", ca.display());
    for (protocol, more) in [("h2", ""), ("h1", &*tls)] {
        let node = node(&overlay, protocol, "{connect: 200ms}", more, origin.address()).await;
        let mut connection = ListenerClient::plain(node.address("in")).h2().await.unwrap();
        let answer = connection.get("http://WEB/").await.unwrap();
        assert_eq!(answer.status, 504, "{protocol}: {answer:?}");
        assert!(answer.header("proxy-status").unwrap().contains("connection_timeout"), "{protocol}: {answer:?}");
        let output = ListenerClient::plain(node.address("in"))
            .tunnel(TunnelMode::ConnectH1, "DB:1")
            .await
            .err()
            .unwrap()
            .to_string();
        assert!(output.contains("504"), "{protocol}: {output}");
    }
}

#[tokio::test]
async fn an_origin_that_never_answers_owes_progress() {
    for version in ["h1", "h2"] {
        let origin = if version == "h1" {
            silent()
        } else {
            scripted::h2(|exchange: Exchange| async move {
                // Both halves are kept: dropping one would reset the stream.
                let Exchange { request, respond: _respond } = exchange;
                multiplex::receive_all(request.into_body()).await?;
                std::future::pending().await
            })
            .unwrap()
        };
        let overlay = overlay();
        let node = node(&overlay, version, "{progress: 1s}", "", origin.address()).await;
        let client = ListenerClient::plain(node.address("in"));
        let answer = client.h2().await.unwrap().get("http://WEB/").await.unwrap();
        assert_eq!(answer.status, 504, "{version}: {answer:?}");
        assert!(answer.header("proxy-status").unwrap().contains("http_response_timeout"), "{version}: {answer:?}");
        let mut http1 = client.h1().await.unwrap();
        http1.send("GET / HTTP/1.1\r\nhost: WEB\r\n\r\n").await.unwrap();
        assert_eq!(http1.head().await.unwrap().status(), 504, "{version}");
    }
}

#[tokio::test]
async fn a_response_that_stops_is_broken_off() {
    let origin = scripted::h1(|mut http1| async move {
        http1.head().await?;
        http1.send("HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n12345").await?;
        http1.to_end().await.map(drop)
    });
    let origin = origin.unwrap();
    let overlay = overlay();
    let node = node(&overlay, "h1", "{idle: 1s}", "", origin.address()).await;
    let client = ListenerClient::plain(node.address("in"));
    let mut http1 = client.h1().await.unwrap();
    http1.send("GET / HTTP/1.1\r\nhost: WEB\r\n\r\n").await.unwrap();
    let head = http1.head().await.unwrap();
    assert!(http1.body(&head).await.is_err());
    assert!(client.h2().await.unwrap().get("http://WEB/").await.is_err());
    node.record(|record| record["error"] == "connection_read_timeout").await;
    node.quiet().await;
}

/// A client that takes nothing holds an origin's answer back for `progress`, and no longer.
#[tokio::test]
async fn a_reader_that_takes_nothing_is_given_up() {
    let origin = scripted::h1(|mut http1| async move {
        http1.head().await?;
        http1.send("HTTP/1.1 200 OK\r\ncontent-length: 1000000000\r\n\r\n").await?;
        let chunk = vec![0; 64 << 10];
        // Until nobody takes any more.
        loop {
            http1.send(&chunk).await?;
        }
    });
    let origin = origin.unwrap();
    let overlay = overlay();
    let node = node(&overlay, "h1", "{progress: 2s, idle: 2s}", "", origin.address()).await;
    let client = ListenerClient::plain(node.address("in"));

    let mut http1 = client.h1().await.unwrap();
    http1.send("GET / HTTP/1.1\r\nhost: WEB\r\n\r\n").await.unwrap();
    let mut connection = client.h2().await.unwrap();
    let (response, _) = connection.open(Request::get("http://WEB/").body(()).unwrap(), true).await.unwrap();
    // Its window stays shut: nothing of the body is taken.
    let response = response.await.unwrap();
    node.quiet().await;
    drop((http1, response));
}

#[tokio::test]
async fn an_idle_tunnel_ends_and_a_busy_one_does_not() {
    let echo = origin::stream::echo(origin::listen("127.0.0.1:0".parse().unwrap()).unwrap()).unwrap();
    let overlay = overlay();
    let node = node(&overlay, "h1", "{idle: 2s}", "", echo.address()).await;
    let client = ListenerClient::plain(node.address("in"));
    let mut idle = client.tunnel(TunnelMode::ConnectH1, "HERE:1").await.unwrap();
    let mut busy = client.tunnel(TunnelMode::ConnectH2, "HERE:1").await.unwrap();
    let mut ended = std::pin::pin!(async { idle.reader.to_end().await });
    let over = loop {
        tokio::select! {
            end = &mut ended => break end,
            () = tokio::time::sleep(Duration::from_millis(50)) => {
                busy.writer.send("tick").await.unwrap();
                assert_eq!(busy.reader.at_least(4).await.unwrap(), b"tick");
            }
        }
    };
    assert!(over.is_err(), "what was silent is broken off, not ended in order: {over:?}");
    busy.writer.send("last").await.unwrap();
    assert_eq!(busy.reader.at_least(4).await.unwrap(), b"last");
    node.record(|record| record["error"] == "connection_read_timeout" && record["kind"] == "tcp").await;
}

/// An upload that goes on is progress, however long it takes to be answered.
#[tokio::test]
async fn a_slow_upload_is_not_cut() {
    let (sender, mut receiver) = seen();
    let origin = scripted::h2(move |exchange: Exchange| {
        let sender = sender.clone();
        async move {
            let Exchange { request, mut respond } = exchange;
            let (data, _) = multiplex::receive_all(request.into_body()).await?;
            let _ = sender.send(data.len());
            respond.send_response(Response::new(()), true).map(drop).map_err(io::Error::other)
        }
    });
    let origin = origin.unwrap();
    let overlay = overlay();
    let node = node(&overlay, "h2", "{progress: 2s}", "", origin.address()).await;
    let mut http1 = RawHttp1::connect(node.address("in")).await.unwrap();
    http1.send("POST / HTTP/1.1\r\nhost: WEB\r\ntransfer-encoding: chunked\r\n\r\n").await.unwrap();
    // Three seconds and more, a byte every tenth.
    for _ in 0..30 {
        http1.send_chunk(b"x").await.unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    http1.send("0\r\n\r\n").await.unwrap();
    assert_eq!(http1.head().await.unwrap().status(), 200);
    assert_eq!(next(&mut receiver).await, 30);
}

/// Accepts and takes whatever comes, in either version, and answers nothing.
fn hung(version: &str) -> origin::Origin {
    if version == "h1" {
        return silent();
    }
    let hung = scripted::h2(|exchange: Exchange| async move {
        let Exchange { request, respond: _respond } = exchange;
        multiplex::receive_all(request.into_body()).await?;
        std::future::pending().await
    });
    hung.unwrap()
}

const ONE_OF_TWO: &str = "
workers: 1
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: all, upstream: sites, timeout: {progress: 500ms}}
upstreams:
- name: sites
  protocol: $PROTOCOL
  overlay: false
  balance: round-robin
  outlier: {failures: 2, ejection-time: 60s}
  endpoints: [$SITES]
";

async fn two_sites(overlay: &Overlay, version: &str, called: &str, sites: &[&origin::Origin]) -> Node {
    let sites: Vec<_> = sites.iter().map(|site| format!("'{}'", site.address())).collect();
    let draft = overlay.node("edge").called(called).document(ONE_OF_TWO).with("PROTOCOL", version);
    draft.with("SITES", sites.join(", ")).start().await.unwrap()
}

#[tokio::test]
async fn an_endpoint_that_never_answers_rests() {
    let overlay = overlay();
    for version in ["h1", "h2"] {
        let well = if version == "h1" {
            scripted::h1(|mut http1| async move {
                while http1.head().await.is_ok() {
                    http1.send("HTTP/1.1 204 No Content\r\n\r\n").await?;
                }
                Ok(())
            })
        } else {
            scripted::h2(|exchange: Exchange| exchange.answer(Response::new(()), ""))
        };
        let (well, hung) = (well.unwrap(), hung(version));
        let node = two_sites(&overlay, version, version, &[&well, &hung]).await;
        let mut connection = ListenerClient::plain(node.address("in")).h2().await.unwrap();
        let mut failed = 0;
        for _ in 0..12 {
            let status = connection.get("http://WEB/").await.unwrap().status;
            failed += usize::from(status == 504);
        }
        assert_eq!(failed, 2, "{version}: the hung endpoint was asked again and again");
        node.says(&format!("rests endpoint=sites/{}", hung.address())).await;
    }
}

#[tokio::test]
async fn an_endpoint_that_never_opens_a_tunnel_rests() {
    let overlay = overlay();
    for version in ["h1", "h2"] {
        let hung = [hung(version), hung(version)];
        let node = two_sites(&overlay, version, version, &hung.each_ref()).await;
        for _ in 0..4 {
            let output = ListenerClient::plain(node.address("in"))
                .tunnel(TunnelMode::ConnectH1, "DB:1")
                .await
                .err()
                .unwrap()
                .to_string();
            assert!(output.contains("504"), "{version}: {output}");
        }
        node.says_times(" rests ", 2).await;
    }
}

/// Who waits for the client owes nothing.
#[tokio::test]
async fn a_stalled_upload_is_not_blamed_on_the_endpoint() {
    let overlay = overlay();
    for version in ["h1", "h2"] {
        let hung = hung(version);
        let node = two_sites(&overlay, version, version, &[&hung]).await;
        for _ in 0..3 {
            let mut http1 = RawHttp1::connect(node.address("in")).await.unwrap();
            http1.send("POST / HTTP/1.1\r\nhost: WEB\r\ncontent-length: 10\r\n\r\nhalf").await.unwrap();
            assert_eq!(http1.head().await.unwrap().status(), 408, "{version}");
        }
        // The second would have been told half a second ago.
        assert!(!node.log().contains(" rests "), "{version}: {}", node.log());
        // The same, sent whole, is the endpoint's fault, which shows that it would have been noted.
        for _ in 0..2 {
            let mut http1 = RawHttp1::connect(node.address("in")).await.unwrap();
            http1.send("POST / HTTP/1.1\r\nhost: WEB\r\ncontent-length: 4\r\n\r\nfull").await.unwrap();
            assert_eq!(http1.head().await.unwrap().status(), 504, "{version}");
        }
        node.says(" rests ").await;
    }
}
