//! The agent of a managed node: its identity, its document, and the connection to the controller.
//!
//! In: the controller's addresses, a token for the first start, and a directory of the node's own. Out: documents to
//! run, one after the other, each answered with its result; a certificate that is renewed before it expires. The
//! document on disk is always the last one that this node ran successfully. The node starts from it without a
//! controller for as long as its certificate is valid.

pub(crate) mod history;
mod session_health;
mod state_dir;

use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use bytes::Bytes;
use hermes_controller::client::{Client, ClientError, ControllerAddr, ControllerPin, Streaming};
use hermes_controller::control::{EnrolRequest, Issued, Order, RenewRequest, Report};
use hermes_controller::digest::{sha256, sha256_of_file};
use hermes_controller::token::EnrolmentToken;
use hermes_model::snapshot::Role;
use hermes_net::backoff::Backoff;
use hermes_net::outage::{FailureCounts, OutageLog};
use hermes_net::tls::{CertifiedKey, fingerprints};
use hermes_proxy::NodeView;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;

use self::history::History;
use self::session_health::SessionHealth;
pub(crate) use self::state_dir::StateDir;

/// The backoff before a retry of an order that failed because descriptors or memory were exhausted: the shortest and
/// the longest pause.
const ORDER_RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// The backoff before an unreachable controller is dialled again: the first and the longest pause.
const RECONNECT_BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// The pause before a renewal is retried that the controller could not serve.
const RENEWAL_RETRY: Duration = Duration::from_secs(60);
/// The pause after the controller has denied the node, in case the denial is withdrawn.
const DENIED_RETRY_DELAY: Duration = Duration::from_secs(60);
/// A connection that lasts this long counts as successful and resets the backoff.
const STEADY_AFTER: Duration = Duration::from_secs(1);
/// The longest interval between two checks whether the certificate needs renewal.
const RENEWAL_CHECK_INTERVAL: Duration = Duration::from_secs(60);
/// The interval at which sessions are counted; no single event signals a change.
const COUNT_INTERVAL: Duration = Duration::from_secs(1);
/// The shortest interval between two reports of the session count, unless the node drains.
const SESSION_REPORT_INTERVAL: Duration = Duration::from_secs(10);
/// The content of an instruction.
pub(crate) enum Wanted {
    /// Run this document.
    Document(Bytes),
    /// Stop serving: the node no longer belongs to the overlay.
    Nothing,
    /// Keep the running document and load the certificate and CA certificates from their files.
    Identity,
}

/// An instruction for the node, and the channel for its result.
pub(crate) struct Instruction {
    /// The overlay's revision.
    pub(crate) revision: u64,
    /// The content to apply.
    pub(crate) wanted: Wanted,
    done: oneshot::Sender<Result<(), String>>,
}

impl Instruction {
    /// Reports that the instruction is applied, or why not.
    pub(crate) fn answer(self, result: Result<(), String>) {
        // If the connection broke meanwhile, the next one reports the result.
        let _ = self.done.send(result);
    }
}

/// The task that talks to the controller; it ends when this is dropped.
pub(crate) struct Agent {
    instructions: mpsc::Receiver<Instruction>,
    view: watch::Sender<Option<NodeView>>,
    _task: JoinSet<()>,
}

impl Agent {
    /// Enrols the node if needed, and starts to follow the controller.
    ///
    /// # Errors
    /// The node cannot enrol: there is no token, or the controller is unreachable or refuses it.
    pub(crate) async fn start(
        places: Vec<ControllerAddr>,
        home: &StateDir,
        ticket: Option<EnrolmentToken>,
    ) -> anyhow::Result<Self> {
        enrolled(&places, home, ticket).await?;
        let home = home.clone();
        let (instruct, instructions) = mpsc::channel(1);
        let mut task = JoinSet::new();
        let (view, viewed) = watch::channel(None);
        task.spawn(async move { follow(&places, &home, Some(instruct), viewed).await });
        Ok(Self { instructions, view, _task: task })
    }

