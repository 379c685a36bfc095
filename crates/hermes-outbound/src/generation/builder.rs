//! Builds the contents of a generation from the files of a snapshot.
//!
//! In: a snapshot, and the previous generation. Out: the node's identity, TLS of listeners and upstreams, and the state
//! of upstreams. If a file cannot be used, all errors are returned, each with the path of its key in the node document.
//! Never: a running task.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hermes_model::snapshot::{
    Action, ClientAuth, Endpoint, IdentityFiles, Listener, ListenerProtocol, ListenerTls, Snapshot, Terminate,
    Upstream, UpstreamProtocol, UpstreamTls,
};
use hermes_model::trust::{REVOKED, SpiffeKind, own_overlay, parse_spiffe};
use hermes_net::quic;
use hermes_net::tls::{
    self, CertifiedKey, ClientCertificates, NodePredicate, Roots, RustlsServerConfig, ServerIdentity,
};

use super::{
    BuildError, ByName, Certificate, Generation, ListenerState, OriginTls, Origins, QuicState, next_owner, nodes,
    quic_bounds, server_bounds,
};
use crate::reverse::{self, ReversePeer};
use crate::upstream::{ClientTls, UpstreamState};

/// The minimum length of the key of a DIF in bytes: shorter ones can be guessed.
const MIN_DIF_KEY_BYTES: usize = 16;

/// The node's certificate with its private key, and the CA certificates of its overlay.
struct Identity {
    key: CertifiedKey,
    roots: Roots,
}

/// The contents of a generation.
pub(super) struct Built {
    pub(super) overlay: Arc<str>,
    /// The certificate and private key of the node's identity; `None` without an identity.
    pub(super) key: Option<CertifiedKey>,
    pub(super) listeners: ByName<ListenerState>,
    pub(super) upstreams: ByName<Arc<UpstreamState>>,
    pub(super) nodes: HashMap<Arc<str>, Arc<ReversePeer>>,
    pub(super) origins: Origins,
    pub(super) certificates: Vec<Certificate>,
    pub(super) files: HashMap<PathBuf, Vec<u8>>,
}

pub(super) struct Builder<'a> {
    snapshot: &'a Snapshot,
    previous: Option<&'a Generation>,
    identity: Option<Identity>,
    overlay: Arc<str>,
    nodes: HashMap<Arc<str>, Arc<ReversePeer>>,
    certificates: Vec<Certificate>,
    files: HashMap<PathBuf, Vec<u8>>,
    faults: Vec<BuildError>,
}

impl<'a> Builder<'a> {
    pub(super) fn new(snapshot: &'a Snapshot, previous: Option<&'a Generation>) -> Self {
        Self {
            snapshot,
            previous,
            identity: None,
            overlay: Arc::from(""),
            nodes: nodes(snapshot, previous),
            certificates: Vec::new(),
            files: HashMap::new(),
            faults: Vec::new(),
        }
    }

    /// Reads all files, and builds the contents of the generation.
    ///
    /// # Errors
    /// Some files cannot be used. Each of them has an error, with the path of its key in the node document.
    pub(super) fn build(mut self) -> Result<Built, Vec<BuildError>> {
        self.load_identity();
        let (listeners, upstreams, origins) = (self.listeners(), self.upstreams(), self.origins());
        self.anchors();
        self.signing_keys();
        self.dif_keys();
        if !self.faults.is_empty() {
            return Err(self.faults);
        }
        let Self { overlay, nodes, certificates, files, identity, .. } = self;
        let key = identity.map(|identity| identity.key);
        Ok(Built { overlay, key, listeners, upstreams, nodes, origins, certificates, files })
    }

