//! Bytes survive: whatever goes in at one end of an overlay comes out at the other, identical.
//!
//! In: random transfers by every listener over every hop, through chains of one to five nodes, in the clear and with
//! mutual TLS. Out: the same bytes, checked position by position or by digest. The seed is printed; with
//! `HERMES_SEED=N` a run is repeated.

mod chain;

use hermes_testkit::{
    flow::{FlowMode, MAX_PAYLOAD},
    listener_client::TunnelMode,
    transfer::{Version, datagrams, download, echo, upload},
};
use rand::{Rng as _, SeedableRng as _, rngs::SmallRng, seq::IndexedRandom as _};

use chain::{Chain, Hop};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
/// Around every boundary of buffers, frames, records and windows.
const SIZES: [usize; 9] = [0, 1, 16 * KIB - 1, 16 * KIB, 16 * KIB + 1, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, MIB];
const MODES: [TunnelMode; 7] = [
    TunnelMode::Raw,
    TunnelMode::ConnectH1,
    TunnelMode::ConnectH2,
    TunnelMode::PostH1,
    TunnelMode::PostH2,
    TunnelMode::ConnectH3,
    TunnelMode::PostH3,
];

/// HTTP/3 is never in the clear.
fn modes(secure: bool) -> &'static [TunnelMode] {
    if secure { &MODES } else { &MODES[..5] }
}

fn versions(secure: bool) -> &'static [Version] {
    if secure { &[Version::H1, Version::H2, Version::H3] } else { &[Version::H1, Version::H2] }
}

fn flow_ways(secure: bool) -> impl Iterator<Item = FlowMode> {
    FlowMode::ALL.into_iter().chain(FlowMode::H3.into_iter().filter(move |_| secure))
}

/// The largest transfer.
const MAX_TRANSFER: usize = 64 * MIB;

/// Any size from nothing to the largest, small ones as often as large ones.
fn any_size(rng: &mut SmallRng) -> usize {
    let bits = rng.random_range(0.0..=f64::from(MAX_TRANSFER.ilog2()));
    bits.exp2() as usize - 1
}

