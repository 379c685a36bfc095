//! TCP as an architecture: a flow is a connection to a host and port.
//!
//! In: a `tcp` session and its route. Out: the connection, from the client's own address with `source: client`. Never: a
//! connection to an address outside the route's `reach`.

use bytes::Bytes;
use hermes_model::facts::Facts;
use hermes_model::snapshot::{Route, Target, Terminate};
use hermes_outbound::outbound::Outbound;
use hermes_outbound::outbound::connect::{Destination, connect};
use hermes_transport::runtime::session::SessionEntry;
use hermes_transport::stream::ByteStream;

use crate::dial_target::{client, place};
use crate::{Architecture, Opening, has_destination};

/// TCP, as a route with `terminate: {tcp: ...}` uses it.
pub(crate) struct Tcp<'a> {
    pub(crate) outbound: &'a Outbound,
    pub(crate) terminate: &'a Terminate,
    pub(crate) route: &'a Route,
}

impl Architecture for Tcp<'_> {
    fn keyword(&self) -> &'static str {
        "tcp"
    }

    fn reaches(&self, facts: &Facts) -> bool {
        matches!(self.terminate.target, Target::Fixed(_)) || has_destination(facts)
    }

    /// Connects. The errors are those of the trait, and: an address outside of `reach`.
    fn open<'a>(&'a self, entry: &'a SessionEntry) -> Opening<'a> {
        Box::pin(async move {
            let place = place(self.terminate, &entry.facts, self.route)?;
            *entry.peer.borrow_mut() = Some(place.label.clone());
            let destination = Destination {
                source: self.terminate.from_client.then(|| client(&entry.facts)),
                ..place.destination(self.terminate, self.terminate.proxy_protocol.then_some(entry.facts.source))
            };
            let io = connect(self.outbound, &destination, self.route.timeout.connect).await?;
            *entry.peer.borrow_mut() = Some(place.label.clone());
            Ok(ByteStream::io(io, Bytes::new()))
        })
    }
}
