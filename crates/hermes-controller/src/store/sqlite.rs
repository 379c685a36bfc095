//! The built-in store: an SQLite file in the controller's directory.
//!
//! In: the directory. Out: a log that survives kill -9 and power loss, for one controller.
//! Never: a query on the runtime's threads. Each query runs on a blocking thread.

use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use rusqlite::{Connection, OptionalExtension as _, TransactionBehavior, params};
use tokio::sync::watch;

use super::{BaseState, Entry, LogRead, MAX_ENTRY, Revision, Store, StoreError};

/// The name of the file.
const FILE: &str = "controller.db";
/// The application id of the file, which `file` shows: "Herm".
const APPLICATION: i64 = 0x4865_726d;
const VERSION: i64 = 1;
/// The maximum number of bytes of one read; at least one entry is read.
const MAX_READ_BYTES: usize = 4 << 20;

/// A log in a file.
pub struct Sqlite {
    connection: Arc<Mutex<Connection>>,
    /// The last revision. No other process writes the file.
    last: watch::Sender<Revision>,
}

impl Sqlite {
    /// Opens or creates the store in this directory.
    ///
    /// # Errors
    /// Another process uses it, or the file is not a store.
    pub fn open(directory: &Path) -> Result<Self, StoreError> {
        let path = directory.join(FILE);
        let shown = || path.display().to_string();
        // The file contains the CA's key. Files that SQLite creates beside it have the same permissions.
        let made = std::fs::OpenOptions::new().append(true).create(true).mode(0o600).open(&path);
        made.map_err(|error| StoreError::Unable("open its file", error.to_string()))?;
        let connection = Connection::open(&path).map_err(|error| unable("open its file", &error))?;
        prepare(&connection).map_err(|error| match error.sqlite_error_code() {
            Some(rusqlite::ErrorCode::DatabaseBusy | rusqlite::ErrorCode::DatabaseLocked) => StoreError::InUse(shown()),
            Some(rusqlite::ErrorCode::NotADatabase) => StoreError::Foreign(shown(), "not an SQLite file".to_owned()),
            _ => unable("open its file", &error),
        })?;
        let pragma = |name: &str| connection.query_row(&format!("PRAGMA {name}"), [], |row| row.get::<_, i64>(0));
        let found = pragma("application_id").and_then(|id| Ok((id, pragma("user_version")?)));
        match found.map_err(|error| unable("read its file", &error))? {
            (APPLICATION, VERSION) => {}
            (0, 0) => make(&connection).map_err(|error| unable("make its tables", &error))?,
            (APPLICATION, version) => {
                let why = format!("version {version}, expected {VERSION}");
                return Err(StoreError::Foreign(shown(), why));
            }
            _ => return Err(StoreError::Foreign(shown(), "an SQLite file of another program".to_owned())),
        }
        let last = last(&connection).map_err(|error| unable("read its file", &error))?;
        Ok(Self { connection: Arc::new(Mutex::new(connection)), last: watch::Sender::new(last) })
    }

    fn run<T: Send + 'static>(
        &self,
        what: &'static str,
        query: impl FnOnce(&mut Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> BoxFuture<'_, Result<T, StoreError>> {
        let connection = self.connection.clone();
        Box::pin(async move {
            let queried = tokio::task::spawn_blocking(move || {
                query(&mut connection.lock().unwrap_or_else(PoisonError::into_inner))
            });
            let queried = queried.await.map_err(|error| StoreError::Unable(what, error.to_string()))?;
            queried.map_err(|error| unable(what, &error))
        })
    }
}

/// Locks the file for this process, and makes each commit durable.
fn prepare(connection: &Connection) -> rusqlite::Result<()> {
    connection.busy_timeout(std::time::Duration::ZERO)?;
    connection.pragma_update(None, "locking_mode", "exclusive")?;
    connection.pragma_update(None, "journal_mode", "wal")?;
    connection.pragma_update(None, "synchronous", "full")?;
    // Deleted data may contain an unsealed key.
    connection.pragma_update(None, "secure_delete", "on")?;
    // Takes the lock now rather than at the first change.
    connection.execute_batch("BEGIN IMMEDIATE; COMMIT;")
}

fn make(connection: &Connection) -> rusqlite::Result<()> {
    connection.execute_batch(&format!(
        "BEGIN;
         CREATE TABLE log (revision INTEGER PRIMARY KEY, bytes BLOB NOT NULL) STRICT;
         CREATE TABLE base (one INTEGER PRIMARY KEY CHECK (one = 1), revision INTEGER NOT NULL, state BLOB NOT NULL) STRICT;
         PRAGMA application_id = {APPLICATION};
         PRAGMA user_version = {VERSION};
         COMMIT;"
    ))
}

