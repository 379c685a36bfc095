//! Both variants of xDS on the controller's port: delta, and state of the world.
//!
//! In: streams of Envoys, authenticated by their certificates. Out: each Envoy's own resources, whenever they change,
//! and its status, as for any other node.
//! Never: another node's resources, whatever an Envoy calls itself; or a stream that outlives the node's membership.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bytes::Bytes;
use envoy_types::pb::envoy::config::core::v3::{Node as Envoy, node::UserAgentVersionType};
pub(crate) use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest as DeltaRequest, DeltaDiscoveryResponse as DeltaResponse, DiscoveryRequest as SotwRequest,
    DiscoveryResponse as SotwResponse, Resource,
};
use envoy_types::pb::google::protobuf::value::Kind as Scalar;
use futures_util::Stream;
use futures_util::stream::unfold;
use hermes_model::document::Document;
use tokio::sync::watch;
use tonic::{Response, Status, Streaming};

use super::super::{ConnectedNode, EXPELLED, Peer, Push};
use super::session::{Kind, Session, UpdateOutcome, WantedResources, XdsRequest, XdsResponse};
use crate::compile::envoy::{DIRECTORY, EnvoyIdentity, VersionedResource, nothing, resources};
use crate::control::Report;
use crate::controller::{HELD, NodeUpdates, StateView};
use crate::digest::sha256;
use crate::document::{Name, Program};
use crate::trust::Trust;

/// The maximum length of the directory's path, in bytes.
const MAX_PATH: usize = 4096;

/// A variant of the xDS protocol: delta, or state of the world.
pub(crate) trait XdsVariant: Send + 'static {
    type Request: Send + 'static;
    type Response;
    fn node(request: &mut Self::Request) -> Option<Envoy>;
    fn kind(request: &Self::Request) -> Option<Kind>;
    fn heard(request: Self::Request) -> XdsRequest;
    fn said(said: XdsResponse) -> Self::Response;
}

/// Delta xDS: responses carry the differences.
pub(crate) struct Delta;
/// State of the world: responses carry all resources.
pub(crate) struct StateOfTheWorld;

impl XdsVariant for Delta {
    type Request = DeltaRequest;
    type Response = DeltaResponse;

    fn node(request: &mut DeltaRequest) -> Option<Envoy> {
        request.node.take()
    }

    fn kind(request: &DeltaRequest) -> Option<Kind> {
        Kind::of(&request.type_url)
    }

    fn heard(request: DeltaRequest) -> XdsRequest {
        XdsRequest {
            nonce: request.response_nonce,
            refused: request.error_detail.map(|status| status.message),
            subscribe: request.resource_names_subscribe,
            unsubscribe: request.resource_names_unsubscribe,
            is_sotw: false,
            has: request.initial_resource_versions.into_iter().collect(),
        }
    }

    fn said(said: XdsResponse) -> DeltaResponse {
        let resource = |(name, held): (String, VersionedResource)| Resource {
            name,
            version: held.version,
            resource: held.body,
            ..Resource::default()
        };
        DeltaResponse {
            system_version_info: said.version,
            resources: said.changed.into_iter().map(resource).collect(),
            type_url: said.kind.url().to_owned(),
            removed_resources: said.removed,
            nonce: said.nonce,
            ..DeltaResponse::default()
        }
    }
}

impl XdsVariant for StateOfTheWorld {
    type Request = SotwRequest;
    type Response = SotwResponse;

    fn node(request: &mut SotwRequest) -> Option<Envoy> {
        request.node.take()
    }

    fn kind(request: &SotwRequest) -> Option<Kind> {
        Kind::of(&request.type_url)
    }

    fn heard(request: SotwRequest) -> XdsRequest {
        XdsRequest {
            nonce: request.response_nonce,
            refused: request.error_detail.map(|status| status.message),
            subscribe: request.resource_names,
            unsubscribe: Vec::new(),
            is_sotw: true,
            has: BTreeMap::new(),
        }
    }