    /// Reads the public keys of NDN faces.
    fn anchors(&mut self) {
        let snapshot = self.snapshot;
        for (index, route) in snapshot.routes.iter().enumerate() {
            let faces = route.action.alternatives().iter().filter_map(|action| match action {
                Action::Face(face) => Some(face),
                _ => None,
            });
            for (prefix, file) in faces.flat_map(|face| &face.anchors) {
                self.note(&[file]);
                let read = hermes_net::file::read(file, hermes_net::file::MAX_FILE_BYTES);
                let key = read.map_err(|error| error.to_string()).and_then(|bytes| tls::public_key(&bytes));
                if let Err(reason) = key {
                    let path = format!("routes[{index}].terminate.anchors.{prefix}");
                    self.fault(path, format!("{}: {reason}", file.display()));
                }
            }
        }
    }

    /// Reads the private keys that sign NDN content.
    fn signing_keys(&mut self) {
        let snapshot = self.snapshot;
        for (index, listener) in snapshot.listeners.iter().enumerate() {
            let ListenerProtocol::Ndn(ndn) = &listener.protocol else { continue };
            let Some((_, file)) = &ndn.signing_key else { continue };
            self.note(&[file]);
            let read = hermes_net::file::read(file, hermes_net::file::MAX_FILE_BYTES);
            let key = read.map_err(|error| error.to_string()).and_then(|bytes| tls::private_key(&bytes));
            if let Err(reason) = key {
                self.fault(format!("listeners[{index}].signing-key"), format!("{}: {reason}", file.display()));
            }
        }
    }

    /// Reads the keys of DIFs.
    fn dif_keys(&mut self) {
        let snapshot = self.snapshot;
        let listeners = snapshot.listeners.iter().enumerate().filter_map(|(index, listener)| {
            let ListenerProtocol::Rina(membership) = &listener.protocol else { return None };
            Some((format!("listeners[{index}].dif-key"), membership))
        });
        let routes = snapshot.routes.iter().enumerate().flat_map(|(index, route)| {
            route.action.alternatives().iter().filter_map(move |action| {
                let Action::Rina(rina) = action else { return None };
                Some((format!("routes[{index}].terminate.dif-key"), &rina.membership))
            })
        });
        for (path, membership) in listeners.chain(routes) {
            let Some(file) = &membership.key else { continue };
            self.note(&[file]);
            // The bytes that were noted are those that the node uses.
            match self.files.get(file).map(Vec::len) {
                None => self.fault(path, format!("{}: the file cannot be read", file.display())),
                Some(length) if length < MIN_DIF_KEY_BYTES => {
                    let reason = format!("{length} bytes; a key needs at least {MIN_DIF_KEY_BYTES}");
                    self.fault(path, format!("{}: {reason}", file.display()));
                }
                Some(_) => {}
            }
        }
    }

    fn fault(&mut self, path: impl Into<String>, reason: impl ToString) {
        self.faults.push(BuildError { path: path.into(), reason: reason.to_string() });
    }

    fn shows(&mut self, path: String, key: &CertifiedKey) {
        let Some(not_after) = key.not_after() else { return };
        let life = key.not_before().map_or(0, |not_before| not_after.saturating_sub(not_before));
        let life = Duration::from_secs(u64::try_from(life).unwrap_or_default());
        self.certificates.push(Certificate { path, not_after, life });
    }

    /// True if the identity could not be loaded. Listeners and upstreams that need it then report no further error.
    fn lacks_identity(&self) -> bool {
        self.snapshot.identity.is_some() && self.identity.is_none()
    }

    /// Stores the content of files, so that the next generation can detect changes.
    fn note(&mut self, files: &[&Path]) {
        for file in files {
            if let Ok(bytes) = hermes_net::file::read(file, hermes_net::file::MAX_FILE_BYTES) {
                self.files.insert((*file).to_owned(), bytes);
            }
        }
    }

