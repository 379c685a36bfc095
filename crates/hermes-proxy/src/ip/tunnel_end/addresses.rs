//! The address and route capsules of a CONNECT-IP tunnel (RFC 9484, section 4.7).
//!
//! In: the peer's capsules. Out: at the assigning end, the permitted addresses, claimed at the device and routed into
//! it; at the requesting end, the sources and destinations that packets may have. Never: a packet.

use std::collections::HashSet;
use std::net::IpAddr;

use bytes::{Bytes, BytesMut};
use hermes_model::snapshot::Gateway;
use hermes_wire::connect_ip::{self, Address, ConnectIpError, Prefix, Route};
use ipnet::IpNet;

use super::{End, FIRST_ASK, Side, prefix_of};
use crate::ip::link::Link;
use hermes_ip::address_owner::Owner;
use hermes_ip::address_translation::AddressTranslation;
use hermes_ip::claims::ClaimError;
use hermes_ip::leases::withheld;
use hermes_transport::runtime::WorkerContext;

/// The limit of addresses in one session.
const MAX_ADDRESSES: usize = 64;
/// The limit of unsent refusals; with the addresses, they fit one capsule.
const MAX_UNSENT_REFUSALS: usize = connect_ip::MAX_ENTRIES - MAX_ADDRESSES;
/// The limit of free addresses to try for one request, if other sessions take them first.
const MAX_ADDRESS_ATTEMPTS: usize = 8;

