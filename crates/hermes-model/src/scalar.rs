//! Scalars of a document: durations, sizes, percentages, networks, addresses, and one-or-many.
//!
//! In: YAML strings and numbers. Out: typed values, which serialise to the same spelling.
//! Never: a value without a unit, or a guess.

use std::fmt;
use std::marker::PhantomData;
use std::net::IpAddr;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use serde::de::{self, Deserializer, IntoDeserializer, SeqAccess, Visitor};
use serde::{Deserialize, Serialize, Serializer};

use crate::authority::{Authority, AuthorityError};

/// Derives serde from `FromStr` and `Display`: the scalar is a string in the document.
#[macro_export]
macro_rules! text_scalar {
    ($type:ty, $expecting:literal) => {
        impl ::serde::Serialize for $type {
            fn serialize<S: ::serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> ::serde::Deserialize<'de> for $type {
            fn deserialize<D: ::serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserializer.deserialize_str($crate::scalar::TextVisitor::new($expecting))
            }
        }
    };
}
pub use text_scalar;

/// Parses a string by `FromStr`; its error becomes the message of the problem.
pub struct TextVisitor<T> {
    expecting: &'static str,
    of: PhantomData<T>,
}

impl<T> TextVisitor<T> {
    /// Creates a visitor; `expecting` describes the type in messages about other YAML types.
    pub fn new(expecting: &'static str) -> Self {
        Self { expecting, of: PhantomData }
    }
}

impl<T> Visitor<'_> for TextVisitor<T>
where
    T: FromStr,
    T::Err: fmt::Display,
{
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.expecting)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
        text.parse().map_err(E::custom)
    }
}

/// A duration: `250ms`, `1s`, `10m`, `1h`, `1d`, or several of them from the largest down (`1m30s`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HumanDuration(pub Duration);
text_scalar!(HumanDuration, "a duration such as 250ms, 10s or 1h");

const PERIOD_UNITS: [(&str, u64); 5] = [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)];

impl FromStr for HumanDuration {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("invalid duration {text:?}; use a number with a unit, such as 250ms, 10s, 5m or 1h");
        let mut rest = text;
        let mut total: u64 = 0;
        // Units must descend, so that `1s1m` and `1s1s` are errors and not sums.
        let mut last = u64::MAX;
        while !rest.is_empty() {
            let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
            let (number, tail) = rest.split_at(digits);
            let letters = tail.bytes().take_while(u8::is_ascii_alphabetic).count();
            let (unit, tail) = tail.split_at(letters);
            let scale = PERIOD_UNITS.iter().find(|(name, _)| *name == unit).map(|(_, scale)| *scale);
            let (Ok(number), Some(scale)) = (number.parse::<u64>(), scale) else { return Err(wrong()) };
            if scale >= last {
                return Err(format!("invalid duration {text:?}: units must descend and occur once, as in 1m30s"));
            }
            total = number.checked_mul(scale).and_then(|part| total.checked_add(part)).ok_or_else(wrong)?;
            (last, rest) = (scale, tail);
        }
        if last == u64::MAX { Err(wrong()) } else { Ok(HumanDuration(Duration::from_millis(total))) }
    }
}

impl fmt::Display for HumanDuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let millis = self.0.as_millis();
        let units = PERIOD_UNITS.iter().map(|(unit, scale)| (*unit, u128::from(*scale)));
        // Whole days read best from 2d on; below that, hours are more familiar (24h, 36h).
        let is_shown = |(unit, scale): &(&str, u128)| {
            millis != 0 && millis.is_multiple_of(*scale) && (*unit != "d" || millis >= 2 * scale)
        };
        let (unit, scale) = units.clone().find(is_shown).unwrap_or(("s", 1000));
        write!(f, "{}{unit}", millis / scale)
    }
}

/// A number of bytes: `100B`, `64KiB`, `4MiB`, `1GiB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteSize(pub u64);
text_scalar!(ByteSize, "a size such as 64KiB or 4MiB");

const SIZE_UNITS: [(&str, u64); 4] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)];

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (number, unit) = text.split_at(text.bytes().take_while(u8::is_ascii_digit).count());
        let scale = SIZE_UNITS.iter().find(|(name, _)| *name == unit).map(|(_, scale)| *scale);
        let bytes = match (number.parse::<u64>(), scale) {
            (Ok(number), Some(scale)) => number.checked_mul(scale),
            _ => None,
        };
        bytes
            .map(ByteSize)
            .ok_or_else(|| format!("invalid size {text:?}; use a number with B, KiB, MiB or GiB, such as 64KiB"))
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fits = |scale: &u64| self.0 != 0 && self.0.is_multiple_of(*scale);
        let (unit, scale) = SIZE_UNITS.iter().find(|(_, scale)| fits(scale)).unwrap_or(&("B", 1));
        write!(f, "{}{unit}", self.0 / scale)
    }
}

