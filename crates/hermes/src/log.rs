//! The log of the program, on standard error.
//!
//! In: events of all parts of the program, and a filter. Out: lines, written by a thread of its own, so that a stalled
//! reader never delays traffic. Lines beyond the queue are lost and counted. Sessions are not logged here but in the
//! access log.

use tracing_appender::non_blocking::{ErrorCounter, NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

/// The maximum number of lines in the queue.
const LINES: usize = 4096;
/// The default filter of libraries. h2 warns about single frames of a peer, which could fill the disk with them. QUIC
/// warns about single packets, in terms of its implementation; Hermes itself logs connections whose packets get lost.
const QUIET: &str = "h2=error,quinn_udp=error";

/// The running log.
pub(crate) struct Log {
    lost: ErrorCounter,
    /// The guard's drop waits briefly until all lines are written.
    _writer: WorkerGuard,
}

impl Log {
    /// Starts the log. All later events go there.
    ///
    /// # Errors
    /// The filter is invalid.
    pub(crate) fn start(filter: &str) -> anyhow::Result<Self> {
        let filter = parse(filter)?;
        let (lines, writer) =
            NonBlockingBuilder::default().buffered_lines_limit(LINES).thread_name("log").finish(std::io::stderr());
        let lost = lines.error_counter();
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(lines).with_target(false).init();
        Ok(Self { lost, _writer: writer })
    }

    /// Returns a function that counts the lines lost so far.
    pub(crate) fn lost(&self) -> impl Fn() -> usize + Send + Sync + 'static {
        let lost = self.lost.clone();
        move || lost.dropped_lines()
    }
}

/// Parses a level, or levels of parts of the program (`info,hermes_proxy=debug`).
fn parse(filter: &str) -> anyhow::Result<EnvFilter> {
    let is_level = |part: &str| !part.is_empty() && part.parse::<LevelFilter>().is_ok();
    let is_known = |part: &str| part.contains('=') || is_level(part);
    if let Some(unknown) = filter.split(',').map(str::trim).find(|part| !is_known(part)) {
        // The filter would treat the word as the name of a module and silence all others.
        anyhow::bail!("--log {unknown:?} is no level; write off, error, warn, info, debug or trace");
    }
    EnvFilter::try_new(format!("{QUIET},{filter}"))
        .map_err(|_| anyhow::anyhow!("--log {filter:?} is no filter; write a level, or PART=LEVEL,..."))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// The targets must match the names that the libraries use.
    #[test]
    fn libraries_are_quiet_until_they_are_asked() {
        let said = |filter: &str| parse(filter).unwrap().to_string();
        for part in ["h2", "quinn_udp"] {
            assert!(said("debug").split(',').any(|known| known == format!("{part}=error")), "{}", said("debug"));
            let asked = format!("{part}=trace");
            let loud = said(&format!("info,{asked}"));
            assert!(loud.contains(&asked) && !loud.contains(&format!("{part}=error")), "{loud}");
        }
    }

    #[test]
    fn levels_are_taken_and_near_misses_refused() {
        for good in ["info", "WARN", "off", "info,hermes_proxy=debug", "warn,h2=trace"] {
            assert!(parse(good).is_ok(), "{good}");
        }
        for bad in ["warning", "verbose", "", "info,hermes", "h2=loud"] {
            let words = parse(bad).err().map(|error| format!("{error:#}")).unwrap_or_default();
            assert!(words.contains("--log"), "{bad}: {words}");
        }
    }
}
