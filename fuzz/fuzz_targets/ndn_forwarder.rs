//! Fuzz target: a forwarder between consumers and a face. The properties are in `hermes_fuzz::ndn::ndn_forwarder`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hermes_fuzz::ndn::ndn_forwarder(data));
