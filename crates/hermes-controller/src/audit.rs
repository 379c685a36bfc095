//! The audit log: who changed what, and who was refused, one line of JSON each.
//!
//! In: what was done, or asked for and refused. Out: lines in a file of the controller's directory, and on its log.
//! Never: a secret; nor more lines than a disk can take, whatever anybody asks: refusals have a rate, what is left out is counted,
//! and the file is begun anew when it is long, with the one before beside it.

use std::fs::File;
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::Serialize;

/// Its name in the directory.
const FILE: &str = "audit.jsonl";
/// The file is begun anew at so many bytes.
const LONGEST: u64 = 64 << 20;
/// So many refusals are written in a second, and no more.
const REFUSALS: u32 = 50;
const SECOND: Duration = Duration::from_secs(1);
/// A reason is cut off here.
const MOST_SAID: usize = 2048;

/// Something that was asked for.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Event<'a> {
    /// `apply`, `delete`, `token`, `operator`, `enrol`, `renew`, `follow`, `revoke`, `finish`, `cancel`, `take-back`, `backup`, `ask`, `operator-renew`,
    /// `dismiss`, or `authority-` and `rotate`, `import`, `switch`, `finish`, `cancel`, `show`; or `connect`, of who shows a certificate that
    /// is not taken.
    pub what: &'a str,
    /// Who, as far as a certificate proved that: `operator/NAME`, `provider/PROVIDER/NAME`, `node/NAME`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub by: Option<&'a str>,
    /// From where.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<SocketAddr>,
    /// The node or token that it was about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub about: Option<String>,
    /// The revision that came of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub revision: Option<u64>,
    /// Documents that were changed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub documents: Vec<String>,
    /// Why it was refused. `None`: it was done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
}

/// Where events go.
pub struct Audit {
    path: PathBuf,
    state: Mutex<State>,
}

struct State {
    file: File,
    length: u64,
    /// Refusals of this second, and those that were left out since the last line.
    since: Instant,
    refusals: Refusals,
    left_out: u64,
}

/// Of this second: those of whom a certificate has proven, and of others, whose flood hides nothing of the former.
#[derive(Default)]
struct Refusals {
    known: u32,
    others: u32,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Line<'a> {
    /// Milliseconds since 1970.
    at: u64,
    #[serde(flatten)]
    event: &'a Event<'a>,
    /// Refusals before this line that were not written.
    #[serde(skip_serializing_if = "Option::is_none")]
    left_out: Option<u64>,
}

impl Audit {
    /// Goes on with the file in this directory.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn open(directory: &Path) -> io::Result<Self> {
        let path = directory.join(FILE);
        let file = hermes_net::file::append(&path, 0o600)?;
        let length = file.metadata()?.len();
        let (since, refusals) = (Instant::now(), Refusals::default());
        let state = State { file, length, since, refusals, left_out: 0 };
        Ok(Self { path, state: Mutex::new(state) })
    }

    /// Writes a line; what cannot be written is on the controller's log nevertheless.
    pub fn tell(&self, mut event: Event<'_>) {
        let (what, by) = (event.what, event.by.unwrap_or("-"));
        if let Some(refused) = &mut event.refused {
            refused.truncate(refused.floor_char_boundary(MOST_SAID));
            *refused = visible(refused);
        }
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.since.elapsed() >= SECOND {
            (state.since, state.refusals) = (Instant::now(), Refusals::default());
        }
        if let Some(refused) = &event.refused {
            let Refusals { known, others } = &mut state.refusals;
            let count = if by == "-" { others } else { known };
            *count += 1;
            if *count > REFUSALS {
                state.left_out += 1;
                return;
            }
            tracing::warn!(what, by, from = ?event.from, about = event.about, "refused: {refused}");
        } else {
            tracing::info!(what, by, about = event.about, revision = event.revision, "done");
        }
        if let Err(error) = state.write(&self.path, &event) {
            tracing::error!(file = %self.path.display(), "the audit log cannot be written: {error}");
        }
    }
}

/// Without what makes of one line several, or moves a terminal's cursor. Others write it, and people read it.
pub(crate) fn visible(text: &str) -> String {
    let one = |character: char| match character {
        '\n' | '\t' => ' ',
        character if character.is_control() => '\u{fffd}',
        character => character,
    };
    text.chars().map(one).collect()
}

impl State {
    fn write(&mut self, path: &Path, event: &Event<'_>) -> io::Result<()> {
        if self.length >= LONGEST {
            std::fs::rename(path, path.with_extension("jsonl.old"))?;
            (self.file, self.length) = (hermes_net::file::append(path, 0o600)?, 0);
        }
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let at = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
        let left_out = Some(std::mem::take(&mut self.left_out)).filter(|left_out| *left_out > 0);
        let mut line = serde_json::to_vec(&Line { at, event, left_out })?;
        line.push(b'\n');
        self.file.write_all(&line)?;
        self.length += line.len() as u64;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::{Audit, Event, LONGEST, REFUSALS};

    fn refused(number: u32) -> Event<'static> {
        Event { what: "enrol", refused: Some(format!("{number}")), ..Event::default() }
    }

    #[test]
    fn who_asks_without_end_fills_no_disk() {
        let directory = tempfile::tempdir().unwrap();
        let audit = Audit::open(directory.path()).unwrap();
        (0..100_000).for_each(|number| audit.tell(refused(number)));
        // What is done is always written.
        audit.tell(Event { what: "apply", by: Some("operator/root"), revision: Some(7), ..Event::default() });
        let text = std::fs::read_to_string(directory.path().join("audit.jsonl")).unwrap();
        let lines: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        // At most those of the seconds that it took.
        assert!(lines.len() > REFUSALS as usize && lines.len() < 20_000, "{}", lines.len());
        let told = lines.iter().filter(|line| line["what"] == "enrol").count() as u64;
        let left_out: u64 = lines.iter().filter_map(|line| line["left-out"].as_u64()).sum();
        assert_eq!((told + left_out, &lines.last().unwrap()["revision"]), (100_000, &7.into()));
    }

    #[test]
    fn a_flood_of_nobody_hides_nothing_of_who_is_known_and_nobody_writes_lines_of_their_own() {
        let directory = tempfile::tempdir().unwrap();
        let audit = Audit::open(directory.path()).unwrap();
        (0..10 * REFUSALS).for_each(|number| audit.tell(refused(number)));
        audit.tell(Event { by: Some("provider/acme/joe"), ..refused(7) });
        let text = std::fs::read_to_string(directory.path().join("audit.jsonl")).unwrap();
        assert!(text.contains("provider/acme/joe"));
        assert_eq!(super::visible("one\ntwo\u{1b}[2J\rthree"), "one two\u{fffd}[2J\u{fffd}three");
    }

    #[test]
    fn a_long_file_is_begun_anew() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("audit.jsonl");
        std::fs::File::create(&file).unwrap().set_len(LONGEST).unwrap();
        let audit = Audit::open(directory.path()).unwrap();
        audit.tell(refused(1));
        assert!(std::fs::metadata(&file).unwrap().len() < 200);
        assert_eq!(std::fs::metadata(directory.path().join("audit.jsonl.old")).unwrap().len(), LONGEST);
    }
}
