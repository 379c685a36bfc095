//! Fuzz target: the parts of a relay's response. The property is in `hermes_fuzz::relay::relay_parts`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hermes_fuzz::relay::relay_parts(data));
