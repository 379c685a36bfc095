//! The messages of etcd's gRPC (v3) that the store needs. Field numbers are those of etcd's `rpc.proto` and `kv.proto`.

use bytes::Bytes;
use prost::{Enumeration, Message, Oneof};

pub(super) const RANGE: &str = "/etcdserverpb.KV/Range";
pub(super) const TXN: &str = "/etcdserverpb.KV/Txn";
pub(super) const COMPACT: &str = "/etcdserverpb.KV/Compact";
pub(super) const WATCH: &str = "/etcdserverpb.Watch/Watch";
pub(super) const GRANT: &str = "/etcdserverpb.Lease/LeaseGrant";
pub(super) const KEEP_ALIVE: &str = "/etcdserverpb.Lease/LeaseKeepAlive";

#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct KeyValue {
    #[prost(bytes = "bytes", tag = "1")]
    pub(super) key: Bytes,
    #[prost(int64, tag = "3")]
    pub(super) mod_revision: i64,
    #[prost(bytes = "bytes", tag = "5")]
    pub(super) value: Bytes,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct RangeRequest {
    #[prost(bytes = "bytes", tag = "1")]
    pub(super) key: Bytes,
    /// The end of the range, exclusive; empty for a range of only `key`.
    #[prost(bytes = "bytes", tag = "2")]
    pub(super) range_end: Bytes,
    #[prost(int64, tag = "3")]
    pub(super) limit: i64,
}

impl RangeRequest {
    /// A range of one key.
    pub(super) fn of(key: impl Into<Bytes>) -> Self {
        Self { key: key.into(), ..Self::default() }
    }
}

/// The end of the range of all keys with this prefix.
pub(super) fn after_last(prefix: &str) -> Bytes {
    let mut end = prefix.as_bytes().to_vec();
    // Prefixes are ASCII.
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    end.into()
}

#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct Header {
    /// The etcd revision of the response, which reflects all writes up to it.
    #[prost(int64, tag = "3")]
    pub(super) revision: i64,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct RangeResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<Header>,
    #[prost(message, repeated, tag = "2")]
    pub(super) kvs: Vec<KeyValue>,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct PutRequest {
    #[prost(bytes = "bytes", tag = "1")]
    pub(super) key: Bytes,
    #[prost(bytes = "bytes", tag = "2")]
    pub(super) value: Bytes,
    /// The lease of the key; 0 for no lease.
    #[prost(int64, tag = "3")]
    pub(super) lease: i64,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct DeleteRangeRequest {
    #[prost(bytes = "bytes", tag = "1")]
    pub(super) key: Bytes,
    #[prost(bytes = "bytes", tag = "2")]
    pub(super) range_end: Bytes,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct Operation {
    #[prost(oneof = "Request", tags = "1, 2, 3")]
    request: Option<Request>,
}

#[derive(Clone, PartialEq, Eq, Oneof)]
enum Request {
    #[prost(message, tag = "1")]
    Range(RangeRequest),
    #[prost(message, tag = "2")]
    Put(PutRequest),
    #[prost(message, tag = "3")]
    Delete(DeleteRangeRequest),
}

impl Operation {
    pub(super) fn range(range: RangeRequest) -> Self {
        Self { request: Some(Request::Range(range)) }
    }

    pub(super) fn put(put: PutRequest) -> Self {
        Self { request: Some(Request::Put(put)) }
    }

    pub(super) fn delete(delete: DeleteRangeRequest) -> Self {
        Self { request: Some(Request::Delete(delete)) }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Enumeration)]
#[repr(i32)]
enum CompareResult {
    Equal = 0,
    Greater = 1,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Enumeration)]
#[repr(i32)]
enum CompareTarget {
    Version = 0,
    Mod = 2,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct Compare {
    #[prost(enumeration = "CompareResult", tag = "1")]
    result: i32,
    #[prost(enumeration = "CompareTarget", tag = "2")]
    target: i32,
    #[prost(bytes = "bytes", tag = "3")]
    key: Bytes,
    #[prost(oneof = "Against", tags = "4, 6")]
    against: Option<Against>,
}

#[derive(Clone, Copy, PartialEq, Eq, Oneof)]
enum Against {
    #[prost(int64, tag = "4")]
    Version(i64),
    #[prost(int64, tag = "6")]
    Mod(i64),
}

impl Compare {
    /// Holds if the key does not exist, that is, its version is 0.
    pub(super) fn is_absent(key: Bytes) -> Self {
        let against = Some(Against::Version(0));
        Self { result: CompareResult::Equal.into(), target: CompareTarget::Version.into(), key, against }
    }

    /// Holds if the key exists.
    pub(super) fn is_there(key: Bytes) -> Self {
        let against = Some(Against::Version(0));
        Self { result: CompareResult::Greater.into(), target: CompareTarget::Version.into(), key, against }
    }

    /// Holds if the key has not changed since this revision.
    pub(super) fn is_unchanged(key: Bytes, mod_revision: i64) -> Self {
        let against = Some(Against::Mod(mod_revision));
        Self { result: CompareResult::Equal.into(), target: CompareTarget::Mod.into(), key, against }
    }
}

#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct TxnRequest {
    #[prost(message, repeated, tag = "1")]
    compare: Vec<Compare>,
    #[prost(message, repeated, tag = "2")]
    success: Vec<Operation>,
}

impl TxnRequest {
    /// Creates a transaction that executes these operations if all comparisons hold.
    pub(super) fn new(
        compare: impl IntoIterator<Item = Compare>,
        success: impl IntoIterator<Item = Operation>,
    ) -> Self {
        Self { compare: compare.into_iter().collect(), success: success.into_iter().collect() }
    }
}

#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct TxnResponse {
    #[prost(bool, tag = "2")]
    pub(super) succeeded: bool,
    #[prost(message, repeated, tag = "3")]
    responses: Vec<Response>,
}

