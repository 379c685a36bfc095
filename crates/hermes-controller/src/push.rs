//! The controller's side of [`crate::control`]: who may ask, and what each node is told.
//!
//! In: connections whose certificates were verified. Out: certificates, documents at the moment in which they change, and what
//! nodes said about them.
//! Never: another node's document. What a node asks for is found by its certificate, and by nothing that it says.

pub(crate) mod envoy;
mod rotation;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::Stream;
use futures_util::stream::unfold;
use hermes_model::document::scalar::Many;
use hermes_net::outage::{Attempts, OutageLog};
use tokio::sync::watch;
use tonic::{Code, Response, Status, Streaming};

use crate::audit::{Audit, Event};
use crate::control::{EnrolRequest, Issued, Order, RenewRequest, Report};
use crate::controller::{Controller, HELD, Refused, Settled, Watched};
use crate::digest::{hex, sha256};
use crate::document::{Name, ProgramDigest as Program};
use crate::rollout::{Rollout, STEP};
use crate::seen::{Roll, Seen};
use crate::store::Revision;
use crate::token::Ticket;
use crate::trust::Trust;

pub use self::rotation::{Lacking, Progress};

/// Nodes of a wave that are connected have so long to take it.
const WAVE: Duration = Duration::from_secs(30);
/// Other controllers hear something at least so often, and a store that cannot be reached is tried again after this.
const BEAT: Duration = Duration::from_secs(2);
/// The interval between log lines about a held store.
const HELD_LOG_INTERVAL: Duration = Duration::from_secs(3600);
/// A node that follows has to send its first report within this time.
const FIRST_REPORT: Duration = Duration::from_secs(10);
/// What a node says against a document is kept up to here.
const MOST_SAID: usize = 16 << 10;
/// A node says of so many authorities that it trusts them.
const MOST_TRUSTED: usize = 16;

/// Who is at the other end of a connection.
#[derive(Clone, Debug, Default)]
pub struct Peer {
    /// The URIs of its certificate. Empty: it has shown none.
    pub uris: Vec<String>,
    /// The digest of its key. Who is a node or an operator has one that the state has.
    pub key: String,
    /// From where.
    pub from: Option<SocketAddr>,
    /// Until when its certificate lives, in seconds since 1970.
    pub until: i64,
}

/// What nodes are told, and what they say.
pub struct Push {
    controller: Arc<Controller>,
    audit: Arc<Audit>,
    seen: Mutex<Roll>,
    /// Counts what they say.
    said: watch::Sender<u64>,
}

impl Push {
    /// For the nodes of this controller.
    pub fn new(controller: Arc<Controller>, audit: Arc<Audit>) -> Arc<Self> {
        Arc::new(Self { controller, audit, seen: Mutex::default(), said: watch::Sender::new(0) })
    }

    /// Whose documents they are told.
    pub(crate) fn controller(&self) -> &Controller {
        &self.controller
    }

    /// Events left out of the audit log.
    pub(crate) fn audit_left_out(&self) -> u64 {
        self.audit.left_out()
    }

    /// Looks at what nodes have said so far.
    pub fn look<T>(&self, at: impl FnOnce(&Roll) -> T) -> T {
        at(&self.lock())
    }

    /// What one of them has said.
    pub fn seen_of(&self, node: &Name) -> Seen {
        self.lock().get(node).cloned().unwrap_or_default()
    }

    /// Follows that they say something.
    pub fn said(&self) -> watch::Receiver<u64> {
        self.said.subscribe()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Roll> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, node: &Name, change: impl FnOnce(&mut Seen)) {
        self.lock().note(node, change);
        self.said.send_modify(|count| *count += 1);
    }

