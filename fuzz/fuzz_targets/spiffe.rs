//! Fuzz target: URIs in certificates. The properties are in `hermes_fuzz::model::spiffe`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hermes_fuzz::model::spiffe(data));
