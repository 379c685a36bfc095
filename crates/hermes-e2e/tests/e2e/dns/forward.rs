//! Names that are not the listener's: asked for elsewhere, and passed on as they are.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use hermes_testkit::{dns::resolving_by, skip::needs_root};
use hickory_proto::{
    op::ResponseCode,
    rr::{Name, RData, Record, RecordType, rdata::TXT},
};

use crate::dns::lab::{
    Asked, Lab, NODE, Server, addresses, ask, by_tcp, by_udp, overlay, question, question_with_room,
};

fn with_address(requests: &Asked, last: u8) -> Vec<u8> {
    let mut answer = requests.answer(ResponseCode::NoError);
    let name = answer.queries[0].name().clone();
    answer.answers.push(Record::from_rdata(name, 300, RData::A(Ipv4Addr::new(192, 0, 2, last).into())));
    answer.to_vec().unwrap()
}

async fn lab_before(servers: &[&Server]) -> Lab {
    Lab::with("", &servers.iter().map(|server| server.address).collect::<Vec<_>>()).await
}

#[tokio::test]
async fn queries_for_other_names_are_forwarded_unchanged() {
    // The server says back what it was asked, with a tail of its own that no codec knows.
    let server = Server::start(|requests| {
        let mut echo = requests.message.clone();
        echo[2] |= 0x80;
        echo.extend_from_slice(b"tail");
        vec![echo]
    })
    .await;
    let lab = lab_before(&[&server]).await;
    let questions = [
        question("www.example", RecordType::A),
        // The owner of `*.corp` is not the owner of `corp`, and `VIDEO` is not `VIDEO.example`.
        question("corp", RecordType::A),
        question("video.example", RecordType::A),
        question("corp", RecordType::SOA),
        question("1.2.0.192.in-addr.arpa", RecordType::PTR),
        question("18.198.in-addr.arpa", RecordType::NS),
        question("www.example", RecordType::Unknown(65_280)),
        question_with_room("www.example", RecordType::HTTPS, 4096),
    ];
    for requests in &questions {
        let bytes = requests.to_vec().unwrap();
        let got = ask(lab.dns(), &bytes).await.unwrap();
        assert_eq!((&got[..2], &got[got.len() - 4..]), (&bytes[..2], &b"tail"[..]), "{requests}");
        assert_eq!(got[3..bytes.len()], bytes[3..], "{requests}");
    }
    let seen = server.requests();
    for (requests, seen) in questions.iter().zip(&seen) {
        assert_eq!(seen.message[2..], requests.to_vec().unwrap()[2..], "all but the id");
    }
    // Neither id nor port can be guessed: eight of each, of sixty thousand.
    let ids: std::collections::HashSet<u16> = seen.iter().map(Asked::id).collect();
    let ports: std::collections::HashSet<u16> = seen.iter().map(|requests| requests.source.port()).collect();
    assert!(ids.len() > 6 && ports.len() > 6 && !ids.contains(&4711), "{ids:?} {ports:?}");
    lab.node.metric_reaches("hermes_dns_questions_total", "forwarded", questions.len() as f64).await;
}

#[tokio::test]
async fn only_the_answer_to_the_question_is_passed_on() {
    let server = Server::start(|requests| {
        let mut other_id = with_address(requests, 66);
        other_id[0] ^= 0xff;
        let mut other_name = requests.answer(ResponseCode::NoError);
        other_name.queries[0].set_name(Name::from_ascii("other.example.").unwrap());
        let our_own = requests.message.clone();
        vec![other_id, other_name.to_vec().unwrap(), our_own, b"garbage".to_vec(), with_address(requests, 1)]
    })
    .await;
    let lab = lab_before(&[&server]).await;
    let answer = by_udp(lab.dns(), &question("www.example", RecordType::A)).await.unwrap();
    assert_eq!(addresses(&answer), [IpAddr::from([192, 0, 2, 1])]);
    lab.node.metric_reaches("hermes_datagrams_dropped_total", "dns-mismatch", 4.0).await;
}

#[tokio::test]
async fn truncated_answers_are_queried_over_tcp() {
    let server = Server::start(|requests| {
        let mut answer = requests.answer(ResponseCode::NoError);
        let name = answer.queries[0].name().clone();
        for _ in 0..20 {
            let text = TXT::new(vec!["x".repeat(100)]);
            answer.answers.push(Record::from_rdata(name.clone(), 300, RData::TXT(text)));
        }
        vec![answer.to_vec().unwrap()]
    })
    .await;
    let lab = lab_before(&[&server]).await;
    for (requests, fits) in [
        (question("long.example", RecordType::TXT), false),
        (question_with_room("long.example", RecordType::TXT, 1232), false),
        (question_with_room("long.example", RecordType::TXT, 4096), true),
    ] {
        let answer = by_udp(lab.dns(), &requests).await.unwrap();
        assert_eq!((answer.metadata.truncation, answer.answers.len()), (!fits, if fits { 20 } else { 0 }));
        assert_eq!(answer.edns.is_some(), requests.edns.is_some() && !fits, "EDNS where the client speaks it");
    }
    let whole = by_tcp(lab.dns(), &question("long.example", RecordType::TXT)).await.unwrap();
    assert_eq!(whole.answers.len(), 20);
    assert!(server.requests().last().unwrap().by_tcp, "a question by TCP is forwarded by TCP");
}

