//! Reads node documents from disk.
//!
//! In: a path. Out: the result of `check`. Files that the document names and that do not exist are warnings, because
//! the machine that checks a document need not be the one that runs it.

use std::ffi::OsStr;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use hermes_model::check::yaml_position::locate;
use hermes_model::trust::own_overlay;
use hermes_model::{Checked, Located, Problem, Snapshot, unproven};
use hermes_net::tls::CertifiedKey;

/// The maximum wait for the writer of a named pipe.
const WRITER_TIMEOUT: Duration = Duration::from_secs(5);
/// The largest document that is read: about a million routes.
pub(crate) const MAX_DOCUMENT: u64 = 256 << 20;

/// The key of the node's own certificate in a document.
const IDENTITY: &str = "identity";

/// Reads and checks the document that a node runs: a regular file, so that reading never blocks.
///
/// # Errors
/// The file cannot be read. Problems of its content are the inner error.
pub(crate) fn read_at_once(path: &Path) -> anyhow::Result<Result<Checked, Vec<Located>>> {
    let cannot = || format!("cannot read {}", path.display());
    let bytes = hermes_net::file::read(path, MAX_DOCUMENT).with_context(cannot)?;
    Ok(check(path, &String::from_utf8(bytes).with_context(cannot)?))
}

/// Reads and checks a document, which may come through a pipe.
///
/// # Errors
/// The file cannot be read. Problems of its content are the inner error.
pub(crate) fn read(path: &Path) -> anyhow::Result<Result<Checked, Vec<Located>>> {
    Ok(check(path, &text(path)?))
}

/// The name of standard input in place of a file.
pub(crate) const STDIN: &str = "-";

/// Expands the named paths: a directory becomes its documents, by name.
///
/// # Errors
/// A directory cannot be read, or has no document.
pub(crate) fn listed(paths: &[PathBuf]) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for path in paths {
        if path == Path::new(STDIN) || !path.is_dir() {
            files.push(path.clone());
            continue;
        }
        let cannot = || format!("cannot read directory {}", path.display());
        let entries = std::fs::read_dir(path).with_context(cannot)?.collect::<Result<Vec<_>, _>>();
        let is_document = |file: &PathBuf| {
            let ending = file.extension().and_then(OsStr::to_str);
            ending.is_some_and(|ending| ["yaml", "yml", "json"].contains(&ending)) && !file.is_dir()
        };
        let mut found: Vec<_> =
            entries.with_context(cannot)?.iter().map(std::fs::DirEntry::path).filter(is_document).collect();
        anyhow::ensure!(!found.is_empty(), "directory {} has no file *.yaml, *.yml or *.json", path.display());
        found.sort();
        files.append(&mut found);
    }
    Ok(files)
}

/// Reads a document's text, which may come through a pipe; `-` is standard input.
///
/// # Errors
/// The file cannot be read.
pub(crate) fn text(path: &Path) -> anyhow::Result<String> {
    if path == Path::new(STDIN) {
        return limited(std::io::stdin().lock(), "standard input");
    }
    let file = hermes_net::file::open_or_pipe(path, MAX_DOCUMENT, WRITER_TIMEOUT);
    limited(file.with_context(|| format!("cannot read {}", path.display()))?, &path.display().to_string())
}

fn limited(reader: impl std::io::Read, name: &str) -> anyhow::Result<String> {
    let mut text = String::new();
    // Reading a device may never end, and its size is unknown beforehand.
    let read = reader.take(MAX_DOCUMENT + 1).read_to_string(&mut text);
    read.with_context(|| format!("cannot read {name}"))?;
    anyhow::ensure!(text.len() as u64 <= MAX_DOCUMENT, "{name} has more than {MAX_DOCUMENT} bytes");
    Ok(text)
}

/// Checks a document's text; `path` is where it came from.
pub(crate) fn check(path: &Path, text: &str) -> Result<Checked, Vec<Located>> {
    let checked = hermes_model::check(text, base(path)).map_err(|problems| locate(text, problems))?;
    let mut checked = look_around(checked);
    if let Some(identity) = &checked.snapshot.identity
        && let Ok(key) = CertifiedKey::load(&identity.cert, &identity.key)
    {
        checked.warnings.extend(unproven(&checked.snapshot, key.uris().iter().map(String::as_str)));
    }
    Ok(checked)
}

/// Checks a document from a controller. The check of `identity` against the certificate is left to the controller.
pub(crate) fn check_json(path: &Path, bytes: &[u8]) -> Result<Checked, Vec<Problem>> {
    Ok(look_around(hermes_model::check_json(bytes, base(path))?))
}

fn base(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new("."))
}

/// Adds warnings about this machine: files that are named and missing.
fn look_around(mut checked: Checked) -> Checked {
    let missing: Vec<Problem> = files(&checked.snapshot)
        .into_iter()
        .filter(|(_, file)| !file.exists())
        .map(|(path, file)| Problem {
            path,
            message: format!("{} does not exist on this machine; the node will not start without it", file.display()),
        })
        .collect();
    checked.warnings.extend(missing);
    checked
}

/// Reports a certificate of the node itself, at this path of the document, that belongs to another node.
pub(crate) fn misnamed(snapshot: &Snapshot, path: &str, key: &CertifiedKey) -> Option<Problem> {
    let uris = key.uris();
    let reason = own_overlay(uris.iter().map(String::as_str), &snapshot.node).err();
    let message = format!("{}; issue one that fits, or correct the document", reason.filter(|_| path == IDENTITY)?);
    Some(Problem { path: format!("{IDENTITY}.cert"), message })
}

/// The certificates and private keys that a document names in pairs, with their paths in the document.
pub(crate) fn pairs(snapshot: &Snapshot) -> Vec<(String, &Path, &Path)> {
    let own = snapshot.identity.iter().map(|identity| (IDENTITY.to_owned(), &*identity.cert, &*identity.key));
    let of_listeners = snapshot.listeners.iter().enumerate().filter_map(|(index, listener)| {
        let (cert, key) = listener.tls.as_ref()?.cert_key.as_ref()?;
        Some((format!("listeners[{index}].tls"), &**cert, &**key))
    });
    own.chain(of_listeners).collect()
}

/// All files that a document names, with their paths in the document.
pub(crate) fn files(snapshot: &Snapshot) -> Vec<(String, &Path)> {
    let of_pair = |(at, cert, key)| [(format!("{at}.cert"), cert), (format!("{at}.key"), key)];
    let mut files: Vec<(String, &Path)> = pairs(snapshot).into_iter().flat_map(of_pair).collect();
    files.extend(snapshot.identity.iter().map(|identity| ("identity.ca".to_owned(), &*identity.ca)));
    for (index, listener) in snapshot.listeners.iter().enumerate() {
        if let Some(ca) = listener.tls.as_ref().and_then(|tls| tls.client_ca.as_deref()) {
            files.push((format!("listeners[{index}].tls.ca"), ca));
        }
    }
    for (index, upstream) in snapshot.upstreams.iter().enumerate() {
        if let Some(ca) = upstream.tls.as_ref().and_then(|tls| tls.ca.as_deref()) {
            files.push((format!("upstreams[{index}].tls.ca"), ca));
        }
    }
    files
}
