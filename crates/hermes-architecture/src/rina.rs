//! RINA as an architecture: a flow is allocated by the name of an application at a neighbour of a DIF.
//!
//! In: sessions of routes with `terminate: {rina: ...}`, and the flows that neighbours request. Out: flows of IPC
//! processes (crate `hermes-rina`). Never: a flow that stands before the application at its far end has accepted it.
//!
//! As in the second paper (Section III), the instance of the destination carries the addresses of the connection:
//! `CLIENT>AUTHORITY`, such as `10.0.0.1:40000>10.0.1.2:80`.

mod process;
mod stream;

use std::cell::RefCell;
use std::collections::HashMap;
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use hermes_model::facts::Facts;
use hermes_model::snapshot::{DifMembership, HostPort, RinaNeighbour, Route};
use hermes_net::{host, udp};
use hermes_outbound::outbound::Outbound;
use hermes_outbound::outbound::connect::addresses;
use hermes_rina::{AppName, Config, FlowId, FlowRequest, MAX_MTU, MIN_MTU, Qos, Reason};
use hermes_transport::error::{Error, NO_CONNECTION};
use hermes_transport::runtime::session::SessionEntry;
use hermes_transport::stream::ByteStream;

pub use self::process::IpcProcess;
use self::stream::FlowStream;
use crate::dial_target::client;
use crate::flow_requests::{Refusal, RequestedFlow};
use crate::{Architecture, Opening, has_destination};

/// The bytes that all flows of one process may have unsent, and unread.
const TOTAL_BYTES: usize = 64 << 20;

/// Identifies the process for a neighbour.
type ProcessKey = (DifMembership, SocketAddr);

/// The IPC processes through which a worker requests flows. Each neighbour has its own process and socket, so that the
/// PDU size is that of the path to it.
#[derive(Default)]
pub struct IpcProcesses {
    by_neighbour: RefCell<HashMap<ProcessKey, (u64, Weak<IpcProcess>)>>,
}

impl IpcProcesses {
    /// Returns the process for a neighbour. Starts one at the first use, and after files were loaded again.
    fn process(
        &self,
        outbound: &Rc<Outbound>,
        membership: &DifMembership,
        neighbour: SocketAddr,
    ) -> io::Result<Rc<IpcProcess>> {
        let generation = outbound.generation();
        let place = (membership.clone(), neighbour);
        let mut known = self.by_neighbour.borrow_mut();
        if let Some((number, process)) = known.get(&place)
            && (membership.key.is_none() || *number == generation.number)
            && let Some(process) = process.upgrade()
        {
            return Ok(process);
        }
        known.retain(|_, (_, process)| process.strong_count() > 0);
        let socket = udp::bind(match neighbour {
            SocketAddr::V4(_) => ([0; 4], 0).into(),
            SocketAddr::V6(_) => ([0u16; 8], 0).into(),
        })?;
        host::spare(&socket)?;
        let mtu = u16::try_from(udp::whole_payload(neighbour)?).unwrap_or(MAX_MTU);
        let key = membership.key.as_ref().and_then(|file| generation.file(file));
        if membership.key.is_some() && key.is_none() {
            return Err(io::Error::other("the key of the DIF was not loaded"));
        }
        let process = IpcProcess::start(outbound, socket, config(&membership.dif, key, mtu), false)?;
        known.insert(place, (generation.number, Rc::downgrade(&process)));
        Ok(process)
    }
}

/// Returns the configuration of an IPC process. `mtu` is the largest payload of its datagrams.
pub fn config(dif: &str, key: Option<&[u8]>, mtu: u16) -> Config {
    let mut config = Config::new(dif);
    config.key = key.map(<[u8]>::to_vec);
    config.mtu = mtu.clamp(MIN_MTU, MAX_MTU);
    (config.limits.total_send, config.limits.total_receive) = (TOTAL_BYTES, TOTAL_BYTES);
    config
}

/// RINA, as a route with `terminate: {rina: ...}` uses it.
pub(crate) struct Rina<'a> {
    pub(crate) outbound: &'a Rc<Outbound>,
    pub(crate) processes: &'a IpcProcesses,
    pub(crate) config: &'a RinaNeighbour,
    pub(crate) route: &'a Route,
}

impl Architecture for Rina<'_> {
    fn keyword(&self) -> &'static str {
        "rina"
    }

    fn reaches(&self, facts: &Facts) -> bool {
        has_destination(facts)
    }

    fn open<'a>(&'a self, entry: &'a SessionEntry) -> Opening<'a> {
        Box::pin(async move {
            let label: Arc<str> = Arc::from(format!("{}/{}", self.route.name, self.config.neighbour));
            *entry.peer.borrow_mut() = Some(label.clone());
            let within = self.route.timeout.connect;
            let late = |missing| Error::ConnectTimeout { peer: label.clone(), missing, after: within };
            let opened = tokio::time::timeout(within, self.allocate(entry, &label)).await;
            let stream = opened.map_err(|_| late(NO_CONNECTION))??;
            *entry.peer.borrow_mut() = Some(label);
            Ok(stream)
        })
    }
}

