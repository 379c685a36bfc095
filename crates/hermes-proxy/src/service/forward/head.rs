//! The head of a forwarded request: what the next hop is told.
//!
//! In: a request as it came, and its route. Out: a head for h1 or h2, for a node or an origin.
//! Order matters: the hop's fields go first, then tracing and `Via` are set, then the overlay's own
//! fields go where the next hop is no node, and the route's rewrite comes last, so that a route can
//! set what the steps before took away.

use hermes_model::authority::Authority;
use hermes_model::rewrite::{Head, Rewrite, Vars};
use http::header::{COOKIE, HOST, HeaderValue};
use http::uri::{PathAndQuery, Scheme};
use http::{HeaderMap, Method, Request as HttpRequest, Uri, Version};

use crate::body::Attempt;
use crate::error::Error;
use crate::headers::{self, Via};
use crate::live::Entry;
use crate::request::Request;
use crate::upstream::UpstreamState;
use crate::upstream::pool::Leased;

/// A head on its way out.
pub(crate) struct Outgoing {
    pub(crate) method: Method,
    pub(crate) scheme: Scheme,
    pub(crate) authority: Authority,
    pub(crate) path: PathAndQuery,
    /// For a node: with the overlay's fields.
    headers: HeaderMap,
    /// For an origin: without them, where that makes a difference.
    bare: Option<HeaderMap>,
    host: HeaderValue,
}

/// What a head is made with, beside the request.
pub(crate) struct Dress<'a> {
    pub(crate) node: &'a str,
    pub(crate) via: &'a Via,
    pub(crate) rewrite: Option<&'a Rewrite>,
}

impl Outgoing {
    /// Prepares the head once for all attempts. Takes the request's fields.
    ///
    /// # Errors
    /// The route's rewrite yields something that cannot be sent.
    pub(crate) fn prepare(request: &mut Request, entry: &Entry, dress: &Dress<'_>) -> Result<Self, Error> {
        let facts = &entry.facts;
        let mut fields = std::mem::take(&mut request.headers);
        headers::strip_hop_by_hop(&mut fields);
        fields.remove(HOST);
        dress.via.append(&mut fields, request.version);
        headers::set_trace(&mut fields, request.trace);
        headers::set_forwarded(&mut fields, facts.source, facts.trust.is_believed());
        let mut bare = fields.keys().any(|name| name.as_str().starts_with("hermes-")).then(|| {
            let mut bare = fields.clone();
            headers::strip_overlay(&mut bare);
            bare
        });
        let (mut authority, mut path) = (facts.authority.clone(), facts.path.clone());
        if let Some(rewrite) = dress.rewrite {
            let vars = Vars { facts, node: dress.node };
            let fault = |error: hermes_model::rewrite::RewriteError| Error::Malformed(error.to_string());
            if let Some(bare) = &mut bare {
                let (mut authority, mut path) = (authority.clone(), path.clone());
                rewrite
                    .request(Head { authority: &mut authority, path: &mut path, headers: bare }, &vars)
                    .map_err(fault)?;
            }
            rewrite
                .request(Head { authority: &mut authority, path: &mut path, headers: &mut fields }, &vars)
                .map_err(fault)?;
        }
        let host = HeaderValue::try_from(authority.to_string()).map_err(|error| Error::Malformed(error.to_string()))?;
        Ok(Self {
            method: facts.method.clone(),
            scheme: request.scheme.clone(),
            authority,
            path,
            headers: fields,
            bare,
            host,
        })
    }

    /// The fields that this far end gets.
    pub(crate) fn fields(&self, is_node: bool) -> HeaderMap {
        match &self.bare {
            Some(bare) if !is_node => bare.clone(),
            _ => self.headers.clone(),
        }
    }

    /// The authority as a field value.
    pub(crate) fn host(&self) -> &HeaderValue {
        &self.host
    }

    /// An HTTP/1.1 request in origin form.
    pub(crate) fn for_h1(&self, is_node: bool, body: Attempt) -> HttpRequest<Attempt> {
        let mut request = HttpRequest::new(body);
        *request.method_mut() = self.method.clone();
        *request.uri_mut() = Uri::from(self.path.clone());
        let mut fields = self.fields(is_node);
        fields.insert(HOST, self.host.clone());
        join_cookies(&mut fields);
        *request.headers_mut() = fields;
        request
    }

    /// An HTTP/2 request.
    pub(crate) fn for_h2(&self, is_node: bool) -> HttpRequest<()> {
        let mut request = HttpRequest::new(());
        *request.method_mut() = self.method.clone();
        *request.version_mut() = Version::HTTP_2;
        *request.uri_mut() = self.uri();
        *request.headers_mut() = self.fields(is_node);
        request
    }

    /// Scheme, authority and path in one.
    pub(crate) fn uri(&self) -> Uri {
        let mut parts = http::uri::Parts::default();
        parts.scheme = Some(self.scheme.clone());
        parts.authority = http::uri::Authority::try_from(self.host.as_bytes()).ok();
        parts.path_and_query = Some(self.path.clone());
        Uri::from_parts(parts).unwrap_or_default()
    }
}

/// h2 may split the cookie into crumbs; h1 has one line (RFC 9113, 8.2.3).
fn join_cookies(fields: &mut HeaderMap) {
    let mut crumbs = fields.get_all(COOKIE).iter();
    let (Some(first), Some(second)) = (crumbs.next(), crumbs.next()) else { return };
    let mut joined = first.as_bytes().to_vec();
    for crumb in std::iter::once(second).chain(crumbs) {
        joined.extend_from_slice(b"; ");
        joined.extend_from_slice(crumb.as_bytes());
    }
    if let Ok(value) = HeaderValue::from_bytes(&joined) {
        fields.insert(COOKIE, value);
    }
}

/// Is the far end a node of the overlay? The document says so, or TLS proved it, or it speaks
/// plaintext h2 and offers what nodes offer and origins do not: extended CONNECT.
pub(crate) fn is_node(upstream: &UpstreamState, leased: &Leased) -> bool {
    if let Some(says) = upstream.config.overlay {
        return says;
    }
    match (&upstream.tls, leased) {
        (Some(tls), _) => tls.proves_node,
        (None, Leased::H2(lease)) => lease.connection.extended_connect,
        (None, Leased::H1(_)) => false,
    }
}

/// Cleans a response's head on its way back.
///
/// # Errors
/// The route's rewrite yields something that cannot be sent.
pub(crate) fn clean_response(
    response: &mut http::response::Parts,
    dress: &Dress<'_>,
    entry: &Entry,
) -> Result<(), Error> {
    headers::strip_hop_by_hop(&mut response.headers);
    headers::strip_overlay(&mut response.headers);
    dress.via.append(&mut response.headers, response.version);
    if let Some(rewrite) = dress.rewrite {
        let vars = Vars { facts: &entry.facts, node: dress.node };
        rewrite.response(&mut response.headers, &vars).map_err(|error| Error::Malformed(error.to_string()))?;
    }
    Ok(())
}