fn last(connection: &Connection) -> rusqlite::Result<Revision> {
    let sql = "SELECT max(coalesce((SELECT max(revision) FROM log), 0), coalesce((SELECT revision FROM base), 0))";
    connection.query_row(sql, [], |row| row.get(0))
}

fn unable(what: &'static str, error: &rusqlite::Error) -> StoreError {
    StoreError::Unable(what, error.to_string())
}

impl Store for Sqlite {
    fn base(&self) -> BoxFuture<'_, Result<Option<BaseState>, StoreError>> {
        self.run("read its base", |connection| {
            let row = |row: &rusqlite::Row<'_>| {
                Ok(BaseState { revision: row.get(0)?, state: row.get::<_, Vec<u8>>(1)?.into() })
            };
            connection.query_row("SELECT revision, state FROM base", [], row).optional()
        })
    }

    fn read(&self, after: Revision) -> BoxFuture<'_, Result<LogRead, StoreError>> {
        self.run("be read", move |connection| {
            let base: Option<Revision> =
                connection.query_row("SELECT revision FROM base", [], |row| row.get(0)).optional()?;
            if base.is_some_and(|base| after < base) {
                return Ok(LogRead::Gone);
            }
            if last(connection)? < after {
                return Ok(LogRead::Lost);
            }
            let mut query =
                connection.prepare_cached("SELECT revision, bytes FROM log WHERE revision > ?1 ORDER BY revision")?;
            let mut rows = query.query([after])?;
            let (mut entries, mut size) = (Vec::new(), 0);
            while size < MAX_READ_BYTES
                && let Some(row) = rows.next()?
            {
                let bytes = Bytes::from(row.get::<_, Vec<u8>>(1)?);
                size += bytes.len();
                entries.push(Entry { revision: row.get(0)?, bytes });
            }
            Ok(LogRead::Entries(entries))
        })
    }

    fn append(&self, after: Revision, bytes: Bytes) -> BoxFuture<'_, Result<Revision, StoreError>> {
        Box::pin(async move {
            if bytes.len() > MAX_ENTRY {
                return Err(StoreError::TooLarge(bytes.len()));
            }
            let tell = self.last.clone();
            let appended = self.run("be written", move |connection| {
                let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
                let there = last(&transaction)?;
                if there != after {
                    return Ok(None);
                }
                transaction.execute("INSERT INTO log VALUES (?1, ?2)", params![after + 1, &bytes[..]])?;
                transaction.commit()?;
                // Sent here, since the caller may have been dropped by now.
                tell.send_replace(after + 1);
                Ok(Some(after + 1))
            });
            appended.await?.ok_or(StoreError::Behind(after))
        })
    }

    fn changed(&self, after: Revision) -> BoxFuture<'_, Result<(), StoreError>> {
        let mut last = self.last.subscribe();
        Box::pin(async move {
            let waited = last.wait_for(|last| *last > after).await;
            waited.map(drop).map_err(|error| StoreError::Unable("be followed", error.to_string()))
        })
    }

    fn begin(&self, BaseState { revision, state }: BaseState) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            let begun = self.run("be written", move |connection| {
                let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
                if last(&transaction)? > 0 {
                    return Ok(false);
                }
                transaction.execute("INSERT INTO base VALUES (1, ?1, ?2)", params![revision, &state[..]])?;
                transaction.commit()?;
                Ok(true)
            });
            if begun.await? { Ok(()) } else { Err(StoreError::NotEmpty) }
        })
    }

    fn compact(&self, BaseState { revision, state }: BaseState) -> BoxFuture<'_, Result<(), StoreError>> {
        self.run("be compacted", move |connection| {
            let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            let base: Option<Revision> =
                transaction.query_row("SELECT revision FROM base", [], |row| row.get(0)).optional()?;
            if base.is_none_or(|base| base < revision) && revision <= last(&transaction)? {
                transaction.execute("INSERT OR REPLACE INTO base VALUES (1, ?1, ?2)", params![revision, &state[..]])?;
                transaction.execute("DELETE FROM log WHERE revision <= ?1", [revision])?;
                transaction.commit()?;
                // Removes deleted data from the write-ahead log too.
                connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()))?;
            }
            Ok(())
        })
    }
}
