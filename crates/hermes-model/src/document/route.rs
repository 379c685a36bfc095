//! `routes`: a match and one action each.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use http::Method;
use serde::de::{self, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::is_default;
use super::keyword::ProxyVersion;
use super::policy::{Cache, Custody, Pace, Retrieve, Retry, Rewrite, Timeout};
use crate::facts::Kind;
use crate::pattern::{AuthorityPattern, PathPattern, UserPattern, ValuePattern};
use crate::reach::Reach;
use crate::rewrite::Template;
use crate::scalar::{DeviceName, HostAddress, Many, Prefix, text_scalar};
use crate::snapshot::{HostPort, OnChange, Target};

/// One route.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Route {
    /// Its name, unique among routes.
    pub name: String,
    /// What must hold; absent is anything.
    #[serde(default, rename = "match", skip_serializing_if = "is_default")]
    pub matching: Match,
    /// Forward to the upstream of this name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upstream: Option<String>,
    /// Open the tunnel here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub terminate: Option<Terminate>,
    /// Answer here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub respond: Option<Respond>,
    /// Send the client elsewhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub redirect: Option<Redirect>,
    /// Changes on the way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rewrite: Option<Rewrite>,
    /// What may be tried again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry: Option<Retry>,
    /// Taken custody of, hop by hop, until it is through.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub custody: Option<Custody>,
    /// Answers that are kept, and given again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<Cache>,
    /// Kept within the rate that the service allows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pace: Option<Pace>,
    /// Asked for until it is there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retrieve: Option<Retrieve>,
    /// Whether its origin does once what comes twice with one `Idempotency-Key`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub idempotency_key: bool,
    /// How long to wait for what.
    #[serde(default, skip_serializing_if = "is_default")]
    pub timeout: Timeout,
    /// What a changed route does to live sessions.
    #[serde(default, skip_serializing_if = "is_default")]
    pub on_change: OnChange,
    /// Whether it serves what came before the end of a client's handshake; by default it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub early_data: Option<bool>,
}

impl Route {
    /// One that matches anything, and does nothing yet.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            matching: Default::default(),
            upstream: Default::default(),
            terminate: Default::default(),
            respond: Default::default(),
            redirect: Default::default(),
            rewrite: Default::default(),
            retry: Default::default(),
            custody: Default::default(),
            cache: Default::default(),
            pace: Default::default(),
            retrieve: Default::default(),
            idempotency_key: Default::default(),
            timeout: Default::default(),
            on_change: Default::default(),
            early_data: Default::default(),
        }
    }
}

/// A conjunction; each field one value or a list, of which one must hold.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Match {
    /// Names of listeners.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub listener: Many<String>,
    /// `http`, `tcp`, `udp`, `ip`.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub kind: Many<Kind>,
    /// Whom the session is for.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub authority: Many<AuthorityPattern>,
    /// Path without query.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub path: Many<PathPattern>,
    /// Methods.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub method: Many<MethodName>,
    /// By header name: values of which any line must be one.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub headers: BTreeMap<String, Many<ValuePattern>>,
    /// Whose session it is; `*` is anybody known.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub user: Many<UserPattern>,
    /// Destination prefixes, of `ip` sessions.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub network: Many<Prefix>,
    /// IP protocols, of `ip` sessions.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub protocol: Many<IpProtocol>,
    /// Ports of the authority.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub port: Many<u16>,
}

macro_rules! pattern_scalar {
    ($type:ty, $expecting:literal) => {
        impl FromStr for $type {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                <$type>::parse(text)
            }
        }
        text_scalar!($type, $expecting);
    };
}
pattern_scalar!(AuthorityPattern, "an authority such as VIDEO, DB:3306 or *.example.com");
pattern_scalar!(PathPattern, "a path such as /hello or /files/*");
pattern_scalar!(ValuePattern, "a text");
pattern_scalar!(UserPattern, "a text (a user's name)");

/// A method, as it is sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MethodName(pub Method);
text_scalar!(MethodName, "a method such as GET");

impl FromStr for MethodName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let upper = text.to_ascii_uppercase();
        if upper != text {
            return Err(format!("{text:?} is no method, since case matters; write {upper}"));
        }
        Method::from_str(text)
            .map(MethodName)
            .map_err(|_| format!("{text:?} is no method; write a token such as GET, POST or CONNECT"))
    }
}

impl fmt::Display for MethodName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// An IP protocol: its number, or `icmp`, `tcp`, `udp`, `icmpv6`, `sctp`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpProtocol(pub u8);

