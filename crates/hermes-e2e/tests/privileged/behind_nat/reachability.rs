//! Sessions of every kind reach a service on a device that has dialled, between every pair of workers.

use hermes_testkit::{
    ca::Subject,
    flow::FlowMode,
    listener_client::{ListenerClient, NODE_NAME, TunnelMode},
    origin::services::Services,
    poll::until,
    transfer,
};
use rand::{SeedableRng as _, rngs::SmallRng};
use tokio::task::JoinSet;

use crate::behind_nat::lab::{HUB, Lab, device, get, hub, kept, overlay, reach_all};

/// Far more than a window, and than what is sent early.
const MUCH: usize = 3 << 20;

async fn whole(protocol: &'static str, at_hub: usize, at_device: usize) {
    let lab = Lab::start(protocol, at_hub, at_device).await;
    let (http, echo, udp) = (lab.client("apps"), lab.client("echo"), lab.client("udp"));
    reach_all(&http, &udp).await;
    let mut rng = SmallRng::seed_from_u64(7);
    for mode in [TunnelMode::ConnectH1, TunnelMode::ConnectH2] {
        transfer::echo(&http, mode, "ECHO:7", MUCH, &mut rng).await.unwrap();
    }
    transfer::echo(&echo, TunnelMode::Raw, "ECHO:7", MUCH, &mut rng).await.unwrap();
    transfer::datagrams(&udp, FlowMode::Raw, "ECHO", 50, &mut rng).await.unwrap();
    transfer::datagrams(&http, FlowMode::ConnectH2, "ECHO", 50, &mut rng).await.unwrap();
    let record = lab.device.as_ref().unwrap().record(|record| record["authority"] == "web").await;
    assert_eq!((&record["listener"], &record["peer"]), (&"uplink".into(), &"hub".into()), "{record}");
}

#[tokio::test]
async fn over_h2_from_one_worker_to_one() {
    whole("h2", 1, 1).await;
}

#[tokio::test]
async fn over_h2_from_four_workers_to_two() {
    whole("h2", 4, 2).await;
}

#[tokio::test]
async fn over_h3_from_one_worker_to_one() {
    whole("h3", 1, 1).await;
}

#[tokio::test]
async fn over_h3_from_two_workers_to_four() {
    whole("h3", 2, 4).await;
}

/// The hub has no HTTP/3, or what lies between lets no UDP through: that is the same from here.
#[tokio::test]
async fn a_device_that_cannot_dial_by_quic_dials_by_tcp() {
    let (overlay, services) = (overlay(), Services::start().unwrap());
    let document = HUB.replace("http3: true, ", "");
    let hub = overlay.node("hub").document(&document).with("WORKERS", 2).with("AT", "127.0.0.1");
    let hub = hub.identity(&Subject::node("hub").with_dns(NODE_NAME)).unwrap().start().await.unwrap();
    let device = device(&overlay, &services, hub.address("door"), "h3", 1).start().await.unwrap();
    device.says("QUIC does not get through; over HTTP/2").await;
    until("both are kept", || async { kept(&hub, "door").await == 2.0 }).await;
    let identity = overlay.authority().issue(&Subject::node("client")).unwrap();
    let client = ListenerClient::tls(hub.address("door"), overlay.authority().pem(), Some(&identity));
    assert_eq!(get(&client, "WEB").await, (200, "web".to_owned()));
}

/// Clients come to each worker of the hub, and do so while the device still dials.
#[tokio::test]
async fn no_worker_refuses_for_want_of_a_connection_of_its_own() {
    let (overlay, services) = (overlay(), Services::start().unwrap());
    let hub = hub(&overlay, 4).start().await.unwrap();
    let identity = overlay.authority().issue(&Subject::node("other").with_dns(NODE_NAME)).unwrap();
    let client = ListenerClient::tls(hub.address("door"), overlay.authority().pem(), Some(&identity));
    let _device = device(&overlay, &services, hub.address("door"), "h2", 1).start().await.unwrap();
    until("the first connection is kept", || async { kept(&hub, "door").await >= 1.0 }).await;
    let mut clients = JoinSet::new();
    for _ in 0..40 {
        let client = client.clone();
        clients.spawn(async move { get(&client, "WEB").await });
    }
    while let Some(answer) = clients.join_next().await {
        assert_eq!(answer.unwrap(), (200, "web".to_owned()));
    }
}
