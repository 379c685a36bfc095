//! What the program says of itself, on stderr.
//!
//! In: events of every part of the program, and a filter. Out: lines, written by a thread of its own: whoever reads
//! them may stall, and traffic goes on. Lines beyond the queue are lost, and counted. Never: what sessions did, which
//! is the access log's.

use anyhow::Context;
use tracing_appender::non_blocking::{ErrorCounter, NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::EnvFilter;

/// How many lines may wait.
const LINES: usize = 4096;
/// What the HTTP/2 library says by itself, unless the filter asks for it: its warnings are about single
/// frames of a peer, who could fill the disk with them.
const QUIET: &str = "h2=error";

/// The running log.
pub(crate) struct Log {
    lost: ErrorCounter,
    /// Its drop waits a moment until everything is written.
    _writer: WorkerGuard,
}

impl Log {
    /// Everything that is said from now on goes there.
    ///
    /// # Errors
    /// The filter is none.
    pub(crate) fn start(filter: &str) -> anyhow::Result<Self> {
        let filter =
            EnvFilter::try_new(format!("{QUIET},{filter}")).context("--log is no filter; try info or debug")?;
        let (lines, writer) =
            NonBlockingBuilder::default().buffered_lines_limit(LINES).thread_name("log").finish(std::io::stderr());
        let lost = lines.error_counter();
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(lines).with_target(false).init();
        Ok(Self { lost, _writer: writer })
    }

    /// Tells how many lines were lost so far.
    pub(crate) fn lost(&self) -> impl Fn() -> usize + Send + Sync + 'static {
        let lost = self.lost.clone();
        move || lost.dropped_lines()
    }
}
