//! Figures of the IP case, beside the paper's.
//!
//! In: all results of a run. Out: for each phase the round trips and losses; for each change its duration; for each
//! pair of user and address the machines that replied. The output is text or JSON. The paper's values are from Figure
//! 7d: mean round trips of one ping every ten seconds, each over its own HTTP connection.

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::chart;
use super::lab::{Machine, TO_POLAND, TO_US};
use super::nodes::HOME;
use super::run::{Change, Pair, Phase, Played, Window};
use super::shell_session::Typed;
use super::{Options, Protocol};
use crate::terminal::{Align, Paint, grouped, table};

/// The paper: "less than ten seconds".
const PAPER_CHANGE: &str = "under 10 s";
/// The effect of each step's document: 1 and 2 move Alice to the United States, 3 and 4 move her back between two runs.
const STEPS: [&str; 4] = [
    "step 1: Alice's ingress to the US",
    "step 2: Alice's server to the US",
    "back: Alice's server to Poland",
    "back: Alice's ingress to Poland",
];
/// Limit from the saved document to the new path if connections to the new hops exist.
const WARM_MS: f64 = 200.0;

/// Round trips in milliseconds, and the number of lost requests.
#[derive(Debug, Clone, Serialize)]
struct RoundTrips {
    sent: usize,
    lost: usize,
    mean_ms: f64,
    median_ms: f64,
    p99_ms: f64,
    longest_ms: f64,
}

/// Alice and her server in one phase, over all runs.
#[derive(Debug, Serialize)]
struct PhaseFigures {
    phase: Phase,
    #[serde(flatten)]
    round_trips: RoundTrips,
    /// Mean.
    paper_ms: f64,
}

/// A changed document.
#[derive(Debug, Serialize)]
struct ChangeFigures {
    run: usize,
    step: usize,
    /// A description of the step.
    what: &'static str,
    /// Connections to the new hops existed before the change.
    warm: bool,
    /// Time from the saved document until the first packet arrived at the new hop.
    in_effect_ms: f64,
    /// The upper limit for `in_effect_ms`.
    limit_ms: f64,
    in_time: bool,
    /// Lost echo requests of all pairs, sent during the change or up to a second before or after it.
    lost: usize,
}

/// A user and an address, over the whole demo.
#[derive(Debug, Serialize)]
struct PairFigures {
    user: &'static str,
    address: Ipv4Addr,
    sent: usize,
    lost: usize,
    median_ms: f64,
    /// The machines that replied.
    machines: Vec<Machine>,
    /// Replies from a machine that was not assigned to the user at that moment.
    astray: usize,
}

/// All figures.
#[derive(Debug, Serialize)]
pub(super) struct Figures {
    protocol: Protocol,
    runs: usize,
    rtt_to_poland_ms: f64,
    rtt_to_us_ms: f64,
    phases: Vec<PhaseFigures>,
    changes: Vec<ChangeFigures>,
    pairs: Vec<PairFigures>,
    typed: Vec<Typed>,
    dropped_by_nodes: Vec<String>,
    dropped_by_wires: u64,
}

