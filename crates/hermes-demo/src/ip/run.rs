//! The case itself: both users ping continuously while the documents change.
//!
//! In: the number of runs and the length of a phase. Out: every echo, and for each document the times at which it was
//! saved and in effect. A run has the paper's phases: (a) everything in Poland; step 1; (b) Alice's ingress in the
//! United States; step 2; (c) her server there as well. Between two runs everything moves back to Poland. In the first
//! run the new hops have no connections yet; in later runs their connections are still open.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, ensure};
use serde::Serialize;
use tokio::task::JoinSet;

use super::Options;
use super::lab::{Lab, Machine};
use super::nodes::{HOME, Lookout, Nodes, OFFICE};
use super::ping::{Echo, Pinger};
use super::shell_session::{self, ShellSession, Typed};
use crate::namespace::Namespace;
use crate::terminal::{Progress, grouped};

/// Limit for the first replies: nine nodes open their tunnels one after the other.
const FIRST_REPLY_TIMEOUT: Duration = Duration::from_secs(15);
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The location of Alice's ingress and server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Phase {
    /// Ingress and server in Poland.
    A,
    /// The ingress in the United States.
    B,
    /// Ingress and server in the United States.
    C,
    /// The move back to Poland, between two runs.
    Back,
}

/// A phase, bounded by send times of packets. It begins when the preceding change is in effect.
#[derive(Debug, Clone, Copy)]
pub(super) struct Window {
    pub(super) phase: Phase,
    /// The machine that serves Alice's [`HOME`].
    pub(super) home: Machine,
    pub(super) from: Instant,
    pub(super) to: Instant,
}

/// The change of one document.
#[derive(Debug, Clone, Copy)]
pub(super) struct Change {
    pub(super) run: usize,
    /// The step: 1 moves the ingress, 2 the server; 3 moves the server back, 4 the ingress.
    pub(super) step: usize,
    pub(super) saved: Instant,
    /// The time at which the first packet arrived at the new hop.
    pub(super) in_effect: Instant,
}

/// A user and the address that the user pings.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pair {
    pub(super) user: &'static str,
    pub(super) address: Ipv4Addr,
    /// The machine that replies at first.
    pub(super) machine: Machine,
}

/// All results.
pub(super) struct Played {
    pub(super) begun: Instant,
    pub(super) windows: Vec<Window>,
    pub(super) changes: Vec<Change>,
    /// The echoes of each pair; Alice and her server come first.
    pub(super) echoes: Vec<(Pair, Vec<Echo>)>,
    /// One TCP connection for each run, open across step 1.
    pub(super) typed: Vec<Typed>,
    pub(super) dropped_by_nodes: Vec<String>,
    pub(super) dropped_by_wires: u64,
}

/// Runs the case.
///
/// # Errors
/// A node does not start, a change does not take effect, or a TCP connection breaks.
pub(super) async fn play(options: &Options, directory: &Path, progress: &Progress) -> anyhow::Result<Played> {
    progress.step("a network in Poland and the United States: twelve namespaces, nine nodes");
    let lab = Arc::new(Lab::new()?);
    let mut nodes = Nodes::start(&lab, options.protocol, directory).await?;
    let played = async {
        let mut stage = Stage::open(&lab, &nodes, progress).await?;
        for run in 0..options.runs {
            stage.run(run, options, run + 1 < options.runs).await.with_context(|| format!("run {}", run + 1))?;
        }
        stage.conclude().await
    };
    match played.await {
        Ok(played) => {
            progress.step("the nodes end");
            nodes.stop().await;
            Ok(played)
        }
        Err(error) => Err(anyhow!("{error:#}\nthe nodes' last lines:{}", nodes.last_words())),
    }
}

struct Stage<'a> {
    lab: &'a Lab,
    nodes: &'a Nodes,
    progress: &'a Progress,
    pingers: Vec<(Pair, Pinger)>,
    begun: Instant,
    /// The current phase and machine, and the time since when they apply.
    now: (Phase, Machine),
    since: Instant,
    windows: Vec<Window>,
    changes: Vec<Change>,
    typed: Vec<Typed>,
    _shells: [JoinSet<()>; 2],
}