    fn load_identity(&mut self) {
        let Some(IdentityFiles { cert, key, ca }) = &self.snapshot.identity else { return };
        self.note(&[cert, key, ca]);
        match (CertifiedKey::load(cert, key), Roots::load(ca)) {
            (Ok(key), Ok(roots)) => {
                match own_overlay(key.uris().iter().map(String::as_str), &self.snapshot.node) {
                    Ok(overlay) => self.overlay = overlay,
                    Err(reason) => self.fault("identity.cert", reason),
                }
                self.shows("identity.cert".to_owned(), &key);
                self.identity = Some(Identity { key, roots });
            }
            (key, roots) => {
                for (path, fault) in [("identity", key.err()), ("identity.ca", roots.err())] {
                    if let Some(error) = fault {
                        self.fault(path, error);
                    }
                }
            }
        }
    }

    fn listeners(&mut self) -> ByName<ListenerState> {
        let mut states = ByName::default();
        for (index, listener) in self.snapshot.listeners.iter().enumerate() {
            let (tls, quic) = match &listener.tls {
                None => (None, None),
                Some(tls) => {
                    let path = format!("listeners[{index}].tls");
                    match self.server_tls(&path, listener, tls) {
                        Ok((config, quic)) => (Some(config), quic),
                        Err(reason) => {
                            self.faults.extend(reason.map(|reason| BuildError { path, reason }));
                            continue;
                        }
                    }
                }
            };
            let known = self.previous.and_then(|previous| previous.listeners.get(&listener.name));
            let shares = known.map(|state| state.shares.clone()).unwrap_or_default();
            states.insert(listener.name.clone(), ListenerState { listener: listener.clone(), tls, quic, shares });
        }
        states
    }

    /// Builds the TLS and QUIC configuration of a listener. The error is `None` if it was already reported.
    fn server_tls(
        &mut self,
        path: &str,
        listener: &Listener,
        tls: &ListenerTls,
    ) -> Result<(Arc<RustlsServerConfig>, Option<QuicState>), Option<String>> {
        let key = match &tls.cert_key {
            Some((cert, key)) => {
                self.note(&[cert, key]);
                let key = CertifiedKey::load(cert, key).map_err(|error| Some(error.to_string()))?;
                self.shows(format!("{path}.cert"), &key);
                key
            }
            // `check` ensures that the document has an identity in this case.
            None => self.identity.as_ref().map(|identity| identity.key.clone()).ok_or(None)?,
        };
        let roots = match &tls.client_ca {
            Some(ca) => {
                self.note(&[ca]);
                Some(Roots::load(ca).map_err(|error| Some(error.to_string()))?)
            }
            None => self.identity.as_ref().map(|identity| identity.roots.clone()),
        };
        let clients = match (tls.client, roots) {
            (ClientAuth::None, _) => ClientCertificates::None,
            (ClientAuth::Optional, Some(roots)) => ClientCertificates::Optional(roots),
            (ClientAuth::Required, Some(roots)) => ClientCertificates::Required(roots),
            (_, None) if self.lacks_identity() => return Err(None),
            (_, None) => return Err(Some("no CA to verify clients with".to_owned())),
        };
        // A node that dials this node authenticates by certificate, so the listener must request client certificates.
        let takes_nodes = !self.nodes.is_empty() && tls.client != ClientAuth::None;
        let alpn: &[&[u8]] = match listener.protocol {
            ListenerProtocol::Http if takes_nodes && listener.http2 => &[b"h2", b"http/1.1", reverse::ALPN],
            ListenerProtocol::Http if takes_nodes => &[b"http/1.1", reverse::ALPN],
            ListenerProtocol::Http if listener.http2 => &[b"h2", b"http/1.1"],
            ListenerProtocol::Http => &[b"http/1.1"],
            _ => &[],
        };
        let refused = |error: tls::TlsError| Some(error.to_string());
        let config = tls::server_config(&key, &clients, alpn).map_err(refused)?;
        if !listener.http3 {
            return Ok((config, None));
        }
        let alpn: &[&[u8]] = if takes_nodes { &[quic::ALPN, reverse::ALPN_H3] } else { &[quic::ALPN] };
        let over_quic = tls::server_config(&key, &clients, alpn).map_err(refused)?;
        let bounds = server_bounds(&self.snapshot.limits, listener);
        let quic = quic::server_config(&over_quic, bounds, listener.early_data).map_err(refused)?;
        Ok((config, Some(QuicState { config: quic, bounds, reset: quic::ResetKey::of(&key) })))
    }

