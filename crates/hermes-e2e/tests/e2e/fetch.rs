//! `hermes fetch`, before origins that do all that origins do.

mod broken;
mod elsewhere;
mod ends;
mod lab;
mod lasting;
mod node;
mod refusals;
mod through;
mod waits;
