//! The access log: one JSON object for each session, written outside the workers.
//!
//! In: ends of sessions. Out: lines on standard output, standard error or in a file. A worker collects lines, and
//! passes whole buffers to one writer thread. If that thread lags (a full disk, a blocked pipe), buffers are dropped
//! and counted, so that traffic never waits for the log. Never: header values, query strings or bodies, which may
//! contain secrets.

mod line;

use std::cell::RefCell;
use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hermes_model::snapshot::AccessLog;
use prometheus_client::metrics::counter::Counter;

use super::WorkerContext;
use crate::error::Side;
use crate::metrics::{ErrorLabels, SessionLabels, SessionMetrics};
use crate::runtime::session::Record;

/// The size in bytes from which a buffer is passed to the writer at once. A smaller one is passed at the next tick. Each buffer costs
/// a change of threads, which takes as long as some requests.
const FLUSH_BYTES: usize = 128 << 10;
/// The maximum number of buffers in the writer's queue, and of their bytes.
const QUEUE: usize = 1024;
const QUEUED_BYTES: usize = 16 << 20;

/// The time for which shutdown waits for a log that accepts no writes.
const LAST_WORDS: Duration = Duration::from_secs(2);

enum Message {
    Lines(Vec<u8>),
    /// Makes the writer open the target in [`Next`].
    Look,
}

/// The target that the writer should open next.
#[derive(Default)]
struct Next {
    log: Mutex<Option<AccessLog>>,
    /// True if the queue had no room for [`Message::Look`]. The writer then reopens the log at its next message.
    overdue: AtomicBool,
}

impl Next {
    fn take(&self) -> Option<AccessLog> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// The sender of the writer's queue, for workers and the node.
#[derive(Clone)]
pub struct LogSender {
    queue: SyncSender<Message>,
    /// The bytes in the queue.
    bytes: Arc<AtomicUsize>,
}

impl LogSender {
    /// Passes lines to the writer. Returns them if the queue is full.
    fn send(&self, lines: Vec<u8>) -> Result<(), Vec<u8>> {
        let length = lines.len();
        if self.bytes.fetch_add(length, Ordering::Relaxed) + length > QUEUED_BYTES {
            self.bytes.fetch_sub(length, Ordering::Relaxed);
            return Err(lines);
        }
        self.queue.try_send(Message::Lines(lines)).map_err(|error| {
            self.bytes.fetch_sub(length, Ordering::Relaxed);
            match error {
                TrySendError::Full(Message::Lines(lines)) => lines,
                // The writer has ended with the node.
                _ => Vec::new(),
            }
        })
    }
}

/// The writer thread. Dropping this value waits until all queued lines are written, but at most two seconds.
pub struct LogWriter {
    sender: LogSender,
    next: Arc<Next>,
    /// A channel without messages, which closes when the writer thread ends.
    ended: Receiver<()>,
}

impl LogWriter {
    /// Starts the writer thread. `lost` counts entries that could not be written.
    ///
    /// # Errors
    /// The target cannot be opened.
    pub fn start(log: AccessLog, lost: Counter) -> std::io::Result<Self> {
        let (sender, receiver) = sync_channel(QUEUE);
        let (alive, ended) = sync_channel(0);
        let mut target = open(&log)?;
        let next = Arc::new(Next::default());
        let (wanted, bytes) = (next.clone(), Arc::<AtomicUsize>::default());
        let written = bytes.clone();
        std::thread::Builder::new().name("access-log".to_owned()).spawn(move || {
            write_all(&receiver, &written, &wanted, &mut target, &lost);
            drop(alive);
        })?;
        Ok(Self { sender: LogSender { queue: sender, bytes }, next, ended })
    }

    pub fn sender(&self) -> LogSender {
        self.sender.clone()
    }

