//! Who is not who it claims to be gets nothing: no session, and no other's name.

use hermes_testkit::{
    ca::{Authority, Subject},
    listener_client::{ListenerClient, NODE_NAME},
    multiplex::serve_connection,
    origin::services::Services,
    overlay::{EFFECT_TIMEOUT, Node, Overlay},
    poll::until,
    tls,
};
use rustls_pki_types::ServerName;
use tokio::{
    io::AsyncReadExt as _,
    net::{TcpListener, TcpStream},
    task::JoinSet,
};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::behind_nat::lab::{DEVICE, HUB, Lab, device, get, hub, kept, overlay};

/// Asks the hub for the device's service.
async fn ask(overlay: &Overlay, hub: &Node) -> (u16, String) {
    let identity = overlay.authority().issue(&Subject::node("client")).unwrap();
    get(&ListenerClient::tls(hub.address("door"), overlay.authority().pem(), Some(&identity)), "WEB").await
}

#[tokio::test]
async fn a_device_of_another_overlay_s_ca_is_not_even_spoken_to() {
    let (overlay, services) = (overlay(), Services::start().unwrap());
    let hub = hub(&overlay, 2).start().await.unwrap();
    let other = Authority::new("lab").unwrap();
    let draft = device(&overlay, &services, hub.address("door"), "h2", 1);
    // It trusts the hub, which does not trust it.
    let device = draft.identity_of(&other, &Subject::node("device")).unwrap().trusting(overlay.authority()).unwrap();
    let device = device.start().await.unwrap();
    hub.metric_reaches("hermes_tls_handshake_failures_total", "", 3.0).await;
    assert_eq!(kept(&hub, "door").await, 0.0);
    assert_eq!(ask(&overlay, &hub).await.0, 503);
    device.says("reverse connection failed; retrying").await;
}

#[tokio::test]
async fn another_node_s_connection_is_not_the_device_s() {
    let (overlay, services) = (overlay(), Services::start().unwrap());
    let hub = hub(&overlay, 2).start().await.unwrap();
    let mallory = overlay.node("mallory").document(DEVICE).with("HUB", hub.address("door"));
    let mallory = services.fill(mallory.with("PROTOCOL", "h2").with("WORKERS", 1));
    let _mallory = mallory.identity(&Subject::node("mallory")).unwrap().start().await.unwrap();
    hub.says("no upstream names node mallory").await;
    assert_eq!(kept(&hub, "door").await, 0.0);
    assert_eq!(ask(&overlay, &hub).await.0, 503);
}

/// The name of a user is no node's, though it be the same word.
#[tokio::test]
async fn a_user_s_certificate_keeps_no_connection() {
    let overlay = overlay();
    let hub = hub(&overlay, 2).start().await.unwrap();
    let user = overlay.authority().issue(&Subject { users: vec!["device".to_owned()], ..Subject::default() }).unwrap();
    let config = tls::client(overlay.authority().pem(), Some(&user), &["hermes-reverse"]).unwrap();
    let stream = TcpStream::connect(hub.address("door")).await.unwrap();
    let name = ServerName::try_from(NODE_NAME).unwrap();
    let mut stream = TlsConnector::from(config).connect(name, stream).await.unwrap();
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"hermes-reverse"[..]));
    let mut output = Vec::new();
    // How it ends does not matter, but that nothing is asked of it before.
    let ended = tokio::time::timeout(EFFECT_TIMEOUT, stream.read_to_end(&mut output)).await;
    assert!(ended.is_ok() && output.is_empty(), "{ended:?} {output:?}");
    hub.says("reverse connection rejected: the client is not a node").await;
    assert_eq!(kept(&hub, "door").await, 0.0);
}

#[tokio::test]
async fn a_device_serves_only_the_hub_that_it_names() {
    let (overlay, services) = (overlay(), Services::start().unwrap());
    // Of the same overlay, with all rights there: but another node.
    let draft = overlay.node("not-the-hub").document(HUB).with("WORKERS", 1).with("AT", "127.0.0.1");
    let other = draft.identity(&Subject::node("not-the-hub").with_dns(NODE_NAME)).unwrap().start().await.unwrap();
    let device = device(&overlay, &services, other.address("door"), "h2", 1).start().await.unwrap();
    device.says("the server is node not-the-hub, which `tls.node` does not name").await;
    assert_eq!(kept(&other, "door").await + kept(&device, "uplink").await, 0.0);
}

