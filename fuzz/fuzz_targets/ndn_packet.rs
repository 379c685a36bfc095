//! Fuzz target: NDN packets. The properties are in `hermes_fuzz::ndn::ndn_packet`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hermes_fuzz::ndn::ndn_packet(data));
