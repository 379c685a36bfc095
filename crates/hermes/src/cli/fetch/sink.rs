//! Destinations of content: a file that gets its name once it is complete, or a pipe.
//!
//! In: bytes in order. Out: `FILE.part`, with `FILE.part.json` that describes it for a later run, and finally `FILE`.
//! Never: an incomplete `FILE`, or two runs that write to one part.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use hermes_net::lock::open_own;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncWrite, AsyncWriteExt as _};

use super::digest::{Algorithm, Digests, Hashes};
use super::download::Known;

/// Block size for hashing a file.
const BLOCK: usize = 256 << 10;
/// Maximum size of a sidecar file; a larger file is not the program's own.
const SIDECAR: u64 = 64 << 10;
/// An ID that changes with each boot.
const BOOT: &str = "/proc/sys/kernel/random/boot_id";

/// The destination of content.
pub(super) enum Sink {
    Part(PartFile),
    Pipe(Pipe),
}

/// An incomplete file.
pub(super) struct PartFile {
    file: File,
    target: PathBuf,
    path: PathBuf,
    sidecar: PathBuf,
    url: String,
    held: u64,
    /// Number of bytes that are synced to disk.
    synced: u64,
    hashes: Hashes,
    /// True if the hashes cover all data held.
    is_hashed: bool,
    boot: String,
}

/// Standard output, or a device.
pub(super) struct Pipe {
    out: Box<dyn AsyncWrite + Send + Unpin>,
    hashes: Hashes,
}

/// The content of the sidecar file.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Record {
    url: String,
    known: Known,
    /// Number of bytes on disk, which survive a crash of the system.
    synced: u64,
    /// Boot ID of the system whose page cache holds the other bytes.
    boot: String,
}

impl Pipe {
    pub(super) fn new(out: Box<dyn AsyncWrite + Send + Unpin>) -> Self {
        // A pipe cannot be read again, so all algorithms hash from the start.
        Self { out, hashes: Hashes::start(Algorithm::ALL) }
    }
}

