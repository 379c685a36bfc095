//! How a route treats its sessions: `rewrite`, `retry`, `custody`, `cache`, `pace`, `retrieve`, `timeout`.

use std::collections::BTreeMap;
use std::fmt;

use http::StatusCode;
use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::is_default;
use super::nearest::did_you_mean;
use crate::rewrite::Template;
use crate::scalar::{Many, Period, Share, Size};
use crate::snapshot::Durable;

/// `rewrite`
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Rewrite {
    /// The authority that the next hop sees.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub authority: Option<Template>,
    /// The path that the next hop sees.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<RewritePath>,
    /// Changes to the query.
    #[serde(default, skip_serializing_if = "is_default")]
    pub query: RewriteQuery,
    /// Headers to write, instead of what is there.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub set_headers: BTreeMap<String, Template>,
    /// Header lines to add.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub add_headers: BTreeMap<String, Many<Template>>,
    /// Headers to leave out.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub remove_headers: Many<String>,
    /// Changes to the response.
    #[serde(default, skip_serializing_if = "is_default")]
    pub response: RewriteResponse,
}

/// `rewrite.path`: `from` and `to`, or `pattern` and `to`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct RewritePath {
    /// A prefix.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// Segments with names in braces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pattern: Option<String>,
    /// What comes instead.
    pub to: String,
}

/// `rewrite.query`
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct RewriteQuery {
    /// Pairs to write.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub set: BTreeMap<String, Template>,
    /// Names to leave out.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub remove: Many<String>,
}

/// `rewrite.response`
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct RewriteResponse {
    /// Headers to write, instead of what is there.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub set_headers: BTreeMap<String, Template>,
    /// Header lines to add.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub add_headers: BTreeMap<String, Many<Template>>,
    /// Headers to leave out.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub remove_headers: Many<String>,
}

/// `timeout`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Timeout {
    /// Default 5 s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connect: Option<Period>,
    /// Default by kind: `http` 5 min, `tcp` 1 h, `udp` 2 min.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle: Option<Period>,
    /// Default 60 s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<Period>,
}

/// `retry`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Retry {
    /// Default `connect-failure`.
    #[serde(default = "Retry::on")]
    pub on: Many<RetryOn>,
    /// Tries in all. Default 3.
    #[serde(default = "Retry::attempts")]
    pub attempts: u32,
    /// Waits between tries.
    #[serde(default, skip_serializing_if = "is_default")]
    pub backoff: Backoff,
    /// Share of requests that may be retries. Default 20 %.
    #[serde(default = "Retry::budget")]
    pub budget: Share,
}

impl Retry {
    fn on() -> Many<RetryOn> {
        Many(vec![RetryOn::ConnectFailure])
    }

    fn attempts() -> u32 {
        3
    }

    fn budget() -> Share {
        Share(0.2)
    }
}

/// `retry.backoff`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Backoff {
    /// The first wait; doubles. Default 100 ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<Period>,
    /// Its ceiling. Default 5 s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<Period>,
}

/// `custody`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Custody {
    /// Default 15 min.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline: Option<Period>,
    /// Default 64 MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<Size>,
    /// Default 1 GiB, where the node has `state`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<Size>,
    /// What it survives.
    #[serde(default, skip_serializing_if = "is_default")]
    pub durable: Durable,
}

/// `cache`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Cache {
    /// Default 64 MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<Size>,
    /// Default 1 GiB, where the node has `state`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<Size>,
    /// One for all users, which is the default; or one a user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared: Option<bool>,
    /// How long something stale is given while nobody behind can be reached. Default 1 h.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stale: Option<Period>,
}

/// `pace`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Pace {
    /// Default 1 min.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline: Option<Period>,
    /// Requests that wait at a time. Default 1024.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<u32>,
}

/// `retrieve`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Retrieve {
    /// How long nothing may come of it. Default 10 min.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline: Option<Period>,
}

/// What is tried again.
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

/// The words among them.
const RETRY_WORDS: [(&str, RetryOn); 3] =
    [("connect-failure", RetryOn::ConnectFailure), ("reset", RetryOn::Reset), ("5xx", RetryOn::ServerErrors)];

impl Serialize for RetryOn {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match (self, RETRY_WORDS.iter().find(|(_, on)| on == self)) {
            (_, Some((word, _))) => serializer.serialize_str(word),
            (RetryOn::Status(status), None) => serializer.serialize_u16(status.as_u16()),
            // Every other variant is in the table.
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
                "{status} is no error to retry on; write a status from 400 to 599, such as 429 or 503"
            ))),
        }
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<RetryOn, E> {
        if let Some((_, on)) = RETRY_WORDS.iter().find(|(word, _)| *word == text) {
            return Ok(*on);
        }
        if let Ok(status) = text.parse() {
            return self.visit_u64(status);
        }
        let hint = did_you_mean(text, RETRY_WORDS.map(|(word, _)| word));
        let remedy =
            if hint.is_empty() { "; write connect-failure, reset, 5xx or a status such as 429" } else { &hint };
        Err(E::custom(format!("{text:?} is nothing to retry on{remedy}")))
    }
}
