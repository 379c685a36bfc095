//! Fuzz target: NDN packets and names. The properties are in `hermes_fuzz::ndn::packets`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hermes_fuzz::ndn::packets(data));
