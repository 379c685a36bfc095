//! ingress - hub - device: the device dials the hub, and whoever asks the ingress for its services reaches them.

use hermes_testkit::binary::hermes;
use std::net::SocketAddr;

use hermes_testkit::{
    ca::Subject,
    flow::{Flow, FlowMode},
    listener_client::{ListenerClient, NODE_NAME, TunnelMode},
    origin::services::Services,
    overlay::{Draft, Node, Overlay},
    poll::until,
};

pub(crate) const DEVICE: &str = "
workers: $WORKERS
listeners:
- {name: uplink, protocol: http, dial: hub}
routes:
- {name: web, match: {listener: uplink, authority: WEB}, upstream: web}
- {name: echo, match: {listener: uplink, kind: tcp, authority: 'ECHO:7'}, terminate: {tcp: '$ECHO'}}
- {name: udp, match: {listener: uplink, kind: udp, authority: 'ECHO:7'}, terminate: {udp: '$UDP'}}
- {name: health, match: {path: /healthz}, respond: {status: 200}}
upstreams:
- {name: web, protocol: h1, endpoints: ['$WEB']}
- {name: hub, protocol: $PROTOCOL, endpoints: ['$HUB'], tls: {node: hub}}
";

/// Whoever is called DEVICE dials it.
pub(crate) const HUB: &str = "
workers: $WORKERS
listeners:
- {name: door, bind: '$AT:0', protocol: http, http3: true, tls: {client: required}}
routes:
- {name: device, upstream: device, timeout: {connect: 5s}}
upstreams:
- {name: device, protocol: auto, endpoints: [{node: device}]}
";

pub(crate) const INGRESS: &str = "
workers: 1
listeners:
- {name: apps, bind: '127.0.0.1:0', protocol: http}
- {name: echo, bind: '127.0.0.1:0', protocol: tcp, authority: 'ECHO:7'}
- {name: udp, bind: '127.0.0.1:0', protocol: udp, authority: 'ECHO:7'}
routes:
- {name: on, upstream: hub}
upstreams:
- {name: hub, protocol: h2, endpoints: ['$HUB'], tls: {node: hub}, health: {}}
";

pub(crate) fn overlay() -> Overlay {
    Overlay::new(hermes()).unwrap()
}

pub(crate) fn hub(overlay: &Overlay, workers: usize) -> Draft<'_> {
    let draft = overlay.node("hub").document(HUB).with("WORKERS", workers).with("AT", "127.0.0.1");
    draft.identity(&Subject::node("hub").with_dns(NODE_NAME)).unwrap()
}

/// A device that dials the hub over this version.
pub(crate) fn device<'a>(
    overlay: &'a Overlay,
    services: &Services,
    hub: SocketAddr,
    protocol: &str,
    workers: usize,
) -> Draft<'a> {
    let draft = overlay.node("device").document(DEVICE).with("HUB", hub).with("PROTOCOL", protocol);
    services.fill(draft.with("WORKERS", workers)).identity(&Subject::node("device")).unwrap()
}

/// All three, on loopback.
pub(crate) struct Lab {
    pub(crate) overlay: Overlay,
    pub(crate) services: Services,
    pub(crate) hub: Node,
    pub(crate) device: Option<Node>,
    pub(crate) ingress: Node,
    pub(crate) protocol: &'static str,
}

impl Lab {
    pub(crate) async fn start(protocol: &'static str, at_hub: usize, at_device: usize) -> Self {
        let (overlay, services) = (overlay(), Services::start().unwrap());
        let hub = hub(&overlay, at_hub).start().await.unwrap();
        let device = device(&overlay, &services, hub.address("door"), protocol, at_device).start().await.unwrap();
        let ingress = overlay.node("ingress").document(INGRESS).with("HUB", hub.address("door"));
        let ingress = ingress.identity(&Subject::node("ingress")).unwrap().start().await.unwrap();
        let lab = Self { overlay, services, hub, device: Some(device), ingress, protocol };
        lab.kept(at_hub).await;
        lab
    }

    /// Waits until so many connections are kept.
    pub(crate) async fn kept(&self, connections: usize) {
        until(&format!("{connections} connections are kept"), || async {
            kept(&self.hub, "door").await == connections as f64
        })
        .await;
    }

    pub(crate) fn client(&self, listener: &str) -> ListenerClient {
        ListenerClient::plain(self.ingress.address(listener))
    }
}

/// How many connections are kept at a node's listener, whichever side it is on.
pub(crate) async fn kept(node: &Node, listener: &str) -> f64 {
    node.metric("hermes_reverse_connections", &format!("listener=\"{listener}\"")).await.unwrap()
}

/// GET on a connection of its own: the status and the body.
pub(crate) async fn get(client: &ListenerClient, host: &str) -> (u16, String) {
    let mut http1 = client.h1().await.unwrap();
    http1.send(format!("GET / HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n")).await.unwrap();
    let head = http1.head().await.unwrap();
    let body = http1.body(&head).await.unwrap();
    (head.status(), body.text())
}

/// A request, a TCP tunnel and a UDP flow, each of its own.
pub(crate) async fn reach_all(http: &ListenerClient, udp: &ListenerClient) {
    assert_eq!(get(http, "WEB").await, (200, "web".to_owned()));
    let mut tunnel = http.tunnel(TunnelMode::ConnectH1, "ECHO:7").await.unwrap();
    tunnel.writer.send("hello").await.unwrap();
    assert_eq!(tunnel.reader.at_least(5).await.unwrap(), b"hello");
    let mut flow = Flow::open(udp, FlowMode::Raw, "ECHO", 7).await.unwrap();
    flow.send(b"datagram").await.unwrap();
    assert_eq!(flow.receive().await.unwrap(), b"datagram");
}
