//! A process follows another while HTTP/3 goes on: no request is lost, and what lasts ends where it began.

use std::{
    net::{SocketAddr, TcpListener},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use hermes_testkit::{
    listener_client::ListenerClient,
    overlay::{Draft, Node, Overlay},
    poll::until,
    skip::needs_root,
    traffic::Traffic,
};
use tokio::task::JoinSet;

use crate::quic::lab::{Behind, DOCUMENT, Echo, client, elsewhere, overlay};

/// One node's successive processes.
struct ProcessSequence {
    overlay: Overlay,
    behind: Behind,
    at: SocketAddr,
}

impl ProcessSequence {
    /// At a port of its own, as a service has it.
    fn new(host: [u8; 4]) -> Self {
        let at = hermes_testkit::port::reserve(std::net::Ipv4Addr::from(host));
        Self { overlay: overlay(), behind: Behind::start(), at }
    }

    fn draft(&self, process: &str, workers: usize) -> Draft<'_> {
        let socket = self.overlay.dir().join("takeover.sock");
        let draft = self.behind.node(&self.overlay, workers, self.at).called(process);
        draft.args(&["--takeover", socket.to_str().unwrap()])
    }

    async fn start(&self, process: &str, workers: usize) -> Node {
        self.draft(process, workers).start().await.unwrap()
    }

    async fn change(&self, node: &mut Node, document: &str) {
        let values = [
            ("WORKERS", "2".to_owned()),
            ("LIMITS", String::new()),
            ("IN", self.at.to_string()),
            ("ECHO", self.behind.echo.address().to_string()),
            ("WEB", self.behind.web.address().to_string()),
        ];
        node.reload(document, &values).await.unwrap();
    }

    fn client(&self) -> ListenerClient {
        client(&self.overlay, self.at)
    }
}

async fn parted(old: &Node) {
    until("the old process parts", || async { old.log().contains("another process has the listeners") }).await;
}

/// Tunnels that go on until they are told to end.
#[derive(Default)]
struct Lasting {
    tunnels: JoinSet<()>,
    stop: Arc<AtomicBool>,
    rounds: Vec<Arc<AtomicU64>>,
}

