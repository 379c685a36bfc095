//! Address requests of a CONNECT-IP client after its session moves: the new gateway receives the same requests.
//!
//! In: a scripted client and scripted gateways, and a node between them whose route changes. Out: the requests that
//! the gateways receive, and the capsules that the client receives. Needs no device.

use hermes_testkit::binary::hermes;
use std::net::IpAddr;

use bytes::BytesMut;
use hermes_testkit::{
    ip::{self, IpMode, IpTunnel, path},
    listener_client::ListenerClient,
    origin,
    overlay::{Node, Overlay},
};
use tokio::net::TcpListener;

use crate::ip::scripted_gateway::{ScriptedGateway, address, within};

const DOCUMENT: &str = "
workers: 1
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: vpn, match: {kind: ip}, upstream: $TO, timeout: {connect: 3s}}
upstreams:
- {name: one, protocol: h1, endpoints: ['$ONE'], overlay: true}
- {name: other, protocol: h1, endpoints: ['$OTHER'], overlay: true}
";
const ANY: &str = "0.0.0.0";
const ANY_V6: &str = "::";

struct Fixture {
    node: Node,
    one: TcpListener,
    other: TcpListener,
    client: IpTunnel,
    _overlay: Overlay,
}

impl Fixture {
    /// A client that has asked for these, and the far end that it has.
    async fn asking(wanted: &[(u64, &str)]) -> (Self, ScriptedGateway) {
        let overlay = Overlay::new(hermes()).unwrap();
        let listen = || origin::listen(([127, 0, 0, 1], 0).into()).unwrap();
        let (one, other) = (listen(), listen());
        let draft = overlay.node("middle").document(DOCUMENT).with("ONE", one.local_addr().unwrap());
        let node = draft.with("OTHER", other.local_addr().unwrap()).with("TO", "one").start().await.unwrap();
        let listener = ListenerClient::plain(node.address("in"));
        let mode = path("10.0.0.1", "*");
        let (client, (far, _)) =
            tokio::join!(IpTunnel::open(&listener, IpMode::H1, &mode), ScriptedGateway::accept(&one));
        let mut fixture = Self { node, one, other, client: client.unwrap(), _overlay: overlay };
        for (request, wanted) in wanted {
            fixture.asks(*request, wanted).await;
        }
        (fixture, far)
    }

    async fn asks(&mut self, request: u64, wanted: &str) {
        let (mut value, wanted) = (BytesMut::new(), address(wanted));
        ip::put_entry(&mut value, request, wanted, if wanted.is_ipv4() { 32 } else { 128 });
        self.client.capsule(ip::ADDRESS_REQUEST, &value).await.unwrap();
    }

    /// The addresses that the client hears of.
    async fn receiver(&mut self) -> Vec<(u64, IpAddr)> {
        let output = within("an address", self.client.next_capsule(ip::ADDRESS_ASSIGN)).await.unwrap();
        ip::entries(&output).unwrap().into_iter().map(|(request, address, _)| (request, address)).collect()
    }

    async fn leads_to(&mut self, upstream: &str) {
        let at = |listener: &TcpListener| listener.local_addr().unwrap().to_string();
        let values = [("ONE", at(&self.one)), ("OTHER", at(&self.other)), ("TO", upstream.to_owned())];
        self.node.reload(DOCUMENT, &values).await.unwrap();
    }
}

/// As people write it.
fn of(addresses: &[(u64, &str)]) -> Vec<(u64, IpAddr)> {
    addresses.iter().map(|(request, text)| (*request, address(text))).collect()
}

async fn requests(far: &mut ScriptedGateway) -> Vec<(u64, IpAddr)> {
    far.requests().await.into_iter().map(|(request, address, _)| (request, address)).collect()
}

/// One answer of several says nothing of the others; who has an address asks for that one, and not for any.
#[tokio::test]
async fn a_client_keeps_the_address_that_it_was_given() {
    let (mut fixture, mut one) = Fixture::asking(&[(1, ANY_V6), (2, ANY), (3, ANY_V6)]).await;
    for request in [(1, ANY_V6), (2, ANY), (3, ANY_V6)] {
        assert_eq!(requests(&mut one).await, of(&[request]));
    }
    one.assign(&of(&[(1, ANY_V6)])).await;
    one.assign(&of(&[(2, "10.20.0.7"), (3, ANY_V6)])).await;
    assert_eq!(fixture.receiver().await, of(&[(1, ANY_V6)]));
    assert_eq!(fixture.receiver().await, of(&[(2, "10.20.0.7"), (3, ANY_V6)]));
    // Asked once more, and refused: that is one request, under its last identifier.
    fixture.asks(4, ANY_V6).await;
    assert_eq!(requests(&mut one).await, of(&[(4, ANY_V6)]));
    one.assign(&of(&[(2, "10.20.0.7"), (4, ANY_V6)])).await;
    assert_eq!(fixture.receiver().await, of(&[(2, "10.20.0.7"), (4, ANY_V6)]));

    fixture.leads_to("other").await;
    let (mut other, _) = ScriptedGateway::accept(&fixture.other).await;
    assert_eq!(requests(&mut other).await, of(&[(2, "10.20.0.7"), (4, ANY_V6)]));
    other.assign(&of(&[(4, ANY_V6)])).await;
    other.assign(&of(&[(2, "10.20.0.7")])).await;
    fixture.node.says("a session has moved").await;
    assert_eq!(fixture.receiver().await, of(&[(4, ANY_V6)]));
    assert_eq!(fixture.receiver().await, of(&[(2, "10.20.0.7")]));
    // It asks the new one, under identifiers that it has not used.
    fixture.asks(5, "10.20.0.8").await;
    assert_eq!(requests(&mut other).await, of(&[(5, "10.20.0.8")]));
}

