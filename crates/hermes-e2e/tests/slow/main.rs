//! The tests that take longest, so that the other binaries stay fast.

#![allow(clippy::unwrap_used)]

mod control;
mod custody;
mod demo;
