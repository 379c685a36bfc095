//! Fuzz target: patterns of authorities, paths, header values and users. The properties are in `hermes_fuzz::model::pattern`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hermes_fuzz::model::pattern(data));
