//! DNS listeners end to end: names of the overlay get addresses that lead back to them, all else is forwarded.
//!
//! In: questions as resolvers ask them, by UDP and TCP, by `dig`, `getent` and curl, and as none should; servers behind
//! the node that answer, lie, or say nothing. Out: the right answer, in time; sessions to an address are sessions to
//! its name; nothing owned leaves, nothing else is swallowed.

mod forward;
mod hostile;
mod lab;
mod overlay_names;
mod programs;
