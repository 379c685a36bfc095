//! What flows carry: every size, in order, none lost, for as long as somebody speaks.

use std::{io, time::Duration};

use hermes_testkit::{
    flow::{Flow, FlowMode, MAX_PAYLOAD},
    listener_client::ListenerClient,
    origin::{Origin, datagram::UdpEcho},
    pattern::Pattern,
};

use crate::udp::lab::{ANY, Extras, HOPS, Lab, echo, overlay};

/// Every way in over every hop, each with a flow of its own.
async fn each(lab: &Lab, check: impl AsyncFn(Flow) -> io::Result<()>) {
    for mode in FlowMode::ALL {
        for hop in HOPS {
            let flow = lab.open(mode, hop).await;
            check(flow).await.unwrap_or_else(|error| panic!("{mode:?} over {hop}: {error}"));
        }
    }
}

/// Around each length of a capsule's length, packets of Ethernet, and the largest datagram of IPv4.
const SIZES: [usize; 16] =
    [0, 1, 2, 61, 62, 63, 64, 1199, 1200, 1472, 1473, 16_381, 16_382, 16_383, 16_384, MAX_PAYLOAD];

#[tokio::test]
async fn every_size_from_nothing_to_the_largest() {
    let origin = Origin::udp_echo(ANY).unwrap();
    let lab = Lab::to(origin.address()).await;
    each(&lab, async |mut flow| {
        for size in SIZES {
            let what = |error: io::Error| io::Error::other(format!("{size} bytes: {error}"));
            echo(&mut flow, &Pattern::new(size as u64).bytes(size)).await.map_err(what)?;
        }
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn ipv6_carries_twenty_bytes_more() {
    let origin = Origin::udp_echo("[::1]:0".parse().unwrap()).unwrap();
    let overlay = overlay();
    let document = "
listeners:
- {name: door, bind: '[::1]:0', protocol: http}
- {name: raw, bind: '[::1]:0', protocol: udp, authority: '[::1]:9'}
routes:
- {name: here, match: {kind: udp, authority: '[::1]:9'}, terminate: {udp: '$ORIGIN'}}
- {name: there, match: {kind: udp, authority: 'THERE:9'}, upstream: next}
upstreams:
- {name: next, protocol: h2, overlay: true, endpoints: ['$NEXT']}
";
    let draft = |name, next: &str| {
        overlay.node(name).document(document).with("ORIGIN", origin.address()).with("NEXT", next.to_owned())
    };
    let far = draft("far", "[::1]:1").start().await.unwrap();
    let near = draft("near", &far.address("door").to_string());
    let near = near.start().await.unwrap();
    for (mode, listener) in [(FlowMode::Raw, "raw"), (FlowMode::UpgradeH1, "door"), (FlowMode::ConnectH2, "door")] {
        let mut flow = Flow::open(&ListenerClient::plain(near.address(listener)), mode, "::1", 9).await.unwrap();
        for size in [0, 1200, MAX_PAYLOAD, MAX_PAYLOAD + 1, 65_527] {
            echo(&mut flow, &Pattern::new(6).bytes(size))
                .await
                .unwrap_or_else(|error| panic!("{size} bytes by {mode:?}: {error}"));
        }
    }
}

/// Whoever listens everywhere answers from the loopback's address, which is not the one that was written.
#[tokio::test]
async fn a_target_may_be_the_address_of_no_host() {
    let overlay = overlay();
    for (written, here) in [("0.0.0.0", "127.0.0.1:0"), ("[::]", "[::1]:0")] {
        let origin = Origin::udp_echo(here.parse().unwrap()).unwrap();
        let document = "
listeners:
- {name: raw, bind: '127.0.0.1:0', protocol: udp, authority: 'HERE:9'}
routes:
- {name: here, match: {kind: udp}, terminate: {udp: '$ORIGIN'}}
";
        let target = format!("{written}:{}", origin.address().port());
        let node = overlay.node(&format!("at-{}", here.len())).document(document).with("ORIGIN", target);
        let node = node.start().await.unwrap();
        let mut flow = Flow::open(&ListenerClient::plain(node.address("raw")), FlowMode::Raw, "HERE", 9).await.unwrap();
        echo(&mut flow, b"anybody").await.unwrap_or_else(|error| panic!("{written}: {error}"));
    }
}

/// Datagrams on their way at once: a modest rate, whatever the machine.
const WINDOW: usize = 16;
const COUNT: usize = 1500;

/// Runs of equal length, as video has them, with odd ones between: both ways of sending many at once.
fn numbered(number: usize) -> Vec<u8> {
    let length = match number % 20 {
        0..12 => 1316,
        12 => 700,
        13..17 => 64 + number % 1000,
        _ => 4,
    };
    let mut payload = Pattern::new(number as u64).bytes(length);
    payload[..4].copy_from_slice(&(number as u32).to_be_bytes());
    payload
}

#[tokio::test]
async fn datagrams_keep_their_order_and_none_is_lost_at_a_modest_rate() {
    let origin = Origin::udp_echo(ANY).unwrap();
    let lab = Lab::to(origin.address()).await;
    each(&lab, async |mut flow| {
        for number in 0..COUNT + WINDOW {
            if number < COUNT {
                flow.send(&numbered(number)).await?;
            }
            let Some(expected) = number.checked_sub(WINDOW) else { continue };
            let got = flow.receive().await.map_err(|error| io::Error::other(format!("{expected}: {error}")))?;
            if got != numbered(expected) {
                return Err(io::Error::other(format!("in the place of {expected} came {:?}...", got.get(..4))));
            }
        }
        Ok(())
    })
    .await;
    for node in [Some(&lab.near), lab.far.as_ref()].into_iter().flatten() {
        assert_eq!(node.metric("hermes_datagrams_dropped_total", "").await.unwrap(), 0.0, "{}", node.name());
    }
}

#[tokio::test]
async fn a_silent_flow_ends_and_its_source_begins_another() {
    let origin = UdpEcho::start(ANY, "").unwrap();
    let lab = Lab::with(origin.address(), Extras { limits: "workers: 1", route: ", timeout: {idle: 1s}" }).await;
    for (number, hop) in HOPS.into_iter().enumerate() {
        let (mut flow, mut other) = (lab.open(FlowMode::Raw, hop).await, lab.open(FlowMode::Raw, hop).await);
        echo(&mut flow, b"first").await.unwrap();
        let authority = format!("{}:7", hop.to_lowercase());
        // Others at the same listener go on meanwhile.
        let speaking = async {
            loop {
                echo(&mut other, b"still here").await.unwrap();
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let ended = tokio::select! {
            ended = lab.near.record(|record| record["authority"] == authority && record["received"] == 5) => ended,
            never = speaking => never,
        };
        assert_eq!(ended["error"], "connection_read_timeout", "{ended}");
        if hop != "HERE" {
            // To the far end silence is an ordinary end, which it is told of.
            let ended = lab.terminator(hop).record(|record| record["authority"] == authority).await;
            assert!(ended.get("error").is_none(), "{hop}: {ended}");
        }
        // Nothing failed: the source need not wait, and not one datagram is lost.
        echo(&mut flow, b"second").await.unwrap_or_else(|error| panic!("{hop}: {error}"));
        assert_eq!(origin.sources(), 3 * (number + 1), "{hop}: the second is a flow of its own");
    }
}

#[tokio::test]
async fn a_tunnel_that_is_silent_ends_in_order() {
    let origin = UdpEcho::start(ANY, "").unwrap();
    let lab = Lab::with(origin.address(), Extras { route: ", timeout: {idle: 1s}", ..Extras::default() }).await;
    for mode in FlowMode::TUNNELS {
        for hop in HOPS {
            let mut flow = lab.open(mode, hop).await;
            echo(&mut flow, b"hello").await.unwrap();
            let end = flow.as_capsules().next().await;
            assert!(matches!(end, Ok(None)), "{mode:?} over {hop}: {end:?}");
        }
    }
    lab.quiet().await;
}

/// Whether a flow in which one side alone speaks for several idle times is still the same flow. `None` where this
/// machine was too slow to say so: it fell silent itself.
async fn outlives_its_idle_time(lab: &Lab, origin: &UdpEcho, idle: Duration) -> Option<bool> {
    let mut flow = lab.open(FlowMode::Raw, "H2").await;
    let before = origin.sources();
    let begun = tokio::time::Instant::now();
    let mut last = begun;
    while begun.elapsed() < idle * 3 {
        echo(&mut flow, b"x").await.unwrap();
        if last.elapsed() > idle / 2 {
            return None;
        }
        last = tokio::time::Instant::now();
        tokio::time::sleep(idle / 20).await;
    }
    Some(origin.sources() == before + 1)
}

/// A machine that pauses in each of them shows nothing.
const TRIES: usize = 8;

#[tokio::test]
async fn a_flow_lives_while_somebody_speaks() {
    let origin = UdpEcho::start(ANY, "").unwrap();
    let lab = Lab::with(origin.address(), Extras { route: ", timeout: {idle: 1s}", ..Extras::default() }).await;
    let mut ended = 0;
    for _ in 0..TRIES {
        match outlives_its_idle_time(&lab, &origin, Duration::from_secs(1)).await {
            Some(true) => return,
            // The node may have been paused between two datagrams, which the test does not see.
            Some(false) => ended += 1,
            None => continue,
        }
        assert!(ended < 3, "a flow ended although it was used");
    }
    panic!("this machine pauses for half a second in each of {TRIES} tries");
}
