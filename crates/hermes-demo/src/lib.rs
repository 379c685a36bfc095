//! `hermes demo`: a complete overlay on this machine, real traffic through it, and a report.
//!
//! In: this binary and loopback. Out: a short report, or JSON; exit status 0 only if everything arrived intact and
//! nothing failed. A controller and three nodes run as separate processes; the services and their clients run in this
//! process. Never: root, a fixed port, a file outside of one temporary directory, or anything left behind.

mod bar_chart;
mod ca;
mod case;
mod change;
mod child_guard;
mod client;
mod command;
mod content;
mod interrupt;
mod ip;
mod machine_row;
mod namespace;
mod ndn;
mod origins;
mod overlay;
mod pep;
mod picture_file;
mod ports;
mod program;
mod relay;
mod report;
mod terminal;
mod traffic;
mod unstable;
mod video;

pub use command::Demo;

use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, ensure};

use ca::{Authority, BANK_CA, Proof};
use interrupt::Interrupt;
use origins::Origins;
use overlay::{DOCUMENTS, Overlay};
use ports::loopback;
use report::Report;
use terminal::{Paint, Progress};
use traffic::Entrances;

/// Output options of the demo.
#[derive(Clone, Copy)]
pub(crate) struct Options {
    /// Keeps the overlay running and prints commands to try.
    pub(crate) keep: bool,
    /// JSON instead of a table.
    pub(crate) json: bool,
}

/// Runs the demo.
///
/// # Errors
/// The step or the node that failed.
pub(crate) fn run(options: Options) -> anyhow::Result<ExitCode> {
    // The runtime has one thread, the main one: the leash ends child processes when the thread that started them ends.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut interrupt = Interrupt::listen()?;
        let mut stage = Stage::default();
        let cut_short = tokio::select! {
            biased;
            status = interrupt.next() => Ok(Some(status)),
            shown = stage.show(options) => match shown {
                Ok(()) => Ok(None),
                Err(error) => Err(stage.explain(&error).await),
            },
        };
        if let (Ok(None), true, Some(overlay)) = (&cut_short, options.keep, &stage.overlay) {
            report::print(&report::to_try(overlay, Paint::for_stdout()));
            interrupt.next().await;
        }
        stage.clear().await;
        Ok(cut_short?.unwrap_or(ExitCode::SUCCESS))
    })
}

/// The running overlay. It is stored outside of the future, which a signal may cancel, so that it is always stopped in
/// order.
#[derive(Default)]
struct Stage {
    overlay: Option<Overlay>,
    origins: Option<Origins>,
}

impl Stage {
    async fn show(&mut self, options: Options) -> anyhow::Result<()> {
        let begun = Instant::now();
        let progress = Progress::begin();
        progress.step("a controller starts, and three nodes enrol: alice-laptop, router, server");
        let directory = tempfile::Builder::new().prefix("hermes-demo-").tempdir();
        let directory = directory.context("no temporary directory can be made")?;
        let bank_ca = Authority::new(directory.path(), BANK_CA)?;
        let bank = bank_ca.issue("bank", &Proof::Server)?;
        let bank = hermes_net::tls::CertifiedKey::load(&bank.cert, &bank.key)?;
        let bank_tls =
            hermes_net::tls::server_config(&bank, &hermes_net::tls::ClientCertificates::None, &[b"http/1.1"])?;
        let origins = self.origins.insert(Origins::start(bank_tls).await.context("the services do not start")?);
        let overlay = self.overlay.insert(Overlay::start(directory, origins).await?);
        let started = begun.elapsed();
        let listed = overlay.verb(&["node", "list"]).await?;

        let entrances = Entrances {
            apps: loopback(overlay.ports.apps),
            database: loopback(overlay.ports.database),
            call: loopback(overlay.ports.call),
            bank_ca: &bank_ca.certificate,
        };
        let traffic = traffic::drive(&entrances, &progress).await?;
        progress.step("the overlay changes under load");
        overlay.edit()?;
        let planned = overlay.verb(&["diff", "-f", DOCUMENTS]).await?;
        let apply = async || overlay.verb(&["apply", "-f", DOCUMENTS]).await;
        let changed = change::under_load(entrances.apps, entrances.database, apply).await;
        let changed = changed.context("changing the overlay under load failed")?;
        let news = client::Client::connect(entrances.apps).await?.get("http://NEWS/whoami").await;
        ensure!(news.context("the new name NEWS")? == "blue", "another server than NEWS answered");
        if !options.keep {
            progress.step("all of it ends");
            overlay.stop().await;
        }
        drop(progress);
        let report = Report::new(started, begun.elapsed(), [listed, planned], traffic, changed);
        report::print(&if options.json { report.json()? } else { report.text(Paint::for_stdout(), options.keep) });
        Ok(())
    }

    /// Adds the last log lines of the processes to the error.
    async fn explain(&mut self, error: &anyhow::Error) -> anyhow::Error {
        let words = match &mut self.overlay {
            Some(overlay) => format!("\n{}", overlay.last_words().await),
            None => String::new(),
        };
        anyhow::anyhow!("demo: {error:#}{words}")
    }

    async fn clear(&mut self) {
        if let Some(overlay) = &mut self.overlay {
            overlay.stop().await;
        }
        self.overlay = None;
        self.origins = None;
    }
}