    fn said(said: XdsResponse) -> SotwResponse {
        SotwResponse {
            version_info: said.version,
            resources: said.all.into_values().filter_map(|held| held.body).collect(),
            type_url: said.kind.url().to_owned(),
            nonce: said.nonce,
            ..SotwResponse::default()
        }
    }
}

/// Serves an Envoy for as long as it is a node of this overlay.
pub(crate) async fn serve<F: XdsVariant>(
    push: Arc<Push>,
    peer: &Peer,
    mut requests: Streaming<F::Request>,
) -> Result<Response<impl Stream<Item = Result<F::Response, Status>> + use<F>>, Status> {
    let node = push.node_of(peer)?;
    if push.controller().view().is_held() {
        return Err(Status::unavailable(HELD));
    }
    let silent = || Status::invalid_argument("the first request must name the node and a resource type");
    let mut first = requests.message().await?.ok_or_else(silent)?;
    let envoy = F::node(&mut first).ok_or_else(silent)?;
    let directory = directory(&envoy).ok_or_else(|| {
        let message = format!("missing node metadata {DIRECTORY}: start Envoy with the file that `hermes envoy` wrote");
        Status::invalid_argument(message)
    })?;
    let presence = ConnectedNode::begin(push.clone(), node.clone(), peer);
    let mut serving = Serving::<F> {
        watched: push.controller().watch(&node),
        report: Report { version: version(&envoy), ..Report::default() },
        key: peer.key.clone(),
        trust: push.controller().trust(),
        held: push.controller().held(),
        revoked: Default::default(),
        revocations: String::new(),
        session: Session::new(WantedResources::default()),
        is_expelled: false,
        is_ended: false,
        push,
        node,
        directory,
        requests,
        presence,
    };
    serving.presence.update(&serving.report);
    serving.aim()?;
    serving.receive(first);
    Ok(Response::new(unfold(serving, async |mut serving| {
        let item = serving.next().await?;
        serving.is_ended = item.is_err();
        Some((item, serving))
    })))
}

/// The stream of one Envoy.
struct Serving<F: XdsVariant> {
    push: Arc<Push>,
    node: Name,
    watched: watch::Receiver<NodeUpdates>,
    key: String,
    directory: String,
    requests: Streaming<F::Request>,
    session: Session,
    trust: watch::Receiver<Arc<Trust>>,
    held: watch::Receiver<bool>,
    /// The revoked keys and the CAs for which the revocation lists were issued.
    revoked: (BTreeSet<String>, String),
    revocations: String,
    /// The status of the Envoy.
    report: Report,
    /// True if the node was revoked: the Envoy receives empty resources, and then the stream ends.
    is_expelled: bool,
    is_ended: bool,
    presence: ConnectedNode,
}

impl<F: XdsVariant> Serving<F> {
    /// Waits for the next response. Returns `None` if the Envoy disconnected.
    async fn next(&mut self) -> Option<Result<F::Response, Status>> {
        loop {
            if self.is_ended {
                return None;
            }
            if let Some(said) = self.session.next() {
                return Some(Ok(F::said(said)));
            }
            if self.is_expelled {
                return Some(Err(Status::permission_denied(EXPELLED)));
            }
            tokio::select! {
                request = self.requests.message() => match request {
                    Ok(Some(request)) => self.receive(request),
                    Ok(None) | Err(_) => return None,
                },
                changed = async { tokio::select! {
                    changed = self.watched.changed() => changed,
                    changed = self.trust.changed() => changed,
                    changed = self.held.changed() => changed,
                } } => {
                    changed.ok()?;
                    if let Err(status) = self.aim() {
                        return Some(Err(status));
                    }
                }
            }
        }
    }

