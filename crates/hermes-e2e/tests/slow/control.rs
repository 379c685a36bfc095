//! An overlay under a controller: what takes longest. The rest is `control` of the binary `e2e`.

mod changes_under_load;
mod envoy;