    /// Tells other controllers what nodes say here, and hears what they say there, for as long as it is polled.
    pub(crate) async fn share(&self) {
        let Some(shared) = self.controller.shared() else { return std::future::pending().await };
        let hear = |heard| {
            self.lock().hear(heard);
            self.said.send_modify(|count| *count += 1);
        };
        let hearing = async {
            let mut outage = OutageLog::default();
            loop {
                let began = tokio::time::Instant::now();
                let heard = shared.hear(&hear).await;
                // It ends only when the store fails.
                if began.elapsed() > BEAT {
                    outage.recovered();
                }
                if let Err(error) = heard
                    && let Some(Attempts { count, elapsed }) = outage.failed("", &error.to_string())
                {
                    tracing::warn!(
                        again_in = ?BEAT, attempts = count, since = ?elapsed,
                        "what nodes say to other controllers is not heard: {error}"
                    );
                }
                tokio::time::sleep(BEAT).await;
            }
        };
        let saying = async {
            let mut said = self.said();
            let mut outage = OutageLog::default();
            loop {
                said.borrow_and_update();
                let unsaid = self.lock().unsaid();
                if let Err(error) = shared.say(unsaid).await {
                    if let Some(Attempts { count, elapsed }) = outage.failed("", &error.to_string()) {
                        tracing::warn!(
                            again_in = ?BEAT, attempts = count, since = ?elapsed,
                            "other controllers do not hear what nodes say here: {error}"
                        );
                    }
                    self.lock().say_all();
                    tokio::time::sleep(BEAT).await;
                    continue;
                }
                outage.recovered();
                let _ = tokio::time::timeout(BEAT, said.changed()).await;
            }
        };
        tokio::join!(hearing, saying);
    }

    /// Records the outcomes of changes that were unknown, for as long as it is polled.
    pub(crate) async fn settle(&self) {
        loop {
            for Settled { by, revision, is_made } in self.controller.settled().await {
                let event = Event { what: "settle", by: Some(&by), revision: Some(revision), ..Event::default() };
                self.audit.tell(match is_made {
                    Some(true) => event,
                    Some(false) => {
                        let why = format!("it was not made: revision {revision} is another change");
                        Event { refused: Some(why), ..event }
                    }
                    None => Event { unknown: Some("the log was compacted before it was read".to_owned()), ..event },
                });
            }
        }
    }

    /// Confirms a restored store once all enrolled nodes have reported what they keep, for as long as it is polled.
    pub(crate) async fn confirm(&self) {
        let (mut said, mut held) = (self.said(), self.controller.held());
        let mut outage = OutageLog::default();
        // When the hold is logged again. `None`: there is none.
        let mut due: Option<tokio::time::Instant> = None;
        loop {
            said.borrow_and_update();
            if !*held.borrow_and_update() {
                due = None;
            } else {
                let known = self.controller.known();
                let is_back = |node: &Name| self.look(|roll| roll.get(node).is_some_and(Seen::is_back));
                if known.missing(is_back).next().is_none() {
                    match self.controller.confirm("controller").await {
                        Ok(revision) => {
                            let about = Some("all nodes that have enrolled are back".to_owned());
                            let by = Some("controller");
                            let revision = Some(revision);
                            self.audit.tell(Event { what: "confirm", by, about, revision, ..Event::default() });
                        }
                        Err(error) => {
                            if let Some(Attempts { count, elapsed }) = outage.failed("", &error.to_string()) {
                                tracing::warn!(
                                    again_in = ?BEAT, attempts = count, since = ?elapsed,
                                    "what was restored is not confirmed: {error}"
                                );
                            }
                            tokio::time::sleep(BEAT).await;
                            continue;
                        }
                    }
                }
                let now = tokio::time::Instant::now();
                if known.is_held() && due.is_none_or(|due| due <= now) {
                    let missing = known.missing(is_back).count();
                    tracing::warn!(revision = known.state.revision, missing, "{HELD}");
                    due = Some(now + HELD_LOG_INTERVAL);
                }
            }
            tokio::select! {
                () = tokio::time::sleep_until(due.unwrap_or_else(tokio::time::Instant::now)), if due.is_some() => {}
                changed = said.changed() => if changed.is_err() { return },
                changed = held.changed() => if changed.is_err() { return },
            }
        }
    }

