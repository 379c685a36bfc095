//! The network architectures through which a node reaches others: TCP, NDN and RINA behind one interface.
//!
//! In: a session whose route leaves the overlay at this node. Out: a stream of bytes, or the content that a name has.
//! Never: a decision about a session.
//!
//! Each architecture is a file: `tcp`, `ndn` and `rina` implement [`Architecture`]; `udp` has the sockets of datagrams.
//! [`flow_requests`] is the other direction: flows that others request, and that are accepted only when the far end of
//! the session has accepted. The API is internal: it changes with the needs of the data plane.

pub mod dial_target;
pub mod flow_requests;
pub mod ndn;
pub mod race;
pub mod rina;
mod tcp;
mod udp;

use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;

use hermes_model::facts::{Facts, Kind};
use hermes_model::snapshot::{Action, Route, Terminate, TerminateKind};
use hermes_outbound::outbound::Outbound;
use hermes_transport::error::Error;
use hermes_transport::runtime::session::SessionEntry;
use hermes_transport::stream::ByteStream;

pub use self::udp::udp;

/// A flow that is being opened.
pub type Opening<'a> = Pin<Box<dyn Future<Output = Result<ByteStream, Error>> + 'a>>;

/// A network architecture, as one route uses it.
pub trait Architecture {
    /// The keyword of `terminate` in node documents.
    fn keyword(&self) -> &'static str;

    /// Whether it can open a flow for a session with these facts. `false` needs no attempt; `true` promises nothing.
    fn reaches(&self, facts: &Facts) -> bool;

    /// Opens a flow to the destination of a session. The flow stands when the future is ready: a client may then learn
    /// that it is connected (fate sharing). Dropping the future ends the attempt. The session names the peer when the
    /// attempt begins and when the flow stands.
    ///
    /// # Errors
    /// The destination refuses, is unreachable or does not answer within `timeout.connect` of the route.
    fn open<'a>(&'a self, entry: &'a SessionEntry) -> Opening<'a>;
}

/// The state that the architectures of a worker share.
pub struct Environment<'a> {
    /// The connections of the worker.
    pub outbound: &'a Rc<Outbound>,
    /// The IPC processes of the worker.
    pub processes: &'a rina::IpcProcesses,
    /// The results of the worker's races.
    pub standings: &'a race::Standings,
}

/// Returns the architecture that carries the bytes of a route's sessions. `None`: its action is another one.
pub fn of_route<'a>(environment: &Environment<'a>, route: &'a Route) -> Option<Box<dyn Architecture + 'a>> {
    of_action(environment, route, &route.action)
}

fn of_action<'a>(
    environment: &Environment<'a>,
    route: &'a Route,
    action: &'a Action,
) -> Option<Box<dyn Architecture + 'a>> {
    let outbound = environment.outbound;
    match action {
        Action::Race(all) => {
            let alternatives = all.iter().filter_map(|action| of_action(environment, route, action)).collect();
            Some(Box::new(race::Race { outbound, standings: environment.standings, alternatives, route }))
        }
        Action::Terminate(terminate @ Terminate { kind: TerminateKind::Tcp, .. }) => {
            Some(Box::new(tcp::Tcp { outbound, terminate, route }))
        }
        Action::Face(face) => Some(Box::new(ndn::face::Ndn { outbound, config: face, route })),
        Action::Rina(config) => {
            Some(Box::new(rina::Rina { outbound, processes: environment.processes, config, route }))
        }
        _ => None,
    }
}

/// Whether a session has a destination of its own: a `tcp` session with a port.
fn has_destination(facts: &Facts) -> bool {
    facts.kind == Kind::Tcp && facts.authority.port().is_some()
}
