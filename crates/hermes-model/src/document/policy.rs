//! Policies of a route: `rewrite`, `retry`, `custody`, `cache`, `upstream-rate-limit`, `resume`, `timeout`.

use std::collections::BTreeMap;
use std::fmt;

use http::StatusCode;
use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::did_you_mean::did_you_mean;
use super::is_default;
use crate::rewrite::Template;
use crate::scalar::{ByteSize, HumanDuration, OneOrMany, Percentage};
use crate::snapshot::Durable;

/// `rewrite`
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Rewrite {
    /// Authority for the next hop.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub authority: Option<Template>,
    /// Path for the next hop.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<RewritePath>,
    /// Changes to the query.
    #[serde(default, skip_serializing_if = "is_default")]
    pub query: RewriteQuery,
    /// Fields to set; each replaces the existing lines.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub set_headers: BTreeMap<String, Template>,
    /// Lines to add.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub add_headers: BTreeMap<String, OneOrMany<Template>>,
    /// Fields to remove.
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub remove_headers: OneOrMany<String>,
    /// Changes to the response.
    #[serde(default, skip_serializing_if = "is_default")]
    pub response: RewriteResponse,
}

/// `rewrite.path`: `from` and `to`, or `pattern` and `to`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct RewritePath {
    /// Prefix to replace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// Pattern with named segments in braces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pattern: Option<String>,
    /// Replacement.
    pub to: String,
}

/// `rewrite.query`
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct RewriteQuery {
    /// Pairs to set.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub set: BTreeMap<String, Template>,
    /// Names to remove.
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub remove: OneOrMany<String>,
}

/// `rewrite.response`
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct RewriteResponse {
    /// Fields to set; each replaces the existing lines.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub set_headers: BTreeMap<String, Template>,
    /// Lines to add.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub add_headers: BTreeMap<String, OneOrMany<Template>>,
    /// Fields to remove.
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub remove_headers: OneOrMany<String>,
}

/// `timeout`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Timeout {
    /// Time to connect. Default 5 s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connect: Option<HumanDuration>,
    /// Idle time. Default by kind: `http` 5 min, `tcp` 1 h, `udp` 2 min.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle: Option<HumanDuration>,
    /// Time without progress. Default 60 s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<HumanDuration>,
}

/// `retry`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Retry {
    /// Conditions for a retry. Default `connect-failure`.
    #[serde(default = "Retry::on")]
    pub on: OneOrMany<RetryOn>,
    /// Total attempts. Default 3.
    #[serde(default = "Retry::attempts")]
    pub attempts: u32,
    /// Delay between attempts.
    #[serde(default, skip_serializing_if = "is_default")]
    pub backoff: Backoff,
    /// Share of requests that may be retries. Default 20 %.
    #[serde(default = "Retry::budget")]
    pub budget: Percentage,
}

impl Retry {
    fn on() -> OneOrMany<RetryOn> {
        OneOrMany(vec![RetryOn::ConnectFailure])
    }

    fn attempts() -> u32 {
        3
    }

    fn budget() -> Percentage {
        Percentage(0.2)
    }
}

/// `retry.backoff`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Backoff {
    /// First delay; doubles. Default 100 ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<HumanDuration>,
    /// Maximum delay. Default 5 s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<HumanDuration>,
}

/// `custody`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Custody {
    /// Time after which an undelivered exchange fails. Default 15 min.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline: Option<HumanDuration>,
    /// Bytes in memory. Default 64 MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<ByteSize>,
    /// Bytes on disk. Default 1 GiB if the node has `state`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<ByteSize>,
    /// Failure that acknowledged bytes survive.
    #[serde(default, skip_serializing_if = "is_default")]
    pub durable: Durable,
}

/// `cache`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Cache {
    /// Bytes in memory. Default 64 MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<ByteSize>,
    /// Bytes on disk. Default 1 GiB if the node has `state`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<ByteSize>,
    /// Whether all users share the cache. Default true; otherwise each user has a partition.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared: Option<bool>,
    /// Time that stale responses are served while the origin is unreachable. Default 1 h.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stale_if_error: Option<HumanDuration>,
}

/// `upstream-rate-limit`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct UpstreamRateLimit {
    /// Maximum time that a request waits. Default 1 min.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline: Option<HumanDuration>,
    /// Maximum number of waiting requests. Default 1024.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<u32>,
}

/// `resume`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Resume {
    /// Maximum time without progress. Default 10 min.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline: Option<HumanDuration>,
}

/// Condition for a retry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryOn {
    /// `connect-failure`
    ConnectFailure,
    /// `reset`
    Reset,
    /// `5xx`
    ServerErrors,
    /// A status, 400 to 599.
    Status(StatusCode),
}

/// Keywords of the conditions.
const RETRY_KEYWORDS: [(&str, RetryOn); 3] =
    [("connect-failure", RetryOn::ConnectFailure), ("reset", RetryOn::Reset), ("5xx", RetryOn::ServerErrors)];

impl Serialize for RetryOn {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match (self, RETRY_KEYWORDS.iter().find(|(_, on)| on == self)) {
            (_, Some((word, _))) => serializer.serialize_str(word),
            (RetryOn::Status(status), None) => serializer.serialize_u16(status.as_u16()),
            // All other variants are in the table.
            (_, None) => serializer.serialize_unit(),
        }
    }
}

impl<'de> Deserialize<'de> for RetryOn {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(RetryOnVisitor)
    }
}

struct RetryOnVisitor;

impl Visitor<'_> for RetryOnVisitor {
    type Value = RetryOn;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("connect-failure, reset, 5xx or a status such as 429")
    }

    fn visit_u64<E: de::Error>(self, status: u64) -> Result<RetryOn, E> {
        let error = u16::try_from(status).ok().filter(|status| (400..600).contains(status));
        match error.and_then(|status| StatusCode::from_u16(status).ok()) {
            Some(status) => Ok(RetryOn::Status(status)),
            None => Err(E::custom(format!(
                "invalid retry status {status}; use a status from 400 to 599, such as 429 or 503"
            ))),
        }
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<RetryOn, E> {
        if let Some((_, on)) = RETRY_KEYWORDS.iter().find(|(word, _)| *word == text) {
            return Ok(*on);
        }
        if let Ok(status) = text.parse() {
            return self.visit_u64(status);
        }
        let hint = did_you_mean(text, RETRY_KEYWORDS.map(|(word, _)| word));
        let remedy =
            if hint.is_empty() { "; expected connect-failure, reset, 5xx or a status such as 429" } else { &hint };
        Err(E::custom(format!("unknown retry condition {text:?}{remedy}")))
    }
}
