//! The actions of a route, one file each.

pub(crate) mod content_race;
pub(crate) mod device_end;
pub(crate) mod forward;
pub(crate) mod next_relay;
pub(crate) mod respond;