    /// Hands over a view of the running node: the controller now receives its session count.
    pub(crate) fn observe(&self, view: NodeView) {
        self.view.send_replace(Some(view));
    }

    /// Waits for the next instruction.
    pub(crate) async fn next(&mut self) -> Option<Instruction> {
        self.instructions.recv().await
    }
}

/// Enrols a node that has not enrolled yet.
///
/// # Errors
/// The node cannot enrol: there is no token, or the controller is unreachable or refuses it.
pub(crate) async fn enrolled(
    places: &[ControllerAddr],
    home: &StateDir,
    ticket: Option<EnrolmentToken>,
) -> anyhow::Result<()> {
    // A node whose certificate has expired can only enrol again, with a token.
    if !home.is_enrolled() || (ticket.is_some() && is_expired(home)) {
        let ticket = ticket
            .context("this node has not enrolled yet: give it --token-file or HERMES_TOKEN, from `hermes token create` at the controller")?;
        let request = EnrolRequest { token: ticket.reveal(), request: home.request()? };
        let issued = enrol(places, &ticket, &request).await?;
        home.take(&issued)?;
        tracing::info!(node = issued.node, "enrolled");
    } else if ticket.is_some() {
        tracing::info!("already enrolled; ignoring the token. To enrol again, use an empty --state directory");
    }
    Ok(())
}

/// True if the certificate has expired by this machine's clock, or cannot be read.
fn is_expired(home: &StateDir) -> bool {
    let end = home.identity().ok().and_then(|(own, _)| own.leaf_not_after());
    end.is_none_or(|end| end <= seconds_now())
}

/// The next step for a node with an expired certificate.
const EXPIRED_HINT: &str = ". The node's certificate has expired and cannot be renewed; start the node again with --token-file, from \
                    `hermes token create` at the controller";

/// Keeps a node's certificate and CA certificates current for as long as it is polled. Programs that follow the
/// controller themselves use it.
pub(crate) async fn keep_identity(places: &[ControllerAddr], home: &StateDir) {
    let (_view, viewed) = watch::channel(None);
    follow(places, home, None, viewed).await;
}

/// Tries one controller after the other. The answer of the first that can be reached is final.
async fn enrol(places: &[ControllerAddr], ticket: &EnrolmentToken, request: &EnrolRequest) -> anyhow::Result<Issued> {
    let mut last = None;
    for place in places {
        match Client::connect(place, &ControllerPin::Pin(ticket.pin), None).await {
            Ok(client) => return Ok(client.enrol(request.clone()).await?),
            Err(error) => last = Some(error),
        }
    }
    Err(last.map_or_else(|| anyhow::anyhow!("no controller is named"), Into::into))
}

/// The state that this node reports to its controller.
struct ReportState {
    /// SHA-256 of each trusted CA certificate, and the key identifier of the CA that issued the node's certificate.
    identity: (Vec<Bytes>, Bytes),
    /// Another program runs the node; this one only keeps its identity.
    is_beside: bool,
    running: Bytes,
    tried: u64,
    refused: String,
    program: Bytes,
    view: watch::Receiver<Option<NodeView>>,
    /// The last reported session count, and the time of that report.
    counted: (u64, Instant),
    health: SessionHealth,
    /// Revocations that the node reports, because the controller's store may have lost them.
    history: History,
}

impl ReportState {
    fn sessions(&self) -> u64 {
        self.view.borrow().as_ref().map_or(0, |view| view.open_sessions() as u64)
    }

    /// True if the session count has changed and a report is due.
    fn is_news(&self) -> bool {
        let (told, at) = self.counted;
        let is_draining = self.view.borrow().as_ref().is_some_and(NodeView::is_draining);
        self.sessions() != told && (is_draining || at.elapsed() >= SESSION_REPORT_INTERVAL)
    }

    fn is_other_health(&mut self) -> bool {
        let ended = self.view.borrow().as_ref().map(NodeView::ended_sessions);
        ended.is_some_and(|ended| self.health.tick(ended))
    }

