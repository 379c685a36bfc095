//! The audit log: changes and refused requests with their subjects, one line of JSON each.
//!
//! In: actions, done or refused. Out: lines in files of the controller's directory, and in its log.
//! Never: a secret, or more lines than a disk can take. Each subject has a rate limit, and events beyond it are only
//! counted. A long file is rotated, and one predecessor is retained.
//!
//! Operators, tokens and the controller itself share one file. Each provider has a separate file. Nodes share one more
//! file, and unauthenticated clients another. A flood of events in one file erases nothing in another.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde::Serialize;

/// The file for operators, tokens and the controller.
const FILE: &str = "audit.jsonl";
/// The size in bytes at which a file is rotated: the main file, and each other file.
const MAX_FILE: u64 = 64 << 20;
const MAX_OTHER_FILE: u64 = 16 << 20;
/// Rate limits of a subject: the burst in lines, and the lines a second. The first limit is for the main file, the
/// second for the other files.
const OPERATOR_LINES: (f64, f64) = (1000.0, 50.0);
const SUBJECT_LINES: (f64, f64) = (100.0, 2.0);
/// Maximum number of subjects of a file that have a separate rate limit. Further subjects share one limit.
const MAX_SUBJECTS: usize = 4096;
/// The maximum length of a reason, in bytes.
const MAX_REASON: usize = 2048;

/// An action that was requested.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Event<'a> {
    /// The action: `apply`, `delete`, `token`, `operator`, `operator-renew`, `dismiss`, `enrol`, `renew`, `follow`,
    /// `revoke`, `finish`, `cancel`, `roll-back`, `backup`, `ask`, `settle`, `recall`, `confirm`, or `ca-` with
    /// `rotate`, `import`, `switch`, `finish`, `cancel` or `show`. `connect` records a client certificate that was
    /// rejected.
    pub what: &'a str,
    /// The subject, as far as a certificate proves it: `operator/NAME`, `provider/PROVIDER/NAME`, `node/NAME`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub by: Option<&'a str>,
    /// The address of the client.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<SocketAddr>,
    /// The node or token that the action concerns.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub about: Option<String>,
    /// The revision that the action created.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub revision: Option<u64>,
    /// Documents that were changed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub documents: Vec<String>,
    /// The reason for the refusal; `None` if the action was not refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
    /// The reason why the outcome is unknown; `None` if it is known. An event `settle` with the same revision follows
    /// once the outcome is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unknown: Option<String>,
}

/// The audit log of one controller.
pub struct Audit {
    directory: PathBuf,
    /// Open files by name.
    files: Mutex<HashMap<String, LogFile>>,
    left_out: AtomicU64,
}

/// A file of the audit log.
struct LogFile {
    path: PathBuf,
    file: File,
    length: u64,
    max_length: u64,
    /// The last line is truncated, as after a write to a full disk.
    is_cut: bool,
    subjects: HashMap<String, Bucket>,
    /// Number of events since the last line that were not written.
    left_out: u64,
}

/// A token bucket: the lines that a subject may write now.
struct Bucket {
    lines: f64,
    at: Instant,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct AuditRecord<'a> {
    /// Milliseconds since 1970.
    at: u64,
    #[serde(flatten)]
    event: &'a Event<'a>,
    /// Number of events before this line that were not written.
    #[serde(skip_serializing_if = "Option::is_none")]
    left_out: Option<u64>,
}

/// Returns the name of the file for an event.
fn file_of(event: &Event<'_>) -> String {
    let by = event.by.unwrap_or_default();
    let is_done = event.refused.is_none() && event.unknown.is_none();
    if let Some(provider) = by.strip_prefix("provider/") {
        // A verified certificate has this name, and a name cannot contain a path.
        return format!("audit-provider-{}.jsonl", provider.split('/').next().unwrap_or_default());
    }
    match by {
        "" if !is_done => "audit-strangers.jsonl".to_owned(),
        // A successful enrolment is the use of a token, so it is in the file with the tokens.
        _ if by.starts_with("node/") && !(is_done && event.what == "enrol") => "audit-nodes.jsonl".to_owned(),
        _ => FILE.to_owned(),
    }
}

impl Audit {
    /// Opens the audit log in a directory.
    ///
    /// # Errors
    /// The main file cannot be written.
    pub fn open(directory: &Path) -> io::Result<Self> {
        let main = LogFile::open(directory, FILE)?;
        Ok(Self {
            directory: directory.to_owned(),
            files: Mutex::new(HashMap::from([(FILE.to_owned(), main)])),
            left_out: AtomicU64::new(0),
        })
    }

    /// Returns the number of events since the start that exceeded a rate limit and were not written.
    pub(crate) fn left_out(&self) -> u64 {
        self.left_out.load(Ordering::Relaxed)
    }

