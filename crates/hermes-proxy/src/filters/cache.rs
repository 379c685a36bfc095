//! The cache filter: answers requests from the store, and stores responses of the origin.
//!
//! In: a decided request, and the rest of the chain. Out: its response, from the store if permitted. `serve` looks up,
//! `take` stores the origin's response, `fetch` reads its body to the end, `answer` builds the response, and `body`
//! streams it. Never: the rules for storing and reuse, which `hermes-cache` implements.

mod answer;
pub(crate) mod body;
mod fetch;
mod lookup;
mod store_response;

pub(crate) use self::lookup::handle;
