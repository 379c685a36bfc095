//! The report of the demo.
//!
//! In: measurements. Out: a short text for readers who do not know Hermes, or JSON. Never: a claim that was not
//! measured in this run.

use std::io::Write;
use std::time::Duration;

use serde::Serialize;

use super::change::Changed;
use super::overlay::{DOCUMENTS, NODES, OVERLAY, Overlay, Typed};
use super::terminal::{Align, Paint, bytes, grouped, table};
use super::traffic::Carried;

/// The whole run.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    /// Always true: a run in which something failed has no report.
    intact: bool,
    nodes: [&'static str; 3],
    start_ms: u64,
    /// The list of nodes from the controller.
    listed: Typed,
    /// The output of the command that plans the change.
    planned: Typed,
    traffic: Vec<Carried>,
    change: Changed,
    seconds: f64,
}

impl Report {
    pub(super) fn new(
        started: Duration,
        took: Duration,
        [listed, planned]: [Typed; 2],
        traffic: Vec<Carried>,
        change: Changed,
    ) -> Self {
        let start_ms = u64::try_from(started.as_millis()).unwrap_or(u64::MAX);
        Self { intact: true, nodes: NODES, start_ms, listed, planned, traffic, change, seconds: took.as_secs_f64() }
    }

    pub(super) fn json(&self) -> anyhow::Result<String> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }

    /// Renders the text. With `is_kept` the overlay keeps running, and commands to try follow.
    pub(super) fn text(&self, paint: Paint, is_kept: bool) -> String {
        let again = match is_kept {
            true => String::new(),
            false => paint.dim("  Keep it up, and change it yourself: hermes demo --keep\n"),
        };
        [self.picture(paint), self.traffic(paint), self.change(paint), self.verdict(paint) + &again].join("\n")
    }

    fn picture(&self, paint: Paint) -> String {
        let [laptop, router, server] = self.nodes.map(|node| paint.bold(node));
        format!(
            "\n                         {controller} ╌╌▶ all three\n  \
             your programs ──▶ {laptop} ══▶ {router} ══▶ {server} ──▶ services\n\n{}\n{}",
            paint.dim(&format!(
                "  Four processes, ready in {} ms: a controller, and nodes that enrolled with a token each and got\n  \
                 from it who they are and what to do. ══▶ is HTTP/2 with mutual TLS.\n  \
                 Names in capitals exist in the overlay only: no DNS knows them.\n",
                self.start_ms
            )),
            typed(paint, &self.listed),
            controller = paint.bold("controller"),
        )
    }

    fn traffic(&self, paint: Paint) -> String {
        let columns = [
            ("", Align::Left),
            ("A PROGRAM ASKS FOR", Align::Left),
            ("WHICH TRAVELS AS", Align::Left),
            ("BACK AND INTACT", Align::Right),
            ("ROUND TRIP", Align::Right),
        ];
        let rows: Vec<Vec<String>> = self.traffic.iter().map(row).collect();
        table(paint, &columns, &rows)
    }

    fn change(&self, paint: Paint) -> String {
        let change = &self.change;
        format!(
            "  {}: {} after the command\n  \
             SHOP was another server, and NEWS a new name. {} requests were sent meanwhile, {} failed;\n  \
             an upload and a TCP connection continued.\n\n{}\n{}",
            paint.bold("The overlay changed under load"),
            paint.bold(&format!("{:.0} ms", change.in_effect_ms)),
            grouped(change.requests as u64),
            change.failed,
            typed(paint, &self.planned),
            typed(paint, &change.applied),
        )
    }

    fn verdict(&self, paint: Paint) -> String {
        let total = bytes(self.traffic.iter().map(|carried| carried.bytes).sum());
        let all = paint.good(&format!("✓ {total} arrived intact, nothing failed"));
        format!("  {all} {}\n", paint.dim(&format!("({:.1} s)", self.seconds)))
    }
}

fn row(carried: &Carried) -> Vec<String> {
    vec![
        carried.kind.to_owned(),
        carried.asked_for.clone(),
        carried.carried_as.to_owned(),
        format!("{} {}", grouped(carried.exchanges), carried.unit),
        format!("{:.2} ms", carried.median_us as f64 / 1e3),
    ]
}

/// A command, and its output.
fn typed(paint: Paint, typed: &Typed) -> String {
    let said: String = typed.said.lines().map(|line| format!("    {line}\n")).collect();
    format!("    {}\n{}", paint.bold(&format!("$ {}", typed.command)), paint.dim(&said))
}

/// Commands to try by hand while the overlay is up.
pub(super) fn to_try(overlay: &Overlay, paint: Paint) -> String {
    let ports = overlay.ports;
    let (apps, database, call) = (ports.apps, ports.database, ports.call);
    let directory = overlay.directory().display();
    let own = std::env::current_exe().ok();
    let own = own.as_deref().and_then(std::path::Path::parent).unwrap_or(std::path::Path::new("."));
    let router = overlay.document(NODES[1]);
    let router = router.strip_prefix(overlay.directory()).unwrap_or(&router).display();
    let groups = [
        (
            "Type the following commands in another terminal",
            vec![format!("cd {directory} && export PATH={}:$PATH && unset HERMES_OPERATOR", own.display())],
        ),
        (
            "Ask for names that no DNS knows",
            vec![
                format!("curl -x http://127.0.0.1:{apps} http://SHOP/"),
                format!("curl -x http://127.0.0.1:{apps} --cacert {}.pem https://BANK/", super::ca::BANK_CA),
            ],
        ),
        (
            "Speak TCP and UDP to the echoes behind DB:5432 and CALL:5004",
            vec![
                format!("bash -c 'exec 3<>/dev/tcp/127.0.0.1/{database}; echo hello >&3; head -n1 <&3'"),
                format!("bash -c 'exec 3<>/dev/udp/127.0.0.1/{call}; echo hello >&3; head -n1 <&3'"),
            ],
        ),
        (
            "Look at the overlay, as its operator",
            ["hermes node list", "hermes get", "hermes get Service/SHOP", "hermes node exec-config router"]
                .map(str::to_owned)
                .to_vec(),
        ),
        (
            "Change it: nodes follow while programs go on",
            vec![
                overlay.edit_back(),
                format!("hermes diff -f {DOCUMENTS}"),
                format!("hermes apply -f {DOCUMENTS}"),
                format!("curl -x http://127.0.0.1:{apps} http://SHOP/whoami"),
            ],
        ),
        (
            "See what a node decides, and why",
            vec![format!(
                "hermes explain --config {router} --authority SHOP \
                 --certificate spiffe://{OVERLAY}/node/{} --certificate spiffe://{OVERLAY}/user/alice",
                NODES[0]
            )],
        ),
        (
            "Look inside (also /metrics, /config, /readyz)",
            NODES
                .iter()
                .zip(ports.admin)
                .map(|(node, port)| format!("curl http://127.0.0.1:{port}/sessions   # {node}"))
                .collect(),
        ),
    ];
    let mut text = String::new();
    for (heading, commands) in groups {
        text += &format!("\n  {}\n", paint.bold(heading));
        commands.iter().for_each(|command| text += &format!("    {command}\n"));
    }
    text + &format!("\n  Documents and logs are in {directory}. Ctrl-C ends the demo.\n")
}

/// Writes to standard output. A closed pipe is not an error.
pub(super) fn print(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}
