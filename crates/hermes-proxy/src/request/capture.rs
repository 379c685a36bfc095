//! Packets of a device as a request: CONNECT-IP for a prefix that it captures, or for a name of the overlay.
//!
//! In: the prefix, and the name that it stands for, if it does. Out: `Request`, with the prefix in `hermes-network`:
//! to the far end a name's address is what the packets for it have. Never: a packet.

use std::sync::Arc;

use hermes_model::authority::Authority;
use hermes_model::facts::{Facts, Kind};
use hermes_model::trust;
use hermes_wire::connect_ip::{self, Prefix, Scope, Target};
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Version};
use ipnet::IpNet;

use super::{Ask, Origin, Rejected, Request, complete, host_value};
use crate::body::RequestBody;
use crate::headers;

/// Makes a request of a prefix whose packets a device takes; `name` is what it stands for. `set_headers` are its own,
/// over those of the listener.
///
/// # Errors
/// As [`from_flow`](super::from_flow).
pub(crate) fn from_capture<'a>(
    origin: &Origin<'_>,
    network: IpNet,
    name: Option<&Arc<str>>,
    set_headers: &[(HeaderName, HeaderValue)],
) -> Result<Request<'a>, Box<Rejected>> {
    let address = Authority::of_address(network.addr());
    let (target, authority) = match name {
        Some(name) => (Target::Name(name.to_string()), address.with_host(name.clone())),
        None => (Target::Prefix(prefix_of(network)), address),
    };
    let path = connect_ip::path(&Scope { target, protocol: None });
    let facts = Facts {
        listener: origin.listener.name.clone(),
        kind: Kind::Ip,
        source: origin.source,
        trust: origin.trust.clone(),
        user: None,
        method: Method::CONNECT,
        path: path.parse().unwrap_or_else(|_| PathAndQuery::from_static("/")),
        headers: HeaderMap::new(),
        network: Some(network),
        announced_network: None,
        protocol: None,
        authority,
    };
    let trace = headers::trace(&facts.headers, origin.worker.random());
    complete(origin, facts, trace)
        .map(|mut facts| {
            // What the operator wrote for this prefix is more than what he wrote for all of them, and as much proven.
            if let Ok(network) = HeaderValue::try_from(network.to_string()) {
                facts.headers.insert(headers::NETWORK, network);
            }
            for (name, value) in set_headers {
                facts.headers.insert(name.clone(), value.clone());
            }
            facts.user = trust::user_of(set_headers).or(facts.user);
            facts
        })
        .map(|facts| Request {
            ask: Ask::Upgrade(Arc::from("connect-ip")),
            version: Version::HTTP_11,
            scheme: http::uri::Scheme::HTTP,
            host: host_value(&facts.authority, ""),
            facts: std::rc::Rc::new(facts),
            body: RequestBody::Empty,
            trace,
            interim: None,
            connection: None,
            early: None,
            arrived: None,
            claimed: 0,
        })
}

/// As the wire has it. What is truncated is a prefix.
fn prefix_of(network: IpNet) -> Prefix {
    let network = network.trunc();
    Prefix::new(network.addr(), network.prefix_len()).unwrap_or_else(|_| Prefix::of(network.addr()))
}
