//! QUIC as an operator has it: clients that move, listeners that change, processes that follow one another.
//!
//! In: real connections over HTTP/3, many at a time. Out: every byte of theirs, whatever moved beneath them.

mod floods;
mod lab;
mod limits;
mod migration;
mod reload;
mod restart;
mod takeover;
