//! Field sections: heads and trailers of messages, encoded by QPACK (RFC 9204), and the checks for malformed messages
//! (RFC 9114, sections 4.2 and 4.3).
//!
//! In: encoded sections, or heads. Out: heads, or encoded sections, which never refer to a dynamic table. A section
//! that two recipients could read as two different messages is rejected.

use std::str::FromStr;

use bytes::{Bytes, BytesMut};
use http::header::{CONNECTION, HOST, TE, TRANSFER_ENCODING, UPGRADE};
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri, Version, request, response,
};
use http3::qpack::{self, DecoderError, HeaderField};

use crate::error::Oversize;
use hermes_wire::request_target::escaped;

/// The limits of a field section.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// The maximum size as RFC 9114, section 4.2.2, defines it: the bytes of names and values, plus 32 for each line.
    pub bytes: usize,
    pub lines: usize,
}

/// The reason why a section is rejected.
#[derive(Debug, thiserror::Error)]
pub enum FieldError {
    /// QPACK cannot decode the section, which is an error of the connection (RFC 9204, section 6).
    #[error("a field section that QPACK cannot read: {0}")]
    Undecodable(DecoderError),
    /// The section exceeds the limits.
    #[error("a field section of more than {} bytes or {} lines", .0.bytes, .0.lines)]
    TooLarge(Bounds),
    /// The message is malformed.
    #[error("{0}")]
    Malformed(String),
}

fn malformed<T>(what: impl Into<String>) -> Result<T, FieldError> {
    Err(FieldError::Malformed(what.into()))
}

/// The lines of a decoded field section. Each pseudo-header field occurs at most once, before all regular fields.
struct Section {
    pseudo: Vec<(&'static str, String)>,
    fields: HeaderMap,
}

const PSEUDO: [&str; 6] = [":method", ":scheme", ":authority", ":path", ":protocol", ":status"];

impl Section {
    fn read(mut block: Bytes, bounds: Bounds) -> Result<Self, FieldError> {
        let decoded = qpack::decode_stateless(&mut block, bounds.bytes as u64).map_err(|error| match error {
            DecoderError::HeaderTooLong(_) => FieldError::TooLarge(bounds),
            error => FieldError::Undecodable(error),
        })?;
        if decoded.fields.len() > bounds.lines {
            return Err(FieldError::TooLarge(bounds));
        }
        let mut this = Self { pseudo: Vec::new(), fields: HeaderMap::new() };
        for line in decoded.fields {
            let (name, value) = line.into_inner();
            if name.starts_with(b":") {
                this.add_pseudo(&name, &value)?;
            } else {
                this.add(&name, &value)?;
            }
        }
        Ok(this)
    }

    fn add_pseudo(&mut self, name: &[u8], value: &[u8]) -> Result<(), FieldError> {
        let Some(known) = PSEUDO.into_iter().find(|known| known.as_bytes() == name) else {
            return malformed("unknown pseudo-header field");
        };
        if !self.fields.is_empty() || self.pseudo.iter().any(|(other, _)| *other == known) {
            return malformed(format!("{known} is repeated, or follows regular fields"));
        }
        match String::from_utf8(value.to_vec()) {
            Ok(value) => self.pseudo.push((known, value)),
            Err(_) => return malformed(format!("{known} is not text")),
        }
        Ok(())
    }

    fn add(&mut self, name: &[u8], value: &[u8]) -> Result<(), FieldError> {
        let (Ok(name), Ok(value)) = (HeaderName::from_lowercase(name), HeaderValue::from_bytes(value)) else {
            return malformed("invalid character in a field name or value");
        };
        let is_of_connection = [CONNECTION, TRANSFER_ENCODING, UPGRADE].contains(&name)
            || ["keep-alive", "proxy-connection"].contains(&name.as_str());
        if is_of_connection || (name == TE && value != "trailers") {
            return malformed(format!("{name}, which is for connections of HTTP/1.1"));
        }
        self.fields.append(name, value);
        Ok(())
    }

    fn take(&mut self, name: &str) -> Option<String> {
        let at = self.pseudo.iter().position(|(known, _)| *known == name)?;
        Some(self.pseudo.swap_remove(at).1)
    }

    fn parse<T: FromStr>(&mut self, name: &str) -> Result<Option<T>, FieldError> {
        match self.take(name).map(|value| value.parse()) {
            None => Ok(None),
            Some(Ok(value)) => Ok(Some(value)),
            Some(Err(_)) => malformed(format!("{name} cannot be read")),
        }
    }

