//! Fuzz target: acknowledgements of NDNLPv2. The properties are in `hermes_fuzz::ndn::ndn_acks`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hermes_fuzz::ndn::ndn_acks(data));