/// A share: `20%`, from 0 to 100, with at most three decimals.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Percentage(pub f64);
text_scalar!(Percentage, "a percentage such as 20%");

impl FromStr for Percentage {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.strip_suffix('%')
            .filter(|number| number.bytes().all(|b| b.is_ascii_digit() || b == b'.'))
            .and_then(|number| number.parse::<f64>().ok())
            .filter(|percent| (0.0..=100.0).contains(percent))
            .map(|percent| Percentage(percent / 100.0))
            .ok_or_else(|| format!("invalid percentage {text:?}; use 0% to 100%, such as 20%"))
    }
}

impl fmt::Display for Percentage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Rounding is necessary, because 0.07 * 100.0 is not 7.
        write!(f, "{}%", (self.0 * 100_000.0).round() / 1000.0)
    }
}

/// An IP network; a bare address is a network of one address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefix(pub IpNet);
text_scalar!(Prefix, "a network such as 10.0.0.0/8");

impl FromStr for Prefix {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok(address) = text.parse::<IpAddr>() {
            return Ok(Prefix(IpNet::from(address)));
        }
        let net: IpNet = text.parse().map_err(|_| {
            format!("invalid network {text:?}; use an address and a prefix length, such as 10.0.0.0/8 or 2001:db8::/32")
        })?;
        if net.trunc() == net {
            Ok(Prefix(net))
        } else {
            Err(format!(
                "invalid network {text:?}: host bits are set; use {} or {}",
                net.trunc(),
                IpNet::from(net.addr())
            ))
        }
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// An IP address; a full-length prefix is accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostAddress(pub IpAddr);
text_scalar!(HostAddress, "an address such as 10.20.0.2 or 2001:db8::2");

impl FromStr for HostAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok(address) = text.parse() {
            return Ok(HostAddress(address));
        }
        let wrong = || format!("invalid IP address {text:?}; use an address such as 10.20.0.2 or 2001:db8::2");
        let net: IpNet = text.parse().map_err(|_| wrong())?;
        if net.prefix_len() == net.max_prefix_len() {
            Ok(HostAddress(net.addr()))
        } else {
            Err(format!(
                "invalid IP address {text:?}: a network; use the device's own address, {}, and list networks under `capture`",
                net.addr()
            ))
        }
    }
}

impl fmt::Display for HostAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Name of a network device, as the kernel accepts it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceName(pub Arc<str>);
text_scalar!(DeviceName, "the name of a device such as hermes0");

impl FromStr for DeviceName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_fit = (1..=15).contains(&text.len())
            && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
            && !text.starts_with('.');
        if is_fit {
            Ok(DeviceName(Arc::from(text)))
        } else {
            Err(format!("invalid device name {text:?}; use up to 15 letters and digits, such as hermes0"))
        }
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The name of a congestion control algorithm of the kernel (`TCP_CONGESTION`).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CongestionControl(pub Arc<str>);
text_scalar!(CongestionControl, "the name of a congestion control such as bbr or cubic");

impl FromStr for CongestionControl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_fit = (1..=15).contains(&text.len())
            && text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_');
        if is_fit {
            Ok(CongestionControl(Arc::from(text)))
        } else {
            Err(format!("invalid congestion control {text:?}; use a name such as bbr or cubic"))
        }
    }
}

impl fmt::Display for CongestionControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The URI of an NDN name, such as `/org/dev`. Its components are checked where it is used.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NdnName(pub Arc<str>);
text_scalar!(NdnName, "the URI of an NDN name such as /org/dev");

impl FromStr for NdnName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let path = text.strip_suffix('/').unwrap_or(text);
        let is_fit = text.starts_with('/')
            && text.bytes().all(|byte| byte.is_ascii_graphic())
            && (text == "/" || path[1..].split('/').all(|part| !matches!(part, "" | "." | "..")));
        if is_fit {
            Ok(NdnName(Arc::from(text)))
        } else {
            Err(format!("invalid NDN name {text:?}; use a URI such as /org/dev"))
        }
    }
}