impl RoundTrips {
    fn of(replies: impl Iterator<Item = Option<Duration>>) -> Self {
        let (mut times, mut sent) = (Vec::new(), 0);
        for reply in replies {
            sent += 1;
            times.extend(reply.map(ms));
        }
        times.sort_by(f64::total_cmp);
        let at =
            |part: f64| times.get((times.len() as f64 * part) as usize).or(times.last()).copied().unwrap_or(f64::NAN);
        let mean_ms = times.iter().sum::<f64>() / times.len() as f64;
        Self { sent, lost: sent - times.len(), mean_ms, median_ms: at(0.5), p99_ms: at(0.99), longest_ms: at(1.0) }
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Whether the right machine replied. If the user's machine changed while the packet was in transit, both the old and
/// the new one are right. The ingress decides, and it may be as far away as the server.
fn is_right(pair: &Pair, window: &Window, machine: Option<Machine>, way: (Instant, Instant), played: &Played) -> bool {
    if (pair.user, pair.address) != ("alice", HOME) {
        return machine == Some(pair.machine);
    }
    let (sent, answered) = way;
    let is_changing = played.changes.iter().any(|change| change.saved <= answered && sent <= change.in_effect);
    machine == Some(window.home) || is_changing && matches!(machine, Some(Machine::AlicePl | Machine::AliceUs))
}

impl Figures {
    /// Computes the figures of at least one run.
    pub(super) fn of(options: &Options, played: &Played) -> Self {
        let phases = [(Phase::A, 382.33), (Phase::B, 206.33), (Phase::C, 79.68)];
        Self {
            protocol: options.protocol,
            runs: options.runs,
            rtt_to_poland_ms: ms(TO_POLAND),
            rtt_to_us_ms: ms(TO_US),
            phases: phases.map(|(phase, paper)| phase_figures(played, phase, paper)).into(),
            changes: played.changes.iter().map(|change| change_figures(options.protocol, played, change)).collect(),
            pairs: (0..played.echoes.len()).map(|index| pair_figures(played, index)).collect(),
            typed: played.typed.clone(),
            dropped_by_nodes: played.dropped_by_nodes.clone(),
            dropped_by_wires: played.dropped_by_wires,
        }
    }

    /// Whether no packet was lost and none reached the wrong machine.
    pub(super) fn is_lossless(&self) -> bool {
        self.pairs.iter().all(|pair| pair.sent > 0 && pair.lost == 0 && pair.astray == 0)
    }

    fn is_in_time(&self) -> bool {
        self.changes.iter().all(|change| change.in_time)
    }

    pub(super) fn json(&self) -> anyhow::Result<String> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }

    pub(super) fn text(&self, paint: Paint, played: &Played, seconds: f64) -> String {
        let chart = chart::of(paint, played);
        [
            picture(paint),
            chart,
            self.phases(paint),
            self.changes(paint),
            self.pairs(paint),
            self.verdict(paint, seconds),
        ]
        .join("\n")
    }

    fn phases(&self, paint: Paint) -> String {
        let columns = [
            ("ALICE PINGS 10.0.0.1", Align::Left),
            ("SENT", Align::Right),
            ("LOST", Align::Right),
            ("RTT MEAN", Align::Right),
            ("MEDIAN", Align::Right),
            ("99 %", Align::Right),
            ("MOST", Align::Right),
            ("PAPER: MEAN", Align::Right),
        ];
        let rows: Vec<Vec<String>> = self.phases.iter().map(PhaseFigures::cells).collect();
        table(paint, &columns, &rows)
            + &paint.dim(
                "  Milliseconds. The paper's pings opened an HTTP connection each, which took two more round trips to the\n  \
                 ingress; ours go over one that stays, so that a nearer ingress alone makes no ping faster.\n",
            )
    }

    fn changes(&self, paint: Paint) -> String {
        let columns = [
            ("A DOCUMENT CHANGES", Align::Left),
            ("IN EFFECT AFTER", Align::Right),
            ("LIMIT", Align::Right),
            ("LOST", Align::Right),
            ("PAPER", Align::Right),
        ];
        table(paint, &columns, &self.changes.iter().map(|change| change.cells(self.runs)).collect::<Vec<_>>())
            + &paint.dim(&format!(
                "  From the saved file until packets come by the new hop. Cold: nobody has spoken to the new hops before,\n  \
                 {} for a handshake with each. All lost packets count, of every user.\n",
                match self.protocol.handshake_round_trips() {
                    1 => "a round trip".to_owned(),
                    many => format!("{many} round trips"),
                }
            ))
    }

    fn pairs(&self, paint: Paint) -> String {
        let columns = [
            ("WHO", Align::Left),
            ("PINGS", Align::Left),
            ("WHICH IS", Align::Left),
            ("SENT", Align::Right),
            ("LOST", Align::Right),
            ("MEDIAN RTT", Align::Right),
        ];
        let rows: Vec<Vec<String>> = self.pairs.iter().map(PairFigures::cells).collect();
        let typed = self
            .typed
            .iter()
            .fold((0, 0.0f64), |(bytes, longest), typed| (bytes + typed.bytes, longest.max(typed.longest_ms)));
        table(paint, &columns, &rows)
            + &format!(
                "  In step 1 a TCP connection is under way, as of somebody who types: {} bytes echoed, the slowest after {:.0} ms.\n",
                grouped(typed.0 as u64),
                typed.1
            )
    }

    fn verdict(&self, paint: Paint, seconds: f64) -> String {
        let took = paint.dim(&format!("({seconds:.0} s)"));
        let sent = grouped(self.pairs.iter().map(|pair| pair.sent as u64).sum());
        let lost: usize = self.pairs.iter().map(|pair| pair.lost).sum();
        let astray: usize = self.pairs.iter().map(|pair| pair.astray).sum();
        let said = match (lost, astray) {
            (0, 0) if self.is_in_time() => {
                paint.good(&format!("✓ {sent} packets, none lost, none to the wrong machine; every change in time"))
            }
            (0, 0) => format!(
                "{}, {}",
                paint.good(&format!("✓ {sent} packets, none lost, none to the wrong machine")),
                paint.bad("but a change took longer than it may")
            ),
            _ => paint.bad(&format!("✗ of {sent} packets {lost} were lost, {astray} came from the wrong machine")),
        };
        let dropped: String = self.dropped_by_nodes.iter().map(|line| format!("\n    {line}")).collect();
        let dropped = if lost > 0 { format!("\n  Dropped by nodes:{dropped}") } else { String::new() };
        format!("  {said} {took}{dropped}\n")
    }
}

/// Every echo and every change: seconds since the start, round trips in milliseconds.
pub(super) fn csv(played: &Played) -> String {
    let at = |time: Instant| time.saturating_duration_since(played.begun).as_secs_f64();
    let mut text = "user,address,sent,rtt,machine\n".to_owned();
    for Change { run, step, saved, in_effect } in &played.changes {
        text += &format!("# run {} step {step}: saved {:.4}, in effect {:.4}\n", run + 1, at(*saved), at(*in_effect));
    }
    for (Pair { user, address, .. }, echoes) in &played.echoes {
        for echo in echoes {
            let reply = echo.reply.map(|reply| {
                let machine = Machine::of_ttl(reply.ttl).map_or("?", Machine::name);
                format!("{:.3},{machine}", ms(reply.after))
            });
            text += &format!("{user},{address},{:.4},{}\n", at(echo.sent), reply.as_deref().unwrap_or(","));
        }
    }
    text
}

fn phase_figures(played: &Played, phase: Phase, paper_ms: f64) -> PhaseFigures {
    let echoes = played.echoes.first().map_or(&[][..], |(_, echoes)| echoes);
    let windows = || played.windows.iter().filter(|window| window.phase == phase);
    let within = echoes.iter().filter(|echo| windows().any(|window| (window.from..window.to).contains(&echo.sent)));
    PhaseFigures { phase, round_trips: RoundTrips::of(within.map(|echo| Some(echo.reply?.after))), paper_ms }
}

fn change_figures(protocol: Protocol, played: &Played, change: &Change) -> ChangeFigures {
    let around = Duration::from_secs(1);
    let all = played.echoes.iter().flat_map(|(_, echoes)| echoes);
    let lost = all.filter(|echo| {
        echo.reply.is_none() && echo.sent + around >= change.saved && echo.sent <= change.in_effect + around
    });
    let is_back = change.step > 2;
    let warm = change.run > 0 || is_back;
    // Step 1 has one new hop across the ocean, so a cold connection costs its round trips; step 2 has none.
    let cold = if change.step == 1 { ms(TO_POLAND) } else { 0.0 };
    let handshakes = if warm { 0.0 } else { cold * f64::from(protocol.handshake_round_trips()) };
    // On the way back the first packet itself crosses the ocean to the new hop.
    let crossing = if is_back { ms(TO_POLAND) / 2.0 } else { 0.0 };
    let (in_effect_ms, limit_ms) = (ms(change.in_effect - change.saved), WARM_MS + handshakes + crossing);
    ChangeFigures {
        run: change.run + 1,
        step: change.step,
        what: STEPS[change.step - 1],
        warm,
        in_effect_ms,
        limit_ms,
        in_time: in_effect_ms <= limit_ms,
        lost: lost.count(),
    }
}

fn pair_figures(played: &Played, index: usize) -> PairFigures {
    let (pair, echoes) = &played.echoes[index];
    let mut figures = PairFigures {
        user: pair.user,
        address: pair.address,
        sent: 0,
        lost: 0,
        median_ms: 0.0,
        machines: Vec::new(),
        astray: 0,
    };
    let mut times = Vec::new();
    for echo in echoes {
        let window = played.windows.iter().find(|window| (window.from..window.to).contains(&echo.sent));
        let Some(window) = window else { continue };
        let machine = echo.reply.and_then(|reply| Machine::of_ttl(reply.ttl));
        let is_astray = |after| !is_right(pair, window, machine, (echo.sent, echo.sent + after), played);
        if echo.reply.is_some_and(|reply| is_astray(reply.after)) {
            figures.astray += 1;
        }
        figures.machines.extend(machine.filter(|machine| !figures.machines.contains(machine)));
        times.push(echo.reply.map(|reply| reply.after));
    }
    let round_trips = RoundTrips::of(times.into_iter());
    PairFigures { sent: round_trips.sent, lost: round_trips.lost, median_ms: round_trips.median_ms, ..figures }
}

impl PhaseFigures {
    fn cells(&self) -> Vec<String> {
        let name = match self.phase {
            Phase::A => "(a) ingress and server in Poland",
            Phase::B => "(b) the ingress in the United States",
            Phase::C => "(c) the server there as well",
            Phase::Back => "back",
        };
        let RoundTrips { sent, lost, mean_ms, median_ms, p99_ms, longest_ms } = self.round_trips;
        let numbers = [mean_ms, median_ms, p99_ms, longest_ms, self.paper_ms].map(|ms| format!("{ms:.2}"));
        [name.to_owned(), grouped(sent as u64), grouped(lost as u64)].into_iter().chain(numbers).collect()
    }
}

impl ChangeFigures {
    fn cells(&self, runs: usize) -> Vec<String> {
        let state = if self.warm { "warm" } else { "cold" };
        let run = if runs > 1 { format!("run {}, ", self.run) } else { String::new() };
        vec![
            format!("{run}{}, {state}", self.what),
            format!("{:.0} ms", self.in_effect_ms),
            format!("{:.0} ms", self.limit_ms),
            grouped(self.lost as u64),
            PAPER_CHANGE.to_owned(),
        ]
    }
}

impl PairFigures {
    fn cells(&self) -> Vec<String> {
        let machines: Vec<&str> = self.machines.iter().map(|machine| machine.name()).collect();
        vec![
            self.user.to_owned(),
            self.address.to_string(),
            machines.join(", then "),
            grouped(self.sent as u64),
            grouped(self.lost as u64),
            format!("{:.2} ms", self.median_ms),
        ]
    }
}

/// The topology; `═` marks the overlay.
fn picture(paint: Paint) -> String {
    let [alice, bob, home] = ["alice", "bob", "10.0.0.1"].map(|name| paint.bold(name));
    format!(
        "\n  (a) {alice} ═══ ocean ═══▶ ingress-pl ═══▶ alice-pl, her {home}    {bob} ═══▶ ingress-pl ═══▶ bob-pl, his {home}\n  \
         (b) {alice} ═══▶ ingress-us ═══ ocean ═══▶ alice-pl\n  \
         (c) {alice} ═══▶ ingress-us ═══▶ alice-us, from now on her {home}\n"
    )
}
