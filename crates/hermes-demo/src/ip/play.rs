//! The case itself: both users' pings run, and the documents change under them.
//!
//! In: how many runs, how long each phase. Out: every echo, and when which document was saved and in effect. A run is
//! the paper's: (a) everything in Poland, step 1, (b) Alice's ingress in the United States, step 2, (c) her server
//! there as well; between two runs everything goes back to Poland. In the first run nobody has spoken to the new hops
//! before; in later ones the connections to them are still there.

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
use super::typing::{self, Typed, Typist};
use crate::place::Place;
use crate::terminal::{Progress, grouped};

/// How long the first replies may take: nine nodes open their tunnels one after the other.
const OPENING: Duration = Duration::from_secs(15);
const LOOK: Duration = Duration::from_millis(100);

/// Where Alice's packets for her server go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Phase {
    /// Ingress and server in Poland.
    A,
    /// The ingress in the United States.
    B,
    /// Both there.
    C,
    /// On the way back to Poland, between two runs.
    Back,
}

/// A phase, by when its packets were sent. It begins when the change before it is in effect.
#[derive(Debug, Clone, Copy)]
pub(super) struct Window {
    pub(super) phase: Phase,
    /// Who is Alice's [`HOME`].
    pub(super) home: Machine,
    pub(super) from: Instant,
    pub(super) to: Instant,
}

/// One changed document.
#[derive(Debug, Clone, Copy)]
pub(super) struct Change {
    pub(super) run: usize,
    /// 1: the ingress goes; 2: the server; 3: the server comes back; 4: the ingress.
    pub(super) step: usize,
    pub(super) saved: Instant,
    /// The first packet came by the new hop.
    pub(super) in_effect: Instant,
}

/// Who asks whom.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pair {
    pub(super) user: &'static str,
    pub(super) address: Ipv4Addr,
    /// Who answers at first.
    pub(super) machine: Machine,
}

/// Everything that happened.
pub(super) struct Played {
    pub(super) begun: Instant,
    pub(super) windows: Vec<Window>,
    pub(super) changes: Vec<Change>,
    /// By pair, Alice and her server first.
    pub(super) echoes: Vec<(Pair, Vec<Echo>)>,
    /// A connection a run, over its step 1.
    pub(super) typed: Vec<Typed>,
    pub(super) dropped_by_nodes: Vec<String>,
    pub(super) dropped_by_wires: u64,
}

/// Plays it.
///
/// # Errors
/// A node that does not start, a change that does not take effect, a TCP connection that breaks.
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
    /// How packets go now, and since when.
    now: (Phase, Machine),
    since: Instant,
    windows: Vec<Window>,
    changes: Vec<Change>,
    typed: Vec<Typed>,
    _shells: [JoinSet<()>; 2],
}

impl<'a> Stage<'a> {
    /// Everybody begins to ping; returns when everybody has been answered.
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
        let until = Instant::now() + OPENING;
        while let Some((pair, _)) = pingers.iter().find(|(_, pinger)| pinger.so_far().1 == 0) {
            let Pair { user, address, .. } = pair;
            ensure!(Instant::now() < until, "{user} has no reply from {address} after {OPENING:?}");
            tokio::time::sleep(LOOK).await;
        }
        let shells = [typing::echo(&lab.alice_pl)?, typing::echo(&lab.alice_us)?];
        let begun = Instant::now();
        let now = (Phase::A, Machine::AlicePl);
        let (windows, changes, typed) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Self { lab, nodes, progress, pingers, begun, now, since: begun, windows, changes, typed, _shells: shells })
    }

    async fn run(&mut self, run: usize, options: &Options, goes_back: bool) -> anyhow::Result<()> {
        let said = |what: &str| if options.runs > 1 { format!("run {}: {what}", run + 1) } else { what.to_owned() };
        let typist = Typist::begin(&self.lab.alice, SocketAddr::from((HOME, typing::PORT))).await?;
        self.dwell(&said("(a) ingress and server in Poland"), options.phase).await;
        let next = (Phase::B, Machine::AlicePl);
        self.change((run, 1), &self.lab.ingress_us, next, |nodes| nodes.send_alice_to("ingress-us")).await?;
        self.dwell(&said("(b) the ingress in the United States"), options.phase).await;
        // On another machine nobody knows of the connection: it ends before the server moves.
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

    /// Lets a phase last, and shows how it goes.
    async fn dwell(&self, what: &str, phase: Duration) {
        self.progress.step(what);
        let until = Instant::now() + phase;
        while Instant::now() < until {
            tokio::time::sleep(LOOK).await;
            let (_, _, last) = self.pingers[0].1.so_far();
            let rtt = last.map_or(f64::NAN, |reply| reply.after.as_secs_f64() * 1e3);
            let replies: usize = self.pingers.iter().map(|(_, pinger)| pinger.so_far().1).sum();
            self.progress.detail(&format!("{what}: alice to {HOME} {rtt:.1} ms; {} replies", grouped(replies as u64)));
        }
    }

    /// Replaces a document and waits until packets come by the new hop.
    async fn change(
        &mut self,
        (run, step): (usize, usize),
        new_hop: &Place,
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

    /// What went as it goes now went so until this moment.
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
