//! Fuzz target: node documents, as `hermes check` reads them. The properties are in `hermes_fuzz::document::check`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hermes_fuzz::document::check(data));
