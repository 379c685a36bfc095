//! Intermittent links with loss, duplicates and reordering, and a full disk.

use std::{process::Command, time::Duration};

use hermes_testkit::{
    link::{Conditions, Up},
    origin::http::BYTES_SEED,
    pattern::Pattern,
    skip::needs_root,
    unstable::{Chain, RATE, in_turns},
};

use crate::custody::chain;

/// Downloads so many objects at once. Each is compared with what was sent.
async fn download(chain: &Chain, count: usize, size: usize) {
    let into = chain.dir().join(format!("into-{count}-{size}"));
    std::fs::create_dir(&into).unwrap();
    let url = format!("{}/bytes/{size}?[1-{count}]", chain.apps());
    let file = format!("{}/#1", into.display());
    let words = ["curl", "-sS", "-f", "-Z", "--parallel-immediate", "--max-time", "250", "-o", &file, &url];
    let text = chain.namespaces[0].output(&words).await;
    assert!(text.is_ok(), "{text:?}\n{}", chain.logs());
    for number in 1..=count {
        let bytes = std::fs::read(into.join(number.to_string())).unwrap();
        let is_right = bytes.len() == size && Pattern::new(BYTES_SEED).mismatch(0, &bytes).is_none();
        assert!(is_right, "{number}: {} bytes", bytes.len());
    }
}

/// A quarter of the time, by chance; what they take they lose, bring twice, or out of order.
fn wild(link: usize) -> Conditions {
    Conditions {
        rate: Some(RATE),
        one_way: Duration::from_millis(5),
        loss: 0.01,
        late: 0.05,
        late_by: Duration::from_millis(20),
        twice: 0.02,
        up: Up::Chance { slot: Duration::from_millis(300), share: 0.25, seed: link as u64 },
        ..Conditions::default()
    }
}

#[tokio::test]
async fn intermittent_links_that_lose_and_duplicate_deliver_everything() {
    if !needs_root("intermittent_links_that_lose_and_duplicate_deliver_everything") {
        return;
    }
    download(&chain(3, "h2", wild).await, 10, 45 << 10).await;
}

#[tokio::test]
async fn so_they_do_over_quic() {
    if !needs_root("so_they_do_over_quic") {
        return;
    }
    download(&chain(3, "h3", wild).await, 10, 45 << 10).await;
}

/// A file system that is gone with it.
struct Mounted(std::path::PathBuf);

impl Mounted {
    fn new(at: std::path::PathBuf, size: &str) -> Self {
        let option = format!("size={size}");
        let done = Command::new("mount").args(["-t", "tmpfs", "-o", &option, "tmpfs"]).arg(&at).status().unwrap();
        assert!(done.success(), "mounting at {}", at.display());
        Self(at)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[tokio::test]
async fn a_full_disk_stops_nothing_that_goes_through() {
    if !needs_root("a_full_disk_stops_nothing_that_goes_through") {
        return;
    }
    let mut chain = chain(2, "h2", in_turns(2)).await;
    let _disk = Mounted::new(chain.state(1), "400k");
    chain.kill(1, Duration::ZERO).await.unwrap();
    download(&chain, 3, 1 << 20).await;
    chain.nodes[1].says("cannot write the custody journal; retrying").await;
    chain.nodes[1].says("the custody journal is writable again").await;
    download(&chain, 1, 45 << 10).await;
}

/// What is kept in case that somebody reads it again is in nobody's way, nor is what has been.
#[tokio::test]
async fn a_body_larger_than_the_disks_passes_beside_other_transfers() {
    if !needs_root("a_body_larger_than_the_disks_passes_beside_other_transfers") {
        return;
    }
    let mut chain = chain(2, "h2", |_| Conditions::default()).await;
    let disks = [0, 1].map(|node| Mounted::new(chain.state(node), "40m"));
    for node in 0..disks.len() {
        chain.kill(node, Duration::ZERO).await.unwrap();
    }
    tokio::join!(download(&chain, 1, 150 << 20), download(&chain, 100, 45 << 10));
    download(&chain, 3, 1 << 20).await;
}
