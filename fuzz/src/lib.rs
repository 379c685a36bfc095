//! Properties that the fuzz targets check, as plain functions of bytes.
//!
//! In: arbitrary bytes. Out: nothing, or a panic that names the violated property. The targets in `fuzz_targets/` call
//! these functions with the fuzzing engine. `tests/replay.rs` calls them with the committed corpus, on a stable
//! toolchain without the engine. A property is more than "does not panic". An accepted text must mean the same after
//! another round through the parser, and truncated input must never be taken for another complete input.

pub mod document;
pub mod model;
#[cfg(feature = "libfuzzer")]
pub mod ndn;
#[cfg(feature = "libfuzzer")]
pub mod overlay;
pub mod relay;
#[cfg(feature = "libfuzzer")]
pub mod relay_client;
pub mod rina;
pub mod signature;
pub mod url_token;
pub mod wire;

/// A target: its name, which is also its directory in `corpus/`, and its check.
pub type Target = (&'static str, fn(&[u8]));

/// The targets of the controller's parsers; its own tests replay their corpus.
pub const OF_THE_CONTROLLER: &[&str] = &["overlay_document", "token"];

/// The targets of NDN; the tests of `hermes-ndn` replay their corpus.
pub const OF_NDN: &[&str] = &["ndn_acks", "ndn_fetch", "ndn_forwarder", "ndn_lp", "ndn_packet"];

/// The targets of a relay's client; the tests of `hermes-relay-client` replay their corpus.
pub const OF_THE_RELAY_CLIENT: &[&str] = &["relay_frame", "relay_secret"];

/// All other targets.
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
    ("relay_parts", relay::relay_parts),
    ("signature", signature::signature),
    ("rina", rina::check),
    ("socks5", wire::socks5),
    ("spiffe", model::spiffe),
    ("template", model::template),
    ("traceparent", wire::traceparent),
    ("url_token", url_token::url_token),
    ("via", model::via),
];
