//! The dialler of custody channels to neighbours.
//!
//! In: upstreams of routes with `custody`, and whether records are due to or expected from their endpoints. Out: a
//! channel to each endpoint while that holds. No exponential backoff decides when a link is tried: while a channel is
//! wanted and the link is down, an attempt starts every [`BEACON`], and the first answered attempt shows that the link
//! is up.
//!
//! A TCP connection is disposable: bytes that are not acknowledged within [`OUTAGE_AFTER`] are abandoned with it, and the next
//! connection continues at the offset that the peer acknowledged. A QUIC connection survives outages: a datagram each
//! [`BEACON`] shows both ends when an outage has ended, and what was lost. Each reason of failed attempts is counted
//! once, and logged once exchanges have waited long (`dialer/wait.rs`).

mod path;

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::future::poll_fn;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use hermes_custody::channel_wait::{LogEvent, Wait};
use hermes_model::snapshot::UpstreamProtocol;
use hermes_net::tcp::{AckMonitor, bound_backoff};
use hermes_net::{Io, dial, quic, tls};
use hermes_wire::custody as wire;
use http::{HeaderValue, Method, Request, StatusCode, Uri};
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior};

use self::path::Path;
use super::channel::{Channel, PATH_NAME};
use super::link::Link;
use crate::worker::Worker;
use hermes_custody::contact_plan::{self, ContactPlan, since_1970};
use hermes_custody::service::CustodyService;
use hermes_outbound::generation::kept_bounds;
use hermes_outbound::outbound::connect::{Destination, addresses, count};
use hermes_outbound::outbound::exchange::{self, ExchangeContext};
use hermes_outbound::outbound::pool::{ConnectSpec, Lease, Pool, TunnelLease};
use hermes_outbound::upstream::UpstreamState;
use hermes_transport::error::Error;
use hermes_transport::stream::ByteStream;

/// The interval of attempts while the link is down: at 10 Mbit/s they take 0.3 % of its capacity.
const BEACON: Duration = Duration::from_millis(20);
/// The timeout of one attempt: a round trip over the longest path.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(1);
/// Bytes that are unacknowledged for this time plus [`OUTAGE_ROUND_TRIPS`] round trips were lost in an outage.
const OUTAGE_AFTER: Duration = Duration::from_millis(100);
const OUTAGE_ROUND_TRIPS: u32 = 3;
/// A channel that no exchange needs closes after this time. The need is checked at the same interval.
const UNWANTED_CHANNEL_TIMEOUT: Duration = Duration::from_secs(10);
const UNWANTED_POLL_INTERVAL: Duration = Duration::from_secs(1);
/// The first timeout for TLS and the head of the channel. It doubles after each failure, up to the maximum.
const FIRST_START_TIMEOUT: Duration = Duration::from_millis(500);
const MAX_START_TIMEOUT: Duration = Duration::from_secs(8);
/// The pause after a refusal.
const REFUSED_RETRY_DELAY: Duration = Duration::from_millis(500);
const UNWANTED_ANY_MORE: &str = "no longer needed";
/// The interval of attempts over QUIC: its first packet is 1,200 bytes long.
const QUIC_BEACON: Duration = Duration::from_millis(50);
/// The additional wait for QUIC once TCP has answered.
const HEAD_START: Duration = Duration::from_millis(500);
/// The idle timeout of a QUIC connection, through outages; the peer must agree to it.
const QUIC_IDLE_TIMEOUT: Duration = Duration::from_secs(600);
/// The pause after a failed DNS resolution.
const RESOLVE_RETRY_DELAY: Duration = Duration::from_secs(1);

/// The diallers of a worker, by the endpoint's label.
#[derive(Default)]
pub(crate) struct ChannelDialers(HashMap<Arc<str>, RunningDialer>);

struct RunningDialer {
    upstream: u64,
    /// Dropping the sender stops the dialler.
    _stop: watch::Sender<()>,
}

impl ChannelDialers {
    /// Stops dialling, and closes the channels.
    pub(crate) fn stop_all(&mut self) {
        self.0.clear();
    }

