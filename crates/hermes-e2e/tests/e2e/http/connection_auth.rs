//! NTLM and Negotiate authenticate a connection: an authenticated connection serves only its client.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use hermes_testkit::{
    ca::Subject,
    h3,
    listener_client::{ListenerClient, NODE_NAME},
    multiplex::Multiplex,
    origin::{Origin, scripted},
    overlay::{Node, Overlay},
    raw_http1::RawHttp1,
    tunnel::BoxedStream,
};
use http::{Request, Version};

use crate::http::lab::{Seen, next, overlay, seen};

/// An origin like IIS: a name that a connection has shown once applies to all its later requests. It reports the
/// numbers of connections that have ended. `/challenge` gets 401.
fn origin() -> (Origin, Seen<usize>) {
    let (sender, receiver) = seen();
    let count = Arc::new(AtomicUsize::new(0));
    let origin = scripted::h1(move |mut http1| {
        let (sender, number) = (sender.clone(), count.fetch_add(1, Ordering::SeqCst));
        async move {
            let mut user = "nobody".to_owned();
            while let Ok(head) = http1.head().await {
                let shown =
                    head.header("authorization").and_then(|value| value.strip_prefix("NTLM ").map(str::to_owned));
                user = shown.unwrap_or(user);
                let body = format!("{user} {number}");
                let status = if head.target() == "/challenge" {
                    "401 Unauthorized\r\nwww-authenticate: Basic realm=\"a, b\", Negotiate"
                } else {
                    "200 OK"
                };
                http1.send(format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}", body.len())).await?;
            }
            let _ = sender.send(number);
            Ok(())
        }
    });
    (origin.unwrap(), receiver)
}

/// A client's connection.
enum Client {
    H1(RawHttp1<BoxedStream>),
    H2(Multiplex),
    H3(Box<h3::Connection>),
}

const VERSIONS: [&str; 3] = ["h1", "h2", "h3"];

impl Client {
    async fn new(version: &str, client: &ListenerClient) -> Self {
        match version {
            "h1" => Self::H1(client.h1().await.unwrap()),
            "h2" => Self::H2(client.h2().await.unwrap()),
            _ => Self::H3(Box::new(client.h3().await.unwrap())),
        }
    }

    /// Returns the user that the origin assumes, and the number of the connection.
    async fn ask(&mut self, path: &str, authorization: Option<&str>) -> String {
        let mut request = Request::builder().uri(format!("https://web{path}")).version(Version::HTTP_2);
        if let Some(value) = authorization {
            request = request.header("authorization", value);
        }
        let request = request.body(()).unwrap();
        match self {
            Self::H1(http1) => {
                let line = authorization.map_or_else(String::new, |value| format!("authorization: {value}\r\n"));
                http1.send(format!("GET {path} HTTP/1.1\r\nhost: web\r\n{line}\r\n")).await.unwrap();
                let head = http1.head().await.unwrap();
                http1.body(&head).await.unwrap().text()
            }
            Self::H2(connection) => connection.ask(request, b"").await.unwrap().text(),
            Self::H3(connection) => connection.ask(&request, b"").await.unwrap().text(),
        }
    }
}

/// A node with one worker, so that clients share a pool.
async fn gate(overlay: &Overlay, origin: &Origin) -> Node {
    let document = "
workers: 1
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http, http3: true, tls: {client: none}}
- {name: plain, bind: '127.0.0.1:0', protocol: http}
- {name: trusting, bind: '127.0.0.1:0', protocol: http, trust: [127.0.0.1]}
routes:
- {name: all, upstream: origin}
upstreams:
- {name: origin, protocol: h1, overlay: false, endpoints: ['$ORIGIN']}
";
    let draft = overlay.node("gate").document(document).with("ORIGIN", origin.address());
    draft.identity(&Subject::node("gate").with_dns(NODE_NAME)).unwrap().start().await.unwrap()
}

#[tokio::test]
async fn an_authenticated_connection_stays_with_its_client() {
    let (origin, mut ended) = origin();
    let overlay = overlay();
    let node = gate(&overlay, &origin).await;
    let client = ListenerClient::tls(node.address("in"), overlay.authority().pem(), None);
    let mut connections = 0;
    for version in VERSIONS {
        let mut alice = Client::new(version, &client).await;
        let served = alice.ask("/", Some("NTLM alice")).await;
        let number = served.strip_prefix("alice ").unwrap().parse::<usize>().unwrap();
        for other in VERSIONS {
            let mut bob = Client::new(other, &client).await;
            let served = bob.ask("/", None).await;
            assert!(served.starts_with("nobody "), "{other} after {version}: {served}");
            assert!(!served.ends_with(&format!(" {number}")), "{other} after {version}: {served}");
        }
        assert_eq!(alice.ask("/", None).await, format!("alice {number}"), "{version}");
        // The bound connection ends with its client.
        drop(alice);
        while next(&mut ended).await != number {}
        connections += 1;
    }
    assert_eq!(connections, VERSIONS.len());
}

