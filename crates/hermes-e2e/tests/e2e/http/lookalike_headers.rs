//! Field names that CGI, WSGI and their like cannot tell from names that the overlay or a document sets.

use hermes_testkit::{
    listener_client::ListenerClient,
    origin::{
        Origin,
        scripted::{self, Heads},
    },
};
use http::Request;

use crate::http::lab::{next, overlay};

fn origin() -> (Origin, Heads) {
    scripted::recording(|_| "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n".to_owned()).unwrap()
}

const DOCUMENT: &str = "
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http, set-headers: {x-user: alice, x_account: '7'}}
- {name: nodes, bind: '127.0.0.1:0', protocol: http, trust: [127.0.0.0/8]}
routes:
- name: all
  rewrite: {set-headers: {x-api-version: '2'}, remove-headers: [x-internal-only]}
  upstream: origin
upstreams:
- {name: origin, protocol: h1, overlay: false, endpoints: ['$ORIGIN']}
";

/// Names that become `HTTP_HERMES_USER`, `HTTP_X_USER`, ... at an origin.
const ALIKE: [&str; 7] =
    ["hermes_user", "hermes.service", "x_user", "x-account", "x_api-version", "x-internal_only", "x_forwarded_for"];
/// Names that collide with none.
const OTHERS: [&str; 3] = ["x_users", "under_score", "user"];

#[tokio::test]
async fn names_that_are_like_protected_ones_do_not_reach_origins() {
    let overlay = overlay();
    let (origin, mut received) = origin();
    let node = overlay.node("edge").document(DOCUMENT).with("ORIGIN", origin.address()).start().await.unwrap();
    for listener in ["in", "nodes"] {
        let client = ListenerClient::plain(node.address(listener));
        let lines: String = ALIKE.iter().chain(&OTHERS).map(|name| format!("{name}: eve\r\n")).collect();
        let mut h1 = client.h1().await.unwrap();
        h1.send(format!("GET / HTTP/1.1\r\nHost: WEB\r\n{lines}\r\n")).await.unwrap();
        let request = ALIKE.iter().chain(&OTHERS).fold(Request::get("http://WEB/"), |r, name| r.header(*name, "eve"));
        let over_h1 = next(&mut received).await;
        client.h2().await.unwrap().ask(request.body(()).unwrap(), b"").await.unwrap();
        for head in [over_h1, next(&mut received).await] {
            let is_kept = |name: &str| head.header(name).as_deref() == Some("eve");
            // A trusted peer's own fields pass, but for those of the overlay and those that the route sets.
            let alike =
                if listener == "in" { &ALIKE[..] } else { &["hermes_user", "hermes.service", "x_api-version"][..] };
            for name in alike {
                assert!(!is_kept(name), "{listener}: {name} reached the origin: {head:?}");
            }
            for name in OTHERS {
                assert!(is_kept(name), "{listener}: {name} was removed: {head:?}");
            }
            assert_eq!(head.header("x-api-version").as_deref(), Some("2"));
            if listener == "in" {
                assert_eq!(head.header("x-user").as_deref(), Some("alice"));
                assert_eq!(head.header("x_account").as_deref(), Some("7"));
            }
        }
    }
}