impl End {
    /// Handles a capsule of the peer.
    pub(super) fn receive(&mut self, worker: &WorkerContext, kind: u64, payload: Bytes) -> Result<(), ConnectIpError> {
        match kind {
            connect_ip::ADDRESS_REQUEST => {
                let wanted = connect_ip::parse_address_request(payload)?;
                self.assign(&wanted);
            }
            connect_ip::ADDRESS_ASSIGN => {
                let assigned = connect_ip::parse_address_assign(payload)?;
                self.take_assigned(worker, &assigned);
            }
            connect_ip::ROUTE_ADVERTISEMENT => {
                let routes = connect_ip::parse_route_advertisement(payload)?;
                if let Side::Asks { network, .. } = self.side {
                    self.rules.there = narrowed(&routes, network);
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Sets the source addresses that the peer assigned. They may differ from those of the link.
    fn take_assigned(&mut self, worker: &WorkerContext, assigned: &[Address]) {
        let Side::Asks { network, wanted, answered, .. } = &mut self.side else { return };
        let is_first = !std::mem::replace(answered, true);
        if let Link::Device { local, .. } = &self.link
            && is_first
        {
            local.device.answered.send_modify(|count| *count += 1);
        }
        let given: Vec<&Address> =
            assigned.iter().filter(|address| !address.prefix.address().is_unspecified()).collect();
        self.inner = given.iter().filter_map(|given| AddressTranslation::instead(given, wanted)).collect();
        let within = given.iter().flat_map(|given| wanted.iter().filter_map(|own| narrower(own.prefix, given.prefix)));
        let others = self.inner.iter().map(|inner| Prefix::of(inner.asked));
        self.rules.here = within.chain(others).map(Route::to).collect();
        let lacks = self.rules.here.is_empty() && !wanted.is_empty();
        if !lacks && self.asks_again.take().is_some() {
            tracing::info!(link = %self.link.name(), %network, "the far end assigns an address by now");
        }
        if lacks && self.asks_again.is_none() {
            self.asks_again = Some((2 * FIRST_ASK, Box::pin(tokio::time::sleep(FIRST_ASK))));
        }
        if lacks && let Some(more) = self.unassigned.happened(worker.now()) {
            let asked: Vec<String> = wanted.iter().map(|wanted| wanted.prefix.to_string()).collect();
            let by = self.session.as_ref().and_then(|session| session.peer.borrow().clone());
            tracing::warn!(
                link = %self.link.name(), %network, asked = %asked.join(", "), by = %by.as_deref().unwrap_or_default(), more,
                "the upstream end assigns none of the requested addresses and accepts no packet. Its log has the reason. \
                 Request a free address of `assign` of its route, or add this one there. The request is repeated"
            );
        }
    }

    /// Answers a request for addresses; earlier assignments stay. A refusal is repeated until it was sent, and uses no
    /// slot.
    fn assign(&mut self, wanted: &[Address]) {
        let unheard = self.refused.len();
        for Address { request, prefix } in wanted {
            let before = self.assigned.iter().position(|before| before.request == *request);
            let before = before.map(|at| self.assigned.remove(at));
            let is_any = |prefix: &Prefix| prefix.address().is_unspecified();
            let same_version = |other: &Prefix| other.address().is_ipv4() == prefix.address().is_ipv4();
            if let Some(before) = before.filter(|before| is_any(prefix) && same_version(&before.prefix)) {
                // The request has an address already.
                self.assigned.push(before);
                continue;
            }
            // A client must not cause more searches than it can get addresses.
            let has_room = self.assigned.len() < MAX_ADDRESSES && self.refused.len() < unheard + MAX_ADDRESSES;
            match if has_room { self.assign_requested(*prefix) } else { None } {
                Some(prefix) => {
                    // The same address requested again, under another ID.
                    self.assigned.retain(|before| before.prefix != prefix);
                    self.assigned.push(Address { request: *request, prefix });
                }
                None => self.refused.push(Address { request: *request, prefix: nothing(*prefix) }),
            }
        }
        let too_many = self.refused.len().saturating_sub(MAX_UNSENT_REFUSALS);
        self.refused.drain(..too_many);
        // A request ID that was used for something else releases its first address.
        let told: HashSet<Prefix> = self.assigned.iter().map(|address| address.prefix).collect();
        self.release_where(|claim| !told.contains(&prefix_of(claim.prefix)));
        self.rules.there = self.assigned.iter().map(|address| Route::to(address.prefix)).collect();
        let mut payload = BytesMut::new();
        connect_ip::put_addresses(&self.assigned, &mut payload);
        connect_ip::put_addresses(&self.refused, &mut payload);
        self.send_capsule(connect_ip::ADDRESS_ASSIGN, payload);
    }

    /// Assigns a prefix for the requested one; `None` if refused.
    fn assign_requested(&mut self, wanted: Prefix) -> Option<Prefix> {
        let Side::Gives { gateway, owner, .. } = &self.side else { return None };
        let (gateway, owner) = (gateway.clone(), owner.clone());
        let net = IpNet::new(wanted.address(), wanted.length()).ok()?;
        let net = if wanted.address().is_unspecified() {
            let find = |end: &mut Self| end.free(&gateway, &owner, net);
            let found = found_and_claimed(self, find, |end, free| end.take(&gateway, &owner, free));
            if found.is_none() {
                self.tell_lack(
                    &gateway,
                    &owner,
                    net,
                    "no free address of this IP version in the route's `assign`; widen it",
                );
            }
            found?
        } else {
            self.take(&gateway, &owner, net)?
        };
        if !self.lead(net) {
            self.release_where(|claim| claim.prefix == net);
            return None;
        }
        Some(prefix_of(net))
    }

    /// Claims the requested prefix. If its replies could not be distinguished from those of another session of the same
    /// owner, a free address is the substitute. The same request gets the same substitute again.
    fn take(&mut self, gateway: &Gateway, owner: &Owner, net: IpNet) -> Option<IpNet> {
        let Side::Gives { scope, .. } = self.side else { return None };
        let wish = (net, scope.asked);
        let before = match &self.link {
            Link::Device { local, .. } => local.device.instead(owner, wish),
            Link::Peer { .. } => None,
        };
        for net in before.into_iter().chain([net]) {
            if self.claims.iter().any(|claim| claim.prefix == net) {
                return Some(net);
            }
        }
        if self.claims.len() >= MAX_ADDRESSES {
            return None;
        }
        if let Some(reason) = self.withheld(gateway, net) {
            self.tell_refusal(gateway, owner, net, reason);
            return None;
        }
        if let Some(before) = before.filter(|before| self.withheld(gateway, *before).is_none())
            && self.claim(before, owner, false).is_ok()
        {
            return Some(before);
        }
        let mut claimed = self.claim(net, owner, false);
        if claimed == Err(ClaimError::Crosses) {
            let is_one = net.prefix_len() == net.max_prefix_len();
            let find = |end: &mut Self| if is_one { end.free(gateway, owner, net) } else { None };
            let claim = |end: &mut Self, free| end.claim(free, owner, false).is_ok().then_some(free);
            if let Some(free) = found_and_claimed(self, find, claim) {
                if let Link::Device { local, .. } = &self.link {
                    local.device.give_instead(free, wish);
                }
                return Some(free);
            }
            // Without a substitute, the newest session receives the replies.
            claimed = self.claim(net, owner, true);
        }
        if claimed.is_err() {
            self.tell_lack(
                gateway,
                owner,
                net,
                "another client has the address or had it until recently; request another one",
            );
        }
        claimed.ok().map(|()| net)
    }

    /// Reports that no address is free, or that the owner has reached its limit.
    fn tell_lack(&self, gateway: &Gateway, owner: &Owner, address: IpNet, reason: &str) {
        match &self.link {
            Link::Device { local, .. } if local.device.gives_no_more(owner) => local.shared.metrics.limit("addresses"),
            _ => self.tell_refusal(gateway, owner, address, reason),
        }
    }

    /// Logs a refusal, rate-limited because a client may request without end.
    fn tell_refusal(&self, gateway: &Gateway, owner: &Owner, address: IpNet, reason: &str) {
        let (Link::Device { local, .. }, Side::Gives { route, .. }) = (&self.link, &self.side) else { return };
        if let Some(more) = local.shared.refused_addresses.happened(local.shared.now()) {
            let device = &gateway.device;
            tracing::info!(%address, to = %owner, %route, %device, %reason, more, "address request refused");
        }
    }

    /// The reason why no client may have the address; `None` if one may. The document's `assign` decides. Without it,
    /// an address with another route on this host is withheld, because an assigned address is routed to the client for
    /// all programs of this host.
    fn withheld(&self, gateway: &Gateway, net: IpNet) -> Option<&'static str> {
        let Link::Device { local, .. } = &self.link else { return Some("the device does not exist") };
        withheld(gateway, net).or_else(|| {
            let leads_elsewhere = gateway.assign.is_empty() && local.device.net().leads_elsewhere(net.addr());
            leads_elsewhere.then_some(
                "this machine has a route of its own to that address; list addresses for clients in `assign`",
            )
        })
    }

    /// A free address, if the owner may have another one.
    fn free(&self, gateway: &Gateway, owner: &Owner, like: IpNet) -> Option<IpNet> {
        let Link::Device { local, .. } = &self.link else { return None };
        if local.device.gives_no_more(owner) {
            return None;
        }
        let fits = |pool: &&IpNet| pool.addr().is_ipv4() == like.addr().is_ipv4();
        let pools: Vec<IpNet> = gateway.assign.iter().filter(fits).copied().collect();
        local.device.find_free(&pools, &gateway.addresses, owner, local.shared.now())
    }
}

/// Finds and claims a free address. A client on another worker may take it in between, so this tries again.
fn found_and_claimed<T>(
    end: &mut T,
    find: impl Fn(&mut T) -> Option<IpNet>,
    claim: impl Fn(&mut T, IpNet) -> Option<IpNet>,
) -> Option<IpNet> {
    for _ in 0..MAX_ADDRESS_ATTEMPTS {
        let free = find(end)?;
        if let Some(claimed) = claim(end, free) {
            return Some(claimed);
        }
    }
    None
}

/// The address in the answer to a refused request (RFC 9484, section 4.7.1).
fn nothing(wanted: Prefix) -> Prefix {
    match wanted.address() {
        IpAddr::V4(_) => Prefix::of(IpAddr::from([0; 4])),
        IpAddr::V6(_) => Prefix::of(IpAddr::from([0; 16])),
    }
}

/// Returns the prefix that lies within the other prefix, or `None` if neither does.
fn narrower(one: Prefix, other: Prefix) -> Option<Prefix> {
    let (one, other) = if one.length() >= other.length() { (one, other) } else { (other, one) };
    other.contains(one.address()).then_some(one)
}

/// The intersection of the routes with the network.
fn narrowed(routes: &[Route], network: IpNet) -> Vec<Route> {
    let whole = Route::to(prefix_of(network));
    let within = routes.iter().filter(|route| route.start.is_ipv4() == whole.start.is_ipv4());
    within
        .map(|route| Route { start: route.start.max(whole.start), end: route.end.min(whole.end), ..*route })
        .filter(|route| route.start <= route.end)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Another thread may claim an address between the search and the claim; the test simulates that.
    #[test]
    fn another_free_address_is_looked_for_where_one_is_taken_first() {
        let free: Vec<IpNet> = (0..20).map(|last| IpNet::from(IpAddr::from([10, 20, 0, last]))).collect();
        let claimed = |others: usize| {
            let find = |found: &mut usize| {
                *found += 1;
                free.get(*found - 1).copied()
            };
            let claim = |_: &mut usize, net: IpNet| free[others..].contains(&net).then_some(net);
            found_and_claimed(&mut 0, find, claim)
        };
        assert_eq!(claimed(0), Some(free[0]));
        assert_eq!(claimed(3), Some(free[3]));
        // The search is bounded.
        assert_eq!(claimed(MAX_ADDRESS_ATTEMPTS), None);
    }
}