    /// Records that the node now runs with the identity in the files.
    fn identify(&mut self, home: &StateDir) -> anyhow::Result<()> {
        let (own, known) = home.identity()?;
        let ControllerPin::Authorities(authorities) = known else { return Ok(()) };
        let digests = fingerprints(authorities.as_bytes()).map_err(anyhow::Error::msg)?;
        let digests = digests.iter().map(|digest| Bytes::copy_from_slice(digest)).collect();
        self.identity = (digests, own.issuer_key().unwrap_or_default().into());
        Ok(())
    }

    fn report(&mut self) -> Report {
        let sessions = self.sessions();
        self.counted = (sessions, Instant::now());
        Report {
            sessions,
            running: self.running.clone(),
            tried: self.tried,
            refused: self.refused.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            program: self.program.clone(),
            unhealthy: self.health.unhealthy.clone(),
            authorities: self.identity.0.clone(),
            issuer: self.identity.1.clone(),
            identity_only: self.is_beside,
            more: self.history.has_rest(),
            ..Report::default()
        }
    }

    /// The first report of a connection.
    fn first_report(&mut self) -> Report {
        let mut report = self.report();
        self.history.fill_report(&mut report);
        report
    }

    /// A further report, with revoked keys that did not fit into the earlier ones.
    fn further_report(&mut self) -> Report {
        let mut report = self.report();
        self.history.fill_further_report(&mut report);
        report
    }
}

async fn follow(
    places: &[ControllerAddr],
    home: &StateDir,
    instruct: Option<mpsc::Sender<Instruction>>,
    view: watch::Receiver<Option<NodeView>>,
) {
    let program = tokio::task::spawn_blocking(|| sha256_of_file(Path::new("/proc/self/exe")));
    let program = program.await.ok().and_then(Result::ok).unwrap_or_default();
    let running = std::fs::read(home.document()).map(|document| sha256(&document)).unwrap_or_default();
    let counted = (0, Instant::now());
    let (identity, is_beside) = ((Vec::new(), Bytes::new()), instruct.is_none());
    let health = SessionHealth::default();
    let history = History::load(&home.directory).unwrap_or_else(|error| {
        tracing::error!("{error:#}");
        History::unreadable()
    });
    let mut report_state = ReportState {
        identity,
        is_beside,
        running,
        tried: 0,
        refused: String::new(),
        program,
        view,
        counted,
        health,
        history,
    };
    let mut pace = Backoff::new(RECONNECT_BACKOFF.0, RECONNECT_BACKOFF.1);
    let mut outage = OutageLog::default();
    // All controllers serve the same overlay: after a failure the next one is tried.
    for place in places.iter().cycle() {
        pace.due().await;
        let pause = pace.begin();
        let ended = ControlSession::begin(place, home, instruct.as_ref(), &mut report_state).await;
        let ended = match ended {
            Ok(conversation) => {
                let began = Instant::now();
                let ended = conversation.run().await;
                if began.elapsed() >= STEADY_AFTER {
                    // The connection worked for a while, so its end is a new outage.
                    pace = Backoff::new(RECONNECT_BACKOFF.0, RECONNECT_BACKOFF.1);
                    outage.recovered();
                }
                ended
            }
            Err(error) => Err(error),
        };
        match ended {
            Ok(()) if instruct.as_ref().is_some_and(mpsc::Sender::is_closed) => return,
            Ok(()) => report(&mut outage, place, pause, "the controller closed the connection"),
            Err(error) => {
                let next_step = if is_expired(home) { EXPIRED_HINT } else { "" };
                report(&mut outage, place, pause, &format!("{error:#}{next_step}"));
                if error.downcast_ref().is_some_and(ClientError::is_denial) {
                    // The controller no longer accepts the node's key, and the node has no other.
                    tokio::time::sleep(DENIED_RETRY_DELAY).await;
                }
            }
        }
    }
}

