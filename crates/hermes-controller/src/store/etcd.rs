//! The store for several controllers: etcd, over its gRPC API (v3).
//!
//! In: the addresses of etcd's members. Out: a log that any number of controllers append to.
//! Never: an entry twice. If the response to an append is lost, the controller reads the store to determine the
//! outcome.

mod message;
mod status;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use futures_util::future::BoxFuture;
use hermes_net::tls::{self, CertifiedKey, Roots, RustlsClientConfig, ServerIdentity};
use tokio::sync::Mutex;
use tokio::time::Instant;

use self::message::{
    Compare, DeleteRangeRequest, Operation, PutRequest, RangeRequest, RangeResponse, TxnRequest, TxnResponse, Watched,
    after_last,
};
use super::{BaseState, Entry, LogRead, MAX_ENTRY, Revision, StatusExchange, Store, StoreError};
use crate::grpc::{ClientError, GrpcChannel};

/// The maximum size of a chunk, in bytes. By default, etcd accepts requests of at most 1.5 MiB.
const CHUNK_BYTES: usize = 1 << 20;
/// The maximum size of one read in bytes, and in entries; at least one entry is read.
const MAX_READ: (usize, i64) = (4 << 20, 64);
/// The maximum time for a request, including retries at other members.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// The maximum time for the response of one member.
const ENDPOINT_TIMEOUT: Duration = Duration::from_secs(5);
/// The interval between attempts.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// The TLS credentials for etcd.
#[derive(Default)]
pub struct Credentials {
    /// The CAs of the members' certificates; `None` for the system's.
    pub roots: Option<Roots>,
    /// The client certificate, which etcd may demand (`--client-cert-auth`); `None` for no certificate.
    pub own: Option<CertifiedKey>,
}

/// A log in etcd.
pub struct Etcd {
    members: Vec<String>,
    /// The TLS configuration; `None` for no TLS.
    tls: Option<Arc<RustlsClientConfig>>,
    /// The index of the current member.
    turn: AtomicUsize,
    channel: Mutex<Option<GrpcChannel>>,
    prefix: String,
    /// The lease of this controller's published status.
    lease: Mutex<Option<status::HeldLease>>,
}

fn config(credentials: Credentials) -> Result<Arc<RustlsClientConfig>, tls::TlsError> {
    let roots = credentials.roots.map_or_else(Roots::system, Ok)?;
    tls::client_config(credentials.own.as_ref(), ServerIdentity::Name(roots), &[b"h2"])
}

/// The result of one request.
type Answer<T> = Result<T, ClientError>;

impl Etcd {
    /// Creates the store at `etcds://HOST:PORT[,HOST:PORT...][/PREFIX]`, or at `etcd://` without TLS.
    ///
    /// # Errors
    /// The address or the credentials are invalid.
    pub fn new(url: &str, credentials: Credentials) -> Result<Self, String> {
        let wrong = || {
            format!(
                "invalid store {url:?}; expected etcds://HOST:PORT, or etcd://HOST:PORT without TLS; separate \
                 members by commas"
            )
        };
        let (scheme, rest) = url.split_once("://").ok_or_else(wrong)?;
        let tls = match scheme {
            "etcds" => Some(config(credentials).map_err(|error| error.to_string())?),
            "etcd" if credentials.roots.is_some() || credentials.own.is_some() => {
                return Err(format!("{url:?} has no TLS and uses no certificates; use etcds://"));
            }
            "etcd" => None,
            _ => return Err(wrong()),
        };
        let (members, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let members: Vec<_> = members.split(',').map(str::to_owned).collect();
        let is_one = |member: &String| {
            member.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok())
        };
        if !members.iter().all(is_one) {
            return Err(wrong());
        }
        let prefix = if prefix.is_empty() { "hermes" } else { prefix };
        Ok(Self {
            members,
            tls,
            turn: AtomicUsize::new(0),
            channel: Mutex::default(),
            prefix: format!("{prefix}/"),
            lease: Mutex::default(),
        })
    }

