//! Fuzz target: tokens, and names of documents. The properties are in `hermes_fuzz::overlay::token`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hermes_fuzz::overlay::token(data));
