//! Tests of `capsule`.
