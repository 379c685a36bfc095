//! The node document: written by an operator, or compiled by a controller.
//!
//! In: YAML, parsed by `check`. Out: plain structs, one per section, with the documented defaults. They serialise to
//! the document that they were parsed from.
//! Never: resolved references or opened files; `check` and the node do that.
//!
//! `docs/reference/node-document.md` describes each key; a test compares both.

pub mod did_you_mean;
pub mod dispatch;
pub mod keyword;
pub mod listener;
pub mod overload;
pub mod policy;
pub mod redact;
pub mod relay;
pub mod route;
pub mod upstream;

use std::collections::BTreeMap;
use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::str::FromStr;
use std::time::Duration;

use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use self::dispatch::DispatchSection;
use self::overload::OverloadSection;
use crate::limits::LimitsSection;
use crate::scalar::{HumanDuration, OneOrMany, text_scalar};
use crate::snapshot::Role;

pub use crate::scalar;

/// Predicate for `skip_serializing_if`: the value is the default of its type.
fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// The default of `drain`.
pub const DEFAULT_DRAIN: Duration = Duration::from_secs(10);

/// A complete node document.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Document {
    /// The node's name: letters, digits, `.`, `-` and `_`.
    pub node: String,
    /// Address of the admin endpoint; absent disables it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub admin: Option<Bind>,
    /// Allow other machines to reach the admin endpoint.
    #[serde(default, skip_serializing_if = "is_default")]
    pub admin_exposed: bool,
    /// Maximum duration of a drain. Default 10 s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain: Option<HumanDuration>,
    /// The node reports that it accepts no sessions, so that load balancers avoid it. It still serves those that
    /// arrive.
    #[serde(default, skip_serializing_if = "is_default")]
    pub draining: bool,
    /// Number of worker threads.
    #[serde(default, skip_serializing_if = "is_default")]
    pub workers: Workers,
    /// Whether the node may pass on identities that other nodes asserted.
    #[serde(default, skip_serializing_if = "is_default")]
    pub role: Role,
    /// Files with certificate, key and CA.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<Identity>,
    /// Users bound to other nodes.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub users: BTreeMap<String, OneOrMany<String>>,
    /// Limits that differ from the defaults.
    #[serde(default, skip_serializing_if = "is_default")]
    pub limits: LimitsSection,
    /// Distribution of connections to workers.
    #[serde(default, skip_serializing_if = "is_default")]
    pub dispatch: DispatchSection,
    /// Steps of the node when memory, file descriptors or time run short.
    #[serde(default, skip_serializing_if = "is_default")]
    pub overload: OverloadSection,
    /// Destination of the access log.
    #[serde(default, skip_serializing_if = "is_default")]
    pub access_log: AccessLog,
    /// Directory for state that outlives the process; absent keeps state in memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<String>,
    /// Entry points for sessions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub listeners: Vec<listener::Listener>,
    /// Matches and actions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<route::Route>,
    /// Named sets of endpoints.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub upstreams: Vec<upstream::Upstream>,
    /// Policies of a later version: the list must be empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub policies: Vec<FutureSection>,
}

impl Document {
    /// A document without listeners, routes and upstreams.
    pub fn new(node: &str) -> Self {
        Self { node: node.to_owned(), ..Self::default() }
    }
}

/// Files of the node's identity.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    /// Certificate chain (PEM), the leaf first.
    pub cert: String,
    /// Private key (PEM).
    pub key: String,
    /// CA certificates of the overlay (PEM).
    pub ca: String,
    /// Revoked keys, whatever their certificate: `ni:///sha-256;` and the digest of the SubjectPublicKeyInfo in
    /// base64url (RFC 6920).
    #[serde(default, skip_serializing_if = "is_default")]
    pub revoked: OneOrMany<String>,
}

/// `auto`, or a number of threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Workers {
    /// A thread per core.
    #[default]
    Auto,
    /// A fixed number of threads.
    Count(u64),
}

impl Serialize for Workers {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Workers::Auto => serializer.serialize_str("auto"),
            Workers::Count(count) => serializer.serialize_u64(*count),
        }
    }
}

impl<'de> Deserialize<'de> for Workers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(WorkersVisitor)
    }
}

struct WorkersVisitor;

impl Visitor<'_> for WorkersVisitor {
    type Value = Workers;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("auto or a number of threads")
    }

    fn visit_u64<E: de::Error>(self, count: u64) -> Result<Workers, E> {
        Ok(Workers::Count(count))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Workers, E> {
        match text {
            "auto" => Ok(Workers::Auto),
            _ => Err(E::custom(format!("invalid number of workers {text:?}; use auto or a number"))),
        }
    }
}

/// `stdout`, `stderr`, `off`, or a file's path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum AccessLog {
    /// Standard output.
    #[default]
    Stdout,
    /// Standard error.
    Stderr,
    /// No access log.
    Off,
    /// A file.
    File(String),
}
text_scalar!(AccessLog, "stdout, stderr, off or the path of a file");

impl FromStr for AccessLog {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "stdout" => Ok(AccessLog::Stdout),
            "stderr" => Ok(AccessLog::Stderr),
            "off" => Ok(AccessLog::Off),
            // A bare word is more likely a misspelling than a file in the working directory.
            path if path.contains(['/', '.']) => Ok(AccessLog::File(path.to_owned())),
            word => Err(format!(
                "unknown log destination {word:?}; use stdout, stderr, off or a path such as /var/log/hermes.json"
            )),
        }
    }
}

impl fmt::Display for AccessLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            AccessLog::Stdout => "stdout",
            AccessLog::Stderr => "stderr",
            AccessLog::Off => "off",
            AccessLog::File(path) => path,
        })
    }
}

/// An address and a port to listen on. Port 0 takes any free port. `:PORT` means `0.0.0.0:PORT`, and `localhost:PORT`
/// means `127.0.0.1:PORT`; other names are not resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bind(pub SocketAddr);
text_scalar!(Bind, "an address and a port such as 127.0.0.1:8080");

impl FromStr for Bind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (host, port) = text.rsplit_once(':').unwrap_or((text, ""));
        let address = match host {
            "" => Some(Ipv4Addr::UNSPECIFIED),
            host if host.eq_ignore_ascii_case("localhost") => Some(Ipv4Addr::LOCALHOST),
            _ => None,
        };
        let is_number = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
        if let (Some(address), true, Ok(port)) = (address, is_number, port.parse::<u16>()) {
            return Ok(Bind((address, port).into()));
        }
        text.parse().map(Bind).map_err(|_| {
            let port = text.rsplit(':').next().unwrap_or_default();
            let is_large = !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit()) && port.parse::<u16>().is_err();
            let why = if is_large { ": port over 65535" } else { "" };
            format!("invalid address and port {text:?}{why}; use 127.0.0.1:8080, \":8080\" for all addresses, or \"[::1]:8080\"")
        })
    }
}

impl fmt::Display for Bind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A section of a later version; no value can be parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum FutureSection {}

impl<'de> Deserialize<'de> for FutureSection {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        de::IgnoredAny::deserialize(deserializer)?;
        Err(de::Error::custom("not supported by this version of Hermes; remove it"))
    }
}
