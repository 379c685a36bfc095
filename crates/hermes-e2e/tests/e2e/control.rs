//! An overlay under a controller: from nothing to traffic, changed while it runs, and without a controller.

mod apply;
mod backup;
mod failover;
mod imported_ca;
mod networks;
mod openapi;
mod operator_commands;
mod overlay_names;
mod providers;
mod rejections;
mod relay;
mod renewal;
mod restore;
mod revocation;
mod rollout;
mod rotation;
mod sealed_ca_key;
mod services;
mod several_controllers;
mod unauthorized_clients;
mod unknown_outcome;
