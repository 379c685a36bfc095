//! The scheme of a request is the client's on every hop, whatever the connections between are: with it go the default
//! port, and what a route matches.

use hermes_testkit::{
    ca::Subject,
    listener_client::{ListenerClient, NODE_NAME},
    overlay::{Node, Overlay},
};
use http::Request;

use crate::http::lab::overlay;

const FAR: &str = "
listeners:
- {name: secure, bind: '127.0.0.1:0', protocol: http, http3: true, tls: {client: required}}
- {name: clear, bind: '127.0.0.1:0', protocol: http, trust: [127.0.0.0/8]}
routes:
- {name: star, match: {method: OPTIONS, path: '*'}, respond: {body: star}}
- {name: http, match: {port: 80}, respond: {body: http}}
- {name: https, match: {port: 443}, respond: {body: https}}
";

/// The path of a request says by which version it goes on.
const NEAR: &str = "
listeners:
- {name: secure, bind: '127.0.0.1:0', protocol: http, http3: true, tls: {client: none}}
- {name: clear, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: h1, match: {path: /h1}, upstream: h1}
- {name: h2, match: {path: /h2}, upstream: h2}
- {name: h3, match: {path: /h3}, upstream: h3}
- {name: h1-clear, match: {path: /h1-clear}, upstream: h1-clear}
- {name: h2-clear, match: {path: /h2-clear}, upstream: h2-clear}
- {name: star, match: {method: OPTIONS, path: '*'}, upstream: h1}
upstreams:
- {name: h1, protocol: h1, endpoints: ['$SECURE'], tls: {}}
- {name: h2, protocol: h2, endpoints: ['$SECURE'], tls: {}}
- {name: h3, protocol: h3, endpoints: ['$SECURE'], tls: {}}
- {name: h1-clear, protocol: h1, overlay: true, endpoints: ['$CLEAR']}
- {name: h2-clear, protocol: h2, overlay: true, endpoints: ['$CLEAR']}
";

async fn chain(overlay: &Overlay) -> (Node, Node) {
    let subject = |name| Subject::node(name).standalone().with_dns(NODE_NAME);
    let far = overlay.node("far").identity(&subject("far")).unwrap().document(FAR).start().await.unwrap();
    let near = overlay.node("near").identity(&subject("near")).unwrap().document(NEAR);
    let near = near.with("SECURE", far.address("secure")).with("CLEAR", far.address("clear")).start().await.unwrap();
    (near, far)
}

#[tokio::test]
async fn they_are_the_client_s_through_every_pair_of_versions() {
    let overlay = overlay();
    let (near, _far) = chain(&overlay).await;
    let secure = ListenerClient::tls(near.address("secure"), overlay.authority().pem(), None);
    let clear = ListenerClient::plain(near.address("clear"));
    for hop in ["h1", "h2", "h3", "h1-clear", "h2-clear"] {
        for (client, scheme) in [(&clear, "http"), (&secure, "https")] {
            let mut http1 = client.h1().await.unwrap();
            // Also the absolute form of the other scheme.
            for named in ["http", "https"] {
                http1.send(format!("GET {named}://web/{hop} HTTP/1.1\r\nhost: web\r\n\r\n")).await.unwrap();
                let head = http1.head().await.unwrap();
                assert_eq!(http1.body(&head).await.unwrap().text(), named, "{scheme}, h1, {hop}");
            }
            http1.send(format!("GET /{hop} HTTP/1.1\r\nhost: web\r\n\r\n")).await.unwrap();
            let head = http1.head().await.unwrap();
            assert_eq!(http1.body(&head).await.unwrap().text(), scheme, "{scheme}, h1, {hop}");
            let mut connection = client.h2().await.unwrap();
            let answer = connection.get(&format!("{scheme}://web/{hop}")).await.unwrap();
            assert_eq!(answer.text(), scheme, "{scheme}, h2, {hop}");
        }
        let connection = secure.h3().await.unwrap();
        let request = Request::get(format!("https://web/{hop}")).body(()).unwrap();
        assert_eq!(connection.ask(&request, b"").await.unwrap().text(), "https", "h3, {hop}");
    }
    let mut http1 = clear.h1().await.unwrap();
    http1.send("OPTIONS * HTTP/1.1\r\nhost: web\r\n\r\n").await.unwrap();
    let head = http1.head().await.unwrap();
    assert_eq!(http1.body(&head).await.unwrap().text(), "star");
}
