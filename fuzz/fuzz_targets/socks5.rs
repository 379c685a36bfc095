//! Fuzz target: SOCKS 5. The properties are in `hermes_fuzz::wire::socks5`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hermes_fuzz::wire::socks5(data));