/// Logs that a controller is unreachable: the first time, and then at growing intervals.
fn report(outage: &mut OutageLog, place: &ControllerAddr, pause: Duration, reason: &str) {
    let Some(FailureCounts { count, elapsed }) = outage.failed(&place.to_string(), reason) else { return };
    tracing::warn!(
        controller = %place, again_in = ?pause, attempts = count, since = ?elapsed,
        "controller unreachable; still running the last configuration: {reason}"
    );
}

/// A connection to a controller.
struct ControlSession<'a> {
    home: &'a StateDir,
    /// `None`: another program runs the node.
    instruct: Option<&'a mpsc::Sender<Instruction>>,
    report_state: &'a mut ReportState,
    client: Client,
    say: mpsc::Sender<Report>,
    orders: Streaming<Order>,
    renew_at: i64,
    /// The node does not run yet with the identity in its files.
    is_owed: bool,
    /// An order that failed because descriptors or memory were exhausted. The controller does not repeat it, so the
    /// node retries.
    failed: Option<Order>,
    retry: Backoff,
}

impl<'a> ControlSession<'a> {
    async fn begin(
        place: &ControllerAddr,
        home: &'a StateDir,
        instruct: Option<&'a mpsc::Sender<Instruction>>,
        report_state: &'a mut ReportState,
    ) -> anyhow::Result<Self> {
        let (own, known) = home.identity()?;
        report_state.identify(home)?;
        let client = Client::connect(place, &known, Some(&own)).await?;
        let (say, said) = mpsc::channel(4);
        say.send(report_state.first_report()).await?;
        let reports = futures_util::stream::unfold(said, async |mut said| Some((said.recv().await?, said)));
        let orders = client.follow(reports).await?;
        tracing::info!(controller = %place, "under control");
        let retry = Backoff::new(ORDER_RETRY.0, ORDER_RETRY.1);
        Ok(Self {
            home,
            instruct,
            report_state,
            client,
            say,
            orders,
            renew_at: renewal(&own),
            is_owed: false,
            failed: None,
            retry,
        })
    }

    /// Runs the conversation until the connection ends.
    async fn run(mut self) -> anyhow::Result<()> {
        while self.report_state.history.has_rest() {
            self.say.send(self.report_state.further_report()).await?;
        }
        let mut count = tokio::time::interval(COUNT_INTERVAL);
        count.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                order = self.orders.message() => {
                    let order = order.map_err(|status| ClientError::Refused(Box::new(status)))?;
                    let Some(order) = order else { return Ok(()) };
                    self.follow(order).await?;
                    self.say.send(self.report_state.report()).await?;
                }
                () = self.retry.due(), if self.failed.is_some() => {
                    if let Some(order) = self.failed.take() {
                        self.follow(order).await?;
                        self.say.send(self.report_state.report()).await?;
                    }
                }
                _ = count.tick() => {
                    let is_news = self.report_state.is_other_health() | self.report_state.is_news() | self.is_owed;
                    if self.is_owed {
                        self.take_identity().await?;
                    }
                    if is_news {
                        self.say.send(self.report_state.report()).await?;
                    }
                }
                () = tokio::time::sleep(until(self.renew_at).min(RENEWAL_CHECK_INTERVAL)) => {
                    if until(self.renew_at).is_zero() && self.renew().await? {
                        self.take_identity().await?;
                        self.say.send(self.report_state.report()).await?;
                    }
                }
            }
        }
    }

    async fn follow(&mut self, order: Order) -> anyhow::Result<()> {
        if order.is_of_identity() {
            if !order.authorities.is_empty() {
                self.home.trust(&order.authorities)?;
                tracing::info!("CA certificates replaced");
            }
            if order.renew {
                self.renew().await?;
            }
            return self.take_identity().await;
        }
        let Some(instruct) = self.instruct else { return Ok(()) };
        let document = order.document.clone();
        // A newer order supersedes a failed one.
        self.failed = None;
        obey(order.clone(), self.home, instruct, self.report_state).await?;
        if hermes_net::host::tells_of_lack(&self.report_state.refused) {
            let pause = self.retry.begin();
            tracing::warn!(revision = order.revision, again_in = ?pause, "the order failed for want of resources; retrying");
            self.failed = Some(order);
        }
        if is_other_role(&self.home.identity()?.0, &document) {
            self.renew_at = seconds_now();
        }
        Ok(())
    }

    /// Renews the certificate. Returns false if the controller cannot issue one now, for instance while its store is
    /// locked. The certificate stays valid for another third of its lifetime, so the conversation continues.
    async fn renew(&mut self) -> anyhow::Result<bool> {
        let issued = match self.client.renew(RenewRequest { request: self.home.request()? }).await {
            Ok(issued) => issued,
            Err(error) if error.is_for_later() => {
                tracing::warn!(again_in = ?RENEWAL_RETRY, "certificate not renewed: {error}");
                self.renew_at = seconds_now() + RENEWAL_RETRY.as_secs() as i64;
                return Ok(false);
            }
            Err(error) => return Err(error.into()),
        };
        self.home.take(&issued)?;
        self.renew_at = renewal(&self.home.identity()?.0);
        tracing::info!("certificate renewed");
        Ok(true)
    }

    /// Makes the node load the identity from its files, and only then records it for the reports.
    async fn take_identity(&mut self) -> anyhow::Result<()> {
        if let Some(instruct) = self.instruct {
            let (done, answer) = oneshot::channel();
            instruct.send(Instruction { revision: 0, wanted: Wanted::Identity, done }).await?;
            if let Err(why) = answer.await.context("this node is shutting down")? {
                if !self.is_owed {
                    tracing::error!(again_in = ?COUNT_INTERVAL, "the node still runs with its previous identity: {why}");
                }
                self.is_owed = true;
                return Ok(());
            }
        }
        self.is_owed = false;
        self.report_state.identify(self.home)
    }
}

