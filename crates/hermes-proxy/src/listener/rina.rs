//! RINA listeners: neighbours of a DIF request flows over UDP.
//!
//! In: a socket of this worker. Out: a session for each requested flow, CONNECT to the authority that the flow's names
//! contain. The flow is accepted when the far end of the session has accepted. Members of a DIF with a key may tell the
//! client's address. Never: an enrolment without the key, if the DIF has one.

use std::net::UdpSocket;
use std::rc::Rc;

use hermes_architecture::flow_requests::{Refusal, RequestedFlow};
use hermes_architecture::rina::{IpcProcess, RequestedRinaFlow, config};
use hermes_model::authority::Authority;
use hermes_model::facts::Kind;
use hermes_model::snapshot::{DifMembership, ListenerProtocol};
use hermes_rina::MAX_MTU;

use super::{CurrentListener, Ending, requested_flow};
use crate::request::Origin;
use crate::worker::Worker;
use hermes_transport::oneshot::Oneshot;
use hermes_transport::runtime::session::{ConnectionGuard, Stage};

/// The membership with which the IPC process of a listener was started. A change starts another process.
#[derive(PartialEq)]
struct Membership {
    config: DifMembership,
    key: Option<Vec<u8>>,
}

impl Membership {
    /// The current membership; `None` if the listener was removed or has another protocol now, and is about to end.
    fn of(worker: &Worker, known: &mut CurrentListener) -> Option<Self> {
        let (state, true) = known.current(worker)? else { return None };
        let ListenerProtocol::Rina(config) = &state.listener.protocol else { return None };
        let key = config.key.as_ref().and_then(|file| worker.generation().file(file).map(<[u8]>::to_vec));
        Some(Self { config: config.clone(), key })
    }

    /// Starts a process. `None`, with an error in the log, if it cannot start.
    fn start(&self, worker: &Rc<Worker>, socket: &UdpSocket, listener: &str) -> Option<Rc<IpcProcess>> {
        if self.config.key.is_some() && self.key.is_none() {
            tracing::error!(%listener, "the key of the DIF was not loaded; the listener accepts no flow");
            return None;
        }
        // The requester knows the path; the smaller PDU size of the two is used.
        let config = config(&self.config.dif, self.key.as_deref(), MAX_MTU);
        let started = socket.try_clone().and_then(|socket| IpcProcess::start(worker, socket, config, true));
        let failed = |error| tracing::error!(%listener, %error, "cannot start an IPC process; the listener is deaf");
        started.map_err(failed).ok()
    }
}

/// Serves the flows that neighbours request until the listener ends. Accepted flows continue after a close.
pub(super) async fn accept_all(
    worker: Rc<Worker>,
    socket: UdpSocket,
    mut known: CurrentListener,
    ending: Rc<Oneshot<Ending>>,
) {
    let mut running: Option<(Membership, Rc<IpcProcess>)> = None;
    loop {
        if let Some(membership) = Membership::of(&worker, &mut known)
            && running.as_ref().is_none_or(|(old, _)| *old != membership)
        {
            // Flows of the membership before end: its members may be others.
            if let Some((_, process)) = running.take() {
                process.stop();
            }
            // A failed start is repeated with the next document.
            running = membership.start(&worker, &socket, &known.name).map(|process| (membership, process));
        }
        let process = running.as_ref().map(|(_, process)| process);
        tokio::select! {
            flow = next(process) => take(&worker, &mut known, flow),
            () = worker.generation_set.notified() => {}
            how = ending.wait() => {
                match how {
                    Ending::Close => process.inspect(|process| process.close()),
                    // The next process does not know the flows.
                    Ending::HandOver => process.inspect(|process| process.stop()),
                };
                return;
            }
        }
    }
}

async fn next(process: Option<&Rc<IpcProcess>>) -> RequestedRinaFlow {
    match process {
        Some(process) => RequestedRinaFlow::next(process).await,
        None => std::future::pending().await,
    }
}

/// Begins the session of a requested flow.
fn take(worker: &Rc<Worker>, known: &mut CurrentListener, flow: RequestedRinaFlow) {
    let Some((state, _)) = known.current(worker) else { return };
    let trust = super::trust_by_address(&state.listener, flow.neighbour());
    let source = flow.client().filter(|_| trust.is_believed()).unwrap_or(flow.neighbour());
    let Some(guard) = ConnectionGuard::take(worker, state.listener.clone(), source, &trust) else {
        return flow.refuse(Refusal::Unreachable);
    };
    super::count_connection(worker, &guard.connection);
    let worker = worker.clone();
    worker.clone().spawn(async move {
        let connection = guard.connection.clone();
        connection.set_stage(&worker, Stage::Idle);
        if !connection.is_of(&worker, &trust, source) {
            return flow.refuse(Refusal::Unreachable);
        }
        let Ok(authority) = Authority::parse(flow.authority(), None) else {
            return flow.refuse(Refusal::Refused);
        };
        let origin = Origin { worker: &worker, listener: &connection.listener, source, trust: &trust, secure: false };
        let request = requested_flow::request(&origin, Kind::Tcp, &authority);
        tokio::select! {
            biased;
            () = Box::pin(requested_flow::serve(&worker, &connection, request, flow)) => {}
            reason = connection.kill.wait() => tracing::debug!(%source, reason, "a flow was closed"),
        }
        drop(guard);
    });
}
