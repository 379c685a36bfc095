//! The head of a forwarded request: what the next hop is told.
//!
//! In: the facts of a session, its route, and whether the next hop is a node. Out: a head for h1 or
//! h2. Made anew for each attempt, since attempts may go to different kinds of endpoints.
//! Order matters: the hop's fields go first, then tracing and `Via` are set, then the overlay's own
//! fields go where the next hop is no node, and the route's rewrite comes last, so that a route can
//! set what the steps before took away.

use hermes_model::authority::Authority;
use hermes_model::facts::Kind;
use hermes_model::field_collision::remove_where;
use hermes_model::rewrite::{Head, Rewrite, Vars};
use hermes_wire::traceparent::Traceparent;
use http::header::{HOST, HeaderName, HeaderValue, PROXY_AUTHORIZATION};
use http::uri::{PathAndQuery, Scheme};
use http::{HeaderMap, Method, Request as HttpRequest, Uri, Version};

use crate::body::Attempt;
use crate::error::Error;
use crate::headers::{self, Via};
use crate::live::Entry;
use crate::reverse;
use crate::service::max_forwards;
use crate::upstream::UpstreamState;
use crate::upstream::pool::{H1Connection, Leased};

/// What heads of a session are made with, beside its facts.
#[derive(Clone)]
pub(crate) struct Dress<'a> {
    pub(crate) node: &'a str,
    pub(crate) via: &'a Via,
    pub(crate) rewrite: Option<&'a Rewrite>,
    pub(crate) version: Version,
    pub(crate) scheme: &'a Scheme,
    /// The authority as the client spelled it.
    pub(crate) host: &'a HeaderValue,
    pub(crate) trace: Traceparent,
    /// The next hop is a forward proxy.
    pub(crate) to_proxy: bool,
    /// What a cache asks in the client's place.
    pub(crate) amend: Option<Amend>,
}

/// Fields that a cache asks with, or who asks for the rest of an answer, instead of the client's.
#[derive(Clone)]
pub(crate) struct Amend {
    pub(crate) remove: [HeaderName; 4],
    pub(crate) set: Vec<(HeaderName, HeaderValue)>,
}

/// A head on its way out.
pub(crate) struct Outgoing {
    pub(crate) method: Method,
    pub(crate) scheme: Scheme,
    pub(crate) authority: Authority,
    pub(crate) path: PathAndQuery,
    pub(crate) fields: HeaderMap,
    /// The authority as a field value.
    pub(crate) host: HeaderValue,
    /// HTTP/1.1 names the origin in the target (RFC 9112, section 3.2.2).
    pub(crate) is_absolute: bool,
}

impl Outgoing {
    /// Makes the head of one attempt.
    ///
    /// # Errors
    /// The route's rewrite yields something that cannot be sent.
    pub(crate) fn new(entry: &Entry, dress: &Dress<'_>, is_node: bool) -> Result<Self, Error> {
        let facts = &*entry.facts;
        let mut fields = facts.headers.clone();
        let ends_here = |name: &HeaderName| {
            *name == HOST || *name == reverse::CALL || (*name == PROXY_AUTHORIZATION && !dress.to_proxy)
        };
        remove_where(&mut fields, ends_here);
        if let Some(told) = facts.announced_network.and_then(|told| HeaderValue::try_from(told.to_string()).ok()) {
            fields.insert(headers::NETWORK, told);
        }
        dress.via.append(&mut fields, dress.version);
        headers::set_trace(&mut fields, dress.trace);
        headers::set_forwarded(&mut fields, facts.source.ip(), facts.trust.is_proxy());
        if facts.kind == Kind::Http && !is_node {
            let is_renamed = dress.rewrite.is_some_and(|rewrite| rewrite.authority.is_some());
            let host = is_renamed.then_some(dress.host);
            headers::describe_request(&mut fields, || facts.client_address(), dress.scheme, host);
        }
        max_forwards::count_down(&mut fields, &facts.method);
        if !is_node {
            headers::strip_overlay(&mut fields);
        }
        let mut this = Self {
            method: facts.method.clone(),
            scheme: dress.scheme.clone(),
            authority: facts.authority.clone(),
            path: facts.path.clone(),
            fields,
            host: dress.host.clone(),
            is_absolute: dress.to_proxy,
        };
        if let Some(rewrite) = dress.rewrite {
            this.rewrite(rewrite, entry, dress.node)?;
        }
        if let Some(amend) = &dress.amend {
            amend.remove.iter().for_each(|name| drop(this.fields.remove(name)));
            this.fields.extend(amend.set.iter().cloned());
        }
        Ok(this)
    }

