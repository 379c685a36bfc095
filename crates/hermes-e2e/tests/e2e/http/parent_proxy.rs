//! A forward proxy after the node: squid, and one that shows its requests.

use std::{path::Path, time::Duration};

use hermes_testkit::{
    listener_client::{ListenerClient, TunnelMode},
    origin::{
        Origin,
        scripted::{self, Heads},
    },
    overlay::{Node, Overlay},
    process::{Port, Program, Running},
    raw_http1::Head,
    skip::skip,
};
use http::Request;

use crate::http::lab::{next, overlay};

/// The directories of squid's helpers in distributions.
const HELPERS: [&str; 3] = ["/usr/lib/squid", "/usr/lib64/squid", "/usr/libexec/squid"];

/// An origin that answers with its target, and tells which head it got.
fn origin() -> (Origin, Heads) {
    let echo = |head: &Head| {
        let body = head.target();
        format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len())
    };
    scripted::recording(echo).unwrap()
}

/// squid, which requires credentials and accepts any; `None` if it is not installed.
fn squid(test: &str, overlay: &Overlay) -> Option<(Running, u16)> {
    let helper = HELPERS.map(|dir| Path::new(dir).join("basic_fake_auth")).into_iter().find(|path| path.is_file());
    let Some(helper) = helper else {
        skip(test, "squid is not there; see scripts/setup.sh");
        return None;
    };
    let port = hermes_testkit::port::reserve("127.0.0.1").port();
    let config = format!(
        "http_port 127.0.0.1:{port}\npid_filename none\naccess_log none\ncache_log /dev/null\ncache deny all\n\
         pinger_enable off\nshutdown_lifetime 0 seconds\nmemory_cache_shared off\n\
         auth_param basic program {}\nacl known proxy_auth REQUIRED\nhttp_access allow known\nhttp_access deny all\n",
        helper.display()
    );
    let file = overlay.dir().join("squid.conf");
    std::fs::write(&file, config).unwrap();
    let file = file.to_string_lossy().into_owned();
    let started = Program::new("squid", "squid", overlay.dir()).args(["-N", "-f", &file]).start();
    let Ok(mut running) = started else {
        skip(test, "squid does not run; see scripts/setup.sh");
        return None;
    };
    running.wait_listening(&[Port::Tcp(port)], Duration::from_secs(30)).unwrap();
    Some((running, port))
}

/// A node before a forward proxy, with credentials of its own for what comes by `own`, and none for `clients`.
async fn before_proxy(overlay: &Overlay, port: u16) -> Node {
    let document = "
listeners:
- {name: own, bind: '127.0.0.1:0', protocol: http}
- {name: clients, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: own, match: {listener: own}, upstream: parent, rewrite: {set-headers: {proxy-authorization: 'Basic bm9kZTpub2Rl'}}}
- {name: clients, upstream: parent}
upstreams:
- {name: parent, protocol: h1, forward-proxy: true, endpoints: ['127.0.0.1:$PORT']}
";
    overlay.node("near").document(document).with("PORT", port).start().await.unwrap()
}

#[tokio::test]
async fn squid_takes_requests_and_tunnels() {
    let (overlay, (origin, mut receiver)) = (overlay(), origin());
    let Some((_squid, port)) = squid("squid_takes_requests_and_tunnels", &overlay) else { return };
    let node = before_proxy(&overlay, port).await;
    let (own, clients) = (ListenerClient::plain(node.address("own")), ListenerClient::plain(node.address("clients")));
    let (site, url) = (origin.address().to_string(), format!("http://{}/page?a=b", origin.address()));

    // By each version, with the node's credentials.
    let mut http1 = own.h1().await.unwrap();
    http1.send(format!("GET {url} HTTP/1.1\r\nhost: {site}\r\n\r\n")).await.unwrap();
    let head = http1.head().await.unwrap();
    assert_eq!((head.status(), http1.body(&head).await.unwrap().text().as_str()), (200, "/page?a=b"), "{head:?}");
    let answer = own.h2().await.unwrap().get(&url).await.unwrap();
    assert_eq!((answer.status, answer.text().as_str()), (200, "/page?a=b"));
    for _ in 0..2 {
        let head = next(&mut receiver).await;
        assert!(head.header("via").unwrap().contains("squid"), "{head:?}");
        assert_eq!(head.header("proxy-authorization"), None);
    }
    let mut tunnel = own.tunnel(TunnelMode::ConnectH1, &site).await.unwrap();
    tunnel.writer.send(format!("GET /tunnel HTTP/1.1\r\nhost: {site}\r\n\r\n")).await.unwrap();
    assert_eq!(next(&mut receiver).await.target(), "/tunnel");

    // By the client's own, which the proxy asks for.
    for (line, wanted) in [("", 407), ("proxy-authorization: Basic eDp5\r\n", 200)] {
        let mut http1 = clients.h1().await.unwrap();
        http1.send(format!("GET {url} HTTP/1.1\r\nhost: {site}\r\n{line}\r\n")).await.unwrap();
        let head = http1.head().await.unwrap();
        assert_eq!(head.status(), wanted, "{head:?}");
        assert_eq!(head.header("proxy-authenticate").is_some(), wanted == 407, "{head:?}");
    }
}

