//! Fuzz target: paths of CONNECT-UDP (RFC 9298). The properties are in `hermes_fuzz::wire::connect_udp_path`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hermes_fuzz::wire::connect_udp_path(data));