#[derive(Clone, PartialEq, Eq, Message)]
struct Response {
    #[prost(message, optional, tag = "1")]
    range: Option<RangeResponse>,
}

impl TxnResponse {
    /// The results of the transaction's ranges.
    pub(super) fn ranges(self) -> Vec<RangeResponse> {
        self.responses.into_iter().filter_map(|response| response.range).collect()
    }
}

#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct WatchRequest {
    #[prost(message, optional, tag = "1")]
    create: Option<WatchCreateRequest>,
}

#[derive(Clone, PartialEq, Eq, Message)]
struct WatchCreateRequest {
    #[prost(bytes = "bytes", tag = "1")]
    key: Bytes,
    #[prost(bytes = "bytes", tag = "2")]
    range_end: Bytes,
    /// The first etcd revision whose events are reported; 0 for events from now on.
    #[prost(int64, tag = "3")]
    start_revision: i64,
}

impl WatchRequest {
    pub(super) fn begin(key: Bytes, range_end: Bytes, start_revision: i64) -> Self {
        Self { create: Some(WatchCreateRequest { key, range_end, start_revision }) }
    }
}

#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct Watched {
    #[prost(bool, tag = "3")]
    pub(super) created: bool,
    #[prost(bool, tag = "4")]
    pub(super) canceled: bool,
    #[prost(message, repeated, tag = "11")]
    pub(super) events: Vec<Event>,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct Event {
    /// The kind of event: 0 if the key was put, 1 if it was deleted.
    #[prost(int32, tag = "1")]
    pub(super) kind: i32,
    #[prost(message, optional, tag = "2")]
    pub(super) kv: Option<KeyValue>,
}

/// Compacts etcd's history up to this revision: earlier values of keys are removed.
#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct CompactRequest {
    #[prost(int64, tag = "1")]
    pub(super) revision: i64,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct CompactResponse {}

#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct GrantRequest {
    /// The time to live in seconds.
    #[prost(int64, tag = "1")]
    pub(super) ttl: i64,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct KeepAliveRequest {
    #[prost(int64, tag = "1")]
    pub(super) id: i64,
}

/// The answer to a grant and to a keepalive.
#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct Lease {
    #[prost(int64, tag = "2")]
    pub(super) id: i64,
    /// The remaining time to live in seconds; 0 if the lease has expired.
    #[prost(int64, tag = "3")]
    pub(super) ttl: i64,
}

impl Watched {
    /// True if a key was put or deleted.
    pub(super) fn is_news(&self) -> bool {
        !self.events.is_empty()
    }
}
