//! The cache of a route: real nodes before an origin that does what a test says, and real clients.
mod apart;
mod bounds;
mod disk;
mod hits;
mod lab;
mod ranges;
mod reload;
mod together;
mod users;
