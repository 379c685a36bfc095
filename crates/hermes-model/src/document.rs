//! The node document: what an operator writes and a controller compiles.
//!
//! In: YAML, read by `check`. Out: plain structs, one a section, with the documented defaults;
//! they serialise to the document that they were read from.
//! Never: references resolved or files opened. That is `check` and the node.
//!
//! Each key is described in `docs/reference/node-document.md`; a test compares.

pub mod keyword;
pub mod listener;
pub mod nearest;
pub mod policy;
pub mod redact;
pub mod route;

pub mod upstream;

use std::collections::BTreeMap;
use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::str::FromStr;

use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::limits::LimitsSection;
use crate::scalar::{Many, Period, text_scalar};
use crate::snapshot::{Dispatch, Role};

pub use crate::scalar;

/// Helper for `skip_serializing_if`: the value is its type's default.
fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// A whole node document.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Document {
    /// The node's name: letters, digits, `.`, `-` and `_`.
    pub node: String,
    /// Where the admin endpoint listens; absent leaves it out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub admin: Option<Bind>,
    /// The admin endpoint may be reached from other machines.
    #[serde(default, skip_serializing_if = "is_default")]
    pub admin_exposed: bool,
    /// How long a drain waits for sessions. Default 10 s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain: Option<Period>,
    /// The node says that it takes no sessions: somebody keeps them away from it. Those that come all the same are served.
    #[serde(default, skip_serializing_if = "is_default")]
    pub draining: bool,
    /// Worker threads.
    #[serde(default, skip_serializing_if = "is_default")]
    pub workers: Workers,
    /// Whether the node may pass on identities.
    #[serde(default, skip_serializing_if = "is_default")]
    pub role: Role,
    /// Certificate, key and CA.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<Identity>,
    /// Users bound to other nodes.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub users: BTreeMap<String, Many<String>>,
    /// Limits other than the defaults.
    #[serde(default, skip_serializing_if = "is_default")]
    pub limits: LimitsSection,
    /// How connections are spread over workers.
    #[serde(default, skip_serializing_if = "is_default")]
    pub dispatch: Dispatch,
    /// Where session records go.
    #[serde(default, skip_serializing_if = "is_default")]
    pub access_log: AccessLog,
    /// A directory for what outlives the process; absent keeps it in memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<String>,
    /// Where bytes come in.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub listeners: Vec<listener::Listener>,
    /// What becomes of sessions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<route::Route>,
    /// Where sessions are forwarded to.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub upstreams: Vec<upstream::Upstream>,
    /// Policies of a later version: the list must be empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub policies: Vec<Later>,
}

impl Document {
    /// A node that does nothing yet.
    pub fn new(node: &str) -> Self {
        Self {
            node: node.to_owned(),
            admin: Default::default(),
            admin_exposed: Default::default(),
            drain: Default::default(),
            draining: Default::default(),
            workers: Default::default(),
            role: Default::default(),
            identity: Default::default(),
            users: Default::default(),
            limits: Default::default(),
            dispatch: Default::default(),
            access_log: Default::default(),
            state: Default::default(),
            listeners: Default::default(),
            routes: Default::default(),
            upstreams: Default::default(),
            policies: Default::default(),
        }
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
    /// Keys that are not believed any more, whatever certificate they have: `ni:///sha-256;` and the digest of the
    /// SubjectPublicKeyInfo in base64url (RFC 6920).
    #[serde(default, skip_serializing_if = "is_default")]
    pub revoked: Many<String>,
}

/// `auto`, or a number of threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Workers {
    /// One a core.
    #[default]
    Auto,
    /// This many.
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
            _ => Err(E::custom(format!("{text:?} is no number of workers; write auto or a number"))),
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
    /// Nowhere.
    Off,
    /// This file.
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
            // A bare word is more likely a slip than a file in the working directory.
            path if path.contains(['/', '.']) => Ok(AccessLog::File(path.to_owned())),
            word => Err(format!(
                "{word:?} is no place for the log; write stdout, stderr, off or a path such as /var/log/hermes.json"
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

/// An address and a port to listen on. Port 0 takes any free one. `:PORT` is all addresses of IPv4, as `0.0.0.0:PORT`, and
/// `localhost:PORT` is `127.0.0.1:PORT`; other names are not resolved.
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
            let why = if is_large { ": a port is at most 65535" } else { "" };
            format!("{text:?} is no address and port{why}; write 127.0.0.1:8080, \":8080\" for all addresses, or \"[::1]:8080\"")
        })
    }
}

impl fmt::Display for Bind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Something that a later version will read. Cannot be made from any value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Later {}

impl<'de> Deserialize<'de> for Later {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        de::IgnoredAny::deserialize(deserializer)?;
        Err(de::Error::custom("this is not in this version of Hermes; leave it out"))
    }
}
