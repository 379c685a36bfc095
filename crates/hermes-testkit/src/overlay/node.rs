//! A running node: queries, waits, and final checks.
//!
//! In: a process started by [`super::Draft`]. Out: its addresses, access log, metrics and memory. Waits are bounded by
//! [`super::EFFECT_TIMEOUT`]. A dropped node is ended by its pid; before that it must be alive, and must never have panicked.

use std::{
    collections::HashMap,
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::{EFFECT_TIMEOUT, filled, write};
use crate::{Error, Result, netns, process::Running, raw_http1::RawHttp1};

/// Timeout of readiness. Generous: debug builds on a busy machine.
const READY_WITHIN: Duration = Duration::from_secs(30);
/// Poll interval for files and endpoints.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// A running node.
#[derive(Debug)]
pub struct Node {
    pub(super) name: String,
    pub(super) running: Option<Running>,
    pub(super) config: PathBuf,
    pub(super) addresses: HashMap<String, SocketAddr>,
    pub(super) admin: SocketAddr,
    pub(super) prelude: String,
    /// The log directory must outlive the node, regardless of the drop order.
    pub(super) _dir: Arc<tempfile::TempDir>,
    /// The network namespace of the node, if it is not the test's.
    pub(super) namespace: Option<String>,
}

impl Node {
    /// The name of the node.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The address of a listener.
    ///
    /// # Panics
    /// The document has no such listener: an error in the test.
    pub fn address(&self, listener: &str) -> SocketAddr {
        match self.addresses.get(listener) {
            Some(address) => *address,
            None => panic!("node {} has no listener {listener}: {:?}", self.name, self.addresses),
        }
    }

    /// The address of the admin endpoint.
    pub fn admin(&self) -> SocketAddr {
        self.admin
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.running.as_ref().map_or(0, Running::pid)
    }

    /// The path of the log.
    pub fn stderr(&self) -> PathBuf {
        self.running.as_ref().map(|running| running.stderr().to_owned()).unwrap_or_default()
    }

    /// The path of the access log, unless the document sets another.
    pub fn stdout(&self) -> PathBuf {
        self.running.as_ref().map(|running| running.stdout().to_owned()).unwrap_or_default()
    }

    /// The text of the log (standard error).
    pub fn log(&self) -> String {
        self.running.as_ref().and_then(|running| fs::read_to_string(running.stderr()).ok()).unwrap_or_default()
    }

    /// The access-log entries so far, one for each ended session. They are written with a delay of 0.1 s.
    pub fn records(&self) -> Vec<serde_json::Value> {
        let text = self.running.as_ref().and_then(|running| fs::read_to_string(running.stdout()).ok());
        text.unwrap_or_default().lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    /// Waits for a matching access-log entry.
    ///
    /// # Panics
    /// No entry matches in time; the message lists the entries.
    pub async fn record(&self, fits: impl Fn(&serde_json::Value) -> bool) -> serde_json::Value {
        let deadline = Instant::now() + EFFECT_TIMEOUT;
        loop {
            let records = self.records();
            if let Some(found) = records.iter().find(|record| fits(record)) {
                return found.clone();
            }
            assert!(Instant::now() < deadline, "node {} has no such record among {records:#?}", self.name);
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Resident memory in bytes.
    ///
    /// # Errors
    /// The node has ended.
    pub fn memory(&self) -> Result<u64> {
        self.running.as_ref().map_or(Ok(0), |running| running.usage().map(|usage| usage.memory.rss))
    }

    /// Resets the peak of [`Self::peak_memory`].
    ///
    /// # Errors
    /// The node has ended.
    pub fn forget_peak(&self) -> Result<()> {
        let path = format!("/proc/{}/clear_refs", self.pid());
        // 5: the peak alone (proc(5)).
        fs::write(&path, "5").map_err(Error::io(format!("writing {path}")))
    }

    /// Peak resident memory in bytes, also between two reads.
    ///
    /// # Errors
    /// The node has ended.
    pub fn peak_memory(&self) -> Result<u64> {
        let path = format!("/proc/{}/status", self.pid());
        let text = fs::read_to_string(&path).map_err(Error::io(format!("reading {path}")))?;
        let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kilobytes = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
        Ok(kilobytes.unwrap_or(u64::MAX / 1024) * 1024)
    }

    /// Sends a GET to the admin endpoint; returns status and body.
    ///
    /// # Errors
    /// The endpoint does not answer.
    pub async fn ask(&self, path: &str) -> Result<(u16, String)> {
        let what = || format!("asking node {} for {path}", self.name);
        let answer = async {
            let mut http1 = RawHttp1::connect(self.admin).await?;
            http1.send(format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")).await?;
            let head = http1.head().await?;
            let body = http1.body(&head).await?;
            Ok((head.status(), body.text()))
        };
        // The loopback address is in the node's namespace.
        match &self.namespace {
            Some(namespace) => netns::within(namespace, answer).await?,
            None => answer.await,
        }
        .map_err(Error::io(what()))
    }

    /// The value of a metric, summed over all label sets that contain `labels`; 0 if none does.
    ///
    /// # Errors
    /// The endpoint does not answer.
    pub async fn metric(&self, name: &str, labels: &str) -> Result<f64> {
        let (_, text) = self.ask("/metrics").await?;
        let values = text.lines().filter_map(|line| {
            let (key, value) = line.rsplit_once(' ')?;
            let (found, set) = key.split_once('{').unwrap_or((key, ""));
            (found == name && set.contains(labels)).then(|| value.parse::<f64>().ok())?
        });
        Ok(values.sum())
    }

    /// Waits until the metric has at least this value.
    ///
    /// # Panics
    /// The metric does not reach the value in time.
    pub async fn metric_reaches(&self, name: &str, labels: &str, least: f64) {
        self.metric_until(name, labels, least, |value| value >= least).await;
    }

    /// Waits until the metric has exactly this value, such as a gauge that falls.
    ///
    /// # Panics
    /// The metric does not get the value in time.
    pub async fn metric_is(&self, name: &str, labels: &str, expected: f64) {
        self.metric_until(name, labels, expected, |value| value == expected).await;
    }

    async fn metric_until(&self, name: &str, labels: &str, wanted: f64, holds: impl Fn(f64) -> bool) {
        let deadline = Instant::now() + EFFECT_TIMEOUT;
        loop {
            // An endpoint that does not answer has no value.
            let value = self.metric(name, labels).await.unwrap_or(f64::NAN);
            if holds(value) {
                return;
            }
            assert!(Instant::now() < deadline, "node {}: {name}{{{labels}}} is {value}, not {wanted}", self.name);
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Waits until the log contains this text; a separate thread writes it.
    ///
    /// # Panics
    /// The text does not appear in time.
    pub async fn says(&self, words: &str) {
        self.says_times(words, 1).await;
    }

    /// Waits until the log contains this text `times` times.
    ///
    /// # Panics
    /// The text does not appear often enough in time.
    pub async fn says_times(&self, words: &str, times: usize) {
        let deadline = Instant::now() + EFFECT_TIMEOUT;
        while self.log().matches(words).count() < times {
            assert!(Instant::now() < deadline, "node {} does not say {words:?}: {}", self.name, self.log());
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Waits until no session is active.
    ///
    /// # Panics
    /// A session stays active.
    pub async fn quiet(&self) {
        let deadline = Instant::now() + EFFECT_TIMEOUT;
        loop {
            match self.ask("/sessions").await {
                Ok((200, text))
                    if serde_json::from_str::<Vec<serde_json::Value>>(&text).is_ok_and(|all| all.is_empty()) =>
                {
                    return;
                }
                answer => assert!(Instant::now() < deadline, "node {} still has sessions: {answer:?}", self.name),
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Number of open file descriptors.
    ///
    /// # Errors
    /// The node has ended.
    pub fn descriptors(&self) -> Result<usize> {
        self.listed("fd")
    }

    /// Number of threads.
    ///
    /// # Errors
    /// The node has ended.
    pub fn threads(&self) -> Result<usize> {
        self.listed("task")
    }

    fn listed(&self, folder: &str) -> Result<usize> {
        let path = format!("/proc/{}/{folder}", self.pid());
        Ok(fs::read_dir(&path).map_err(Error::io(format!("reading {path}")))?.count())
    }

    /// The path of the document.
    pub fn config(&self) -> &Path {
        &self.config
    }

    /// The first part of the document: `node`, `admin`, `identity`.
    pub fn prelude(&self) -> &str {
        &self.prelude
    }

    /// Replaces the document atomically, and waits for nothing.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn replace(&self, document: &str, values: &[(&str, String)]) -> Result<()> {
        let text = filled(document, values.iter().map(|(name, value)| (*name, value.clone())));
        write(&self.config, &self.prelude, &text)
    }

    /// Replaces the document and waits until the new one is active. Listeners keep their ports.
    ///
    /// # Errors
    /// The node does not apply the document; the message contains its log.
    pub async fn reload(&mut self, document: &str, values: &[(&str, String)]) -> Result<()> {
        let before = self.generation().await?;
        self.replace(document, values)?;
        let deadline = Instant::now() + EFFECT_TIMEOUT;
        loop {
            // The log is complete by then, so it contains the new addresses.
            let now = self.generation().await?;
            if now > before && self.log().contains(&format!("applied generation={now} ")) {
                self.read_addresses();
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(self.not_ready("the new document"));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// The generation of the active document, counted in this process.
    ///
    /// # Errors
    /// The endpoint does not answer.
    pub async fn generation(&self) -> Result<u64> {
        let (_, text) = self.ask("/config").await?;
        let config: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
        Ok(config["generation"].as_u64().unwrap_or_default())
    }

    pub(super) async fn wait_started(&mut self) -> Result<()> {
        self.wait_running().await?;
        self.wait_ready().await
    }

    /// Waits until the log reports that the node is running: then every port is known.
    async fn wait_running(&mut self) -> Result<()> {
        let deadline = Instant::now() + READY_WITHIN;
        while !self.log().contains(" running node=") {
            if let Some(status) = self.running.as_mut().map(Running::exited).transpose()?.flatten() {
                let words = self.log();
                return Err(Error::Died { program: self.name.clone(), status, words });
            }
            if Instant::now() > deadline {
                return Err(self.not_ready("its listeners"));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        self.read_addresses();
        Ok(())
    }

    async fn wait_ready(&self) -> Result<()> {
        let deadline = Instant::now() + READY_WITHIN;
        while !matches!(self.ask("/readyz").await, Ok((200, _))) {
            if Instant::now() > deadline {
                return Err(self.not_ready("/readyz"));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }

    fn not_ready(&self, what: &str) -> Error {
        let log = self.running.as_ref().map(|running| running.stderr().to_owned()).unwrap_or_default();
        Error::NotReady { program: self.name.clone(), what: what.to_owned(), waited: READY_WITHIN, log }
    }

    /// Reads lines such as `listening listener=apps address=127.0.0.1:40001 ...`, also for the admin endpoint. The last
    /// line of a listener applies.
    fn read_addresses(&mut self) {
        for line in self.log().lines() {
            let field = |name: &str| {
                let (_, rest) = line.split_once(&format!(" {name}="))?;
                rest.split(' ').next()
            };
            let Some(address) = field("address").and_then(|text| text.parse().ok()) else { continue };
            if line.contains(" admin endpoint ") {
                self.admin = address;
            } else if let Some(listener) = field("listener") {
                self.addresses.insert(listener.to_owned(), address);
            }
        }
    }

    /// Checks the invariants of every node: it is alive, and has not panicked.
    ///
    /// # Panics
    /// An invariant is violated; the message contains the log.
    pub fn assert_sound(&mut self) {
        let log = self.log();
        assert!(!log.contains("panicked"), "node {} panicked:\n{log}", self.name);
        let ended = self.running.as_mut().map(Running::exited);
        assert!(matches!(ended, Some(Ok(None))), "node {} ended ({ended:?}):\n{log}", self.name);
    }

    /// Sends a signal.
    ///
    /// # Errors
    /// The node has ended.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill(Pid::from_raw(self.pid().cast_signed()), signal)?)
    }

    /// Waits for the end of the process, which must have another cause.
    ///
    /// # Panics
    /// The process does not end within [`EFFECT_TIMEOUT`], or has panicked; the message contains the log.
    pub async fn ended(mut self) -> std::process::ExitStatus {
        let deadline = Instant::now() + EFFECT_TIMEOUT;
        loop {
            if let Ok(Some(status)) = self.running.as_mut().map_or(Ok(None), Running::exited) {
                let log = self.log();
                assert!(!log.contains("panicked"), "node {} panicked:\n{log}", self.name);
                self.running = None;
                return status;
            }
            assert!(Instant::now() < deadline, "node {} does not end", self.name);
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Ends the process with SIGTERM, and waits for `grace`.
    ///
    /// # Errors
    /// The system does not report the exit status.
    pub fn end(mut self, grace: Duration) -> Result<std::process::ExitStatus> {
        self.assert_sound();
        match self.running.take() {
            Some(running) => running.end(grace),
            None => Err(self.not_ready("its end")),
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let Some(running) = self.running.take() else { return };
        if std::thread::panicking() {
            eprintln!(
                "--- log of node {} ---\n{}",
                self.name,
                fs::read_to_string(running.stderr()).unwrap_or_default()
            );
        } else {
            self.running = Some(running);
            self.assert_sound();
        }
        // SIGKILL: other tests cover draining.
        if let Some(running) = self.running.take() {
            let _ = running.end(Duration::ZERO);
        }
    }
}
