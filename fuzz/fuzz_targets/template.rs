//! Fuzz target: templates and rewrites of paths. The properties are in `hermes_fuzz::model::template`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hermes_fuzz::model::template(data));