async fn obey(
    order: Order,
    home: &StateDir,
    instruct: &mpsc::Sender<Instruction>,
    report_state: &mut ReportState,
) -> anyhow::Result<()> {
    // Revocations come first: the document must run with them.
    if report_state.history.record(&order)
        && let Err(error) = home.keep(&home.path(history::FILE), &report_state.history.to_bytes())
    {
        tracing::error!("cannot store revoked keys; this node may accept them after its next start: {error:#}");
    }
    let Order { revision, document, .. } = order;
    let (done, answer) = oneshot::channel();
    let wanted = if document.is_empty() { Wanted::Nothing } else { Wanted::Document(document.clone()) };
    instruct.send(Instruction { revision, wanted, done }).await?;
    let result = answer.await.context("this node is shutting down")?;
    report_state.tried = revision;
    report_state.refused = result.err().unwrap_or_default();
    if report_state.refused.is_empty() {
        // If the document cannot be stored, the node runs it anyway and logs that the next start will not.
        report_state.running = if document.is_empty() { Bytes::new() } else { sha256(&document) };
        if let Err(error) = home.keep(&home.document(), &document) {
            tracing::error!("the running document differs from the stored one: {error:#}");
        }
    }
    Ok(())
}

/// True if the document's role differs from the certificate's. The next certificate has the new role.
fn is_other_role(own: &CertifiedKey, document: &[u8]) -> bool {
    #[derive(serde::Deserialize)]
    struct Head {
        #[serde(default)]
        role: Role,
    }
    let Ok(Head { role }) = serde_json::from_slice(document) else { return false };
    let is_standalone = own.uris().iter().any(|uri| uri.starts_with("spiffe://") && uri.ends_with("/role/standalone"));
    is_standalone != (role == Role::Standalone)
}

/// The time of renewal, in seconds since 1970: two thirds of the certificate's lifetime.
fn renewal(own: &CertifiedKey) -> i64 {
    let now = seconds_now();
    match (own.not_before(), own.leaf_not_after()) {
        (Some(from), Some(to)) => from + (to - from) * 2 / 3,
        _ => now,
    }
}

fn until(second: i64) -> Duration {
    Duration::from_secs(u64::try_from(second - seconds_now()).unwrap_or_default())
}

fn seconds_now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}