impl fmt::Display for NdnName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The face of an NDN forwarder: `udp://HOST:PORT`, `tcp://HOST:PORT` or `unix:///PATH`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum FaceUri {
    /// Datagrams, each with a frame.
    Udp(HostPort),
    /// A stream of frames.
    Tcp(HostPort),
    /// A stream of frames over a socket of this machine.
    Unix(Arc<str>),
}
text_scalar!(FaceUri, "the URI of a face such as udp://127.0.0.1:6363");

impl FromStr for FaceUri {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let invalid =
            |why: String| format!("invalid face {text:?}: {why}; use udp://HOST:PORT, tcp://HOST:PORT or unix:///PATH");
        match text.split_once("://") {
            Some(("udp", target)) => target.parse().map(FaceUri::Udp).map_err(invalid),
            Some(("tcp", target)) => target.parse().map(FaceUri::Tcp).map_err(invalid),
            Some(("unix", path)) if path.starts_with('/') && path.len() > 1 => Ok(FaceUri::Unix(Arc::from(path))),
            _ => Err(invalid("unknown scheme".to_owned())),
        }
    }
}

impl fmt::Display for FaceUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FaceUri::Udp(target) => write!(f, "udp://{target}"),
            FaceUri::Tcp(target) => write!(f, "tcp://{target}"),
            FaceUri::Unix(path) => write!(f, "unix://{path}"),
        }
    }
}

/// A host (name or address, no brackets) and a port.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HostPort {
    /// DNS name or IP address.
    pub host: Arc<str>,
    /// Port, never 0.
    pub port: u16,
}

impl FromStr for HostPort {
    type Err = String;

    /// Parses `HOST:PORT`, `ADDRESS:PORT` or `[IPv6]:PORT`.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = |why: &dyn fmt::Display| {
            format!(
                "invalid host and port {text:?}: {why}; use HOST:PORT, such as 192.0.2.1:9443, db.example:3306 or \"[2001:db8::1]:9443\""
            )
        };
        let authority = Authority::parse(text, None).map_err(|error| match error {
            AuthorityError::Scheme => wrong(&"remove the scheme (`tls` enables https)"),
            error => wrong(&error),
        })?;
        if authority.host().contains('*') {
            return Err(wrong(&"a wildcard is not a host"));
        }
        let port = authority.explicit_port().ok_or_else(|| wrong(&"missing port"))?;
        Ok(HostPort { host: Arc::from(authority.host()), port })
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}
text_scalar!(HostPort, "a host and port such as db.example:3306");

/// Message for an empty list under an optional key.
pub(crate) const EMPTY_LIST: &str = "empty list; add an entry, or remove the key";

/// A value or a list: both `kind: tcp` and `kind: [tcp, udp]` are valid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OneOrMany<T>(pub Vec<T>);

impl<T> Default for OneOrMany<T> {
    fn default() -> Self {
        OneOrMany(Vec::new())
    }
}

impl<T> OneOrMany<T> {
    /// True if there is no value.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The values in order.
    pub fn iter(&self) -> std::slice::Iter<'_, T> {
        self.0.iter()
    }
}

impl<T: Serialize> Serialize for OneOrMany<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0.as_slice() {
            [one] => one.serialize(serializer),
            many => many.serialize(serializer),
        }
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for OneOrMany<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ManyVisitor(PhantomData))
    }
}

struct ManyVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> ManyVisitor<T> {
    fn one<E: de::Error>(value: impl IntoDeserializer<'de, E>) -> Result<OneOrMany<T>, E> {
        T::deserialize(value.into_deserializer()).map(|one| OneOrMany(vec![one]))
    }
}

impl<'de, T: Deserialize<'de>> Visitor<'de> for ManyVisitor<T> {
    type Value = OneOrMany<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value or a list of values")
    }

    fn visit_bool<E: de::Error>(self, value: bool) -> Result<OneOrMany<T>, E> {
        Self::one(value)
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<OneOrMany<T>, E> {
        Self::one(value)
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<OneOrMany<T>, E> {
        Self::one(value)
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<OneOrMany<T>, E> {
        Self::one(value)
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<OneOrMany<T>, E> {
        Self::one(value)
    }

    fn visit_map<A: de::MapAccess<'de>>(self, map: A) -> Result<OneOrMany<T>, A::Error> {
        T::deserialize(de::value::MapAccessDeserializer::new(map)).map(|one| OneOrMany(vec![one]))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<OneOrMany<T>, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = seq.next_element()? {
            values.push(value);
        }
        if values.is_empty() {
            // An empty list is ambiguous: it could match nothing or anything.
            return Err(de::Error::custom(EMPTY_LIST));
        }
        Ok(OneOrMany(values))
    }
}

#[cfg(test)]
mod tests;
