//! The default URI template of CONNECT-UDP (RFC 9298, sections 2 and 3):
//! `/.well-known/masque/udp/{target_host}/{target_port}/`.
//!
//! In: a host and a port, or the path of a request. Out: the path, or the host and the port that
//! it names. What comes out is fit to be looked up, matched and logged: no control characters,
//! no separators, no zone identifiers. Never resolves a name and never judges whether a target
//! may be reached.

use std::net::Ipv6Addr;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

/// What stands in front of the two variables.
pub const PREFIX: &str = "/.well-known/masque/udp/";

/// The longest host, in bytes: DNS names end at 253, and no address is as long.
pub const MAX_HOST: usize = 255;

/// All but the unreserved characters of RFC 3986, as simple expansion (RFC 6570, section 3.2.2)
/// has it. The colons of IPv6 become `%3A`.
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// What is wrong with a path that starts like the template.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConnectUdpError {
    /// Not two segments, each followed by a slash.
    #[error("a CONNECT-UDP path reads {PREFIX}HOST/PORT/, with nothing behind it")]
    Shape,
    /// Nothing between the slashes where the host belongs.
    #[error("the CONNECT-UDP path names no host: write {PREFIX}HOST/PORT/")]
    EmptyHost,
    /// A host longer than [`MAX_HOST`].
    #[error("the host of the CONNECT-UDP path has {length} bytes; at most {MAX_HOST} are allowed")]
    HostTooLong {
        /// Its length in bytes, once decoded.
        length: usize,
    },
    /// A `%` without two hexadecimal digits behind it.
    #[error("the host of the CONNECT-UDP path has a `%` at byte {at} without two hexadecimal digits")]
    Escape {
        /// Offset of the `%` within the encoded host.
        at: usize,
    },
    /// A byte that no host name and no address has.
    #[error(
        "the host of the CONNECT-UDP path holds the byte 0x{byte:02x}, which is in no name or address \
         (international names go as xn--; IPv6 goes without brackets and without a zone)"
    )]
    HostByte {
        /// The byte, once decoded.
        byte: u8,
    },
    /// Colons, yet no IPv6 address.
    #[error(
        "the host of the CONNECT-UDP path has colons but is not an IPv6 address (which has neither brackets nor a zone)"
    )]
    NotIpv6,
    /// `.` or `..`, which intermediaries resolve as parts of a path.
    #[error("the host of the CONNECT-UDP path is a dot segment")]
    DotSegment,
    /// A port that is not 1 to 65535 in at most five decimal digits.
    #[error("the port of the CONNECT-UDP path is not a number from 1 to 65535")]
    Port,
}

/// The path of a CONNECT-UDP request for this target, by the default template.
///
/// `host` is a name, an IPv4 or an IPv6 address, the latter with or without its brackets. It is
/// encoded, not judged: [`parse_path`] at the other end refuses what is no host.
pub fn path(host: &str, port: u16) -> String {
    let host = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
    format!("{PREFIX}{}/{port}/", utf8_percent_encode(host, RESERVED))
}

/// The target that a request's path names: host and port. IPv6 addresses are without brackets.
///
/// `None` if the path is not of the template at all, so that it belongs to somebody else.
///
/// # Errors
/// If the path starts like the template but does not name a target; RFC 9298, section 3 has the
/// request refused as malformed (400).
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

/// The decoder would let a lone `%` pass as itself; two parsers that differ on that differ on
/// the target.
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

/// reg-name of RFC 3986 without its escapes (unreserved, sub-delims), and the colon of IPv6. In
/// ASCII only, so that bytes are characters.
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
