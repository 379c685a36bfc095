//! What a decision leads to: one file an action.

pub(crate) mod forward;
pub(crate) mod respond;
pub(crate) mod terminate;