impl Lasting {
    /// Opened here and now; every other one moves to another address now and then.
    async fn open(&mut self, client: &ListenerClient, seed: u64) {
        let mut echo = Echo::open(client, seed).await;
        let (stop, rounds) = (self.stop.clone(), Arc::<AtomicU64>::default());
        self.rounds.push(rounds.clone());
        self.tunnels.spawn(async move {
            while !stop.load(Ordering::Acquire) {
                let done = rounds.load(Ordering::Acquire);
                echo.round(1 + (done as usize * 7919) % 24_000).await;
                rounds.store(done + 1, Ordering::Release);
                if seed % 2 == 1 && done % 20 == 19 {
                    echo.connection.move_to(elsewhere()).unwrap();
                }
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        });
    }

    /// Each of them has done so many more.
    async fn progress(&self, rounds: u64) {
        let now = || self.rounds.iter().map(|rounds| rounds.load(Ordering::Acquire)).collect::<Vec<_>>();
        let before = now();
        let moved = || before.iter().zip(now()).all(|(before, now)| now >= before + rounds);
        until("every tunnel goes on", || async { moved() }).await;
    }

    async fn finish(mut self) {
        self.stop.store(true, Ordering::Release);
        while let Some(ended) = self.tunnels.join_next().await {
            ended.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn takeovers_in_a_row_under_load_lose_nothing() {
    lose_nothing([127, 0, 35, 1], &["reuseport"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn takeovers_and_modes_of_dispatch_under_load_lose_nothing() {
    if !needs_root("takeovers_and_modes_of_dispatch_under_load_lose_nothing") {
        return;
    }
    lose_nothing([127, 0, 35, 5], &["directed", "roundrobin", "exclusive"]).await;
}

/// Processes follow one another under load. Each of them changes to all of these modes; its successor starts in the first one.
async fn lose_nothing(host: [u8; 4], modes: &[&str]) {
    let dynasty = ProcessSequence::new(host);
    let mut reigning = dynasty.draft("front-0", 2).document(&dispatching(modes[0])).start().await.unwrap();
    let mut traffic = Traffic::default();
    for _ in 0..4 {
        traffic.h3(&dynasty.client(), "WEB", "/bytes/20000");
    }
    let mut lasting = Lasting::default();
    for seed in 0..8 {
        lasting.open(&dynasty.client(), seed).await;
    }
    let mut retired = Vec::new();
    // As many, fewer and more workers than the process before.
    for (number, workers) in [(1, 3), (2, 1), (3, 2), (4, 4), (5, 2)] {
        traffic.progress(5).await;
        for mode in &modes[1..] {
            dynasty.change(&mut reigning, &dispatching(mode)).await;
            lasting.open(&dynasty.client(), 200 + number).await;
            traffic.progress(2).await;
        }
        let draft = dynasty.draft(&format!("front-{number}"), workers).document(&dispatching(modes[0]));
        let successor = draft.start().await.unwrap();
        parted(&reigning).await;
        retired.push(std::mem::replace(&mut reigning, successor));
        lasting.open(&dynasty.client(), 100 + number).await;
        lasting.progress(5).await;
    }
    traffic.progress(5).await;
    let report = traffic.finish().await;
    print!("{report}");
    report.assert_whole(20);
    lasting.finish().await;
    reigning.metric_reaches("hermes_quic_forwarded_total", "", 1.0).await;
    for old in retired {
        let log = old.log();
        assert!(old.ended().await.success(), "{log}");
    }
    reigning.assert_sound();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_successor_that_fails_changes_nothing() {
    let dynasty = ProcessSequence::new([127, 0, 35, 2]);
    let mut reigning = dynasty.start("front-0", 2).await;
    let mut lasting = Lasting::default();
    for seed in 0..4 {
        lasting.open(&dynasty.client(), seed).await;
    }
    let mut traffic = Traffic::default();
    traffic.h3(&dynasty.client(), "WEB", "/bytes/20000");
    traffic.progress(5).await;
    // It gets all sockets, adds some of its own, and then cannot have its admin address.
    let taken = TcpListener::bind("127.0.35.2:0").unwrap();
    let hindered = dynasty.draft("front-hindered", 4).admin(taken.local_addr().unwrap()).launch().unwrap();
    assert_eq!(hindered.ended().await.code(), Some(1));
    traffic.progress(5).await;
    lasting.progress(5).await;
    traffic.finish().await.assert_whole(10);
    lasting.finish().await;
    assert_eq!(reigning.metric("hermes_quic_forwarded_total", "").await.unwrap(), 0.0);
    reigning.assert_sound();
}

/// The same node, with connections that come to workers in this way.
fn dispatching(mode: &str) -> String {
    format!("{DOCUMENT}dispatch: {mode}\n")
}

/// The same node, but with no HTTP/3.
fn without_http3() -> String {
    let document = DOCUMENT.replace("http3: true, ", "");
    assert_ne!(document, DOCUMENT);
    document
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_outlive_a_successor_that_has_no_such_listener() {
    let dynasty = ProcessSequence::new([127, 0, 35, 3]);
    let first = dynasty.start("front-0", 2).await;
    let mut lasting = Lasting::default();
    for seed in 0..6 {
        lasting.open(&dynasty.client(), seed).await;
    }
    let second = dynasty.draft("front-1", 1).document(&without_http3()).start().await.unwrap();
    parted(&first).await;
    second.says("listener removed; connections of the previous process continue").await;
    lasting.progress(30).await;
    // One that has it again gets the sockets, and the ways to the first.
    let mut third = dynasty.start("front-2", 2).await;
    parted(&second).await;
    lasting.open(&dynasty.client(), 100).await;
    lasting.progress(30).await;
    lasting.finish().await;
    assert!(first.ended().await.success() && second.ended().await.success());
    third.assert_sound();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_listener_that_comes_back_finds_the_sockets_of_the_process_before() {
    let dynasty = ProcessSequence::new([127, 0, 35, 4]);
    let first = dynasty.start("front-0", 2).await;
    let mut lasting = Lasting::default();
    for seed in 0..4 {
        lasting.open(&dynasty.client(), seed).await;
    }
    let mut second = dynasty.draft("front-1", 2).document(&without_http3()).start().await.unwrap();
    parted(&first).await;
    lasting.progress(10).await;
    dynasty.change(&mut second, DOCUMENT).await;
    lasting.open(&dynasty.client(), 100).await;
    lasting.progress(10).await;
    lasting.finish().await;
    assert!(first.ended().await.success());
    second.assert_sound();
}
