//! Overlay names: resolved without DNS, and to different services for different users.

use bytes::Bytes;
use hermes_testkit::{
    listener_client::ListenerClient,
    origin::{self, Origin},
    overlay::{Node, Overlay},
};

use crate::http::lab::overlay;

fn origin_saying(text: &'static str) -> Origin {
    let listener = origin::listen("127.0.0.1:0".parse().unwrap()).unwrap();
    origin::http::serve(listener, origin::http::Version::H1, Bytes::from_static(text.as_bytes())).unwrap()
}

/// Asks for `/` of a name by HTTP/1.1 and returns what came.
async fn ask(node: &Node, listener: &str, request_line: &str, host: &str) -> (u16, String) {
    let mut http1 = ListenerClient::plain(node.address(listener)).h1().await.unwrap();
    http1.send(format!("{request_line} HTTP/1.1\r\nhost: {host}\r\n\r\n")).await.unwrap();
    let head = http1.head().await.unwrap();
    (head.status(), http1.body(&head).await.unwrap().text())
}

/// A device's node whose listeners stand for users, and the node that knows where names lead.
async fn by_user(overlay: &Overlay, far_document: &str, origins: &[(&str, &Origin)]) -> (Node, Node) {
    let far = origins
        .iter()
        .fold(overlay.node("far").document(far_document), |draft, (name, origin)| draft.with(name, origin.address()));
    let far = far.start().await.unwrap();
    let document = "
listeners:
- {name: alice, bind: '127.0.0.1:0', protocol: http, set-headers: {hermes-user: alice}}
- {name: bob, bind: '127.0.0.1:0', protocol: http, set-headers: {hermes-user: bob}}
- {name: nobody, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: all, upstream: far}
upstreams:
- {name: far, protocol: h2, overlay: true, endpoints: ['$FAR']}
";
    let near = overlay.node("near").document(document).with("FAR", far.address("door")).start().await.unwrap();
    (near, far)
}

const BY_USER: &str = "
listeners:
- {name: door, bind: '127.0.0.1:0', protocol: http, trust: [127.0.0.0/8]}
routes:
- {name: for-alice, match: {authority: VIDEO, user: alice}, upstream: one}
- {name: for-bob, match: {authority: VIDEO, headers: {hermes-user: bob}}, upstream: other}
- {name: for-anyone, match: {authority: OPEN}, upstream: one}
upstreams:
- {name: one, protocol: h1, endpoints: ['$ONE']}
- {name: other, protocol: h1, endpoints: ['$OTHER']}
";

#[tokio::test]
async fn a_name_is_routed_and_never_resolved() {
    let (one, other) = (origin_saying("one"), origin_saying("other"));
    let overlay = overlay();
    let (near, _far) = by_user(&overlay, BY_USER, &[("ONE", &one), ("OTHER", &other)]).await;
    // In every form of request, spelling and version.
    for (line, host) in [
        ("GET /file", "OPEN"),
        ("GET /file", "open"),
        ("GET /file", "Open:80"),
        ("GET http://OPEN/file", "OPEN"),
        ("GET http://open:80/file", "whatever"),
    ] {
        assert_eq!(ask(&near, "nobody", line, host).await, (200, "one".to_owned()), "{line} {host}");
    }
    let mut connection = ListenerClient::plain(near.address("nobody")).h2().await.unwrap();
    assert_eq!(connection.get("http://OPEN/file").await.unwrap().text(), "one");
    // Another port is another place.
    assert_eq!(ask(&near, "nobody", "GET /file", "OPEN:8080").await.0, 404);
}

#[tokio::test]
async fn one_name_resolves_to_a_different_service_for_each_user() {
    let (one, other) = (origin_saying("one"), origin_saying("other"));
    let overlay = overlay();
    let (near, far) = by_user(&overlay, BY_USER, &[("ONE", &one), ("OTHER", &other)]).await;
    assert_eq!(ask(&near, "alice", "GET /", "VIDEO").await, (200, "one".to_owned()));
    assert_eq!(ask(&near, "bob", "GET /", "VIDEO").await, (200, "other".to_owned()));
    let (status, text) = ask(&near, "nobody", "GET /", "VIDEO").await;
    assert_eq!(status, 404, "{text}");
    far.record(|record| record["user"] == "alice" && record["route"] == "for-alice").await;
    far.record(|record| record["user"] == "bob" && record["route"] == "for-bob").await;
}

#[tokio::test]
async fn a_client_cannot_choose_its_user() {
    let (one, other) = (origin_saying("one"), origin_saying("other"));
    let overlay = overlay();
    let (near, _far) = by_user(&overlay, BY_USER, &[("ONE", &one), ("OTHER", &other)]).await;
    let claim = "VIDEO\r\nhermes-user: bob";
    // The listener's user stands over the claim; where the listener says nobody, it is nobody.
    assert_eq!(ask(&near, "alice", "GET /", claim).await, (200, "one".to_owned()));
    assert_eq!(ask(&near, "nobody", "GET /", claim).await.0, 404);
}

