//! A next hop that takes nothing: what waits for it is bounded, the oldest go first, and nothing else is held up.

use std::{
    io,
    time::{Duration, Instant},
};

use bytes::BytesMut;
use hermes_testkit::{
    flow::{self, Flow, FlowMode},
    origin::{Origin, scripted},
    overlay::Node,
};
use tokio::sync::watch;

use crate::udp::lab::{Extras, Lab, echo};

/// A next hop that accepts flows and reads nothing of them until it is told to. Then it tells what it reads.
fn sluggish(mut go: watch::Receiver<bool>) -> (Origin, tokio::sync::mpsc::UnboundedReceiver<Vec<u8>>) {
    let (sender, receiver) = tokio::sync::mpsc::unbounded_channel();
    go.mark_unchanged();
    let origin = scripted::h1(move |mut http1| {
        let (sender, mut go) = (sender.clone(), go.clone());
        async move {
            http1.head().await?;
            http1
                .send("HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: connect-udp\r\n\r\n")
                .await?;
            go.wait_for(|go| *go).await.map_err(io::Error::other)?;
            while let Some(chunk) = http1.some().await? {
                let _ = sender.send(chunk.to_vec());
            }
            Ok(())
        }
    });
    (origin.unwrap(), receiver)
}

const QUEUE_FULL: &str = "reason=\"queue-full\"";

async fn dropped(node: &Node) -> f64 {
    node.metric("hermes_datagrams_dropped_total", QUEUE_FULL).await.unwrap()
}

/// Number of datagrams that are sent between two reads of the metrics.
const ROUND: u32 = 256;

/// Number of single datagrams, each of which must displace one, that show that the path is full.
const CONFIRMATIONS: u32 = 8;

/// Time in which the node takes up a single datagram.
const TAKEN_UP_WITHIN: Duration = Duration::from_millis(200);

