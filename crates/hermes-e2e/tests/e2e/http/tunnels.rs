//! The ends of tunnels: each direction has its own, orderly or broken, and neither is mistaken for the other.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use hermes_testkit::{
    frames::{END_HEADERS, END_STREAM, Frame, Frames, kind},
    listener_client::{ListenerClient, TunnelMode},
    origin::{self, scripted, stream},
    overlay::EFFECT_TIMEOUT,
    poll::until,
    raw_http1::RawHttp1,
    tunnel::Tunnel,
};
use tokio::net::TcpStream;

use crate::http::lab::{HOPS, MODES, Tunnels, before, next, overlay, seen};

/// Every way over every hop, each with a tunnel of its own.
async fn each(lab: &Tunnels, check: impl AsyncFn(Tunnel) -> io::Result<()>) {
    for mode in MODES {
        for hop in HOPS {
            let failed = |error: io::Error| -> Tunnel { panic!("{mode:?} over {hop}: {error}") };
            let tunnel = lab.client(mode, hop).tunnel(mode, &format!("{hop}:7")).await.unwrap_or_else(failed);
            check(tunnel).await.unwrap_or_else(|error| panic!("{mode:?} over {hop}: {error}"));
        }
    }
    lab.near.quiet().await;
    lab.far.quiet().await;
}