    /// Writes an event to its file and to the controller's log. If the subject exceeds its rate limit, the event is
    /// only counted.
    pub fn record(&self, mut event: Event<'_>) {
        let (what, by) = (event.what, event.by.unwrap_or("-"));
        for why in [&mut event.refused, &mut event.unknown].into_iter().flatten() {
            why.truncate(why.floor_char_boundary(MAX_REASON));
            *why = visible(why);
        }
        let name = file_of(&event);
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        let opened = match files.contains_key(&name) {
            true => Ok(()),
            false => LogFile::open(&self.directory, &name).map(|lines| _ = files.insert(name.clone(), lines)),
        };
        if let Err(error) = opened {
            tracing::error!(file = name, "audit log: cannot write: {error}");
        }
        let Some(lines) = files.get_mut(&name) else { return };
        if !lines.may_write(by, if name == FILE { OPERATOR_LINES } else { SUBJECT_LINES }) {
            lines.left_out += 1;
            self.left_out.fetch_add(1, Ordering::Relaxed);
            return;
        }
        match (&event.refused, &event.unknown) {
            (Some(why), _) => tracing::warn!(what, by, from = ?event.from, about = event.about, "refused: {why}"),
            (None, Some(why)) => tracing::warn!(what, by, from = ?event.from, about = event.about, "{why}"),
            (None, None) => tracing::info!(what, by, about = event.about, revision = event.revision, "done"),
        }
        if let Err(error) = lines.write(&event) {
            tracing::error!(file = %lines.path.display(), "audit log: cannot write: {error}");
        }
    }
}

/// Replaces control characters, which would split a line or move a terminal's cursor. Remote parties choose this text,
/// and people read it.
pub(crate) fn visible(text: &str) -> String {
    let one = |character: char| match character {
        '\n' | '\t' => ' ',
        character if character.is_control() => '\u{fffd}',
        character => character,
    };
    text.chars().map(one).collect()
}

impl LogFile {
    fn open(directory: &Path, name: &str) -> io::Result<Self> {
        let path = directory.join(name);
        let file = hermes_net::file::append(&path, 0o600)?;
        let length = file.metadata()?.len();
        let max_length = if name == FILE { MAX_FILE } else { MAX_OTHER_FILE };
        let is_cut = is_cut(&path, length);
        Ok(Self { path, file, length, max_length, is_cut, subjects: HashMap::new(), left_out: 0 })
    }

    /// Takes one line from the token bucket of a subject. Returns false if the bucket is empty.
    fn may_write(&mut self, by: &str, (burst, rate): (f64, f64)) -> bool {
        let now = Instant::now();
        let filled = |bucket: &Bucket| (bucket.lines + now.duration_since(bucket.at).as_secs_f64() * rate).min(burst);
        if self.subjects.len() >= MAX_SUBJECTS && !self.subjects.contains_key(by) {
            self.subjects.retain(|_, bucket| filled(bucket) < burst);
        }
        let by = if self.subjects.len() >= MAX_SUBJECTS && !self.subjects.contains_key(by) { "" } else { by };
        let bucket = self.subjects.entry(by.to_owned()).or_insert(Bucket { lines: burst, at: now });
        let lines = filled(bucket);
        let may = lines >= 1.0;
        *bucket = Bucket { lines: if may { lines - 1.0 } else { lines }, at: now };
        may
    }

    fn write(&mut self, event: &Event<'_>) -> io::Result<()> {
        if self.length >= self.max_length {
            std::fs::rename(&self.path, self.path.with_extension("jsonl.old"))?;
            (self.file, self.length) = (hermes_net::file::append(&self.path, 0o600)?, 0);
            self.is_cut = false;
        }
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let at = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
        let left_out = Some(self.left_out).filter(|left_out| *left_out > 0);
        let mut line = if self.is_cut { vec![b'\n'] } else { Vec::new() };
        serde_json::to_writer(&mut line, &AuditRecord { at, event, left_out })?;
        line.push(b'\n');
        let written = self.file.write_all(&line);
        match &written {
            Ok(()) => (self.length, self.is_cut, self.left_out) = (self.length + line.len() as u64, false, 0),
            Err(_) => {
                self.length = self.file.metadata().map_or(self.length, |about| about.len());
                (self.is_cut, self.left_out) = (is_cut(&self.path, self.length), self.left_out + 1);
            }
        }
        written
    }
}

