//! Tests of the `hermes` process against software of others. They need the programs of `make setup`.

#![allow(clippy::unwrap_used)]

mod envoy;
mod h2spec;
mod lifecycle;
mod ndn;
mod relay;
