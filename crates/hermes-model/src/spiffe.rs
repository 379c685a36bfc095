//! SPIFFE: the URIs of a certificate, and the names of nodes, users and overlays in them.
//!
//! In: the URIs of a certificate (subject alternative names). Out: the identity that they prove.
//! Never: a certificate, a signature, or what a request claims.

use std::sync::Arc;

use crate::facts::Peer;

/// What names of keys begin with (RFC 6920).
pub const KEY: &str = "ni:///sha-256;";

/// The longest user name, in bytes.
pub const MAX_USER: usize = 255;

/// The identity that a certificate's URIs prove in an overlay; an empty `overlay` stands for one that
/// is not known, and takes any.
///
/// # Errors
/// One sentence: the certificate is of another overlay, or names nobody.
pub fn peer<'u>(uris: impl IntoIterator<Item = &'u str>, overlay: &Arc<str>) -> Result<Peer, String> {
    let mut peer = Peer { overlay: overlay.clone(), ..Peer::default() };
    for uri in uris {
        // What is added to a certificate's URIs comes last.
        if uri.starts_with(KEY) {
            peer.key = Some(Arc::from(uri));
        }
        let Some(id) = parse_spiffe(uri) else { continue };
        if !overlay.is_empty() && *id.overlay != **overlay {
            return Err(format!("its certificate is of overlay {}, this one is {overlay}", id.overlay));
        }
        match id.kind {
            SpiffeKind::Node => peer.node = Some(Arc::from(id.name)),
            SpiffeKind::User => peer.users.push(Arc::from(id.name)),
            SpiffeKind::Role => peer.standalone |= id.name == "standalone",
        }
    }
    if peer.node.is_none() && peer.users.is_empty() {
        return Err("its certificate has no URI spiffe://OVERLAY/node/NAME or .../user/NAME".to_owned());
    }
    Ok(peer)
}

/// The overlay of a node whose own certificate has these URIs.
///
/// # Errors
/// One sentence: the certificate names another node than its document, or none.
pub fn own_overlay<'u>(uris: impl IntoIterator<Item = &'u str>, node: &str) -> Result<Arc<str>, String> {
    match uris.into_iter().filter_map(parse_spiffe).find(|id| id.kind == SpiffeKind::Node) {
        Some(id) if id.name == node => Ok(Arc::from(id.overlay)),
        Some(id) => Err(format!("the certificate names node {}, the document names {node}", id.name)),
        None => Err(format!("the certificate has no URI spiffe://OVERLAY/node/{node}")),
    }
}

/// Visible ASCII without what would split a header's value; `*` alone is the wildcard and no name.
pub(crate) fn is_user_name(name: &str) -> bool {
    (1..=MAX_USER).contains(&name.len())
        && name != "*"
        && name.bytes().all(|b| b.is_ascii_graphic() && !matches!(b, b',' | b'"' | b'\\'))
}

/// What a URI SAN of the overlay says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpiffeId<'a> {
    /// The trust domain.
    pub overlay: &'a str,
    /// Of what it is the name.
    pub kind: SpiffeKind,
    /// The name.
    pub name: &'a str,
}

/// Of what a URI SAN is the name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpiffeKind {
    /// `/node/NAME`
    Node,
    /// `/user/NAME`
    User,
    /// `/role/NAME`
    Role,
}

/// Reads `spiffe://OVERLAY/{node|user|role}/NAME`, strictly: no escapes, no empty segments, no
/// query, no port, and the characters of the SPIFFE ID specification only. `None` is a URI that
/// says nothing to the overlay.
pub fn parse_spiffe(uri: &str) -> Option<SpiffeId<'_>> {
    // 2,048 bytes is the specification's bound.
    let rest = uri.strip_prefix("spiffe://").filter(|_| uri.len() <= 2048)?;
    let (overlay, path) = rest.split_once('/')?;
    let (kind, name) = path.split_once('/')?;
    let kind = match kind {
        "node" => SpiffeKind::Node,
        "user" => SpiffeKind::User,
        "role" => SpiffeKind::Role,
        _ => return None,
    };
    (is_trust_domain(overlay) && is_spiffe_segment(name)).then_some(SpiffeId { overlay, kind, name })
}

fn is_trust_domain(text: &str) -> bool {
    let legal = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'.' | b'-' | b'_');
    (1..=255).contains(&text.len()) && text.bytes().all(legal)
}

/// A path segment as SPIFFE has it; also what a node may be called.
pub(crate) fn is_spiffe_segment(text: &str) -> bool {
    let legal = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_');
    (1..=MAX_USER).contains(&text.len()) && text != "." && text != ".." && text.bytes().all(legal)
}
