//! Where the controller's state is: a log of entries, each with its revision, and a base that the first ones became.
//!
//! In: entries, appended by who knows all before them. Out: the same, in their order, to every controller.
//! Never: what an entry means. State is what its entries come to ([`crate::state`]), so that all that a store has to do is
//! to keep their order and to lose none.
//!
//! Appending is compare-and-set: of two controllers that both know revision 7 one appends entry 8, and the other one hears
//! that it is behind, reads that, and tries again. That is all that transactions, single use and optimistic concurrency need.

mod etcd;
mod sqlite;

use bytes::Bytes;
use futures_util::future::BoxFuture;

pub use etcd::{Credentials, Etcd};
pub use sqlite::Sqlite;

/// How many entries there were, up to one of them; the first is 1. 0 is nothing at all.
pub type Revision = u64;

/// The largest entry: what one `apply` may come to.
pub const MAX_ENTRY: usize = 64 << 20;

/// One entry of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its place.
    pub revision: Revision,
    /// What it says.
    pub bytes: Bytes,
}

/// What the first entries came to: who begins needs none of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Base {
    /// Up to this one.
    pub revision: Revision,
    /// The state then.
    pub state: Bytes,
}

/// What was read after a revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum After {
    /// Entries from the next one on, as many as are read at once; none where there are no more.
    Entries(Vec<Entry>),
    /// The next one is not there any more: begin at the base.
    Gone,
    /// The entry of that revision itself is not in the store: it was wiped, or has an older backup.
    Lost,
}

/// Why something could not be done.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Another entry stands there: read it first.
    #[error("the store has entries after revision {0}; read them and try again")]
    Behind(Revision),
    /// It is larger than any store takes.
    #[error("an entry of {0} bytes is larger than the {MAX_ENTRY} that are taken; apply less at once")]
    TooLarge(usize),
    /// Another process has it.
    #[error("{0} is in use by another controller; end that one, or give this one a --data directory of its own")]
    InUse(String),
    /// There is something in it already.
    #[error(
        "the store has an overlay already; restore to an empty one, with a --data directory or a prefix of its own"
    )]
    NotEmpty,
    /// It is of another version, or no store at all.
    #[error("{0} is no store of this version of Hermes: {1}")]
    Foreign(String, String),
    /// The store has not answered whether an entry was appended.
    #[error(
        "outcome unknown: the store did not answer in time ({0}). The change may have been made; the controller reads the store \
         again, and its audit log has what became of it"
    )]
    Unknown(String),
    /// The store has less than a controller has read from it.
    #[error(
        "the store has lost revision {0}, which this controller has read: it was wiped, or has an older backup. Nodes keep what \
         they run, and nothing can be changed. `hermes backup` still has all of it: restore that into the empty store, and \
         restart the controllers"
    )]
    Lost(Revision),
    /// It does not answer, or answers that it cannot.
    #[error("the store cannot {0}: {1}")]
    Unable(&'static str, String),
}

/// A log that controllers share.
pub trait Store: Send + Sync + 'static {
    /// What the first entries came to. `None`: the log is there from its first entry on.
    ///
    /// # Errors
    /// The store cannot be read.
    fn base(&self) -> BoxFuture<'_, Result<Option<Base>, StoreError>>;

    /// Entries after this revision: at least one where there is one, and not more than fit memory.
    ///
    /// # Errors
    /// The store cannot be read.
    fn read(&self, after: Revision) -> BoxFuture<'_, Result<After, StoreError>>;

    /// Appends an entry behind this revision, which is the last one. It survives whatever happens from then on.
    ///
    /// # Errors
    /// Another one is the last; or the entry cannot be written, and it is not known whether it will be: read on to see.
    fn append(&self, after: Revision, bytes: Bytes) -> BoxFuture<'_, Result<Revision, StoreError>>;

    /// Waits until there may be an entry after this revision. It may end early.
    ///
    /// # Errors
    /// The store cannot be read.
    fn changed(&self, after: Revision) -> BoxFuture<'_, Result<(), StoreError>>;

    /// Entries up to the base's revision are not needed any more. One that is older than what is there changes nothing.
    ///
    /// # Errors
    /// It cannot be written; all is as it was.
    fn compact(&self, base: Base) -> BoxFuture<'_, Result<(), StoreError>>;

    /// Begins with this, where there is nothing yet: a backup is restored.
    ///
    /// # Errors
    /// There is something; or it cannot be written.
    fn begin(&self, base: Base) -> BoxFuture<'_, Result<(), StoreError>>;

    /// What controllers say to each other beside the log. `None`: this store has one controller.
    fn shared(&self) -> Option<&dyn StatusExchange> {
        None
    }
}

/// Of a subject, what is said; `None`: nothing any more.
pub type StatusUpdate = (String, Option<Bytes>);

/// What another controller says of a subject.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatusEntry {
    /// Who.
    pub by: String,
    /// Of whom.
    pub subject: String,
    /// What. `None`: nothing any more, or who said it has gone.
    pub words: Option<Bytes>,
    /// Later ones have a higher one, whoever says them.
    pub at: i64,
}

/// What is heard of other controllers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StatusEvent {
    /// All that they say: what was heard before counts no more.
    Snapshot(Vec<StatusEntry>),
    /// Something new.
    Update(StatusEntry),
}

/// What controllers say to each other, each for as long as it lives: it is no part of the log, and gone when they are.
pub trait StatusExchange: Send + Sync {
    /// Says this, in the place of what was said of the same subjects before. To be called every three seconds at the least, with
    /// nothing if need be: who is silent for ten has gone.
    ///
    /// # Errors
    /// It could not be said. All that was said so far is to be said again.
    fn say(&self, said: Vec<StatusUpdate>) -> BoxFuture<'_, Result<(), StoreError>>;

    /// Hears what others say, for as long as it is polled.
    ///
    /// # Errors
    /// The store cannot be followed any more: begin again.
    fn hear<'s>(&'s self, hear: &'s (dyn Fn(StatusEvent) + Send + Sync)) -> BoxFuture<'s, Result<(), StoreError>>;
}
