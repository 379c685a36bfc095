//! The file format of the disk tier: a head in an area with room to grow, then the content.
//!
//! In: a response. Out: the same response, or an error. Digests cover the head and each block of the content. A
//! truncated or damaged file is thus detected when it is read, and never served.

use std::fs::OpenOptions;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::Arc;

use aws_lc_rs::digest::{SHA256, digest};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use hermes_net::lock::open_own;
use http::header::HeaderName;
use http::{HeaderMap, HeaderValue, StatusCode, Version};
use serde::{Deserialize, Serialize};

use crate::content::{CHUNK_COST, Charge, ChargedBytes, Content, Run, StoredRanges};
use crate::head::{Head, Times};
use crate::key::Vary;

/// Version of the format; files of another version are dropped.
const MAGIC: &[u8; 8] = b"HERMESC1";
/// Length of the fixed fields: the magic, the area's length, the head's length, and the head's digest.
const FIXED: usize = 8 + 4 + 4 + DIGEST;
const DIGEST: usize = 16;
/// The area of a head is a multiple of this length, so that a slightly longer head still fits.
const AREA: usize = 4096;
/// Maximum length of a head.
const MAX_HEAD: usize = 4 << 20;
/// Bytes covered by one digest, and read at once.
const BLOCK: usize = 64 << 10;

const VERSIONS: [Version; 5] = [Version::HTTP_09, Version::HTTP_10, Version::HTTP_11, Version::HTTP_2, Version::HTTP_3];

#[derive(Serialize, Deserialize)]
struct Written {
    key: String,
    status: u16,
    version: u8,
    shared: bool,
    asked: u64,
    came: u64,
    vary: Vec<(String, Option<String>)>,
    headers: Vec<(String, String)>,
    total: u64,
    runs: Vec<(u64, u64)>,
    sums: Vec<String>,
}

/// The layout of a file.
pub(crate) struct Layout {
    area: usize,
    shape: StoredRanges,
    sums: Vec<String>,
}

impl Layout {
    /// Length of the file.
    pub(crate) fn bytes(&self) -> u64 {
        self.area as u64 + self.shape.stored_bytes()
    }

    pub(crate) fn shape(&self) -> StoredRanges {
        self.shape.clone()
    }

    /// Writes a file.
    pub(crate) fn write(path: &Path, key: &str, head: &Head, content: &Content) -> io::Result<Self> {
        let shape = content.shape();
        let sums = blocks(&shape).map(|block| sum(&gather(content, &block))).collect();
        let mut this = Self { area: 0, shape, sums };
        let head = this.head(key, head)?;
        // The spare room lets [`Layout::patch`] write a slightly longer head.
        this.area = (FIXED + head.len() + AREA / 2).next_multiple_of(AREA);
        // The mode is private, because the content may belong to one user.
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
        file.write_all(&this.area(&head))?;
        for block in blocks(&this.shape) {
            file.write_all(&gather(content, &block))?;
        }
        Ok(this)
    }

    /// Replaces the head of a file.
    pub(crate) fn patch(&mut self, path: &Path, key: &str, head: &Head) -> io::Result<()> {
        let head = self.head(key, head)?;
        if FIXED + head.len() > self.area {
            return Err(io::Error::other("the head has grown beyond its reserved space"));
        }
        open_own(OpenOptions::new().write(true), path)?.write_all(&self.area(&head))
    }

    /// Opens a file, and reads its layout, key and head.
    pub(crate) fn open(path: &Path) -> io::Result<(Self, Arc<str>, Head)> {
        let mut file = open_own(OpenOptions::new().read(true), path)?;
        let mut fixed = [0; FIXED];
        file.read_exact(&mut fixed)?;
        let number = |at: usize| u32::from_le_bytes([fixed[at], fixed[at + 1], fixed[at + 2], fixed[at + 3]]) as usize;
        let (area, length) = (number(8), number(12));
        if &fixed[..8] != MAGIC || length > MAX_HEAD || FIXED + length > area {
            return Err(io::Error::other("not a cache file of this version"));
        }
        let mut text = vec![0; length];
        file.read_exact(&mut text)?;
        if fixed[16..] != digest(&SHA256, &text).as_ref()[..DIGEST] {
            return Err(io::Error::other("corrupt head: checksum mismatch"));
        }
        let written: Written = serde_json::from_slice(&text).map_err(io::Error::other)?;
        let runs = written.runs.iter().map(|(start, end)| *start..*end).collect();
        let this = Self { area, shape: StoredRanges { total: written.total, runs }, sums: written.sums.clone() };
        let is_sane = this.shape.runs.iter().all(|run| run.start < run.end && run.end <= this.shape.total)
            && blocks(&this.shape).count() == this.sums.len()
            && file.metadata()?.len() == this.bytes();
        if !is_sane {
            return Err(io::Error::other("truncated file"));
        }
        let (key, head) = written.read().ok_or_else(|| io::Error::other("invalid head"))?;
        Ok((this, key, head))
    }

