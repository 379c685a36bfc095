//! Kill -9 at random, under load: of controllers, of their store, of nodes.
//!
//! In: a seed and a time (`HERMES_SEED`, `HERMES_SECONDS`); the seed of a run is printed. Out: what was killed how often, and how
//! many changes and requests there were meanwhile. What must hold: no change that was acknowledged is ever lost; no node ever
//! runs what was not applied; requests by way of nodes that are alive never fail.
//! Never: a fault that is not followed by a look whether all is as it must be.

mod model;
mod writer;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hermes_testkit::origin;
use hermes_testkit::process::Running;
use http::Method;
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::task::JoinSet;

use self::model::Half;
use self::writer::{Told, Writer};
use hermes_testkit::control::OperatorClient;
use hermes_testkit::control::PersistentClient;
use hermes_testkit::control::{ControllerFixture, sigkill, until};

/// Between two requests of a client, and two looks at what nodes keep.
const PAUSE: Duration = Duration::from_millis(5);

/// What can be killed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Victim {
    Controller,
    Second,
    Etcd,
    Node(String),
}

/// The requests of one half's client.
#[derive(Default)]
struct Client {
    /// Odd while a node of this half is killed, or on its way back.
    down: AtomicU64,
    answered: AtomicU64,
    /// Requests that failed while a node on their way was dead.
    excused: AtomicU64,
}

