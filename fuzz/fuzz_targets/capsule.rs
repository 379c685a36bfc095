//! Fuzz target: capsules of RFC 9297, whole and in pieces. The properties are in `hermes_fuzz::wire::capsule`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hermes_fuzz::wire::capsule(data));
