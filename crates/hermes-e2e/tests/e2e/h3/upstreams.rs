//! Upstreams over HTTP/3: their health, and names that have several addresses.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use hermes_testkit::{
    ca::Subject,
    h3::{Exchange, Origin},
    listener_client::NODE_NAME,
    multiplex, origin,
    overlay::{EFFECT_TIMEOUT, Node, Overlay},
    raw_http1::RawHttp1,
    skip::needs_root,
    tls,
};
use http::Response;
use tokio_rustls::TlsAcceptor;

use crate::h3::lab::{ANY, overlay};

/// An origin that knows its clients by their certificates: `/healthz` is 200 while it is well.
struct Site {
    origin: Origin,
    well: Arc<AtomicBool>,
}

impl Site {
    fn start(overlay: &Overlay) -> Self {
        let well = Arc::new(AtomicBool::new(true));
        let state = well.clone();
        let authority = overlay.authority();
        let identity = authority.issue(&Subject::server(NODE_NAME)).unwrap();
        let origin = Origin::serve(&identity, Some(authority.pem()), move |exchange: Exchange| {
            let well = state.load(Ordering::SeqCst);
            async move {
                let is_check = exchange.pseudo(":path") == "/healthz";
                let status = if is_check && !well { "503" } else { "200" };
                let mut send = exchange.send;
                send.headers(&[(":status", status)]).await?;
                send.data(Bytes::from_static(b"site")).await?;
                send.finish()
            }
        });
        Self { origin: origin.unwrap(), well }
    }
}

const DOCUMENT: &str = "
workers: 1
listeners:
- {name: door, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: all, upstream: web}
upstreams:
- {name: web, protocol: h3, overlay: false, endpoints: ['$WEB'], tls: {server-name: node.test, ca: $CA} $MORE}
";

async fn before(overlay: &Overlay, web: &str, more: &str, wrapper: &[&str]) -> Node {
    let ca = overlay.dir().join("site-ca.pem");
    std::fs::write(&ca, overlay.authority().pem()).unwrap();
    let draft = overlay.node("edge").identity(&Subject::node("edge")).unwrap().document(DOCUMENT);
    let draft = draft.with("WEB", web).with("CA", ca.display()).with("MORE", more).by_way_of(wrapper);
    draft.start().await.unwrap()
}

async fn ask(node: &Node) -> (u16, String) {
    let mut http1 = RawHttp1::connect(node.address("door")).await.unwrap();
    http1.send("GET / HTTP/1.1\r\nhost: WEB\r\nconnection: close\r\n\r\n").await.unwrap();
    let head = http1.head().await.unwrap();
    (head.status(), http1.body(&head).await.unwrap().text())
}

async fn healthy(node: &Node, value: f64) {
    let deadline = std::time::Instant::now() + EFFECT_TIMEOUT;
    while node.metric("hermes_upstream_healthy", "").await.unwrap() != value {
        assert!(std::time::Instant::now() < deadline, "it does not become {value}: {}", node.log());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn health_checks_use_http_3_and_a_client_certificate() {
    let overlay = overlay();
    let site = Site::start(&overlay);
    site.well.store(false, Ordering::SeqCst);
    let more = ", health: {path: /healthz, interval: 2s, unhealthy: 1, healthy: 1}";
    let node = before(&overlay, &site.origin.address().unwrap().to_string(), more, &[]).await;
    healthy(&node, 0.0).await;
    assert_eq!(ask(&node).await.0, 503);
    node.says("GET /healthz answers 503").await;
    site.well.store(true, Ordering::SeqCst);
    healthy(&node, 1.0).await;
    assert_eq!(ask(&node).await, (200, "site".to_owned()));
}

#[tokio::test]
async fn checks_without_a_path_are_handshakes() {
    let overlay = overlay();
    let site = Site::start(&overlay);
    let more = ", health: {interval: 2s, unhealthy: 1, healthy: 1}";
    let node = before(&overlay, &site.origin.address().unwrap().to_string(), more, &[]).await;
    assert_eq!(ask(&node).await, (200, "site".to_owned()));
    drop(site);
    healthy(&node, 0.0).await;
}

/// Sessions go by HTTP/3 where its connections begin: that HTTP/2 would answer is no help to them.
#[tokio::test]
async fn an_upstream_whose_http_3_hangs_is_not_healthy() {
    let overlay = overlay();
    let identity = overlay.authority().issue(&Subject::server(NODE_NAME)).unwrap();
    let (listener, socket) = origin::twins(ANY).unwrap();
    let address = listener.local_addr().unwrap();
    let hangs = Origin::over(socket, &identity, None, |exchange: Exchange| async move {
        std::future::pending::<()>().await;
        drop(exchange);
        Ok(())
    });
    let (_hangs, acceptor) = (hangs.unwrap(), TlsAcceptor::from(tls::server(&identity, None, &["h2"]).unwrap()));
    let requests = Arc::new(AtomicBool::new(false));
    let seen = requests.clone();
    let answers = origin::Origin::accepting(listener, move |stream| {
        let (acceptor, seen) = (acceptor.clone(), seen.clone());
        async move {
            let Ok(stream) = acceptor.accept(stream).await else { return };
            seen.store(true, Ordering::SeqCst);
            multiplex::serve_connection(stream, |exchange| exchange.answer(Response::new(()), "")).await;
        }
    });
    let _answers = answers.unwrap();
    let more = ", health: {path: /healthz, interval: 3s, timeout: 3s, unhealthy: 1, healthy: 1}";
    let node = before(&overlay, &address.to_string(), more, &[]).await;
    healthy(&node, 0.0).await;
    assert!(!requests.load(Ordering::SeqCst), "its handshake over QUIC was answered");
}

/// Its own view of the names.
const RENAMED: &str = "mount --bind \"$0\" /etc/hosts && exec \"$@\"";

#[tokio::test]
async fn a_silent_address_does_not_delay_the_next_one() {
    if !needs_root("of_several_addresses") {
        return;
    }
    let overlay = overlay();
    let site = Site::start(&overlay);
    let hosts = overlay.dir().join("hosts");
    // Nobody is at the first, and of QUIC nobody hears that.
    std::fs::write(&hosts, "127.0.0.1 localhost\n127.0.0.2 many.test\n127.0.0.1 many.test\n").unwrap();
    let hosts = hosts.display().to_string();
    let web = format!("many.test:{}", site.origin.address().unwrap().port());
    let node = before(&overlay, &web, "", &["unshare", "-m", "sh", "-c", RENAMED, &hosts]).await;
    let began = std::time::Instant::now();
    assert_eq!(ask(&node).await, (200, "site".to_owned()));
    // A route's time to connect, which the first alone would take, is 5 s.
    println!("it took {:?}", began.elapsed());
    assert_eq!(node.metric("hermes_upstream_connects_total", "").await.unwrap(), 1.0);
}