impl<'a> Stage<'a> {
    /// Starts all pingers; returns when each has received a reply.
    async fn open(lab: &'a Lab, nodes: &'a Nodes, progress: &'a Progress) -> anyhow::Result<Self> {
        progress.step("everybody pings, a packet every 10 ms");
        let pairs = [
            ("alice", &lab.alice, HOME, Machine::AlicePl),
            ("bob", &lab.bob, HOME, Machine::BobPl),
            ("alice", &lab.alice, OFFICE, Machine::Office),
            ("alice", &lab.alice, lab.desk.address, Machine::Desk),
        ];
        let mut pingers = Vec::new();
        for (user, place, address, machine) in pairs {
            pingers.push((Pair { user, address, machine }, Pinger::begin(place, address)?));
        }
        let until = Instant::now() + FIRST_REPLY_TIMEOUT;
        while let Some((pair, _)) = pingers.iter().find(|(_, pinger)| pinger.so_far().1 == 0) {
            let Pair { user, address, .. } = pair;
            ensure!(Instant::now() < until, "{user} has no reply from {address} after {FIRST_REPLY_TIMEOUT:?}");
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        let shells = [shell_session::echo(&lab.alice_pl)?, shell_session::echo(&lab.alice_us)?];
        let begun = Instant::now();
        let now = (Phase::A, Machine::AlicePl);
        let (windows, changes, typed) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Self { lab, nodes, progress, pingers, begun, now, since: begun, windows, changes, typed, _shells: shells })
    }

    async fn run(&mut self, run: usize, options: &Options, goes_back: bool) -> anyhow::Result<()> {
        let said = |what: &str| if options.runs > 1 { format!("run {}: {what}", run + 1) } else { what.to_owned() };
        let typist = ShellSession::begin(&self.lab.alice, SocketAddr::from((HOME, shell_session::PORT))).await?;
        self.dwell(&said("(a) ingress and server in Poland"), options.phase).await;
        let next = (Phase::B, Machine::AlicePl);
        self.change((run, 1), &self.lab.ingress_us, next, |nodes| nodes.send_alice_to("ingress-us")).await?;
        self.dwell(&said("(b) the ingress in the United States"), options.phase).await;
        // The other machine does not know the TCP connection: it is closed before the server moves.
        self.typed.push(typist.stop().await.context("a TCP connection that was there before the ingress moved")?);
        let next = (Phase::C, Machine::AliceUs);
        self.change((run, 2), &self.lab.alice_us, next, |nodes| nodes.move_home_to("alice-us")).await?;
        self.dwell(&said("(c) the server there as well"), options.phase).await;
        self.close(Instant::now());
        if goes_back {
            self.progress.step(&said("everything goes back to Poland"));
            let next = (Phase::Back, Machine::AlicePl);
            self.now.0 = Phase::Back;
            self.change((run, 3), &self.lab.alice_pl, next, |nodes| nodes.move_home_to("alice-pl")).await?;
            let next = (Phase::A, Machine::AlicePl);
            self.change((run, 4), &self.lab.ingress_pl, next, |nodes| nodes.send_alice_to("ingress-pl")).await?;
        }
        Ok(())
    }

    /// Waits for the length of a phase, and shows progress.
    async fn dwell(&self, what: &str, phase: Duration) {
        self.progress.step(what);
        let until = Instant::now() + phase;
        while Instant::now() < until {
            tokio::time::sleep(POLL_INTERVAL).await;
            let (_, _, last) = self.pingers[0].1.so_far();
            let rtt = last.map_or(f64::NAN, |reply| reply.after.as_secs_f64() * 1e3);
            let replies: usize = self.pingers.iter().map(|(_, pinger)| pinger.so_far().1).sum();
            self.progress.detail(&format!("{what}: alice to {HOME} {rtt:.1} ms; {} replies", grouped(replies as u64)));
        }
    }

    /// Replaces a document and waits until packets arrive at the new hop.
    async fn change(
        &mut self,
        (run, step): (usize, usize),
        new_hop: &Namespace,
        next: (Phase, Machine),
        save: impl FnOnce(&Nodes) -> anyhow::Result<Instant>,
    ) -> anyhow::Result<()> {
        let lookout = Lookout::at(new_hop).await?;
        let saved = save(self.nodes)?;
        let in_effect = lookout.wait().await?;
        self.close(in_effect);
        self.now = next;
        self.changes.push(Change { run, step, saved, in_effect });
        Ok(())
    }

    /// Ends the current window at this moment.
    fn close(&mut self, to: Instant) {
        let (phase, home) = self.now;
        self.windows.push(Window { phase, home, from: self.since, to });
        self.since = to;
    }

    async fn conclude(self) -> anyhow::Result<Played> {
        let mut echoes = Vec::new();
        for (pair, pinger) in self.pingers {
            echoes.push((pair, pinger.finish().await));
        }
        Ok(Played {
            begun: self.begun,
            windows: self.windows,
            changes: self.changes,
            echoes,
            typed: self.typed,
            dropped_by_nodes: self.nodes.dropped().await?,
            dropped_by_wires: self.lab.dropped(),
        })
    }
}
