//! `hermes doctor`: diagnoses this machine, with remedies.
//!
//! In: this machine, and a document. Out: findings, each with a remedy if one is needed. Never: a change. Nothing is
//! created or written, and a port is bound only for the check.

mod layer3;
mod running;

use std::fmt::Write as _;
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::SystemTime;

use clap::Parser;
use hermes_model::Snapshot;
use hermes_model::snapshot::{AccessLog, DispatchMode, PortKind};
use hermes_net::dispatch::{Groups, Table};
use hermes_proxy::Certificate;
use nix::unistd::{AccessFlags, access};

use self::layer3::Needs;
use self::running::Running;
use crate::document;

/// Diagnose this machine: file descriptors, DNS, layer-3 privileges, and the needs of a node document
#[derive(Debug, Parser)]
pub(super) struct Doctor {
    /// Also check the addresses, access log and certificates of this node document
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print one JSON object for each finding
    #[arg(long)]
    json: bool,
}

#[derive(Default)]
struct Report {
    json: bool,
    text: String,
    faults: usize,
}

impl Report {
    // Writing to a String cannot fail.
    fn good(&mut self, what: &str, found: &str) {
        let _ = if self.json {
            let line = serde_json::json!({ "level": "ok", "check": what, "found": found });
            writeln!(self.text, "{line}")
        } else {
            writeln!(self.text, "ok    {what}: {found}")
        };
    }

    fn bad(&mut self, what: &str, found: &str, remedy: &str) {
        self.faults += 1;
        self.lacking("FAIL", "error", what, found, remedy);
    }

    /// Adds a finding about something missing that the document does not need.
    fn note(&mut self, what: &str, found: &str, remedy: &str) {
        self.lacking("note", "note", what, found, remedy);
    }

    fn lacking(&mut self, word: &str, level: &str, what: &str, found: &str, remedy: &str) {
        let _ = if self.json {
            let line = serde_json::json!({ "level": level, "check": what, "found": found, "remedy": remedy });
            writeln!(self.text, "{line}")
        } else {
            writeln!(self.text, "{word}  {what}: {found}. {remedy}")
        };
    }
}

