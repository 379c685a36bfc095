//! What the fuzz targets check, as plain functions of bytes.
//!
//! In: arbitrary bytes. Out: nothing, or a panic that names the property that does not hold. The
//! engine's targets in `fuzz_targets/` call these, and so does `tests/replay.rs` with the
//! committed corpus, on a stable toolchain without the engine. A property goes beyond "does not
//! panic": whatever a parser accepts must mean the same after another round through it, and cut
//! input must never mean something else than whole input.

pub mod document;
pub mod model;
#[cfg(feature = "libfuzzer")]
pub mod overlay;
pub mod wire;

/// A target: its name, which is also its directory in `corpus/`, and its check.
pub type Target = (&'static str, fn(&[u8]));

/// Targets of what a controller reads; its own tests replay their corpus.
pub const OF_THE_CONTROLLER: &[&str] = &["overlay_document", "token"];

/// Every other target there is.
pub const TARGETS: &[Target] = &[
    ("authority", model::authority),
    ("binary_http", wire::binary_http),
    ("capsule", wire::capsule),
    ("connect_ip", wire::connect_ip),
    ("custody", wire::custody),
    ("connect_udp_path", wire::connect_udp_path),
    ("dns", wire::dns),
    ("h3", wire::h3),
    ("ip", wire::ip),
    ("node_document", document::check),
    ("pattern", model::pattern),
    ("proxy_protocol", wire::proxy_protocol),
    ("socks5", wire::socks5),
    ("spiffe", model::spiffe),
    ("template", model::template),
    ("traceparent", wire::traceparent),
    ("via", model::via),
];
