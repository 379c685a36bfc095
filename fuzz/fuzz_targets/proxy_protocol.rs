//! Fuzz target: PROXY protocol, version 2. The properties are in `hermes_fuzz::wire::proxy_protocol`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hermes_fuzz::wire::proxy_protocol(data));
