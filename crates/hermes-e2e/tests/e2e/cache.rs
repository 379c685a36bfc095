//! The cache of a route: real nodes before an origin that does what a test says, and real clients.
mod bounds;
mod collapsing;
mod disk;
mod hits;
mod lab;
mod private_responses;
mod ranges;
mod reload;
mod users;