/// Returns true if a file of this length does not end with a complete line, or cannot be read.
fn is_cut(path: &Path, length: u64) -> bool {
    let Some(from) = length.checked_sub(1) else { return false };
    let mut last = [0];
    let read = File::open(path).and_then(|file| file.read_exact_at(&mut last, from));
    read.is_err() || last != *b"\n"
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::path::Path;

    use super::{Audit, Event, MAX_FILE, SUBJECT_LINES};

    fn refused(number: u32) -> Event<'static> {
        Event { what: "enrol", refused: Some(format!("{number}")), ..Event::default() }
    }

    fn lines(directory: &Path, file: &str) -> Vec<serde_json::Value> {
        let text = std::fs::read_to_string(directory.join(file)).unwrap_or_default();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn who_asks_without_end_fills_no_disk() {
        let directory = tempfile::tempdir().unwrap();
        let audit = Audit::open(directory.path()).unwrap();
        (0..100_000).for_each(|number| audit.record(refused(number)));
        audit.record(Event { what: "apply", by: Some("operator/root"), revision: Some(7), ..Event::default() });
        let strangers = lines(directory.path(), "audit-strangers.jsonl");
        // The burst, and the lines of the seconds that the loop took.
        assert!(strangers.len() >= SUBJECT_LINES.0 as usize && strangers.len() < 1000, "{}", strangers.len());
        let main = lines(directory.path(), "audit.jsonl");
        assert_eq!((main.len(), &main[0]["revision"]), (1, &7.into()));
    }

    #[test]
    fn what_is_left_out_is_counted() {
        let directory = tempfile::tempdir().unwrap();
        let audit = Audit::open(directory.path()).unwrap();
        let more = SUBJECT_LINES.0 as u32 + 10;
        (0..more).for_each(|number| audit.record(Event { by: Some("node/a"), ..refused(number) }));
        audit.record(Event { by: Some("node/b"), ..refused(7) });
        let nodes = lines(directory.path(), "audit-nodes.jsonl");
        let left_out: u64 = nodes.iter().filter_map(|line| line["left-out"].as_u64()).sum();
        assert_eq!(nodes.len() as u64 + left_out, u64::from(more) + 1);
        assert_eq!(nodes.last().unwrap()["by"], "node/b");
    }

    #[test]
    fn a_providers_flood_of_changes_erases_nothing_of_others() {
        let directory = tempfile::tempdir().unwrap();
        let audit = Audit::open(directory.path()).unwrap();
        let by = |by| Event { what: "apply", by: Some(by), revision: Some(1), ..Event::default() };
        audit.record(by("operator/root"));
        audit.record(by("provider/bella/bob"));
        for _ in 0..100_000 {
            audit.record(by("provider/acme/joe"));
        }
        let acme = std::fs::metadata(directory.path().join("audit-provider-acme.jsonl")).unwrap().len();
        assert!(acme > 0 && acme < 1 << 20, "{acme}");
        assert_eq!(lines(directory.path(), "audit.jsonl").len(), 1);
        assert_eq!(lines(directory.path(), "audit-provider-bella.jsonl").len(), 1);
    }

    #[test]
    fn a_flood_of_nobody_hides_nothing_of_who_is_known_and_nobody_writes_lines_of_their_own() {
        let directory = tempfile::tempdir().unwrap();
        let audit = Audit::open(directory.path()).unwrap();
        (0..1000).for_each(|number| audit.record(refused(number)));
        audit.record(Event { by: Some("provider/acme/joe"), ..refused(7) });
        assert_eq!(lines(directory.path(), "audit-provider-acme.jsonl").len(), 1);
        assert_eq!(super::visible("one\ntwo\u{1b}[2J\rthree"), "one two\u{fffd}[2J\u{fffd}three");
    }

    #[test]
    fn a_line_that_was_cut_off_spoils_no_later_one() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("audit.jsonl");
        std::fs::write(&file, "{\"what\":\"app").unwrap();
        let event = |number| Event { by: Some("operator/root"), ..refused(number) };
        Audit::open(directory.path()).unwrap().record(event(1));
        let audit = Audit::open(directory.path()).unwrap();
        audit.record(event(2));
        // Another process truncates the open file in the middle of a line.
        audit.files.lock().unwrap().get_mut("audit.jsonl").unwrap().is_cut = true;
        audit.record(event(3));
        let text = std::fs::read_to_string(&file).unwrap();
        let whole = text.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
        assert_eq!(whole.map(|line| line["refused"].clone()).collect::<Vec<_>>(), ["1", "2", "3"], "{text}");
        assert_eq!(text.lines().count(), 5, "{text}");
    }

    #[test]
    fn a_long_file_is_begun_anew() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("audit.jsonl");
        std::fs::File::create(&file).unwrap().set_len(MAX_FILE).unwrap();
        let audit = Audit::open(directory.path()).unwrap();
        audit.record(Event { by: Some("operator/root"), ..refused(1) });
        assert!(std::fs::metadata(&file).unwrap().len() < 200);
        assert_eq!(std::fs::metadata(directory.path().join("audit.jsonl.old")).unwrap().len(), MAX_FILE);
    }
}