    fn upstreams(&mut self) -> ByName<Arc<UpstreamState>> {
        let mut states = ByName::default();
        for (index, upstream) in self.snapshot.upstreams.iter().enumerate() {
            let mut files: Vec<&Path> = Vec::new();
            if let Some(ca) = upstream.tls.as_ref().and_then(|tls| tls.ca.as_deref()) {
                files.push(ca);
            }
            self.note(&files);
            if let Some(kept) = self.keep(upstream) {
                states.insert(upstream.name.clone(), kept);
                continue;
            }
            let tls = match &upstream.tls {
                None => None,
                Some(tls) => match self.client_tls(upstream, tls) {
                    Ok(tls) => Some(tls),
                    Err(reason) => {
                        let path = format!("upstreams[{index}].tls");
                        self.faults.extend(reason.map(|reason| BuildError { path, reason }));
                        continue;
                    }
                },
            };
            let state = UpstreamState::new(next_owner(), upstream.clone(), tls, &self.nodes);
            if self.previous.is_some() {
                state.begin_anywhere(rand::random::<u64>() as usize);
            }
            states.insert(upstream.name.clone(), Arc::new(state));
        }
        states
    }

    /// Builds the TLS configurations for the origins of all terminating routes.
    fn origins(&mut self) -> Origins {
        let mut origins = Origins::new();
        let routes = self.snapshot.routes.iter().enumerate();
        let actions = routes.flat_map(|(index, route)| route.action.alternatives().iter().map(move |one| (index, one)));
        for (index, action) in actions {
            let Action::Terminate(terminate) = action else { continue };
            if !terminate.speaks_tls() || origins.contains_key(&terminate.origin_ca) {
                continue;
            }
            let tls = match &terminate.origin_ca {
                Some(ca) => {
                    self.note(&[ca]);
                    Roots::load(ca).and_then(|roots| self.origin_tls(terminate, roots))
                }
                None => Roots::system().and_then(|roots| self.origin_tls(terminate, roots)),
            };
            // Missing CA certificates of the host are not an error of the document, because all requests may use
            // `http`.
            if let (Err(error), Some(_)) = (&tls, &terminate.origin_ca) {
                self.fault(format!("routes[{index}].terminate.tls.ca"), error);
            }
            origins.insert(terminate.origin_ca.clone(), tls.map_err(|error| error.to_string()));
        }
        origins
    }

    /// Returns the TLS configuration for origins. If the CA certificates are unchanged, the previous generation's
    /// configuration is reused, with its connections and session tickets.
    fn origin_tls(&self, terminate: &Terminate, roots: Roots) -> Result<OriginTls, tls::TlsError> {
        let known = self.previous.and_then(|previous| previous.origins.get(&terminate.origin_ca)?.as_ref().ok());
        if let Some(known) = known.filter(|known| known.roots == roots) {
            return Ok(known.clone());
        }
        // No client certificate is presented, because an origin must not learn which node sends the request.
        let config = tls::client_config(None, ServerIdentity::Name(roots.clone()), &[b"http/1.1"])?;
        Ok(OriginTls { roots, config })
    }

