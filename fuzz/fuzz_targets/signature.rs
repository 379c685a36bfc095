//! Fuzz target: the fields of a signed request. The property is in `hermes_fuzz::signature::signature`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hermes_fuzz::signature::signature(data));
