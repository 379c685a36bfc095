//! A node within another program: the entry for those who link the data plane as a library.
//!
//! In: the text of a node document, and later ones. Out: a running node with threads of its own, its addresses, and an
//! end in order. The program's own connections go to its listeners as those of any other program.
//! Never: signals, descriptor limits, files that change, takeovers, or an admin endpoint: those are the program's
//! affair, as in the `hermes` binary.
//!
//! `crates/hermes-proxy/examples/embedded.rs` is a whole program.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hermes_model::{Checked, Problem};

use crate::generation::Unready;
use crate::node::{Bound, Node, NodeView};

/// A node that runs within this program. Dropped without [`Embedded::drain`] or [`Embedded::stop`], its threads end by
/// themselves, and its sessions are broken off.
pub struct Embedded {
    node: Node,
    base: PathBuf,
    warnings: Vec<String>,
}

/// Why a document does not run: every reason, each with its place in the document and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Refused(Vec<String>);

impl Refused {
    /// One sentence for each reason.
    pub fn reasons(&self) -> &[String] {
        &self.0
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the document cannot be run: {}", self.0.join("; "))
    }
}

impl From<Vec<Problem>> for Refused {
    fn from(problems: Vec<Problem>) -> Self {
        Self(problems.iter().map(ToString::to_string).collect())
    }
}

impl From<Vec<Unready>> for Refused {
    fn from(faults: Vec<Unready>) -> Self {
        Self(faults.iter().map(ToString::to_string).collect())
    }
}

impl Embedded {
    /// Runs a node by the text of a document; files that it names are relative to `base`. Called on a runtime of tokio
    /// with time and I/O; the node's workers have runtimes of their own. Records of sessions go where `access-log` says:
    /// by default to standard output.
    ///
    /// # Errors
    /// The document has problems, a file cannot be loaded, or an address cannot be bound: nothing runs then.
    pub async fn run(document: &str, base: &Path) -> Result<Self, Refused> {
        let checked = hermes_model::check(document, base)?;
        let warnings = warnings(&checked);
        let node = Node::start(Arc::new(checked.snapshot), Vec::new()).await?;
        Ok(Self { node, base: base.to_owned(), warnings })
    }

    /// Applies another document, whole or not at all. Sessions that it allows live on.
    ///
    /// # Errors
    /// As [`Embedded::run`]; the node goes on with the document that it has.
    pub async fn reload(&mut self, document: &str) -> Result<(), Refused> {
        let checked = hermes_model::check(document, &self.base).inspect_err(|_| self.node.refused())?;
        let warnings = warnings(&checked);
        self.node.apply(Arc::new(checked.snapshot)).await?;
        self.warnings = warnings;
        Ok(())
    }

    /// What of the running document is legal, and probably not meant.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Where the listeners really listen.
    pub fn addresses(&self) -> Vec<Bound> {
        self.node.addresses()
    }

    /// Where a listener really listens, with the port that the system chose; `None`: it has no address.
    pub fn address(&self, listener: &str) -> Option<SocketAddr> {
        self.addresses().into_iter().find(|bound| &*bound.listener == listener).map(|bound| bound.address)
    }

    /// Sessions, metrics and the document of the node, for the program's own eyes, or for
    /// [`admin::serve`](crate::admin::serve).
    pub fn view(&self) -> NodeView {
        self.node.view()
    }

    /// Accepts no more, and lets sessions finish within the document's `drain`. Returns how many were broken off then.
    pub async fn drain(mut self) -> usize {
        let within = self.node.generation().snapshot.drain;
        self.node.close(false).await;
        // What is left after that time is what `end` counts.
        let _ = tokio::time::timeout(within, self.node.emptied()).await;
        self.node.end().await
    }

    /// Ends at once. Returns how many sessions were broken off.
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
