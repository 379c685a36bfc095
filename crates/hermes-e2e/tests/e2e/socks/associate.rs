//! UDP ASSOCIATE: a flow for each target, the right header before each answer, and one client alone.

use hermes_testkit::{pattern::Pattern, poll::until, raw_http1::RawHttp1};
use tokio::net::UdpSocket;

use crate::socks::lab::{ANY, ASSOCIATE, Association, Lab, ask, greeted, target};

const TARGETS: [&str; 4] = ["ECHO", "OTHER", "192.0.2.7", "2001:db8::7"];

#[tokio::test]
async fn each_target_is_a_session_and_answers_carry_its_address() {
    let lab = Lab::new().await;
    for (number, socks) in [lab.socks(), lab.near.address("socks-6")].into_iter().enumerate() {
        let association = Association::open(socks).await;
        for round in ["first", "second"] {
            for host in TARGETS {
                association.echo(host, 7, format!("{round} for {host}").as_bytes()).await;
            }
        }
        assert_eq!(lab.services.udp.sources(), TARGETS.len() * (number + 1), "one flow a target");
        let (_, sessions) = lab.near.ask("/sessions").await.unwrap();
        let sessions: Vec<serde_json::Value> = serde_json::from_str(&sessions).unwrap();
        let source = association.socket.local_addr().unwrap().to_string();
        let own: Vec<_> = sessions.iter().filter(|session| session["source"] == *source).collect();
        assert_eq!(own.len(), TARGETS.len(), "{sessions:?}");
        assert!(own.iter().all(|session| session["kind"] == "udp"), "{own:?}");
        drop(association);
        // The flows end with their association, and nothing went wrong.
        lab.quiet().await;
        for host in ["echo:7", "[2001:db8::7]:7"] {
            let ended = lab.near.record(|record| record["authority"] == host && record["source"] == *source).await;
            assert!(ended.get("error").is_none(), "{ended}");
        }
    }
    let far = lab.far.record(|record| record["kind"] == "udp").await;
    assert!(far.get("error").is_none(), "to the next node it is an orderly end: {far}");
}

#[tokio::test]
async fn datagrams_of_every_size_that_fits_the_header() {
    let lab = Lab::new().await;
    let association = Association::open(lab.socks()).await;
    let header = 3 + target("ECHO", 7).len();
    for size in [0, 1, 1200, 1472, 16_384, 65_507 - header] {
        association.echo("ECHO", 7, &Pattern::new(size as u64).bytes(size)).await;
    }
}

#[tokio::test]
async fn nobody_else_speaks_for_the_client_or_hears_it() {
    let lab = Lab::new().await;
    let association = Association::open(lab.socks()).await;
    association.echo("ECHO", 7, b"mine").await;
    // By its port, and by its address before the port is known.
    let fresh = Association::open(lab.socks()).await;
    let strangers = [("127.0.0.1:0", association.relay), ("127.0.0.2:0", fresh.relay)];
    for (number, (address, relay)) in strangers.into_iter().enumerate() {
        let stranger = UdpSocket::bind(address).await.unwrap();
        let datagram = [&[0, 0, 0][..], &target("ECHO", 7), b"not mine"].concat();
        stranger.send_to(&datagram, relay).await.unwrap();
        let reason = "reason=\"not-the-client\"";
        lab.near.metric_reaches("hermes_datagrams_dropped_total", reason, (number + 1) as f64).await;
    }
    association.echo("ECHO", 7, b"still mine").await;
    fresh.echo("ECHO", 7, b"still free").await;
    assert_eq!(lab.services.udp.sources(), 2);
}

#[tokio::test]
async fn a_client_that_declares_its_port_is_bound_to_it() {
    let lab = Lab::new().await;
    let (socket, other) = (UdpSocket::bind(ANY).await.unwrap(), UdpSocket::bind(ANY).await.unwrap());
    let mut http1 = greeted(lab.socks()).await;
    let port = socket.local_addr().unwrap().port();
    let (code, relay) = ask(&mut http1, ASSOCIATE, "127.0.0.1", port).await.unwrap();
    assert_eq!(code, 0);
    let datagram = [&[0, 0, 0][..], &target("ECHO", 7), b"x"].concat();
    other.send_to(&datagram, relay).await.unwrap();
    lab.near.metric_reaches("hermes_datagrams_dropped_total", "not-the-client", 1.0).await;
    let association = Association { http1, socket, relay };
    association.echo("ECHO", 7, b"x").await;
}

