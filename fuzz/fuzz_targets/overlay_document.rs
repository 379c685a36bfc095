//! Fuzz target: overlay documents, as a controller parses and compiles them. The properties are in
//! `hermes_fuzz::overlay::overlay_document`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hermes_fuzz::overlay::overlay_document(data));
