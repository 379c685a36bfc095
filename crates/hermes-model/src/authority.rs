//! Authorities: the names that the overlay routes by.
//!
//! In: `host[:port]` from a URI, a `Host` header, a CONNECT target or a document.
//! Out: a lower-case host and a port, comparable without regard to case and to default ports.
//! Never: resolved here. A name like `VIDEO` means nothing to DNS.

use std::borrow::Cow;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

/// The longest host, in bytes. DNS has 253; the bound keeps the index from walking the labels of
/// a name that only an attacker would write.
pub const MAX_HOST: usize = 255;

/// A parsed `host[:port]`. The host is in lower case; IPv6 stands without brackets.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Authority {
    host: Arc<str>,
    /// The port as written; `None` where it was absent.
    port: Option<u16>,
    /// The port that an absent one stands for, given the scheme: 80 or 443. `None` for tunnels,
    /// where a port is always written and both 80 and 443 count as default.
    default_port: Option<u16>,
}

impl Authority {
    /// Parses `host[:port]`; `default_port` is what an absent port stands for.
    ///
    /// One name has one spelling afterwards: letters are lower case, IPv6 is in its RFC 5952 form,
    /// and the dot that ends a fully qualified name is left out. Otherwise a route for
    /// `db.example` could be walked around by asking for `db.example.`.
    ///
    /// # Errors
    /// One sentence that names what is wrong: a scheme, user information, an empty host or label, a host
    /// over [`MAX_HOST`] bytes, a bad port, unbalanced brackets, or characters that no host has.
    pub fn parse(text: &str, default_port: Option<u16>) -> Result<Self, AuthorityError> {
        let (host, port) = split_host_port(text)?;
        let host = match host {
            RawHost::Bracketed(address) => {
                let address: std::net::Ipv6Addr = address.parse().map_err(|_| AuthorityError::Ipv6)?;
                // `[::ffff:192.0.2.1]` leads where `192.0.2.1` does.
                Arc::from(address.to_canonical().to_string())
            }
            RawHost::Name(name) => canonical_name(name)?,
        };
        Ok(Self { host, port, default_port })
    }

    /// An address alone, as of an IP session to it or to the prefix that begins with it.
    pub fn of_address(address: IpAddr) -> Self {
        Self { host: Arc::from(address.to_canonical().to_string()), port: None, default_port: None }
    }

    /// The same, for another host: one that was parsed before, so that it is in its one spelling.
    #[must_use]
    pub fn with_host(&self, host: Arc<str>) -> Self {
        Self { host, ..*self }
    }

    /// The host in lower case; IPv6 without brackets.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The port as written.
    pub fn explicit_port(&self) -> Option<u16> {
        self.port
    }

    /// The port as written, or the scheme's default. `None` only for a tunnel without a port.
    pub fn port(&self) -> Option<u16> {
        self.port.or(self.default_port)
    }

    /// What an absent port stands for: 80 or 443 by scheme, `None` for tunnels.
    pub fn default_port(&self) -> Option<u16> {
        self.default_port
    }

    /// The host as it stands in a URI: IPv6 in brackets.
    pub fn uri_host(&self) -> Cow<'_, str> {
        if self.host.contains(':') { Cow::Owned(format!("[{}]", self.host)) } else { Cow::Borrowed(&self.host) }
    }

    /// True where the port is absent or equals the default of its scheme (for tunnels: 80 or 443).
    pub fn has_default_port(&self) -> bool {
        match (self.port, self.default_port) {
            (None, _) => true,
            (Some(port), Some(default)) => port == default,
            (Some(port), None) => port == 80 || port == 443,
        }
    }
}

impl fmt::Display for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]", self.host)?;
        } else {
            f.write_str(&self.host)?;
        }
        match self.port {
            Some(port) => write!(f, ":{port}"),
            None => Ok(()),
        }
    }
}

