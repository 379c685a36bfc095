//! Fuzz target: the W3C header `traceparent`. The properties are in `hermes_fuzz::wire::traceparent`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hermes_fuzz::wire::traceparent(data));