impl Rina<'_> {
    async fn allocate(&self, entry: &SessionEntry, label: &Arc<str>) -> Result<ByteStream, Error> {
        let target = &self.config.neighbour;
        let found = addresses(self.outbound, &target.host, None).await?;
        let first = found.now().first().copied();
        let late = if first.is_none() { found.late().await } else { Vec::new() };
        let address = first.or_else(|| late.first().copied());
        let address = address.ok_or_else(|| Error::Resolve(format!("{} has no address", target.host)))?;
        let neighbour = SocketAddr::new(address, target.port);
        let failed = |source| Error::no_connection(&self.outbound.shared.metrics, label, source);
        let process = self.processes.process(self.outbound, &self.config.membership, neighbour).map_err(failed)?;
        let request = self.names(&entry.facts);
        let flow = process.allocate(neighbour, request).map_err(|error| failed(io::Error::other(error)))?;
        let stream = FlowStream::new(process.clone(), flow);
        match poll_fn(|cx| process.poll_allocated(cx, flow)).await {
            Ok(()) => Ok(ByteStream::Boxed(Box::new(stream))),
            Err(reason) => Err(failed(refused(reason))),
        }
    }

    /// The names of a flow for a session.
    fn names(&self, facts: &Facts) -> FlowRequest {
        let process = self.config.application.as_deref().unwrap_or(facts.authority.host());
        let port = facts.authority.port().unwrap_or_default();
        let destination = HostPort { host: Arc::from(facts.authority.host()), port };
        FlowRequest {
            source: AppName::default(),
            destination: AppName {
                process: process.to_owned(),
                instance: format!("{}{SEPARATOR}{destination}", client(facts)),
            },
            qos: Qos::Reliable,
        }
    }
}

/// Separates client and destination in the name of an instance.
const SEPARATOR: char = '>';

/// The error of a request that failed.
fn refused(reason: Option<Reason>) -> io::Error {
    let kind = match reason {
        Some(Reason::Refused | Reason::NotFound | Reason::Policy) => io::ErrorKind::ConnectionRefused,
        Some(Reason::Timeout) => io::ErrorKind::TimedOut,
        Some(Reason::Unreachable | Reason::Released | Reason::Restarted) => io::ErrorKind::HostUnreachable,
        _ => io::ErrorKind::Other,
    };
    let text = reason.map_or_else(|| "the flow has ended".to_owned(), |reason| reason.to_string());
    io::Error::new(kind, text)
}

/// A flow that a neighbour requests.
pub struct RequestedRinaFlow {
    process: Rc<IpcProcess>,
    flow: FlowId,
    neighbour: SocketAddr,
    destination: AppName,
    is_decided: bool,
}

impl RequestedRinaFlow {
    /// Waits for the next flow that a neighbour of this process requests.
    pub async fn next(process: &Rc<IpcProcess>) -> Self {
        let (flow, neighbour, request) = poll_fn(|cx| process.poll_requested(cx)).await;
        let process = process.clone();
        Self { process, flow, neighbour, destination: request.destination, is_decided: false }
    }

    /// The address of the neighbour.
    pub fn neighbour(&self) -> SocketAddr {
        self.neighbour
    }

    /// The address of the client, as the instance has it.
    pub fn client(&self) -> Option<SocketAddr> {
        self.destination.instance.split_once(SEPARATOR)?.0.parse().ok()
    }

    /// The authority that the flow is for: that of the instance, or the name of the process.
    pub fn authority(&self) -> &str {
        let instance = self.destination.instance.split_once(SEPARATOR);
        instance.map_or(&self.destination.process, |(_, authority)| authority)
    }
}

impl RequestedFlow for RequestedRinaFlow {
    async fn gone(&self) {
        poll_fn(|cx| self.process.poll_gone(cx, self.flow)).await;
    }

    async fn accept(mut self) -> Option<ByteStream> {
        self.is_decided = true;
        let stream = FlowStream::new(self.process.clone(), self.flow);
        self.process.accept(self.flow).then(|| ByteStream::Boxed(Box::new(stream)))
    }

    fn refuse(mut self, refusal: Refusal) {
        self.is_decided = true;
        self.process.refuse(
            self.flow,
            match refusal {
                Refusal::Refused => Reason::Refused,
                Refusal::Unreachable => Reason::Unreachable,
                Refusal::Silent => Reason::Timeout,
            },
        );
    }
}

impl Drop for RequestedRinaFlow {
    fn drop(&mut self) {
        if !self.is_decided {
            self.process.refuse(self.flow, Reason::Refused);
        }
    }
}
