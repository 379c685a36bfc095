//! `Max-Forwards` (RFC 9110, 7.6.2): TRACE and OPTIONS go so far and no further, and tell where they ended.

use hermes_testkit::{
    listener_client::ListenerClient,
    multiplex::Answer,
    origin::{
        Origin,
        scripted::{self, Heads},
    },
    overlay::{Node, Overlay},
};
use http::{Method, Request};

use crate::http::lab::{next, overlay};

/// An origin that tells what it was asked, and answers 204.
fn origin() -> (Origin, Heads) {
    scripted::recording(|_| "HTTP/1.1 204 No Content\r\n\r\n".to_owned()).unwrap()
}

const DOCUMENT: &str = "
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http, set-headers: {x-internal: shelf-7}}
- {name: overlay, bind: '127.0.0.1:0', protocol: http, trust: [127.0.0.0/8]}
routes:
- {name: denied, match: {authority: DENIED}, respond: {status: 403}}
- {name: all, upstream: next}
upstreams:
- {name: next, protocol: $PROTOCOL, overlay: $OVERLAY, endpoints: ['$NEXT']}
";

/// near - (h2) - middle - (h1) - far - (h1) - origin.
async fn chain(overlay: &Overlay, origin: &Origin) -> [Node; 3] {
    let draft = |name, protocol: &str, is_node: bool, next: std::net::SocketAddr| {
        let draft = overlay.node(name).document(DOCUMENT).with("PROTOCOL", protocol).with("OVERLAY", is_node);
        draft.with("NEXT", next).start()
    };
    let far = draft("far", "h1", false, origin.address()).await.unwrap();
    let middle = draft("middle", "h1", true, far.address("overlay")).await.unwrap();
    let near = draft("near", "h2", true, middle.address("overlay")).await.unwrap();
    [near, middle, far]
}

fn request(method: &Method, hops: &str) -> Request<()> {
    let request = Request::builder().method(method).uri("http://WEB/path?query=1").header("max-forwards", hops);
    let request = request.header("cookie", "a=secret").header("x-api-key", "secret").header("x-mine", "mine");
    request.header("hermes-anything", "ours").body(()).unwrap()
}

async fn ask(node: &Node, request: Request<()>) -> Answer {
    ListenerClient::plain(node.address("in")).h2().await.unwrap().ask(request, b"").await.unwrap()
}

#[tokio::test]
async fn a_request_ends_at_the_node_that_its_hops_allow() {
    let (origin, mut receiver) = origin();
    let overlay = overlay();
    let nodes = chain(&overlay, &origin).await;
    for method in [Method::TRACE, Method::OPTIONS] {
        for (hops, node) in ["near", "middle", "far"].into_iter().enumerate() {
            let answer = ask(&nodes[0], request(&method, &hops.to_string())).await;
            assert_eq!(answer.status, 200, "{method} {hops}: {answer:?}");
            let status = answer.header("proxy-status").unwrap();
            assert!(status.starts_with(&format!("{node};")), "{method} {hops}: {status}");
            if method == Method::OPTIONS {
                assert!(answer.data.is_empty(), "{answer:?}");
                continue;
            }
            assert_eq!(answer.header("content-type").as_deref(), Some("message/http"));
            let text = answer.text();
            assert!(text.starts_with("TRACE /path?query=1 HTTP/") && text.ends_with("\r\n\r\n"), "{text}");
            assert!(text.contains("\r\nhost: WEB\r\n") && text.contains("\r\nx-mine: mine\r\n"), "{text}");
            assert!(text.contains("\r\nmax-forwards: 0\r\n"), "{text}");
            // The way so far, and nothing that is nobody's business.
            assert_eq!(text.contains("via: 2 near"), hops > 0, "{text}");
            for hidden in ["secret", "ours"] {
                assert!(!text.contains(hidden), "{hops}: {text}");
            }
            assert_eq!(text.contains("shelf-7"), hops > 0, "what its own listener adds no node tells: {text}");
        }
        for (sent, arrives) in [("3", "0"), ("4", "1"), ("18446744073709551616", "253")] {
            assert_eq!(ask(&nodes[0], request(&method, sent)).await.status, 204, "{method} {sent}");
            let head = next(&mut receiver).await;
            assert_eq!((head.method(), head.target()), (method.as_str(), "/path?query=1"));
            assert_eq!(head.header("max-forwards").as_deref(), Some(arrives), "{method} {sent}");
        }
    }
    assert!(receiver.try_recv().is_err(), "nothing that had ended came here");
}

#[tokio::test]
async fn other_methods_and_other_answers_are_left_alone() {
    let (origin, mut receiver) = origin();
    let overlay = overlay();
    let [near, _middle, _far] = chain(&overlay, &origin).await;
    for method in [Method::GET, Method::POST, Method::DELETE] {
        assert_eq!(ask(&near, request(&method, "0")).await.status, 204, "{method}");
        assert_eq!(next(&mut receiver).await.header("max-forwards").as_deref(), Some("0"), "{method}");
    }
    // A route that answers is the last recipient anyway.
    let denied = Request::options("http://DENIED/").header("max-forwards", "0").body(()).unwrap();
    assert_eq!(ask(&near, denied).await.status, 403);
    for malformed in ["", "-1", "1, 2", "one", "1.0"] {
        let answer = ask(&near, request(&Method::OPTIONS, malformed)).await;
        assert_eq!(answer.status, 400, "{malformed:?}: {answer:?}");
        assert!(answer.text().contains("Max-Forwards"), "{}", answer.text());
    }
    assert!(receiver.try_recv().is_err());
}

/// `OPTIONS *` asks the server as such (RFC 9110, 9.3.7), in either version and across them.
#[tokio::test]
async fn options_of_the_server_itself_passes() {
    let (origin, mut receiver) = origin();
    let overlay = overlay();
    let [near, _middle, _far] = chain(&overlay, &origin).await;
    let mut http1 = ListenerClient::plain(near.address("in")).h1().await.unwrap();
    http1.send("OPTIONS * HTTP/1.1\r\nhost: WEB\r\nmax-forwards: 9\r\n\r\n").await.unwrap();
    assert_eq!(http1.head().await.unwrap().status(), 204);
    let head = next(&mut receiver).await;
    assert_eq!((head.method(), head.target()), ("OPTIONS", "*"), "{head:?}");
    assert_eq!((head.header("host").as_deref(), head.header("max-forwards").as_deref()), (Some("WEB"), Some("6")));
}