    fn rewrite(&mut self, rewrite: &Rewrite, entry: &Entry, node: &str) -> Result<(), Error> {
        let vars = Vars { facts: &entry.facts, node };
        let head = Head { authority: &mut self.authority, path: &mut self.path, headers: &mut self.fields };
        rewrite.request(head, &vars).map_err(|error| Error::Malformed(error.to_string()))?;
        if rewrite.authority.is_some() {
            self.host = HeaderValue::try_from(self.authority.to_string())
                .map_err(|error| Error::Malformed(error.to_string()))?;
        }
        Ok(())
    }

    /// An HTTP/1.1 request.
    pub(crate) fn into_h1(mut self, body: Attempt, connection: &H1Connection, is_node: bool) -> HttpRequest<Attempt> {
        headers::join_cookies(&mut self.fields);
        let mut request = HttpRequest::new(body);
        *request.uri_mut() = self.h1_target(connection, is_node);
        self.fields.insert(HOST, self.host);
        *request.method_mut() = self.method;
        *request.headers_mut() = self.fields;
        request
    }

    /// The target of an HTTP/1.1 request other than CONNECT. In absolute form for a forward proxy, and for a node if
    /// the connection implies another scheme than the request's, since the scheme decides the default port (RFC 9112,
    /// section 3.2.2).
    pub(crate) fn h1_target(&self, connection: &H1Connection, is_node: bool) -> Uri {
        let is_absolute = self.is_absolute || is_node && self.scheme != connection.scheme();
        // `OPTIONS *` addresses the recipient itself.
        if is_absolute && self.path != "*" { self.uri() } else { Uri::from(self.path.clone()) }
    }

    /// An HTTP/2 request.
    pub(crate) fn into_h2(mut self) -> HttpRequest<()> {
        let mut request = HttpRequest::new(());
        *request.uri_mut() = self.uri();
        *request.headers_mut() = std::mem::take(&mut self.fields);
        *request.method_mut() = self.method;
        *request.version_mut() = Version::HTTP_2;
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

/// Is the far end a node of the overlay? The document says so, or TLS proved it, or it speaks
/// plaintext h2 and offers what nodes offer and origins do not: extended CONNECT.
pub(crate) fn is_node(upstream: &UpstreamState, leased: &Leased) -> bool {
    if let Some(says) = upstream.config.overlay {
        return says;
    }
    match (&upstream.tls, leased) {
        (_, Leased::Shared(lease)) if lease.connection.is_kept() => true,
        (Some(tls), _) => tls.proves_node,
        (None, Leased::Shared(lease)) => lease.connection.takes_extended_connect(),
        (None, Leased::H1(_)) => false,
    }
}

/// Cleans a response's head on its way back.
///
/// # Errors
/// The route's rewrite yields something that cannot be sent.
pub(crate) fn clean_response(
    response: &mut http::response::Parts,
    via: &Via,
    rewrite: Option<&Rewrite>,
    vars: &Vars<'_>,
) -> Result<(), Error> {
    headers::strip_hop_by_hop(&mut response.headers);
    headers::strip_overlay(&mut response.headers);
    via.append(&mut response.headers, response.version);
    match rewrite {
        Some(rewrite) => {
            rewrite.response(&mut response.headers, vars).map_err(|error| Error::Malformed(error.to_string()))
        }
        None => Ok(()),
    }
}
