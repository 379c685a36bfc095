//! Who changes one half of the overlay, again and again, at whichever controller answers, and holds each of them to its word.
//!
//! In: a half, and the controllers. Out: how many changes were acknowledged, refused, or are unknown; the first broken promise
//! ends the test.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use http::Method;
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use serde_json::Value;

use super::model::Half;
use hermes_testkit::control::OperatorClient;
use hermes_testkit::control::PersistentClient;

/// What is to be so in the end is so by then.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_millis(20);
/// Milliseconds that a controller may wait for nodes.
const WAIT: u64 = 3000;

#[derive(Debug, Default)]
pub(crate) struct Told {
    pub(crate) acknowledged: u64,
    pub(crate) unknown: u64,
    pub(crate) conflicts: u64,
    pub(crate) wrong: u64,
    /// How often a controller said of a node that it runs a change.
    pub(crate) running: u64,
}

pub(crate) struct Writer {
    pub(crate) half: Arc<Half>,
    pub(crate) desks: Vec<OperatorClient>,
    /// Where the nodes' directories are.
    pub(crate) directory: PathBuf,
    pub(crate) apps: std::net::SocketAddr,
    pub(crate) app: &'static str,
    pub(crate) seed: u64,
}

impl Writer {
    /// Changes until it is told to stop, and finds out in the end how its last change went.
    pub(crate) async fn run(mut self, stop: Arc<AtomicBool>) -> Told {
        let mut random = SmallRng::seed_from_u64(self.seed);
        let (mut report, mut mark) = (Told::default(), self.half.acked());
        let mut since = self.settle(0).await;
        loop {
            let is_last = stop.load(Ordering::Acquire);
            mark += 1;
            let operator = random.random_range(0..self.desks.len());
            if mark.is_multiple_of(5) {
                self.wrong(operator, mark, &mut report).await;
                continue;
            }
            self.half.attempt(mark);
            let path = format!("/v1/apply?since={since}&wait={WAIT}");
            let text = self.half.documents(mark);
            match self.desks[operator].ask(Method::POST, &path, &text).await {
                Ok((200, answer)) => {
                    self.half.acknowledged(mark);
                    report.acknowledged += 1;
                    since = answer["revision"].as_u64().unwrap();
                    report.running += self.hold(mark, &answer).await;
                    // Who has acknowledged it has it, also after it was killed and is back.
                    if let Some((there, _)) = self.read(operator).await {
                        assert_eq!(there, mark, "what controller {operator} acknowledged it has no more: {answer}");
                    }
                    if is_last {
                        return report;
                    }
                }
                Ok((409, _)) => {
                    self.half.refused(mark);
                    report.conflicts += 1;
                    since = self.settle(operator).await;
                }
                Ok((503, _)) | Err(_) => {
                    report.unknown += 1;
                    since = self.settle(operator).await;
                }
                Ok((status, answer)) => panic!("a change that is right has {status}: {answer}"),
            }
        }
    }

    /// One that must be refused; no node may ever run it.
    async fn wrong(&mut self, operator: usize, mark: u64, report: &mut Told) {
        let text = self.half.documents(mark) + "---\n{kind: Group, name: nobody, users: [nobody]}\n";
        match self.desks[operator].ask(Method::POST, "/v1/apply", &text).await {
            Ok((422, _)) => report.wrong += 1,
            Ok((503, _)) | Err(_) => tokio::time::sleep(PAUSE).await,
            Ok((status, answer)) => panic!("a wrong change has {status}: {answer}"),
        }
    }

    /// A controller says that nodes run this change: then it is in their directories, and in what an application gets.
    async fn hold(&mut self, mark: u64, answer: &Value) -> u64 {
        let letter = self.half.letter;
        let nodes = answer["nodes"].as_object().unwrap();
        let mut running = 0;
        for (node, fate) in nodes {
            assert!(node.starts_with(letter), "{node} is touched by a change of the other half: {answer}");
            assert_ne!(fate["state"], "refused", "{node}: {answer}");
            if fate["state"] == "running" {
                running += 1;
                let document = std::fs::read(self.directory.join(node).join("document.json")).unwrap();
                let kept = self.half.mark_of(node, &document);
                assert_eq!(kept, Some(mark), "{node} is said to run {mark}, and keeps another one: {answer}");
            }
        }
        let is_whole = running == self.half.nodes.len() as u64;
        // A node may be killed just now: then there is no answer, and nothing to be held against anybody.
        if is_whole && let Ok(head) = PersistentClient::new(self.apps, self.app).ask().await {
            let seen = head.header("x-mark");
            assert_eq!(seen, Some(mark.to_string()), "all nodes are said to run {mark}");
        }
        running
    }

    /// What a controller has of this half, and since when. `None`: it does not answer.
    async fn read(&mut self, operator: usize) -> Option<(u64, u64)> {
        read(&mut self.desks[operator], self.half.letter).await
    }

    /// Finds out what became of changes that are open. The revision that has the last one.
    async fn settle(&mut self, first: usize) -> u64 {
        let floor = self.half.acked();
        let deadline = Instant::now() + REQUEST_TIMEOUT;
        let mut last = "nobody answers".to_owned();
        for operator in (0..self.desks.len()).cycle().skip(first) {
            if let Some((mark, revision)) = self.read(operator).await {
                match self.half.is_possible(mark, floor) {
                    Ok(()) => return revision,
                    // Another one than what acknowledged it may still read.
                    Err(error) => last = error,
                }
            }
            assert!(Instant::now() < deadline, "an acknowledged change is lost: {last}");
            tokio::time::sleep(PAUSE).await;
        }
        unreachable!()
    }
}

/// The mark that a controller has, which is in both services or in none, and its revision.
pub(crate) async fn read(operator: &mut OperatorClient, letter: char) -> Option<(u64, u64)> {
    let (_, all) = operator.ask(Method::GET, "/v1/documents?kind=Service", "").await.ok().filter(|one| one.0 == 200)?;
    let of = |name: &str| {
        let name = format!("{letter}-{name}");
        let one = all["documents"].as_array().unwrap().iter().find(|one| one["document"]["name"] == *name).unwrap();
        let mark = &one["document"]["rewrite"]["response"]["set-headers"]["x-mark"];
        (mark.as_str().unwrap().parse().unwrap(), one["revision"].as_u64().unwrap())
    };
    let (app, twin) = (of("app"), of("twin"));
    assert_eq!(app, twin, "of two documents that were changed together one is there: {all}");
    Some(app)
}
