//! What is on record of a tunnel, whichever version or listener it came by.

use hermes_testkit::{
    ca::Subject,
    door::{Door, NODE_NAME, Way},
    flow::{Flow, FlowWay},
    origin::{self, Origin, stream},
};

use crate::h3::lab::{ANY, overlay};

const DOCUMENT: &str = "
listeners:
- {name: door, bind: '127.0.0.1:0', protocol: http, http3: true, tls: {client: none}}
- {name: raw, bind: '127.0.0.1:0', protocol: tcp, authority: 'ECHO:7'}
- {name: raw-udp, bind: '127.0.0.1:0', protocol: udp, authority: 'ECHO:7'}
routes:
- {name: tcp, match: {kind: tcp}, terminate: {tcp: '$ECHO'}}
- {name: udp, match: {kind: udp}, terminate: {udp: '$UDP'}, timeout: {idle: 1s}}
";

#[tokio::test]
async fn a_tunnel_s_status_is_what_its_client_was_told() {
    let (overlay, echo, udp) =
        (overlay(), stream::echo(origin::listen(ANY).unwrap()).unwrap(), Origin::udp_echo(ANY).unwrap());
    let draft = overlay.node("edge").identity(&Subject::node("edge").with_dns(NODE_NAME)).unwrap();
    let draft = draft.document(DOCUMENT).with("ECHO", echo.address()).with("UDP", udp.address());
    let node = draft.start().await.unwrap();
    let door = Door::tls(node.address("door"), overlay.authority().pem(), None);
    // Whoever speaks no HTTP is an extended CONNECT to those who do, and on record.
    for (way, method, status) in [
        (FlowWay::Raw, "CONNECT", 200),
        (FlowWay::UpgradeH1, "GET", 101),
        (FlowWay::ConnectH2, "CONNECT", 200),
        (FlowWay::ConnectH3, "CONNECT", 200),
    ] {
        let door = if way == FlowWay::Raw { Door::plain(node.address("raw-udp")) } else { door.clone() };
        let mut flow = Flow::open(&door, way, "ECHO", 7).await.unwrap();
        flow.send(b"hello").await.unwrap();
        assert_eq!(flow.receive().await.unwrap(), b"hello");
        let before = node.records().len();
        drop(flow);
        node.record(|_| node.records().len() > before).await;
        let record = &node.records()[before];
        assert_eq!((&record["method"], &record["status"]), (&method.into(), &status.into()), "{way:?}: {record}");
    }
    for way in [Way::Raw, Way::ConnectH1, Way::ConnectH2, Way::ConnectH3] {
        let door = if way == Way::Raw { Door::plain(node.address("raw")) } else { door.clone() };
        let before = node.records().len();
        drop(door.tunnel(way, "ECHO:7").await.unwrap());
        node.record(|_| node.records().len() > before).await;
        let record = &node.records()[before];
        assert_eq!((&record["method"], &record["status"]), (&"CONNECT".into(), &200.into()), "{way:?}: {record}");
    }
}
