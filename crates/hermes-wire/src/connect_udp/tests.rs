//! Tests of `connect_udp`.