    /// Checks that all pseudo-header fields were taken. Any other one is not defined for this kind of message.
    fn has_no_more(&self) -> Result<(), FieldError> {
        match self.pseudo.first() {
            None => Ok(()),
            Some((name, _)) => malformed(format!("{name} is not allowed here")),
        }
    }
}

/// Decodes the head of a request. The `:protocol` of an extended CONNECT becomes an extension of type
/// `h2::ext::Protocol`, as in requests that h2 decodes.
///
/// # Errors
/// The section is too large or malformed.
pub fn read_request(block: Bytes, bounds: Bounds) -> Result<request::Parts, FieldError> {
    let mut section = Section::read(block, bounds)?;
    let Some(method) = section.parse::<Method>(":method")? else { return malformed("a request without :method") };
    let scheme = section.parse::<Scheme>(":scheme")?;
    let authority = section.parse::<Authority>(":authority")?;
    let path = section.take(":path").map(|path| match escaped(path.as_bytes()) {
        Some(escaped) => PathAndQuery::try_from(escaped),
        None => PathAndQuery::try_from(path),
    });
    let Ok(path) = path.transpose() else { return malformed(":path cannot be read") };
    let protocol = section.take(":protocol");
    section.has_no_more()?;
    let is_plain_connect = method == Method::CONNECT && protocol.is_none();
    if is_plain_connect {
        if scheme.is_some() || path.is_some() || authority.is_none() {
            return malformed("CONNECT requires :authority without :scheme and :path");
        }
    } else if scheme.is_none() || path.is_none() {
        return malformed("a request without :scheme or :path");
    }
    if protocol.is_some() && (method != Method::CONNECT || authority.is_none()) {
        return malformed(":protocol requires CONNECT and :authority");
    }
    let hosts = section.fields.get_all(HOST).iter().count();
    let agrees = |host: &HeaderValue| {
        authority.as_ref().is_none_or(|authority| host.as_bytes().eq_ignore_ascii_case(authority.as_str().as_bytes()))
    };
    if hosts > 1 || !section.fields.get(HOST).is_none_or(agrees) || (hosts == 0 && authority.is_none()) {
        return malformed("a request names one host, in :authority, in Host, or alike in both");
    }
    let mut uri = http::uri::Parts::default();
    // `Uri` allows no scheme without an authority. A request without `:authority` names its target in Host.
    uri.scheme = scheme.filter(|_| authority.is_some());
    uri.authority = authority;
    uri.path_and_query = path;
    let mut request = Request::new(());
    *request.method_mut() = method;
    *request.uri_mut() = Uri::from_parts(uri).map_err(|error| FieldError::Malformed(error.to_string()))?;
    *request.version_mut() = Version::HTTP_3;
    *request.headers_mut() = section.fields;
    if let Some(protocol) = protocol {
        request.extensions_mut().insert(h2::ext::Protocol::from(protocol.as_str()));
    }
    Ok(request.into_parts().0)
}

/// Decodes the head of a response.
///
/// # Errors
/// The section is too large or malformed.
pub fn read_response(block: Bytes, bounds: Bounds) -> Result<response::Parts, FieldError> {
    let mut section = Section::read(block, bounds)?;
    let Some(status) = section.parse::<StatusCode>(":status")? else { return malformed("a response without :status") };
    section.has_no_more()?;
    if status == StatusCode::SWITCHING_PROTOCOLS {
        return malformed("101, which HTTP/3 does not have");
    }
    let mut response = Response::new(());
    *response.status_mut() = status;
    *response.version_mut() = Version::HTTP_3;
    *response.headers_mut() = section.fields;
    Ok(response.into_parts().0)
}

/// Decodes trailers.
///
/// # Errors
/// The section is too large or malformed.
pub fn read_trailers(block: Bytes, bounds: Bounds) -> Result<HeaderMap, FieldError> {
    let section = Section::read(block, bounds)?;
    section.has_no_more()?;
    Ok(section.fields)
}

/// An encoded field section.
pub struct Encoded {
    block: Bytes,
    /// The size in bytes as RFC 9114, section 4.2.2, defines it.
    size: u64,
}

impl Encoded {
    /// Returns the encoded bytes if the size is within the peer's limit. With `None`, the peer has no limit.
    ///
    /// # Errors
    /// The section is larger than the limit.
    pub fn within(self, most: Option<u64>) -> Result<Bytes, Oversize> {
        match most {
            Some(most) if self.size > most => Err(Oversize { size: self.size, most }),
            _ => Ok(self.block),
        }
    }
}

/// Encodes the head of a request.
pub fn put_request(request: &request::Parts) -> Encoded {
    let uri = &request.uri;
    let protocol = request.extensions.get::<h2::ext::Protocol>();
    let mut lines: Vec<HeaderField> = vec![(":method", request.method.as_str()).into()];
    if let Some(authority) = uri.authority() {
        lines.push((":authority", authority.as_str()).into());
    }
    if request.method != Method::CONNECT || protocol.is_some() {
        lines.push((":scheme", uri.scheme_str().unwrap_or("https")).into());
        lines.push((":path", uri.path_and_query().map_or("/", PathAndQuery::as_str)).into());
    }
    if let Some(protocol) = protocol {
        lines.push((":protocol", protocol.as_str()).into());
    }
    put(lines, &request.headers)
}

/// Encodes the head of a response.
pub fn put_response(status: StatusCode, headers: &HeaderMap) -> Encoded {
    put(vec![(":status", status.as_str()).into()], headers)
}

/// Encodes trailers.
pub fn put_trailers(trailers: &HeaderMap) -> Encoded {
    put(Vec::new(), trailers)
}

fn put(mut lines: Vec<HeaderField>, headers: &HeaderMap) -> Encoded {
    lines.extend(headers.iter().map(|(name, value)| HeaderField::from((name.as_str(), value.as_bytes()))));
    let mut block = BytesMut::new();
    // Encoding fails only for integer prefixes of more than eight bits, which QPACK does not use.
    let size = qpack::encode_stateless(&mut block, lines).unwrap_or_default();
    Encoded { block: block.freeze(), size }
}