    /// Follows the running document. Endpoints are distributed over the workers.
    pub(crate) fn follow(&mut self, worker: &Rc<Worker>) {
        if worker.is_draining() {
            return;
        }
        let generation = worker.generation();
        let names: HashSet<&Arc<str>> =
            generation.snapshot.routes.iter().filter_map(|route| route.custody_of()).collect();
        let mut wanted: Vec<_> = names.into_iter().filter_map(|name| generation.upstream(name)).collect();
        wanted.sort_by(|one, other| one.config.name.cmp(&other.config.name));
        let endpoints =
            wanted.into_iter().flat_map(|state| (0..state.endpoints.len()).map(move |index| (state, index)));
        let by_label: HashMap<_, _> = endpoints
            .enumerate()
            .map(|(number, (state, index))| (&state.endpoints[index].label, (number, state, index)))
            .collect();
        let running = &mut self.0;
        // Bytes in custody for an endpoint that the document no longer names are still delivered.
        running.retain(|label, kept| match by_label.get(label) {
            Some((_, state, _)) => state.id == kept.upstream,
            None => worker.services.custody.is_wanted(label),
        });
        for (label, (number, state, index)) in by_label {
            if number % worker.shared.workers.max(1) != worker.number || running.contains_key(label) {
                continue;
            }
            let stop = watch::Sender::new(());
            let (dialer, mut stopped) = (ChannelDialer::new(worker, state, index), stop.subscribe());
            worker.spawn(async move {
                tokio::select! {
                    () = dialer.keep() => {}
                    _ = stopped.changed() => {}
                }
            });
            running.insert(label.clone(), RunningDialer { upstream: state.id, _stop: stop });
        }
    }
}

/// The dialler of one endpoint.
struct ChannelDialer {
    worker: Rc<Worker>,
    office: Arc<CustodyService>,
    upstream: Arc<UpstreamState>,
    index: usize,
    /// The endpoint's label, which is also the neighbour's name in the engine.
    label: Arc<str>,
    /// The QUIC configuration, if the upstream uses QUIC.
    quic: Option<quic::ClientConfig>,
    /// The contact history of the link.
    contact: Rc<RefCell<ContactPlan>>,
    /// The log state while there is no channel.
    wait: RefCell<Wait>,
    /// The last channel used TCP, because QUIC did not get through.
    is_fallback: Cell<bool>,
}

/// A connection that was answered.
enum Found {
    Quic(quic::Connection),
    Tcp(tokio::net::TcpStream),
}

impl ChannelDialer {
    fn new(worker: &Rc<Worker>, upstream: &Arc<UpstreamState>, index: usize) -> Self {
        let (office, label) = (worker.services.custody.clone(), upstream.endpoints[index].label.clone());
        let quic = quic_config(worker, upstream);
        let (worker, upstream) = (worker.clone(), upstream.clone());
        let (contact, wait, is_fallback) = Default::default();
        Self { worker, office, upstream, index, label, quic, contact, wait, is_fallback }
    }

    async fn keep(self) {
        let mut within = FIRST_START_TIMEOUT;
        loop {
            poll_fn(|cx| self.office.poll_wanted(cx, &self.label)).await;
            let began = Instant::now();
            match self.channel(within).await {
                Ok(why) => {
                    within = FIRST_START_TIMEOUT;
                    tracing::debug!(peer = %self.label, why, "a custody channel was closed");
                }
                Err(error) => {
                    within = (2 * within).min(MAX_START_TIMEOUT);
                    // A longer timeout is not another reason.
                    let is_late = matches!(error, Error::ConnectTimeout { .. });
                    let why = if is_late { error.label().to_owned() } else { error.to_string() };
                    self.office.is_troubled(&self.label, &why);
                    if self.wait.borrow_mut().refused(&why, Instant::now()) {
                        let hint = hint(&error);
                        tracing::warn!(peer = %self.label, %error, hint, "custody channel failed; retrying");
                    }
                    // A refusing peer will refuse again, so it is asked less often.
                    if !is_late {
                        tokio::time::sleep(REFUSED_RETRY_DELAY).await;
                    }
                }
            }
            // A peer that accepts and closes connections is not dialled without a pause.
            tokio::time::sleep_until(began + BEACON).await;
        }
    }

