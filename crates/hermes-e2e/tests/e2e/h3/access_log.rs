//! Access-log entries of tunnels, for each version and kind of listener.

use hermes_testkit::{
    ca::Subject,
    flow::{Flow, FlowMode},
    listener_client::{ListenerClient, NODE_NAME, TunnelMode},
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
async fn the_access_log_has_the_tunnel_status_that_the_client_received() {
    let (overlay, echo, udp) =
        (overlay(), stream::echo(origin::listen(ANY).unwrap()).unwrap(), Origin::udp_echo(ANY).unwrap());
    let draft = overlay.node("edge").identity(&Subject::node("edge").with_dns(NODE_NAME)).unwrap();
    let draft = draft.document(DOCUMENT).with("ECHO", echo.address()).with("UDP", udp.address());
    let node = draft.start().await.unwrap();
    let client = ListenerClient::tls(node.address("door"), overlay.authority().pem(), None);
    // Whoever speaks no HTTP is an extended CONNECT to those who do, and on record.
    for (mode, method, status) in [
        (FlowMode::Raw, "CONNECT", 200),
        (FlowMode::UpgradeH1, "GET", 101),
        (FlowMode::ConnectH2, "CONNECT", 200),
        (FlowMode::ConnectH3, "CONNECT", 200),
    ] {
        let client =
            if mode == FlowMode::Raw { ListenerClient::plain(node.address("raw-udp")) } else { client.clone() };
        let mut flow = Flow::open(&client, mode, "ECHO", 7).await.unwrap();
        flow.send(b"hello").await.unwrap();
        assert_eq!(flow.receive().await.unwrap(), b"hello");
        let before = node.records().len();
        drop(flow);
        node.record(|_| node.records().len() > before).await;
        let record = &node.records()[before];
        assert_eq!((&record["method"], &record["status"]), (&method.into(), &status.into()), "{mode:?}: {record}");
    }
    for mode in [TunnelMode::Raw, TunnelMode::ConnectH1, TunnelMode::ConnectH2, TunnelMode::ConnectH3] {
        let client = if mode == TunnelMode::Raw { ListenerClient::plain(node.address("raw")) } else { client.clone() };
        let before = node.records().len();
        drop(client.tunnel(mode, "ECHO:7").await.unwrap());
        node.record(|_| node.records().len() > before).await;
        let record = &node.records()[before];
        assert_eq!((&record["method"], &record["status"]), (&"CONNECT".into(), &200.into()), "{mode:?}: {record}");
    }
}
