//! What the program says of itself, on stderr.
//!
//! In: events of every part of the program, and a filter. Out: lines, written by a thread of its own: whoever reads
//! them may stall, and traffic goes on. Lines beyond the queue are lost, and counted. Never: what sessions did, which
//! is the access log's.

use tracing_appender::non_blocking::{ErrorCounter, NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

/// How many lines may wait.
const LINES: usize = 4096;
/// What libraries say by themselves, unless the filter asks for it: HTTP/2's warnings are about single frames of a peer,
/// who could fill the disk with them, and QUIC's about single packets, in words for programmers. What becomes of a
/// connection whose packets find no way we say ourselves.
const QUIET: &str = "h2=error,quinn_udp=error";

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
        let filter = parse(filter)?;
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

/// A level, or levels of parts of the program (`info,hermes_proxy=debug`).
fn parse(filter: &str) -> anyhow::Result<EnvFilter> {
    let is_level = |part: &str| !part.is_empty() && part.parse::<LevelFilter>().is_ok();
    let is_known = |part: &str| part.contains('=') || is_level(part);
    if let Some(unknown) = filter.split(',').map(str::trim).find(|part| !is_known(part)) {
        // It would be taken for a part of the program, and all others would be quiet.
        anyhow::bail!("--log {unknown:?} is no level; write off, error, warn, info, debug or trace");
    }
    EnvFilter::try_new(format!("{QUIET},{filter}"))
        .map_err(|_| anyhow::anyhow!("--log {filter:?} is no filter; write a level, or PART=LEVEL,..."))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// As the libraries name themselves.
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