    /// Gives what is on its way to nodes step by step, for as long as it is polled.
    pub(crate) async fn roll_out(&self) {
        let mut rollout = self.controller.rollout();
        let mut outage = OutageLog::default();
        loop {
            let step = rollout.borrow_and_update().clone();
            if let Some(step) = step {
                tokio::select! {
                    () = self.take(&step, &mut outage) => {}
                    // Another change: its steps are others.
                    changed = rollout.changed() => if changed.is_err() { return },
                }
            } else {
                if let Some(of) = self.controller.known().is_over()
                    && let Err(error) = self.controller.finish("controller", of).await
                {
                    if let Some(Attempts { count, elapsed }) = outage.failed("", &error.to_string()) {
                        tracing::warn!(
                            revision = of, again_in = ?BEAT, attempts = count, since = ?elapsed,
                            "what went out in waves is not over: {error}"
                        );
                    }
                    tokio::time::sleep(BEAT).await;
                    continue;
                }
                outage.recovered();
                if rollout.changed().await.is_err() {
                    return;
                }
            }
        }
    }

    /// Gives the step after this one when its time has come.
    async fn take(&self, step: &Rollout, outage: &mut OutageLog) {
        let Some(settle) = step.settle() else {
            let _ = self.taken(step, STEP).await.inspect_err(|late| tracing::warn!("goes on nevertheless: {late}"));
            tokio::time::sleep(step.linger()).await;
            return self.controller.advance(step.id()).await;
        };
        let (of, number) = step.id();
        let done = match self.judge(step, settle.max(step.linger())).await {
            Ok(()) => self.controller.go_on(step.id()).await,
            Err(why) => {
                let about = Some(format!("revision {of} at step {number}: {why}"));
                self.audit.tell(Event { what: "take-back", by: Some("controller"), about, ..Event::default() });
                self.controller.take_back("controller", of, why).await
            }
        };
        if let Err(error) = done {
            if let Some(Attempts { count, elapsed }) = outage.failed("", &error.to_string()) {
                tracing::warn!(
                    revision = of, again_in = ?BEAT, attempts = count, since = ?elapsed,
                    "what goes out in waves stands still: {error}"
                );
            }
            tokio::time::sleep(BEAT).await;
        } else {
            outage.recovered();
        }
    }

    /// Whether a wave's nodes take it, and go on well for so long; why not.
    async fn judge(&self, step: &Rollout, settle: Duration) -> Result<(), String> {
        let is_there = |node: &Name| self.look(|roll| roll.get(node).is_some_and(|seen| seen.connections > 0));
        // A controller that has just begun knows nobody yet: where all are away they have some time to come. Those that have not
        // enrolled do not.
        let comes_nobody = || {
            let members = &self.controller.known().state.members;
            !step.current().keys().any(|node| members.contains_key(node))
        };
        self.heard(WAVE, || step.current().keys().any(is_there) || comes_nobody()).await;
        let there: Vec<_> = step.current().keys().filter(|node| is_there(node)).collect();
        let were_unwell: BTreeSet<_> = there.iter().filter(|node| !self.seen_of(node).unwell.is_empty()).collect();
        self.taken(step, WAVE).await?;
        if there.is_empty() {
            return Ok(());
        }
        let mut why = None;
        let is_wrong = || {
            // One that is no member any more was sent away.
            let known = self.controller.known();
            let gone = there.iter().find(|node| !is_there(node) && known.state.members.contains_key(**node));
            let gone = gone.map(|node| format!("node {node} has gone since it took revision {}", step.id().0));
            // Who was unwell before may be so for another reason.
            let unwell = || {
                let fallen = |node: &&&Name| !were_unwell.contains(*node) && !self.seen_of(node).unwell.is_empty();
                there.iter().find(fallen).map(|node| format!("node {node} is not well: {}", self.seen_of(node).unwell))
            };
            why = gone.or_else(unwell);
            why.is_some()
        };
        self.heard(settle, is_wrong).await;
        why.map_or(Ok(()), Err)
    }