/// Why a text is no authority.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuthorityError {
    /// Nothing before the port.
    #[error("the host is empty")]
    EmptyHost,
    /// Two dots in a row, or a dot at the beginning.
    #[error("the host has an empty label")]
    EmptyLabel,
    /// Longer than [`MAX_HOST`].
    #[error("the host is longer than 255 bytes")]
    TooLong,
    /// The part after the last colon is no port.
    #[error("the port is not a number from 1 to 65535")]
    Port,
    /// Brackets without an IPv6 address.
    #[error("the brackets hold no IPv6 address")]
    Ipv6,
    /// `http://host`.
    #[error("no scheme such as http:// stands before a host")]
    Scheme,
    /// `user@host`.
    #[error("user information does not belong in an authority")]
    UserInfo,
    /// A byte that no host name has.
    #[error("the character {0:?} does not belong in a host")]
    Character(char),
}

/// A host as written, before it is brought to its one spelling.
enum RawHost<'a> {
    Name(&'a str),
    Bracketed(&'a str),
}

fn split_host_port(text: &str) -> Result<(RawHost<'_>, Option<u16>), AuthorityError> {
    // Each byte is looked at once for both: requests have few authorities with either.
    if text.bytes().any(|byte| matches!(byte, b'/' | b'@')) {
        if text.contains("://") {
            return Err(AuthorityError::Scheme);
        }
        if text.contains('@') {
            return Err(AuthorityError::UserInfo);
        }
    }
    let (host, rest) = match text.strip_prefix('[') {
        Some(rest) => {
            let (address, rest) = rest.split_once(']').ok_or(AuthorityError::Ipv6)?;
            (RawHost::Bracketed(address), rest)
        }
        None => {
            let (name, rest) = text.split_at(text.find(':').unwrap_or(text.len()));
            (RawHost::Name(name), rest)
        }
    };
    if rest.is_empty() {
        return Ok((host, None));
    }
    let digits = rest.strip_prefix(':').ok_or(AuthorityError::Port)?;
    if digits.is_empty() {
        // An empty port is the same as none (RFC 3986, 6.2.3).
        return Ok((host, None));
    }
    parse_port(digits).map(|port| (host, Some(port)))
}

/// A port in decimal digits. `u16::from_str` alone would accept `+80`.
fn parse_port(digits: &str) -> Result<u16, AuthorityError> {
    if !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err(AuthorityError::Port);
    }
    match digits.parse::<u16>() {
        Ok(0) | Err(_) => Err(AuthorityError::Port),
        Ok(port) => Ok(port),
    }
}

/// Checks a reg-name and brings it to lower case without its last dot, with one allocation.
fn canonical_name(name: &str) -> Result<Arc<str>, AuthorityError> {
    let name = name.strip_suffix('.').unwrap_or(name);
    if name.is_empty() {
        return Err(AuthorityError::EmptyHost);
    }
    if name.len() > MAX_HOST {
        return Err(AuthorityError::TooLong);
    }
    let mut previous = b'.';
    let mut upper = false;
    for byte in name.bytes() {
        if !is_host_byte(byte) {
            let bad = name.chars().find(|c| !u8::try_from(*c).is_ok_and(is_host_byte));
            return Err(AuthorityError::Character(bad.unwrap_or('?')));
        }
        if byte == b'.' && previous == b'.' {
            return Err(AuthorityError::EmptyLabel);
        }
        upper |= byte.is_ascii_uppercase();
        previous = byte;
    }
    if previous == b'.' {
        return Err(AuthorityError::EmptyLabel);
    }
    if !upper {
        return Ok(Arc::from(name));
    }
    let mut lower = [0u8; MAX_HOST];
    let lower = &mut lower[..name.len()];
    lower.copy_from_slice(name.as_bytes());
    lower.make_ascii_lowercase();
    // ASCII throughout, as checked above: the conversion cannot fail.
    Ok(Arc::from(std::str::from_utf8(lower).unwrap_or(name)))
}

/// Bytes of a reg-name that we accept: unreserved and sub-delims of RFC 3986, without percent
/// escapes, since two spellings of one name would be two names to the index.
fn is_host_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric()
        || matches!(
            byte,
            b'-' | b'.' | b'_' | b'~' | b'!' | b'$' | b'&' | b'\'' | b'(' | b')' | b'*' | b'+' | b',' | b';' | b'='
        )
}

#[cfg(test)]
mod tests;
