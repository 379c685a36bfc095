//! The default URI template of CONNECT-UDP (RFC 9298, sections 2 and 3):
//! `/.well-known/masque/udp/{target_host}/{target_port}/`.
//!
//! In: a host and a port, or the path of a request. Out: the path, or the host and the port. A parsed host is safe to
//! resolve, match and log: no control characters, no separators, no zone identifiers. Never resolves a name, and never
//! decides whether a target may be reached.

use std::net::Ipv6Addr;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

/// The path before the two variables.
pub const PREFIX: &str = "/.well-known/masque/udp/";

/// The longest host, in bytes: DNS names have at most 253, and addresses fewer.
pub const MAX_HOST: usize = 255;

/// All but the unreserved characters of RFC 3986, as in simple expansion (RFC 6570, section 3.2.2). The colons of IPv6
/// become `%3A`.
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// An error in a path that begins like the template.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConnectUdpError {
    /// The path does not have two segments, each followed by a slash.
    #[error("malformed CONNECT-UDP path; expected {PREFIX}HOST/PORT/")]
    Shape,
    /// The host is empty.
    #[error("CONNECT-UDP path without a host; expected {PREFIX}HOST/PORT/")]
    EmptyHost,
    /// The host is longer than [`MAX_HOST`].
    #[error("the host of the CONNECT-UDP path has {length} bytes; at most {MAX_HOST} are allowed")]
    HostTooLong {
        /// The length in bytes, once decoded.
        length: usize,
    },
    /// A `%` is not followed by two hexadecimal digits.
    #[error("the host of the CONNECT-UDP path has a `%` at byte {at} without two hexadecimal digits")]
    Escape {
        /// Offset of the `%` within the encoded host.
        at: usize,
    },
    /// A byte is not allowed in host names and addresses.
    #[error(
        "the host of the CONNECT-UDP path contains the byte 0x{byte:02x}, which is invalid in names and addresses \
         (write international names as xn--, and IPv6 without brackets and zone)"
    )]
    HostByte {
        /// The byte, once decoded.
        byte: u8,
    },
    /// The host has colons, but is not an IPv6 address.
    #[error(
        "the host of the CONNECT-UDP path has colons but is not an IPv6 address (write it without brackets and zone)"
    )]
    NotIpv6,
    /// The host is `.` or `..`, which intermediaries remove from paths.
    #[error("the host of the CONNECT-UDP path is a dot segment")]
    DotSegment,
    /// The port is not a number from 1 to 65535 with at most five digits.
    #[error("the port of the CONNECT-UDP path is not a number from 1 to 65535")]
    Port,
}

/// The path of a CONNECT-UDP request for this target, by the default template.
///
/// `host` is a name, an IPv4 or an IPv6 address, the latter with or without brackets. It is encoded but not validated:
/// [`parse_path`] at the peer rejects invalid hosts.
pub fn path(host: &str, port: u16) -> String {
    let host = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
    format!("{PREFIX}{}/{port}/", utf8_percent_encode(host, RESERVED))
}

/// Parses the target of a request's path: host and port. IPv6 addresses have no brackets.
///
/// `None` if the path does not begin like the template.
///
/// # Errors
/// The path begins like the template but does not name a target; the request is malformed, status 400 (RFC 9298,
/// section 3).
pub fn parse_path(path: &str) -> Result<Option<(String, u16)>, ConnectUdpError> {
    let Some(rest) = path.strip_prefix(PREFIX) else {
        return Ok(None);
    };
    let (host, rest) = rest.split_once('/').ok_or(ConnectUdpError::Shape)?;
    let (port, rest) = rest.split_once('/').ok_or(ConnectUdpError::Shape)?;
    if !rest.is_empty() {
        return Err(ConnectUdpError::Shape);
    }
    Ok(Some((parse_host(host)?, parse_port(port)?)))
}

pub(crate) fn parse_host(encoded: &str) -> Result<String, ConnectUdpError> {
    check_escapes(encoded)?;
    let decoded: Vec<u8> = percent_decode_str(encoded).collect();
    if decoded.is_empty() {
        return Err(ConnectUdpError::EmptyHost);
    }
    if decoded.len() > MAX_HOST {
        return Err(ConnectUdpError::HostTooLong { length: decoded.len() });
    }
    if let Some(&byte) = decoded.iter().find(|byte| !is_host_byte(**byte)) {
        return Err(ConnectUdpError::HostByte { byte });
    }
    let host: String = decoded.into_iter().map(char::from).collect();
    if host == "." || host == ".." {
        return Err(ConnectUdpError::DotSegment);
    }
    if host.contains(':') && host.parse::<Ipv6Addr>().is_err() {
        return Err(ConnectUdpError::NotIpv6);
    }
    Ok(host)
}

/// Rejects a lone `%`, which the decoder would keep: two parsers that differ on it would see different targets.
fn check_escapes(encoded: &str) -> Result<(), ConnectUdpError> {
    let bytes = encoded.as_bytes();
    for (at, _) in encoded.match_indices('%') {
        let digits = bytes.get(at + 1..at + 3).unwrap_or_default();
        if digits.len() < 2 || !digits.iter().all(u8::is_ascii_hexdigit) {
            return Err(ConnectUdpError::Escape { at });
        }
    }
    Ok(())
}

/// The reg-name of RFC 3986 without escapes (unreserved, sub-delims), and the colon of IPv6. ASCII only, so that bytes
/// are characters.
fn is_host_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-._~!$&'()*+,;=:".contains(&byte)
}

fn parse_port(text: &str) -> Result<u16, ConnectUdpError> {
    // `parse` alone would take a plus sign, and any number of leading zeros.
    if text.len() > 5 || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(ConnectUdpError::Port);
    }
    match text.parse() {
        Ok(0) | Err(_) => Err(ConnectUdpError::Port),
        Ok(port) => Ok(port),
    }
}

#[cfg(test)]
mod tests;