    fn key(&self, revision: Revision) -> Bytes {
        format!("{}log/{revision:020}", self.prefix).into()
    }

    fn base_key(&self) -> Bytes {
        format!("{}base", self.prefix).into()
    }

    /// The key prefix of the chunks of an entry or a base.
    fn parts(&self, kind: &str, revision: Revision) -> String {
        format!("{}{kind}-part/{revision:020}/", self.prefix)
    }

    /// The current connection, or a new one to the current member.
    async fn channel(&self) -> Answer<GrpcChannel> {
        let mut channel = self.channel.lock().await;
        if let Some(channel) = &*channel {
            return Ok(channel.clone());
        }
        let member = &self.members[self.turn.load(Ordering::Relaxed) % self.members.len()];
        let made = GrpcChannel::to_server(member, self.tls.as_ref()).await?;
        *channel = Some(made.clone());
        Ok(made)
    }

    /// Drops the connection; the next request goes to the next member.
    async fn hang_up(&self) {
        *self.channel.lock().await = None;
        self.turn.fetch_add(1, Ordering::Relaxed);
    }

    /// Sends a request once, to the current member.
    async fn once<Q, A>(&self, path: &'static str, request: Q) -> Answer<A>
    where
        Q: prost::Message + 'static,
        A: prost::Message + Default + 'static,
    {
        let asking = async { self.channel().await?.unary(path, request).await };
        let answered = tokio::time::timeout(ENDPOINT_TIMEOUT, asking).await;
        let answered = answered.unwrap_or_else(|_| Err(ClientError::Silent(ENDPOINT_TIMEOUT)));
        if answered.is_err() {
            self.hang_up().await;
        }
        answered
    }

    /// Sends a request that is safe to repeat.
    async fn call<Q, A>(&self, what: &'static str, path: &'static str, request: Q) -> Result<A, StoreError>
    where
        Q: prost::Message + Clone + 'static,
        A: prost::Message + Default + 'static,
    {
        let deadline = Instant::now() + REQUEST_TIMEOUT;
        loop {
            match self.once(path, request.clone()).await {
                Ok(answer) => return Ok(answer),
                Err(error) if Instant::now() > deadline => return Err(StoreError::Unable(what, error.to_string())),
                Err(_) => tokio::time::sleep(RETRY_INTERVAL).await,
            }
        }
    }

    async fn txn(&self, what: &'static str, request: TxnRequest) -> Result<TxnResponse, StoreError> {
        self.call(what, message::TXN, request).await
    }

    /// Writes a value in chunks if it is too large for one request. Returns the value that refers to them.
    async fn spread(
        &self,
        what: &'static str,
        kind: &str,
        revision: Revision,
        bytes: &[u8],
    ) -> Result<Bytes, StoreError> {
        let nonce: u64 = nonce()?;
        let mut value = BytesMut::with_capacity(9 + bytes.len().min(CHUNK_BYTES));
        if bytes.len() <= CHUNK_BYTES {
            value.put_u8(INLINE);
            value.put_u64(nonce);
            value.put_slice(bytes);
            return Ok(value.freeze());
        }
        let at = format!("{}{nonce:016x}/", self.parts(kind, revision));
        for (number, part) in bytes.chunks(CHUNK_BYTES).enumerate() {
            let key = Bytes::from(format!("{at}{number:06}"));
            let put = PutRequest { key, value: Bytes::copy_from_slice(part), lease: 0 };
            self.txn(what, TxnRequest::new([], [Operation::put(put)])).await?;
        }
        value.put_u8(CHUNKED);
        value.put_u64(nonce);
        value.put_u64(bytes.len() as u64);
        value.put_slice(at.as_bytes());
        Ok(value.freeze())
    }

    /// Reads a value and its chunks.
    async fn gather(&self, what: &'static str, mut value: Bytes) -> Result<Bytes, StoreError> {
        let cut = || StoreError::Foreign(self.members.join(","), "truncated entry".to_owned());
        if value.len() < 9 {
            return Err(cut());
        }
        let tag = value.get_u8();
        value.get_u64();
        if tag == INLINE {
            return Ok(value);
        }
        if tag != CHUNKED || value.len() < 8 {
            return Err(cut());
        }
        let length = usize::try_from(value.get_u64()).map_err(|_| cut())?;
        let mut whole = BytesMut::new();
        for number in 0..length.div_ceil(CHUNK_BYTES) {
            let key = [&value[..], format!("{number:06}").as_bytes()].concat();
            let range: RangeResponse = self.call(what, message::RANGE, RangeRequest::of(key)).await?;
            whole.extend_from_slice(&range.kvs.first().ok_or_else(cut)?.value);
        }
        if whole.len() == length { Ok(whole.freeze()) } else { Err(cut()) }
    }

    async fn append_now(&self, after: Revision, bytes: Bytes) -> Result<Revision, StoreError> {
        const WHAT: &str = "be written";
        let next = after + 1;
        let value = self.spread(WHAT, "log", next, &bytes).await?;
        let mut compare = vec![Compare::is_absent(self.key(next))];
        compare.push(match after {
            0 => Compare::is_absent(self.base_key()),
            after => Compare::is_there(self.key(after)),
        });
        let put = Operation::put(PutRequest { key: self.key(next), value: value.clone(), lease: 0 });
        let request = TxnRequest::new(compare, [put]);
        let deadline = Instant::now() + REQUEST_TIMEOUT;
        // True after an attempt whose answer was lost.
        let mut is_open = false;
        loop {
            let answered = self.once::<_, TxnResponse>(message::TXN, request.clone()).await;
            // Without a connection, nothing was sent.
            is_open |= answered.as_ref().is_err_and(|error| !matches!(error, ClientError::Unreachable { .. }));
            match answered {
                Ok(answer) if answer.succeeded => return Ok(next),
                // The entry may be this one, written by the attempt whose answer was lost.
                Ok(_) => {
                    let range: Result<RangeResponse, _> =
                        self.call(WHAT, message::RANGE, RangeRequest::of(self.key(next))).await;
                    let range = range.map_err(|error| StoreError::Unknown(error.to_string()))?;
                    return match range.kvs.first() {
                        Some(there) if there.value == value => Ok(next),
                        _ => Err(StoreError::Behind(after)),
                    };
                }
                Err(error) if Instant::now() > deadline && is_open => {
                    return Err(StoreError::Unknown(error.to_string()));
                }
                Err(error) if Instant::now() > deadline => return Err(StoreError::Unable(WHAT, error.to_string())),
                Err(_) => tokio::time::sleep(RETRY_INTERVAL).await,
            }
        }
    }

    async fn read_now(&self, after: Revision) -> Result<LogRead, StoreError> {
        const WHAT: &str = "be read";
        let entries = RangeRequest {
            key: self.key(after + 1),
            range_end: after_last(&format!("{}log/", self.prefix)),
            limit: MAX_READ.1,
        };
        let base = RangeRequest { limit: 1, ..RangeRequest::of(self.base_key()) };
        // The base and the entries are read in one transaction, because a base written in between would remove entries.
        let last = RangeRequest { limit: 1, ..RangeRequest::of(self.key(after)) };
        let request = TxnRequest::new([], [base, entries, last].map(Operation::range));
        let mut ranges = self.txn(WHAT, request).await?.ranges().into_iter();
        let mut next = || ranges.next().unwrap_or_default();
        let (base, range, last) = (next(), next(), next());
        let base = base.kvs.first().map(|base| revision_of(&base.value)).transpose();
        let foreign = |why: String| StoreError::Foreign(self.members.join(","), why);
        if base.map_err(foreign)?.is_some_and(|base| after < base) {
            return Ok(LogRead::Gone);
        }
        // Compaction keeps the entry of the base's revision, so that the entry that a controller read last always
        // exists.
        if after > 0 && last.kvs.is_empty() {
            return Ok(LogRead::Lost);
        }
        let (mut entries, mut size) = (Vec::new(), 0);
        for kv in range.kvs {
            if size >= MAX_READ.0 {
                break;
            }
            let name = kv.key.rsplit(|byte| *byte == b'/').next().and_then(|name| std::str::from_utf8(name).ok());
            let revision = name
                .and_then(|name| name.parse().ok())
                .ok_or_else(|| foreign("invalid revision in a key of the log".to_owned()))?;
            let bytes = self.gather(WHAT, kv.value).await?;
            size += bytes.len();
            entries.push(Entry { revision, bytes });
        }
        Ok(LogRead::Entries(entries))
    }

    async fn base_now(&self) -> Result<Option<BaseState>, StoreError> {
        const WHAT: &str = "read its base";
        let range: RangeResponse = self.call(WHAT, message::RANGE, RangeRequest::of(self.base_key())).await?;
        let Some(kv) = range.kvs.into_iter().next() else { return Ok(None) };
        let revision = revision_of(&kv.value).map_err(|why| StoreError::Foreign(self.members.join(","), why))?;
        Ok(Some(BaseState { revision, state: self.gather(WHAT, kv.value.slice(8..)).await? }))
    }

    async fn changed_now(&self, after: Revision) -> Result<(), StoreError> {
        const WHAT: &str = "be followed";
        let unable = |error: ClientError| StoreError::Unable(WHAT, error.to_string());
        // Watches all entries from the last read one on, because other controllers may have compacted the next entry.
        // The last read entry disappears only by compaction, or if the log is lost.
        let (from, to) = (self.key(after), after_last(&format!("{}log/", self.prefix)));
        let channel = self.channel().await.map_err(unable)?;
        let watching =
            channel.stream::<_, Watched>(message::WATCH, message::WatchRequest::begin(from.clone(), to.clone(), 0));
        let mut events = match watching.await {
            Ok(events) => events,
            Err(error) => {
                self.hang_up().await;
                return Err(unable(error));
            }
        };
        let mut is_watched = false;
        loop {
            match events.message().await {
                Ok(Some(said)) if said.is_news() => return Ok(()),
                Ok(Some(said)) if said.created && !is_watched => {
                    is_watched = true;
                    // A watch reports no events before its creation, so the keys are read once after it.
                    let there = RangeRequest { limit: 2, range_end: to.clone(), ..RangeRequest::of(from.clone()) };
                    let range: RangeResponse = self.call(WHAT, message::RANGE, there).await?;
                    let is_last = range.kvs.first().is_some_and(|first| first.key == from);
                    if range.kvs.len() != usize::from(after > 0) || (after > 0 && !is_last) {
                        return Ok(());
                    }
                }
                Ok(Some(said)) if !said.canceled => {}
                Ok(_) => return Ok(()),
                Err(status) => {
                    self.hang_up().await;
                    return Err(unable(ClientError::Refused(Box::new(status))));
                }
            }
        }
    }

    async fn begin_now(&self, BaseState { revision, state }: BaseState) -> Result<(), StoreError> {
        const WHAT: &str = "be written";
        let mut value = BytesMut::new();
        value.put_u64(revision);
        value.put_slice(&self.spread(WHAT, "base", revision, &state).await?);
        // The entry of the base's revision must exist: the next append compares with it. Its content is in the base.
        let last = self.spread(WHAT, "log", revision, b"").await?;
        let compare = [1, revision].map(|revision| Compare::is_absent(self.key(revision)));
        let puts = [(self.base_key(), value.freeze()), (self.key(revision), last)];
        let puts = puts.map(|(key, value)| Operation::put(PutRequest { key, value, lease: 0 }));
        let compare = compare.into_iter().chain([Compare::is_absent(self.base_key())]);
        let answer: Result<TxnResponse, _> = self.once(message::TXN, TxnRequest::new(compare, puts)).await;
        match answer {
            Ok(answer) if answer.succeeded => Ok(()),
            Ok(_) => Err(StoreError::NotEmpty),
            Err(error) => Err(StoreError::Unable(WHAT, error.to_string())),
        }
    }

    async fn compact_now(&self, BaseState { revision, state }: BaseState) -> Result<(), StoreError> {
        const WHAT: &str = "be compacted";
        let range: RangeResponse = self.call(WHAT, message::RANGE, RangeRequest::of(self.base_key())).await?;
        let at = range.header.unwrap_or_default().revision;
        let before = range.kvs.into_iter().next();
        let known = before.as_ref().map(|base| revision_of(&base.value)).transpose();
        if known.map_err(|why| StoreError::Foreign(self.members.join(","), why))?.is_some_and(|known| known >= revision)
        {
            return Ok(());
        }
        let mut value = BytesMut::new();
        value.put_u64(revision);
        value.put_slice(&self.spread(WHAT, "base", revision, &state).await?);
        let unchanged = match &before {
            Some(before) => Compare::is_unchanged(self.base_key(), before.mod_revision),
            None => Compare::is_absent(self.base_key()),
        };
        let compare = [unchanged, Compare::is_there(self.key(revision))];
        let put = PutRequest { key: self.base_key(), value: value.freeze(), lease: 0 };
        let old = DeleteRangeRequest { key: self.key(0), range_end: self.key(revision) };
        let answer = self.txn(WHAT, TxnRequest::new(compare, [Operation::put(put), Operation::delete(old)])).await?;
        if answer.succeeded {
            // Removes chunks of compacted entries, and of failed appends.
            for kind in ["log", "base"] {
                let (from, to) = (self.parts(kind, 0), self.parts(kind, revision));
                let old = DeleteRangeRequest { key: from.into(), range_end: to.into() };
                self.txn(WHAT, TxnRequest::new([], [Operation::delete(old)])).await?;
            }
            // If another controller has compacted already, the error is harmless.
            let request = message::CompactRequest { revision: at };
            if let Err(error) = self.once::<_, message::CompactResponse>(message::COMPACT, request).await {
                tracing::debug!("etcd history not compacted: {error}");
            }
        }
        Ok(())
    }
}

/// The first byte of a value: inline, or a reference to chunks.
const INLINE: u8 = 0;
const CHUNKED: u8 = 1;

fn nonce() -> Result<u64, StoreError> {
    let mut random = [0; 8];
    aws_lc_rs::rand::fill(&mut random)
        .map_err(|error| StoreError::Unable("be written", format!("no randomness: {error}")))?;
    Ok(u64::from_be_bytes(random))
}

/// The revision at the start of a base.
fn revision_of(mut base: &[u8]) -> Result<Revision, String> {
    if base.len() < 8 { Err("truncated base".to_owned()) } else { Ok(base.get_u64()) }
}

impl Store for Etcd {
    fn base(&self) -> BoxFuture<'_, Result<Option<BaseState>, StoreError>> {
        Box::pin(self.base_now())
    }

    fn read(&self, after: Revision) -> BoxFuture<'_, Result<LogRead, StoreError>> {
        Box::pin(self.read_now(after))
    }

    fn append(&self, after: Revision, bytes: Bytes) -> BoxFuture<'_, Result<Revision, StoreError>> {
        if bytes.len() > MAX_ENTRY {
            return Box::pin(async move { Err(StoreError::TooLarge(bytes.len())) });
        }
        Box::pin(self.append_now(after, bytes))
    }

    fn changed(&self, after: Revision) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(self.changed_now(after))
    }

    fn begin(&self, base: BaseState) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(self.begin_now(base))
    }

    fn compact(&self, base: BaseState) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(self.compact_now(base))
    }

    fn shared(&self) -> Option<&dyn StatusExchange> {
        Some(self)
    }
}
