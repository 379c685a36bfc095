//! Fuzz target: frames and settings of HTTP/3. The properties are in `hermes_fuzz::wire::h3`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hermes_fuzz::wire::h3(data));
