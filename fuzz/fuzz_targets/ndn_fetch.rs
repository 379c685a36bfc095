//! Fuzz target: answers to a fetch of segments. The properties are in `hermes_fuzz::ndn::ndn_fetch`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hermes_fuzz::ndn::ndn_fetch(data));
