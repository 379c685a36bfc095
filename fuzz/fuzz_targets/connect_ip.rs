//! Fuzz target: paths and capsules of CONNECT-IP. The properties are in `hermes_fuzz::wire::connect_ip`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hermes_fuzz::wire::connect_ip(data));
