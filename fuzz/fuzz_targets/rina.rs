//! Fuzz target: PDUs of the RINA DIF, and its engine. The properties are in `hermes_fuzz::rina`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hermes_fuzz::rina::check(data));
