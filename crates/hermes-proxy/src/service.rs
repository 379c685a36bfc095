//! What a decision leads to: one file an action.

pub(crate) mod forward;
pub(crate) mod max_forwards;
pub(crate) mod respond;
pub(crate) mod terminate;