/// Sends numbered datagrams until the kernel's buffers, which grow, and the queue are full: from then on each further
/// datagram displaces one.
async fn fill(node: &Node, flow: &mut Flow, number: &mut u32) {
    loop {
        let before = dropped(node).await;
        for _ in 0..ROUND {
            send(flow, number).await;
            if number.is_multiple_of(64) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
        // A node that got no processor time also drops a burst while the buffers have room, so single ones decide.
        if dropped(node).await >= before + f64::from(ROUND - 64) && each_displaces_one(node, flow, number).await {
            return;
        }
    }
}

async fn each_displaces_one(node: &Node, flow: &mut Flow, number: &mut u32) -> bool {
    let mut settled = dropped(node).await;
    // The last burst is read by now, unless the node stands still; then a late drop counts for a single datagram once.
    for _ in 0..CONFIRMATIONS {
        send(flow, number).await;
        let deadline = Instant::now() + TAKEN_UP_WITHIN;
        let before = settled;
        while settled == before {
            if Instant::now() > deadline {
                return false;
            }
            settled = dropped(node).await;
        }
    }
    true
}

async fn send(flow: &mut Flow, number: &mut u32) {
    let mut payload = [0; 1200];
    payload[..4].copy_from_slice(&number.to_be_bytes());
    flow.send(&payload).await.unwrap();
    *number += 1;
}

#[tokio::test]
async fn a_full_queue_drops_the_oldest_and_counts_them() {
    let (go, goes) = watch::channel(false);
    let (next, mut receiver) = sluggish(goes);
    let extras = Extras { limits: "limits: {datagram-queue: 64KiB}", ..Extras::default() };
    let lab = Lab::before(next.address(), extras).await;
    let mut flow = lab.open(FlowMode::Raw, "H1").await;
    let mut sent = 0;
    fill(&lab.near, &mut flow, &mut sent).await;
    go.send(true).unwrap();
    let (mut unread, mut numbers) = (BytesMut::new(), Vec::new());
    while numbers.last() != Some(&(sent - 1)) {
        let chunk = tokio::time::timeout(hermes_testkit::overlay::EFFECT_TIMEOUT, receiver.recv()).await;
        unread.extend_from_slice(&chunk.expect("the newest never comes").expect("the next hop is gone"));
        while let Some(capsule) = flow::parse(&mut unread) {
            assert_eq!((capsule.kind, capsule.value.len()), (0, 1201));
            numbers.push(u32::from_be_bytes(capsule.value[1..5].try_into().unwrap()));
        }
    }
    assert!(numbers.is_sorted_by(|one, other| one < other), "order is kept: {numbers:?}");
    assert_eq!(numbers.len() as f64 + dropped(&lab.near).await, f64::from(sent), "each came or was counted");
    let newest = numbers.iter().rev().zip((0..sent).rev()).take_while(|(got, due)| **got == *due).count();
    assert!((45..64).contains(&newest), "64 KiB of the newest came, not {newest} datagrams");
    // The flow goes on as if nothing had been.
    let before = dropped(&lab.near).await;
    send(&mut flow, &mut sent).await;
    assert!(receiver.recv().await.is_some());
    assert_eq!(dropped(&lab.near).await, before);
}

#[tokio::test]
async fn empty_datagrams_take_room_too() {
    let (_go, goes) = watch::channel(false);
    let (next, _tells) = sluggish(goes);
    let extras = Extras { limits: "limits: {datagram-queue: 64KiB}", ..Extras::default() };
    let lab = Lab::before(next.address(), extras).await;
    let mut flow = lab.open(FlowMode::Raw, "H1").await;
    fill(&lab.near, &mut flow, &mut 0).await;
    let before = dropped(&lab.near).await;
    // A queue that weighed their bytes alone would take them all, for ever. Kernel buffers still grow at times, and
    // take some.
    let mut number = 0;
    while dropped(&lab.near).await < before + 4500.0 {
        assert!(number < 200_000, "none was dropped");
        for _ in 0..64 {
            flow.send(b"").await.unwrap();
        }
        number += 64;
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn a_stalled_flow_ends_and_delays_no_other() {
    let (_go, goes) = watch::channel(false);
    let (next, _tells) = sluggish(goes);
    let route = ", timeout: {progress: 2s}";
    let extras = Extras { limits: "limits: {datagram-queue: 64KiB}\nworkers: 1", route };
    let lab = Lab::before(next.address(), extras).await;
    let mut flow = lab.open(FlowMode::Raw, "H1").await;
    let mut sent = 0;
    fill(&lab.near, &mut flow, &mut sent).await;
    let ended = lab.near.record(|record| record["kind"] == "udp");
    let speaking = async {
        loop {
            send(&mut flow, &mut sent).await;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let ended = tokio::select! {
        ended = ended => ended,
        never = speaking => never,
    };
    assert_eq!(ended["error"], "http_response_timeout", "{ended}");
}

#[tokio::test]
async fn queued_datagrams_are_sent_once_there_is_space() {
    // Each batch is larger than what the carrier takes at once: its rest must not wait for the next one.
    let origin = Origin::udp_echo(crate::udp::lab::ANY).unwrap();
    let lab = Lab::to(origin.address()).await;
    for (mode, hop) in [
        (FlowMode::Raw, "POST-H1"),
        (FlowMode::PostH1, "HERE"),
        (FlowMode::Raw, "H2"),
        (FlowMode::ConnectH2, "POST-H2"),
        (FlowMode::UpgradeH1, "H1"),
    ] {
        let mut flow = lab.open(mode, hop).await;
        for round in 0..20 {
            // Some at once, then silence.
            for number in 0..12u8 {
                flow.send(&[number; 9000]).await.unwrap();
            }
            for number in 0..12u8 {
                let got = flow.receive().await.unwrap_or_else(|error| {
                    panic!("{mode:?} over {hop}: {number} of round {round} is stuck: {error}");
                });
                assert_eq!(got, [number; 9000], "{mode:?} over {hop}, round {round}");
            }
        }
        echo(&mut flow, b"end").await.unwrap();
    }
}
