//! A device, the edge that it connects to, the ingress behind that, and an origin that tells what it was asked.

use hermes_testkit::binary::hermes;
use hermes_testkit::{
    ca::{Identity, Subject},
    listener_client::{ListenerClient, NODE_NAME},
    origin::{
        Origin,
        scripted::{self, Heads},
    },
    overlay::{Node, Overlay},
};

pub(crate) fn overlay() -> Overlay {
    Overlay::new(hermes()).unwrap()
}

/// A node's certificate as tests want it: with a name that clients can verify.
pub(crate) fn subject(node: &str) -> Subject {
    Subject::node(node).with_dns(NODE_NAME)
}

/// An origin of requests, and its heads.
pub(crate) fn origin() -> (Origin, Heads) {
    scripted::recording(|_| "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok".to_owned()).unwrap()
}

/// Demands certificates, and knows a place for alice, one for bob, one for anybody.
pub(crate) const INGRESS: &str = "
role: $ROLE
$USERS
listeners:
- {name: door, bind: '127.0.0.1:0', protocol: http, accept-post: true, tls: {client: required}}
- {name: perhaps, bind: '127.0.0.1:0', protocol: http, tls: {client: optional}}
- {name: plain, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: for-alice, match: {authority: HOME, user: alice}, upstream: origin}
- {name: for-bob, match: {authority: HOME, user: bob}, upstream: origin}
- {name: for-carol, match: {authority: HOME, user: carol}, upstream: origin}
- {name: tcp, match: {kind: tcp}, terminate: {tcp: '$ORIGIN'}}
- {name: udp, match: {kind: udp}, terminate: {udp: '$ORIGIN'}}
- {name: for-anybody, match: {authority: OPEN}, upstream: origin}
upstreams:
- {name: origin, protocol: h1, endpoints: ['$ORIGIN']}
";

pub(crate) async fn ingress(overlay: &Overlay, users: &str, origin: &Origin) -> Node {
    let draft = overlay.node("ingress").document(INGRESS).with("USERS", users).with("ROLE", "dependent");
    draft.with("ORIGIN", origin.address()).identity(&subject("ingress")).unwrap().start().await.unwrap()
}

/// A node in the middle: what it is given it passes on to `next` with its own certificate.
pub(crate) const MIDDLE: &str = "
listeners:
- {name: door, bind: '127.0.0.1:0', protocol: http, tls: {client: required}}
- {name: apps, bind: '127.0.0.1:0', protocol: http $SET}
- {name: database, bind: '127.0.0.1:0', protocol: tcp, authority: 'DB:5432' $SET}
routes:
- {name: on, upstream: next}
upstreams:
- {name: next, protocol: $PROTOCOL, endpoints: ['$NEXT'], tls: {$TLS}}
";

/// A node in the middle with this certificate. `user` is what its listener for applications claims.
pub(crate) async fn middle(overlay: &Overlay, subject: Subject, user: Option<&str>, next: &Node) -> Node {
    let name = subject.node.clone().unwrap();
    let set = user.map_or_else(String::new, |user| format!(", set-headers: {{hermes-user: {user}}}"));
    let draft = overlay.node(&name).document(MIDDLE).with("SET", set).with("PROTOCOL", "h2").with("TLS", "");
    draft.with("NEXT", next.address("door")).identity(&subject).unwrap().start().await.unwrap()
}

/// A client with a certificate of the overlay.
pub(crate) fn identity(overlay: &Overlay, subject: &Subject) -> Identity {
    overlay.authority().issue(subject).unwrap()
}

/// A listener of a node, for a client with this certificate.
pub(crate) fn client(overlay: &Overlay, node: &Node, listener: &str, identity: Option<&Identity>) -> ListenerClient {
    ListenerClient::tls(node.address(listener), overlay.authority().pem(), identity)
}