#[tokio::test]
async fn fragments_and_malformed_datagrams_are_dropped_and_counted() {
    let lab = Lab::new().await;
    let association = Association::open(lab.socks()).await;
    let to = target("ECHO", 7);
    association.send_raw(&[&[0, 0, 1][..], &to, b"a part"].concat()).await;
    association.send_raw(&[&[0, 0, 0x82][..], &to, b"the last"].concat()).await;
    lab.near.metric_reaches("hermes_datagrams_dropped_total", "fragment", 2.0).await;
    for malformed in [&b""[..], b"\0\0\0", b"\0\x01\0\x01\x7f\0\0\x01\0\x07x", b"\0\0\0\x03\x00\0\x07x", &[0xff; 500]] {
        association.send_raw(malformed).await;
    }
    lab.near.metric_reaches("hermes_datagrams_dropped_total", "malformed", 5.0).await;
    association.echo("ECHO", 7, b"whole").await;
}

#[tokio::test]
async fn a_target_that_is_refused_takes_no_other_with_it() {
    let lab = Lab::new().await;
    let association = Association::open(lab.socks()).await;
    for host in ["DENIED", "NOWHERE", "two words"] {
        association.send(host, 7, b"x").await;
    }
    association.echo("ECHO", 7, b"x").await;
    let denied = lab.near.record(|record| record["authority"] == "denied:7").await;
    assert_eq!((&denied["status"], &denied["kind"]), (&403.into(), &"udp".into()), "{denied}");
    // It is not asked for again with each datagram.
    association.send("DENIED", 7, b"y").await;
    lab.near.metric_reaches("hermes_datagrams_dropped_total", "flow-failed", 1.0).await;
}

#[tokio::test]
async fn an_association_ends_with_its_connection_or_when_nothing_is_alive_on_it() {
    let lab = Lab::with("limits: {keep-alive: 1s}", ", timeout: {idle: 1s}").await;
    // The connection to the next node stays.
    Association::open(lab.socks()).await.echo("ECHO", 7, b"x").await;
    lab.quiet().await;
    let sockets = lab.near.descriptors().unwrap();
    let mut association = Association::open(lab.socks()).await;
    association.echo("ECHO", 7, b"x").await;
    assert_eq!(association.http1.to_end().await.unwrap_or_default(), b"", "closed once its flow was idle");
    // A busy one lives on, however short `keep-alive` is.
    let busy = Association::open(lab.socks()).await;
    for _ in 0..20 {
        busy.echo("ECHO", 7, b"y").await;
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    }
    assert_eq!(lab.services.udp.sources(), 3);
    drop((association, busy));
    until("no socket is left behind", async || lab.near.descriptors().unwrap() <= sockets).await;
}

#[tokio::test]
async fn a_reload_decides_the_flows_again() {
    let mut lab = Lab::new().await;
    let association = Association::open(lab.socks()).await;
    association.echo("ECHO", 7, b"x").await;
    association.echo("OTHER", 7, b"x").await;
    lab.reload(|document| document.replace("'DENIED:*'", "['DENIED:*', 'OTHER:*']")).await;
    let ended = lab.near.record(|record| record["authority"] == "other:7").await;
    assert_eq!(ended["error"], "proxy_configuration_error", "{ended}");
    association.echo("ECHO", 7, b"the same flow").await;
    assert_eq!(lab.services.udp.sources(), 2);
    // A listener that goes takes no new flows, and ends its associations when theirs are over.
    lab.reload(|document| document.replace("name: socks,", "name: successor,")).await;
    association.echo("ECHO", 7, b"goes on").await;
    let mut fresh = RawHttp1::connect(lab.near.address("successor")).await.unwrap();
    fresh.send([5, 1, 0]).await.unwrap();
    assert_eq!(fresh.exactly(2).await.unwrap(), [5, 0]);
}