/// Names of IANA's registry of assigned internet protocol numbers.
const IP_PROTOCOLS: [(&str, u8); 5] = [("icmp", 1), ("tcp", 6), ("udp", 17), ("icmpv6", 58), ("sctp", 132)];

impl Serialize for IpProtocol {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u8(self.0)
    }
}

impl<'de> Deserialize<'de> for IpProtocol {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(IpProtocolVisitor)
    }
}

struct IpProtocolVisitor;

impl Visitor<'_> for IpProtocolVisitor {
    type Value = IpProtocol;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an IP protocol: 0 to 255, or icmp, tcp, udp, icmpv6, sctp")
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<IpProtocol, E> {
        u8::try_from(number).map(IpProtocol).map_err(|_| {
            E::custom(format!("{number} is no IP protocol; write 0 to 255, or icmp, tcp, udp, icmpv6, sctp"))
        })
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<IpProtocol, E> {
        let known = IP_PROTOCOLS.iter().find(|(name, _)| *name == text);
        known.map(|(_, number)| IpProtocol(*number)).ok_or_else(|| {
            E::custom(format!("{text:?} is no IP protocol; write 0 to 255, or icmp, tcp, udp, icmpv6, sctp"))
        })
    }
}

/// `terminate`: exactly one of `tcp`, `udp`, `http` and `tun`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Terminate {
    /// Dial this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tcp: Option<Target>,
    /// Send datagrams to this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub udp: Option<Target>,
    /// Send the request to this origin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub http: Option<Target>,
    /// Give the packets to this device, which is made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tun: Option<DeviceName>,
    /// For `tun`: the device's addresses.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub address: Many<HostAddress>,
    /// For `tun`: prefixes that clients get their addresses from.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub assign: Many<Prefix>,
    /// For `tun`: clients may have whole networks of `assign`, and not only addresses.
    #[serde(default, skip_serializing_if = "is_default")]
    pub assign_networks: bool,
    /// For `tun`: what leaves the machine comes from its own address.
    #[serde(default, skip_serializing_if = "is_default")]
    pub nat: bool,
    /// For `tun`: whatever address the client asks for, the packets go to this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inner: Option<HostAddress>,
    /// Which addresses the request may name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reach: Option<Reach>,
    /// Never dial the node's own listeners, its `admin`, its controllers or a metadata service.
    #[serde(default, skip_serializing_if = "is_default")]
    pub guard: bool,
    /// Begin with a PROXY protocol header.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proxy_protocol: Option<ProxyVersion>,
    /// For `http: authority`: how origins of `https` requests are verified.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<OriginTls>,
}

/// `terminate.tls`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct OriginTls {
    /// CA certificates (PEM) instead of the system's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca: Option<String>,
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "authority" => Ok(Target::Authority),
            _ => text.parse::<HostPort>().map(Target::Fixed).map_err(|error| format!("{error}, or authority")),
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::Authority => f.write_str("authority"),
            Target::Fixed(target) => target.fmt(f),
        }
    }
}
text_scalar!(Target, "authority, or a host and port such as 127.0.0.1:7000");

/// `respond`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Respond {
    /// Default 200.
    #[serde(default = "Respond::status", deserialize_with = "final_status")]
    pub status: u16,
    /// Headers of the answer.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub headers: BTreeMap<String, String>,
    /// Its body.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub body: String,
}

impl Respond {
    fn status() -> u16 {
        200
    }
}

/// `redirect`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Redirect {
    /// Default 308.
    #[serde(default = "Redirect::status", deserialize_with = "redirection")]
    pub status: u16,
    /// Where to.
    pub location: Template,
}

impl Redirect {
    fn status() -> u16 {
        308
    }
}

fn final_status<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u16, D::Error> {
    deserializer.deserialize_u16(StatusVisitor { named: "a status from 200 to 599" })
}

fn redirection<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u16, D::Error> {
    deserializer.deserialize_u16(StatusVisitor { named: "one of 301, 302, 303, 307 and 308" })
}

/// Reads a number that may be a status; `check` has the last word.
struct StatusVisitor {
    /// Which statuses may stand here, for people.
    named: &'static str,
}

impl Visitor<'_> for StatusVisitor {
    type Value = u16;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.named)
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<u16, E> {
        u16::try_from(value).map_err(|_| E::invalid_value(Unexpected::Unsigned(value), &self))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<u16, E> {
        u16::try_from(value).map_err(|_| E::invalid_value(Unexpected::Signed(value), &self))
    }
}