    fn destination(&self) -> Destination<'_> {
        self.upstream.destination(self.index, SocketAddr::from(([0, 0, 0, 0], 0)))
    }

    /// Runs one channel, from the first attempt to its end.
    async fn channel(&self, within: Duration) -> Result<&'static str, Error> {
        let destination = self.destination();
        let Some(addresses) = self.addresses(&destination).await? else { return Ok(UNWANTED_ANY_MORE) };
        let found = tokio::select! {
            found = self.find(&destination, &addresses) => found,
            () = self.unwanted() => return Ok(UNWANTED_ANY_MORE),
        };
        let fault = |source| Error::Connect { peer: self.label.clone(), source: Arc::new(source) };
        let pool = Rc::<Pool>::default();
        let deadline = Instant::now() + within;
        let late =
            || Error::ConnectTimeout { peer: self.label.clone(), missing: "open a channel of custody", after: within };
        let mut path = None;
        let begun = match found {
            Found::Quic(quic) => {
                let begin = async {
                    let lease = pool.adopt_quic(&self.worker, &self.spec(), quic, deadline).await?;
                    self.send_request(&pool, &destination, lease).await
                };
                tokio::time::timeout_at(deadline, begin).await.map_err(|_| late())?
            }
            Found::Tcp(tcp) => {
                bound_backoff(&tcp);
                let path = path.insert(Path::new(AckMonitor::of(&tcp).map_err(fault)?));
                let begin = async {
                    let io = match destination.tls {
                        Some(tls) => tls::connect(tls.config.clone(), &tls.name, tcp).await.map_err(fault)?,
                        None => Io::Plain(tcp),
                    };
                    let spec = ConnectSpec { protocol: UpstreamProtocol::H2, ..self.spec() };
                    let lease = pool.adopt(&self.worker, &spec, io, deadline).await?;
                    self.send_request(&pool, &destination, lease).await
                };
                tokio::select! {
                    begun = tokio::time::timeout_at(deadline, begin) => begun.map_err(|_| late())?,
                    () = path.darkness() => return Ok("the path is down again"),
                }
            }
        };
        count(&self.worker, &destination, begun.is_ok());
        let (mut stream, connection) = begun?;
        let is_fallback = path.is_some() && self.quic.is_some();
        if self.is_fallback.replace(is_fallback) != is_fallback {
            match is_fallback {
                true => tracing::info!(peer = %self.label, "QUIC is blocked; custody uses HTTP/2"),
                false => tracing::info!(peer = %self.label, "custody uses QUIC again"),
            }
        }
        if self.wait.borrow_mut().up() {
            tracing::info!(peer = %self.label, "custody channel up; exchanges continue");
        }
        let why = self.carry(&mut stream, path.as_mut()).await;
        stream.abort();
        drop(stream);
        connection.end();
        Ok(why)
    }

    /// Resolves the endpoint; `None` if the channel is no longer wanted.
    async fn addresses(&self, destination: &Destination<'_>) -> Result<Option<Vec<IpAddr>>, Error> {
        loop {
            match addresses(&self.worker, destination.host, destination.reach).await {
                Ok(addresses) => {
                    // All attempts use the addresses resolved here. So this waits for both address families: only one
                    // of them may work.
                    let late = tokio::time::timeout(RESOLVE_RETRY_DELAY, addresses.late()).await.unwrap_or_default();
                    return Ok(Some([addresses.now(), &late].concat()));
                }
                Err(error) if !self.office.is_wanted(&self.label) => return Err(error),
                Err(error) => {
                    self.failed(&error.to_string());
                    self.log_state();
                    tokio::time::sleep(RESOLVE_RETRY_DELAY).await;
                }
            }
        }
    }

    /// Ready when the link is expected to come up, if that is known.
    async fn expected(&self) {
        let next = match &self.upstream.config.contact_plan {
            Some(plan) => Some(Instant::now() + plan.wait(since_1970())),
            None => self.contact.borrow().next(Instant::now()),
        };
        match next {
            Some(next) => tokio::time::sleep_until(next).await,
            None => std::future::pending().await,
        }
    }

    /// Ready when no exchange needs the channel. Meanwhile writes the log lines that are due.
    async fn unwanted(&self) {
        let mut look = tokio::time::interval(UNWANTED_POLL_INTERVAL);
        while self.office.is_wanted(&self.label) {
            self.log_state();
            look.tick().await;
        }
        self.wait.borrow_mut().unwanted();
    }

    /// Handles a failed attempt. There are fifty a second, so each reason counts once.
    fn failed(&self, why: &str) {
        if self.wait.borrow_mut().failed(why) {
            self.office.is_troubled(&self.label, why);
            count(&self.worker, &self.destination(), false);
            tracing::debug!(peer = %self.label, why, "attempts to open a channel of custody fail");
        }
    }

    /// Handles an attempt that failed with an error of the kernel or of TLS. A timeout is not counted, because the link
    /// may just be down.
    fn failed_by(&self, error: &io::Error) {
        if error.kind() != io::ErrorKind::TimedOut {
            let text = error.to_string();
            self.failed(text.split(" (os error").next().unwrap_or_default());
        }
    }

    fn log_state(&self) {
        let (peer, exchanges) = (&self.label, self.office.waiting(&self.label));
        match self.wait.borrow_mut().due(Instant::now(), exchanges) {
            None => {}
            Some(LogEvent::No(error)) => tracing::warn!(
                %peer, %error, exchanges,
                "custody channel refused; exchanges wait. Check that the node runs, listens at this port, and is reachable"
            ),
            Some(LogEvent::Silence) => tracing::info!(
                %peer, exchanges,
                "no response to custody channel attempts; exchanges wait until the link is up. If the link is up, check for a firewall that drops packets"
            ),
        }
    }

    /// Dials until an attempt succeeds. For an `h3` upstream it dials QUIC and TCP in parallel, and uses TCP only if
    /// QUIC is still unanswered `HEAD_START` after TCP connected.
    async fn find(&self, destination: &Destination<'_>, addresses: &[IpAddr]) -> Found {
        let by_tcp = async {
            let dial = || {
                let failed = |error: &_| self.failed_by(error);
                dial::until_answered(addresses, destination.port, (BEACON, ATTEMPT_TIMEOUT), failed)
            };
            let began = Instant::now();
            let tcp = tokio::select! {
                tcp = dial() => tcp,
                // An attempt at the expected time, and from then on in the usual interval.
                tcp = async { self.expected().await; dial().await } => tcp,
            };
            if began.elapsed() > OUTAGE_AFTER {
                self.contact.borrow_mut().came(Instant::now());
            }
            if self.quic.is_some() {
                tokio::time::sleep(HEAD_START).await;
            }
            Found::Tcp(tcp)
        };
        let Some((config, name)) = self.quic.as_ref().zip(destination.tls.map(|tls| tls.name.clone())) else {
            return by_tcp.await;
        };
        let attempt = |ip: IpAddr| {
            let (endpoint, config, name) = (self.worker.quic_client(ip.is_ipv4()), config.clone(), name.clone());
            let address = SocketAddr::new(ip, destination.port);
            async move { quic::connect(&endpoint?, config, address, &name).await }
        };
        tokio::select! {
            quic = dial::until_one_is(addresses, (QUIC_BEACON, ATTEMPT_TIMEOUT), attempt, |error| self.failed_by(error)) => Found::Quic(quic),
            found = by_tcp => {
                self.worker.shared.metrics.quic_fallbacks.inc();
                found
            }
        }
    }

    fn spec(&self) -> ConnectSpec<'_> {
        self.upstream.spec(self.index, SocketAddr::from(([0, 0, 0, 0], 0)), ATTEMPT_TIMEOUT, true)
    }

    async fn send_request(
        &self,
        pool: &Rc<Pool>,
        destination: &Destination<'_>,
        lease: Lease,
    ) -> Result<(ByteStream, Rc<hermes_outbound::outbound::pool::SharedConnection>), Error> {
        let connection = lease.connection.clone();
        if !connection.takes_extended_connect() {
            return Err(Error::Incapable {
                peer: self.label.clone(),
                reason: "does not offer extended CONNECT (RFC 8441)",
            });
        }
        let context = ExchangeContext {
            worker: self.worker.outbound.clone(),
            pool: pool.clone(),
            peer: self.label.clone(),
            shareable: false,
            session: None,
            in_flight: None,
        };
        let mut request = Request::new(());
        *request.method_mut() = Method::CONNECT;
        request.extensions_mut().insert(::h2::ext::Protocol::from(wire::PROTOCOL));
        *request.uri_mut() = uri(destination).map_err(Error::Internal)?;
        if let Ok(line) = HeaderValue::from_str(&self.label) {
            request.headers_mut().insert(PATH_NAME, line);
        }
        if let Some(plan) = &self.upstream.config.contact_plan {
            contact_plan::write_header(plan, request.headers_mut());
        }
        let (response, send, lease, datagrams) = exchange::open(lease, request, &context, None, true).await?;
        if !response.status().is_success() {
            return Err(Error::Refused { peer: self.label.clone(), status: response.status() });
        }
        let stream = ByteStream::multiplexed(response.into_body(), send, Some(Box::new(TunnelLease::new(lease, None))));
        Ok((stream.with_datagrams(datagrams), connection))
    }

    /// Runs a channel until its path is down, it closes, or it was unwanted for long. A QUIC connection survives
    /// outages and has no `path`.
    async fn carry(&self, stream: &mut ByteStream, mut path: Option<&mut Path>) -> &'static str {
        let plan = self.upstream.config.contact_plan;
        let link = Link::dialled(stream, plan, self.contact.clone());
        // The neighbour cannot begin exchanges on a channel that this node dialled.
        let (mut channel, _) = Channel::begin(self.office.clone(), self.label.clone(), link);
        let mut look = tokio::time::interval(BEACON);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut heard = 0;
        let (mut wanted_at, mut asked_at) = (Instant::now(), Instant::now());
        loop {
            let refused = |id| {
                self.office.fail(id, 501, "nothing is taken by a channel that this node has dialled");
                self.office.detach(id);
            };
            tokio::select! {
                biased;
                now = look.tick() => {
                    let (is_dark, is_owed) = path.as_mut().map_or((false, false), |path| path.state());
                    if is_dark {
                        return "the path is down";
                    }
                    if self.office.is_wanted(&self.label) {
                        wanted_at = now;
                    } else if now - wanted_at >= UNWANTED_CHANNEL_TIMEOUT {
                        return UNWANTED_ANY_MORE;
                    }
                    let pause = if wanted_at == now { BEACON } else { UNWANTED_POLL_INTERVAL };
                    // Without traffic in either direction, an outage would not be noticed. QUIC must notice one only
                    // while the channel is wanted.
                    let is_asked = wanted_at == now || path.is_some();
                    if is_asked && !is_owed && channel.heard == heard && now - asked_at >= pause {
                        asked_at = now;
                        channel.owes_ping = true;
                    }
                    heard = channel.heard;
                }
                why = poll_fn(|cx| channel.poll(cx, stream, refused)) => return why,
            }
        }
    }
}

