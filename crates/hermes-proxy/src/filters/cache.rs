//! The cache of a route in a session: what it answers, and how its origin is asked.
//!
//! In: a decided request, and how its origin is asked. Out: its response, from the store where that may be used.
//! `serve` looks up, `take` stores what the origin answers, `fetch` reads it to its end, `answer` makes the response and
//! `body` its bytes. Never: what may be stored and used; that is `hermes-cache`.

mod answer;
pub(crate) mod body;
mod fetch;
mod serve;
mod take;

pub(crate) use self::serve::handle;