impl Client {
    async fn run(self: Arc<Self>, half: Arc<Half>, mut steady: PersistentClient, stop: Arc<AtomicBool>) {
        while !stop.load(Ordering::Acquire) {
            let before = self.down.load(Ordering::Acquire);
            match steady.ask().await {
                Ok(head) => {
                    let mark: u64 = head.header("x-mark").unwrap().parse().unwrap();
                    assert!(half.was_applied(mark), "an answer by a change that was never applied: {mark}");
                    self.answered.fetch_add(1, Ordering::Relaxed);
                }
                Err(error) => {
                    let is_down = before % 2 == 1 || before != self.down.load(Ordering::Acquire);
                    assert!(is_down, "a request failed by way of nodes that live: {}: {error}", half.letter);
                    self.excused.fetch_add(1, Ordering::Relaxed);
                }
            }
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// Looks at what nodes keep: it was applied, all of it.
async fn watch(halves: [Arc<Half>; 2], directory: std::path::PathBuf, stop: Arc<AtomicBool>) {
    while !stop.load(Ordering::Acquire) {
        for half in &halves {
            for node in &half.nodes {
                let Ok(document) = std::fs::read(directory.join(node).join("document.json")) else { continue };
                let text = || String::from_utf8_lossy(&document).into_owned();
                assert!(half.mark_of(node, &document).is_some(), "{node} keeps what was not applied: {}", text());
            }
        }
        tokio::time::sleep(PAUSE * 4).await;
    }
}

/// All that runs, and what is done to it.
struct Scene {
    fixture: ControllerFixture,
    halves: [Arc<Half>; 2],
    clients: [Arc<Client>; 2],
    nodes: BTreeMap<String, Running>,
    random: SmallRng,
    killed: BTreeMap<Victim, usize>,
    has_second: bool,
}

const APPS: [&str; 2] = ["a-app", "b-app"];

impl Scene {
    /// Two halves, one by way of a router, that run their first documents.
    async fn new(fixture: ControllerFixture, seed: u64, has_second: bool) -> (Self, origin::Origin) {
        let at = |port: u16| fixture.socket(port);
        let served =
            origin::http::serve(origin::listen(at(7001)).unwrap(), origin::http::Version::H1, "one".into()).unwrap();
        let (a, b) = (at(8080), at(8081));
        let node = |name: &str, port: u16, more: &str| {
            format!("{{kind: Node, name: {name}, workers: 1, address: \"{0}\", bind: \"{0}\"{more}}}\n---\n", at(port))
        };
        let base = [
            "kind: Overlay\nname: test\n---\n".to_owned(),
            format!("{{kind: Node, name: a-device, workers: 1, links: a-router, apps: {{bind: \"{a}\"}}}}\n---\n"),
            node("a-router", 9443, ", role: standalone, links: a-server"),
            node("a-server", 9444, ""),
            format!("{{kind: Node, name: b-device, workers: 1, links: b-server, apps: {{bind: \"{b}\"}}}}\n---\n"),
            node("b-server", 9445, ""),
            "{kind: User, name: a-user, nodes: a-device}\n---\n{kind: User, name: b-user, nodes: b-device}\n"
                .to_owned(),
        ]
        .concat();
        let half = |letter, nodes: &[&str]| Arc::new(Half::new(letter, nodes, served.address(), &base));
        let halves = [half('a', &["device", "router", "server"]), half('b', &["device", "server"])];
        halves.iter().for_each(|half| half.attempt(1));
        let first = halves.iter().map(|half| format!("---\n{}", half.documents(1))).collect::<String>();
        fixture.hermes_ok(&["apply", "-f", "-"], &(base + &first));
        halves.iter().for_each(|half| half.acknowledged(1));
        let mut nodes = BTreeMap::new();
        for name in halves.iter().flat_map(|half| &half.nodes) {
            nodes.insert(name.clone(), fixture.node(name, Some(&fixture.token(name))));
        }
        let random = SmallRng::seed_from_u64(seed);
        let clients = [Arc::default(), Arc::default()];
        let mut this = Self { fixture, halves, clients, nodes, random, killed: BTreeMap::new(), has_second };
        this.until_served(0).await;
        this.until_served(1).await;
        (this, served)
    }

    fn apps(&self, half: usize) -> std::net::SocketAddr {
        self.fixture.socket([8080, 8081][half])
    }

    async fn until_served(&mut self, half: usize) {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            match PersistentClient::new(self.apps(half), APPS[half]).ask().await {
                Ok(_) => return,
                Err(error) => {
                    let logs: String = self.halves[half].nodes.iter().map(|node| self.fixture.log(node)).collect();
                    assert!(Instant::now() < deadline, "half {half} does not come back: {error}\n{logs}");
                }
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    fn half_of(&self, node: &str) -> usize {
        usize::from(node.starts_with(self.halves[1].letter))
    }

    /// One or two at a time: of controllers or of their store, or a node.
    fn victims(&mut self) -> Vec<Victim> {
        let mut all = vec![Victim::Controller];
        if self.has_second {
            all.extend([Victim::Second, Victim::Etcd]);
        }
        let nodes: Vec<_> = self.nodes.keys().cloned().map(Victim::Node).collect();
        let mut victims = Vec::new();
        for _ in 0..self.random.random_range(1..=2) {
            let from = if self.random.random_bool(0.6) { &all } else { &nodes };
            let one = from[self.random.random_range(0..from.len())].clone();
            if !victims.contains(&one) {
                victims.push(one);
            }
        }
        // The store first: a controller that starts without it ends.
        victims.sort_by_key(|victim| *victim != Victim::Etcd);
        victims
    }

    fn kill(&mut self, victim: &Victim) {
        match victim {
            Victim::Controller => self.fixture.kill_controller(),
            Victim::Second => self.fixture.kill_second(),
            Victim::Etcd => self.fixture.kill_etcd(),
            Victim::Node(name) => sigkill(self.nodes.remove(name).unwrap()),
        }
        *self.killed.entry(victim.clone()).or_default() += 1;
    }

    async fn restart(&mut self, victim: &Victim) {
        match victim {
            Victim::Controller => self.fixture.start_controller().await,
            Victim::Second => self.fixture.start_second().await,
            Victim::Etcd => self.fixture.start_etcd().await,
            Victim::Node(name) => drop(self.nodes.insert(name.clone(), self.fixture.node(name, None))),
        }
    }

    async fn round(&mut self) {
        let victims = self.victims();
        let nodes = victims.iter().filter_map(|victim| match victim {
            Victim::Node(name) => Some(self.half_of(name)),
            _ => None,
        });
        let mut halves: Vec<_> = nodes.collect();
        halves.dedup();
        halves.iter().for_each(|half| _ = self.clients[*half].down.fetch_add(1, Ordering::AcqRel));
        victims.iter().for_each(|victim| self.kill(victim));
        let away = self.random.random_range(0..800);
        tokio::time::sleep(Duration::from_millis(away)).await;
        for victim in &victims {
            self.restart(victim).await;
        }
        for half in &halves {
            self.until_served(*half).await;
            self.clients[*half].down.fetch_add(1, Ordering::AcqRel);
        }
        self.look().await;
        let pause = self.random.random_range(0..400);
        tokio::time::sleep(Duration::from_millis(pause)).await;
    }

    fn desks(&self) -> Vec<OperatorClient> {
        let files = if self.has_second { &["controller", "second"][..] } else { &["controller"] };
        files.iter().map(|name| OperatorClient::new(&self.fixture.state(name).join("operator.json"))).collect()
    }

    /// Every controller has what was acknowledged before it was asked.
    async fn look(&self) {
        for mut operator in self.desks() {
            for half in &self.halves {
                let (floor, deadline) = (half.acked(), Instant::now() + Duration::from_secs(30));
                loop {
                    let seen = writer::read(&mut operator, half.letter).await;
                    match seen.map(|(mark, _)| half.is_possible(mark, floor)) {
                        Some(Ok(())) => break,
                        wrong => assert!(Instant::now() < deadline, "an acknowledged change is lost: {wrong:?}"),
                    }
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }

    /// When nobody is killed any more, all of them come to the same.
    async fn look_at_the_end(&self) {
        self.look().await;
        for half in &self.halves {
            let acked = half.acked();
            let keeps = |node: &String| {
                let document = std::fs::read(self.fixture.state(node).join("document.json")).unwrap();
                half.mark_of(node, &document) == Some(acked)
            };
            until("all nodes run what was acknowledged last", || half.nodes.iter().all(keeps)).await;
        }
        self.until_told().await;
        for (at, half) in self.halves.iter().enumerate() {
            let head = PersistentClient::new(self.apps(at), APPS[at]).ask().await.unwrap();
            assert_eq!(head.header("x-mark"), Some(half.acked().to_string()), "{}", half.letter);
        }
    }
}

impl Scene {
    /// Each controller hears of each node, wherever that is, that it runs what it should.
    async fn until_told(&self) {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let mut running = self.nodes.len();
            for operator in &mut self.desks() {
                let (_, all) = operator.ask(Method::GET, "/v1/nodes", "").await.unwrap();
                let nodes = all["nodes"].as_array().unwrap();
                let is_well = |node: &&serde_json::Value| node["connected"] == true && node["current"] == true;
                running = running.min(nodes.iter().filter(is_well).count());
            }
            if running == self.nodes.len() {
                return;
            }
            assert!(Instant::now() < deadline, "{running} nodes say that they run what they should");
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// Whichever task ends first while there is killing has found something wrong.
fn is_well<T: 'static>(tasks: &mut JoinSet<T>) {
    if let Some(ended) = tasks.try_join_next() {
        ended.unwrap();
        panic!("a task has ended by itself");
    }
}

async fn killed_at_random(fixture: ControllerFixture, has_second: bool, seconds: u64) {
    let number = |name: &str| std::env::var(name).ok().map(|value| value.parse::<u64>().unwrap());
    let (seed, seconds) =
        (number("HERMES_SEED").unwrap_or_else(rand::random), number("HERMES_SECONDS").unwrap_or(seconds));
    println!("HERMES_SEED={seed} HERMES_SECONDS={seconds}");
    let (mut scene, _origin) = Scene::new(fixture, seed, has_second).await;
    let stop = Arc::new(AtomicBool::new(false));
    let (mut writers, mut others) = (JoinSet::<Told>::new(), JoinSet::<()>::new());
    for (at, half) in scene.halves.clone().into_iter().enumerate() {
        let writer = Writer {
            half: half.clone(),
            desks: scene.desks(),
            directory: scene.fixture.directory.path().to_owned(),
            apps: scene.apps(at),
            app: APPS[at],
            seed: seed.wrapping_add(1 + at as u64),
        };
        writers.spawn(writer.run(stop.clone()));
        others.spawn(scene.clients[at].clone().run(
            half,
            PersistentClient::new(scene.apps(at), APPS[at]),
            stop.clone(),
        ));
    }
    others.spawn(watch(scene.halves.clone(), scene.fixture.directory.path().to_owned(), stop.clone()));
    let (began, mut rounds) = (Instant::now(), 0);
    while began.elapsed() < Duration::from_secs(seconds) {
        scene.round().await;
        rounds += 1;
        is_well(&mut writers);
        is_well(&mut others);
    }
    stop.store(true, Ordering::Release);
    while let Some(report) = writers.join_next().await {
        println!("{:?}", report.unwrap());
    }
    while let Some(ended) = others.join_next().await {
        ended.unwrap();
    }
    scene.look_at_the_end().await;
    println!("{rounds} rounds in {:?}: killed {:?}", began.elapsed(), scene.killed);
    for (half, client) in scene.halves.iter().zip(&scene.clients) {
        let (answered, excused) = (client.answered.load(Ordering::Relaxed), client.excused.load(Ordering::Relaxed));
        println!("{}: {answered} requests answered, none failed but {excused} by way of dead nodes", half.letter);
        // A busy machine answers fewer than an idle one, which answers hundreds.
        assert!(answered > 10, "there was no load");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_deaths_with_etcd_lose_nothing() {
    killed_at_random(ControllerFixture::with_etcd().await, true, 8).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_deaths_with_sqlite_lose_nothing() {
    killed_at_random(ControllerFixture::new().await, false, 5).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes ten minutes"]
async fn random_deaths_with_etcd_for_ten_minutes() {
    killed_at_random(ControllerFixture::with_etcd().await, true, 600).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes ten minutes"]
async fn random_deaths_with_sqlite_for_ten_minutes() {
    killed_at_random(ControllerFixture::new().await, false, 600).await;
}
