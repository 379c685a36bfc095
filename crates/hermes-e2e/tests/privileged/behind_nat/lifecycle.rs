//! Services behind NAT while the device, the hub and their documents come and go.

use std::time::Duration;

use hermes_testkit::{
    ca::{Authority, Subject},
    listener_client::{ListenerClient, NODE_NAME, TunnelMode},
    origin::services::Services,
    poll::until,
};
use tokio::task::JoinSet;

use crate::behind_nat::lab::{DEVICE, HUB, Lab, device, get, hub, kept, overlay, reach_all};

/// Not at once: a node that went a moment ago is waited for.
#[tokio::test]
async fn a_disconnected_device_is_reported_and_serves_after_its_return() {
    let mut lab = Lab::start("h2", 2, 2).await;
    lab.device.take().unwrap().end(Duration::ZERO).unwrap();
    lab.kept(0).await;
    until("nobody waits for it any more", || async { get(&lab.client("apps"), "WEB").await.0 == 503 }).await;
    let record = lab.hub.record(|record| record["status"] == 503).await;
    assert_eq!(record["error"], "destination_unavailable");
    assert_eq!(record["reason"], "no reverse connection from node device");
    assert_eq!(record["endpoint"], "device/device");
    let again = device(&lab.overlay, &lab.services, lab.hub.address("door"), lab.protocol, 2).called("again");
    lab.device = Some(again.start().await.unwrap());
    lab.kept(2).await;
    reach_all(&lab.client("apps"), &lab.client("udp")).await;
}

#[tokio::test]
async fn a_request_waits_for_a_device_that_went_a_moment_ago() {
    let mut lab = Lab::start("h2", 1, 1).await;
    lab.device.take().unwrap().end(Duration::ZERO).unwrap();
    lab.kept(0).await;
    let client = lab.client("apps");
    let mut requests = JoinSet::new();
    requests.spawn(async move { get(&client, "WEB").await });
    let again = device(&lab.overlay, &lab.services, lab.hub.address("door"), lab.protocol, 1).called("again");
    lab.device = Some(again.start().await.unwrap());
    assert_eq!(requests.join_next().await.unwrap().unwrap(), (200, "web".to_owned()));
}

#[tokio::test]
async fn the_device_finds_a_hub_that_was_started_anew() {
    let (overlay, services) = (overlay(), Services::start().unwrap());
    let first = hub(&overlay, 2).start().await.unwrap();
    let address = first.address("door");
    let device = device(&overlay, &services, address, "h2", 1).start().await.unwrap();
    until("two connections are kept", || async { kept(&first, "door").await == 2.0 }).await;
    first.end(Duration::from_secs(5)).unwrap();
    device.says("reverse connection failed; retrying").await;
    // At the same address, with more workers than before.
    let document = HUB.replace("$AT:0", &address.to_string());
    let second = overlay.node("hub").called("hub-2").document(&document).with("WORKERS", 3);
    let second = second.identity(&Subject::node("hub").with_dns(NODE_NAME)).unwrap().start().await.unwrap();
    until("three connections are kept", || async { kept(&second, "door").await == 3.0 }).await;
    let identity = overlay.authority().issue(&Subject::node("client")).unwrap();
    let client = ListenerClient::tls(address, overlay.authority().pem(), Some(&identity));
    assert_eq!(get(&client, "WEB").await.0, 200);
}

/// What runs finishes; nothing new begins, and the device does not get in again.
#[tokio::test]
async fn a_device_whose_ca_is_no_longer_trusted_is_disconnected() {
    let (overlay, services) = (overlay(), Services::start().unwrap());
    let other = Authority::new("lab").unwrap();
    let mut hub = hub(&overlay, 2).trusting(&other).unwrap().start().await.unwrap();
    let draft = device(&overlay, &services, hub.address("door"), "h2", 1);
    let draft = draft.identity_of(&other, &Subject::node("device")).unwrap().trusting(overlay.authority()).unwrap();
    let device = draft.start().await.unwrap();
    until("it is kept", || async { kept(&hub, "door").await == 2.0 }).await;
    let identity = overlay.authority().issue(&Subject::node("client")).unwrap();
    let client = ListenerClient::tls(hub.address("door"), overlay.authority().pem(), Some(&identity));
    let mut tunnel = client.tunnel(TunnelMode::ConnectH1, "ECHO:7").await.unwrap();
    std::fs::write(overlay.dir().join("hub").join("ca.pem"), overlay.authority().pem()).unwrap();
    let values = [("WORKERS", "2".to_owned()), ("AT", "127.0.0.1".to_owned())];
    hub.reload(&format!("{HUB}# anew\n"), &values).await.unwrap();
    until("nothing new begins", || async { get(&client, "WEB").await.0 == 503 }).await;
    tunnel.writer.send("hello").await.unwrap();
    assert_eq!(tunnel.reader.at_least(5).await.unwrap(), b"hello");
    drop(tunnel);
    until("it is cut", || async { kept(&hub, "door").await == 0.0 }).await;
    device.says("reverse connection failed; retrying").await;
    assert_eq!(get(&client, "WEB").await.0, 503);
}

