//! Authorities: the names that the overlay routes by.
//!
//! In: `host[:port]` from a URI, a `Host` header, a CONNECT target or a document.
//! Out: a lower-case host and a port, comparable without regard to case and to default ports.
//! Never: resolved here. A name like `VIDEO` means nothing to DNS.

use std::fmt;
use std::sync::Arc;

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
    /// Parses `host[:port]`; `scheme_port` is what an absent port stands for.
    ///
    /// # Errors
    /// One sentence that names what is wrong: user information, an empty host, a bad port,
    /// unbalanced brackets, or characters that no host has.
    pub fn parse(text: &str, default_port: Option<u16>) -> Result<Self, AuthorityError> {
        let (host, port) = split_host_port(text)?;
        if host.is_empty() {
            return Err(AuthorityError::EmptyHost);
        }
        let bracketed = text.starts_with('[');
        if bracketed {
            host.parse::<std::net::Ipv6Addr>().map_err(|_| AuthorityError::Ipv6)?;
        } else if let Some(bad) = host.bytes().find(|b| !is_host_byte(*b)) {
            return Err(AuthorityError::Character(bad as char));
        }
        let host = if host.bytes().any(|b| b.is_ascii_uppercase()) {
            Arc::from(host.to_ascii_lowercase())
        } else {
            Arc::from(host)
        };
        Ok(Self { host, port, default_port })
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
    /// The part after the last colon is no port.
    #[error("the port is not a number from 1 to 65535")]
    Port,
    /// Brackets without an IPv6 address.
    #[error("the brackets hold no IPv6 address")]
    Ipv6,
    /// `user@host`.
    #[error("user information does not belong in an authority")]
    UserInfo,
    /// A byte that no host name has.
    #[error("the character {0:?} does not belong in a host")]
    Character(char),
}

fn split_host_port(text: &str) -> Result<(&str, Option<u16>), AuthorityError> {
    if text.contains('@') {
        return Err(AuthorityError::UserInfo);
    }
    let (host, rest) = if let Some(rest) = text.strip_prefix('[') {
        rest.split_once(']').ok_or(AuthorityError::Ipv6)?
    } else {
        match text.find(':') {
            Some(colon) => text.split_at(colon),
            None => (text, ""),
        }
    };
    if rest.is_empty() {
        return Ok((host, None));
    }
    let digits = rest.strip_prefix(':').ok_or(AuthorityError::Port)?;
    // `u16::from_str` accepts "+80": only digits are a port here.
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err(AuthorityError::Port);
    }
    match digits.parse::<u16>() {
        Ok(0) | Err(_) => Err(AuthorityError::Port),
        Ok(port) => Ok((host, Some(port))),
    }
}

/// Bytes of a reg-name that we accept: unreserved and sub-delims of RFC 3986, without percent
/// escapes, since two spellings of one name would be two names to the index.
fn is_host_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~' | b'!' | b'$' | b'&' | b'\'' | b'(' | b')' | b'*' | b'+' | b',' | b';' | b'=')
}
