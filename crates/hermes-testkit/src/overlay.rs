//! An overlay for one test: documents and certificates in a directory of its own, and real nodes that run from them.
//!
//! In: the `hermes` binary, documents with `$NAME` where an address belongs. Out: running nodes with the addresses
//! that the system chose for them (every `bind` ends in `:0`, so that any number of tests run at once), their
//! records, metrics and memory. A node that is dropped is ended by its pid; before that it must still have been
//! alive and must never have panicked. Start nodes from the far end on: the near ones need their addresses.

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

use crate::{
    Error, Result,
    ca::{Authority, IdentityFiles, Subject},
    dialog::Dialog,
    netns::Namespace,
    process::{Program, Running},
};

/// A node that is not ready by now will not be. Generous: debug builds on a busy machine.
const READY_WITHIN: Duration = Duration::from_secs(30);
/// How long a test waits for something that a node shall do.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// Between two looks at a file or an endpoint.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// Where one test's nodes live.
#[derive(Debug)]
pub struct Overlay {
    dir: Arc<tempfile::TempDir>,
    hermes: PathBuf,
    authority: Authority,
}

/// A node that is to be started.
#[derive(Debug)]
pub struct Draft<'a> {
    overlay: &'a Overlay,
    name: String,
    document: String,
    values: Vec<(String, String)>,
    identity: Option<IdentityFiles>,
    namespace: Option<&'a Namespace>,
    wrapper: Vec<String>,
    called: Option<String>,
    admin: SocketAddr,
    args: Vec<String>,
}

/// A running node.
#[derive(Debug)]
pub struct Node {
    name: String,
    running: Option<Running>,
    config: PathBuf,
    addresses: HashMap<String, SocketAddr>,
    admin: SocketAddr,
    prelude: String,
    /// Its log must outlive it, whatever is dropped first.
    _dir: Arc<tempfile::TempDir>,
    /// In another network namespace.
    is_elsewhere: bool,
}

impl Overlay {
    /// An overlay called `lab` whose nodes are this binary.
    ///
    /// # Errors
    /// When there is no room for a directory, or no CA.
    pub fn new(hermes: impl AsRef<Path>) -> Result<Self> {
        // A thousand sockets in one test are no reason to fail.
        crate::limits::raise_open_files()?;
        Ok(Self {
            dir: Arc::new(tempfile::tempdir().map_err(Error::io("making a directory for an overlay"))?),
            hermes: hermes.as_ref().to_owned(),
            authority: Authority::new("lab")?,
        })
    }

    /// Where documents, keys and logs are.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The CA of the overlay.
    pub fn authority(&self) -> &Authority {
        &self.authority
    }

    /// A node of this name. It has no identity yet.
    pub fn node(&self, name: &str) -> Draft<'_> {
        Draft {
            overlay: self,
            name: name.to_owned(),
            document: String::new(),
            values: Vec::new(),
            identity: None,
            namespace: None,
            wrapper: Vec::new(),
            called: None,
            admin: SocketAddr::from(([127, 0, 0, 1], 0)),
            args: Vec::new(),
        }
    }
}

impl<'a> Draft<'a> {
    /// Its document, but for `node`, `admin` and `identity`, which are written for it.
    #[must_use]
    pub fn document(mut self, text: &str) -> Self {
        self.document = text.to_owned();
        self
    }