/// A challenge binds a connection as well: the client's reply has to use the same one.
#[tokio::test]
async fn a_challenged_connection_stays_with_its_client() {
    let (origin, _ended) = origin();
    let overlay = overlay();
    let node = gate(&overlay, &origin).await;
    let client = ListenerClient::tls(node.address("in"), overlay.authority().pem(), None);
    for version in VERSIONS {
        let mut alice = Client::new(version, &client).await;
        let challenged = alice.ask("/challenge", None).await;
        let mut bob = Client::new(version, &client).await;
        assert_ne!(bob.ask("/", None).await, challenged, "{version}");
        assert_eq!(alice.ask("/", None).await, challenged, "{version}");
    }
}

/// Between nodes one HTTP/2 connection carries requests of many clients, so nothing is bound to it.
#[tokio::test]
async fn a_connection_of_many_clients_is_bound_to_none() {
    for hop in ["h2", "h1"] {
        let (origin, _ended) = origin();
        let overlay = overlay();
        let far = gate(&overlay, &origin).await;
        let client = far.address("plain");
        let document = "
workers: 1
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: all, upstream: far}
upstreams:
- {name: far, protocol: $PROTOCOL, overlay: true, endpoints: ['$FAR']}
";
        let near = overlay.node("near").document(document).with("PROTOCOL", hop).with("FAR", client);
        let near = near.start().await.unwrap();
        let client = ListenerClient::plain(near.address("in"));
        let mut alice = Client::new("h1", &client).await;
        assert!(alice.ask("/", Some("NTLM alice")).await.starts_with("alice "), "{hop}");
        let mut bob = Client::new("h1", &client).await;
        assert!(bob.ask("/", None).await.starts_with("nobody "), "{hop}");
        // Over HTTP/1.1 each node on the way keeps a connection for her.
        let wanted = if hop == "h1" { "alice " } else { "nobody " };
        assert!(alice.ask("/", None).await.starts_with(wanted), "{hop}");
    }
}

/// Connections that are bound and idle make room for others.
#[tokio::test]
async fn bound_connections_do_not_keep_others_out() {
    let (origin, mut ended) = origin();
    let overlay = overlay();
    let document = "
workers: 1
limits: {upstream-connections: 2}
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: all, upstream: origin}
upstreams:
- {name: origin, protocol: h1, endpoints: ['$ORIGIN']}
";
    let node = overlay.node("gate").document(document).with("ORIGIN", origin.address()).start().await.unwrap();
    let listener = ListenerClient::plain(node.address("in"));
    let mut clients = Vec::new();
    for name in ["alice", "bob", "carol"] {
        let mut client = Client::new("h1", &listener).await;
        let served = client.ask("/", Some(&format!("NTLM {name}"))).await;
        assert!(served.starts_with(name), "{served}");
        clients.push(client);
    }
    assert_eq!(next(&mut ended).await, 0, "the one that was idle for longest");
    assert!(clients[0].ask("/", None).await.starts_with("nobody "));
}

/// A proxy in front that keeps one connection for all its clients, trusted or not.
#[tokio::test]
async fn a_pooled_client_connection_serves_no_client_as_another() {
    let (origin, _ended) = origin();
    let overlay = overlay();
    let node = gate(&overlay, &origin).await;
    let lines = |client: &str, more: &str| format!("GET / HTTP/1.1\r\nhost: web\r\n{client}\r\n{more}\r\n");
    for (listener, alice, bob) in [
        ("plain", "x-forwarded-for: 10.0.0.1", "x-forwarded-for: 10.0.0.2"),
        ("plain", "forwarded: for=10.0.0.1", "forwarded: for=10.0.0.2"),
        ("trusting", "x-forwarded-for: 10.0.0.1", "x-forwarded-for: 10.0.0.2"),
        ("trusting", "hermes-user: alice", "hermes-user: bob"),
    ] {
        let mut front = ListenerClient::plain(node.address(listener)).h1().await.unwrap();
        let mut ask = async |client: &str, more: &str| {
            front.send(lines(client, more)).await.unwrap();
            let head = front.head().await.unwrap();
            front.body(&head).await.unwrap().text()
        };
        let ntlm = "authorization: NTLM alice\r\n";
        assert!(ask(alice, ntlm).await.starts_with("alice "), "{listener} {alice}");
        // A front proxy that does not pool keeps working.
        assert!(ask(alice, "").await.starts_with("alice "), "{listener} {alice}");
        assert!(ask(bob, "").await.starts_with("nobody "), "{listener} {alice}");
        // The connection is known to be pooled from here on: nothing stays bound to it.
        assert!(ask(alice, ntlm).await.starts_with("alice "), "{listener} {alice}");
        assert!(ask(alice, "").await.starts_with("nobody "), "{listener} {alice}");
    }
    let listener_client = ListenerClient::tls(node.address("in"), overlay.authority().pem(), None);
    let mut front = listener_client.h2().await.unwrap();
    for (client, ntlm, wanted) in [("10.0.0.1", Some("NTLM alice"), "alice "), ("10.0.0.2", None, "nobody ")] {
        let request = Request::get("https://web/").header("x-forwarded-for", client);
        let request = ntlm.into_iter().fold(request, |request, value| request.header("authorization", value));
        let served = front.ask(request.body(()).unwrap(), b"").await.unwrap().text();
        assert!(served.starts_with(wanted), "{served}");
    }
}
