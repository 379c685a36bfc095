//! The life of nodes: installed, placed somewhere, drained, and taken away.

mod deploy;
mod drain;
mod install;
mod kubernetes;
mod package;