#[tokio::test]
async fn a_client_that_ends_its_side_still_hears_the_far_end() {
    let origin = scripted::h1(|mut http1| async move {
        let all = http1.to_end().await?;
        http1.send(format!("{} bytes", all.len())).await?;
        http1.finish().await
    });
    let origin = origin.unwrap();
    let lab = Tunnels::to(origin.address()).await;
    each(&lab, async |mut tunnel| {
        tunnel.writer.send("12345").await?;
        tunnel.writer.finish().await?;
        let answer = tunnel.reader.to_end().await?;
        assert_eq!(String::from_utf8_lossy(&answer), "5 bytes");
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn a_far_end_that_ends_its_side_still_hears_the_client() {
    let (received, mut receiver) = seen();
    let origin = scripted::h1(move |mut http1| {
        let received = received.clone();
        async move {
            http1.send("bye").await?;
            http1.finish().await?;
            drop(received.send(http1.to_end().await?));
            Ok(())
        }
    });
    let origin = origin.unwrap();
    let lab = Tunnels::to(origin.address()).await;
    let receiver = tokio::sync::Mutex::new(&mut receiver);
    each(&lab, async |mut tunnel| {
        assert_eq!(tunnel.reader.to_end().await?, b"bye");
        tunnel.writer.send("after ").await?;
        tunnel.writer.send("all").await?;
        tunnel.writer.finish().await?;
        let received = tokio::time::timeout(EFFECT_TIMEOUT, receiver.lock().await.recv()).await;
        match received {
            Ok(Some(received)) if received == b"after all" => Ok(()),
            other => Err(io::Error::other(format!("the far end heard {other:?}"))),
        }
    })
    .await;
}

#[tokio::test]
async fn a_closed_client_ends_the_tunnel_at_the_target() {
    let (gone, mut goes) = seen();
    let origin = scripted::h1(move |mut http1| {
        let gone = gone.clone();
        async move {
            http1.send("hello").await?;
            let _ = gone.send(http1.to_end().await.is_err());
            Ok(())
        }
    });
    let origin = origin.unwrap();
    let lab = Tunnels::to(origin.address()).await;
    let goes = tokio::sync::Mutex::new(&mut goes);
    each(&lab, async |mut tunnel| {
        assert_eq!(tunnel.reader.at_least(5).await?, b"hello");
        drop(tunnel);
        next(&mut **goes.lock().await).await;
        Ok(())
    })
    .await;
}

/// Closing with unread bytes and no linger makes the kernel send RST.
fn reset(http1: RawHttp1<TcpStream>) {
    let (stream, _) = http1.into_parts();
    let socket = socket2::SockRef::from(&stream);
    socket.set_linger(Some(std::time::Duration::ZERO)).unwrap();
}

#[tokio::test]
async fn a_far_end_that_breaks_is_not_taken_for_one_that_ends() {
    let origin = scripted::h1(|mut http1| async move {
        http1.send("half of it").await?;
        // The client has it: now the rest is missing for good.
        http1.exactly(2).await?;
        reset(http1);
        Ok(())
    });
    let origin = origin.unwrap();
    let lab = Tunnels::to(origin.address()).await;
    each(&lab, async |mut tunnel| {
        assert_eq!(tunnel.reader.at_least(10).await?, b"half of it");
        tunnel.writer.send("ok").await?;
        match tunnel.reader.to_end().await {
            Err(_) => Ok(()),
            Ok(rest) => Err(io::Error::other(format!("a broken tunnel looks like a whole one with {rest:?}"))),
        }
    })
    .await;
}

#[tokio::test]
async fn a_client_that_breaks_is_not_taken_for_one_that_ends() {
    let (ended, mut ends) = seen();
    let origin = scripted::h1(move |mut http1| {
        let ended = ended.clone();
        async move {
            http1.send("hello").await?;
            drop(ended.send(http1.to_end().await.map_err(|error| error.kind())));
            Ok(())
        }
    });
    let origin = origin.unwrap();
    let lab = Tunnels::to(origin.address()).await;
    for hop in HOPS {
        let client = lab.client(TunnelMode::ConnectH2, hop);
        let mut tunnel = client.tunnel(TunnelMode::ConnectH2, &format!("{hop}:7")).await.unwrap();
        tunnel.reader.at_least(5).await.unwrap();
        tunnel.writer.send("half").await.unwrap();
        tunnel.writer.reset();
        let end = next(&mut ends).await;
        assert_eq!(end, Err(io::ErrorKind::ConnectionReset), "over {hop}");
    }
}

#[tokio::test]
async fn a_refused_dial_is_reported_to_the_client() {
    // A port that was free a moment ago and is bound by nobody.
    let closed = hermes_testkit::port::reserve("127.0.0.1");
    let lab = Tunnels::to(closed).await;
    for hop in HOPS {
        for mode in [TunnelMode::ConnectH1, TunnelMode::ConnectH2, TunnelMode::PostH1, TunnelMode::PostH2] {
            let refused = lab.client(mode, hop).tunnel(mode, &format!("{hop}:7")).await.err();
            if hop == "BARE" {
                // The far node has no way to say no but to break the connection, after the near one said yes.
                continue;
            }
            let output =
                refused.unwrap_or_else(|| panic!("{mode:?} over {hop} opened a tunnel to nowhere")).to_string();
            assert!(output.contains("502") && output.contains("proxy-status"), "{mode:?} over {hop}: {output}");
            assert!(output.contains("connection_refused"), "{mode:?} over {hop}: {output}");
        }
        let end = async { lab.client(TunnelMode::Raw, hop).tunnel(TunnelMode::Raw, "").await?.reader.to_end().await };
        assert_eq!(end.await.map_err(|error| error.kind()), Err(io::ErrorKind::ConnectionReset), "over {hop}");
    }
}

#[tokio::test]
async fn bytes_sent_before_the_answer_to_connect_reach_the_target() {
    let origin = scripted::h1(|mut http1| async move {
        let early = http1.exactly(5).await?;
        http1.send(early).await?;
        http1.finish().await
    });
    let origin = origin.unwrap();
    let lab = Tunnels::to(origin.address()).await;
    for hop in HOPS {
        let mut http1 = lab.client(TunnelMode::ConnectH1, hop).h1().await.unwrap();
        http1.send(format!("CONNECT {hop}:7 HTTP/1.1\r\nhost: {hop}:7\r\n\r\nearly")).await.unwrap();
        let head = http1.head().await.unwrap();
        assert_eq!(head.status(), 200, "over {hop}: {head:?}");
        assert!(head.header("content-length").is_none() && head.header("transfer-encoding").is_none(), "{head:?}");
        assert_eq!(http1.to_end().await.unwrap(), b"early", "over {hop}");
    }
}

#[tokio::test]
async fn a_post_without_trust_is_no_tunnel() {
    let origin = stream::echo(origin::listen("127.0.0.1:0".parse().unwrap()).unwrap());
    let origin = origin.unwrap();
    let overlay = overlay();
    let document = "
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http, accept-post: true}
routes:
- {name: tcp, match: {kind: tcp}, terminate: {tcp: '$ORIGIN'}}
";
    let node = overlay.node("edge").document(document).with("ORIGIN", origin.address()).start().await.unwrap();
    let client = ListenerClient::plain(node.address("in"));
    for mode in [TunnelMode::PostH1, TunnelMode::PostH2] {
        let output = client.tunnel(mode, "ECHO:7").await.err().expect("a stranger's POST became a tunnel").to_string();
        assert!(output.contains("404"), "{mode:?}: {output}");
    }
    // CONNECT is no secret handshake.
    client.tunnel(TunnelMode::ConnectH2, "ECHO:7").await.unwrap();
}

#[tokio::test]
async fn tunnels_and_requests_share_a_connection() {
    let origin = scripted::h1(|mut http1| async move {
        loop {
            let head = http1.head().await?;
            let text = format!("{} {}", head.method(), head.target());
            http1.send(format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{text}", text.len())).await?;
        }
    });
    let origin = origin.unwrap();
    let overlay = overlay();
    let node = before(&overlay, "h1", origin.address()).await;
    let mut http1 = ListenerClient::plain(node.address("in")).h1().await.unwrap();
    // A refused CONNECT leaves the connection as it was.
    for target in ["/one", "/two"] {
        http1.send(format!("GET {target} HTTP/1.1\r\nhost: WEB\r\n\r\n")).await.unwrap();
        let head = http1.head().await.unwrap();
        assert_eq!(http1.body(&head).await.unwrap().text(), format!("GET {target}"));
    }
    // Two requests in one piece: answered in their order.
    http1.send("GET /three HTTP/1.1\r\nhost: WEB\r\n\r\nGET /four HTTP/1.1\r\nhost: WEB\r\n\r\n").await.unwrap();
    for target in ["/three", "/four"] {
        let head = http1.head().await.unwrap();
        assert_eq!(http1.body(&head).await.unwrap().text(), format!("GET {target}"));
    }
}

/// `limits.tunnels` is the node's, however its connections are spread over workers.
#[tokio::test]
async fn all_workers_together_open_as_many_tunnels_as_the_document_allows() {
    let origin = stream::echo(origin::listen("127.0.0.1:0".parse().unwrap()).unwrap());
    let origin = origin.unwrap();
    let overlay = overlay();
    let document = "
workers: 4
limits: {tunnels: 5}
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: tcp, match: {authority: 'ECHO:*'}, terminate: {tcp: '$ORIGIN'}}
";
    let node = overlay.node("edge").document(document).with("ORIGIN", origin.address()).start().await.unwrap();
    let ask = async |authority: &str| {
        let mut http1 = ListenerClient::plain(node.address("in")).h1().await.unwrap();
        http1.send(format!("CONNECT {authority} HTTP/1.1\r\nhost: {authority}\r\n\r\n")).await.unwrap();
        let status = http1.head().await.unwrap().status();
        (status, http1)
    };
    // That none of four workers but one gets a connection of forty happens never.
    let (mut open, mut refused) = (Vec::new(), 0.0);
    for _ in 0..40 {
        match ask("ECHO:7").await {
            (200, http1) => open.push(http1),
            (status, _) => {
                assert_eq!(status, 503);
                refused += 1.0;
            }
        }
    }
    assert_eq!((open.len(), refused), (5, 35.0));
    assert_eq!(node.metric("hermes_limit_hits_total", "limit=\"tunnels\"").await.unwrap(), refused);
    // What is no tunnel takes no place, and places that are given back are taken again.
    for _ in 0..8 {
        drop(open.pop());
        until("a tunnel ends", || async {
            node.metric("hermes_sessions_open", "").await.unwrap() == open.len() as f64
        })
        .await;
        assert_eq!(ask("NOWHERE:7").await.0, 404);
        let (status, http1) = ask("ECHO:7").await;
        assert_eq!(status, 200);
        open.push(http1);
    }
    assert_eq!(ask("ECHO:7").await.0, 503);
}

#[tokio::test]
async fn a_client_that_ended_its_side_and_then_breaks_off_is_heard() {
    // Over HTTP/2 its END_STREAM and its RST_STREAM are two things, and the far end says nothing that would show it.
    let origin = scripted::h1(|mut http1| async move {
        http1.to_end().await?;
        http1.send("heard").await?;
        std::future::pending::<io::Result<()>>().await
    });
    let origin = origin.unwrap();
    let lab = Tunnels::to(origin.address()).await;
    // Of a reset over TCP nobody hears who does not write.
    for hop in ["HERE", "H2"] {
        let mut tunnel =
            lab.client(TunnelMode::ConnectH2, hop).tunnel(TunnelMode::ConnectH2, &format!("{hop}:7")).await.unwrap();
        tunnel.writer.finish().await.unwrap();
        assert_eq!(tunnel.reader.at_least(5).await.unwrap(), b"heard", "{hop}");
        tunnel.writer.reset();
        lab.near.quiet().await;
        lab.far.quiet().await;
    }
}

#[tokio::test]
async fn many_that_end_their_side_in_a_frame_of_its_own_do_not_end_the_connection_of_all() {
    // h2 counts empty frames over a connection's life, and ends it after a hundred.
    let origin = stream::echo(origin::listen("127.0.0.1:0".parse().unwrap()).unwrap()).unwrap();
    let lab = Tunnels::to(origin.address()).await;
    let client = lab.client(TunnelMode::ConnectH2, "H2");
    let mut bystander = client.tunnel(TunnelMode::ConnectH2, "H2:7").await.unwrap();
    for _ in 0..150 {
        let mut tunnel = client.tunnel(TunnelMode::ConnectH2, "H2:7").await.unwrap();
        tunnel.writer.send("x").await.unwrap();
        assert_eq!(tunnel.reader.at_least(1).await.unwrap(), b"x");
        tunnel.writer.finish().await.unwrap();
        assert_eq!(tunnel.reader.to_end().await.unwrap(), b"");
    }
    // Before there is an answer it goes another way.
    let mut frames = Frames::connect(client.address, &[]).await.unwrap();
    for number in 0..150 {
        let stream = 2 * number + 1;
        let connect = Frame::headers(stream, false, &[(":method", "CONNECT"), (":authority", "H2:7")]);
        frames.send(&[connect, Frame::new(kind::DATA, END_STREAM, stream, "")]).await.unwrap();
        frames.until("an end", |frame| frame.stream == stream && frame.flags & END_STREAM != 0).await.unwrap();
    }
    bystander.writer.send("still there?").await.unwrap();
    assert_eq!(bystander.reader.at_least(12).await.unwrap(), b"still there?");
}

#[tokio::test]
async fn a_refused_post_tunnel_delivers_the_complete_response() {
    const LONG: usize = 300_000;
    let origin = scripted::h1(|mut http1| async move {
        http1.head().await?;
        http1.send(format!("HTTP/1.1 403 Forbidden\r\ncontent-length: {LONG}\r\n\r\n")).await?;
        for _ in 0..LONG / 1000 {
            http1.send([b'n'; 1000]).await?;
        }
        std::future::pending::<io::Result<()>>().await
    });
    let (origin, overlay) = (origin.unwrap(), overlay());
    let document = "
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: all, upstream: next}
upstreams:
- {name: next, protocol: h1, tunnel-method: POST, overlay: false, endpoints: ['$NEXT']}
";
    let node = overlay.node("edge").document(document).with("NEXT", origin.address()).start().await.unwrap();
    let mut http1 = RawHttp1::connect(node.address("in")).await.unwrap();
    http1.send("CONNECT DB:7 HTTP/1.1\r\nhost: DB:7\r\n\r\n").await.unwrap();
    let head = http1.head().await.unwrap();
    assert_eq!(head.status(), 403);
    assert_eq!(http1.body(&head).await.unwrap().data.len(), LONG);
}

/// Servers reset a stream with NO_ERROR behind its end, once they have said all and want to hear no more (RFC 9113,
/// 8.1). That takes nothing back. Others reset so whatever they break off: that is no end.
#[tokio::test]
async fn a_reset_without_error_ends_finished_directions_and_breaks_others() {
    const LONG: usize = 1_000_000;
    let whole = Arc::new(AtomicBool::new(true));
    let is_whole = whole.clone();
    let proxy = scripted::h1(move |http1| {
        let whole = is_whole.clone();
        async move {
            let mut frames = Frames::accept(http1, &[]).await?;
            loop {
                let stream = frames.until("a request", |frame| frame.kind == kind::HEADERS).await?.stream;
                // `:status: 200` is entry 8 of the static table (RFC 7541, appendix A).
                frames.send(&[Frame::new(kind::HEADERS, END_HEADERS, stream, vec![0x88])]).await?;
                let whole = whole.load(Ordering::Relaxed);
                for sent in (0..LONG).step_by(10_000) {
                    let ends = if whole && sent + 10_000 == LONG { END_STREAM } else { 0 };
                    frames.send(&[Frame::new(kind::DATA, ends, stream, vec![7; 10_000])]).await?;
                }
                frames.send(&[Frame::reset(stream, 0)]).await?;
            }
        }
    });
    let (proxy, overlay) = (proxy.unwrap(), overlay());
    let document = "
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
- {name: db, bind: '127.0.0.1:0', protocol: tcp, authority: 'DB:7'}
routes:
- {name: all, upstream: next}
upstreams:
- {name: next, protocol: h2, overlay: true, endpoints: ['$NEXT']}
";
    let node = overlay.node("edge").document(document).with("NEXT", proxy.address()).start().await.unwrap();
    for mode in [TunnelMode::Raw, TunnelMode::ConnectH1, TunnelMode::ConnectH2] {
        let client = ListenerClient::plain(node.address(if mode == TunnelMode::Raw { "db" } else { "in" }));
        let mut tunnel = client.tunnel(mode, "DB:7").await.unwrap();
        // Still sends when all was said, and is slow to read.
        tunnel.writer.send("hello").await.unwrap();
        tokio::time::sleep(std::time::Duration::from_millis(300)).await;
        assert_eq!(tunnel.reader.to_end().await.unwrap().len(), LONG, "{mode:?}");
        whole.store(false, Ordering::Relaxed);
        let mut tunnel = client.tunnel(mode, "DB:7").await.unwrap();
        assert!(tunnel.reader.to_end().await.is_err(), "{mode:?}: it seems to be whole");
        whole.store(true, Ordering::Relaxed);
    }
}
