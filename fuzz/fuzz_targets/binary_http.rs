//! Fuzz target: binary HTTP messages, whole and in pieces. The properties are in `hermes_fuzz::wire::binary_http`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hermes_fuzz::wire::binary_http(data));
