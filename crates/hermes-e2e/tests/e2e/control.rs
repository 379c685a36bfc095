//! An overlay under a controller: from nothing to traffic, changed while it runs, and without a controller.

mod applied;
mod backup;
mod failover;
mod hostile;
mod imported;
mod names;
mod networks;
mod openapi;
mod outcome;
mod path;
mod providers;
mod refused;
mod renewal;
mod restored;
mod revoked;
mod rotation;
mod sealed;
mod services;
mod several;
mod waves;
