//! Tests of `traceparent`.
