//! The store of the controller's state: a log of entries with revisions, and a base that replaces the first entries.
//!
//! In: entries, each appended by a controller that has read all before it. Out: the same entries, in order, to every
//! controller.
//! Never: the meaning of entries. [`crate::state`] derives the state, so that a store only has to preserve the order
//! and all entries.
//!
//! Appending is compare-and-set. If two controllers both know revision 7, one appends entry 8. The other receives
//! [`StoreError::Behind`], reads entry 8, and tries again. Transactions, single use and optimistic concurrency need no
//! more.

mod etcd;
mod sqlite;

use bytes::Bytes;
use futures_util::future::BoxFuture;

pub use etcd::{Credentials, Etcd};
pub use sqlite::Sqlite;

/// The number of an entry in the log. The first entry is 1; 0 stands for the empty log.
pub type Revision = u64;

/// The maximum size of an entry, and so of one `apply`, in bytes.
pub const MAX_ENTRY: usize = 64 << 20;

/// An entry of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The revision.
    pub revision: Revision,
    /// The content.
    pub bytes: Bytes,
}

/// The state after the first entries of the log. It replaces them, so that a starting controller need not read them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BaseState {
    /// The revision of the state.
    pub revision: Revision,
    /// The state.
    pub state: Bytes,
}

/// The result of reading after a revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LogRead {
    /// The next entries, as many as are read at once; empty if there are none.
    Entries(Vec<Entry>),
    /// The next entry was compacted: begin at the base.
    Gone,
    /// The entry of that revision itself is missing: the store was wiped, or has an older backup.
    Lost,
}

/// The reason why a store failed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Another entry has the revision: read it first.
    #[error("the store has entries after revision {0}; read them and try again")]
    Behind(Revision),
    /// The entry is larger than any store accepts.
    #[error("entry of {0} bytes exceeds the limit of {MAX_ENTRY}; apply fewer documents at once")]
    TooLarge(usize),
    /// Another process uses the store.
    #[error("{0} is in use by another controller; stop that one, or give this one another --data directory")]
    InUse(String),
    /// The store is not empty.
    #[error("the store is not empty; restore to an empty one, with another --data directory or prefix")]
    NotEmpty,
    /// The store is of another version, or not a store.
    #[error("{0} is not a store of this version of Hermes: {1}")]
    Foreign(String, String),
    /// The store did not answer whether an entry was appended.
    #[error(
        "outcome unknown: the store did not answer in time ({0}). The change may have been made; the controller \
         reads the store again, and its audit log will have the outcome"
    )]
    Unknown(String),
    /// The store has less than this controller has read from it.
    #[error(
        "the store has lost revision {0}, which this controller has read: it was wiped, or has an older backup. \
         Nodes keep their documents, and changes are refused. `hermes backup` still has everything: restore that \
         into an empty store, and restart the controllers"
    )]
    Lost(Revision),
    /// The store did not answer, or refused.
    #[error("the store cannot {0}: {1}")]
    Unable(&'static str, String),
}

/// A log that controllers share.
pub trait Store: Send + Sync + 'static {
    /// Returns the base; `None` if the log begins at its first entry.
    ///
    /// # Errors
    /// The store cannot be read.
    fn base(&self) -> BoxFuture<'_, Result<Option<BaseState>, StoreError>>;

    /// Reads entries after this revision: at least one if there is one, and not more than fit memory.
    ///
    /// # Errors
    /// The store cannot be read.
    fn read(&self, after: Revision) -> BoxFuture<'_, Result<LogRead, StoreError>>;

    /// Appends an entry after this revision, which must be the last one. An appended entry is durable.
    ///
    /// # Errors
    /// Another entry is the last one; or the write failed, and its outcome is unknown until the next read.
    fn append(&self, after: Revision, bytes: Bytes) -> BoxFuture<'_, Result<Revision, StoreError>>;

    /// Waits until there may be an entry after this revision. May return early.
    ///
    /// # Errors
    /// The store cannot be read.
    fn changed(&self, after: Revision) -> BoxFuture<'_, Result<(), StoreError>>;

    /// Replaces entries up to the base's revision. An older base than the current one changes nothing.
    ///
    /// # Errors
    /// The base cannot be written; the store is unchanged.
    fn compact(&self, base: BaseState) -> BoxFuture<'_, Result<(), StoreError>>;

    /// Restores a backup: begins an empty log with this base.
    ///
    /// # Errors
    /// The store is not empty, or cannot be written.
    fn begin(&self, base: BaseState) -> BoxFuture<'_, Result<(), StoreError>>;

    /// The status exchange between controllers, outside the log; `None` if this store supports only one controller.
    fn shared(&self) -> Option<&dyn StatusExchange> {
        None
    }
}

/// The name of a subject, and its status; `None` if the status was removed.
pub type StatusUpdate = (String, Option<Bytes>);

/// A status that another controller published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatusEntry {
    /// The controller that published the status.
    pub by: String,
    /// The name of the subject, such as a node.
    pub subject: String,
    /// The status; `None` if it was removed, or the controller has disconnected.
    pub words: Option<Bytes>,
    /// A number that orders the entries of all controllers: later entries have higher numbers.
    pub at: i64,
}

/// An event of the status exchange.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StatusEvent {
    /// The current status of all subjects. Replaces all earlier entries.
    Snapshot(Vec<StatusEntry>),
    /// A changed status.
    Update(StatusEntry),
}

/// The status exchange between controllers. An entry lasts as long as its controller is connected.
pub trait StatusExchange: Send + Sync {
    /// Publishes the status of these subjects. The caller must call it at least every three seconds, if necessary with
    /// an empty list. Otherwise, the entries of the controller expire after ten seconds.
    ///
    /// # Errors
    /// The publication failed. All entries must be published again.
    fn publish_status(&self, said: Vec<StatusUpdate>) -> BoxFuture<'_, Result<(), StoreError>>;

    /// Follows what other controllers publish, for as long as it is polled.
    ///
    /// # Errors
    /// The store cannot be followed: subscribe again.
    fn watch_status<'s>(
        &'s self,
        hear: &'s (dyn Fn(StatusEvent) + Send + Sync),
    ) -> BoxFuture<'s, Result<(), StoreError>>;
}
