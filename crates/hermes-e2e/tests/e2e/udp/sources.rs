//! Who is who: a flow for each source, answers to the right one, and a bound on how many there may be.

use std::{collections::HashMap, net::SocketAddr};

use hermes_testkit::{
    flow::{Flow, FlowMode},
    origin::{bind_udp, datagram::UdpEcho},
    poll::until,
    raw_http1::in_time,
};
use tokio::net::UdpSocket;

use crate::udp::lab::{ANY, Extras, HOPS, Lab, echo};

const SOURCES: u32 = 60;

fn number(payload: &[u8]) -> u32 {
    u32::from_be_bytes(payload.try_into().unwrap())
}

/// The next datagram at an origin of the test's own.
async fn received(origin: &UdpSocket) -> (u32, SocketAddr) {
    let mut room = [0; 16];
    let (length, source) = in_time("waiting at the origin", origin.recv_from(&mut room)).await.unwrap();
    (number(&room[..length]), source)
}

/// All speak before anybody is answered, and the last is answered first.
async fn everybody_gets_their_own(lab: &Lab, origin: &UdpSocket, mode: FlowMode, hop: &str) {
    let mut flows = Vec::new();
    for number in 0..SOURCES {
        let mut flow = lab.open(mode, hop).await;
        flow.send(&number.to_be_bytes()).await.unwrap();
        flows.push(flow);
    }
    let mut sources = HashMap::new();
    for _ in 0..SOURCES {
        let (number, source) = received(origin).await;
        assert_eq!(sources.insert(number, source), None, "{mode:?} over {hop}: {number} came twice");
    }
    let distinct: std::collections::HashSet<_> = sources.values().collect();
    assert_eq!(distinct.len(), SOURCES as usize, "{mode:?} over {hop}: flows share a source");
    for round in [1000, 2000] {
        for number in (0..SOURCES).rev() {
            origin.send_to(&(number + round).to_be_bytes(), sources[&number]).await.unwrap();
        }
        for (own, flow) in flows.iter_mut().enumerate() {
            let got = number(&flow.receive().await.unwrap());
            assert_eq!(got, own as u32 + round, "{mode:?} over {hop}: somebody else's answer");
        }
    }
    // The source is still the same.
    for (own, flow) in flows.iter_mut().enumerate() {
        flow.send(&(own as u32).to_be_bytes()).await.unwrap();
        let (number, source) = received(origin).await;
        assert_eq!((number, source), (own as u32, sources[&number]), "{mode:?} over {hop}");
    }
}

#[tokio::test]
async fn everybody_is_a_flow_of_their_own_and_gets_their_own_answers() {
    let origin = UdpSocket::from_std(bind_udp(ANY).unwrap()).unwrap();
    // With several workers the kernel spreads sources over them.
    let extras = Extras { limits: "workers: 3", ..Extras::default() };
    let lab = Lab::with(origin.local_addr().unwrap(), extras).await;
    for (mode, hop) in HOPS.map(|hop| (FlowMode::Raw, hop)).into_iter().chain([
        (FlowMode::UpgradeH1, "HERE"),
        (FlowMode::ConnectH2, "H2"),
        (FlowMode::PostH1, "H1"),
        (FlowMode::PostH2, "POST-H2"),
    ]) {
        everybody_gets_their_own(&lab, &origin, mode, hop).await;
    }
}

const BOUND: usize = 8;

#[tokio::test]
async fn flows_of_a_listener_are_bounded_whatever_its_workers() {
    let origin = UdpEcho::start(ANY, "").unwrap();
    let limits = format!("workers: 3\nlimits: {{udp-flows: {BOUND}}}");
    let lab = Lab::with(origin.address(), Extras { limits: &limits, route: ", timeout: {idle: 4s}" }).await;
    let mut flows = Vec::new();
    for number in 0..BOUND {
        let mut flow = lab.open(FlowMode::Raw, "H2").await;
        echo(&mut flow, &number.to_be_bytes()).await.unwrap();
        flows.push(flow);
    }
    let mut late = lab.open(FlowMode::Raw, "H2").await;
    late.send(b"let me in").await.unwrap();
    lab.near.metric_reaches("hermes_limit_hits_total", "limit=\"udp-flows\"", 1.0).await;
    lab.near.metric_reaches("hermes_datagrams_dropped_total", "reason=\"udp-flows\"", 1.0).await;
    assert_eq!(origin.sources(), BOUND);
    // Those who are in are served, and other listeners have bounds of their own.
    for flow in &mut flows {
        echo(flow, b"still here").await.unwrap();
    }
    let mut other = lab.open(FlowMode::Raw, "HERE").await;
    echo(&mut other, b"next door").await.unwrap();
    // Whoever falls silent makes room.
    let Flow::Socket(late) = &late else { unreachable!("a raw flow") };
    let mut room = [0; 64];
    until("a place is free again", || {
        let sent = late.try_send(b"now?");
        let received = late.try_recv(&mut room).is_ok();
        async move { sent.is_ok() && received }
    })
    .await;
}