/// Where its own is not to be had, who asked for any gets another one.
#[tokio::test]
async fn a_client_that_wants_any_gets_another_where_its_own_is_not_given() {
    let (mut fixture, mut one) = Fixture::asking(&[(1, ANY)]).await;
    assert_eq!(requests(&mut one).await, of(&[(1, ANY)]));
    one.assign(&of(&[(1, "10.20.0.7")])).await;
    assert_eq!(fixture.receiver().await, of(&[(1, "10.20.0.7")]));
    fixture.leads_to("other").await;
    let (mut refusing, _) = ScriptedGateway::accept(&fixture.other).await;
    assert_eq!(requests(&mut refusing).await, of(&[(1, "10.20.0.7")]));
    refusing.assign(&of(&[(1, ANY)])).await;
    let (mut other, _) = ScriptedGateway::accept(&fixture.other).await;
    assert_eq!(requests(&mut other).await, of(&[(1, ANY)]));
    other.assign(&of(&[(1, "10.30.0.9")])).await;
    fixture.node.says("a session has moved").await;
    assert_eq!(fixture.receiver().await, of(&[(1, "10.30.0.9")]));
    // There and back: none at all is the end of a session that the document leads elsewhere.
    fixture.leads_to("one").await;
    for wanted in ["10.30.0.9", ANY] {
        let (mut one, _) = ScriptedGateway::accept(&fixture.one).await;
        assert_eq!(requests(&mut one).await, of(&[(1, wanted)]));
        one.assign(&of(&[(1, ANY)])).await;
    }
    let record = fixture.node.record(|record| record["kind"] == "ip").await;
    assert!(record.to_string().contains("the new far end does not assign the address"), "{record}");
}

/// An answer may never come, and one of several may be a refusal.
#[tokio::test]
async fn a_refused_address_of_several_is_requested_as_any() {
    let (mut fixture, mut one) = Fixture::asking(&[(1, ANY), (2, ANY_V6)]).await;
    for request in [(1, ANY), (2, ANY_V6)] {
        assert_eq!(requests(&mut one).await, of(&[request]));
    }
    one.assign(&of(&[(1, "10.20.0.7"), (2, "fd00::7")])).await;
    assert_eq!(fixture.receiver().await.len(), 2);
    // What it has under another identifier is the same.
    fixture.asks(3, "10.20.0.7").await;
    assert_eq!(requests(&mut one).await, of(&[(3, "10.20.0.7")]));
    one.assign(&of(&[(3, "10.20.0.7"), (2, "fd00::7")])).await;
    assert_eq!(fixture.receiver().await.len(), 2);
    fixture.asks(4, ANY).await;
    assert_eq!(requests(&mut one).await, of(&[(4, ANY)]));
    one.assign(&of(&[(3, "10.20.0.7"), (2, "fd00::7"), (4, "10.20.0.8")])).await;
    assert_eq!(fixture.receiver().await.len(), 3);

    fixture.leads_to("other").await;
    let (mut first, _) = ScriptedGateway::accept(&fixture.other).await;
    assert_eq!(requests(&mut first).await, of(&[(2, "fd00::7"), (3, "10.20.0.7"), (4, "10.20.0.8")]));
    first.assign(&of(&[(2, "fd00::7"), (3, "10.20.0.7"), (4, ANY)])).await;
    let (mut other, _) = ScriptedGateway::accept(&fixture.other).await;
    assert_eq!(requests(&mut other).await, of(&[(2, "fd00::7"), (3, "10.20.0.7"), (4, ANY)]));
    // What is asked meanwhile is asked of this one too. Of the last it never says a word.
    fixture.asks(5, "10.20.0.9").await;
    assert_eq!(requests(&mut one).await, of(&[(5, "10.20.0.9")]));
    other.assign(&of(&[(2, "fd00::7"), (3, "10.20.0.7")])).await;
    fixture.node.says("a session has moved").await;
    assert_eq!(requests(&mut other).await, of(&[(5, "10.20.0.9")]));
    assert_eq!(fixture.receiver().await, of(&[(2, "fd00::7"), (3, "10.20.0.7")]));
    // And it goes on there.
    other.assign(&of(&[(2, "fd00::7"), (3, "10.20.0.7"), (5, "10.20.0.9")])).await;
    assert_eq!(fixture.receiver().await.len(), 3);
}
