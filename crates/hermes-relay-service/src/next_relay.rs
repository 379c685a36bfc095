//! The way from this relay to the next one towards the root of the tree.
//!
//! In: requests of this node and of its clients. Out: the responses of the next relay. The data plane has the
//! implementation, since requests travel by its connections.

use std::pin::Pin;

use bytes::Bytes;
use hermes_model::facts::Facts;
use hermes_transport::body::Body;
use hermes_transport::error::Error;
use http::Response;

/// A response of the next relay.
pub type NextResponse = Pin<Box<dyn Future<Output = Result<Response<Body>, Error>>>>;

/// The way to the next relay of a route.
pub trait NextRelay {
    /// Sends a request of this node, or of one of its clients, whose identity is in `facts`. The future fails if the route
    /// has no next relay any more.
    fn send(&self, facts: Facts, body: Bytes) -> NextResponse;
}
