//! Fuzz target: NDNLPv2 frames, reassembly and reliability. The properties are in `hermes_fuzz::ndn::frames`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hermes_fuzz::ndn::frames(data));