    /// Makes the writer open the target again, because the file may have been rotated, or the document names another.
    /// Does not wait: a writer that is blocked opens the target when its write completes.
    pub fn reopen(&self, log: AccessLog) {
        *self.next.log.lock().unwrap_or_else(PoisonError::into_inner) = Some(log);
        if self.sender.queue.try_send(Message::Look).is_err() {
            self.next.overdue.store(true, Ordering::Release);
        }
    }
}

impl Drop for LogWriter {
    fn drop(&mut self) {
        // This drops the last sender, because the workers have ended. The thread then writes the rest and ends.
        self.sender.queue = sync_channel(0).0;
        if self.ended.recv_timeout(LAST_WORDS) == Err(RecvTimeoutError::Timeout) {
            tracing::error!("the access log accepts no data; its last entries are lost");
        }
    }
}

/// A file to which lines are appended.
struct Lines {
    file: File,
    /// True if the last line was written partly. The next write ends that line with a newline first.
    is_torn: bool,
}

impl Lines {
    fn new(file: File) -> Self {
        Self { file, is_torn: false }
    }

    /// Writes lines until the system rejects a write. The error contains the number of lines that were not written
    /// completely, and the cause.
    fn write(&mut self, lines: &[u8]) -> Result<(), (usize, std::io::Error)> {
        let count = |bytes: &[u8]| bytes.iter().filter(|byte| **byte == b'\n').count();
        if self.is_torn {
            self.write_some(b"\n").map_err(|(_, error)| (count(lines), error))?;
            self.is_torn = false;
        }
        self.write_some(lines).map_err(|(written, error)| {
            self.is_torn = lines[..written].last().is_some_and(|byte| *byte != b'\n');
            (count(&lines[written..]), error)
        })
    }

    /// Writes bytes. The error contains the number of bytes that were written before the failure, and the cause.
    fn write_some(&mut self, bytes: &[u8]) -> Result<(), (usize, std::io::Error)> {
        let mut written = 0;
        while written < bytes.len() {
            match self.file.write(&bytes[written..]) {
                Ok(0) => return Err((written, std::io::ErrorKind::WriteZero.into())),
                Ok(more) => written += more,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err((written, error)),
            }
        }
        Ok(())
    }
}

type Target = Option<Lines>;

fn open(log: &AccessLog) -> std::io::Result<Target> {
    Ok(match log {
        AccessLog::Off => None,
        // The buffered handles of the standard library do not report how many bytes were written before an error.
        AccessLog::Stdout => Some(Lines::new(File::from(std::io::stdout().as_fd().try_clone_to_owned()?))),
        AccessLog::Stderr => Some(Lines::new(File::from(std::io::stderr().as_fd().try_clone_to_owned()?))),
        AccessLog::File(path) => {
            // The log shows which clients requested what, so only the owner and its group may read it.
            let file = hermes_net::file::append(path, 0o640);
            let named = |error: std::io::Error| {
                std::io::Error::new(error.kind(), format!("{} cannot be written: {error}", path.display()))
            };
            Some(Lines::new(file.map_err(named)?))
        }
    })
}

/// Checks that this log can be opened for writing. Called before a document is applied.
pub fn probe(log: &AccessLog) -> std::io::Result<()> {
    open(log).map(drop)
}

fn write_all(receiver: &Receiver<Message>, bytes: &AtomicUsize, next: &Next, target: &mut Target, lost: &Counter) {
    // A failure is logged once until a write succeeds, because the program's own log may be on the same full disk.
    let mut fails = false;
    while let Ok(message) = receiver.recv() {
        if let Message::Lines(lines) = &message {
            bytes.fetch_sub(lines.len(), Ordering::Relaxed);
        }
        let look = matches!(message, Message::Look) || next.overdue.swap(false, Ordering::AcqRel);
        if let (Message::Lines(lines), Some(writer)) = (message, &mut *target) {
            // A failure of the log must not stop traffic. The next reload may fix it.
            let written = writer.write(&lines);
            if let Err((count, _)) = &written {
                lost.inc_by(*count as u64);
            }
            match &written {
                Err((_, error)) if !fails => {
                    tracing::error!(%error, "cannot write the access log; entries are lost until it is writable");
                }
                Ok(()) if fails => tracing::info!("the access log is writable again"),
                _ => {}
            }
            fails = written.is_err();
        }
        match look.then(|| next.take()).flatten().map(|log| open(&log)) {
            Some(Ok(opened)) => *target = opened,
            Some(Err(error)) => tracing::error!(%error, "cannot reopen the access log; still writing the old file"),
            None => {}
        }
    }
}

/// A worker's buffer of access-log lines, and its cached metric handles.
pub struct Records {
    node: Arc<str>,
    sender: LogSender,
    enabled: std::cell::Cell<bool>,
    buffer: RefCell<Vec<u8>>,
    clock: RefCell<line::Clock>,
    handles: RefCell<HashMap<SessionLabels, Rc<SessionMetrics>, foldhash::fast::RandomState>>,
}

impl Records {
    pub fn new(node: Arc<str>, sender: LogSender) -> Self {
        Self {
            node,
            sender,
            enabled: std::cell::Cell::new(true),
            buffer: RefCell::new(Vec::with_capacity(FLUSH_BYTES)),
            handles: RefCell::default(),
            clock: RefCell::default(),
        }
    }

