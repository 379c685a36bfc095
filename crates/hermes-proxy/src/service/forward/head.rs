//! Builds the head of a forwarded request.
//!
//! In: the facts of a session, its route, and whether the next hop is a node. Out: a head for HTTP/1.1 or HTTP/2. Each
//! attempt builds a new head, since attempts may reach different kinds of endpoints. The order matters. Hop-by-hop
//! fields are removed first, then tracing and `Via` are set. Overlay fields are removed if the next hop is not a node.
//! The route's rewrite comes last, so that a route can set fields that earlier steps removed.

use hermes_model::authority::Authority;
use hermes_model::facts::Kind;
use hermes_model::field_collision::remove_where;
use hermes_model::rewrite::{Head, Rewrite, TemplateValues};
use hermes_wire::traceparent::Traceparent;
use http::header::{HOST, HeaderName, HeaderValue, PROXY_AUTHORIZATION};
use http::uri::{PathAndQuery, Scheme};
use http::{HeaderMap, Method, Request as HttpRequest, Uri, Version};
use smallvec::SmallVec;

use crate::request::Request;
use hermes_outbound::outbound::pool::{H1Connection, Leased};
use hermes_outbound::reverse;
use hermes_outbound::upstream::UpstreamState;
use hermes_transport::body::Attempt;
use hermes_transport::error::Error;
use hermes_transport::headers::{self, Via};
use hermes_transport::max_forwards;
use hermes_transport::runtime::session::SessionEntry;

/// Inputs for the heads of a session, beside its facts.
#[derive(Clone)]
pub(crate) struct HeadRewriter<'a> {
    pub(crate) node: &'a str,
    pub(crate) via: &'a Via,
    pub(crate) rewrite: Option<&'a Rewrite>,
    pub(crate) version: Version,
    pub(crate) scheme: &'a Scheme,
    /// The authority in the client's spelling.
    pub(crate) host: &'a HeaderValue,
    pub(crate) trace: Traceparent,
    /// The next hop is a forward proxy.
    pub(crate) to_proxy: bool,
    /// Overrides of a cache that revalidates or fetches on behalf of the client.
    pub(crate) amend: Option<HeadOverrides>,
}

/// Properties of the client's request that the facts do not contain.
#[derive(Clone)]
pub(crate) struct RequestForm {
    version: Version,
    scheme: Scheme,
    host: HeaderValue,
}

impl RequestForm {
    pub(crate) fn of(rewriter: &HeadRewriter<'_>) -> Self {
        Self { version: rewriter.version, scheme: rewriter.scheme.clone(), host: rewriter.host.clone() }
    }

    pub(crate) fn new(request: &Request<'_>) -> Self {
        Self { version: request.version, scheme: request.scheme.clone(), host: request.host.clone() }
    }

    pub(crate) fn scheme(&self) -> &Scheme {
        &self.scheme
    }

    /// The request of a live session, without its body.
    pub(crate) fn request<'a>(self, entry: &SessionEntry) -> Request<'a> {
        let Self { version, scheme, host } = self;
        Request { version, scheme, host, ..Request::again(entry) }
    }
}

/// Header changes by the cache, or by a resumed download that requests the rest of a response.
#[derive(Clone)]
pub(crate) struct HeadOverrides {
    pub(crate) remove: SmallVec<[HeaderName; 4]>,
    pub(crate) set: Vec<(HeaderName, HeaderValue)>,
}

impl HeadOverrides {
    /// Removes fields, and sets none.
    pub(crate) fn removing(fields: impl IntoIterator<Item = HeaderName>) -> Self {
        Self { remove: fields.into_iter().collect(), set: Vec::new() }
    }
}

/// An outgoing request head.
pub(crate) struct Outgoing {
    pub(crate) method: Method,
    pub(crate) scheme: Scheme,
    pub(crate) authority: Authority,
    pub(crate) path: PathAndQuery,
    pub(crate) fields: HeaderMap,
    /// The authority as a field value.
    pub(crate) host: HeaderValue,
    /// The HTTP/1.1 target is in absolute form (RFC 9112, section 3.2.2).
    pub(crate) is_absolute: bool,
}