const ANSWERS: &str = "
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: hello, match: {path: /hello}, respond: {status: 203, body: \"hello\\n\", headers: {x-from: edge}}}
- {name: moved, match: {authority: OLD}, redirect: {status: 307, location: 'http://NEW{path-and-query}'}}
- {name: old, match: {path: '/v1/*'}, upstream: origin, rewrite: {
    authority: 'inner.test', path: {from: /v1/, to: /echo/}, query: {set: {by: '{node}'}, remove: [secret]},
    set-headers: {x-user-agent: '{method} {host}'}, remove-headers: [x-private],
    response: {set-headers: {x-served-by: '{node}'}, remove-headers: [x-origin]}}}
- {name: pattern, match: {path: '/users/*'}, upstream: origin,
    rewrite: {path: {pattern: '/users/{id}/files/{rest*}', to: '/f/{rest}/of/{id}'}}}
upstreams:
- {name: origin, protocol: $PROTOCOL, overlay: false, endpoints: ['$ORIGIN']}
";

/// Says what it was asked, in its answer.
fn repeating(version: &str) -> Origin {
    use hermes_testkit::{multiplex::Exchange, origin::scripted};
    if version == "h1" {
        return scripted::h1(|mut http1| async move {
            loop {
                let head = http1.head().await?;
                let text = format!("{}\n{:?}", head.first, head.headers);
                let length = text.len();
                http1
                    .send(format!("HTTP/1.1 200 OK\r\nx-origin: yes\r\ncontent-length: {length}\r\n\r\n{text}"))
                    .await?;
            }
        })
        .unwrap();
    }
    scripted::h2(|exchange: Exchange| async move {
        let text =
            format!("{} {}\n{:?}", exchange.request.method(), exchange.request.uri(), exchange.request.headers());
        let response = http::Response::builder().header("x-origin", "yes").body(()).map_err(std::io::Error::other)?;
        exchange.answer(response, text).await
    })
    .unwrap()
}

#[tokio::test]
async fn a_route_answers_and_redirects_by_itself() {
    let overlay = overlay();
    let node = overlay.node("edge").document(ANSWERS).with("PROTOCOL", "h1").with("ORIGIN", "127.0.0.1:1");
    let node = node.start().await.unwrap();
    let client = ListenerClient::plain(node.address("in"));
    let mut connection = client.h2().await.unwrap();
    let hello = connection.get("http://ANY/hello?x=1").await.unwrap();
    assert_eq!(
        (hello.status, hello.text().as_str(), hello.header("x-from").as_deref()),
        (203, "hello\n", Some("edge"))
    );
    let moved = connection.get("http://OLD/a/b?c=d").await.unwrap();
    assert_eq!((moved.status, moved.header("location").as_deref()), (307, Some("http://NEW/a/b?c=d")));
    // A request with a body gets its answer, and the connection goes on.
    let mut http1 = client.h1().await.unwrap();
    http1.send("POST /hello HTTP/1.1\r\nhost: ANY\r\ncontent-length: 4\r\n\r\nbody").await.unwrap();
    for _ in 0..2 {
        let head = http1.head().await.unwrap();
        assert_eq!((head.status(), http1.body(&head).await.unwrap().text().as_str()), (203, "hello\n"));
        http1.send("GET /hello HTTP/1.1\r\nhost: ANY\r\n\r\n").await.unwrap();
    }
}

#[tokio::test]
async fn a_rewrite_changes_requests_and_responses() {
    for version in ["h1", "h2"] {
        let origin = repeating(version);
        let overlay = overlay();
        let node = overlay.node("edge").document(ANSWERS).with("PROTOCOL", version);
        let node = node.with("ORIGIN", origin.address()).start().await.unwrap();
        let mut connection = ListenerClient::plain(node.address("in")).h2().await.unwrap();
        let request =
            http::Request::get("http://API/v1/files/a?q=1&secret=2").header("x-private", "1").body(()).unwrap();
        let answer = connection.ask(request, b"").await.unwrap();
        let text = answer.text();
        assert!(text.contains("/echo/files/a?q=1&by=edge"), "{version}: {text}");
        assert!(text.contains("inner.test"), "{version}: {text}");
        assert!(text.contains("GET api") && !text.contains("x-private"), "{version}: {text}");
        assert_eq!(answer.header("x-served-by").as_deref(), Some("edge"), "{version}");
        assert_eq!(answer.header("x-origin"), None, "{version}");

        let answer = connection.get("http://API/users/7/files/a/b").await.unwrap();
        assert!(answer.text().contains("/f/a/b/of/7"), "{version}: {}", answer.text());
        assert_eq!(answer.header("x-origin").as_deref(), Some("yes"), "{version}");
    }
}
