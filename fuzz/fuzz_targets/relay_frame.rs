//! Fuzz target: a frame of a connection. The property is in `hermes_fuzz::relay_client::relay_frame`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hermes_fuzz::relay_client::relay_frame(data));
