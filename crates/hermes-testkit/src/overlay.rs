//! An overlay for one test: documents and certificates in a temporary directory, and real nodes that run from them.
//!
//! In: the `hermes` binary, and documents with `$NAME` as placeholders for addresses. Out: running nodes with the
//! addresses that the system assigned (every `bind` ends in `:0`, so that tests run concurrently), their access log,
//! metrics and memory. A dropped node is ended by its pid; before that it must be alive, and must never have panicked.
//! Start nodes from the far end: the near ones need their addresses.

mod node;

use std::{
    collections::HashMap,
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

pub use self::node::Node;
use crate::{
    Error, Result,
    ca::{Authority, IdentityFiles, Subject},
    netns::Namespace,
    process::Program,
};

/// Timeout of every wait for a node.
pub const EFFECT_TIMEOUT: Duration = Duration::from_secs(60);

/// The directory and CA of one test's nodes.
#[derive(Debug)]
pub struct Overlay {
    dir: Arc<tempfile::TempDir>,
    hermes: PathBuf,
    authority: Authority,
}

/// A node before its start.
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

impl Overlay {
    /// An overlay called `lab` with nodes of this binary.
    ///
    /// # Errors
    /// The directory or the CA cannot be created.
    pub fn new(hermes: impl AsRef<Path>) -> Result<Self> {
        // A test may have a thousand sockets.
        crate::limits::raise_open_files()?;
        Ok(Self {
            dir: Arc::new(tempfile::tempdir().map_err(Error::io("making a directory for an overlay"))?),
            hermes: hermes.as_ref().to_owned(),
            authority: Authority::new("lab")?,
        })
    }

    /// The directory of documents, keys and logs.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The CA of the overlay.
    pub fn authority(&self) -> &Authority {
        &self.authority
    }

    /// A node of this name, without an identity.
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
    /// Sets its document without `node`, `admin` and `identity`, which are added.
    #[must_use]
    pub fn document(mut self, text: &str) -> Self {
        self.document = text.to_owned();
        self
    }

    /// Sets the value of `$NAME` in the document.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl ToString) -> Self {
        self.values.push((name.to_owned(), value.to_string()));
        self
    }

    /// Issues a certificate of the overlay's CA for it.
    ///
    /// # Errors
    /// The certificate cannot be created or written.
    pub fn identity(self, subject: &Subject) -> Result<Self> {
        let authority = &self.overlay.authority;
        self.identity_of(authority, subject)
    }

    /// Issues a certificate of another CA for it. It still trusts the overlay's CA.
    ///
    /// # Errors
    /// The certificate cannot be created or written.
    pub fn identity_of(mut self, authority: &Authority, subject: &Subject) -> Result<Self> {
        // A separate directory: `ca.pem` of another CA must not replace the overlay's.
        let dir = self.overlay.dir().join(&self.name);
        fs::create_dir_all(&dir).map_err(Error::io(format!("making {}", dir.display())))?;
        self.identity = Some(authority.issue(subject)?.write(&dir, &self.name)?);
        Ok(self)
    }

    /// Makes it trust another CA in addition. Call it after [`Self::identity`].
    ///
    /// # Errors
    /// The file of CAs cannot be written.
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

    /// Runs it by a wrapper program, which must execute it: `["unshare", "-m", ...]`.
    #[must_use]
    pub fn by_way_of(mut self, wrapper: &[&str]) -> Self {
        self.wrapper = wrapper.iter().map(|word| (*word).to_owned()).collect();
        self
    }

    /// Sets the name of its process, document and logs, for successive processes of one node.
    #[must_use]
    pub fn called(mut self, name: &str) -> Self {
        self.called = Some(name.to_owned());
        self
    }

    /// Sets the address of its admin endpoint, instead of a port that the system selects.
    #[must_use]
    pub fn admin(mut self, address: SocketAddr) -> Self {
        self.admin = address;
        self
    }

    /// Adds arguments of `hermes proxy`.
    #[must_use]
    pub fn args(mut self, args: &[&str]) -> Self {
        self.args = args.iter().map(|arg| (*arg).to_owned()).collect();
        self
    }

    /// Starts it and waits until `/readyz` succeeds.
    ///
    /// # Errors
    /// The node rejects its document, ends, or does not become ready.
    pub async fn start(self) -> Result<Node> {
        let mut node = self.launch()?;
        match node.wait_started().await {
            Ok(()) => Ok(node),
            Err(error) => {
                // A node that never ran is not checked when it is dropped: the caller gets the error.
                drop(node.running.take());
                Err(error)
            }
        }
    }

    /// Starts it without waiting.
    ///
    /// # Errors
    /// The document cannot be written, or the binary cannot be run.
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
            namespace: self.namespace.map(|namespace| namespace.name().to_owned()),
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

/// Replaces `$NAME`, longer names first, so that none is taken for the beginning of another.
fn filled<'v>(text: &str, values: impl Iterator<Item = (&'v str, String)>) -> String {
    let mut values: Vec<_> = values.collect();
    values.sort_by_key(|(name, _)| std::cmp::Reverse(name.len()));
    values.iter().fold(text.to_owned(), |text, (name, value)| text.replace(&format!("${name}"), value))
}

/// Beside other tests, work of a node waits for a core. A test that does not ask for overload must not be refused for that.
const PATIENT: &str = "overload: {delay: {limit: 60s}}\n";

/// Writes atomically: the node that watches the file must not read half of it.
fn write(config: &Path, prelude: &str, text: &str) -> Result<()> {
    let next = config.with_extension("next");
    let what = || format!("writing {}", config.display());
    let overload = if text.contains("\noverload:") { "" } else { PATIENT };
    fs::write(&next, format!("{prelude}{text}\n{overload}")).map_err(Error::io(what()))?;
    fs::rename(&next, config).map_err(Error::io(what()))
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
