//! Fuzz target: lines of `Via`. The properties are in `hermes_fuzz::model::via`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hermes_fuzz::model::via(data));
