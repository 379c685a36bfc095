//! The status exchange between controllers through etcd: keys with a lease, which expire with their controller.
//!
//! Keys below the store's prefix: `word/LEASE/SUBJECT`.

use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use tokio::time::Instant;

use super::message::{
    DeleteRangeRequest, GrantRequest, KEEP_ALIVE, KeepAliveRequest, KeyValue, Lease, Operation, PutRequest,
    RangeRequest, RangeResponse, TxnRequest, TxnResponse, WatchRequest, Watched, after_last,
};
use super::{Etcd, message};
use crate::grpc::ClientError;
use crate::store::{StatusEntry, StatusEvent, StatusExchange, StatusUpdate, StoreError};

/// The time to live of a lease, in seconds.
const LEASE_SECONDS: i64 = 10;
/// The interval between keepalives of the lease.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(3);
/// The maximum number of entries of one transaction, of which etcd allows 128, and of their bytes, of which it accepts
/// 1.5 MiB.
const MAX_TRANSACTION: (usize, usize) = (100, 512 << 10);

/// A lease of this controller.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeldLease {
    id: i64,
    at: Instant,
}

impl Etcd {
    fn words(&self) -> String {
        format!("{}word/", self.prefix)
    }

    /// Returns the lease of this controller. If the lease has expired, etcd has removed all entries. This call then
    /// fails, and the next call requests a new lease.
    async fn leased(&self) -> Result<i64, ClientError> {
        let mut lease = self.lease.lock().await;
        match lease.take() {
            Some(kept) if kept.at.elapsed() < KEEPALIVE_INTERVAL => {
                *lease = Some(kept);
                Ok(kept.id)
            }
            Some(kept) => {
                let channel = self.channel().await?;
                let mut answers = channel.stream::<_, Lease>(KEEP_ALIVE, KeepAliveRequest { id: kept.id }).await?;
                let answer = answers.message().await.map_err(|status| ClientError::Refused(Box::new(status)))?;
                if answer.is_none_or(|answer| answer.ttl <= 0) {
                    let lost = tonic::Status::not_found("lease expired; publishing again");
                    return Err(ClientError::Refused(Box::new(lost)));
                }
                *lease = Some(HeldLease { at: Instant::now(), ..kept });
                Ok(kept.id)
            }
            None => {
                let granted: Lease =
                    self.channel().await?.unary(message::GRANT, GrantRequest { ttl: LEASE_SECONDS }).await?;
                *lease = Some(HeldLease { id: granted.id, at: Instant::now() });
                Ok(granted.id)
            }
        }
    }

    async fn say_now(&self, said: Vec<StatusUpdate>) -> Result<(), StoreError> {
        let saying = async {
            let id = self.leased().await?;
            let mut said = said.into_iter().peekable();
            while said.peek().is_some() {
                let (mut operations, mut size) = (Vec::new(), 0);
                while operations.len() < MAX_TRANSACTION.0 && size < MAX_TRANSACTION.1 {
                    let Some((subject, words)) = said.next() else { break };
                    let key = Bytes::from(format!("{}{id:016x}/{subject}", self.words()));
                    size += words.as_ref().map_or(0, Bytes::len);
                    operations.push(match words {
                        Some(value) => Operation::put(PutRequest { key, value, lease: id }),
                        None => Operation::delete(DeleteRangeRequest { key, range_end: Bytes::new() }),
                    });
                }
                let _: TxnResponse = self.channel().await?.unary(message::TXN, TxnRequest::new([], operations)).await?;
            }
            Ok(())
        };
        let told = tokio::time::timeout(super::REQUEST_TIMEOUT, saying).await;
        let told = told.unwrap_or(Err(ClientError::Silent(super::REQUEST_TIMEOUT)));
        if let Err(error) = told {
            // The outcome is unknown: all entries are published again, with a new lease.
            *self.lease.lock().await = None;
            self.hang_up().await;
            return Err(StoreError::Unable("publish the status of nodes", error.to_string()));
        }
        Ok(())
    }

    /// Returns the entry of another controller; `None` if the entry is this controller's own.
    async fn word(&self, kv: &KeyValue, is_said: bool) -> Option<StatusEntry> {
        let key = std::str::from_utf8(&kv.key).ok()?.strip_prefix(&self.words())?;
        let (by, subject) = key.split_once('/')?;
        let own = self.lease.lock().await.map(|kept| format!("{:016x}", kept.id));
        (own.as_deref() != Some(by)).then(|| StatusEntry {
            by: by.to_owned(),
            subject: subject.to_owned(),
            words: is_said.then(|| kv.value.clone()),
            at: kv.mod_revision,
        })
    }

    async fn hear_now(&self, hear: &(dyn Fn(StatusEvent) + Send + Sync)) -> Result<(), StoreError> {
        const WHAT: &str = "follow other controllers";
        let (from, to) = (Bytes::from(self.words()), after_last(&self.words()));
        let all = RangeRequest { range_end: to.clone(), ..RangeRequest::of(from.clone()) };
        let range: RangeResponse = self.call(WHAT, message::RANGE, all).await?;
        let mut words = Vec::new();
        for kv in &range.kvs {
            words.extend(self.word(kv, true).await);
        }
        hear(StatusEvent::Snapshot(words));
        let next = range.header.unwrap_or_default().revision + 1;
        let watching = async {
            let channel = self.channel().await?;
            let mut events = channel.stream::<_, Watched>(message::WATCH, WatchRequest::begin(from, to, next)).await?;
            while let Some(said) = events.message().await.map_err(|status| ClientError::Refused(Box::new(status)))? {
                if said.canceled {
                    break;
                }
                for event in said.events {
                    let Some(kv) = event.kv else { continue };
                    if let Some(word) = self.word(&kv, event.kind == 0).await {
                        hear(StatusEvent::Update(word));
                    }
                }
            }
            Ok::<_, ClientError>(())
        };
        let watched = watching.await;
        if watched.is_err() {
            self.hang_up().await;
        }
        watched.map_err(|error| StoreError::Unable(WHAT, error.to_string()))
    }
}

impl StatusExchange for Etcd {
    fn publish_status(&self, said: Vec<StatusUpdate>) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(self.say_now(said))
    }

    fn watch_status<'s>(
        &'s self,
        hear: &'s (dyn Fn(StatusEvent) + Send + Sync),
    ) -> BoxFuture<'s, Result<(), StoreError>> {
        Box::pin(self.hear_now(hear))
    }
}