    /// Waits until this holds of what nodes say, for so long. Whether it does.
    async fn heard(&self, patience: Duration, mut holds: impl FnMut() -> bool) -> bool {
        let mut said = self.said();
        let deadline = tokio::time::Instant::now() + patience;
        loop {
            said.borrow_and_update();
            if holds() {
                return true;
            }
            match tokio::time::timeout_at(deadline, said.changed()).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) | Err(_) => return false,
            }
        }
    }

    /// Waits until the nodes of a step have taken it or are away. Who refuses it, or is silent for so long.
    async fn taken(&self, rollout: &Rollout, patience: Duration) -> Result<(), String> {
        let wanted = rollout.current().iter().map(|(node, document)| (node, hex(&sha256(document))));
        let mut wanted: BTreeMap<&Name, String> = wanted.collect();
        let (of, _) = rollout.id();
        let mut refused = Ok(());
        let is_latest = |node: &Name, seen: &Seen| {
            let document = self.controller.known().watched(node).given.document;
            document.is_some_and(|document| hex(&sha256(&document)) == seen.running)
        };
        let is_over = || {
            self.look(|roll| {
                wanted.retain(|node, digest| {
                    let seen = roll.get(node).filter(|seen| seen.connections > 0 && seen.running != *digest);
                    // Something else may have gone out to it since then, such as whom to believe no more.
                    let seen =
                        seen.filter(|seen| seen.tried < of || !seen.refused.is_empty() || !is_latest(node, seen));
                    let reason = seen.filter(|seen| seen.tried >= of && !seen.refused.is_empty());
                    if let Some(Seen { refused: reason, .. }) = reason {
                        refused = Err(format!("node {node} refuses it: {reason}"));
                    }
                    seen.is_some() && reason.is_none()
                });
            });
            wanted.is_empty() || (refused.is_err() && rollout.settle().is_some())
        };
        if self.heard(patience, is_over).await {
            return refused;
        }
        let first = wanted.keys().next().map(ToString::to_string).unwrap_or_default();
        Err(format!("{} nodes have said nothing for {patience:?}, {first} among them", wanted.len()))
    }

    /// A node's first certificate.
    pub(crate) async fn enrol(&self, peer: &Peer, request: EnrolRequest) -> Result<Response<Issued>, Status> {
        let event = Event { what: "enrol", from: peer.from, ..Event::default() };
        let ticket: Ticket = request.token.parse().map_err(|error: String| {
            self.audit.tell(Event { refused: Some(error.clone()), ..event.clone() });
            Status::new(Code::PermissionDenied, error)
        })?;
        let event = Event { about: Some(format!("token {}", ticket.id)), ..event };
        let (node, issued) = match self.controller.enrol(&ticket, &request.request).await {
            Ok(enrolled) => enrolled,
            Err(refused) => {
                self.audit.tell(event.failed(&refused));
                return Err(status(&refused));
            }
        };
        self.audit.tell(Event { by: Some(&format!("node/{node}")), ..event });
        Ok(Response::new(Issued {
            node: node.to_string(),
            certificate: issued.certificate,
            authorities: issued.authorities,
        }))
    }

    /// The next one.
    pub(crate) fn renew(&self, peer: &Peer, request: &RenewRequest) -> Result<Response<Issued>, Status> {
        let node = self.node_of(peer)?;
        if self.controller.known().is_held() {
            return Err(Status::unavailable(HELD));
        }
        let issued = self.controller.renew(&node, &request.request).map_err(|refused| {
            let by = format!("node/{node}");
            let event = Event { what: "renew", by: Some(&by), from: peer.from, ..Event::default() };
            self.audit.tell(Event { refused: Some(refused.to_string()), ..event });
            status(&refused)
        })?;
        if let Ok(facts) = crate::ca::facts(&issued.certificate) {
            self.note(&node, |seen| seen.certificate_until = facts.until);
        }
        Ok(Response::new(Issued {
            node: node.to_string(),
            certificate: issued.certificate,
            authorities: issued.authorities,
        }))
    }

    /// Tells a node what it is to run, whenever that is something else than it says that it runs.
    pub(crate) async fn follow(
        self: Arc<Self>,
        peer: &Peer,
        mut reports: Streaming<Report>,
    ) -> Result<Response<impl Stream<Item = Result<Order, Status>> + use<>>, Status> {
        let is_node = match self.node_of(peer) {
            Err(refused) if peer.uris.is_empty() => return Err(refused),
            other => other,
        };
        let first = tokio::time::timeout(FIRST_REPORT, reports.message()).await;
        let first = first.map_err(|_| Status::deadline_exceeded("say first what you run"))??;
        let first = first.ok_or_else(|| Status::invalid_argument("say first what you run"))?;
        // Otherwise a revision that another controller has written would count as lost, and the node would get an older
        // document than it has. A false claim costs one read of the store.
        self.controller.catch_up_with(first.tried.max(first.latest)).await.map_err(|error| {
            Status::unavailable(format!(
                "this controller is behind what the node has, and cannot read its store: {error}"
            ))
        })?;
        // The proofs vouch for revocations, whatever the node's state is by now.
        let member = is_node.as_ref().ok().map(|node| (node, peer.key.as_str()));
        let recalled = self.controller.recall(member, &first).await.map_err(|refused| status(&refused))?;
        recalled.into_iter().for_each(|event| self.audit.tell(event));
        is_node?;
        // The recovered revocations may have removed this node.
        let node = self.node_of(peer)?;
        let presence = match first.identity_only {
            true => Presence::beside(self.clone(), node.clone(), peer),
            false => Presence::begin(self.clone(), node.clone(), peer),
        };
        presence.hear(&first);
        let following = Following {
            trust: self.controller.trust(),
            identity: Identity::of(&first),
            told: (BTreeSet::new(), String::new()),
            held: self.controller.held(),
            programs: self.controller.programs(),
            program: hex(&first.program[..first.program.len().min(64)]),
            is_unlisted: false,
            watched: self.controller.watch(&node),
            key: peer.key.clone(),
            running: first.running,
            ordered: None,
            is_ended: false,
            reports,
            presence,
        };
        Ok(Response::new(unfold(following, async |mut following| {
            let item = following.next().await?;
            following.is_ended = item.is_err();
            Some((item, following))
        })))
    }

    /// Which node that is.
    pub(crate) fn node_of(&self, peer: &Peer) -> Result<Name, Status> {
        let known = self.controller.known();
        let overlay = known.state.catalog.overlay().map(|(name, _)| format!("spiffe://{name}/node/"));
        let named =
            overlay.and_then(|overlay| peer.uris.iter().find_map(|uri| uri.strip_prefix(&overlay)?.parse().ok()));
        let Some(node): Option<Name> = named else {
            return Err(Status::unauthenticated(
                "only nodes may ask this: show the certificate of one of this overlay",
            ));
        };
        if known.state.members.get(&node).is_none_or(|member| member.key != peer.key) {
            let by = format!("node/{node}");
            let event = Event { what: "follow", by: Some(&by), from: peer.from, ..Event::default() };
            self.audit.tell(Event { refused: Some(EXPELLED.to_owned()), ..event });
            return Err(Status::permission_denied(EXPELLED));
        }
        Ok(node)
    }
}

