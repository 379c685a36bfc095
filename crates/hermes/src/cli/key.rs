//! `hermes key`: the key of self-certifying channels.
//!
//! In: a file. Out: the channels that its key certifies; a new key if the file does not exist. Never: a private key on
//! standard output, or a change of a file that exists.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context as _;
use clap::Parser;
use hermes_net::file;
use hermes_signature::SigningKey;
use serde_json::json;

use super::output::print;

/// Make a key for self-certifying channels, or show the one in a file.
///
/// Only the holder of the key publishes to /pk/NAME/from/..., and only the holder subscribes to /pk/NAME/to/... of any
/// relay. NAME is the SHA-256 of the public key. `hermes publish --key` and `hermes subscribe --key` sign with it.
#[derive(Debug, Parser)]
pub(super) struct Key {
    /// Write a new Ed25519 key to this file (PEM), unless it exists
    file: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Reads a key.
pub(super) fn read(path: &Path) -> anyhow::Result<Arc<SigningKey>> {
    let pem = file::read(path, file::MAX_FILE_BYTES).with_context(|| format!("cannot read {}", path.display()))?;
    let key = SigningKey::from_pem(&pem).with_context(|| path.display().to_string())?;
    Ok(Arc::new(key))
}

impl Key {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let path = self.file.display();
        let created = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&self.file);
        let (key, is_new) = match created {
            Ok(mut file) => {
                let (key, pem) = SigningKey::generate()?;
                file.write_all(pem.as_bytes()).with_context(|| format!("cannot write {path}"))?;
                (Arc::new(key), true)
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists => (read(&self.file)?, false),
            Err(error) => return Err(error).with_context(|| format!("cannot write {path}")),
        };
        let name = key.public().name();
        let [from, to] = ["from", "to"].map(|way| format!("/pk/{name}/{way}/"));
        if self.json {
            print(&format!("{}\n", json!({"name": name, "from": from, "to": to, "created": is_new})))?;
        } else {
            let begin = if is_new { "wrote a new key to" } else { "the key is in" };
            print(&format!(
                "{begin} {path}; its holder alone publishes to the first, and subscribes to the second:\n  {from}...\n  \
                 {to}...\n"
            ))?;
        }
        Ok(ExitCode::SUCCESS)
    }
}
