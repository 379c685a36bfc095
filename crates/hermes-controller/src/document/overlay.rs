//! The overlay as a whole: its providers, and the defaults of its nodes.

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroUsize;
use std::str::FromStr;
use std::time::Duration;

use hermes_model::document::overload::OverloadSection;
use hermes_model::document::scalar::{ByteSize, HumanDuration, OneOrMany, text_scalar};
use hermes_model::document::upstream::Health;
use hermes_model::document::{AccessLog, Bind};
use hermes_model::limits::LimitsSection;
use serde::{Deserialize, Serialize};

use super::name::Name;

/// The content of a document of `kind: Overlay`. Its name is the trust domain: certificates have
/// `spiffe://NAME/node/...`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Overlay {
    /// Service providers. If there are any, services, users and groups belong to them, otherwise to the operator.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub providers: BTreeMap<Name, Provider>,
    /// The lifetime of a node's certificate, which is renewed after two thirds. Default: a day.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate_lifetime: Option<HumanDuration>,
    /// The rollout of changes in waves; if absent, all nodes receive a change at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollout: Option<RolloutWaves>,
    /// Programs that nodes may run; if absent, any program.
    #[serde(default, skip_serializing_if = "super::is_default")]
    pub programs: OneOrMany<ProgramDigest>,
    /// Defaults of nodes.
    #[serde(default, skip_serializing_if = "super::is_default")]
    pub nodes: Defaults,
}

/// SHA-256 of a program, in hex.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramDigest(String);

impl ProgramDigest {
    /// True if this is the given digest, in lower-case hex.
    pub fn is(&self, digest: &str) -> bool {
        self.0 == digest
    }
}

impl FromStr for ProgramDigest {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_digest = text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let wrong = || format!("invalid SHA-256 {text:?}; expected 64 hexadecimal digits, as sha256sum prints them");
        is_digest.then(|| Self(text.to_ascii_lowercase())).ok_or_else(wrong)
    }
}

impl fmt::Display for ProgramDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

text_scalar!(ProgramDigest, "a string (SHA-256 in hex)");

/// A rollout in waves: each wave is larger than the one before. A failure rolls the change back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct RolloutWaves {
    /// The number of nodes of the first wave. Default 1.
    pub first: NonZeroUsize,
    /// The factor by which waves grow. Default 4.
    pub growth: NonZeroUsize,
    /// The time that the nodes of a wave must stay healthy before the next one. Default 10 s.
    pub settle: HumanDuration,
}

impl Default for RolloutWaves {
    fn default() -> Self {
        let [first, growth] = [1, 4].map(|number| NonZeroUsize::MIN.saturating_add(number - 1));
        Self { first, growth, settle: HumanDuration(Duration::from_secs(10)) }
    }
}

/// A service provider. Providers neither see nor name each other's documents.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Provider {
    /// The provider's limits.
    #[serde(default, skip_serializing_if = "super::is_default")]
    pub quota: Quota,
}

/// Limits of a provider: the number of documents of each kind, and its share of a node that several providers use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Quota {
    /// The maximum number of services. Default 100.
    pub services: usize,
    /// The maximum number of users. Default 10,000.
    pub users: usize,
    /// The maximum number of groups. Default 1,000.
    pub groups: usize,
    /// The memory for caches and custody of all its services on a node. Default 4 GiB.
    pub memory: ByteSize,
    /// The disk space for caches and custody of all its services on a node. Default 64 GiB.
    pub disk: ByteSize,
}

impl Default for Quota {
    fn default() -> Self {
        Self { services: 100, users: 10_000, groups: 1000, memory: ByteSize(4 << 30), disk: ByteSize(64 << 30) }
    }
}

/// Defaults of nodes; see `docs/reference/node-document.md`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Defaults {
    /// The admin endpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub admin: Option<Bind>,
    /// The drain timeout.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain: Option<HumanDuration>,
    /// The destination of the access log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access_log: Option<AccessLog>,
    /// Settings for overload other than the built-in ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overload: Option<OverloadSection>,
    /// Limits other than the built-in ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<LimitsSection>,
    /// Health checks of next hops, if there are several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health: Option<NeighbourHealth>,
}

/// Health checks of neighbours: `health` of an upstream, without a path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct NeighbourHealth {
    /// The interval between two probes. Default 5 s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interval: Option<HumanDuration>,
    /// The timeout of a probe. Default 2 s, or the interval if that is shorter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<HumanDuration>,
    /// Successes in a row that make an endpoint healthy. Default 2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub healthy: Option<u32>,
    /// Failures in a row that make an endpoint unhealthy. Default 3.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unhealthy: Option<u32>,
}

impl NeighbourHealth {
    /// Returns the `health` section of an upstream.
    pub(crate) fn health(self) -> Health {
        let Self { interval, timeout, healthy, unhealthy } = self;
        Health { path: None, interval, timeout, healthy, unhealthy }
    }
}