pub(crate) const EXPELLED: &str =
    "this node is no member any more, or has enrolled anew; enrol it with a token and an empty --state";

/// That a node is there, for as long as this lives.
pub(crate) struct Presence {
    push: Arc<Push>,
    node: Name,
    /// It is another program, beside the node.
    is_beside: bool,
}

impl Presence {
    pub(crate) fn begin(push: Arc<Push>, node: Name, peer: &Peer) -> Self {
        push.note(&node, |seen| {
            seen.connections += 1;
            connected(seen, peer);
        });
        Self { push, node, is_beside: false }
    }

    fn beside(push: Arc<Push>, node: Name, peer: &Peer) -> Self {
        push.note(&node, |seen| {
            seen.companions += 1;
            connected(seen, peer);
        });
        Self { push, node, is_beside: true }
    }

    pub(crate) fn hear(&self, report: &Report) {
        let Report { running, tried, refused, version, program, sessions, unwell, .. } = report;
        let said = Identity::of(report);
        self.push.note(&self.node, |seen| {
            seen.has_reported = !report.more;
            // Who says nothing of that leaves it as it is: Envoy, beside which somebody else does.
            if !said.authorities.is_empty() {
                (seen.authorities, seen.issuer) = (said.authorities, said.issuer);
            }
            if self.is_beside {
                return;
            }
            *seen = Seen {
                connections: seen.connections,
                companions: seen.companions,
                has_reported: seen.has_reported,
                authorities: std::mem::take(&mut seen.authorities),
                issuer: std::mem::take(&mut seen.issuer),
                running: hex(&running[..running.len().min(64)]),
                tried: *tried,
                refused: shortened(refused),
                unwell: shortened(unwell),
                version: crate::audit::visible(&version.chars().take(64).collect::<String>()),
                program: hex(&program[..program.len().min(64)]),
                sessions: *sessions,
                last_seen: crate::controller::now() / 1000,
                certificate_until: seen.certificate_until,
                from: std::mem::take(&mut seen.from),
            };
        });
    }
}

