//! `hermes fetch`, before origins that do all that origins do.

mod broken_transfers;
mod close_delimited;
mod lab;
mod limits;
mod node;
mod refusals;
mod rerouting;
mod timeouts;
mod via_node;
