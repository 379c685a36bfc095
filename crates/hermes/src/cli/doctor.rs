//! `hermes doctor`: what this machine lacks, and what to do about it.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;

use crate::document;

/// Checks this machine: descriptors, ports, certificates and clock of a document.
#[derive(Debug, Parser)]
pub(super) struct Doctor {
    /// Also checks what this node document needs.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

#[derive(Default)]
struct Report {
    text: String,
    faults: usize,
}

impl Report {
    fn good(&mut self, what: &str, found: &str) {
        // Writing to a String cannot fail.
        let _ = writeln!(self.text, "ok    {what}: {found}");
    }

    fn bad(&mut self, what: &str, found: &str, remedy: &str) {
        self.faults += 1;
        let _ = writeln!(self.text, "FAIL  {what}: {found}. {remedy}");
    }
}

impl Doctor {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let mut report = Report::default();
        descriptors(&mut report);
        resolver(&mut report);
        if let Some(config) = &self.config {
            of_document(&mut report, config)?;
        }
        super::print(&report.text)?;
        Ok(if report.faults == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

fn descriptors(report: &mut Report) {
    let limit = hermes_net::own::raise_descriptor_limit(1 << 20);
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

fn of_document(report: &mut Report, config: &Path) -> anyhow::Result<()> {
    let checked = match document::read(config)? {
        Ok(checked) => checked,
        Err(problems) => {
            let remedy = format!("Run `hermes check {}`", config.display());
            report.bad("document", &format!("{} problems", problems.len()), &remedy);
            return Ok(());
        }
    };
    report.good("document", &format!("node {}", checked.snapshot.node));
    for listener in &checked.snapshot.listeners {
        let is_udp = matches!(listener.protocol, hermes_model::snapshot::ListenerProtocol::Udp { .. });
        let free = if is_udp {
            hermes_net::udp::probe_unused(listener.bind)
        } else {
            hermes_net::tcp::probe_unused(listener.bind)
        };
        let what = format!("listener {} on {}", listener.name, listener.bind);
        match free {
            Ok(()) => report.good(&what, "free"),
            Err(error) => report.bad(
                &what,
                &error.to_string(),
                "Stop whoever uses the address, choose another, or run with the privilege to bind it",
            ),
        }
    }
    match hermes_proxy::Generation::build(std::sync::Arc::new(checked.snapshot), None) {
        Ok(_) => report.good("certificates", "all load"),
        Err(faults) => {
            for fault in faults {
                report.bad(&fault.path, &fault.reason, "Put the file in place, or correct the document");
            }
        }
    }
    Ok(())
}