/// The seed of this run, printed so that a failure can be repeated.
fn seeded(test: &str) -> SmallRng {
    let seed = std::env::var("HERMES_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or_else(rand::random::<u32>);
    println!("{test}: HERMES_SEED={seed}");
    SmallRng::seed_from_u64(u64::from(seed))
}

async fn tunnels_by_every_pair(secure: bool) {
    let mut rng = seeded("tunnels by every pair");
    let chain = Chain::of_all_hops(secure).await.unwrap();
    for &mode in modes(secure) {
        for &hop in Hop::all(secure) {
            let authority = format!("{}:7", hop.name());
            for size in SIZES.into_iter().chain([any_size(&mut rng)]) {
                echo(&chain.tcp(mode, Some(hop)), mode, &authority, size, &mut rng)
                    .await
                    .unwrap_or_else(|error| panic!("{size} bytes by {mode:?} over {hop:?}: {error}"));
            }
        }
    }
}

#[tokio::test]
async fn tunnels_by_every_door_over_every_hop_in_the_clear() {
    tunnels_by_every_pair(false).await;
}

#[tokio::test]
async fn tunnels_by_every_door_over_every_hop_with_mutual_tls() {
    tunnels_by_every_pair(true).await;
}

async fn requests_by_every_pair(secure: bool) {
    let mut rng = seeded("requests by every pair");
    let chain = Chain::of_all_hops(secure).await.unwrap();
    for &version in versions(secure) {
        for &hop in Hop::plain(secure) {
            for size in SIZES.into_iter().chain([any_size(&mut rng)]) {
                let what = format!("{size} bytes by {version:?} over {hop:?}");
                upload(&chain.http(), version, hop.name(), size, &mut rng)
                    .await
                    .unwrap_or_else(|error| panic!("upload of {what}: {error}"));
                download(&chain.http(), version, hop.name(), size)
                    .await
                    .unwrap_or_else(|error| panic!("download of {what}: {error}"));
            }
        }
    }
}

#[tokio::test]
async fn requests_by_every_door_over_every_hop_in_the_clear() {
    requests_by_every_pair(false).await;
}

#[tokio::test]
async fn requests_by_every_door_over_every_hop_with_mutual_tls() {
    requests_by_every_pair(true).await;
}

async fn datagrams_by_every_pair(secure: bool) {
    let mut rng = seeded("datagrams by every pair");
    let chain = Chain::of_all_hops(secure).await.unwrap();
    for mode in flow_ways(secure) {
        for &hop in Hop::all(secure) {
            datagrams(&chain.udp(mode, Some(hop)), mode, hop.name(), 120, &mut rng)
                .await
                .unwrap_or_else(|error| panic!("datagrams by {mode:?} over {hop:?}: {error}"));
        }
    }
}

#[tokio::test]
async fn datagrams_by_every_door_over_every_hop_in_the_clear() {
    datagrams_by_every_pair(false).await;
}

#[tokio::test]
async fn datagrams_by_every_door_over_every_hop_with_mutual_tls() {
    datagrams_by_every_pair(true).await;
}

/// A few transfers of each kind through a chain of random hops.
async fn through(nodes: usize, secure: bool, rng: &mut SmallRng) {
    let hops: Vec<Hop> = (1..nodes).map(|_| *Hop::all(secure).choose(rng).unwrap()).collect();
    let h2_origin = rng.random();
    let what = format!("{nodes} nodes, hops {hops:?}, TLS {secure}, origin h2 {h2_origin}");
    println!("{what}");
    let chain = Chain::start(&hops, secure, h2_origin).await.unwrap();
    let failed = |error: std::io::Error| -> () { panic!("{what}: {error}") };
    for &mode in modes(secure) {
        let size = any_size(rng);
        echo(&chain.tcp(mode, None), mode, "ECHO:7", size, rng).await.unwrap_or_else(failed);
    }
    for &version in versions(secure) {
        let size = any_size(rng);
        upload(&chain.http(), version, "WEB", size, rng).await.unwrap_or_else(failed);
        let size = any_size(rng);
        download(&chain.http(), version, "WEB", size).await.unwrap_or_else(failed);
    }
    for mode in flow_ways(secure) {
        if let Err(error) = datagrams(&chain.udp(mode, None), mode, "ECHO", 30, rng).await {
            panic!("{what}, datagrams by {mode:?}: {error}; {}", chain.dropped().await);
        }
    }
}

#[tokio::test]
async fn chains_of_one_to_five_nodes_in_the_clear() {
    let mut rng = seeded("chains in the clear");
    for nodes in 1..=5 {
        through(nodes, false, &mut rng).await;
    }
}

#[tokio::test]
async fn chains_of_one_to_five_nodes_with_mutual_tls() {
    let mut rng = seeded("chains with mutual TLS");
    for nodes in 1..=5 {
        through(nodes, true, &mut rng).await;
    }
}

/// As many datagrams as [`datagrams`] needs for 64 MiB: a third of the largest on average.
const DATAGRAMS: usize = MAX_TRANSFER / (MAX_PAYLOAD / 3);

#[tokio::test]
async fn sixty_four_mebibytes_by_every_pair() {
    let mut rng = seeded("64 MiB");
    let chain = Chain::of_all_hops(false).await.unwrap();
    for mode in [TunnelMode::Raw, TunnelMode::ConnectH1, TunnelMode::ConnectH2] {
        for &hop in Hop::plain(false) {
            let authority = format!("{}:7", hop.name());
            echo(&chain.tcp(mode, Some(hop)), mode, &authority, MAX_TRANSFER, &mut rng)
                .await
                .unwrap_or_else(|error| panic!("64 MiB by {mode:?} over {hop:?}: {error}"));
        }
    }
    echo(&chain.tcp(TunnelMode::PostH2, Some(Hop::PostH1)), TunnelMode::PostH2, "POST-H1:7", MAX_TRANSFER, &mut rng)
        .await
        .unwrap();
}

#[tokio::test]
async fn sixty_four_mebibytes_of_requests() {
    let mut rng = seeded("64 MiB of requests");
    let chain = Chain::of_all_hops(false).await.unwrap();
    for (version, hop) in [(Version::H1, Hop::H2), (Version::H2, Hop::H1), (Version::H2, Hop::H2)] {
        upload(&chain.http(), version, hop.name(), MAX_TRANSFER, &mut rng).await.unwrap();
        download(&chain.http(), version, hop.name(), MAX_TRANSFER).await.unwrap();
    }
}

#[tokio::test]
async fn sixty_four_mebibytes_of_datagrams() {
    let mut rng = seeded("64 MiB of datagrams");
    let chain = Chain::of_all_hops(false).await.unwrap();
    for (mode, hop) in [(FlowMode::Raw, Hop::H2), (FlowMode::UpgradeH1, Hop::Bare), (FlowMode::ConnectH2, Hop::H1)] {
        if let Err(error) = datagrams(&chain.udp(mode, Some(hop)), mode, hop.name(), DATAGRAMS, &mut rng).await {
            panic!("64 MiB by {mode:?} over {hop:?}: {error}; {}", chain.dropped().await);
        }
    }
}

#[tokio::test]
async fn sixty_four_mebibytes_with_mutual_tls() {
    let mut rng = seeded("64 MiB with mutual TLS");
    let chain = Chain::of_all_hops(true).await.unwrap();
    echo(&chain.tcp(TunnelMode::ConnectH2, Some(Hop::H2)), TunnelMode::ConnectH2, "H2:7", MAX_TRANSFER, &mut rng)
        .await
        .unwrap();
    download(&chain.http(), Version::H1, Hop::H1.name(), MAX_TRANSFER).await.unwrap();
    echo(&chain.tcp(TunnelMode::ConnectH3, Some(Hop::H3)), TunnelMode::ConnectH3, "H3:7", MAX_TRANSFER, &mut rng)
        .await
        .unwrap();
    upload(&chain.http(), Version::H3, Hop::H2.name(), MAX_TRANSFER, &mut rng).await.unwrap();
    download(&chain.http(), Version::H3, Hop::H3.name(), MAX_TRANSFER).await.unwrap();
}

#[tokio::test]
async fn sixty_four_mebibytes_through_five_nodes() {
    let mut rng = seeded("64 MiB through five nodes");
    let hops = [Hop::H2, Hop::H1, Hop::PostH2, Hop::H2];
    let chain = Chain::start(&hops, true, true).await.unwrap();
    echo(&chain.tcp(TunnelMode::ConnectH1, None), TunnelMode::ConnectH1, "ECHO:7", MAX_TRANSFER, &mut rng)
        .await
        .unwrap();
    upload(&chain.http(), Version::H2, "WEB", MAX_TRANSFER, &mut rng).await.unwrap();
}