/// It looks like the hub and takes connections: whoever waits for its call has to end that.
#[tokio::test]
async fn connections_of_a_hub_that_never_calls_end() {
    let (overlay, services) = (overlay(), Services::start().unwrap());
    let identity = overlay.authority().issue(&Subject::node("hub").with_dns(NODE_NAME)).unwrap();
    let config = tls::server(&identity, Some(overlay.authority().pem()), &["hermes-reverse"]).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let device = device(&overlay, &services, listener.local_addr().unwrap(), "h2", 1).start().await.unwrap();
    let (stream, _) = listener.accept().await.unwrap();
    let stream = TlsAcceptor::from(config).accept(stream).await.unwrap();
    let (_sender, connection) = h2::client::handshake(stream).await.unwrap();
    // It answers PING, and so seems to be well.
    let ended = tokio::time::timeout(EFFECT_TIMEOUT, connection).await;
    assert!(ended.is_ok(), "{}", device.log());
    device.says("the peer accepted the connection but did not use it in time").await;
    assert_eq!(kept(&device, "uplink").await, 0.0);
}

/// Connections that it opens at once, and that the hub takes.
const FLOOD: usize = 40;

/// One that answers every PING and no request: it looks alive.
async fn dumb(address: std::net::SocketAddr, config: std::sync::Arc<tokio_rustls::rustls::ClientConfig>) {
    let Ok(stream) = TcpStream::connect(address).await else { return };
    let name = ServerName::try_from(NODE_NAME).unwrap();
    let Ok(stream) = TlsConnector::from(config).connect(name, stream).await else { return };
    serve_connection(stream, |exchange| async move {
        let _kept = exchange;
        std::future::pending().await
    })
    .await;
}

/// It may have been taken over: others are served meanwhile, and its connections end.
#[tokio::test]
async fn a_device_that_answers_no_call_takes_no_place_from_others() {
    let overlay = overlay();
    let document = format!("limits: {{connections: {FLOOD}}}{HUB}");
    let hub = overlay.node("hub").document(&document).with("WORKERS", 1).with("AT", "127.0.0.1");
    let hub = hub.identity(&Subject::node("hub").with_dns(NODE_NAME)).unwrap().start().await.unwrap();
    let identity = overlay.authority().issue(&Subject::node("device")).unwrap();
    let config = tls::client(overlay.authority().pem(), Some(&identity), &["hermes-reverse"]).unwrap();
    let mut flood = JoinSet::new();
    for _ in 0..FLOOD {
        flood.spawn(dumb(hub.address("door"), config.clone()));
        let count = flood.len() as f64;
        let most = count.min(8.0);
        until("it is kept", || async { kept(&hub, "door").await >= most }).await;
    }
    // Of the oldest there is nothing left, and nobody waits for that.
    until("there is room", || async { kept(&hub, "door").await <= 12.0 }).await;
    // Somebody is served, when the places of those are free; that this service answers nothing is the device's affair.
    let client = overlay.authority().issue(&Subject::node("client")).unwrap();
    let listener = ListenerClient::tls(hub.address("door"), overlay.authority().pem(), Some(&client));
    until("somebody is served", async || listener.h1().await.is_ok()).await;
    until("what answers no call is over", || async { kept(&hub, "door").await == 0.0 }).await;
    assert!(flood.join_next().await.is_some());
    hub.says("the peer did not respond to a call within").await;
}

/// A call is between neighbours: whoever sends its words through the hub is served as anybody.
#[tokio::test]
async fn bytes_of_a_client_are_not_a_call() {
    let lab = Lab::start("h2", 1, 1).await;
    let mut http1 = lab.client("apps").h1().await.unwrap();
    for _ in 0..2 {
        http1.send("OPTIONS / HTTP/1.1\r\nhost: WEB\r\nhermes-reverse: leaving, gone=1\r\n\r\n").await.unwrap();
        let head = http1.head().await.unwrap();
        assert_eq!(head.status(), 200, "{head:?}");
        assert_eq!(http1.body(&head).await.unwrap().text(), "web");
    }
    assert_eq!(get(&lab.client("apps"), "WEB").await.0, 200);
    let device = lab.device.as_ref().unwrap();
    assert_eq!(kept(device, "uplink").await, 1.0);
    assert!(!device.log().contains("is being replaced"), "{}", device.log());
}
