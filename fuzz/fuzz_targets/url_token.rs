//! Fuzz target: a token in a URL. The property is in `hermes_fuzz::url_token::url_token`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hermes_fuzz::url_token::url_token(data));