    /// Returns the upstream's state of the previous generation, if neither its configuration nor a file has changed.
    /// Otherwise returns `None`.
    fn keep(&self, upstream: &Upstream) -> Option<Arc<UpstreamState>> {
        let previous = self.previous?;
        let state = previous.upstreams.get(&upstream.name)?;
        let same_files = || {
            let identity = self.snapshot.identity.as_ref();
            let own = identity.into_iter().flat_map(|files| [&files.cert, &files.key, &files.ca]);
            let all = own.chain(upstream.tls.as_ref().and_then(|tls| tls.ca.as_ref()));
            previous.snapshot.identity == self.snapshot.identity
                && previous.snapshot.revoked == self.snapshot.revoked
                && all.into_iter().all(|file| self.files.get(file) == previous.files.get(file))
        };
        // The QUIC configuration of an upstream contains limits of the document.
        let same_bounds = upstream.protocol != UpstreamProtocol::H3 || previous.snapshot.limits == self.snapshot.limits;
        let is_same = *state.config == *upstream && same_bounds && (upstream.tls.is_none() || same_files());
        is_same.then(|| state.clone())
    }

    /// Builds the TLS configuration for an upstream. The error is `None` if it was already reported.
    fn client_tls(&self, upstream: &Upstream, tls: &UpstreamTls) -> Result<ClientTls, Option<String>> {
        let own = if tls.anonymous { None } else { self.identity.as_ref().map(|identity| &identity.key) };
        let roots = match (&tls.ca, &self.identity) {
            (Some(ca), _) => Roots::load(ca).map_err(|error| Some(error.to_string()))?,
            (None, Some(identity)) => identity.roots.clone(),
            (None, None) if self.lacks_identity() => return Err(None),
            (None, None) => return Err(Some("no CA: neither `ca` nor `identity`".to_owned())),
        };
        let proves_node = tls.ca.is_none() && tls.server_name.is_none();
        let server = if proves_node {
            ServerIdentity::Node(
                roots,
                accepts_nodes(self.overlay.clone(), tls.nodes.clone(), self.snapshot.revoked.clone()),
            )
        } else {
            ServerIdentity::Name(roots)
        };
        let alpn: &[&[u8]] = match upstream.protocol {
            UpstreamProtocol::H1 => &[b"http/1.1"],
            UpstreamProtocol::H2 => &[b"h2"],
            // HTTP/2 over TCP is the fallback if the path blocks QUIC.
            UpstreamProtocol::H3 => &[b"h2"],
            UpstreamProtocol::Auto => &[b"h2", b"http/1.1"],
            UpstreamProtocol::Tcp => &[],
        };
        let over_quic = (upstream.protocol == UpstreamProtocol::H3)
            .then(|| tls::client_config(own, server.clone(), &[quic::ALPN]))
            .transpose()
            .map_err(|error| Some(error.to_string()))?;
        let config = tls::client_config(own, server, alpn).map_err(|error| Some(error.to_string()))?;
        let host = upstream.all().find_map(Endpoint::host).cloned();
        let name = tls.server_name.clone().or(host).unwrap_or_else(|| Arc::from("hermes"));
        let quic = over_quic
            .map(|config| quic::client_config(&config, quic_bounds(&self.snapshot.limits)))
            .transpose()
            .map_err(|error| Some(error.to_string()))?;
        Ok(ClientTls { config, quic, name, proves_node })
    }
}

/// Returns a predicate that accepts the certificate URIs of this overlay's nodes. If `nodes` is not empty, it accepts
/// only the nodes in that list.
fn accepts_nodes(overlay: Arc<str>, nodes: Vec<Arc<str>>, revoked: BTreeSet<Arc<str>>) -> NodePredicate {
    Arc::new(move |uris: &[String]| {
        if uris.iter().any(|uri| revoked.contains(uri.as_str())) {
            return Err(format!("the certificate of the server: {REVOKED}"));
        }
        let ids = uris.iter().filter_map(|uri| parse_spiffe(uri));
        let Some(node) = ids.into_iter().find(|id| id.kind == SpiffeKind::Node && *id.overlay == *overlay) else {
            return Err(format!("the server's certificate has no URI spiffe://{overlay}/node/NAME"));
        };
        if nodes.is_empty() || nodes.iter().any(|name| **name == *node.name) {
            return Ok(());
        }
        Err(format!("the server is node {}, which `tls.node` does not name", node.name))
    })
}
