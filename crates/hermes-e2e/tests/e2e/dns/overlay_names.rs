//! The names that a DNS listener assigns virtual addresses to, and the reverse lookup.

use hermes_testkit::{listener_client::ListenerClient, raw_http1::RawHttp1};
use hickory_proto::{op::ResponseCode, rr::RecordType};

use crate::dns::lab::{Lab, NODE, addresses, by_tcp, by_udp, question, question_with_room};

#[tokio::test]
async fn each_kind_of_question_has_its_answer() {
    let lab = Lab::new().await;
    let table = [
        ("VIDEO", RecordType::A, 1),
        ("video", RecordType::AAAA, 1),
        ("ViDeO", RecordType::ANY, 2),
        ("a.b.corp", RecordType::A, 1),
        // For these there is nothing, which is no failure: the program takes the address.
        ("VIDEO", RecordType::HTTPS, 0),
        ("VIDEO", RecordType::SVCB, 0),
        ("VIDEO", RecordType::TXT, 0),
        ("VIDEO", RecordType::Unknown(65_280), 0),
    ];
    for (name, kind, count) in table {
        let requests = question(name, kind);
        for answer in [by_udp(lab.dns(), &requests).await.unwrap(), by_tcp(lab.dns(), &requests).await.unwrap()] {
            assert_eq!(answer.metadata.response_code, ResponseCode::NoError, "{name} {kind}");
            let found = addresses(&answer);
            assert_eq!(found.len(), count, "{name} {kind}: {answer}");
            assert!(found.iter().all(|address| {
                address.to_string().starts_with(if address.is_ipv4() { "198.18." } else { "fd00:6865:726d::" })
            }));
            assert!(answer.answers.iter().all(|record| record.ttl <= 60), "it is not kept for long: {answer}");
        }
    }
    let with_edns = by_udp(lab.dns(), &question_with_room("VIDEO", RecordType::A, 1232)).await.unwrap();
    assert!(with_edns.edns.is_some());
    lab.node.metric_reaches("hermes_dns_questions_total", "answered", 17.0).await;
    assert_eq!(lab.node.metric("hermes_dns_questions_total", "forwarded").await.unwrap(), 0.0);
}

#[tokio::test]
async fn a_virtual_address_resolves_back_to_its_name() {
    let lab = Lab::new().await;
    for kind in [RecordType::A, RecordType::AAAA] {
        let address = lab.address_of("Video", kind).await;
        let reverse = hickory_proto::rr::Name::from(address).to_ascii();
        let answer = by_udp(lab.dns(), &question(reverse.trim_end_matches('.'), RecordType::PTR)).await.unwrap();
        assert!(answer.answers.iter().any(|record| record.data.to_string() == "video."), "{answer}");
    }
    // An address that stands for nothing has no name, and nobody else is asked for one.
    let answer = by_udp(lab.dns(), &question("1.1.18.198.in-addr.arpa", RecordType::PTR)).await.unwrap();
    assert_eq!(answer.metadata.response_code, ResponseCode::NXDomain);
    assert!(answer.metadata.authoritative);
}

#[tokio::test]
async fn a_session_to_an_address_is_one_to_its_name() {
    let lab = Lab::new().await;
    for kind in [RecordType::A, RecordType::AAAA] {
        let address = lab.address_of("VIDEO", kind).await;
        let host = if address.is_ipv6() { format!("[{address}]") } else { address.to_string() };
        // CONNECT, a request to a forward proxy, and SOCKS.
        let client = ListenerClient::plain(lab.node.address("web"));
        let mut tunnel = RawHttp1::connect(client.address).await.unwrap();
        tunnel.send(format!("CONNECT {host}:80 HTTP/1.1\r\nhost: {host}:80\r\n\r\n")).await.unwrap();
        assert_eq!(tunnel.head().await.unwrap().status(), 200, "{host}");
        let mut plain = client.h1().await.unwrap();
        plain.send(format!("GET http://{host}/ HTTP/1.1\r\nhost: {host}\r\n\r\n")).await.unwrap();
        assert_eq!(plain.head().await.unwrap().status(), 200, "{host}");
        let written = match address {
            std::net::IpAddr::V4(ip) => [&[1][..], &ip.octets()].concat(),
            std::net::IpAddr::V6(ip) => [&[4][..], &ip.octets()].concat(),
        };
        let mut socks = RawHttp1::connect(lab.node.address("socks")).await.unwrap();
        socks.send([&[5, 1, 0, 5, 1, 0][..], &written, &[0, 80]].concat()).await.unwrap();
        assert_eq!(socks.exactly(4).await.unwrap(), [5, 0, 5, 0], "{host}");
        drop((tunnel, plain, socks));
    }
    for (listener, authority) in [("web", "video:80"), ("web", "video"), ("socks", "video:80")] {
        lab.node.record(|record| record["listener"] == listener && record["authority"] == authority).await;
    }
    // Datagrams as well.
    let address = lab.address_of("ECHO", RecordType::A).await;
    let mut client = ListenerClient::plain(lab.node.address("web"));
    client.fields.clear();
    let flow = hermes_testkit::flow::FlowMode::UpgradeH1;
    let mut flow = hermes_testkit::flow::Flow::open(&client, flow, &address.to_string(), 7).await.unwrap();
    flow.send(b"hello").await.unwrap();
    assert_eq!(flow.receive().await.unwrap(), b"hello");
    drop(flow);
    lab.node.record(|record| record["kind"] == "udp" && record["authority"] == "echo:7").await;
}

#[tokio::test]
async fn a_name_keeps_its_address_through_reloads() {
    let mut lab = Lab::new().await;
    let names: Vec<String> = (0..50).map(|number| format!("host-{number}.corp")).collect();
    let mut before = Vec::new();
    for name in &names {
        before.push(lab.address_of(name, RecordType::A).await);
    }
    let distinct: std::collections::HashSet<_> = before.iter().collect();
    assert_eq!(distinct.len(), names.len(), "each has its own");
    // Another listener of the same prefix, and routes of its own.
    let document = NODE.replace("name: names", "name: renamed").replace("'VIDEO:80'", "'ELSE:80'");
    let services = &lab.services;
    let values = [
        ("LIMITS", String::new()),
        ("FORWARD", "'127.0.0.1:1'".to_owned()),
        ("WEB", services.web.address().to_string()),
        ("UDP", services.udp.address().to_string()),
    ];
    lab.node.reload(&document, &values).await.unwrap();
    let dns = lab.node.address("renamed");
    for (name, address) in names.iter().zip(before) {
        let answer = by_udp(dns, &question(name, RecordType::A)).await.unwrap();
        assert_eq!(addresses(&answer), [address], "{name}");
    }
}

#[tokio::test]
async fn no_more_names_than_allowed_have_an_address() {
    let lab = Lab::with("dns-names: 3", &["127.0.0.1:1".parse().unwrap()]).await;
    for number in 0..3 {
        lab.address_of(&format!("host-{number}.corp"), RecordType::A).await;
    }
    // All of them were asked for a moment ago, and may be used at any time.
    let refused = by_udp(lab.dns(), &question("one-more.corp", RecordType::A)).await.unwrap();
    assert_eq!(refused.metadata.response_code, ResponseCode::ServFail);
    lab.node.metric_reaches("hermes_limit_hits_total", "dns-names", 1.0).await;
    lab.address_of("host-0.corp", RecordType::A).await;
}
