//! A node inside another program: the entry for programs that link the data plane as a library.
//!
//! In: the text of a node document, and later ones. Out: a running node with its own threads, its addresses, and a
//! clean shutdown. The program connects to its listeners like any other program. Never: signals, file descriptor
//! limits, watched files, takeovers or an admin endpoint. Those are the program's responsibility, as in the `hermes`
//! binary.
//!
//! `crates/hermes-proxy/examples/embedded.rs` is a complete program.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hermes_model::{Checked, Problem};

use crate::node::{Bound, Node, NodeView};
use hermes_outbound::generation::BuildError;

/// A node that runs inside this program. Dropping it without [`Embedded::drain`] or [`Embedded::stop`] ends its threads
/// and breaks its sessions off.
pub struct Embedded {
    node: Node,
    base: PathBuf,
    warnings: Vec<String>,
}

/// The reasons why a document cannot run, each with its path in the document and a remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct StartError(Vec<String>);

impl StartError {
    /// Returns one sentence for each reason.
    pub fn reasons(&self) -> &[String] {
        &self.0
    }
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the document cannot be run: {}", self.0.join("; "))
    }
}

impl From<Vec<Problem>> for StartError {
    fn from(problems: Vec<Problem>) -> Self {
        Self(problems.iter().map(ToString::to_string).collect())
    }
}

impl From<Vec<BuildError>> for StartError {
    fn from(faults: Vec<BuildError>) -> Self {
        Self(faults.iter().map(ToString::to_string).collect())
    }
}

impl Embedded {
    /// Runs a node from the text of a document; files that it names are relative to `base`. Called on a tokio runtime
    /// with time and I/O; the node's workers have runtimes of their own. The access log goes where `access-log` says:
    /// by default to standard output.
    ///
    /// # Errors
    /// The document has problems, a file cannot be loaded, or an address cannot be bound: nothing runs then.
    pub async fn run(document: &str, base: &Path) -> Result<Self, StartError> {
        let checked = hermes_model::check(document, base)?;
        let warnings = warnings(&checked);
        let node = Node::start(Arc::new(checked.snapshot), Vec::new()).await?;
        Ok(Self { node, base: base.to_owned(), warnings })
    }

    /// Applies another document, completely or not at all. Sessions that it permits continue.
    ///
    /// # Errors
    /// Errors of [`Embedded::run`]; the node continues with its current document.
    pub async fn reload(&mut self, document: &str) -> Result<(), StartError> {
        let checked = hermes_model::check(document, &self.base).inspect_err(|_| self.node.refused())?;
        let warnings = warnings(&checked);
        self.node.apply(Arc::new(checked.snapshot)).await?;
        self.warnings = warnings;
        Ok(())
    }

    /// Warnings about the running document: parts that are legal, but probably unintended.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// The actual addresses of the listeners.
    pub fn addresses(&self) -> Vec<Bound> {
        self.node.addresses()
    }

    /// The actual address of a listener, with the port that the system chose; `None` if it has no address.
    pub fn address(&self, listener: &str) -> Option<SocketAddr> {
        self.addresses().iter().filter(|bound| &*bound.listener == listener).find_map(|bound| bound.address.socket())
    }

    /// A view of sessions, metrics and the document, for the program itself or for
    /// [`admin::serve`](crate::admin::serve).
    pub fn view(&self) -> NodeView {
        self.node.view()
    }

    /// Stops accepting, and lets sessions finish within the document's `drain`. Returns the number of sessions that
    /// were broken off then.
    pub async fn drain(mut self) -> usize {
        let within = self.node.generation().snapshot.drain;
        self.node.close(false).await;
        // `end` counts the sessions that remain after that time.
        let _ = tokio::time::timeout(within, self.node.emptied()).await;
        self.node.end().await
    }

    /// Ends at once. Returns the number of sessions that were broken off.
    pub async fn stop(mut self) -> usize {
        self.node.close(false).await;
        self.node.end().await
    }
}

fn warnings(checked: &Checked) -> Vec<String> {
    let mut warnings: Vec<String> = checked.warnings.iter().map(ToString::to_string).collect();
    if checked.snapshot.admin.is_some() {
        warnings.push("admin: a node within a program serves none; have the program serve `admin::serve`".to_owned());
    }
    warnings
}