#[tokio::test]
async fn a_forward_proxy_is_asked_in_absolute_form() {
    let (overlay, (parent, mut receiver)) = (overlay(), origin());
    let node = before_proxy(&overlay, parent.address().port()).await;
    let client = ListenerClient::plain(node.address("clients"));
    for (sent, wanted) in [
        ("GET http://web.test/a?b=c", "http://web.test/a?b=c"),
        ("GET http://web.test:8080/", "http://web.test:8080/"),
        ("GET https://web.test/", "https://web.test/"),
        ("GET /origin-form", "http://web.test/origin-form"),
        ("OPTIONS *", "*"),
    ] {
        let mut http1 = client.h1().await.unwrap();
        let host = if sent.contains(":8080") { "web.test:8080" } else { "web.test" };
        http1.send(format!("{sent} HTTP/1.1\r\nhost: {host}\r\n\r\n")).await.unwrap();
        assert_eq!(http1.head().await.unwrap().status(), 200, "{sent}");
        let head = next(&mut receiver).await;
        assert_eq!((head.target(), head.header("host").as_deref()), (wanted, Some(host)), "{sent}");
    }
    let request = Request::get("http://web.test/h2").header("proxy-authorization", "Basic eDp5").body(()).unwrap();
    assert_eq!(client.h2().await.unwrap().ask(request, b"").await.unwrap().status, 200);
    let head = next(&mut receiver).await;
    assert_eq!(head.target(), "http://web.test/h2");
    assert_eq!(head.header("proxy-authorization").as_deref(), Some("Basic eDp5"));
    // An upgrade too.
    let mut http1 = client.h1().await.unwrap();
    http1
        .send("GET http://web.test/chat HTTP/1.1\r\nhost: web.test\r\nconnection: upgrade\r\nupgrade: chat\r\n\r\n")
        .await
        .unwrap();
    assert_eq!(next(&mut receiver).await.target(), "http://web.test/chat");
}

/// Single dots in paths, as apt sends them for flat repositories.
#[tokio::test]
async fn single_dots_are_left_out_of_paths() {
    let (overlay, (origin, mut receiver)) = (overlay(), origin());
    let node = crate::http::lab::before(&overlay, "h1", origin.address()).await;
    let client = ListenerClient::plain(node.address("in"));
    for (sent, wanted) in
        [("/./Packages.gz", "/Packages.gz"), ("/a/./b/.?c=/./d", "/a/b/?c=/./d"), ("/?a=/./b", "/?a=/./b")]
    {
        let mut http1 = client.h1().await.unwrap();
        http1.send(format!("GET {sent} HTTP/1.1\r\nhost: web.test\r\n\r\n")).await.unwrap();
        assert_eq!(http1.head().await.unwrap().status(), 200, "{sent}");
        assert_eq!(next(&mut receiver).await.target(), wanted);
        let answer = client.h2().await.unwrap().get(&format!("http://web.test{sent}")).await.unwrap();
        assert_eq!((answer.status, next(&mut receiver).await.target()), (200, wanted), "{sent}");
    }
    for sent in ["/./../b", "/a/%2e/b", "/a/.;x/b"] {
        let mut http1 = client.h1().await.unwrap();
        http1.send(format!("GET {sent} HTTP/1.1\r\nhost: web.test\r\n\r\n")).await.unwrap();
        assert_eq!(http1.head().await.unwrap().status(), 400, "{sent}");
    }
}

/// Go's `net/http` offers `h2` to a proxy, and cannot use it as one.
#[tokio::test]
async fn a_listener_without_http2_settles_on_http1() {
    let overlay = overlay();
    let document = "
listeners:
- {name: secure, bind: '127.0.0.1:0', protocol: http, http2: false, tls: {client: none}}
- {name: plain, bind: '127.0.0.1:0', protocol: http, http2: false}
routes:
- {name: all, respond: {body: hello}}
";
    let subject = hermes_testkit::ca::Subject::node("near").with_dns(hermes_testkit::listener_client::NODE_NAME);
    let node = overlay.node("near").document(document).identity(&subject).unwrap().start().await.unwrap();
    let secure = ListenerClient::tls(node.address("secure"), overlay.authority().pem(), None);
    for alpn in [&["h2", "http/1.1"][..], &["http/1.1"], &[]] {
        let mut http1 = hermes_testkit::raw_http1::RawHttp1::new(secure.stream(alpn).await.unwrap());
        http1.send("GET / HTTP/1.1\r\nhost: web.test\r\n\r\n").await.unwrap();
        assert_eq!(http1.head().await.unwrap().status(), 200, "{alpn:?}");
    }
    assert!(secure.stream(&["h2"]).await.is_err());
    let mut http1 = ListenerClient::plain(node.address("plain")).h1().await.unwrap();
    http1.send("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
    let answer = http1.to_end().await.unwrap();
    assert!(answer.is_empty() || answer.starts_with(b"HTTP/1.1 "), "{answer:?}");
}
