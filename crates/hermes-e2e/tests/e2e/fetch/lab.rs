//! What the tests of fetch share: the command, and an origin that does with each request what a test says.

use hermes_testkit::binary::hermes;
use std::ffi::OsStr;
use std::io::SeekFrom;
use std::path::Path;
use std::process::{Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hermes_testkit::origin::{Origin, scripted};
use hermes_testkit::raw_http1::{Head, SILENCE};
use serde_json::Value;
use tokio::process::Command;

/// What an origin does with a request: it sends this, and closes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) fields: Vec<(&'static str, String)>,
    pub(crate) content: Vec<u8>,
    /// Breaks off behind so many bytes of the content.
    pub(crate) cut: Option<usize>,
    /// Says nothing more then, and stays.
    pub(crate) stalls: bool,
    /// Says nothing at all.
    pub(crate) is_mute: bool,
}

impl Reply {
    pub(crate) fn status(status: u16) -> Self {
        Self { status, ..Self::default() }
    }

    pub(crate) fn mute() -> Self {
        Self { is_mute: true, stalls: true, ..Self::default() }
    }

    /// The range that was asked for, where it was one of this; else all.
    pub(crate) fn of(content: &[u8], etag: &str, head: &Head) -> Self {
        let requests = head.header("range").filter(|_| head.header("if-range").is_none_or(|tag| tag == etag));
        let tag = ("etag", etag.to_owned());
        let Some(SeekFrom::Start(first)) = requests.as_deref().map(first) else {
            return Self { status: 200, fields: vec![tag], content: content.to_vec(), ..Self::default() };
        };
        let length = content.len();
        let range = ("content-range", format!("bytes {first}-{}/{length}", length - 1));
        let content = content[usize::try_from(first).unwrap()..].to_vec();
        Self { status: 206, fields: vec![tag, range], content, ..Self::default() }
    }

    pub(crate) fn with(mut self, name: &'static str, value: impl ToString) -> Self {
        self.fields.push((name, value.to_string()));
        self
    }

    pub(crate) fn without(mut self, name: &str) -> Self {
        self.fields.retain(|(field, _)| *field != name);
        self
    }

    pub(crate) fn cut(mut self, at: usize) -> Self {
        self.cut = Some(at.min(self.content.len()));
        self
    }

    pub(crate) fn stalling(mut self) -> Self {
        self.stalls = true;
        self
    }

    pub(crate) fn head(&self) -> String {
        let mut head = format!("HTTP/1.1 {} Said\r\ncontent-length: {}\r\n", self.status, self.content.len());
        self.fields.iter().for_each(|(name, value)| head.push_str(&format!("{name}: {value}\r\n")));
        head.push_str("connection: close\r\n\r\n");
        head
    }
}

fn first(range: &str) -> SeekFrom {
    let digits = range.strip_prefix("bytes=").and_then(|range| range.strip_suffix('-'));
    SeekFrom::Start(digits.and_then(|digits| digits.parse().ok()).unwrap_or_else(|| panic!("asked for {range:?}")))
}

/// The requests that an origin has had.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen(Arc<Mutex<Vec<Head>>>);

impl Seen {
    pub(crate) fn count(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    /// A field of each of them.
    pub(crate) fn fields(&self, name: &str) -> Vec<Option<String>> {
        self.0.lock().unwrap().iter().map(|head| head.header(name)).collect()
    }
}

/// An origin; `reply` gets the number of the request, from 0.
pub(crate) fn origin(reply: impl FnMut(usize, &Head) -> Reply + Send + 'static) -> (Origin, Seen) {
    let seen = Seen::default();
    let recorded = seen.clone();
    let reply = Arc::new(Mutex::new(reply));
    let origin = scripted::h1(move |mut http1| {
        let (recorded, reply) = (recorded.clone(), reply.clone());
        async move {
            let head = http1.head().await?;
            if head.header("content-length").is_some_and(|length| length != "0") {
                http1.body(&head).await?;
            }
            let reply = {
                let mut seen = recorded.0.lock().unwrap();
                seen.push(head);
                let number = seen.len() - 1;
                (reply.lock().unwrap())(number, &seen[number])
            };
            if !reply.is_mute {
                http1.send(reply.head()).await?;
            }
            http1.send(&reply.content[..reply.cut.unwrap_or(reply.content.len())]).await?;
            if reply.stalls {
                http1.is_ended().await;
            }
            http1.finish().await
        }
    });
    (origin.unwrap(), seen)
}

/// `hermes fetch`, not yet started.
pub(crate) fn command<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(hermes());
    command.arg("fetch").args(args).stdin(Stdio::null()).kill_on_drop(true);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs it to its end.
pub(crate) async fn fetch<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Output {
    let ran = tokio::time::timeout(SILENCE * 3, command(args).output()).await;
    ran.expect("fetch does not end").unwrap()
}

/// Runs it with `--json` into a file; its status and events.
pub(crate) async fn events(url: &str, file: &Path, args: &[&str]) -> (i32, Vec<Value>) {
    let output = fetch([url, "--json", "-o", file.to_str().unwrap()].iter().chain(args)).await;
    let events = String::from_utf8(output.stdout).unwrap();
    let events = events.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    (output.status.code().unwrap(), events)
}

pub(crate) fn named<'e>(events: &'e [Value], name: &str) -> Vec<&'e Value> {
    events.iter().filter(|event| event["event"] == name).collect()
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// What is in a directory.
pub(crate) fn files(directory: &Path) -> Vec<String> {
    let names = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<String> = names.map(|name| name.into_string().unwrap()).collect();
    names.sort();
    names
}

/// The digest of a content, as a field has it.
pub(crate) fn sha256(content: &[u8]) -> String {
    use base64::Engine as _;
    let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, content);
    format!("sha-256=:{}:", base64::engine::general_purpose::STANDARD.encode(digest))
}

/// Waits until a file has so many bytes.
pub(crate) async fn grown(file: &Path, bytes: u64) {
    let what = format!("{} has {bytes} bytes", file.display());
    hermes_testkit::poll::until(&what, || async { std::fs::metadata(file).is_ok_and(|file| file.len() >= bytes) })
        .await;
}

/// A stall timeout for tests, instead of the default of half a minute.
pub(crate) const STALL_TIMEOUT: Duration = Duration::from_millis(300);
