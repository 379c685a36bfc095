//! Memory of a relay that something holds.
//!
//! In: bytes that arrive, or wait to be sent. Out: a guard that counts them until it is dropped. Never: a bound, which the relay sets.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;

/// The bytes that a publication counts beside its content, for its fields and its place in queues.
pub(crate) const OVERHEAD_BYTES: u64 = 512;

/// Bytes that count towards the memory of a relay until this is dropped: those of a publication that is still arriving, or
/// waits for room.
#[derive(Debug)]
pub struct Reserved {
    bytes: u64,
    memory: Arc<AtomicU64>,
}

impl Reserved {
    pub(crate) fn new(memory: &Arc<AtomicU64>) -> Self {
        memory.fetch_add(OVERHEAD_BYTES, Ordering::Relaxed);
        Self { bytes: OVERHEAD_BYTES, memory: memory.clone() }
    }

    /// Bytes that count until the last reader drops them.
    pub fn hold(mut self, bytes: Vec<u8>) -> Bytes {
        self.add(bytes.len() as u64);
        Bytes::from_owner(HeldBytes { bytes, _reserved: self })
    }

    pub(crate) fn add(&mut self, bytes: u64) -> u64 {
        self.bytes += bytes;
        self.memory.fetch_add(bytes, Ordering::Relaxed) + bytes
    }
}

struct HeldBytes {
    bytes: Vec<u8>,
    _reserved: Reserved,
}

impl AsRef<[u8]> for HeldBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.memory.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