impl Doctor {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let mut report = Report { json: self.json, ..Report::default() };
        descriptors(&mut report);
        resolver(&mut report);
        let needs = match &self.config {
            Some(config) => of_document(&mut report, config)?,
            None => Needs::default(),
        };
        needs.inspect(&mut report);
        super::print(&report.text)?;
        Ok(if report.faults == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

fn descriptors(report: &mut Report) {
    let limit = hermes_net::host::raise_descriptor_limit(1 << 20);
    if limit >= 16_000 {
        report.good("open files", &limit.to_string());
    } else {
        report.bad(
            "open files",
            &limit.to_string(),
            "Raise the hard limit (`ulimit -Hn`, LimitNOFILE= in systemd) to 16000 or more",
        );
    }
}

fn resolver(report: &mut Report) {
    match std::fs::read_to_string("/etc/resolv.conf") {
        Ok(text) if text.lines().any(|line| line.trim_start().starts_with("nameserver")) => {
            report.good("DNS", "/etc/resolv.conf names a server");
        }
        _ => report.bad(
            "DNS",
            "/etc/resolv.conf names no server",
            "Only addresses and /etc/hosts will resolve; overlay names need no DNS",
        ),
    }
}

/// Checks the document, and returns its other needs.
fn of_document(report: &mut Report, config: &Path) -> anyhow::Result<Needs> {
    let snapshot = match document::read(config)? {
        Ok(checked) => Arc::new(checked.snapshot),
        Err(problems) => {
            let remedy = format!("Run `hermes check {}`", config.display());
            report.bad("document", &super::counted(problems.len(), "problem"), &remedy);
            return Ok(Needs::default());
        }
    };
    report.good("document", &format!("node {}", snapshot.node));
    let running = snapshot.admin.and_then(|admin| Running::find(admin, &snapshot.node));
    addresses(report, &snapshot, running.as_ref());
    access_log(report, &snapshot.access_log);
    certificates(report, &snapshot);
    dispatch(report, snapshot.dispatch.mode);
    Ok(Needs::of(&snapshot, running.as_ref()))
}

/// Checks whether the kernel can choose workers as the document says. Otherwise it hashes, which is no fault.
fn dispatch(report: &mut Report, mode: DispatchMode) {
    if !matches!(mode, DispatchMode::Directed | DispatchMode::RoundRobin) {
        return;
    }
    match Table::shared(1, Groups::of(1)) {
        Ok(_) => report.good("dispatch", "the kernel accepts a table of workers"),
        Err(error) => report.note(
            "dispatch",
            &format!("the kernel accepts no table of workers, and hashes connections onto them: {error}"),
            "Run the node with CAP_BPF and CAP_NET_ADMIN (`hermes install --print systemd --directed`), on Linux 5.12 or later",
        ),
    }
}

/// Checks the addresses. If the document's own node is running, addresses in use belong to it.
fn addresses(report: &mut Report, snapshot: &Snapshot, running: Option<&Running>) {
    if let Some(admin) = snapshot.admin {
        let has = running.is_some_and(|node| node.has_admin(admin));
        address(report, &format!("admin on {admin}"), hermes_net::tcp::probe_unused(admin), has);
    }
    for listener in &snapshot.listeners {
        let Some(bind) = listener.bind else { continue };
        for kind in listener.ports() {
            let free = match kind {
                PortKind::Tcp => hermes_net::tcp::probe_unused(bind),
                PortKind::Udp => hermes_net::udp::probe_unused(bind),
            };
            let has = running.is_some_and(|node| node.listens(bind, *kind));
            let and = if listener.ports().len() > 1 && *kind == PortKind::Udp { ", by UDP" } else { "" };
            address(report, &format!("listener {} on {bind}{and}", listener.name), free, has);
        }
    }
}

fn address(report: &mut Report, what: &str, free: io::Result<()>, running_has_it: bool) {
    let Err(error) = free else { return report.good(what, "free") };
    if error.kind() == io::ErrorKind::AddrInUse && running_has_it {
        return report.good(what, "in use by the running node");
    }
    report.bad(what, &error.to_string(), hermes_net::host::bind_remedy(&error));
}

fn access_log(report: &mut Report, log: &AccessLog) {
    let AccessLog::File(path) = log else { return };
    let shown = path.display();
    match can_append(path) {
        Ok(found) => report.good("access log", &format!("{shown}: {found}")),
        Err((fault, remedy)) => report.bad("access log", &format!("{shown}: {fault}"), &remedy),
    }
}

/// Checks what the node would find, without creating the file. Otherwise returns the fault and its remedy.
fn can_append(path: &Path) -> Result<&'static str, (String, String)> {
    // A pipe without a reader must not block the check.
    let append = |path| std::fs::OpenOptions::new().append(true).custom_flags(nix::libc::O_NONBLOCK).open(path);
    let error = match append(path) {
        Ok(_) => return Ok("can be written"),
        Err(error) => error,
    };
    if error.kind() != io::ErrorKind::NotFound {
        return Err((error.to_string(), "Let the node's user write to it, or name another file".to_owned()));
    }
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let shown = directory.display();
    if !directory.is_dir() {
        return Err((
            format!("directory {shown} does not exist"),
            "Make the directory, or name another file".to_owned(),
        ));
    }
    match access(directory, AccessFlags::W_OK | AccessFlags::X_OK) {
        Ok(()) => Ok("can be made"),
        Err(error) => Err((
            format!("cannot create files in {shown}: {}", io::Error::from(error)),
            "Let the node's user write to the directory, or name another file".to_owned(),
        )),
    }
}

fn certificates(report: &mut Report, snapshot: &Arc<Snapshot>) {
    let named = document::files(snapshot);
    match hermes_proxy::Generation::build(snapshot.clone(), None) {
        Ok(_) if named.is_empty() => {}
        Ok(generation) => {
            report.good("certificates", "all load");
            generation.certificates().iter().for_each(|certificate| time_left(report, certificate));
        }
        Err(faults) => {
            for fault in faults {
                report.bad(&fault.path, &fault.reason, remedy(&fault.reason, &named));
            }
        }
    }
}

fn time_left(report: &mut Report, certificate: &Certificate) {
    match certificate.left(SystemTime::now()) {
        Ok(left) => report.good(&certificate.path, &format!("good for {} days", left.as_secs() / 86_400)),
        Err(since) => {
            let found = format!("over for {} days", since.as_secs() / 86_400);
            report.bad(&certificate.path, &found, "Renew it, or set this machine's clock");
        }
    }
}

/// Returns the remedy for a fault of the named file, or of the files together.
fn remedy(reason: &str, files: &[(String, &Path)]) -> &'static str {
    let file = files.iter().map(|(_, file)| *file).find(|file| reason.contains(&*file.to_string_lossy()));
    match file.map(std::fs::File::open) {
        Some(Err(error)) if error.kind() == io::ErrorKind::NotFound => "Put the file in place, or correct the document",
        Some(Err(_)) => "Let the node's user read the file",
        _ => "Issue a certificate that fits the document, or correct the document",
    }
}
