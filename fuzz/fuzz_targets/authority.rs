//! Fuzz target: authorities, as in URIs, `Host` and CONNECT. The properties are in `hermes_fuzz::model::authority`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hermes_fuzz::model::authority(data));