    fn receive(&mut self, request: F::Request) {
        let Some(kind) = F::kind(&request) else { return };
        let Some(verdict) = self.session.receive(kind, F::heard(request)) else { return };
        let goal = self.session.goal();
        match verdict {
            UpdateOutcome::Runs => (self.report.running, self.report.refused) = (goal.digest.clone(), String::new()),
            UpdateOutcome::Refused(why) => self.report.refused = why,
        }
        self.report.tried = goal.revision;
        self.presence.update(&self.report);
    }

    /// Issues revocation lists only if their content changes: new bytes would make Envoy close all connections.
    fn look_for_revoked(&mut self, view: &StateView) {
        let trust = self.trust.borrow_and_update().clone();
        let keys: BTreeSet<_> = view.state.catalog.revoked().map(|one| one.key.clone()).collect();
        let basis = (keys, trust.issuers.clone());
        if self.revoked != basis {
            self.revocations = self.push.controller().revocations(view);
            self.revoked = basis;
        }
    }

    /// Sets the wanted resources of the session to those of the current document.
    fn aim(&mut self) -> Result<(), Status> {
        let watched = self.watched.borrow_and_update().clone();
        let revision = watched.given.since;
        self.is_expelled = watched.key.as_ref() != Some(&self.key);
        let is_held = *self.held.borrow_and_update();
        if is_held && !self.is_expelled {
            self.trust.borrow_and_update();
            return Ok(());
        }
        let is_node = self.push.controller().view().state.catalog.node(&self.node).is_some();
        if watched.given.document.is_none() && is_node && !self.is_expelled {
            // This version cannot compile a document that another version accepted: the Envoy keeps its resources.
            return Ok(());
        }
        let Some(document) = watched.given.document.filter(|_| !self.is_expelled) else {
            self.session.aim(WantedResources { revision, digest: Bytes::new(), resources: nothing() });
            return Ok(());
        };
        let view = self.push.controller().view();
        let catalog = &view.state.catalog;
        if catalog.node(&self.node).is_none_or(|node| node.runs != Program::Envoy) {
            return Err(Status::failed_precondition(format!(
                "{} runs Hermes: set runs: envoy in its document, or start `hermes proxy` there",
                self.node
            )));
        }
        let overlay = catalog.overlay().map(|(name, _)| name.to_string()).unwrap_or_default();
        self.look_for_revoked(&view);
        let identity = EnvoyIdentity { overlay: &overlay, directory: &self.directory, revocations: &self.revocations };
        let digest = sha256(&document);
        let parsed = serde_json::from_slice::<Document>(&document).map_err(|error| error.to_string());
        let made = parsed.and_then(|document| {
            let lines = |problems: Vec<hermes_model::Problem>| {
                problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
            };
            resources(&document, identity).map_err(lines)
        });
        match made {
            Ok(resources) => self.session.aim(WantedResources { revision, digest, resources }),
            // The Envoy keeps its resources: another version of the controller accepted this document.
            Err(why) => {
                (self.report.refused, self.report.tried) = (why, revision);
                self.presence.update(&self.report);
            }
        }
        Ok(())
    }
}

/// The directory of the Envoy's identity files. Only this Envoy receives the value back, so any value is safe.
fn directory(envoy: &Envoy) -> Option<String> {
    match &envoy.metadata.as_ref()?.fields.get(DIRECTORY)?.kind {
        Some(Scalar::StringValue(path)) if path.len() <= MAX_PATH && path.starts_with('/') => Some(path.clone()),
        _ => None,
    }
}

fn version(envoy: &Envoy) -> String {
    let name = &envoy.user_agent_name;
    match &envoy.user_agent_version_type {
        Some(UserAgentVersionType::UserAgentVersion(version)) => format!("{name} {version}"),
        Some(UserAgentVersionType::UserAgentBuildVersion(build)) => {
            let version = build.version.unwrap_or_default();
            format!("{name} {}.{}.{}", version.major_number, version.minor_number, version.patch)
        }
        None => name.clone(),
    }
}