/// The remedy for an error, for the log.
fn hint(error: &Error) -> &'static str {
    match error {
        Error::Refused { status, .. } if *status == StatusCode::FORBIDDEN => {
            "the peer does not trust this node: give both an `identity`, or list this node's address in `trust` of the peer's listener"
        }
        Error::Connect { .. } | Error::Incapable { .. } => {
            "check that the peer is a Hermes node and that each node trusts the other's certificate (`identity`, `ca`)"
        }
        _ => "see the log of that node",
    }
}

/// The upstream's QUIC configuration, with an idle timeout that survives outages.
fn quic_config(worker: &Worker, upstream: &UpstreamState) -> Option<quic::ClientConfig> {
    let tls = upstream.tls.as_ref().filter(|_| upstream.config.protocol == UpstreamProtocol::H3)?;
    let bounds = kept_bounds(&worker.generation().snapshot.limits, QUIC_IDLE_TIMEOUT, None);
    let config = quic::client_config(&tls::with_alpn(&tls.config, quic::ALPN), bounds);
    config.inspect_err(|error| tracing::error!(upstream = %upstream.config.name, %error, "no QUIC for custody")).ok()
}

fn uri(destination: &Destination<'_>) -> Result<Uri, String> {
    let host = match destination.host.parse::<IpAddr>() {
        Ok(IpAddr::V6(ip)) => format!("[{ip}]"),
        _ => destination.host.to_owned(),
    };
    let scheme = if destination.tls.is_some() { "https" } else { "http" };
    let uri =
        Uri::builder().scheme(scheme).authority(format!("{host}:{}", destination.port)).path_and_query(wire::PATH);
    uri.build().map_err(|error| error.to_string())
}
