//! Authorities: the names that the overlay routes by.
//!
//! In: `host[:port]` from a URI, a `Host` header, a CONNECT target or a document.
//! Out: a lower-case host and a port; comparisons ignore case and treat a default port as absent.
//! Never: name resolution. A name such as `VIDEO` does not exist in DNS.

use std::borrow::Cow;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

/// Maximum length of a host, in bytes. DNS names have at most 253. The bound limits the number of labels that the route
/// index looks up.
pub const MAX_HOST_BYTES: usize = 255;

/// A parsed `host[:port]`. The host is in lower case; IPv6 without brackets.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Authority {
    host: Arc<str>,
    /// The explicit port; `None` if absent.
    port: Option<u16>,
    /// Default port of the scheme: 80 or 443. `None` for tunnels, where both count as default.
    default_port: Option<u16>,
}

impl Authority {
    /// Parses `host[:port]`; `default_port` is the scheme's.
    ///
    /// The result has one spelling per name: lower case, IPv6 in RFC 5952 form, no trailing dot. Otherwise
    /// `db.example.` would bypass a route for `db.example`.
    ///
    /// # Errors
    /// The reason: a scheme, user information, an empty host or label, a host over [`MAX_HOST_BYTES`] bytes, an invalid port,
    /// unbalanced brackets, or illegal characters.
    pub fn parse(text: &str, default_port: Option<u16>) -> Result<Self, AuthorityError> {
        let (host, port) = split_host_port(text)?;
        let host = match host {
            RawHost::Bracketed(address) => {
                let address: std::net::Ipv6Addr = address.parse().map_err(|_| AuthorityError::Ipv6)?;
                // `[::ffff:192.0.2.1]` reaches the same host as `192.0.2.1`.
                Arc::from(address.to_canonical().to_string())
            }
            RawHost::Name(name) => canonical_name(name)?,
        };
        Ok(Self { host, port, default_port })
    }

    /// An authority without a port, for an IP session to this address or to the network that begins with it.
    pub fn of_address(address: IpAddr) -> Self {
        Self { host: Arc::from(address.to_canonical().to_string()), port: None, default_port: None }
    }

    /// A copy with another host, which was parsed before and so has the canonical spelling.
    #[must_use]
    pub fn with_host(&self, host: Arc<str>) -> Self {
        Self { host, ..*self }
    }

    /// Another authority with the default port of this one.
    ///
    /// # Errors
    /// The errors of [`Self::parse`].
    pub fn beside(&self, text: &str) -> Result<Self, AuthorityError> {
        Self::parse(text, self.default_port)
    }

    /// The host in lower case; IPv6 without brackets.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The port as written.
    pub fn explicit_port(&self) -> Option<u16> {
        self.port
    }

    /// The explicit port, or the scheme's default. `None` only for a tunnel without a port.
    pub fn port(&self) -> Option<u16> {
        self.port.or(self.default_port)
    }

    /// The scheme's default port, 80 or 443; `None` for tunnels.
    pub fn default_port(&self) -> Option<u16> {
        self.default_port
    }

    /// The host in URI syntax: IPv6 in brackets.
    pub fn uri_host(&self) -> Cow<'_, str> {
        if self.host.contains(':') { Cow::Owned(format!("[{}]", self.host)) } else { Cow::Borrowed(&self.host) }
    }

    /// True if the port is absent or the default of its scheme (for tunnels: 80 or 443).
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

/// Reason why a text is not an authority.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuthorityError {
    /// No host before the port.
    #[error("empty host")]
    EmptyHost,
    /// Two consecutive dots, or a leading dot.
    #[error("empty label")]
    EmptyLabel,
    /// Longer than [`MAX_HOST_BYTES`].
    #[error("host longer than 255 bytes")]
    TooLong,
    /// The text after the last colon is not a port.
    #[error("port is not a number from 1 to 65535")]
    Port,
    /// Brackets without an IPv6 address.
    #[error("no IPv6 address in brackets")]
    Ipv6,
    /// A scheme: `http://host`.
    #[error("remove the scheme (http://) before the host")]
    Scheme,
    /// User information: `user@host`.
    #[error("remove the user information (USER@) before the host")]
    UserInfo,
    /// A byte that host names do not have.
    #[error("illegal character {0:?} in a host")]
    Character(char),
}

/// A host as written, before canonicalisation.
enum RawHost<'a> {
    Name(&'a str),
    Bracketed(&'a str),
}

fn split_host_port(text: &str) -> Result<(RawHost<'_>, Option<u16>), AuthorityError> {
    // A single pass looks for both bytes: few requests have either.
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
        // An empty port equals an absent one (RFC 3986, 6.2.3).
        return Ok((host, None));
    }
    parse_port(digits).map(|port| (host, Some(port)))
}

/// Parses a decimal port. `u16::from_str` alone would accept `+80`.
fn parse_port(digits: &str) -> Result<u16, AuthorityError> {
    if !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err(AuthorityError::Port);
    }
    match digits.parse::<u16>() {
        Ok(0) | Err(_) => Err(AuthorityError::Port),
        Ok(port) => Ok(port),
    }
}

/// Validates a reg-name and converts it to lower case without the trailing dot, with one allocation.
fn canonical_name(name: &str) -> Result<Arc<str>, AuthorityError> {
    let name = name.strip_suffix('.').unwrap_or(name);
    if name.is_empty() {
        return Err(AuthorityError::EmptyHost);
    }
    if name.len() > MAX_HOST_BYTES {
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
    let mut lower = [0u8; MAX_HOST_BYTES];
    let lower = &mut lower[..name.len()];
    lower.copy_from_slice(name.as_bytes());
    lower.make_ascii_lowercase();
    // ASCII throughout, as checked above: the conversion cannot fail.
    Ok(Arc::from(std::str::from_utf8(lower).unwrap_or(name)))
}

/// Accepted bytes of a reg-name: unreserved and sub-delims of RFC 3986. Percent escapes are excluded, because two
/// spellings of a name would be two names to the index.
fn is_host_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric()
        || matches!(
            byte,
            b'-' | b'.' | b'_' | b'~' | b'!' | b'$' | b'&' | b'\'' | b'(' | b')' | b'*' | b'+' | b',' | b';' | b'='
        )
}

#[cfg(test)]
mod tests;