    /// Reads the content of a file. Fails with [`io::ErrorKind::OutOfMemory`] if there is no room in memory.
    pub(crate) fn read(&self, path: &Path, room: impl Fn(usize) -> Option<Charge>) -> io::Result<Content> {
        let mut file = open_own(OpenOptions::new().read(true), path)?;
        file.seek(SeekFrom::Start(self.area as u64))?;
        let mut runs: Vec<Run> = Vec::new();
        for (block, expected) in blocks(&self.shape).zip(&self.sums) {
            let length = (block.end - block.start) as usize;
            let charge = room(length + CHUNK_COST).ok_or(io::ErrorKind::OutOfMemory)?;
            let mut bytes = vec![0; length];
            file.read_exact(&mut bytes)?;
            if sum(&bytes) != *expected {
                return Err(io::Error::other("corrupt content: checksum mismatch"));
            }
            if runs.last().is_none_or(|run| run.range().end != block.start) {
                runs.push(Run::at(block.start));
            }
            if let Some(run) = runs.last_mut() {
                run.push(ChargedBytes { bytes, charge }.into_chunk());
            }
        }
        Ok(Content::new(runs, self.shape.total))
    }

    fn head(&self, key: &str, head: &Head) -> io::Result<Vec<u8>> {
        let headers = head.headers.iter().map(|(name, value)| (name.to_string(), STANDARD_NO_PAD.encode(value)));
        let vary = head.vary.0.iter().map(|(name, value)| (name.to_string(), value.clone()));
        let written = Written {
            key: key.to_owned(),
            status: head.status.as_u16(),
            version: VERSIONS.iter().position(|version| *version == head.version).unwrap_or(2) as u8,
            shared: head.shared,
            asked: head.times.asked,
            came: head.times.came,
            vary: vary.collect(),
            headers: headers.collect(),
            total: self.shape.total,
            runs: self.shape.runs.iter().map(|run| (run.start, run.end)).collect(),
            sums: self.sums.clone(),
        };
        serde_json::to_vec(&written).map_err(io::Error::other)
    }

    fn area(&self, head: &[u8]) -> Vec<u8> {
        let mut area = Vec::with_capacity(self.area);
        area.extend_from_slice(MAGIC);
        area.extend_from_slice(&(self.area as u32).to_le_bytes());
        area.extend_from_slice(&(head.len() as u32).to_le_bytes());
        area.extend_from_slice(&digest(&SHA256, head).as_ref()[..DIGEST]);
        area.extend_from_slice(head);
        area.resize(self.area, 0);
        area
    }
}

impl Written {
    fn read(self) -> Option<(Arc<str>, Head)> {
        let mut headers = HeaderMap::new();
        for (name, value) in &self.headers {
            let name = HeaderName::from_bytes(name.as_bytes()).ok()?;
            let value = STANDARD_NO_PAD.decode(value).ok()?;
            headers.append(name, HeaderValue::from_bytes(&value).ok()?);
        }
        let vary =
            self.vary.into_iter().map(|(name, value)| Some((HeaderName::from_bytes(name.as_bytes()).ok()?, value)));
        let vary = Vary(vary.collect::<Option<_>>()?);
        let version = *VERSIONS.get(usize::from(self.version))?;
        let times = Times { asked: self.asked, came: self.came };
        let status = StatusCode::from_u16(self.status).ok()?;
        Some((self.key.into(), Head::again(status, version, headers, vary, times, self.shared)))
    }
}

/// Splits the stored runs into ranges of at most [`BLOCK`] bytes, in order.
fn blocks(shape: &StoredRanges) -> impl Iterator<Item = Range<u64>> + '_ {
    shape.runs.iter().flat_map(|run| {
        let end = run.end;
        (run.start..end).step_by(BLOCK).map(move |start| start..end.min(start + BLOCK as u64))
    })
}

fn gather(content: &Content, block: &Range<u64>) -> Vec<u8> {
    let mut bytes = Vec::with_capacity((block.end - block.start) as usize);
    let mut at = block.start;
    while at < block.end {
        let Some(slice) = content.slice(at) else { break };
        let most = slice.len().min((block.end - at) as usize);
        bytes.extend_from_slice(&slice[..most]);
        at += most as u64;
    }
    bytes
}

fn sum(bytes: &[u8]) -> String {
    STANDARD_NO_PAD.encode(&digest(&SHA256, bytes).as_ref()[..DIGEST])
}

#[cfg(test)]
mod tests;