    /// What `$NAME` in the document stands for.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl ToString) -> Self {
        self.values.push((name.to_owned(), value.to_string()));
        self
    }

    /// Gives it a certificate of the overlay's CA.
    ///
    /// # Errors
    /// When it cannot be made or written.
    pub fn identity(self, subject: &Subject) -> Result<Self> {
        let authority = &self.overlay.authority;
        self.identity_of(authority, subject)
    }

    /// Gives it a certificate of any CA. The CA that it trusts is the same.
    ///
    /// # Errors
    /// When it cannot be made or written.
    pub fn identity_of(mut self, authority: &Authority, subject: &Subject) -> Result<Self> {
        // A directory of its own: `ca.pem` of another CA must not replace the overlay's.
        let dir = self.overlay.dir().join(&self.name);
        fs::create_dir_all(&dir).map_err(Error::io(format!("making {}", dir.display())))?;
        self.identity = Some(authority.issue(subject)?.write(&dir, &self.name)?);
        Ok(self)
    }

    /// Lets it trust another CA beside that of its identity. After [`Self::identity`].
    ///
    /// # Errors
    /// When its file of CAs cannot be written.
    pub fn trusting(self, other: &Authority) -> Result<Self> {
        if let Some(IdentityFiles { ca, .. }) = &self.identity {
            let what = || format!("adding to {}", ca.display());
            let both = fs::read_to_string(ca).map_err(Error::io(what()))? + other.pem();
            fs::write(ca, both).map_err(Error::io(what()))?;
        }
        Ok(self)
    }

    /// Runs it in a network namespace.
    #[must_use]
    pub fn within(mut self, namespace: &'a Namespace) -> Self {
        self.namespace = Some(namespace);
        self
    }

    /// Runs it by way of another program, which must become it by exec: `["unshare", "-m", ...]`.
    #[must_use]
    pub fn by_way_of(mut self, wrapper: &[&str]) -> Self {
        self.wrapper = wrapper.iter().map(|word| (*word).to_owned()).collect();
        self
    }

    /// Its process's name, of its document and logs, where several processes are one node after the other.
    #[must_use]
    pub fn called(mut self, name: &str) -> Self {
        self.called = Some(name.to_owned());
        self
    }

    /// Where its admin endpoint listens, if not on a port of the system's choice.
    #[must_use]
    pub fn admin(mut self, address: SocketAddr) -> Self {
        self.admin = address;
        self
    }

    /// Further arguments of `hermes proxy`.
    #[must_use]
    pub fn args(mut self, args: &[&str]) -> Self {
        self.args = args.iter().map(|arg| (*arg).to_owned()).collect();
        self
    }

    /// Starts it and waits until it answers `/readyz`.
    ///
    /// # Errors
    /// When it refuses its document, ends, or does not become ready.
    pub async fn start(self) -> Result<Node> {
        let mut node = self.launch()?;
        match node.wait_started().await {
            Ok(()) => Ok(node),
            Err(error) => {
                // What never ran owes nothing when it is dropped: the caller learns why it did not.
                drop(node.running.take());
                Err(error)
            }
        }
    }

    /// Starts it and waits for nothing.
    ///
    /// # Errors
    /// When its document cannot be written or the binary not be run.
    pub fn launch(self) -> Result<Node> {
        let prelude = self.prelude();
        let called = self.called.clone().unwrap_or_else(|| self.name.clone());
        let config = self.overlay.dir().join(format!("{called}.yaml"));
        write(&config, &prelude, &self.text())?;
        let path = self.wrapper.first().map_or(self.overlay.hermes.as_os_str(), |first| first.as_ref());
        let mut program = Program::new(&called, path, self.overlay.dir()).within(self.namespace);
        if let Some((_, rest)) = self.wrapper.split_first() {
            program = program.args(rest).args([&self.overlay.hermes]);
        }
        let program = program.args(["proxy", "--config"]).args([&config]).args(&self.args);
        let running = program.env("RUST_BACKTRACE", "1").start()?;
        Ok(Node {
            name: self.name,
            running: Some(running),
            config,
            addresses: HashMap::new(),
            admin: self.admin,
            prelude,
            _dir: Arc::clone(&self.overlay.dir),
            is_elsewhere: self.namespace.is_some(),
        })
    }

    fn prelude(&self) -> String {
        let identity = self.identity.as_ref().map_or_else(String::new, |files| {
            let IdentityFiles { cert, key, ca } = files;
            format!("identity: {{cert: {}, key: {}, ca: {}}}\n", cert.display(), key.display(), ca.display())
        });
        format!("node: {}\nadmin: {}\n{identity}", self.name, self.admin)
    }

    fn text(&self) -> String {
        filled(&self.document, self.values.iter().map(|(name, value)| (name.as_str(), value.clone())))
    }
}

/// `$NAME` replaced, longer names first, so that none is taken for the beginning of another.
fn filled<'v>(text: &str, values: impl Iterator<Item = (&'v str, String)>) -> String {
    let mut values: Vec<_> = values.collect();
    values.sort_by_key(|(name, _)| std::cmp::Reverse(name.len()));
    values.iter().fold(text.to_owned(), |text, (name, value)| text.replace(&format!("${name}"), value))
}

/// In one step: the node that watches the file must not see half of it.
fn write(config: &Path, prelude: &str, text: &str) -> Result<()> {
    let next = config.with_extension("next");
    let what = || format!("writing {}", config.display());
    fs::write(&next, format!("{prelude}{text}")).map_err(Error::io(what()))?;
    fs::rename(&next, config).map_err(Error::io(what()))
}

