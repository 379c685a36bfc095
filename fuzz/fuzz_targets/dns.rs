//! Fuzz target: questions to a DNS listener, and answers of other servers. The properties are in
//! `hermes_fuzz::wire::dns`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hermes_fuzz::wire::dns(data));
