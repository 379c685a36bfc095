//! `Alt-Svc` (RFC 7838): clients over TCP learn of HTTP/3 at the same port, from the node alone.

use hermes_testkit::{
    ca::Subject,
    listener_client::{ListenerClient, NODE_NAME},
    origin::{Origin, scripted},
    overlay::{Node, Overlay},
};

use crate::h3::lab::overlay;

const DOCUMENT: &str = "
listeners:
- {name: door, bind: '127.0.0.1:0', protocol: http, http3: true, tls: {client: optional}}
- {name: without, bind: '127.0.0.1:0', protocol: http, tls: {client: none}}
routes:
- {name: here, match: {authority: HERE}, respond: {body: here}}
- {name: own, match: {authority: OWN}, upstream: web, rewrite: {response: {set-headers: {alt-svc: 'h3=\":7\"'}}}}
- {name: all, upstream: web}
upstreams:
- {name: web, protocol: h1, overlay: false, endpoints: ['$WEB']}
";

/// A node before an origin that says where else it is.
struct Fixture {
    overlay: Overlay,
    node: Node,
    _origin: Origin,
}

impl Fixture {
    async fn start() -> Self {
        let origin = scripted::h1(|mut http1| async move {
            loop {
                http1.head().await?;
                let says = "HTTP/1.1 200 OK\r\nalt-svc: h3=\"elsewhere.test:443\"\r\ncontent-length: 3\r\n\r\nweb";
                http1.send(says).await?;
            }
        });
        let origin = origin.unwrap();
        let overlay = overlay();
        let draft = overlay.node("edge").identity(&Subject::node("edge").with_dns(NODE_NAME)).unwrap();
        let node = draft.document(DOCUMENT).with("WEB", origin.address()).start().await.unwrap();
        Self { overlay, node, _origin: origin }
    }

    fn client(&self, listener: &str, subject: Option<&Subject>) -> ListenerClient {
        let identity = subject.map(|subject| self.overlay.authority().issue(subject).unwrap());
        ListenerClient::tls(self.node.address(listener), self.overlay.authority().pem(), identity.as_ref())
    }

    /// What the node says of itself.
    fn own(&self) -> Option<String> {
        Some(format!("h3=\":{}\"; ma=3600", self.node.address("door").port()))
    }
}

/// The field of an answer over HTTP/1.1.
async fn h1(client: &ListenerClient, target: &str, host: &str) -> Option<String> {
    let mut http1 = client.h1().await.unwrap();
    http1.send(format!("GET {target} HTTP/1.1\r\nhost: {host}\r\n\r\n")).await.unwrap();
    let head = http1.head().await.unwrap();
    assert_eq!(head.status(), 200, "{head:?}");
    head.header("alt-svc")
}

/// The field of an answer over HTTP/2.
async fn h2(client: &ListenerClient, uri: &str) -> Option<String> {
    let answer = client.h2().await.unwrap().get(uri).await.unwrap();
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.header("alt-svc")
}

#[tokio::test]
async fn clients_over_tcp_learn_of_http_3() {
    let fixture = Fixture::start().await;
    let client = fixture.client("door", None);
    for host in ["HERE", "WEB"] {
        assert_eq!(h1(&client, "/", host).await, fixture.own(), "HTTP/1.1, {host}");
        assert_eq!(h2(&client, &format!("https://{host}/")).await, fixture.own(), "HTTP/2, {host}");
    }
    // A user without a node is a client.
    let user = Subject { users: vec!["alice".to_owned()], ..Subject::default() };
    assert_eq!(h2(&fixture.client("door", Some(&user)), "https://HERE/").await, fixture.own());
    // It is what it says.
    assert_eq!(client.h3().await.unwrap().get("https://HERE/").await.unwrap().text(), "here");
}

#[tokio::test]
async fn alt_svc_is_sent_to_no_other_client() {
    let fixture = Fixture::start().await;
    let node = Subject::node("other").with_user("alice");
    assert_eq!(h2(&fixture.client("door", Some(&node)), "https://WEB/").await, None, "a node");
    assert_eq!(h1(&fixture.client("without", None), "/", "WEB").await, None, "a listener without HTTP/3");
    assert_eq!(h1(&fixture.client("door", None), "http://WEB/", "WEB").await, None, "an origin that is not here");
    let answer = fixture.client("door", None).h3().await.unwrap().get("https://WEB/").await.unwrap();
    assert_eq!((answer.text().as_str(), answer.header("alt-svc")), ("web", None), "over HTTP/3 itself");
}

#[tokio::test]
async fn an_alt_svc_of_a_route_takes_precedence() {
    let fixture = Fixture::start().await;
    assert_eq!(h2(&fixture.client("door", None), "https://OWN/").await.as_deref(), Some("h3=\":7\""));
}
