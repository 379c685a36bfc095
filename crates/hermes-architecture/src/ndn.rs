//! Named Data Networking as an architecture: a flow is a stream of packets, an object the content of a name.
//!
//! In: sessions of `ndn` listeners, which carry packets, and HTTP requests, whose path is a name. Out: the stream of a
//! forwarder's face (`face`), or content as an HTTP response (`gateway`, over a `forwarder` that requests share).
//! `packet_stream` and `link` serve both ends of the overlay. Never: state for the Interests of sessions of packets.

pub mod face;
pub mod forwarder;
pub mod gateway;
pub mod link;
pub mod packet_stream;
pub mod waiting_interest;