#[tokio::test]
async fn a_device_that_no_upstream_names_any_more_is_let_go_and_taken_again() {
    let mut lab = Lab::start("h2", 2, 1).await;
    let values = [("WORKERS", "2".to_owned()), ("AT", "127.0.0.1".to_owned())];
    let other = HUB.replace("{node: device}", "{node: other}");
    lab.hub.reload(&other, &values).await.unwrap();
    lab.kept(0).await;
    assert_eq!(get(&lab.client("apps"), "WEB").await.0, 503);
    lab.hub.reload(HUB, &values).await.unwrap();
    lab.kept(2).await;
    reach_all(&lab.client("apps"), &lab.client("udp")).await;
}

/// Sessions go to those who are there; the health of a node is asked for over its own connection.
#[tokio::test]
async fn several_nodes_are_balanced_and_the_absent_and_unhealthy_left_out() {
    let (overlay, services) = (overlay(), Services::start().unwrap());
    let names = "[{node: device}, {node: unhealthy}, {node: absent}], health: {path: /healthz, interval: 100ms}";
    let document = HUB.replace("[{node: device}]", names);
    let hub = overlay.node("hub").document(&document).with("WORKERS", 2).with("AT", "127.0.0.1");
    let hub = hub.identity(&Subject::node("hub").with_dns(NODE_NAME)).unwrap().start().await.unwrap();
    let _device = device(&overlay, &services, hub.address("door"), "h2", 1).start().await.unwrap();
    let unhealthy = DEVICE.replace("{status: 200}", "{status: 500}");
    let unhealthy =
        overlay.node("unhealthy").document(&unhealthy).with("HUB", hub.address("door")).with("PROTOCOL", "h2");
    let unhealthy = services.fill(unhealthy.with("WORKERS", 1)).identity(&Subject::node("unhealthy")).unwrap();
    let _unhealthy = unhealthy.start().await.unwrap();
    until("both have dialled", || async { kept(&hub, "door").await == 4.0 }).await;
    until("one is found to be unhealthy", || async {
        let healthy = |node: &'static str| async { hub.metric("hermes_upstream_healthy", node).await.unwrap() };
        healthy("endpoint=\"unhealthy\"").await == 0.0 && healthy("endpoint=\"device\"").await == 1.0
    })
    .await;
    let identity = overlay.authority().issue(&Subject::node("client")).unwrap();
    let client = ListenerClient::tls(hub.address("door"), overlay.authority().pem(), Some(&identity));
    for _ in 0..20 {
        assert_eq!(get(&client, "WEB").await.0, 200);
    }
    hub.metric_reaches("hermes_sessions_total", "outcome=\"2xx\"", 20.0).await;
    let elsewhere = hub.records().iter().filter(|record| record["endpoint"] != "device/device").count();
    assert_eq!(elsewhere, 0, "{:#?}", hub.records());
}

/// What runs finishes in the old process, and the device dials the new one without waiting for that.
#[tokio::test]
async fn a_hub_that_is_taken_over_has_the_device_at_once() {
    let (overlay, services) = (overlay(), Services::start().unwrap());
    // A port of its own, which the second process has as well.
    let at = hermes_testkit::port::reserve("127.0.0.1");
    let document = HUB.replace("$AT:0", &at.to_string()).replace("http3: true, ", "");
    let socket = overlay.dir().join("takeover.sock");
    let args = ["--takeover", socket.to_str().unwrap()];
    let start = async |process: &str| {
        let draft = overlay.node("hub").called(process).document(&document).with("WORKERS", 2).args(&args);
        draft.identity(&Subject::node("hub").with_dns(NODE_NAME)).unwrap().start().await.unwrap()
    };
    let first = start("first").await;
    let device = device(&overlay, &services, first.address("door"), "h2", 1).start().await.unwrap();
    until("it is kept", || async { kept(&first, "door").await == 2.0 }).await;
    let identity = overlay.authority().issue(&Subject::node("client")).unwrap();
    let client = ListenerClient::tls(first.address("door"), overlay.authority().pem(), Some(&identity));
    let mut tunnel = client.tunnel(TunnelMode::ConnectH1, "ECHO:7").await.unwrap();
    let second = start("second").await;
    until("the new process has it", || async { kept(&second, "door").await == 2.0 }).await;
    assert_eq!(get(&client, "WEB").await.0, 200);
    tunnel.writer.send("still here").await.unwrap();
    assert_eq!(tunnel.reader.at_least(10).await.unwrap(), b"still here");
    drop(tunnel);
    assert!(first.ended().await.success());
    assert_eq!(kept(&device, "uplink").await, 2.0);
}
