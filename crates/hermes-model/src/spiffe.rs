//! SPIFFE: the URIs of a certificate, and the names of nodes, users and overlays in them.
//!
//! In: the subject alternative names of a certificate. Out: the identity that they prove.
//! Never: certificates, signatures, or claims of a request.

use std::sync::Arc;

use crate::facts::Peer;

/// Prefix of key names (RFC 6920).
pub const KEY: &str = "ni:///sha-256;";

/// Maximum length of a user name, in bytes.
pub const MAX_USER_BYTES: usize = 255;

/// The identity that a certificate's URIs prove in an overlay. An empty `overlay` is unknown, and accepts any.
///
/// # Errors
/// The certificate belongs to another overlay, or names nobody.
pub fn peer<'u>(uris: impl IntoIterator<Item = &'u str>, overlay: &Arc<str>) -> Result<Peer, String> {
    let mut peer = Peer { overlay: overlay.clone(), ..Peer::default() };
    for uri in uris {
        // The caller appends the key's name to the URIs of the certificate.
        if uri.starts_with(KEY) {
            peer.key = Some(Arc::from(uri));
        }
        let Some(id) = parse_spiffe(uri) else { continue };
        if !overlay.is_empty() && *id.overlay != **overlay {
            return Err(format!("its certificate belongs to overlay {}, but this overlay is {overlay}", id.overlay));
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

/// The overlay of this node, from the URIs of its own certificate.
///
/// # Errors
/// The certificate names another node than the document, or none.
pub fn own_overlay<'u>(uris: impl IntoIterator<Item = &'u str>, node: &str) -> Result<Arc<str>, String> {
    match uris.into_iter().filter_map(parse_spiffe).find(|id| id.kind == SpiffeKind::Node) {
        Some(id) if id.name == node => Ok(Arc::from(id.overlay)),
        Some(id) => Err(format!("the certificate names node {}, but the document names {node}", id.name)),
        None => Err(format!("the certificate has no URI spiffe://OVERLAY/node/{node}")),
    }
}

/// True for visible ASCII without characters that would split a field value. `*` is the wildcard, not a name.
pub(crate) fn is_user_name(name: &str) -> bool {
    (1..=MAX_USER_BYTES).contains(&name.len())
        && name != "*"
        && name.bytes().all(|b| b.is_ascii_graphic() && !b",\"\\".contains(&b))
}

/// A parsed URI SAN of an overlay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpiffeId<'a> {
    /// Trust domain.
    pub overlay: &'a str,
    /// Kind of identity.
    pub kind: SpiffeKind,
    /// Name of the node, user or role.
    pub name: &'a str,
}

/// Kind of identity that a URI names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpiffeKind {
    /// `/node/NAME`
    Node,
    /// `/user/NAME`
    User,
    /// `/role/NAME`
    Role,
}

/// Parses `spiffe://OVERLAY/{node|user|role}/NAME` strictly: no escapes, empty segments, query or port, and only the
/// characters of the SPIFFE ID specification. `None` for any other URI.
pub fn parse_spiffe(uri: &str) -> Option<SpiffeId<'_>> {
    // The specification limits URIs to 2,048 bytes.
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

/// True for a path segment of a SPIFFE ID; node names follow the same rule.
pub(crate) fn is_spiffe_segment(text: &str) -> bool {
    let legal = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_');
    (1..=MAX_USER_BYTES).contains(&text.len()) && text != "." && text != ".." && text.bytes().all(legal)
}
