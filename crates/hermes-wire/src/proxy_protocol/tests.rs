//! Tests of `proxy_protocol`.