/// Records what a connection shows of its node.
fn connected(seen: &mut Seen, peer: &Peer) {
    (seen.last_seen, seen.certificate_until) = (crate::controller::now() / 1000, peer.until);
    seen.from = peer.from.map(|from| from.ip().to_canonical().to_string()).unwrap_or_default();
}

/// Whom a node trusts, and who issued its certificate, as it says.
#[derive(Debug, Default)]
struct Identity {
    authorities: BTreeSet<String>,
    issuer: String,
}

impl Identity {
    fn of(report: &Report) -> Self {
        let digest = |bytes: &Bytes| hex(&bytes[..bytes.len().min(64)]);
        let authorities = report.authorities.iter().take(MOST_TRUSTED).map(digest).collect();
        Self { authorities, issuer: digest(&report.issuer) }
    }
}

impl Presence {
    /// Its program is none that the overlay lists: it goes on with what it has, and gets nothing new.
    fn unlisted(&self, program: &str, revision: Revision, is_news: bool) {
        let refused = format!("its program ({program}) is none of `programs` of the overlay");
        if is_news {
            let by = format!("node/{}", self.node);
            let event = Event { what: "follow", by: Some(&by), refused: Some(refused.clone()), ..Event::default() };
            self.push.audit.tell(event);
        }
        let seen = self.push.seen_of(&self.node);
        if seen.refused != refused || seen.tried != revision {
            self.push.note(&self.node, |seen| (seen.refused, seen.tried) = (refused, revision));
        }
    }
}

/// What is kept of what a node says.
fn shortened(text: &str) -> String {
    let end = text.floor_char_boundary(MOST_SAID);
    let text = if end < text.len() { format!("{} ...", &text[..end]) } else { text.to_owned() };
    crate::audit::visible(&text)
}

impl Drop for Presence {
    fn drop(&mut self) {
        self.push.note(&self.node, |seen| {
            let count = if self.is_beside { &mut seen.companions } else { &mut seen.connections };
            *count = count.saturating_sub(1);
            seen.last_seen = crate::controller::now() / 1000;
        });
    }
}

/// One node that follows.
struct Following {
    trust: watch::Receiver<Arc<Trust>>,
    /// What it says of that.
    identity: Identity,
    /// Whom it was told last to trust, and whose certificate to get.
    told: (BTreeSet<String>, String),
    held: watch::Receiver<bool>,
    programs: watch::Receiver<Many<Program>>,
    /// SHA-256 of what it runs, as it says, in hex.
    program: String,
    /// That is none of them, which has been said.
    is_unlisted: bool,
    watched: watch::Receiver<Watched>,
    key: String,
    /// The digest of what it runs.
    running: Bytes,
    /// The digest of what it was told last: it is not told again what it refuses.
    ordered: Option<Bytes>,
    is_ended: bool,
    reports: Streaming<Report>,
    presence: Presence,
}

impl Following {
    /// The next order, once there is one. `None`: the node is gone.
    async fn next(&mut self) -> Option<Result<Order, Status>> {
        loop {
            if self.is_ended {
                return None;
            }
            if let Some(order) = self.order() {
                return Some(order);
            }
            tokio::select! {
                report = self.reports.message() => match report {
                    Ok(Some(report)) => {
                        if let Err(status) = self.recall(&report).await {
                            return Some(Err(status));
                        }
                        self.presence.hear(&report);
                        self.identity = Identity::of(&report);
                        self.running = report.running;
                    }
                    Ok(None) | Err(_) => return None,
                },
                changed = self.watched.changed() => changed.ok()?,
                changed = self.programs.changed() => changed.ok()?,
                changed = self.held.changed() => changed.ok()?,
                changed = self.trust.changed() => changed.ok()?,
            }
        }
    }