impl Outgoing {
    /// Builds the head for one attempt.
    ///
    /// # Errors
    /// The route's rewrite produces an invalid head.
    pub(crate) fn new(entry: &SessionEntry, rewriter: &HeadRewriter<'_>, is_node: bool) -> Result<Self, Error> {
        let facts = &*entry.facts;
        let mut fields = facts.headers.clone();
        let ends_here = |name: &HeaderName| {
            *name == HOST || *name == reverse::CALL || (*name == PROXY_AUTHORIZATION && !rewriter.to_proxy)
        };
        remove_where(&mut fields, ends_here);
        if let Some(told) = facts.announced_network.and_then(|told| HeaderValue::try_from(told.to_string()).ok()) {
            fields.insert(headers::NETWORK, told);
        }
        rewriter.via.append(&mut fields, rewriter.version);
        headers::set_trace(&mut fields, rewriter.trace);
        headers::set_forwarded(&mut fields, facts.source.ip(), facts.trust.is_proxy());
        if facts.kind == Kind::Http && !is_node {
            let is_renamed = rewriter.rewrite.is_some_and(|rewrite| rewrite.authority.is_some());
            let host = is_renamed.then_some(rewriter.host);
            headers::describe_request(&mut fields, || facts.client_address(), rewriter.scheme, host);
        }
        max_forwards::count_down(&mut fields, &facts.method);
        if !is_node {
            headers::strip_overlay(&mut fields);
        }
        let mut this = Self {
            method: facts.method.clone(),
            scheme: rewriter.scheme.clone(),
            authority: facts.authority.clone(),
            path: facts.path.clone(),
            fields,
            host: rewriter.host.clone(),
            is_absolute: rewriter.to_proxy,
        };
        if let Some(rewrite) = rewriter.rewrite {
            this.rewrite(rewrite, entry, rewriter.node)?;
        }
        if let Some(amend) = &rewriter.amend {
            amend.remove.iter().for_each(|name| drop(this.fields.remove(name)));
            this.fields.extend(amend.set.iter().cloned());
        }
        Ok(this)
    }

    fn rewrite(&mut self, rewrite: &Rewrite, entry: &SessionEntry, node: &str) -> Result<(), Error> {
        let vars = TemplateValues { facts: &entry.facts, node };
        let head = Head { authority: &mut self.authority, path: &mut self.path, headers: &mut self.fields };
        rewrite.request(head, &vars).map_err(|error| Error::Malformed(error.to_string()))?;
        if rewrite.authority.is_some() {
            self.host = HeaderValue::try_from(self.authority.to_string())
                .map_err(|error| Error::Malformed(error.to_string()))?;
        }
        Ok(())
    }

    /// Converts to an HTTP/1.1 request.
    pub(crate) fn into_h1(mut self, body: Attempt, connection: &H1Connection, is_node: bool) -> HttpRequest<Attempt> {
        headers::join_cookies(&mut self.fields);
        let mut request = HttpRequest::new(body);
        *request.uri_mut() = self.h1_target(connection, is_node);
        self.fields.insert(HOST, self.host);
        *request.method_mut() = self.method;
        *request.headers_mut() = self.fields;
        request
    }

    /// The target of an HTTP/1.1 request other than CONNECT. The absolute form is used for a forward proxy. A node also
    /// receives it if the connection implies a different scheme, which decides the default port (RFC 9112, section
    /// 3.2.2).
    pub(crate) fn h1_target(&self, connection: &H1Connection, is_node: bool) -> Uri {
        let is_absolute = self.is_absolute || is_node && self.scheme != connection.scheme();
        // `OPTIONS *` addresses the recipient itself.
        if is_absolute && self.path != "*" { self.uri() } else { Uri::from(self.path.clone()) }
    }

    /// Converts to an HTTP/2 request.
    pub(crate) fn into_h2(mut self) -> HttpRequest<()> {
        let mut request = HttpRequest::new(());
        *request.uri_mut() = self.uri();
        *request.headers_mut() = std::mem::take(&mut self.fields);
        *request.method_mut() = self.method;
        *request.version_mut() = Version::HTTP_2;
        request
    }

    /// The URI with scheme, authority and path.
    pub(crate) fn uri(&self) -> Uri {
        let mut parts = http::uri::Parts::default();
        parts.scheme = Some(self.scheme.clone());
        parts.authority = http::uri::Authority::try_from(self.host.as_bytes()).ok();
        parts.path_and_query = Some(self.path.clone());
        Uri::from_parts(parts).unwrap_or_default()
    }
}

/// True if the next hop is a node of the overlay: the document states it, TLS proved it, or the peer speaks plaintext
/// HTTP/2 and offers extended CONNECT, which nodes do and origins do not.
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

/// Cleans a response head on its way back to the client.
///
/// # Errors
/// The route's rewrite produces an invalid head.
pub(crate) fn clean_response(
    response: &mut http::response::Parts,
    via: &Via,
    rewrite: Option<&Rewrite>,
    vars: &TemplateValues<'_>,
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
