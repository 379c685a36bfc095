//! The way from this relay to the others of its tree.
//!
//! In: requests of this node and of its clients. Out: the responses of another relay. The data plane has the
//! implementation, since requests travel by its connections.

use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use hermes_model::facts::Facts;
use hermes_transport::body::Body;
use hermes_transport::error::Error;
use http::Response;

/// A response of another relay.
pub type NextResponse = Pin<Box<dyn Future<Output = Result<Response<Body>, Error>>>>;

/// The way to the other relays of a route.
pub trait NextRelay {
    /// Sends a request of this node, or of one of its clients, whose identity is in `facts`, to the relay of an upstream. The
    /// future fails if the route has no such upstream any more.
    fn send(&self, upstream: Arc<str>, facts: Facts, body: Bytes) -> NextResponse;
}
