//! Fuzz target: records of the custody protocol. The properties are in `hermes_fuzz::wire::custody`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hermes_fuzz::wire::custody(data));