impl PartFile {
    /// Opens the part of an earlier run, or starts a new one.
    ///
    /// # Errors
    /// The file cannot be written, or another run writes to it.
    pub(super) fn open(target: &Path, url: &str) -> anyhow::Result<(Self, Option<(u64, Known)>)> {
        let (path, sidecar) = (with_end(target, ".part"), with_end(target, ".part.json"));
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let file = open_own(&mut options, &path).with_context(|| {
            let is_link = path.is_symlink().then_some(": it is a symbolic link; remove it");
            format!("{} cannot be written{}", path.display(), is_link.unwrap_or_default())
        })?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                bail!("{} is being written by another `hermes fetch`; wait for it, or write another -o", path.display())
            }
            Err(TryLockError::Error(error)) => {
                return Err(error).with_context(|| format!("{} cannot be locked", path.display()));
            }
        }
        let boot = fs::read_to_string(BOOT).unwrap_or_default().trim().to_owned();
        let hashes = Hashes::start([Algorithm::Sha256]);
        let (target, url) = (target.to_owned(), url.to_owned());
        let mut part = Self { file, target, path, sidecar, url, held: 0, synced: 0, hashes, is_hashed: true, boot };
        let earlier = part.earlier();
        match &earlier {
            Some((held, _)) => {
                (part.held, part.synced, part.is_hashed) = (*held, 0, false);
                // Data after this offset is unreliable.
                part.file.set_len(*held).with_context(|| part.path.display().to_string())?;
            }
            None => part.restart()?,
        }
        Ok((part, earlier))
    }

    /// Returns the reliable part that an earlier run left for the same URL.
    fn earlier(&self) -> Option<(u64, Known)> {
        let mut text = String::new();
        open_own(OpenOptions::new().read(true), &self.sidecar).ok()?.take(SIDECAR).read_to_string(&mut text).ok()?;
        let record: Record = serde_json::from_str(&text).ok()?;
        let length = self.file.metadata().ok()?.len();
        // After a crash, unsynced data may be lost although the file has its length.
        let same_boot = !self.boot.is_empty() && record.boot == self.boot;
        let held = if same_boot { length } else { length.min(record.synced) };
        (record.url == self.url && held > 0).then_some((held, record.known))
    }

    fn restart(&mut self) -> anyhow::Result<()> {
        self.file.set_len(0).with_context(|| format!("{} cannot be emptied", self.path.display()))?;
        (self.held, self.synced) = (0, 0);
        self.hashes = Hashes::start([Algorithm::Sha256]);
        self.is_hashed = true;
        Ok(())
    }

    fn write(&mut self, data: &[u8]) -> anyhow::Result<()> {
        self.file
            .write_all_at(data, self.held)
            .with_context(|| format!("{} cannot be written", self.path.display()))?;
        self.held += data.len() as u64;
        if self.is_hashed {
            self.hashes.update(data);
        }
        Ok(())
    }

    /// Describes the part for a later run.
    fn remember(&self, known: &Known) -> anyhow::Result<()> {
        let (url, known, boot) = (self.url.clone(), known.clone(), self.boot.clone());
        let record = Record { url, known, synced: self.synced, boot };
        let next = with_end(&self.sidecar, ".next");
        let write = || -> io::Result<()> {
            // A URL may contain secrets.
            let mut options = OpenOptions::new();
            let mut file = open_own(options.write(true).create(true).truncate(true).mode(0o600), &next)?;
            file.write_all(serde_json::to_string(&record).unwrap_or_default().as_bytes())?;
            file.sync_data()?;
            fs::rename(&next, &self.sidecar)
        };
        write().with_context(|| format!("{} cannot be written", self.sidecar.display()))
    }

    fn digests(&mut self, wanted: &Digests) -> anyhow::Result<Digests> {
        let algorithms: Vec<_> = wanted.iter().map(|(algorithm, _)| algorithm).collect();
        if !self.is_hashed || algorithms.iter().any(|algorithm| !self.hashes.has(*algorithm)) {
            let mut hashes = Hashes::start(
                [Algorithm::Sha256]
                    .into_iter()
                    .chain(algorithms.into_iter().filter(|algorithm| *algorithm != Algorithm::Sha256)),
            );
            let mut block = vec![0; BLOCK];
            let mut read = || -> io::Result<()> {
                self.file.seek(SeekFrom::Start(0))?;
                loop {
                    match self.file.read(&mut block)? {
                        0 => return Ok(()),
                        count => hashes.update(&block[..count]),
                    }
                }
            };
            read().with_context(|| format!("{} cannot be read", self.path.display()))?;
            (self.hashes, self.is_hashed) = (hashes, true);
        }
        Ok(self.hashes.so_far())
    }

    fn finish(&self) -> anyhow::Result<()> {
        let publish = || -> io::Result<()> {
            self.file.sync_all()?;
            fs::rename(&self.path, &self.target)
        };
        publish().with_context(|| format!("cannot rename the part to {}", self.target.display()))?;
        // The file is complete. If its directory cannot be synced, a crash now costs at most the new name, and the part
        // remains.
        let folder = self.target.parent().filter(|folder| !folder.as_os_str().is_empty());
        let _ = File::open(folder.unwrap_or(Path::new("."))).and_then(|folder| folder.sync_all());
        // A leftover sidecar file is harmless.
        let _ = fs::remove_file(&self.sidecar);
        Ok(())
    }
}

impl Sink {
    /// Discards the data held; a pipe cannot do that.
    pub(super) fn restart(&mut self) -> anyhow::Result<()> {
        match self {
            Self::Part(part) => part.restart(),
            Self::Pipe(_) => Ok(()),
        }
    }

    pub(super) async fn write(&mut self, data: &[u8]) -> anyhow::Result<()> {
        match self {
            Self::Part(part) => part.write(data),
            Self::Pipe(pipe) => {
                // A reader that stops early does not have the whole object, which is a failure.
                let broken = |error: io::Error| anyhow::anyhow!("writing to standard output: {error}");
                pipe.out.write_all(data).await.map_err(broken)?;
                pipe.out.flush().await.map_err(broken)?;
                pipe.hashes.update(data);
                Ok(())
            }
        }
    }

    /// Records a new representation, or new knowledge of one. This happens before its content is stored, so that no run
    /// mistakes it.
    pub(super) fn remember(&self, known: &Known) -> anyhow::Result<()> {
        match self {
            Self::Part(part) => part.remember(known),
            Self::Pipe(_) => Ok(()),
        }
    }

