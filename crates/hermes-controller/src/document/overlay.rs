//! The overlay as a whole: what its nodes have in common, and whom it serves.

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroUsize;
use std::str::FromStr;
use std::time::Duration;

use hermes_model::document::scalar::{Many, Period, Size, text_scalar};
use hermes_model::document::upstream::Health;
use hermes_model::document::{AccessLog, Bind};
use hermes_model::limits::LimitsSection;
use serde::{Deserialize, Serialize};

use super::name::Name;

/// `kind: Overlay`. Its name is that of the trust domain: certificates say `spiffe://NAME/node/...`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Overlay {
    /// Service providers. Where there are any, services, users and groups are theirs; where there are none, the operator's.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub providers: BTreeMap<Name, Provider>,
    /// How long a certificate of a node lives. It is renewed when two thirds of that are over. Default: a day.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate_life: Option<Period>,
    /// How a change goes out to nodes. Absent: to all at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollout: Option<Waves>,
    /// Programs that nodes may run. Absent: any.
    #[serde(default, skip_serializing_if = "super::is_default")]
    pub programs: Many<ProgramDigest>,
    /// What nodes have that do not say otherwise.
    #[serde(default, skip_serializing_if = "super::is_default")]
    pub nodes: Defaults,
}

/// SHA-256 of a program, in hex.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramDigest(String);

impl ProgramDigest {
    /// Whether it is the one with this digest, in hex.
    pub fn is(&self, digest: &str) -> bool {
        self.0 == digest
    }
}

impl FromStr for ProgramDigest {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_digest = text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let wrong = || format!("{text:?} is no SHA-256; write its 64 hexadecimal digits, as sha256sum prints them");
        is_digest.then(|| Self(text.to_ascii_lowercase())).ok_or_else(wrong)
    }
}

impl fmt::Display for ProgramDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

text_scalar!(ProgramDigest, "a string (SHA-256 in hex)");

/// Nodes take a change in waves, each larger than the one before; where it does not go well, all of it is taken back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Waves {
    /// Nodes of the first wave. Default 1.
    pub first: NonZeroUsize,
    /// How many times as many the next one has. Default 4.
    pub growth: NonZeroUsize,
    /// How long a wave's nodes have to go on well before the next one. Default 10 s.
    pub settle: Period,
}

impl Default for Waves {
    fn default() -> Self {
        let [first, growth] = [1, 4].map(|number| NonZeroUsize::MIN.saturating_add(number - 1));
        Self { first, growth, settle: Period(Duration::from_secs(10)) }
    }
}

/// One that the overlay serves: none sees or names what is another's.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Provider {
    /// How much it may have.
    #[serde(default, skip_serializing_if = "super::is_default")]
    pub quota: Quota,
}

/// How many documents of each kind a provider may have, and how much of a node that it shares.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Quota {
    /// Default 100.
    pub services: usize,
    /// Default 10,000.
    pub users: usize,
    /// Default 1,000.
    pub groups: usize,
    /// Memory that caches and custody of all its services may take on a node. Default 4 GiB.
    pub memory: Size,
    /// Disk likewise. Default 64 GiB.
    pub disk: Size,
}

impl Default for Quota {
    fn default() -> Self {
        Self { services: 100, users: 10_000, groups: 1000, memory: Size(4 << 30), disk: Size(64 << 30) }
    }
}

/// Sections of a node document that nodes have in common; see `docs/reference/node-document.md`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Defaults {
    /// Admin endpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub admin: Option<Bind>,
    /// How long a drain waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain: Option<Period>,
    /// Where session records go.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access_log: Option<AccessLog>,
    /// Limits other than the defaults.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<LimitsSection>,
    /// How a node asks after those it sends to, where it has others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health: Option<Probes>,
}

/// How a node asks after its neighbours: `health` of an upstream, without a path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Probes {
    /// Between two probes of one of them. Default 5 s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interval: Option<Period>,
    /// For one probe. Default 2 s, or the interval where that is shorter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<Period>,
    /// Successes in a row. Default 2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub healthy: Option<u32>,
    /// Failures in a row. Default 3.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unhealthy: Option<u32>,
}

impl Probes {
    /// As an upstream has it.
    pub(crate) fn health(self) -> Health {
        let Self { interval, timeout, healthy, unhealthy } = self;
        Health { path: None, interval, timeout, healthy, unhealthy }
    }
}
