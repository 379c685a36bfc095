//! Services on nodes that nobody can dial: they keep connections to a neighbour, and are reached by name.
//!
//! In: a device that dials its hub, an ingress in front of the hub, clients of the ingress; on loopback, and behind a
//! real NAT. Out: requests, tunnels and flows that reach the device, whichever worker they come to and whatever
//! becomes of its connections; and nothing for those who are not who they claim to be.

mod impostors;
mod lab;
mod lifecycle;
mod nat;
mod reachability;