#[tokio::test]
async fn another_server_is_asked_where_the_first_cannot() {
    let silent = Server::start(|_| Vec::new()).await;
    let failing = Server::start(|requests| vec![requests.answer(ResponseCode::ServFail).to_vec().unwrap()]).await;
    let good = Server::start(|requests| vec![with_address(requests, 1)]).await;
    let nobody: SocketAddr = "127.0.0.1:1".parse().unwrap();
    let lab = Lab::with("", &[nobody, failing.address, good.address]).await;
    for _ in 0..3 {
        let answer = by_udp(lab.dns(), &question("www.example", RecordType::A)).await.unwrap();
        assert_eq!(addresses(&answer).len(), 1);
    }
    assert_eq!(failing.requests().len(), 3);
    // A name that does not exist is an answer.
    let none = Server::start(|requests| vec![requests.answer(ResponseCode::NXDomain).to_vec().unwrap()]).await;
    let lab = lab_before(&[&none, &good]).await;
    let answer = by_udp(lab.dns(), &question("none.example", RecordType::A)).await.unwrap();
    assert_eq!(answer.metadata.response_code, ResponseCode::NXDomain);
    // Where nobody knows better the client hears what was said, and where nobody says anything that it failed.
    for (servers, words) in
        [(vec![failing.address], None), (vec![silent.address, nobody], Some("no DNS server responds"))]
    {
        let lab = Lab::with("", &servers).await;
        let answer = by_udp(lab.dns(), &question("www.example", RecordType::A)).await.unwrap();
        assert_eq!(answer.metadata.response_code, ResponseCode::ServFail);
        if let Some(words) = words {
            lab.node.says(words).await;
            lab.node.metric_reaches("hermes_dns_questions_total", "failed", 1.0).await;
        }
    }
}

#[tokio::test]
async fn the_systems_servers_are_asked_by_default_and_never_the_node_itself() {
    if needs_root("the_systems_servers_are_asked_by_default_and_never_the_node_itself") {
        return;
    }
    let system = Server::at("127.0.0.77:53".parse().unwrap(), |requests| vec![with_address(requests, 77)]).await;
    for (bind, server, is_own) in
        [("127.0.0.1:0", system.address, false), ("127.0.0.78:53", "127.0.0.78:53".parse().unwrap(), true)]
    {
        let overlay = overlay();
        let document = NODE.replace("'127.0.0.1:0'\n  protocol: dns", &format!("'{bind}'\n  protocol: dns"));
        let document = document.replace("  forward: [$FORWARD]\n", "");
        let wrapper = resolving_by(server.ip(), overlay.dir()).unwrap();
        let wrapper: Vec<&str> = wrapper.iter().map(String::as_str).collect();
        let draft = overlay.node("node").document(&document).with("LIMITS", "").by_way_of(&wrapper);
        let node = draft.with("WEB", "127.0.0.1:1").with("UDP", "127.0.0.1:1").start().await.unwrap();
        let answer = by_udp(node.address("names"), &question("www.example", RecordType::A)).await.unwrap();
        if is_own {
            assert_eq!(answer.metadata.response_code, ResponseCode::ServFail);
            node.says("no DNS server other than this node is configured; name one in `forward`").await;
            assert_eq!(node.metric("hermes_dns_questions_total", "").await.unwrap(), 1.0, "it did not ask itself");
        } else {
            assert_eq!(addresses(&answer), [IpAddr::from([192, 0, 2, 77])]);
        }
    }
}

/// If the node carries only IPv4, an IPv6 address would bypass it.
#[tokio::test]
async fn a_listener_without_ipv6_gives_no_address_of_it() {
    let server = Server::start(|requests| vec![requests.answer(ResponseCode::NoError).to_vec().unwrap()]).await;
    let document = "
listeners:
- {name: names, bind: '127.0.0.1:0', protocol: dns, names: [VIDEO], addresses: 198.18.0.0/16, ipv6: false, forward: ['$SERVER']}
routes:
- {name: all, match: {kind: tcp}, respond: {status: 403}}
";
    let overlay = overlay();
    let node = overlay.node("node").document(document).with("SERVER", server.address).start().await.unwrap();
    for name in ["www.example", "VIDEO"] {
        let answer = by_udp(node.address("names"), &question(name, RecordType::AAAA)).await.unwrap();
        assert_eq!((answer.metadata.response_code, answer.answers.len()), (ResponseCode::NoError, 0), "{name}");
    }
    assert!(server.requests().is_empty(), "nobody else is asked for what is not given");
    by_udp(node.address("names"), &question("www.example", RecordType::A)).await.unwrap();
    assert_eq!(server.requests().len(), 1);
}
