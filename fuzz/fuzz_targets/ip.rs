//! Fuzz target: IP packets. The properties are in `hermes_fuzz::wire::ip`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hermes_fuzz::wire::ip(data));
