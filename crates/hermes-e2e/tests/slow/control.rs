//! An overlay under a controller: what takes longest. The rest is `control` of the binary `e2e`.

mod changing;
mod envoy;