impl Node {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where a listener listens.
    ///
    /// # Panics
    /// When the document has no such listener: the test is wrong.
    pub fn address(&self, listener: &str) -> SocketAddr {
        match self.addresses.get(listener) {
            Some(address) => *address,
            None => panic!("node {} has no listener {listener}: {:?}", self.name, self.addresses),
        }
    }

    /// Where its admin endpoint listens.
    pub fn admin(&self) -> SocketAddr {
        self.admin
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.running.as_ref().map_or(0, Running::pid)
    }

    /// Where its log is.
    pub fn stderr(&self) -> PathBuf {
        self.running.as_ref().map(|running| running.stderr().to_owned()).unwrap_or_default()
    }

    /// Where its records are, unless its document sends them elsewhere.
    pub fn stdout(&self) -> PathBuf {
        self.running.as_ref().map(|running| running.stdout().to_owned()).unwrap_or_default()
    }

    /// What it logged on standard error.
    pub fn log(&self) -> String {
        self.running.as_ref().and_then(|running| fs::read_to_string(running.stderr()).ok()).unwrap_or_default()
    }

    /// Its records so far: one for each session that ended. They come a tenth of a second late.
    pub fn records(&self) -> Vec<serde_json::Value> {
        let text = self.running.as_ref().and_then(|running| fs::read_to_string(running.stdout()).ok());
        text.unwrap_or_default().lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    /// Waits for a record that fits.
    ///
    /// # Panics
    /// When none comes in time; says which came.
    pub async fn record(&self, fits: impl Fn(&serde_json::Value) -> bool) -> serde_json::Value {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let records = self.records();
            if let Some(found) = records.iter().find(|record| fits(record)) {
                return found.clone();
            }
            assert!(Instant::now() < deadline, "node {} has no such record among {records:#?}", self.name);
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    /// Resident memory in bytes.
    ///
    /// # Errors
    /// When it has ended.
    pub fn memory(&self) -> Result<u64> {
        self.running.as_ref().map_or(Ok(0), |running| running.usage().map(|usage| usage.memory.rss))
    }

    /// Forgets how much memory it ever had, so that [`Self::peak_memory`] begins anew.
    ///
    /// # Errors
    /// When it has ended.
    pub fn forget_peak(&self) -> Result<()> {
        let path = format!("/proc/{}/clear_refs", self.pid());
        // 5: the peak alone (proc(5)).
        fs::write(&path, "5").map_err(Error::io(format!("writing {path}")))
    }

    /// The most resident memory that it had, in bytes: between two looks it may have had more than at either.
    ///
    /// # Errors
    /// When it has ended.
    pub fn peak_memory(&self) -> Result<u64> {
        let path = format!("/proc/{}/status", self.pid());
        let text = fs::read_to_string(&path).map_err(Error::io(format!("reading {path}")))?;
        let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kilobytes = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
        Ok(kilobytes.unwrap_or(u64::MAX / 1024) * 1024)
    }

    /// GET from its admin endpoint: status and body.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn ask(&self, path: &str) -> Result<(u16, String)> {
        let what = || format!("asking node {} for {path}", self.name);
        let answer = async {
            let mut dialog = Dialog::connect(self.admin).await?;
            dialog.send(format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")).await?;
            let head = dialog.head().await?;
            let body = dialog.body(&head).await?;
            Ok((head.status(), body.text()))
        };
        answer.await.map_err(Error::io(what()))
    }

    /// The value of a metric, all label sets that contain `labels` summed; 0 where there is none.
    ///
    /// # Errors
    /// When it does not answer.
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
    /// When it does not get there in time.
    pub async fn metric_reaches(&self, name: &str, labels: &str, least: f64) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let value = self.metric(name, labels).await.unwrap_or_default();
            if value >= least {
                return;
            }
            assert!(Instant::now() < deadline, "node {}: {name}{{{labels}}} is {value}, not {least}", self.name);
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    /// Waits until no session is under way.
    ///
    /// # Panics
    /// When one stays.
    pub async fn quiet(&self) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.ask("/sessions").await {
                Ok((200, text))
                    if serde_json::from_str::<Vec<serde_json::Value>>(&text).is_ok_and(|all| all.is_empty()) =>
                {
                    return;
                }
                answer => assert!(Instant::now() < deadline, "node {} still has sessions: {answer:?}", self.name),
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    /// How many descriptors it has open.
    ///
    /// # Errors
    /// When it has ended.
    pub fn descriptors(&self) -> Result<usize> {
        self.listed("fd")
    }

    /// How many threads it has.
    ///
    /// # Errors
    /// When it has ended.
    pub fn threads(&self) -> Result<usize> {
        self.listed("task")
    }

    fn listed(&self, folder: &str) -> Result<usize> {
        let path = format!("/proc/{}/{folder}", self.pid());
        Ok(fs::read_dir(&path).map_err(Error::io(format!("reading {path}")))?.count())
    }

    /// Where its document lies.
    pub fn config(&self) -> &Path {
        &self.config
    }

    /// What its document begins with: `node`, `admin`, `identity`.
    pub fn prelude(&self) -> &str {
        &self.prelude
    }

    /// Replaces its document, in one step, and waits for nothing.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn replace(&self, document: &str, values: &[(&str, String)]) -> Result<()> {
        let text = filled(document, values.iter().map(|(name, value)| (*name, value.clone())));
        write(&self.config, &self.prelude, &text)
    }

    /// Replaces its document and waits until the new one runs. Listeners keep their ports.
    ///
    /// # Errors
    /// When it does not follow; with its log.
    pub async fn reload(&mut self, document: &str, values: &[(&str, String)]) -> Result<()> {
        let before = self.generation().await?;
        self.replace(document, values)?;
        let deadline = Instant::now() + PATIENCE;
        while self.generation().await? <= before {
            if Instant::now() > deadline {
                return Err(self.not_ready("the new document"));
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
        self.read_addresses();
        Ok(())
    }

    /// The number of the document that it runs, counted in this process.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn generation(&self) -> Result<u64> {
        let (_, text) = self.ask("/config").await?;
        let config: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
        Ok(config["generation"].as_u64().unwrap_or_default())
    }

    async fn wait_started(&mut self) -> Result<()> {
        self.wait_running().await?;
        // From another namespace its loopback cannot be reached; its log has said that it runs.
        if self.is_elsewhere { Ok(()) } else { self.wait_ready().await }
    }

    /// Until its log says that it runs: then every port is known.
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
            tokio::time::sleep(LOOK_AGAIN).await;
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
            tokio::time::sleep(LOOK_AGAIN).await;
        }
        Ok(())
    }

    fn not_ready(&self, what: &str) -> Error {
        let log = self.running.as_ref().map(|running| running.stderr().to_owned()).unwrap_or_default();
        Error::NotReady { program: self.name.clone(), what: what.to_owned(), waited: READY_WITHIN, log }
    }

    /// `listening listener=apps address=127.0.0.1:40001 ...`, and the admin endpoint likewise. The last word holds.
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

    /// What every node owes, whatever was done to it: it lives, and it has not panicked.
    ///
    /// # Panics
    /// When it does not, with its log.
    pub fn assert_sound(&mut self) {
        let log = self.log();
        assert!(!log.contains("panicked"), "node {} panicked:\n{log}", self.name);
        let ended = self.running.as_mut().map(Running::exited);
        assert!(matches!(ended, Some(Ok(None))), "node {} ended ({ended:?}):\n{log}", self.name);
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// When it has ended.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill(Pid::from_raw(self.pid().cast_signed()), signal)?)
    }

    /// Waits for its end, which something else has brought about.
    ///
    /// # Panics
    /// When it does not end within [`PATIENCE`], or had panicked; with its log.
    pub async fn ended(mut self) -> std::process::ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Ok(Some(status)) = self.running.as_mut().map_or(Ok(None), Running::exited) {
                let log = self.log();
                assert!(!log.contains("panicked"), "node {} panicked:\n{log}", self.name);
                self.running = None;
                return status;
            }
            assert!(Instant::now() < deadline, "node {} does not end", self.name);
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    /// Ends it with SIGTERM and gives it `grace`.
    ///
    /// # Errors
    /// When the system cannot say how it ended.
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
        // By force: what a drain does is the subject of tests of its own.
        if let Some(running) = self.running.take() {
            let _ = running.end(Duration::ZERO);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longer_names_are_replaced_first() {
        let values = [("A", "1".to_owned()), ("AB", "2".to_owned())];
        assert_eq!(filled("$A $AB $ABC", values.into_iter()), "1 2 2C");
    }
}
