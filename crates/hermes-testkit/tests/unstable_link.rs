//! Tests of intermittent links: frames sent in an up slot arrive, and others are dropped silently.
#![allow(clippy::unwrap_used)]

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use hermes_testkit::{
    link::{self, Conditions, Up},
    netns::Namespace,
    skip::needs_root,
};
use tokio::net::UdpSocket;

const SLOT: Duration = Duration::from_millis(200);

/// Datagrams over a link, one a millisecond, each with the time at which it was sent: those that arrived, and when.
async fn arrivals(conditions: Conditions, count: u32, length: usize) -> Vec<(Duration, Duration)> {
    let (here, there) = (Namespace::new().unwrap(), Namespace::new().unwrap());
    let (a, b) = (Ipv4Addr::new(10, 77, 0, 1), Ipv4Addr::new(10, 77, 0, 2));
    let epoch = Instant::now();
    let link = link::join((&here, a), (&there, b), [conditions, Conditions::default()], epoch).unwrap();
    let from = here.run(UdpSocket::bind(SocketAddr::from((a, 0)))).await.unwrap().unwrap();
    let to = there.run(UdpSocket::bind(SocketAddr::from((b, 0)))).await.unwrap().unwrap();
    from.connect(to.local_addr().unwrap()).await.unwrap();
    let send = async {
        let mut clock = tokio::time::interval(Duration::from_millis(1));
        for _ in 0..count {
            clock.tick().await;
            let mut datagram = (epoch.elapsed().as_nanos() as u64).to_be_bytes().to_vec();
            datagram.resize(length, 0);
            from.send(&datagram).await.unwrap();
        }
    };
    let mut arrived = Vec::new();
    let receive = async {
        let mut room = [0; 2000];
        loop {
            let received = tokio::time::timeout(Duration::from_secs(1), to.recv(&mut room)).await;
            let Ok(Ok(length)) = received else { return };
            assert!(length >= 8);
            let sent = Duration::from_nanos(u64::from_be_bytes(room[..8].try_into().unwrap()));
            arrived.push((sent, epoch.elapsed()));
        }
    };
    tokio::join!(send, receive);
    assert!(link.counters()[0].arrived.load(Ordering::Relaxed) >= arrived.len() as u64);
    arrived
}

#[tokio::test]
async fn in_its_turns_a_link_passes_all_and_else_nothing() {
    if !needs_root("in_its_turns_a_link_passes_all_and_else_nothing") {
        return;
    }
    let up = Up::Turns { slot: SLOT, of: 2, turn: 1 };
    let arrived = arrivals(Conditions { up: up.clone(), ..Conditions::default() }, 2000, 100).await;
    // The kernel may take a frame a moment later than it was given.
    let outside = arrived.iter().filter(|(sent, _)| !up.is_up(*sent) && !up.is_up(*sent + SLOT / 4)).count();
    assert_eq!(outside, 0, "{arrived:?}");
    assert!((700..=1100).contains(&arrived.len()), "{} of 2000", arrived.len());
}

#[tokio::test]
async fn a_slow_link_keeps_order_and_its_delay() {
    if !needs_root("a_slow_link_keeps_order_and_its_delay") {
        return;
    }
    let one_way = Duration::from_millis(20);
    let conditions = Conditions { rate: Some(10_000_000), one_way, ..Conditions::default() };
    let arrived = arrivals(conditions, 500, 1000).await;
    assert_eq!(arrived.len(), 500);
    assert!(arrived.windows(2).all(|two| two[0].0 < two[1].0), "out of order");
    assert!(arrived.iter().all(|(sent, at)| *at >= *sent + one_way), "sooner than its delay");
}

#[tokio::test]
async fn late_packets_are_overtaken_and_some_are_duplicated() {
    if !needs_root("late_packets_are_overtaken_and_some_are_duplicated") {
        return;
    }
    let late_by = Duration::from_millis(10);
    let arrived =
        arrivals(Conditions { loss: 0.1, late: 0.2, late_by, twice: 0.2, ..Conditions::default() }, 1000, 100).await;
    let overtaken = arrived.windows(2).filter(|two| two[0].0 > two[1].0).count();
    let doubles = arrived.len() - arrived.iter().map(|(sent, _)| sent).collect::<std::collections::HashSet<_>>().len();
    assert!((100..=260).contains(&overtaken), "{overtaken} are overtaken");
    assert!((100..=260).contains(&doubles), "{doubles} come twice");
    assert!((950..=1200).contains(&arrived.len()), "{}", arrived.len());
}
