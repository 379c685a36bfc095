//! Fuzz target: content that clients encrypt. The property is in `hermes_fuzz::relay_client::relay_secret`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hermes_fuzz::relay_client::relay_secret(data));