    /// Sets whether entries are written, as the document's `access-log` demands.
    pub fn set_enabled(&self, enabled: bool) {
        self.enabled.set(enabled);
    }

    /// Drops the cached metric handles, because routes may have been removed.
    pub fn forget_handles(&self) {
        self.handles.borrow_mut().clear();
    }

    /// Counts a session that ended, and adds its entry to the buffer.
    pub fn end(&self, worker: &WorkerContext, record: &Record<'_>) {
        self.count(worker, record);
        if !self.enabled.get() {
            return;
        }
        let mut buffer = self.buffer.borrow_mut();
        line::write(&mut buffer, &self.node, &mut self.clock.borrow_mut(), record);
        if buffer.len() >= FLUSH_BYTES {
            drop(buffer);
            self.flush(worker);
        }
    }

    /// Passes the collected lines to the writer. If its queue is full, they are dropped and counted.
    pub fn flush(&self, worker: &WorkerContext) {
        let mut buffer = self.buffer.borrow_mut();
        if buffer.is_empty() {
            return;
        }
        // A few lines are copied, so that the queue holds no room for many.
        let lines = match buffer.len() < FLUSH_BYTES / 2 {
            true => buffer.drain(..).collect(),
            false => std::mem::replace(&mut *buffer, Vec::with_capacity(FLUSH_BYTES)),
        };
        if let Err(lines) = self.sender.send(lines) {
            let lost = lines.iter().filter(|byte| **byte == b'\n').count();
            worker.shared.metrics.records_lost.inc_by(lost as u64);
        }
    }

    fn count(&self, worker: &WorkerContext, record: &Record<'_>) {
        let metrics = &worker.shared.metrics;
        metrics.ended.inc();
        if let Some(error) = record.error {
            metrics.errors.get_or_create(&ErrorLabels { error: error.label() }).inc();
            if matches!(error.side(), Side::Upstream | Side::Local) {
                metrics.failed.inc();
            }
        }
        let labels = SessionLabels {
            listener: record.facts.listener.clone(),
            route: record.route.map_or_else(|| worker.shared.no_route.clone(), |route| route.name.clone()),
            kind: record.facts.kind.as_str(),
            outcome: outcome(record),
        };
        let handles = self
            .handles
            .borrow_mut()
            .entry(labels)
            .or_insert_with_key(|labels| Rc::new(metrics.session(labels)))
            .clone();
        handles.total.inc();
        handles.received.inc_by(record.received);
        handles.sent.inc_by(record.sent);
        handles.seconds.observe(record.duration.as_secs_f64());
    }
}

fn outcome(record: &Record<'_>) -> &'static str {
    match record.status / 100 {
        2 | 1 => "2xx",
        3 => "3xx",
        4 => "4xx",
        5 => "5xx",
        _ if record.error.is_some() => "failed",
        _ => "ok",
    }
}
