//! The end of IP sessions at a device of this machine.
//!
//! In: an `ip` session and the gateway of its route. Out: an end of the tunnel, with the addresses that the session may
//! use. Never: a scope that the route does not allow.

use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;

use hermes_model::snapshot::{Gateway, ListenerProtocol, Route};
use hermes_wire::connect_ip::{self, Scope};
use http::StatusCode;
use ipnet::IpNet;
use tokio::time::Instant;

use crate::ip::{End, FAR_ENDS, LocalDevice, Owner};
use crate::worker::Worker;
use hermes_outbound::outbound::connect::addresses;
use hermes_transport::datagram::Port;
use hermes_transport::error::Error;
use hermes_transport::runtime::session::SessionEntry;

/// The end of an `ip` session at a device.
///
/// # Errors
/// The device is not ready in time, the session requests a scope that the route does not allow, or its name does not
/// resolve.
pub(crate) async fn open(
    worker: &Worker,
    entry: &SessionEntry,
    gateway: &Gateway,
    route: &Route,
) -> Result<Port, Error> {
    let facts = &entry.facts;
    *entry.peer.borrow_mut() = Some(Arc::from(format!("{}/{}", route.name, gateway.device)));
    let within = route.timeout.connect + FAR_ENDS;
    let late = |missing| Error::ConnectTimeout { peer: gateway.device.clone(), missing, after: within };
    let by = Instant::now() + within;
    let local = worker.devices.get_by(&gateway.device, by).await;
    let local =
        local.ok_or_else(|| late("open on this worker: another program deleted it, or its queue is unreadable"))?;
    // During a takeover, this process receives the device only after the far ends of its captures are open. A capture
    // whose far end is this device counts as open, since it would wait for itself.
    if !*local.device.reads.borrow()
        && let Some(captured) = capturing(worker, &facts.listener)
    {
        captured.device.answered.send_modify(|count| *count += 1);
    }
    if !local.device.is_read_by(by).await {
        return Err(late("come from the process before this one"));
    }
    if !local.device.net().is_ours() {
        // The next process assigns the addresses now.
        return Err(Error::Draining);
    }
    let owner = Owner::of(facts);
    let network = facts.network.or(facts.announced_network);
    let (network, inner) = match connect_ip::parse_path(facts.path.path()) {
        Ok(Some(Scope { target: connect_ip::Target::Name(name), .. })) => {
            named(worker, &name, network, gateway, route).await?
        }
        _ => (network, gateway.dnat),
    };
    let by = (&route.name, gateway);
    let end = End::giving(&local, owner, by, network, inner, facts.protocol).map_err(Error::Malformed)?;
    Ok(Port::Device(Box::new(end)))
}

/// The device that a listener captures from; `None` for other listeners.
fn capturing(worker: &Worker, listener: &str) -> Option<Rc<LocalDevice>> {
    match &worker.generation().listener(listener)?.protocol {
        ListenerProtocol::Tun(tun) => worker.devices.get(&tun.device),
        _ => None,
    }
}

/// The scope of a session to a name (RFC 9484, section 4.6), and the machine that receives its packets if that address
/// differs. The client learns the scope as a route. A node that captured packets for the name reported their address,
/// which becomes the scope; otherwise the machine's own address does.
async fn named(
    worker: &Worker,
    name: &str,
    told: Option<IpNet>,
    gateway: &Gateway,
    route: &Route,
) -> Result<(Option<IpNet>, Option<IpAddr>), Error> {
    let machine = match gateway.dnat {
        Some(inner) => inner,
        None => resolved(worker, name, told, route).await?,
    };
    let networks = &route.matcher.networks;
    if gateway.dnat.is_none() && !networks.is_empty() && !networks.iter().any(|network| network.contains(&machine)) {
        // Without this check, a client could use a route for any name by choosing the reported address.
        return Err(Error::Denied {
            status: StatusCode::FORBIDDEN,
            reason: format!("{name} leads to {machine}, and route {} is not for that", route.name),
            label: "destination_ip_prohibited",
        });
    }
    match told {
        Some(told) => Ok((Some(told), Some(machine))),
        None => Ok((Some(machine.into()), None)),
    }
}

/// The first address of a name in the IP version of the packets.
async fn resolved(worker: &Worker, name: &str, told: Option<IpNet>, route: &Route) -> Result<IpAddr, Error> {
    let within = route.timeout.connect;
    let found = tokio::time::timeout(within, addresses(worker, name, None)).await;
    let found = found.map_err(|_| Error::ConnectTimeout {
        peer: Arc::from(name),
        missing: "get an address",
        after: within,
    })??;
    let fits = |address: &IpAddr| told.is_none_or(|told| told.addr().is_ipv4() == address.is_ipv4());
    if let Some(machine) = found.now().iter().copied().find(fits) {
        return Ok(machine);
    }
    let late = tokio::time::timeout(within, found.late()).await.unwrap_or_default();
    let version = told.map_or("", |told| if told.addr().is_ipv4() { "v4" } else { "v6" });
    late.into_iter().find(fits).ok_or_else(|| Error::Resolve(format!("{name} has no IP{version} address")))
}
