//! The state directory of a managed node: its key, its certificates, and its last good document.
//!
//! In: certificates and documents from the controller. Out: the same from disk, also after a crash in the middle of a
//! write. Never: a file that other users can read.

use std::io::Write as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use bytes::Bytes;
use hermes_controller::client::ControllerPin;
use hermes_controller::control::Issued;
use hermes_net::lock::{is_writable_by_all, open_own};
use hermes_net::tls::{CertifiedKey, Roots};
use rcgen::{CertificateParams, KeyPair};

/// The maximum size of an identity file.
const MAX_IDENTITY_BYTES: u64 = 1 << 20;

/// The directory of a node that has a controller.
#[derive(Clone, Debug)]
pub(crate) struct StateDir {
    pub(super) directory: PathBuf,
}

impl StateDir {
    /// Opens the directory, or creates it with access for this user only.
    ///
    /// # Errors
    /// The directory cannot be created.
    pub(crate) fn open(directory: &Path) -> anyhow::Result<Self> {
        let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory);
        made.with_context(|| format!("--state {} cannot be made", directory.display()))?;
        if is_writable_by_all(directory)? {
            tracing::warn!(
                directory = %directory.display(),
                "every user of this machine can replace this node's identity; run chmod o-w on the state directory"
            );
        }
        Ok(Self { directory: directory.to_owned() })
    }

    /// Names the directory of a node that may run there, now or before. Creates nothing.
    pub(crate) fn at(directory: &Path) -> Self {
        Self { directory: directory.to_owned() }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// The path of the last good document.
    pub(crate) fn document(&self) -> PathBuf {
        self.path("document.json")
    }

    /// The path of the certificate, which each renewal replaces.
    pub(crate) fn certificate(&self) -> PathBuf {
        self.path(hermes_controller::compile::IDENTITY[0])
    }

    fn key(&self) -> PathBuf {
        self.path(hermes_controller::compile::IDENTITY[1])
    }

    fn authorities(&self) -> PathBuf {
        self.path(hermes_controller::compile::IDENTITY[2])
    }

    pub(crate) fn is_enrolled(&self) -> bool {
        self.certificate().exists() && self.authorities().exists()
    }

    /// Replaces a file atomically. The new content is on disk when this returns.
    pub(crate) fn keep(&self, path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
        let written = || {
            // `node.crt.new`, not `node.new`: the certificate and the key must not share a temporary file.
            let new = path.with_added_extension("new");
            let mut options = std::fs::OpenOptions::new();
            let mut file = open_own(options.write(true).create(true).truncate(true).mode(0o600), &new)?;
            file.write_all(bytes)?;
            file.sync_all()?;
            std::fs::rename(&new, path)?;
            std::fs::File::open(&self.directory)?.sync_all()
        };
        written().with_context(|| format!("cannot write {}", path.display()))
    }

    /// Builds a certificate signing request for this node's key. Creates the key if it does not exist.
    pub(super) fn request(&self) -> anyhow::Result<Bytes> {
        let path = self.key();
        let key = if path.exists() {
            let pem = hermes_net::file::read(&path, MAX_IDENTITY_BYTES)
                .with_context(|| format!("cannot read {}", path.display()))?;
            KeyPair::from_pem(std::str::from_utf8(&pem)?)
                .with_context(|| format!("{} contains no private key", path.display()))?
        } else {
            let key = KeyPair::generate()?;
            self.keep(&path, key.serialize_pem().as_bytes())?;
            key
        };
        Ok(CertificateParams::default().serialize_request(&key)?.der().to_vec().into())
    }

    /// Stores the CA certificates that the node trusts from now on.
    pub(super) fn trust(&self, authorities: &str) -> anyhow::Result<()> {
        // Without a valid CA the node could reach no controller that could correct this.
        Roots::from_pem(authorities.as_bytes()).context("the controller's authorities")?;
        self.keep(&self.authorities(), authorities.as_bytes())
    }

    pub(super) fn take(&self, issued: &Issued) -> anyhow::Result<()> {
        self.trust(&issued.authorities)?;
        // The certificate is written last: its existence marks the node as enrolled.
        self.keep(&self.certificate(), issued.certificate.as_bytes())
    }

    pub(crate) fn identity(&self) -> anyhow::Result<(CertifiedKey, ControllerPin)> {
        let own = CertifiedKey::load(&self.certificate(), &self.key())?;
        let path = self.authorities();
        let pem = hermes_net::file::read(&path, MAX_IDENTITY_BYTES)
            .with_context(|| format!("cannot read {}", path.display()))?;
        Ok((own, ControllerPin::Authorities(String::from_utf8(pem)?)))
    }
}