    /// Recovers revocations of a further report: the first one has no room for all.
    async fn recall(&self, report: &Report) -> Result<(), Status> {
        if report.revoked.is_empty() {
            return Ok(());
        }
        let Presence { push, node, .. } = &self.presence;
        let recalled = push.controller.recall(Some((node, &self.key)), report).await;
        recalled.map_err(|refused| status(&refused))?.into_iter().for_each(|event| push.audit.tell(event));
        Ok(())
    }

    /// What it is to be told now.
    fn order(&mut self) -> Option<Result<Order, Status>> {
        let watched = self.watched.borrow_and_update().clone();
        if watched.key.as_ref() != Some(&self.key) {
            // First it is told to serve nobody.
            if self.ordered.replace(Bytes::new()) == Some(Bytes::new()) {
                return Some(Err(Status::permission_denied(EXPELLED)));
            }
            return Some(Ok(Order { revision: watched.given.since, ..Order::default() }));
        }
        if *self.held.borrow_and_update() {
            return None;
        }
        if let Some(order) = self.identify() {
            return Some(Ok(order));
        }
        if watched.given.document.is_none() && self.is_uncompiled() {
            return None;
        }
        if self.presence.is_beside {
            return None;
        }
        let is_listed = {
            let programs = self.programs.borrow_and_update();
            programs.is_empty() || programs.iter().any(|program| program.is(&self.program))
        };
        if !is_listed {
            self.presence.unlisted(&self.program, watched.given.since, !std::mem::replace(&mut self.is_unlisted, true));
            return None;
        }
        self.is_unlisted = false;
        let document = watched.given.document.unwrap_or_default();
        let wanted = if document.is_empty() { Bytes::new() } else { sha256(&document) };
        if self.ordered.as_ref() == Some(&wanted) || (self.ordered.is_none() && self.running == wanted) {
            return None;
        }
        self.ordered = Some(wanted);
        let order = Order { revision: watched.given.since, document, ..Order::default() };
        Some(Ok(self.presence.push.controller.with_history(order)))
    }

    /// It is a node, and this controller could make no document of what another version of it has taken: it keeps what it has.
    fn is_uncompiled(&self) -> bool {
        let known = self.presence.push.controller.known();
        known.state.catalog.node(&self.presence.node).is_some() && known.document(&self.presence.node).is_none()
    }

    /// What it is to trust now, and then whose certificate it is to have.
    fn identify(&mut self) -> Option<Order> {
        let trust = self.trust.borrow_and_update().clone();
        let (said, told) = (&self.identity, &mut self.told);
        if said.authorities.is_empty() {
            return None;
        }
        if said.authorities != trust.fingerprints {
            // What it cannot do it is not told time after time.
            let is_news = told.0 != trust.fingerprints;
            told.0.clone_from(&trust.fingerprints);
            return is_news.then(|| Order { authorities: trust.authorities.clone(), ..Order::default() });
        }
        told.0.clear();
        let is_news = said.issuer != trust.issuer && told.1 != trust.issuer;
        if is_news {
            told.1.clone_from(&trust.issuer);
        } else if said.issuer == trust.issuer {
            told.1.clear();
        }
        is_news.then(|| Order { renew: true, ..Order::default() })
    }
}

/// As gRPC says it.
fn status(refused: &Refused) -> Status {
    let code = match refused {
        Refused::Faults(_) => Code::InvalidArgument,
        Refused::Conflict { .. } | Refused::Busy(_) | Refused::Turn | Refused::Unready(_) => Code::Aborted,
        Refused::Unusable(_) => Code::InvalidArgument,
        Refused::Denied(_) => Code::PermissionDenied,
        Refused::Absent(_) | Refused::Unknown(_) => Code::NotFound,
        Refused::Store(_) => Code::Unavailable,
    };
    Status::new(code, refused.to_string())
}