    /// Syncs the data of a finished attempt.
    pub(super) fn settle(&mut self, known: &Known) -> anyhow::Result<()> {
        match self {
            Self::Part(part) if part.held > 0 => {
                part.file.sync_data().with_context(|| format!("{} cannot be written", part.path.display()))?;
                part.synced = part.held;
                part.remember(known)
            }
            Self::Part(_) | Self::Pipe(_) => Ok(()),
        }
    }

    /// Returns the digests of all data held, including the wanted ones.
    pub(super) fn digests(&mut self, wanted: &Digests) -> anyhow::Result<Digests> {
        match self {
            Self::Part(part) => part.digests(wanted),
            Self::Pipe(pipe) => Ok(pipe.hashes.so_far()),
        }
    }

    /// Completes the file.
    pub(super) fn finish(&self) -> anyhow::Result<()> {
        match self {
            Self::Part(part) => part.finish(),
            Self::Pipe(_) => Ok(()),
        }
    }

    /// Discards the part.
    pub(super) fn discard(&self) {
        if let Self::Part(part) = self {
            // Without its sidecar file, a part that cannot be removed is ignored by later runs.
            let _ = fs::remove_file(&part.sidecar);
            let _ = fs::remove_file(&part.path);
        }
    }

    /// Returns where a later run finds the part.
    pub(super) fn kept(&self) -> Option<&Path> {
        match self {
            Self::Part(part) => (part.held > 0).then_some(&part.path),
            Self::Pipe(_) => None,
        }
    }
}

/// Appends to the whole name: `with_extension` would map `a.tar` and `a.txt` to one name.
fn with_end(path: &Path, end: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(end);
    name.into()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::cli::fetch::response::Validator;

    fn known() -> Known {
        Known { validator: Some(Validator::Etag("\"a\"".into())), total: Some(9), digests: Digests::default() }
    }

    #[tokio::test]
    async fn a_part_is_found_again_by_its_url_and_nobody_elses() {
        let room = tempfile::tempdir().unwrap();
        let target = room.path().join("a.tar");
        let (part, earlier) = PartFile::open(&target, "http://a/").unwrap();
        assert!(earlier.is_none());
        let mut sink = Sink::Part(part);
        sink.remember(&known()).unwrap();
        sink.write(b"held ").await.unwrap();
        let refused = PartFile::open(&target, "http://a/").err().unwrap().to_string();
        assert!(refused.contains("another `hermes fetch`"), "{refused}");
        drop(sink);

        let (part, earlier) = PartFile::open(&target, "http://a/").unwrap();
        assert_eq!(earlier, Some((5, known())));
        let mut sink = Sink::Part(part);
        sink.write(b"more").await.unwrap();
        let found = sink.digests(&Digests::default()).unwrap();
        let mut whole = Hashes::start([Algorithm::Sha256]);
        whole.update(b"held more");
        assert_eq!(found, whole.so_far());
        sink.finish().unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"held more");
        assert_eq!(fs::read_dir(room.path()).unwrap().count(), 1);

        let mut sink = Sink::Part(PartFile::open(&target, "http://a/").unwrap().0);
        sink.remember(&known()).unwrap();
        sink.write(b"x").await.unwrap();
        drop(sink);
        let (part, earlier) = PartFile::open(&target, "http://b/").unwrap();
        assert!(earlier.is_none() && part.file.metadata().unwrap().len() == 0);
    }

    #[tokio::test]
    async fn after_a_crash_of_the_system_only_what_was_synced_counts() {
        let room = tempfile::tempdir().unwrap();
        let target = room.path().join("a");
        let (mut part, _) = PartFile::open(&target, "u").unwrap();
        part.boot = "another".into();
        let mut sink = Sink::Part(part);
        sink.remember(&known()).unwrap();
        sink.write(b"1234").await.unwrap();
        sink.settle(&known()).unwrap();
        sink.write(b"56").await.unwrap();
        drop(sink);
        let (part, earlier) = PartFile::open(&target, "u").unwrap();
        assert_eq!(earlier.unwrap().0, 4);
        assert_eq!(part.file.metadata().unwrap().len(), 4);
    }
}
